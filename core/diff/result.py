"""What a comparison of two checkpoints found."""

from __future__ import annotations

from dataclasses import dataclass

from core.arrays.box import Shape, c_strides
from core.catalog.catalog import TensorMeta
from core.diff.entries import EntryDiff
from core.diff.sides import Side
from core.megatron.optimizer.form import role_of
from core.numbers.difference import Tolerance, ValueDifference
from core.team.protocol import Figures

KINDS = ("only_a", "only_b", "shape", "dtype", "values", "close", "unread", "equal")
"""Of tensors, the gravest first; the last three are no differences."""
_ROLES = ("model", "masters", "moments", "other")
SAME = frozenset({"close", "unread", "equal"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """One tensor of either checkpoint.

    Args:
        key: its name.
        kind: one of ``KINDS``: ``dtype`` are equal or different values of different types, in an exact comparison;
            ``close`` differ within the tolerance; ``unread`` have one shape and type, and no values were compared.
        a, b: what it is on either side; None where it is not.
        values: what differs; None where everything is equal, or nothing was read.
        is_cast: of two types: the narrower holds the wider one's values, rounded; None where that cannot be told.
        first: values of A and B at the first element that differs.
        is_by_fingerprint: equal by the word of both manifests, and not read.
    """

    key: str
    kind: str
    a: TensorMeta | None = None
    b: TensorMeta | None = None
    values: ValueDifference | None = None
    is_cast: bool | None = None
    first: tuple[int | float | None, int | float | None] | None = None
    is_by_fingerprint: bool = False

    @property
    def is_same(self) -> bool:
        """Whether it is no difference."""
        return self.kind in SAME

    @property
    def meta(self) -> TensorMeta:
        """What it is in A, or in B where A has none."""
        found = self.a or self.b
        assert found is not None
        return found

    @property
    def role(self) -> str:
        """``model``, ``moments``, ``masters`` or ``other``."""
        return role_of(self.key)

    def index_of(self, flat: int) -> Shape:
        """The index of an element, given in C order."""
        shape = self.meta.shape
        return tuple(flat // step % n for step, n in zip(c_strides(shape), shape, strict=True))

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts what matters most first: kind, NaN, weights before their optimizer, how far apart in lengths of A."""
        values = self.values
        relative = values.relative if values is not None else None
        n_nan = values.n_nan if values is not None else 0
        share = values.share if values is not None else 0.0
        return (KINDS.index(self.kind), n_nan == 0, _ROLES.index(self.role), -(relative or 0.0), -share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """Two checkpoints compared.

    Args:
        a, b: they.
        rule: None for exact.
        is_read: whether values were compared; else names, shapes and types only.
        tensors: every tensor of either, what matters most first.
        entries: what differs beside tensors.
        of_layout: entries that differ because layouts, formats or directories do; they do not count.
        n_entries: values beside tensors that were compared.
        left_out: what was not compared although it should have been: then nobody can say that they are the same.
        notes: what the user should know.
        read_bytes: of tensors, both sides.
        seconds: wall time.
        figures: of the workers, where several compared.
    """

    a: Side
    b: Side
    rule: Tolerance | None
    is_read: bool
    tensors: tuple[TensorDiff, ...]
    entries: tuple[EntryDiff, ...]
    of_layout: tuple[EntryDiff, ...]
    n_entries: int
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    read_bytes: int
    seconds: float
    figures: tuple[Figures, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether everything that was compared is equal, and everything was compared."""
        return not self.entries and not self.left_out and all(tensor.is_same for tensor in self.tensors)

    @property
    def n_by_fingerprint(self) -> int:
        """Tensors that are equal by the word of both manifests."""
        return sum(tensor.is_by_fingerprint for tensor in self.tensors)

    def of_kind(self, kind: str) -> list[TensorDiff]:
        """The tensors of a kind, in order."""
        return [tensor for tensor in self.tensors if tensor.kind == kind]
