"""What ``ckpt prune`` keeps and removes, as lines and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpt_cli.screen.blocks import Block, Cell, Table, bytes_text, dim_cell, n_text, title_cell
from ckpt_cli.screen.terminal import escaped
from core.opening.iterations import removed_name

if TYPE_CHECKING:
    from core.verbs.prune.run import PrunedIteration, Pruning


def prune_blocks(pruning: Pruning, *, is_done: bool) -> Iterator[Block]:
    """Yield a row for each iteration, the newest first, and what is freed.

    Args:
        is_done: the iterations have been removed; otherwise they would be.
    """
    yield title_cell(str(pruning.root))
    keep, remove = Cell("keep", ("green",)), Cell("removed" if is_done else "remove", ("red",))
    rows: list[tuple[Cell | str, ...]] = []
    for iteration in pruning.iterations:
        names, why = ", ".join(iteration.names), dim_cell(escaped("; ".join(iteration.reasons)))
        size = dim_cell(bytes_text(iteration.n_bytes))
        rows.append((keep if iteration.reasons else remove, escaped(names), size, why))
    for name in pruning.unfinished:
        why = dim_cell("left by an interrupted removal")
        rows.append((remove, escaped(removed_name(name)), "", why))
    yield Table(rows, align="<<><", indent=2, fits=True)
    if pruning.newest_valid is not None:
        how = (
            "every byte of the newest valid iteration was read, or proven by its manifest"
            if pruning.is_proven
            else "the data of the newest valid iteration was not read (--deep)"
        )
        yield dim_cell(f"  {how}")
    for note in pruning.notes:
        yield Cell("note:", ("yellow",)), f" {escaped(note)}"
    yield summary(pruning, is_done=is_done)


def summary(pruning: Pruning, *, is_done: bool) -> str:
    """Return one line: how many iterations stay and are removed, and the bytes that this frees."""
    if pruning.newest_valid is None:
        return "no iteration is known to be valid, so none is removed"
    n_kept = len(pruning.kept)
    kept = f"{n_text(n_kept, 'iteration')} {'stays' if n_kept == 1 else 'stay'}"
    if not pruning.removed:
        return f"nothing to remove: {kept}"
    count = n_text(len(pruning.removed), "iteration")
    freed = bytes_text(pruning.freed_bytes)
    if is_done:
        return f"removed {count}, {freed} freed; {kept}"
    # Without a proof the run itself would end with an error, and remove nothing.
    is_refused = not (pruning.is_proven or pruning.trusts_metadata)
    condition = " with --deep or --trust-metadata" if is_refused else ""
    return f"would remove {count} and free {freed}{condition}; {kept}"


def prune_json(pruning: Pruning) -> dict[str, object]:
    """Return the fields of ``--json`` about iterations; see ``ckpt_cli.commands.prune``."""

    def as_json(iteration: PrunedIteration) -> dict[str, object]:
        return {
            "iteration": iteration.number,
            "paths": [str(pruning.root / name) for name in iteration.names],
            "why": list(iteration.reasons),
            "n_files": iteration.n_files,
            "n_bytes": iteration.n_bytes,
        }

    return {
        "path": str(pruning.root),
        "newest_valid": pruning.newest_valid,
        "kept": [as_json(iteration) for iteration in pruning.kept],
        "removed": [as_json(iteration) for iteration in pruning.removed],
        "unfinished": [str(pruning.root / removed_name(name)) for name in pruning.unfinished],
        "freed_bytes": pruning.freed_bytes,
        "is_proven": pruning.is_proven,
        "notes": list(pruning.notes),
    }
