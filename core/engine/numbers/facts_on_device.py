"""Find NaN, infinities and constant values on a device, as ``numbers.facts`` defines them.

The device computes three numbers for each run: the smallest and the largest pattern as unsigned
integers, and the largest as signed ones. Only if these leave room for a NaN, an infinity or a huge
number are elements counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.engine.device.lane import Kernel, Tensor, lane_of
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.device.device import Device
    from core.engine.numbers.kinds import NumberKind

_SIGNED = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}
_NONE = (1 << 63) - 1
"""Index of the first element of a sort if there is none."""


@dataclass(frozen=True, slots=True)
class Extremes:
    """The extremes of some bit patterns.

    Args:
        least, top: the smallest and the largest pattern as unsigned integers.
        most: the largest pattern as a signed integer.
    """

    least: int
    top: int
    most: int


def find_extremes(device: Device, data: memoryview, kind: NumberKind) -> Extremes:
    """Return the extremes of a run of at least one element."""
    import numpy as np

    kernel = extremes_kernel(kind.n_bytes)
    pieces = [
        piece.view(np.int64)
        for piece in lane_of(device).map_pieces((data,), kernel, size=kind.n_bytes)
    ]
    # The kernel subtracts half the range from the unsigned extremes, to fit them into int64.
    half = 1 << (8 * kind.n_bytes - 1)
    return Extremes(
        least=min(int(low) for low, _, _ in pieces) + half,
        top=max(int(high) for _, high, _ in pieces) + half,
        most=max(int(most) for _, _, most in pieces),
    )


def extremes_kernel(n_bytes: int) -> Kernel:
    """Return a kernel that finds the extremes of patterns of ``n_bytes`` bytes.

    Returns:
        A kernel that computes ``least``, ``top`` and ``most`` of ``Extremes`` as int64; the first
        two reduced by half of their range.
    """

    def kernel(data: Tensor) -> Tensor:
        import torch

        numbers = data.view(getattr(torch, _SIGNED[n_bytes]))
        # With the sign bit flipped, signed integers have the order of unsigned ones.
        low, high = (numbers ^ -(1 << (8 * n_bytes - 1))).aminmax()
        return torch.stack([low, high, numbers.amax()]).to(torch.int64)

    return kernel


def count_on_device(
    device: Device, data: memoryview, kind: NumberKind
) -> dict[str, tuple[int, int]]:
    """Count NaN, infinite and huge elements of a run.

    Returns:
        Number of elements and index of the first one, by the field names of
        ``core.engine.numbers.facts.ValueFacts``; sorts without any element are omitted.
    """
    import numpy as np

    size = kind.n_bytes * kind.n_parts
    totals: dict[str, tuple[int, int]] = {}
    start = 0
    names = _sorts(kind)
    for piece in lane_of(device).map_pieces((data,), _count_kernel(kind), size=size):
        # The kernel returns (number, first index) for each sort, then the number of elements.
        *counts, n_elements = (int(number) for number in piece.view(np.int64))
        for name, n, first in zip(names, counts[::2], counts[1::2], strict=True):
            if n:
                total = totals.get(name)
                totals[name] = (n, start + first) if total is None else (total[0] + n, total[1])
        start += n_elements
    return totals


def _sorts(kind: NumberKind) -> list[str]:
    """Return the sorts of elements that a type can have, by the field names of ``ValueFacts``."""
    names = ["nan"]
    if kind.first is not None and kind.has_infinity:
        names.append("infinite")
        if kind.huge is not None:
            names.append("huge")
    return names


def _count_kernel(kind: NumberKind) -> Kernel:
    """Return a kernel that counts elements.

    Returns:
        A kernel that computes, for each of ``_sorts``, the number of elements and the index of the
        first one, and last the number of all elements.
    """

    def kernel(data: Tensor) -> Tensor:
        import torch

        numbers = data.view(getattr(torch, _SIGNED[kind.n_bytes]))
        masks = _masks(numbers, kind)
        index = torch.arange(len(numbers) // kind.n_parts, device=data.device)
        counts = []
        for name in _sorts(kind):
            mask = masks[name].view(-1, kind.n_parts).any(dim=1)
            # An index that is not masked is replaced by one that is greater than all others.
            counts += [mask.sum(), torch.where(mask, index, _NONE).amin()]
        counts.append(torch.full((), len(index), dtype=torch.int64, device=data.device))
        return torch.stack(counts)

    return kernel


def _masks(numbers: Tensor, kind: NumberKind) -> dict[str, Tensor]:
    """Return masks of the numbers of each sort, as ``numbers.facts`` does in numpy."""
    if kind.first is None:
        assert kind.n_bytes == 1 and kind.nan is not None
        return {"nan": numbers == kind.nan - 256}  # as a signed byte
    magnitudes = numbers & (1 << (8 * kind.n_bytes - 1)) - 1
    if not kind.has_infinity:
        return {"nan": magnitudes >= kind.first}
    masks = {"nan": magnitudes > kind.first, "infinite": magnitudes == kind.first}
    if kind.huge is not None:
        masks["huge"] = (magnitudes >= kind.huge) & (magnitudes < kind.first)
    return masks
