"""The page of ``ckpt diff``: the verdict first, then the most important differences.

Tensors whose keys differ only in numbers (layers, experts) and that have the same shape share a
row, which shows the figures of the worst of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from ckpt_cli.pages.diff_rows import (
    END,
    VALUES_HEAD,
    Row,
    RowCells,
    dtype_row,
    folded_rows,
    layer_row,
    only_row,
    shape_row,
    values_row,
)
from ckpt_cli.pages.pictures.heat import heat_lines
from ckpt_cli.screen.blocks import (
    Block,
    Cell,
    Facts,
    Table,
    bytes_text,
    dim_cell,
    fact_list,
    make_cell,
    n_text,
    seconds_text,
    stacked,
    table,
    table_width,
    title_cell,
)
from ckpt_cli.screen.terminal import Screen, escaped
from core.engine.catalog.key_patterns import folded
from core.verbs.diff.entries import EntryDiff
from core.verbs.diff.layers import rank_layers
from core.verbs.diff.result import Diff, TensorDiff
from core.verbs.diff.sides import Side
from core.verbs.inspect.summary import ROLE_TITLES, ROLES
from core.verbs.pictures.heat import heat_maps

COLUMNS = {
    "equal": "equal",
    "close": "close",
    "unread": "not read",
    "values": "values",
    "dtype": "dtype",
    "shape": "shape",
    "only_a": "only in A",
    "only_b": "only in B",
}
"""Kind of tensor → title of its column."""
_MAX_LAYERS = 5
"""Maximum number of layers that are ranked, unless all lines are wanted."""
_MAX_NOTES = 6
"""Maximum number of notes on the page."""


def diff_blocks(
    result: Diff, *, limit: int, is_flat: bool, has_map: bool = False
) -> Iterator[Block]:
    """Yield the page.

    Args:
        limit: maximum number of lines of a list; 0 for all.
        is_flat: every tensor gets a row of its own.
        has_map: draw layers × modules above the lists.
    """
    # Above the lists: verdict, facts, and the number of tensors of each group and kind.
    yield verdict_line(result)
    yield Facts(list(diff_facts(result)), indent=2)
    if any(not tensor.is_same for tensor in result.tensors) or result.of_kind("close"):
        yield from ("", count_table(result))
    layers = list(layer_blocks(result, limit=min(limit, _MAX_LAYERS)))
    if layers:
        yield from ("", *layers)
    if has_map:
        yield from ("", partial(heat_lines, maps=heat_maps(result.tensors), folds=limit > 0))
    # The lists, the most important first; those without members print nothing.
    close = sorted(result.of_kind("close"), key=lambda tensor: tensor.order)
    lists: tuple[tuple[str, Sequence[TensorDiff], RowCells, Sequence[str]], ...] = (
        *((f"only in {name}", tensors, only_row, ()) for name, tensors in _one_sided(result)),
        ("different shapes, A → B", result.of_kind("shape"), shape_row, ()),
        ("different dtypes, A → B", result.of_kind("dtype"), dtype_row, ()),
        (
            "different values, largest difference first",
            result.of_kind("values"),
            values_row,
            VALUES_HEAD,
        ),
        (
            "within the tolerance, not identical",
            [] if result.rule is None else close,
            values_row,
            VALUES_HEAD,
        ),
    )
    for title, tensors, cells, head in lists:
        if is_flat:
            rows = [Row(escaped(tensor.key), tensor, (tensor,)) for tensor in tensors]
        else:
            # Groups that one side lacks completely get only one row each.
            whole = _missing_groups(result, tensors) if cells is only_row else []
            rows = []
            for role in whole:
                members = [tensor for tensor in tensors if tensor.role == role]
                name = f"all {ROLE_TITLES.get(role, role)}"
                rows.append(Row(name, members[0], members, is_group=True))
            rows += folded_rows(tensor for tensor in tensors if tensor.role not in whole)
        shown = rows[: limit or None]
        yield from _list_blocks(
            f"{title} ({len(tensors):,})",
            [[row.name, *cells(row)] for row in shown],
            head=head,
            n_more=sum(len(row.members) for row in rows[len(shown) :]),
            noun="tensor",
        )
    entries = entry_rows(result)
    yield from _list_blocks(
        f"other entries ({len(result.entries):,})",
        entries[: limit or None],
        n_more=len(entries) - limit if limit else 0,
        noun="line",
    )


def entry_rows(result: Diff) -> list[list[Cell | str]]:
    """Return the entries that differ and are no tensors, with their changes from A to B.

    Entries with the same change whose paths differ only in numbers share a row.
    """
    texts = []
    for entry in result.entries:
        change = {"only_a": f"only in A: {entry.a}", "only_b": f"only in B: {entry.b}"}
        texts.append(f"{entry.path}{END}{change.get(entry.kind, f'{entry.a} → {entry.b}')}")
    lines = (line.partition(END) for line in folded(texts, end=END))
    return [[escaped(path), dim_cell(escaped(change))] for path, _, change in lines]


def _list_blocks(
    title: str,
    rows: Sequence[Sequence[Cell | str]],
    *,
    head: Sequence[str] = (),
    n_more: int,
    noun: str,
) -> Iterator[Block]:
    """Yield a section with a list; nothing without rows.

    Args:
        head: titles of the columns.
        n_more: number of what the list does not show.
    """
    if rows:
        yield ""
        yield title_cell(title)
        yield partial(_draw_rows, rows=rows, head=head)
        if n_more > 0:
            yield dim_cell(f"  … {n_text(n_more, f'more {noun}')}; --limit 0 shows all")


def _draw_rows(
    screen: Screen, rows: Sequence[Sequence[Cell | str]], head: Sequence[str]
) -> Iterator[str]:
    """Yield aligned columns.

    If they are too wide for the screen, names get lines of their own; if that is not enough, the
    other cells are written below them.
    """
    # With a head, the columns between the name and the first difference contain numbers.
    n_columns = max(map(len, rows))
    align = "<" + ">" * (n_columns - 2) + "<" if head else "<" * n_columns
    cells = [list(map(make_cell, row)) for row in rows]
    if head:
        cells.insert(0, list(map(dim_cell, head)))
    width = screen.width
    if width is None or table_width(cells, align=align, indent=2) <= width:
        yield from table(screen, cells, align=align, indent=2)
        return
    # Too wide: each name above the other cells of its row.
    below = [[Cell("  "), *row[1:]] for row in cells]
    # Still too wide: the last cell is reduced to the index of the first difference, without
    # the two values.
    if head and table_width(below, align=align, indent=2) > width:
        for row in below:
            row[-1] = dim_cell(row[-1].text.partition(": ")[0])
    if table_width(below, align=align, indent=2) > width:
        yield from stacked(screen, rows, head=head, indent=2)
        return
    for row, line in zip(cells, table(screen, below, align=align, indent=2), strict=True):
        if row[0].text:
            yield screen.plain(f"  {row[0].text}")
        yield line


def verdict_line(result: Diff) -> tuple[Cell | str, ...]:
    """Return the verdict as one line: the same, or how much of the checkpoints differs."""
    mark, color = ("✓", "green") if result.same else ("✗", "red")
    return Cell(mark, (color, "bold")), " ", Cell(_verdict_text(result), ("bold",))


def _verdict_text(result: Diff) -> str:
    """Return the verdict in words."""
    # Tensors that differ outweigh everything else.
    n_differing = sum(not tensor.is_same for tensor in result.tensors)
    if n_differing:
        return _difference_text(result, n_differing)
    # No tensor differs, but the checkpoints do not count as the same.
    method = _method_text(result)
    tensors = n_text(len(result.tensors), "tensor")
    if result.left_out:
        return (
            f"no difference in the compared data ({tensors} {method}), "
            "but not everything could be compared"
        )
    if result.entries:
        verb = "differs" if len(result.entries) == 1 else "differ"
        return (
            f"the tensors are the same ({len(result.tensors):,}, {method}), "
            f"but {_entries_text(result)} {verb}"
        )
    # The checkpoints are the same.
    entries = ""
    if result.n_entries:
        count = n_text(result.n_entries, "other entry", "other entries")
        entries = f" and {count} (arguments, counters, RNG, …)"
    size = bytes_text(sum(tensor.meta.n_bytes for tensor in result.tensors))
    if not result.is_read:
        return f"same names, shapes and dtypes: {tensors} ({size}){entries}; {method}"
    return f"the same: {tensors} ({size}) {method}{entries}"


def _difference_text(result: Diff, n_differing: int) -> str:
    """Return the verdict on checkpoints whose tensors differ."""
    # Every difference may be a cast of the same values.
    tensors = n_text(len(result.tensors), "tensor")
    has_only_casts = all(
        tensor.is_same or (tensor.kind == "dtype" and tensor.is_cast) for tensor in result.tensors
    )
    if has_only_casts and not result.entries:
        count = f"{n_differing:,} of {tensors}"
        return f"only dtypes differ: {count} hold the same values in another dtype"
    # Every tensor that both checkpoints have may be the same, and one of them has more.
    one_sided = [(name, len(members)) for name, members in _one_sided(result) if members]
    n_shared = len(result.tensors) - sum(n for _, n in one_sided)
    if n_shared and n_shared == len(result.tensors) - n_differing:
        missing = " and ".join(
            f"{n:,} {'is' if n == 1 else 'are'} only in {name}" for name, n in one_sided
        )
        entries = f", and {_entries_text(result)} differ" if result.entries else ""
        return (
            f"all shared tensors are the same ({n_shared:,}, {_method_text(result)}), "
            f"but {missing}{entries}"
        )
    entries = f" and {_entries_text(result)}" if result.entries else ""
    return f"different: {n_differing:,} of {tensors}{entries}"


def _entries_text(result: Diff) -> str:
    return n_text(len(result.entries), "other entry", "other entries")


def _one_sided(result: Diff) -> tuple[tuple[str, list[TensorDiff]], ...]:
    """Return the tensors that only one of the checkpoints has, with that checkpoint's name."""
    return ("A", result.of_kind("only_a")), ("B", result.of_kind("only_b"))


def _method_text(result: Diff) -> str:
    """Return the method of comparison as the end of a clause: ``bit for bit``."""
    if not result.is_read:
        return "no tensor was read"
    n_close = len(result.of_kind("close"))
    n_shared = sum(tensor.a is not None and tensor.b is not None for tensor in result.tensors)
    if result.n_by_fingerprint == n_shared > 0:
        return "by fingerprint"
    if result.rule is None or not n_close:
        return "bit for bit"
    return f"within the tolerance, {n_close:,} of them not bit for bit"


def diff_facts(result: Diff) -> Iterator[tuple[str, Cell | str]]:
    """Yield the facts below the verdict: the two sides, how they were compared, and notes."""
    # The two sides, and how they were compared.
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
        reason = "because their fingerprints match in both manifests (--read compares the data)"
        yield "proven", Cell(f"{tensors} not read {reason}", ("green",))
    if result.of_layout:
        yield "layout", Cell(_layout_text(result.of_layout), ("dim",))
    if result.rule is None and result.is_read and result.of_kind("dtype"):
        yield "hint", Cell("--rtol 0 compares values across dtypes", ("dim",))
    # What could not be compared, and notes.
    yield from fact_list("not compared", result.left_out, "red")
    yield from fact_list("note", result.notes[:_MAX_NOTES], "yellow")
    if len(result.notes) > _MAX_NOTES:
        yield "", Cell(f"… {len(result.notes) - _MAX_NOTES} more (--json lists all)", ("dim",))


def _layout_text(entries: Sequence[EntryDiff]) -> str:
    """Return the number and the first names of entries that differ only because of the layout."""
    names = ", ".join(escaped(entry.path.removeprefix("args.")) for entry in entries[:3])
    more = ", …" if len(entries) > 3 else ""
    count = n_text(len(entries), "entry", "entries")
    verb = "differs" if len(entries) == 1 else "differ"
    return f"{count} {verb} because of layout, format or directory, not counted: {names}{more}"


def _side_text(side: Side) -> str:
    """Return a checkpoint's path with its format, parallel sizes and iteration."""
    parts = [side.source.format.name]
    if side.topology is not None:
        parts.append(str(side.topology))
    if side.source.iteration is not None:
        parts.append(f"iteration {side.source.iteration}")
    return f"{escaped(str(side.source.path))}  ({', '.join(parts)})"


def count_table(result: Diff) -> Table:
    """Return the number of tensors of each group and kind, without empty columns and rows."""
    kinds = [kind for kind in COLUMNS if result.of_kind(kind)]
    rows = []
    counts = Counter((tensor.role, tensor.kind) for tensor in result.tensors)
    for role in sorted({role for role, _ in counts}, key=ROLES.index):
        row: list[Cell | str] = [ROLE_TITLES.get(role, role)]
        for kind in kinds:
            n = counts[role, kind]
            color = "green" if kind in ("equal", "close", "unread") else "red"
            row.append(Cell(f"{n:,}", (color,)) if n else dim_cell("·"))
        rows.append(row)
    head = ("", *(COLUMNS[kind] for kind in kinds))
    return Table(rows, align="<" + ">" * len(kinds), head=head, indent=2)


def layer_blocks(result: Diff, *, limit: int = _MAX_LAYERS) -> Iterator[Block]:
    """Yield the layers that differ most; nothing if none does, or there is only one.

    Args:
        limit: maximum number of rows; 0 for all.
    """
    ranked = rank_layers(result.tensors)
    n_differing = len(ranked.layers)
    if not n_differing or ranked.n_layers < 2:
        return
    share = "all" if n_differing == ranked.n_layers else f"{n_differing:,} of"
    yield title_cell(f"most different layers ({share} {ranked.n_layers:,} differ)")
    rows = list(map(layer_row, ranked.layers[: limit or None]))
    head = ("", "tensors", "max |Δ|", "|Δ|/|A|", "most in")
    yield Table(rows, align="<>>><", head=head, indent=2, fits=True)
    if n_differing > len(rows):
        yield dim_cell(f"  … {n_text(n_differing - len(rows), 'more layer')}; --limit 0 shows all")


def _missing_groups(result: Diff, missing: Sequence[TensorDiff]) -> list[str]:
    """Return the groups (roles) that one side lacks completely, except the model."""
    n_all, n_missing = (
        Counter(tensor.role for tensor in tensors) for tensors in (result.tensors, missing)
    )
    return [role for role in ROLES if role != "model" and n_missing[role] == n_all[role] > 1]
