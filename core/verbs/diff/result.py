"""The result of a comparison of two checkpoints."""

from __future__ import annotations

from core.arrays.box import Shape, c_strides
from core.engine.catalog.tensor import Tensor
from core.engine.numbers.difference import Tolerance, ValueDifference
from core.engine.team.protocol import Figures
from core.megatron.optimizer.form import role_of
from core.values import (
    Brief,
    bytes_text,
    dataclass,
    list_facts,
    n_text,
    seconds_text,
    shown_briefly,
)
from core.verbs.diff.entries import EntryDiff
from core.verbs.diff.sides import Side

KINDS = ("only_a", "only_b", "shape", "dtype", "values", "close", "unread", "equal")
"""Results for a tensor, the most serious first; the last three do not count as differences."""
_ROLES = ("model", "masters", "moments", "other")
SAME = frozenset({"close", "unread", "equal"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """The result of comparing one tensor of either checkpoint.

    Args:
        key: name of the tensor.
        kind: one of ``KINDS``. ``dtype``: the types differ and the comparison is exact, whether the
            values differ or not. ``close``: values differ within the tolerance. ``unread``: shapes
            are equal, and values were not compared.
        a, b: the tensor in A and in B; None where it is missing.
        values: differences of the values; None if all are equal, or none were read.
        is_cast: for different types, the narrower tensor holds the wider one's values, rounded;
            None if unknown.
        first: values of A and B at the first element that differs.
        is_by_fingerprint: the tensors are equal according to both manifests, and were not read.
    """

    key: str
    kind: str
    a: Tensor | None = None
    b: Tensor | None = None
    values: ValueDifference | None = None
    is_cast: bool | None = None
    first: tuple[int | float | None, int | float | None] | None = None
    is_by_fingerprint: bool = False

    @property
    def is_same(self) -> bool:
        """Return whether the tensors count as equal."""
        return self.kind in SAME

    @property
    def meta(self) -> Tensor:
        """Metadata of the tensor in A, or in B if A lacks it."""
        tensor = self.a or self.b
        assert tensor is not None
        return tensor

    @property
    def role(self) -> str:
        """Role of the tensor: ``model``, ``moments``, ``masters`` or ``other``."""
        return role_of(self.key)

    def index_of(self, flat: int) -> Shape:
        """Convert an element's position in C order to its index."""
        shape = self.meta.shape
        return tuple(flat // step % n for step, n in zip(c_strides(shape), shape, strict=True))

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key that puts the most serious difference first.

        By kind, then tensors with NaN, then weights before their optimizer states, then by the
        difference relative to A.
        """
        values = self.values
        relative = values.relative if values is not None else None
        n_nan = values.n_nan if values is not None else 0
        share = values.share if values is not None else 0.0
        return (
            KINDS.index(self.kind),
            n_nan == 0,
            _ROLES.index(self.role),
            -(relative or 0.0),
            -share,
        )


@shown_briefly
@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """The comparison of two checkpoints.

    Args:
        a, b: the two checkpoints.
        rule: the tolerance; None for an exact comparison.
        is_read: values were compared; otherwise names, shapes and types only.
        tensors: every tensor of either checkpoint, the most serious difference first.
        entries: differing entries that are not tensors.
        of_layout: entries that differ because layouts, formats or directories do; they do not make
            the checkpoints different.
        n_entries: number of compared values that are not tensors.
        left_out: parts of a checkpoint that could not be compared, with reasons; the checkpoints
            then do not count as equal.
        notes: remarks for the user.
        warnings: code in pickles of either checkpoint that other software would run.
        read_bytes: bytes of tensors read on both sides.
        seconds: wall time.
        figures: bytes and time of each worker, if several compared.
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
    warnings: tuple[str, ...] = ()
    figures: tuple[Figures, ...] = ()

    @property
    def same(self) -> bool:
        """Return whether everything was compared and is equal, as the JSON field ``same``."""
        return (
            not self.entries
            and not self.left_out
            and all(tensor.is_same for tensor in self.tensors)
        )

    @property
    def n_by_fingerprint(self) -> int:
        """Number of tensors that are equal according to both manifests."""
        return sum(tensor.is_by_fingerprint for tensor in self.tensors)

    def brief(self) -> Brief:
        """Return what is shown of the comparison."""
        n_differing = sum(not tensor.is_same for tensor in self.tensors)
        parts = [f"{n_differing:,} of {n_text(len(self.tensors), 'tensor')}"] if n_differing else []
        if self.entries:
            parts.append(n_text(len(self.entries), "other entry", "other entries"))
        if parts:
            title = f"different: {' and '.join(parts)}"
        elif self.left_out:
            title = "no differences, but not everything could be compared"
        else:
            title = f"the same: {n_text(len(self.tensors), 'tensor')}"
        names = {"only_a": "only in A", "only_b": "only in B"}
        kinds = [
            f"{len(members):,} {names.get(kind, kind)}"
            for kind in KINDS
            if (members := self.of_kind(kind))
        ]
        read = f"{bytes_text(self.read_bytes)} in {seconds_text(self.seconds)}"
        facts = [
            ("A", self.a.title),
            ("B", self.b.title),
            ("tensors", ", ".join(kinds)),
            ("read", read if self.is_read else "names, shapes and dtypes"),
            *list_facts("differ", (item.key for item in self.tensors if not item.is_same)),
            *list_facts("entries", (f"{item.path}: {item.a} → {item.b}" for item in self.entries)),
            *list_facts("not compared", self.left_out),
            *list_facts("note", (*self.warnings, *self.notes)),
        ]
        return Brief(title, facts)

    def of_kind(self, kind: str) -> list[TensorDiff]:
        """Return the tensors of a kind, in order."""
        return [tensor for tensor in self.tensors if tensor.kind == kind]
