"""The lines of a plan about free space and time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpt_cli.screen.blocks import Cell, bytes_text
from ckpt_cli.screen.terminal import escaped

if TYPE_CHECKING:
    from core.forecast.forecast import Forecast


def forecast_facts(expected: Forecast) -> Iterator[tuple[str, Cell | str]]:
    """Yield the free space, and the time to expect with the measured rates."""
    free = bytes_text(expected.free_bytes)
    if expected.shortage is not None:
        yield "free space", Cell(f"{free}: too little", ("red",))
    else:
        yield "free space", f"{free}: enough"
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
        yield "", Cell("the source was read from memory: a slower disk takes longer", ("dim",))
    elif expected.reading is not None and expected.reading.was_cached:
        yield "", Cell("at most: the source is partly in memory", ("dim",))


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
