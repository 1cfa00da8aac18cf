"""The pipeline stage and model chunk of each part of a model."""

from __future__ import annotations

from collections.abc import Mapping

from core.megatron.model.pipeline import LayerSplit
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class Stages:
    """The pipeline stage and model chunk of each part of a model.

    Args:
        pp, vpp: number of pipeline stages, and of model chunks per stage.
        splits: prefix of the layers' names (``decoder.layers.``) → their distribution, the main
            stack first.
        mtp: (vp, pp) of the chunk of multi-token prediction; None for the last one.
    """

    pp: int
    vpp: int
    splits: Mapping[str, LayerSplit]
    mtp: tuple[int, int] | None = None

    def n_layers(self, stack: str) -> int:
        """Return the number of layers in a stack; 0 for a stack that the model does not have."""
        split = self.splits.get(stack)
        return 0 if split is None else split.n_layers

    def count(self, stack: str, vp: int, pp: int) -> int:
        """Return the number of layers of a stack in a chunk."""
        split = self.splits.get(stack)
        return 0 if split is None else split.counts[vp][pp]

    def offset(self, stack: str, vp: int, pp: int) -> int:
        """Return the global number of the first layer of a stack in a chunk."""
        split = self.splits.get(stack)
        return 0 if split is None else split.offset(vp, pp)

    def chunk_of(self, stack: str, layer: int) -> tuple[int, int, int]:
        """Return (vp, pp, local number) of a layer.

        Raises:
            ValueError: the model has no such layer.
        """
        split = self.splits.get(stack)
        if split is None:
            raise ValueError(f"the model has no {stack}{layer}")
        return split.chunk_of(layer)

    def chunk_at(self, place: str) -> tuple[int, int]:
        """Return (vp, pp) of the chunk at a named place of the model.

        Args:
            place: ``first`` or ``last`` for that chunk, ``last_layer`` for the chunk of the main
                stack's last layer, ``mtp`` for that of multi-token prediction.
        """
        if place == "first":
            return (0, 0)
        if place == "mtp" and self.mtp is not None:
            return self.mtp
        if place == "last_layer":
            split = next(iter(self.splits.values()))
            return split.chunk_of(split.n_layers - 1)[:2]
        return next(iter(self.splits.values())).chunks[-1]

    def number_of(self, vp: int, pp: int) -> int:
        """Return the number of a chunk in the order of the model."""
        return next(iter(self.splits.values())).chunks.index((vp, pp))

    def in_one_chunk(self, n_layers: int, where: tuple[int, int]) -> LayerSplit:
        """Return the split of a stack whose layers are all in one chunk, (vp, pp)."""
        return LayerSplit(
            tuple(
                tuple(n_layers * ((v, p) == where) for p in range(self.pp)) for v in range(self.vpp)
            )
        )
