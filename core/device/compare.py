"""Comparing two buffers on a device, byte by byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core.device.device import COMPARE, Device, does
from core.device.lane import Kernel, Tensor, lane_of

_NONE = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Differing:
    """Elements in which two buffers differ.

    Args:
        n: how many.
        first: index of the first one; None without any.
    """

    n: int
    first: int | None


def is_equal(device: Device | None, one: memoryview, other: memoryview) -> bool:
    """Whether two buffers of one length hold the same bytes."""
    if not does(device, COMPARE):
        return bytes(one) == bytes(other)  # views would be compared element by element
    return differing(device, one, other, 1).n == 0


def differing(device: Device | None, one: memoryview, other: memoryview, size: int) -> Differing:
    """Where two buffers of one length differ.

    Args:
        size: bytes of an element.
    """
    import numpy as np

    if device is None or not device.does(COMPARE):
        rows = [np.frombuffer(data, "u1").reshape(-1, size) for data in (one, other)]
        differs = (rows[0] != rows[1]).any(axis=1)
        n = int(differs.sum())
        return Differing(n, int(differs.argmax()) if n else None)
    n, first, start = 0, None, 0
    for piece in lane_of(device).fold((one, other), differing_kernel(size), size=size):
        n_here, first_here, n_elements = (int(number) for number in piece.view(np.int64))
        if n_here and first is None:
            first = start + first_here
        n += n_here
        start += n_elements
    return Differing(n, first)


def differing_kernel(size: int) -> Kernel:
    """Gives (how many elements of so many bytes differ, index of the first, how many there are)."""

    def kernel(one: Tensor, other: Tensor) -> Tensor:
        import torch

        differs = (one != other).view(-1, size).any(dim=1)
        index: Any = torch.arange(len(differs), device=one.device)
        first = torch.where(differs, index, _NONE).amin()
        return torch.stack([differs.sum(), first, torch.full_like(first, len(differs))])

    return kernel
