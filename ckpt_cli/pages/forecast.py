"""The lines of a plan about free space and time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpt_cli.screen.blocks import Cell, bytes_text
from ckpt_cli.screen.terminal import escaped

if TYPE_CHECKING:
    from core.verbs.forecast.forecast import Forecast


def forecast_facts(
    expected: Forecast, *, has_force: bool = False
) -> Iterator[tuple[str, Cell | str]]:
    """Yield what exists already, the free space, and the time to expect with the measured rates.

    Args:
        has_force: the run would have ``--force``.
    """
    yield from _existing_facts(expected, has_force=has_force)
    if expected.free_bytes is not None:
        needed = bytes_text(expected.needed_bytes)
        free = bytes_text(expected.free_bytes)
        if expected.shortage is not None:
            yield "free space", Cell(f"{free}, too little for {needed} to write", ("red",))
        else:
            yield "free space", f"{free}, enough for {needed} to write"
    if expected.resumed_bytes:
        yield "resume", f"{bytes_text(expected.resumed_bytes)} are already written"
    if expected.seconds is None:
        yield "time", Cell(f"not measured: {escaped(expected.unknown or '')}", ("dim",))
        return
    # The rates, and how far to trust them; those of little data mean nothing.
    if expected.seconds < 1:
        yield "time", "less than a second"
        return
    rates = []
    if expected.reading is not None:
        limit = "at most " if expected.reading.is_from_memory else ""
        rates.append(f"read {limit}{bytes_text(round(expected.reading.bytes_per_second))}/s")
    if expected.writing is not None:
        rates.append(f"write {bytes_text(round(expected.writing.bytes_per_second))}/s")
    rates.append("measured")
    yield "time", f"{about_text(expected.seconds)} ({', '.join(rates)})"
    if expected.reading is not None and expected.reading.is_from_memory:
        yield (
            "",
            Cell("the source was cached in memory; reading it from disk takes longer", ("dim",)),
        )
    elif expected.reading is not None and expected.reading.was_cached:
        yield "", Cell("at most, because part of the source is cached in memory", ("dim",))


def _existing_facts(expected: Forecast, *, has_force: bool) -> Iterator[tuple[str, Cell | str]]:
    """Yield what happens to a destination that exists; nothing without one."""
    if expected.existing is None:
        return
    refusal = expected.existing.refusal
    if refusal is not None:
        forced = "despite --force" if has_force else "even with --force"
        text = f"already exists, and the run would refuse it, {forced}: {escaped(refusal.message)}"
        yield "destination", Cell(text, ("red",))
    elif has_force:
        text = "already exists; --force replaces it once the new one is complete"
        yield "destination", Cell(text, ("yellow",))
    else:
        text = (
            "already exists, so the run would refuse it; with --force it is replaced once the new"
            " one is complete"
        )
        yield "destination", Cell(text, ("red",))


def about_text(seconds: float) -> str:
    """Format an estimated duration, rounded: ``about 25 s``, ``about 4 min``, ``about 2 h``."""
    if seconds < 10:
        return f"about {seconds:.0f} s"
    if seconds < 57.5:
        return f"about {5 * round(seconds / 5)} s"
    minutes = max(round(seconds / 60), 1)
    if minutes < 20:
        return f"about {minutes} min"
    hours, minutes = divmod(5 * round(minutes / 5), 60)
    return f"about {f'{hours} h ' if hours else ''}{f'{minutes} min' if minutes else ''}".rstrip()
