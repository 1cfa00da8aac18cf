"""What ``ckpt diff`` prints: the verdict first, then what matters most.

Tensors that differ in numbers of their keys only (layers, experts), and have one shape, are one row; its figures are
those of the worst of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ckpt_cli.pages.diff_rows import (
    END,
    VALUES_HEAD,
    Row,
    RowCells,
    dtype_row,
    folded_rows,
    only_row,
    shape_row,
    values_row,
)
from ckpt_cli.screen.blocks import Cell, bytes_text, facts, n_text, seconds_text, table
from ckpt_cli.screen.terminal import Screen, columns_of, escaped
from core.catalog.key_patterns import folded
from core.diff.entries import EntryDiff
from core.diff.result import Diff, TensorDiff
from core.diff.sides import Side
from core.inspect.summary import ROLES

_GROUPS = {"model": "model", "moments": "optimizer moments", "masters": "master weights", "other": "other"}
_COLUMNS = {
    "equal": "equal",
    "close": "close",
    "unread": "alike",
    "values": "values",
    "dtype": "dtype",
    "shape": "shape",
    "only_a": "only in A",
    "only_b": "only in B",
}
_MAX_NOTES = 6


def page_of(screen: Screen, found: Diff, *, limit: int, is_flat: bool) -> Iterator[str]:
    """The whole page.

    Args:
        limit: most lines of a list; 0 for all.
        is_flat: one row a tensor.
    """
    yield verdict_line(screen, found)
    yield from facts(screen, _facts(found), indent=2)
    if any(not one.is_same for one in found.tensors) or found.of_kind("close"):
        yield ""
        yield from table(screen, list(_counts(found)), align="<" + ">" * len(_COLUMNS), indent=2)
    hand = _Lists(screen, limit, is_flat)
    for name, missing in _missing(found):
        yield from hand.listed(f"only in {name}", missing, only_row, whole=_whole_groups(found, missing))
    yield from hand.listed("shapes, A and B", found.of_kind("shape"), shape_row)
    yield from hand.listed("dtypes, A and B", found.of_kind("dtype"), dtype_row)
    yield from hand.listed("values, the farthest apart first", found.of_kind("values"), values_row, head=VALUES_HEAD)
    if found.rule is not None:
        close = sorted(found.of_kind("close"), key=lambda one: one.order)
        yield from hand.listed("within the tolerance, not equal", close, values_row, head=VALUES_HEAD)
    yield from hand.entries("beside tensors", found.entries)


def verdict_line(screen: Screen, found: Diff) -> str:
    """One line: whether they are the same, and if not, how much of them differs."""
    text, is_good = _verdict(found)
    mark = screen.styled("✓" if is_good else "✗", "green" if is_good else "red", "bold")
    return screen.plain(f"{mark} {screen.styled(text, 'bold')}")


def _verdict(found: Diff) -> tuple[str, bool]:
    differing = sum(not one.is_same for one in found.tensors)
    tensors = n_text(len(found.tensors), "tensor")
    entries = n_text(len(found.entries), "entry", "entries") + " beside them"
    if differing:
        if all(one.is_same or (one.kind == "dtype" and one.is_cast) for one in found.tensors) and not found.entries:
            return f"they differ in dtypes only: {differing:,} of {tensors} hold the same values in another one", False
        missing = [f"{len(some):,} are only in {name}" for name, some in _missing(found) if some]
        n_both = len(found.tensors) - sum(len(some) for _, some in _missing(found))
        if n_both and n_both == len(found.tensors) - differing:
            rest = f", and {entries} differ" if found.entries else ""
            return (
                f"the tensors of both are the same ({n_both:,}, {_how(found)}), but {' and '.join(missing)}{rest}",
                False,
            )
        rest = f", {entries}" if found.entries else ""
        return f"they differ: {differing:,} of {tensors}{rest}", False
    how = _how(found)
    if found.left_out:
        return f"what could be compared is the same ({tensors} {how}), but not everything could be", False
    if found.entries:
        verb = "differs" if len(found.entries) == 1 else "differ"
        return f"the tensors are the same ({len(found.tensors):,}, {how}), but {entries} {verb}", False
    values = f" and {n_text(found.n_entries, 'value')} beside them" if found.n_entries else ""
    size = bytes_text(sum(one.meta.n_bytes for one in found.tensors))
    if not found.is_read:
        return f"alike: {tensors} ({size}) of equal names, shapes and dtypes{values}; {how}", True
    return f"the same: {tensors} ({size}) {how}{values}", True


def _missing(found: Diff) -> tuple[tuple[str, list[TensorDiff]], ...]:
    """The tensors that only one side has."""
    return ("A", found.of_kind("only_a")), ("B", found.of_kind("only_b"))


def _how(found: Diff) -> str:
    if not found.is_read:
        return "no tensor was read"
    n_close = len(found.of_kind("close"))
    if found.n_by_fingerprint == sum(one.a is not None and one.b is not None for one in found.tensors) > 0:
        return "by their fingerprints"
    if found.rule is None or not n_close:
        return "bit for bit"
    return f"within the tolerance, {n_close:,} of them not bit for bit"


def _facts(found: Diff) -> Iterator[tuple[str, Cell | str]]:
    yield "A", _side_text(found.a)
    yield "B", _side_text(found.b)
    if found.rule is not None:
        nan = "NaN equals NaN" if found.rule.equal_nan else "NaN differs from NaN"
        yield "equal if", f"|A-B| <= {found.rule.atol:g} + {found.rule.rtol:g}·|B|, {nan}"
    if found.is_read:
        rate = (
            f", {bytes_text(round(found.read_bytes / found.seconds))}/s"
            if found.read_bytes and found.seconds > 1
            else ""
        )
        yield "read", f"{bytes_text(found.read_bytes)} in {seconds_text(found.seconds)}{rate}"
    if found.n_by_fingerprint:
        n = n_text(found.n_by_fingerprint, "tensor")
        text = f"{n} not read: the fingerprints in both manifests are equal (--read reads them)"
        yield "proven", Cell(text, ("green",))
    if found.of_layout:
        some = ", ".join(escaped(entry.path.removeprefix("args.")) for entry in found.of_layout[:3])
        more = ", …" if len(found.of_layout) > 3 else ""
        count = n_text(len(found.of_layout), "entry", "entries")
        verb, does = ("differs", "does") if len(found.of_layout) == 1 else ("differ", "do")
        yield (
            "layout",
            Cell(f"{count} {verb} as layout, format or directory do, and {does} not count: {some}{more}", ("dim",)),
        )
    if found.rule is None and found.is_read and any(one.kind == "dtype" for one in found.tensors):
        yield "hint", Cell("--rtol 0 compares values, whatever their dtypes", ("dim",))
    for number, text in enumerate(found.left_out):
        yield "" if number else "left out", Cell(escaped(text), ("red",))
    for number, text in enumerate(found.notes[:_MAX_NOTES]):
        yield "" if number else "note", Cell(escaped(text), ("yellow",))
    if len(found.notes) > _MAX_NOTES:
        yield "", Cell(f"… {len(found.notes) - _MAX_NOTES} more (--json lists all)", ("dim",))


def _side_text(side: Side) -> str:
    parts = [side.source.format.name]
    if side.topology is not None:
        parts.append(str(side.topology))
    if side.source.iteration is not None:
        parts.append(f"iteration {side.source.iteration}")
    return f"{escaped(str(side.source.path))}  ({', '.join(parts)})"


def _counts(found: Diff) -> Iterator[list[Cell | str]]:
    """How many tensors of each group are of each kind; columns and rows without any are left out."""
    kinds = [kind for kind in _COLUMNS if found.of_kind(kind)]
    yield ["", *(Cell(_COLUMNS[kind], ("dim",)) for kind in kinds)]
    for role in ROLES:
        members = [one.kind for one in found.tensors if one.role == role]
        if members:
            numbers = [members.count(kind) for kind in kinds]
            yield [_GROUPS[role], *(_count_cell(kind, n) for kind, n in zip(kinds, numbers, strict=True))]


def _count_cell(kind: str, n: int) -> Cell:
    if n == 0:
        return Cell("·", ("dim",))
    return Cell(f"{n:,}", ("green",) if kind in ("equal", "close", "unread") else ("red",))


@dataclass(frozen=True, slots=True)
class _Lists:
    """Prints lists of tensors and entries."""

    screen: Screen
    limit: int
    is_flat: bool

    def listed(
        self,
        title: str,
        tensors: Sequence[TensorDiff],
        cells: RowCells,
        *,
        head: Sequence[str] = (),
        whole: Collection[str] = (),
    ) -> Iterator[str]:
        """A section; nothing where there are no tensors.

        Args:
            head: of the columns.
            whole: groups that are one row each.
        """
        if not tensors:
            return
        if self.is_flat:
            rows = [Row(escaped(one.key), one, (one,)) for one in tensors]
        else:
            grouped = [[one for one in tensors if one.role == role] for role in whole]
            rows = [Row(f"all {_GROUPS[some[0].role]}", some[0], some) for some in grouped]
            rows += folded_rows(one for one in tensors if one.role not in whole)
        shown = rows[: self.limit] if self.limit else rows
        yield ""
        yield self.screen.plain(self.screen.styled(f"{title} ({len(tensors):,})", "bold"))
        made: list[list[Cell | str]] = [[Cell(text, ("dim",)) for text in head]] if head else []
        made += [[row.name, *cells(row)] for row in shown]
        yield from self._table(made, has_head=bool(head))
        yield from self._more(sum(len(row.members) for row in rows[len(shown) :]), "tensor")

    def entries(self, title: str, entries: Sequence[EntryDiff]) -> Iterator[str]:
        """The entries that differ."""
        if not entries:
            return
        lines = folded((f"{one.path}{END}{_change(one)}" for one in entries), end=END)
        shown = lines[: self.limit] if self.limit else lines
        yield ""
        yield self.screen.plain(self.screen.styled(f"{title} ({len(entries):,})", "bold"))
        rows: list[list[Cell | str]] = []
        for line in shown:
            path, _, change = line.partition(END)
            rows.append([escaped(path), Cell(escaped(change), ("dim",))])
        yield from self._table(rows, has_head=False)
        yield from self._more(len(lines) - len(shown), "line")

    def _more(self, n: int, noun: str) -> Iterator[str]:
        if n:
            yield self.screen.plain(self.screen.styled(f"  … {n_text(n, f'more {noun}')}; --limit 0 shows all", "dim"))

    def _table(self, rows: list[list[Cell | str]], *, has_head: bool) -> Iterator[str]:
        """Aligned columns; where they are too wide, names on lines of their own."""
        n_columns = max(map(len, rows))
        align = "<" + ">" * (n_columns - 2) * has_head + "<" * (1 if has_head else n_columns - 1)
        width = self.screen.width
        lines = list(table(Screen(), rows, align=align, indent=2))
        if width is None or all(columns_of(line) <= width for line in lines):
            yield from table(self.screen, rows, align=align, indent=2)
            return
        rest = [[Cell("  "), *row[1:]] for row in rows]
        if has_head and any(columns_of(line) > width for line in table(Screen(), rest, align=align, indent=2)):
            rest = [[*row[:-1], _without_values(row[-1])] for row in rest]
        for row, line in zip(rows, table(self.screen, rest, align=align, indent=2), strict=True):
            name = row[0].text if isinstance(row[0], Cell) else row[0]
            if name:
                yield self.screen.plain(f"  {name}")
            yield line


def _whole_groups(found: Diff, missing: Sequence[TensorDiff]) -> list[str]:
    """The groups of which all tensors are missing on one side: there is nothing to compare them with."""
    n_all, n_missing = (Counter(one.role for one in some) for some in (found.tensors, missing))
    return [role for role in ROLES if role != "model" and n_missing[role] == n_all[role] > 1]


def _without_values(cell: Cell | str) -> Cell:
    """Where the first difference is, without what is there."""
    text = cell.text if isinstance(cell, Cell) else cell
    return Cell(text.partition(": ")[0], ("dim",))


def _change(entry: EntryDiff) -> str:
    if entry.kind == "only_a":
        return f"only in A: {entry.a}"
    if entry.kind == "only_b":
        return f"only in B: {entry.b}"
    return f"{entry.a} → {entry.b}"
