"""The picture of ``ckpt inspect --sizes``: where the bytes are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpt_cli.pages.pictures.bars import draw_bar
from ckpt_cli.screen.blocks import Cell, bytes_text, n_text, table
from ckpt_cli.screen.terminal import Screen, columns_of, escaped
from core.verbs.pictures.sizes import SizeNode, fold_sizes

_BAR_COLUMNS = range(8, 41)
"""Least and largest number of columns of the longest bar."""
_NAME_COLUMNS = 48
"""Columns of a name that leave room for the bars; longer names are shortened."""
_LEAST_SHARE = 0.01
"""Least share of all bytes that has a line of its own."""


def size_lines(
    screen: Screen, model: SizeNode, optimizer: SizeNode, *, sort: str | None
) -> Iterator[str]:
    """Yield a bar for each module, below those of the complete model and optimizer.

    Args:
        model, optimizer: the result of ``core.verbs.pictures.sizes.sizes_of``.
        sort: ``name``, otherwise the largest first.
    """
    total_bytes = (model.n_bytes + optimizer.n_bytes) or 1
    least_bytes = _LEAST_SHARE * total_bytes
    rows: list[tuple[int, SizeNode]] = []
    for title, root in (("model", model), ("optimizer", optimizer)):
        if root.n_tensors:
            rows += _rows_of(_titled(root, title), least_bytes=least_bytes, sort=sort)
    # The bars take the room that names and figures leave.
    largest = max(model.n_bytes, optimizer.n_bytes) or 1
    names = ["  " * depth + escaped(node.name) for depth, node in rows]
    name_columns = min(max(map(columns_of, names), default=0), _NAME_COLUMNS)
    room = (screen.width or 100) - name_columns - len("  ") - len("  1023 MiB  100.0 %")
    bar_columns = min(max(room, _BAR_COLUMNS[0]), _BAR_COLUMNS[-1])
    cells = [
        [
            Cell(name, ("bold",) if depth == 0 else (), lead=2 * depth),
            Cell(
                draw_bar(node.n_bytes / largest, bar_columns).ljust(bar_columns),
                ("cyan",) if depth == 0 else ("blue",),
            ),
            Cell(bytes_text(node.n_bytes)),
            Cell(f"{100 * node.n_bytes / total_bytes:.1f} %", ("dim",)),
        ]
        for name, (depth, node) in zip(names, rows, strict=True)
    ]
    yield from table(screen, cells, align="<<>>", fits=True)
    n_tensors = model.n_tensors + optimizer.n_tensors
    n_bytes = model.n_bytes + optimizer.n_bytes
    yield ""
    yield screen.plain(f"{n_text(n_tensors, 'tensor')}, {bytes_text(n_bytes)}")
    yield screen.styled(f"not shown: modules of less than {_LEAST_SHARE:.0%}", "dim")


def _titled(root: SizeNode, title: str) -> SizeNode:
    """Return a folded tree under a title, which replaces a first name that says the same."""
    node = fold_sizes(root)
    if len(node.children) == 1 and node.children[0].name in (title, f"{title}.state"):
        (node,) = node.children
    return SizeNode(title, root.n_bytes, root.n_tensors, node.children)


def _rows_of(
    root: SizeNode, *, least_bytes: float, sort: str | None, depth: int = 0
) -> Iterator[tuple[int, SizeNode]]:
    """Yield (depth, node) for a node and what is below it, many small ones together as one.

    What an earlier sibling contains as well, such as the moments of an optimizer, is not repeated.
    """
    yield depth, root
    large = [child for child in root.children if child.n_bytes >= least_bytes]
    small = [child for child in root.children if child.n_bytes < least_bytes]
    first: dict[object, str] = {}
    for child in _in_order(large, sort):
        same_as = first.setdefault(child.children, child.name) if child.children else child.name
        if same_as != child.name:
            yield depth + 1, replace(child, name=f"{child.name} (as {same_as})")
            continue
        yield from _rows_of(child, least_bytes=least_bytes, sort=sort, depth=depth + 1)
    small_bytes = sum(child.n_bytes for child in small)
    if large and small_bytes >= least_bytes:
        n_tensors = sum(child.n_tensors for child in small)
        name = f"… {n_text(n_tensors, 'smaller tensor')}"
        yield depth + 1, SizeNode(name, small_bytes, n_tensors)


def _in_order(nodes: Sequence[SizeNode], sort: str | None) -> Sequence[SizeNode]:
    """Return the nodes by name, or the largest first."""
    if sort == "name":
        return sorted(nodes, key=lambda node: node.name)
    return sorted(nodes, key=lambda node: -node.n_bytes)


def sizes_json(model: SizeNode, optimizer: SizeNode) -> dict[str, object]:
    """Return the folded trees as an object of ``--json``."""
    return {
        "model": _node_json(fold_sizes(model)),
        "optimizer": _node_json(fold_sizes(optimizer)),
    }


def _node_json(node: SizeNode) -> dict[str, object]:
    """Return a node with its children."""
    return {
        "name": node.name,
        "bytes": node.n_bytes,
        "tensors": node.n_tensors,
        "children": [_node_json(child) for child in node.children],
    }
