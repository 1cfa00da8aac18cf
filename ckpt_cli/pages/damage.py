"""What is damaged in a checkpoint, as lines above its page and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckpt_cli.screen.blocks import Cell, facts, n_text
from ckpt_cli.screen.terminal import Screen, escaped

if TYPE_CHECKING:
    from core.errors import CheckpointingException

_MOST_SHOWN = 12
"""Maximum number of problems above a page; ``--json`` has all."""


def damage_lines(screen: Screen, problems: Sequence[CheckpointingException]) -> Iterator[str]:
    """Yield a line for each problem, what to do, and an empty line; nothing without problems."""
    if not problems:
        return
    count = n_text(len(problems), "problem")
    title = f"✗ damaged: {count}; below is what can be read"
    yield screen.plain(screen.styled(title, "red", "bold"))
    pairs = []
    for problem in problems[:_MOST_SHOWN]:
        # The file is the label of its line, so that the place does not repeat it.
        place = problem.place.removeprefix(f"file {problem.file}").removeprefix(", ")
        where = f" ({place})" if place else ""
        file = f"{problem.file}: " if problem.file else ""
        pairs.append(("error", Cell(escaped(f"{file}{problem.message}{where}"), ("red",))))
    if len(problems) > _MOST_SHOWN:
        more = n_text(len(problems) - _MOST_SHOWN, "more problem")
        pairs.append(("", Cell(f"… {more} (--json lists all)", ("dim",))))
    hints = dict.fromkeys(problem.hint for problem in problems if problem.hint)
    pairs += [("hint", Cell(escaped(hint))) for hint in list(hints)[:_MOST_SHOWN]]
    yield from facts(screen, pairs, indent=2)
    yield ""


def damage_json(problems: Sequence[CheckpointingException]) -> list[dict[str, object]]:
    """Return the problems as JSON objects, like the ``error`` object of a failed command."""
    return [problem.fields() for problem in problems]
