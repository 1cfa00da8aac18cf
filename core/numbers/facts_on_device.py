"""What the numbers of arrays look like, found out on a device; ``core.numbers.facts`` says what is looked for.

The device is asked for three numbers of each run: the smallest and the largest pattern as unsigned integers, and the
largest as signed ones. Only if these leave room for a NaN, an infinity or a huge number, elements are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.device.lane import Kernel, Tensor, lane_of

if TYPE_CHECKING:
    from core.device.device import Device
    from core.numbers.kinds import NumberKind

_SIGNED = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}
_NONE = (1 << 63) - 1
"""In place of the index of a first element, where there is none."""


@dataclass(frozen=True, slots=True)
class Extremes:
    """Of some patterns.

    Args:
        least, top: the smallest and the largest as unsigned integers.
        most: the largest as signed ones.
    """

    least: int
    top: int
    most: int


def extremes(device: Device, data: memoryview, kind: NumberKind) -> Extremes:
    """The extremes of a run of at least one element."""
    found = [
        _int64s(piece)
        for piece in lane_of(device).map_pieces((data,), extremes_kernel(kind.n_bytes), size=kind.n_bytes)
    ]
    half = 1 << (8 * kind.n_bytes - 1)
    return Extremes(
        least=min(int(low) for low, _, _ in found) + half,
        top=max(int(high) for _, high, _ in found) + half,
        most=max(int(most) for _, _, most in found),
    )


def extremes_kernel(n_bytes: int) -> Kernel:
    """Gives (least, top, most) of patterns of so many bytes; the first two less half of their range."""

    def kernel(data: Tensor) -> Tensor:
        import torch

        numbers = data.view(getattr(torch, _SIGNED[n_bytes]))
        low, high = (numbers ^ -(1 << (8 * n_bytes - 1))).aminmax()  # in the order of unsigned ones
        return torch.stack([low, high, numbers.amax()]).to(torch.int64)

    return kernel


def counts(device: Device, data: memoryview, kind: NumberKind) -> dict[str, tuple[int, int]]:
    """(how many, index of the first) of each sort of elements that there is, by the names of ``core.numbers.facts``."""
    size = kind.n_bytes * kind.n_parts
    found: dict[str, tuple[int, int]] = {}
    start = 0
    names = _sorts(kind)
    for piece in lane_of(device).map_pieces((data,), _counts(kind), size=size):
        *sums, n_elements = (int(number) for number in _int64s(piece))
        for name, n, first in zip(names, sums[::2], sums[1::2], strict=True):
            if n:
                before = found.get(name)
                found[name] = (n, start + first) if before is None else (before[0] + n, before[1])
        start += n_elements
    return found


def _sorts(kind: NumberKind) -> list[str]:
    names = ["nan"]
    if kind.first is not None and kind.has_infinity:
        names.append("infinite")
        if kind.huge is not None:
            names.append("huge")
    return names


def _counts(kind: NumberKind) -> Kernel:
    def kernel(data: Tensor) -> Tensor:
        import torch

        numbers = data.view(getattr(torch, _SIGNED[kind.n_bytes]))
        masks = _masks(numbers, kind)
        index = torch.arange(len(numbers) // kind.n_parts, device=data.device)
        sums = []
        for name in _sorts(kind):
            mask = masks[name].view(-1, kind.n_parts).any(dim=1)
            sums += [mask.sum(), torch.where(mask, index, _NONE).amin()]
        sums.append(torch.full((), len(index), dtype=torch.int64, device=data.device))
        return torch.stack(sums)

    return kernel


def _masks(numbers: Tensor, kind: NumberKind) -> dict[str, Tensor]:
    if kind.first is None:
        assert kind.n_bytes == 1 and kind.nan is not None
        return {"nan": numbers == kind.nan - 256}  # as a signed byte
    magnitudes = numbers & (1 << (8 * kind.n_bytes - 1)) - 1
    if not kind.has_infinity:
        return {"nan": magnitudes >= kind.first}
    found = {"nan": magnitudes > kind.first, "infinite": magnitudes == kind.first}
    if kind.huge is not None:
        found["huge"] = (magnitudes >= kind.huge) & (magnitudes < kind.first)
    return found


def _int64s(data: Any) -> Any:
    import numpy as np

    return data.view(np.int64)
