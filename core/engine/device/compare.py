"""Compare two buffers on a device, byte by byte."""

from __future__ import annotations

from typing import Any

from core.engine.device.device import COMPARE, Device, does
from core.engine.device.lane import Kernel, Tensor, lane_of
from core.values import dataclass

_NONE = (1 << 63) - 1
"""Stands for the index of the first differing element if none differs."""


@dataclass(frozen=True, slots=True)
class Differing:
    """The elements in which two buffers differ.

    Args:
        n: number of elements that differ.
        first: index of the first element that differs; None if none differs.
    """

    n: int
    first: int | None


def is_equal(device: Device | None, a: memoryview, b: memoryview) -> bool:
    """Return True if two buffers of the same length hold the same bytes."""
    if not does(device, COMPARE):
        return bytes(a) == bytes(b)  # views would be compared element by element, which is slow
    return count_differing(device, a, b, 1).n == 0


def count_differing(device: Device | None, a: memoryview, b: memoryview, size: int) -> Differing:
    """Count the elements in which two buffers of the same length differ.

    Args:
        size: size of an element, in bytes.

    Raises:
        CapacityError: the device is out of memory.
        WorkerError: the device failed otherwise.
    """
    import numpy as np

    # On the CPU. Bytes are compared, not values: a NaN equals itself, and -0.0 differs from 0.0.
    if device is None or not device.does(COMPARE):
        elements_a, elements_b = (np.frombuffer(data, "u1").reshape(-1, size) for data in (a, b))
        differs = (elements_a != elements_b).any(axis=1)
        n = int(differs.sum())
        return Differing(n, int(differs.argmax()) if n else None)
    # On the device, which returns three numbers per piece; pieces arrive in order.
    n, first, start = 0, None, 0
    for counts in lane_of(device).map_pieces((a, b), count_differing_kernel(size), size=size):
        n_in_piece, first_in_piece, n_elements = (int(number) for number in counts.view(np.int64))
        if n_in_piece and first is None:
            first = start + first_in_piece
        n += n_in_piece
        start += n_elements
    return Differing(n, first)


def count_differing_kernel(size: int) -> Kernel:
    """Return a kernel that compares two tensors of bytes.

    Args:
        size: size of an element, in bytes.

    Returns:
        A kernel that returns three numbers (int64): the number of elements that differ, the index
        of the first of them, and the number of elements compared.
    """

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        import torch

        differs = (a != b).view(-1, size).any(dim=1)
        index: Any = torch.arange(len(differs), device=a.device)
        first = torch.where(differs, index, _NONE).amin()
        return torch.stack([differs.sum(), first, torch.full_like(first, len(differs))])

    return kernel
