"""Rank the layers of two checkpoints by how much they differ."""

from __future__ import annotations

from collections.abc import Iterable

from core.engine.catalog.key_patterns import split_numbers
from core.values import dataclass
from core.verbs.diff.result import TensorDiff
from core.verbs.inspect.optimizer_states import is_state


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifference:
    """A layer of which tensors hold different values.

    Args:
        name: the common start of its keys, such as ``model.layers.17``.
        n_tensors: number of its tensors.
        differing: those with different values, the most serious difference first.
    """

    name: str
    n_tensors: int
    differing: tuple[TensorDiff, ...]

    @property
    def worst(self) -> TensorDiff:
        """Return the tensor that differs most."""
        return self.differing[0]

    @property
    def max_abs(self) -> float | None:
        """Greatest |A - B|; None if the values are not numbers."""
        values = (tensor.values for tensor in self.differing)
        maxima = [diff.max_abs for diff in values if diff and diff.max_abs is not None]
        return max(maxima, default=None)

    @property
    def relative(self) -> float | None:
        """|A - B| / |A| of the worst tensor; None if undefined."""
        return None if self.worst.values is None else self.worst.values.relative

    @property
    def n_nan(self) -> int:
        """Number of elements that are NaN on one side only."""
        return sum(tensor.values.n_nan for tensor in self.differing if tensor.values)


@dataclass(frozen=True, slots=True)
class RankedLayers:
    """The layers of a model that differ, the most different first.

    Args:
        n_layers: number of all layers.
    """

    layers: tuple[LayerDifference, ...]
    n_layers: int


def rank_layers(tensors: Iterable[TensorDiff]) -> RankedLayers:
    """Rank layers by the worst of their tensors, as ``TensorDiff.order`` does.

    A layer is what keys have in common up to their first number. The optimizer's layers are ranked
    only if no layer of the model differs.
    """
    members: dict[bool, dict[str, list[TensorDiff]]] = {False: {}, True: {}}
    for tensor in tensors:
        stack, *rest = split_numbers(tensor.key)
        if rest:
            layers = members[is_state(tensor.key)]
            layers.setdefault(stack + rest[0], []).append(tensor)
    for layers in members.values():
        ranked = [
            LayerDifference(name=name, n_tensors=len(layer), differing=tuple(differing))
            for name, layer in layers.items()
            if (differing := sorted(_of_values(layer), key=lambda tensor: tensor.order))
        ]
        if ranked:
            ranked.sort(key=lambda layer: layer.worst.order)
            return RankedLayers(tuple(ranked), len(layers))
    return RankedLayers((), 0)


def _of_values(tensors: Iterable[TensorDiff]) -> Iterable[TensorDiff]:
    return (tensor for tensor in tensors if tensor.kind == "values")
