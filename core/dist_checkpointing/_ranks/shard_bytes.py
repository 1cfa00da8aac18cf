"""The bytes of a shard: their number, their memory, and copies to and from memory for exchange.

A shard is sent as a 1-D uint8 tensor, because not every backend of torch.distributed supports every
dtype (gloo no float8, NCCL no complex numbers).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from core.arrays.box import boxes_of_flat_range
from core.dist_checkpointing._engine.float8 import dequantize, is_float8tensor
from core.dist_checkpointing.mapping import ShardedTensor


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
    return dequantize(tensor) if is_float8tensor(tensor) else tensor


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
