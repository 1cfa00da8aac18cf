"""Arrange the differences of two checkpoints by layer and module."""

from __future__ import annotations

import re
from dataclasses import dataclass

from core.diff.result import KINDS, Diff, TensorDiff


@dataclass(frozen=True, slots=True)
class HeatCell:
    """How much the tensors of one module differ in one layer.

    Args:
        keys: the tensors.
        kind: the most serious of their results (``core.diff.result.KINDS``).
        relative: largest relative difference; None if the values were not compared or cannot be.
        n_different: number of different elements.
    """

    keys: tuple[str, ...]
    kind: str
    relative: float | None
    n_different: int


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The differences of two checkpoints.

    Args:
        layers: labels of the rows, such as ``layer 0``, and ``others`` for what is in no layer.
        modules: labels of the columns, such as ``self_attention.linear_qkv.weight``.
        cells: a row for each layer, with None where the layer lacks the module.
    """

    layers: tuple[str, ...]
    modules: tuple[str, ...]
    cells: tuple[tuple[HeatCell | None, ...], ...]


_LAYER = re.compile(r"(.*\.)?layers\.(\d+)\.(.*)")


def heat_map(result: Diff) -> HeatMap:
    """Arrange the results by layer and module, the layers by number."""
    tensors: dict[tuple[int | None, str], list[TensorDiff]] = {}
    for tensor in result.tensors:
        match = _LAYER.fullmatch(tensor.key)
        place = (None, tensor.key) if match is None else (int(match[2]), match[3])
        tensors.setdefault(place, []).append(tensor)
    layers = sorted({layer for layer, _ in tensors if layer is not None})
    rows = [*layers, *([None] if any(layer is None for layer, _ in tensors) else [])]
    modules = tuple(dict.fromkeys(module for _, module in tensors))
    return HeatMap(
        tuple("others" if layer is None else f"layer {layer}" for layer in rows),
        modules,
        tuple(
            tuple(
                _cell(members) if (members := tensors.get((layer, module))) else None
                for module in modules
            )
            for layer in rows
        ),
    )


def _cell(members: list[TensorDiff]) -> HeatCell:
    """Return the worst of some tensors, and how many elements differ."""
    values = [tensor.values for tensor in members if tensor.values is not None]
    relative = [value.relative for value in values if value.relative is not None]
    return HeatCell(
        tuple(tensor.key for tensor in members),
        min((tensor.kind for tensor in members), key=KINDS.index),
        max(relative, default=None),
        sum(value.n_differing for value in values),
    )
