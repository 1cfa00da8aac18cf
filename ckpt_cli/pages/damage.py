"""What is damaged in a checkpoint, as lines above its page and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckpt_cli.screen.blocks import LISTED, Block, Cell, Facts, dim_cell, n_text
from ckpt_cli.screen.terminal import escaped

if TYPE_CHECKING:
    from core.errors import CheckpointingException


def damage_blocks(
    problems: Sequence[CheckpointingException], *, limit: int = LISTED
) -> Iterator[Block]:
    """Yield a fact for each problem, what to do, and an empty line; nothing without problems."""
    if not problems:
        return
    count = n_text(len(problems), "problem")
    yield Cell(f"✗ damaged: {count}; below is what can be read", ("red", "bold"))
    pairs: list[tuple[str, Cell | str]] = []
    for problem in problems[:limit]:
        # The file is the label of its line, so that the place does not repeat it.
        place = problem.place.removeprefix(f"file {problem.file}").removeprefix(", ")
        where = f" ({place})" if place else ""
        file = f"{problem.file}: " if problem.file else ""
        pairs.append(("error", Cell(escaped(f"{file}{problem.message}{where}"), ("red",))))
    if len(problems) > limit:
        more = n_text(len(problems) - limit, "more problem")
        pairs.append(("", dim_cell(f"… {more} (--json lists all)")))
    hints = dict.fromkeys(problem.hint for problem in problems if problem.hint)
    pairs += [("hint", escaped(hint)) for hint in list(hints)[:limit]]
    yield Facts(pairs, indent=2)
    yield ""


def damage_json(problems: Sequence[CheckpointingException]) -> list[dict[str, object]]:
    """Return the problems as JSON objects, like the ``error`` object of a failed command."""
    return [problem.fields() for problem in problems]
