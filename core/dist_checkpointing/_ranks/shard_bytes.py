"""The bytes of a shard: their number, their memory, and copies to and from memory for exchange.

A shard is sent as a 1-D uint8 tensor, because not every backend of torch.distributed supports every
dtype (gloo no float8, NCCL no complex numbers).

A ``Parcel`` is the unit in which a rank sends shards to others: a large one, or several small ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from core.arrays.box import boxes_of_flat_range
from core.dist_checkpointing._engine.torch_dtypes import dequantize_tensor, is_float8tensor
from core.dist_checkpointing.mapping import ShardedTensor
from core.dist_checkpointing.utils import _ShardId

PARCEL_BYTES = 4 << 20
"""Maximum size of several shards in one parcel; a message costs as much as about 1 MiB."""
LEAST_SLICE_BYTES = 256 << 10
"""Minimum size of a slice, unless its parcel is smaller."""
_ALIGNMENT = 16


def n_elements(tensor: ShardedTensor) -> int:
    """Return the number of elements of a shard's data.

    They are those of the flattened range if there is one, else of the local shape.
    """
    if tensor.flattened_range is not None:
        return int(tensor.flattened_range.stop - tensor.flattened_range.start)
    return int(torch.Size(tensor.local_shape).numel())


def is_empty_chunk(tensor: ShardedTensor) -> bool:
    """Return whether a shard is a part without elements of an uneven division.

    Its offset is that of the shard that follows, so its shard id may stand for that one.
    """
    return not tensor.has_regular_grid and not n_elements(tensor)


def n_bytes(tensor: ShardedTensor) -> int:
    """Return the size of a shard's data, in bytes."""
    return n_elements(tensor) * int(tensor.dtype.itemsize)


def with_nominal_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the dtype that it reports, dequantized if it is a Float8Tensor.

    The bytes of a Float8Tensor mean nothing without its scales.
    """
    return dequantize_tensor(tensor) if is_float8tensor(tensor) else tensor


def receive_buffer(tensor: ShardedTensor) -> torch.Tensor:
    """Return a tensor to receive a shard into: its data, allocated on the CPU if there is none.

    For a Float8Tensor it is a new plain tensor of the nominal dtype.
    """
    if tensor.data is None:
        tensor.init_data("cpu")
    data: Any = tensor.data
    return (
        torch.empty(data.shape, dtype=tensor.dtype, device=data.device)
        if is_float8tensor(data)
        else data
    )


def exchange_device(group: Any) -> torch.device:
    """Return the device whose memory the group's backend sends best.

    It is the current device of an accelerator that has a backend of its own (NCCL), else the CPU.
    """
    backends = (
        dict(part.split(":") for part in dist.get_backend_config(group).split(","))
        if dist.is_initialized()
        else {}
    )
    for device, backend in backends.items():
        if (
            device != "cpu"
            and backend != backends.get("cpu")
            and torch.get_device_module(device).is_available()
        ):
            return torch.device(device, torch.get_device_module(device).current_device())
    return torch.device("cpu")


def allocate_bytes(size: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised memory of ``size`` bytes."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def own_bytes(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Return a tensor's memory as bytes, without a copy.

    Returns:
        None if the values are not on the device, in C order and in one piece.
    """
    if (
        tensor is None
        or tensor.device != device
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return None
    # Contiguous says nothing about the strides of axes of extent 1, and view wants the last one to
    # be 1.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def copy_bytes(
    tensor: torch.Tensor, raw: torch.Tensor, start: int = 0, *, is_received: bool
) -> None:
    """Copy a range of a tensor's elements, in C order, from ``raw`` (if received) or to it.

    No more memory is needed, whatever the strides of the tensor are.

    Args:
        tensor: tensor on any device.
        raw: 1-D uint8, as many bytes as the range.
        start: first element of the range.
        is_received: write to the tensor; else to ``raw``.
    """
    elements = raw.view(tensor.dtype)
    for box in boxes_of_flat_range(tuple(tensor.shape), start, start + elements.numel()):
        part = tensor.detach()[tuple(map(slice, box.offset, box.end))]
        sent, elements = elements[: part.numel()].view(part.shape), elements[part.numel() :]
        if is_received:
            part.copy_(sent)
        else:
            sent.copy_(part)


class Parcel(NamedTuple):
    """Shards that are sent together.

    Args:
        main_rank: rank of the group that has loaded them.
        starts: byte offset of each shard in the parcel, aligned for every dtype.
        n_bytes: size of the parcel, gaps between the shards included.
    """

    main_rank: int
    starts: dict[_ShardId, int]
    n_bytes: int


def make_parcels(sizes: Mapping[_ShardId, int], main_rank: Mapping[_ShardId, int]) -> list[Parcel]:
    """Divide shards into parcels, the largest of each rank first.

    The result does not depend on the order of the arguments' items.

    Args:
        sizes: size of each shard, in bytes; empty shards are not sent.
        main_rank: rank of the group that has loaded each shard.
    """
    parcels: list[Parcel] = []
    not_empty = [shard for shard, size in sizes.items() if size]
    for shard in sorted(
        not_empty, key=lambda shard: (main_rank[shard], -sizes[shard], sort_key(shard))
    ):
        last = parcels[-1] if parcels else None
        start = _align(last.n_bytes) if last is not None else 0
        if (
            last is not None
            and last.main_rank == main_rank[shard]
            and start + sizes[shard] <= PARCEL_BYTES
        ):
            last.starts[shard] = start
            parcels[-1] = last._replace(n_bytes=start + sizes[shard])
        else:
            parcels.append(Parcel(main_rank[shard], {shard: 0}, sizes[shard]))
    return parcels


def sort_key(shard: Any) -> Any:
    """Return a shard's id in a form that can be ordered.

    None, in place of a flattened range, comes before all ranges.
    """
    return (
        tuple(() if part is None else part for part in shard) if isinstance(shard, tuple) else shard
    )


def row_bytes(row: Iterable[Parcel | None]) -> int:
    """Return the size of the largest parcel of a row, in bytes.

    It is rounded up, so that data of any dtype may begin after it.
    """
    return max(_align(parcel.n_bytes) for parcel in row if parcel is not None)


def slice_bytes(width: int, n_slices: int) -> int:
    """Return the size of slices of which ``n_slices`` take about as much memory as one parcel.

    Args:
        width: size of the largest parcel, in bytes.
        n_slices: number of slices that exist at a time.
    """
    return min(_align(width), max(LEAST_SLICE_BYTES, _align(width // n_slices)))


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def bytes_in_place(
    parcel: Parcel, tensors: Mapping[_ShardId, torch.Tensor], device: torch.device
) -> torch.Tensor | None:
    """Return the bytes of a parcel in the memory of its tensor; None if they have to be copied.

    They have to be if the parcel has several shards, or its tensor is not among the tensors, not on
    the device or not in one piece.
    """
    if len(parcel.starts) > 1:
        return None
    (shard,) = parcel.starts
    return own_bytes(tensors.get(shard), device)


def pack_into(
    parcel: Parcel, tensors: Mapping[_ShardId, torch.Tensor], raw: torch.Tensor, start: int = 0
) -> None:
    """Copy the bytes of a parcel from ``start`` on to ``raw``, 1-D uint8, until that is full."""
    for tensor, element, part in _parts(parcel, tensors, raw, start):
        copy_bytes(tensor, part, element, is_received=False)


def unpack(
    parcel: Parcel, tensors: Mapping[_ShardId, torch.Tensor], raw: torch.Tensor, start: int = 0
) -> None:
    """Copy ``raw``, 1-D uint8, to the tensors of a parcel, from its byte ``start`` on.

    Shards of the parcel that are not among the tensors are passed over.
    """
    for tensor, element, part in _parts(parcel, tensors, raw, start):
        copy_bytes(tensor, part, element, is_received=True)


def _parts(
    parcel: Parcel, tensors: Mapping[_ShardId, torch.Tensor], raw: torch.Tensor, start: int
) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
    """Yield the tensors that have bytes in a slice of a parcel.

    Args:
        parcel: the parcel.
        tensors: tensors of its shards, of some at least.
        raw: the slice, 1-D uint8.
        start: first byte of the slice in the parcel, aligned.

    Yields:
        A tensor, the first of its elements in the slice, and the part of ``raw`` for them.
    """
    for shard, shard_start in parcel.starts.items():
        if shard in tensors:
            tensor = tensors[shard]
            itemsize = tensor.dtype.itemsize
            first = max(shard_start, start)
            stop = min(shard_start + tensor.numel() * itemsize, start + raw.numel())
            if first < stop:
                yield tensor, (first - shard_start) // itemsize, raw[first - start : stop - start]
