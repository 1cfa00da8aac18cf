"""The page of ``ckpt diff``: the verdict first, then the most important differences.

Tensors whose keys differ only in numbers (layers, experts) and that have the same shape share a
row, which shows the figures of the worst of them.
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

_GROUPS = {
    "model": "model",
    "moments": "optimizer moments",
    "masters": "master weights",
    "other": "other",
}
_COLUMNS = {
    "equal": "equal",
    "close": "close",
    "unread": "not read",
    "values": "values",
    "dtype": "dtype",
    "shape": "shape",
    "only_a": "only in A",
    "only_b": "only in B",
}
_MAX_NOTES = 6


def page_of(screen: Screen, result: Diff, *, limit: int, is_flat: bool) -> Iterator[str]:
    """Yield the page.

    Args:
        limit: most lines of a list; 0 for all.
        is_flat: every tensor gets a row of its own.
    """
    # Above the lists: verdict, facts, and how many tensors of each group are of each kind.
    yield verdict_line(screen, result)
    yield from facts(screen, _facts(result), indent=2)
    if any(not tensor.is_same for tensor in result.tensors) or result.of_kind("close"):
        yield ""
        yield from table(
            screen, list(_count_rows(result)), align="<" + ">" * len(_COLUMNS), indent=2
        )
    # The lists, the most important first; those without members print nothing.
    lists = _ListPrinter(screen, limit, is_flat)
    for name, tensors in _one_sided(result):
        whole_groups = _missing_groups(result, tensors)
        yield from lists.tensor_lines(
            f"only in {name}", tensors, only_row, whole_groups=whole_groups
        )
    yield from lists.tensor_lines("different shapes, A → B", result.of_kind("shape"), shape_row)
    yield from lists.tensor_lines("different dtypes, A → B", result.of_kind("dtype"), dtype_row)
    yield from lists.tensor_lines(
        "different values, largest difference first",
        result.of_kind("values"),
        values_row,
        head=VALUES_HEAD,
    )
    if result.rule is not None:
        close = sorted(result.of_kind("close"), key=lambda tensor: tensor.order)
        yield from lists.tensor_lines(
            "within the tolerance, not identical", close, values_row, head=VALUES_HEAD
        )
    yield from lists.entry_lines("other entries", result.entries)


def verdict_line(screen: Screen, result: Diff) -> str:
    """Return one line that tells whether the checkpoints are the same, and if not, how much of them
    differs.
    """
    is_good = result.is_same
    mark = screen.styled("✓" if is_good else "✗", "green" if is_good else "red", "bold")
    return screen.plain(f"{mark} {screen.styled(_verdict_text(result), 'bold')}")


def _verdict_text(result: Diff) -> str:
    n_differing = sum(not tensor.is_same for tensor in result.tensors)
    if n_differing:
        return _difference_text(result, n_differing)
    method = _method_text(result)
    tensors = n_text(len(result.tensors), "tensor")
    if result.left_out:
        return f"no difference in the compared data ({tensors} {method}), but not everything could be compared"
    if result.entries:
        verb = "differs" if len(result.entries) == 1 else "differ"
        return f"the tensors are the same ({len(result.tensors):,}, {method}), but {_entries_text(result)} {verb}"
    entries = ""
    if result.n_entries:
        entries = f" and {n_text(result.n_entries, 'other entry', 'other entries')} (arguments, counters, RNG, …)"
    size = bytes_text(sum(tensor.meta.n_bytes for tensor in result.tensors))
    if not result.is_read:
        return f"same names, shapes and dtypes: {tensors} ({size}){entries}; {method}"
    return f"the same: {tensors} ({size}) {method}{entries}"


def _difference_text(result: Diff, n_differing: int) -> str:
    """Return the verdict on checkpoints whose tensors differ."""
    tensors = n_text(len(result.tensors), "tensor")
    is_cast = all(t.is_same or (t.kind == "dtype" and t.is_cast) for t in result.tensors)
    if is_cast and not result.entries:
        return f"only dtypes differ: {n_differing:,} of {tensors} hold the same values in another dtype"
    # Every tensor that both have may be the same, and one side has more of them.
    one_sided = [(name, len(members)) for name, members in _one_sided(result) if members]
    n_shared = len(result.tensors) - sum(n for _, n in one_sided)
    if n_shared and n_shared == len(result.tensors) - n_differing:
        missing = " and ".join(
            f"{n:,} {'is' if n == 1 else 'are'} only in {name}" for name, n in one_sided
        )
        rest = f", and {_entries_text(result)} differ" if result.entries else ""
        return f"the tensors that both have are the same ({n_shared:,}, {_method_text(result)}), but {missing}{rest}"
    rest = f" and {_entries_text(result)}" if result.entries else ""
    return f"different: {n_differing:,} of {tensors}{rest}"


def _entries_text(result: Diff) -> str:
    return n_text(len(result.entries), "other entry", "other entries")


def _one_sided(result: Diff) -> tuple[tuple[str, list[TensorDiff]], ...]:
    """Return the tensors that only one side has, by the name of the side."""
    return ("A", result.of_kind("only_a")), ("B", result.of_kind("only_b"))


def _method_text(result: Diff) -> str:
    """Return how the tensors were compared, as the end of a clause."""
    if not result.is_read:
        return "no tensor was read"
    n_close = len(result.of_kind("close"))
    n_shared = sum(tensor.a is not None and tensor.b is not None for tensor in result.tensors)
    if result.n_by_fingerprint == n_shared > 0:
        return "by fingerprint"
    if result.rule is None or not n_close:
        return "bit for bit"
    return f"within the tolerance, {n_close:,} of them not bit for bit"


def _facts(result: Diff) -> Iterator[tuple[str, Cell | str]]:
    """Yield the facts below the verdict: the two sides, how they were compared, and notes."""
    # What was compared, and how.
    yield "A", _side_text(result.a)
    yield "B", _side_text(result.b)
    if result.rule is not None:
        nan = "NaN equals NaN" if result.rule.equal_nan else "NaN differs from NaN"
        yield "equal if", f"|A-B| <= {result.rule.atol:g} + {result.rule.rtol:g}·|B|, {nan}"
    if result.is_read:
        rate = ""
        if result.read_bytes and result.seconds > 1:
            rate = f", {bytes_text(round(result.read_bytes / result.seconds))}/s"
        yield "read", f"{bytes_text(result.read_bytes)} in {seconds_text(result.seconds)}{rate}"
    # What needed no comparison, and what could be done next.
    if result.n_by_fingerprint:
        tensors = n_text(result.n_by_fingerprint, "tensor")
        text = f"{tensors} not read: their fingerprints in both manifests are equal (--read compares the data)"
        yield "proven", Cell(text, ("green",))
    if result.of_layout:
        names = ", ".join(
            escaped(entry.path.removeprefix("args.")) for entry in result.of_layout[:3]
        )
        more = ", …" if len(result.of_layout) > 3 else ""
        count = n_text(len(result.of_layout), "entry", "entries")
        verb = "differs" if len(result.of_layout) == 1 else "differ"
        text = f"{count} {verb} because of layout, format or directory, not counted: {names}{more}"
        yield "layout", Cell(text, ("dim",))
    if (
        result.rule is None
        and result.is_read
        and any(tensor.kind == "dtype" for tensor in result.tensors)
    ):
        yield "hint", Cell("--rtol 0 compares values across dtypes", ("dim",))
    # What could not be compared, and notes.
    for number, text in enumerate(result.left_out):
        yield "" if number else "left out", Cell(escaped(text), ("red",))
    for number, text in enumerate(result.notes[:_MAX_NOTES]):
        yield "" if number else "note", Cell(escaped(text), ("yellow",))
    if len(result.notes) > _MAX_NOTES:
        yield "", Cell(f"… {len(result.notes) - _MAX_NOTES} more (--json lists all)", ("dim",))


def _side_text(side: Side) -> str:
    parts = [side.source.format.name]
    if side.topology is not None:
        parts.append(str(side.topology))
    if side.source.iteration is not None:
        parts.append(f"iteration {side.source.iteration}")
    return f"{escaped(str(side.source.path))}  ({', '.join(parts)})"


def _count_rows(result: Diff) -> Iterator[list[Cell | str]]:
    """Yield how many tensors of each group are of each kind, without empty columns and rows."""
    kinds = [kind for kind in _COLUMNS if result.of_kind(kind)]
    yield ["", *(Cell(_COLUMNS[kind], ("dim",)) for kind in kinds)]
    for role in ROLES:
        members = [tensor.kind for tensor in result.tensors if tensor.role == role]
        if members:
            row: list[Cell | str] = [_GROUPS[role]]
            for kind in kinds:
                n = members.count(kind)
                color = "green" if kind in ("equal", "close", "unread") else "red"
                row.append(Cell(f"{n:,}", (color,)) if n else Cell("·", ("dim",)))
            yield row


@dataclass(frozen=True, slots=True)
class _ListPrinter:
    """Prints lists of tensors and entries.

    Args:
        limit: most lines of a list; 0 for all.
        is_flat: every tensor gets a row of its own.
    """

    screen: Screen
    limit: int
    is_flat: bool

    def tensor_lines(
        self,
        title: str,
        tensors: Sequence[TensorDiff],
        cells: RowCells,
        *,
        head: Sequence[str] = (),
        whole_groups: Collection[str] = (),
    ) -> Iterator[str]:
        """Yield a section with a list of tensors; nothing if there are none.

        Args:
            cells: makes the cells of a row, after its name.
            head: titles of the columns.
            whole_groups: groups (roles of tensors) that get only one row each.
        """
        if not tensors:
            return
        # Tensors to rows: one each, or one for those that differ only in numbers of their keys.
        if self.is_flat:
            rows = [Row(escaped(tensor.key), tensor, (tensor,)) for tensor in tensors]
        else:
            groups = [
                [tensor for tensor in tensors if tensor.role == role] for role in whole_groups
            ]
            rows = [
                Row(f"all {_GROUPS[members[0].role]}", members[0], members) for members in groups
            ]
            rows += folded_rows(tensor for tensor in tensors if tensor.role not in whole_groups)
        shown = rows[: self.limit] if self.limit else rows
        # Title, table, and the number of tensors that are not shown.
        yield ""
        yield self.screen.plain(self.screen.styled(f"{title} ({len(tensors):,})", "bold"))
        table_rows: list[list[Cell | str]] = (
            [[Cell(text, ("dim",)) for text in head]] if head else []
        )
        table_rows += [[row.name, *cells(row)] for row in shown]
        yield from self._table(table_rows, has_head=bool(head))
        yield from self._more(sum(len(row.members) for row in rows[len(shown) :]), "tensor")

    def entry_lines(self, title: str, entries: Sequence[EntryDiff]) -> Iterator[str]:
        """Yield a section with the entries that differ; nothing if there are none."""
        if not entries:
            return
        lines = folded((f"{entry.path}{END}{_change_text(entry)}" for entry in entries), end=END)
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
            yield self.screen.plain(
                self.screen.styled(f"  … {n_text(n, f'more {noun}')}; --limit 0 shows all", "dim")
            )

    def _table(self, rows: list[list[Cell | str]], *, has_head: bool) -> Iterator[str]:
        """Yield aligned columns.

        If they are too wide for the screen, names get lines of their own.
        """
        n_columns = max(map(len, rows))
        align = "<" + ">" * (n_columns - 2) * has_head + "<" * (1 if has_head else n_columns - 1)
        width = self.screen.width
        lines = list(table(Screen(), rows, align=align, indent=2))
        if width is None or all(columns_of(line) <= width for line in lines):
            yield from table(self.screen, rows, align=align, indent=2)
            return
        # Too wide: each name above the other cells of its row.
        rest = [[Cell("  "), *row[1:]] for row in rows]
        # Still too wide: the last cell has only the index of the first difference, not its two values.
        if has_head and any(
            columns_of(line) > width for line in table(Screen(), rest, align=align, indent=2)
        ):
            for row in rest:
                text = row[-1].text if isinstance(row[-1], Cell) else row[-1]
                row[-1] = Cell(text.partition(": ")[0], ("dim",))
        for row, line in zip(rows, table(self.screen, rest, align=align, indent=2), strict=True):
            name = row[0].text if isinstance(row[0], Cell) else row[0]
            if name:
                yield self.screen.plain(f"  {name}")
            yield line


def _missing_groups(result: Diff, missing: Sequence[TensorDiff]) -> list[str]:
    """Return the groups (roles) of which all tensors are missing on one side, apart from the
    model.
    """
    n_all, n_missing = (
        Counter(tensor.role for tensor in tensors) for tensors in (result.tensors, missing)
    )
    return [role for role in ROLES if role != "model" and n_missing[role] == n_all[role] > 1]


def _change_text(entry: EntryDiff) -> str:
    if entry.kind == "only_a":
        return f"only in A: {entry.a}"
    if entry.kind == "only_b":
        return f"only in B: {entry.b}"
    return f"{entry.a} → {entry.b}"
