"""The bytes of a shard: how many, where they lie, and how they get in and out of memory that ranks can exchange.

A shard travels as a 1-D uint8 tensor, because not every backend of torch.distributed moves every dtype (gloo no float8,
NCCL no complex numbers).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from core.dist_checkpointing._engine.float8 import dequantized, is_float8tensor
from core.dist_checkpointing.mapping import ShardedTensor


def n_elements(tensor: ShardedTensor) -> int:
    """Elements of the data of a shard: those of its flattened range where it has one, else of its local shape."""
    if tensor.flattened_range is not None:
        return int(tensor.flattened_range.stop - tensor.flattened_range.start)
    return int(torch.Size(tensor.local_shape).numel())


def n_bytes(tensor: ShardedTensor) -> int:
    """Bytes of the data of a shard."""
    return n_elements(tensor) * int(tensor.dtype.itemsize)


def nominal(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, of the dtype that its values stand for: a Float8Tensor's bytes mean nothing without its scales."""
    return dequantized(tensor) if is_float8tensor(tensor) else tensor


def destination(tensor: ShardedTensor) -> torch.Tensor:
    """Memory that a shard can be received into: its data, allocated on the CPU where there is none.

    A Float8Tensor is replaced by a plain one of the nominal dtype.
    """
    if tensor.data is None:
        tensor.init_data("cpu")
    data: Any = tensor.data
    return torch.empty(data.shape, dtype=tensor.dtype, device=data.device) if is_float8tensor(data) else data


def exchange_device(group: Any) -> torch.device:
    """The device whose memory the group's backend moves best.

    That of an accelerator which has a backend of its own (NCCL), in which case it is the current one; else the CPU.
    """
    backends = (
        dict(part.split(":") for part in dist.get_backend_config(group).split(",")) if dist.is_initialized() else {}
    )
    for device, backend in backends.items():
        if device != "cpu" and backend != backends.get("cpu") and torch.get_device_module(device).is_available():
            return torch.device(device, torch.get_device_module(device).current_device())
    return torch.device("cpu")


def buffer(size: int, device: torch.device) -> torch.Tensor:
    """Memory for ``size`` bytes."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def own_bytes(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """A tensor's memory as bytes; None if its values do not lie on the device, in C order and in one piece."""
    if tensor is None or tensor.device != device or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    # Contiguous says nothing about the strides of axes of extent 1, and view wants the last one to be 1.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def copy_bytes(tensor: torch.Tensor, raw: torch.Tensor, *, is_received: bool) -> None:
    """Copies a tensor's elements, in C order, from the beginning of ``raw`` (if received) or to it."""
    elements = raw[: tensor.numel() * tensor.dtype.itemsize].view(tensor.dtype).view(tensor.shape)
    if is_received:
        tensor.detach().copy_(elements)
    else:
        elements.copy_(tensor.detach())
