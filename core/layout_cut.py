"""How one tensor is cut for a destination: its rule, its shape and the arguments put together."""

from __future__ import annotations

from dataclasses import dataclass

from core.box import Box, Shape
from core.catalog import TensorMeta
from core.errors import CorruptError, UnsupportedError
from core.layout_args import Facts
from core.layout_rules import Rule
from core.layout_vocab import padded_rows
from core.placement import Piece, check_divides, check_heads, replicated, shard_shape, split
from core.topology import Topology


@dataclass(frozen=True, slots=True)
class Cut:
    """How a global tensor is cut over tensor parallel ranks.

    Args:
        shape: global shape in the destination, padding included.
        axis: the axis that is cut, or None for replication.
        parts: extents of the consecutive parts of that axis.
        tp: number of shards.
    """

    shape: Shape
    axis: int | None
    parts: tuple[int, ...]
    tp: int

    def pieces(self, tp_rank: int) -> list[Piece]:
        """The pieces of one shard."""
        if self.axis is None:
            return replicated(self.shape)
        return split(self.shape, self.axis, parts=self.parts, rank=tp_rank, n=self.tp)

    @property
    def shard_shape(self) -> Shape:
        """Shape of one shard."""
        return shard_shape(self.shape, self.axis, self.tp)


def cut_of(meta: TensorMeta, rule: Rule, facts: Facts, *, tp: int, n_rows: int | None) -> Cut:
    """How a tensor is cut, or why it cannot be.

    Args:
        n_rows: rows of the true vocabulary, or None where nothing says.

    Raises:
        UnsupportedError: a size does not divide, or the padded vocabulary of the destination is not known.
        CorruptError: the tensor has no such axis.
    """
    axis = rule.cut_axis
    if axis is None:
        return Cut(meta.shape, None, (), tp)
    if axis >= len(meta.shape):
        raise CorruptError(f"the tensor has {len(meta.shape)} axes, but its rule cuts axis {axis}", key=meta.key)
    if rule.unit == "heads":
        check_heads(n_heads=facts.n_heads, n_groups=facts.n_groups, tp=tp, key=meta.key)
    shape = meta.shape
    if rule.kind == "vocab":
        rows = padded_rows(meta, facts, tp=tp, n_rows=n_rows)
        shape = (*shape[:axis], rows, *shape[axis + 1 :])
    parts = parts_of(rule, shape[axis], is_gated=facts.is_gated, key=meta.key)
    check_divides(parts, tp, key=meta.key, axis=axis, group="TP")
    return Cut(shape, axis, tuple(parts), tp)


def parts_of(rule: Rule, extent: int, *, is_gated: bool, key: str) -> list[int]:
    """Extents of the consecutive parts of an axis.

    Raises:
        CorruptError: a gated extent is odd.
    """
    if rule.parts != "gated" or not is_gated:
        return [extent]
    if extent % 2:
        raise CorruptError(f"a gated MLP has an odd number of rows, {extent}", key=key)
    return [extent // 2, extent // 2]


def zeros_of(meta: TensorMeta, cut: Cut) -> list[Box]:
    """Boxes of the destination's tensor that the source does not have."""
    if cut.shape == meta.shape:
        return []
    rows = meta.shape[0]
    return [Box((rows, *(0 for _ in cut.shape[1:])), (cut.shape[0] - rows, *cut.shape[1:]))]


def check_target(topology: Topology) -> None:
    """Refuses topologies that cannot be written yet.

    Raises:
        UnsupportedError: virtual stages, expert parallelism.
    """
    if topology.vpp > 1:
        raise UnsupportedError(
            f"model chunks (VPP {topology.vpp}) cannot be written yet", hint="write without them: --vpp-new 1"
        )
    if topology.ep > 1 or topology.expert_tp != topology.tp:
        raise UnsupportedError(
            f"expert parallel layouts ({topology}) cannot be written yet", hint="leave out --ep-new and --etp-new"
        )
