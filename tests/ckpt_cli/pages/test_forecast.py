from __future__ import annotations

import pytest

from ckpt_cli.pages.forecast import about_text, forecast_facts
from ckpt_cli.screen.blocks import Cell, facts
from ckpt_cli.screen.terminal import Screen
from core.errors import UsageError
from core.verbs.forecast.destination import ExistingDestination
from core.verbs.forecast.disk_rates import ReadRate, WriteRate
from core.verbs.forecast.forecast import Forecast


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.2, "about 1 s"),
        (9.4, "about 9 s"),
        (23.7, "about 25 s"),
        (58.0, "about 1 min"),
        (89.0, "about 1 min"),
        (243.0, "about 4 min"),
        (1600.0, "about 25 min"),
        (7100.0, "about 2 h"),
        (8000.0, "about 2 h 15 min"),
    ],
)
def test_an_estimate_is_rounded(seconds: float, text: str) -> None:
    assert about_text(seconds) == text


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (ReadRate(1 << 30), "(read 1.00 GiB/s, write 512 MiB/s, measured)"),
        (
            ReadRate(1 << 30, was_cached=True),
            "at most, because part of the source is cached in memory",
        ),
        (ReadRate(1 << 30, is_from_memory=True), "read at most 1.00 GiB/s"),
        (None, "about 25 s (write 512 MiB/s, measured)"),
    ],
)
def test_the_time_says_what_it_follows_from(reading: ReadRate | None, words: str) -> None:
    writing = WriteRate(512 << 20, 1 << 30, 0.001)
    expected = Forecast(free_bytes=1 << 40, reading=reading, writing=writing, seconds=24.0)
    assert words in "\n".join(facts(Screen(), forecast_facts(expected)))


def test_little_work_needs_no_rates() -> None:
    writing = WriteRate(512 << 20, 1 << 30, 0.001)
    expected = Forecast(free_bytes=1 << 40, writing=writing, seconds=0.3)
    assert dict(forecast_facts(expected))["time"] == "less than a second"


@pytest.mark.parametrize(
    ("existing", "has_force", "words"),
    [
        (None, False, None),
        (ExistingDestination(), False, "would refuse it; with --force it is replaced"),
        (ExistingDestination(), True, "--force replaces it once"),
        (ExistingDestination(UsageError("not one")), False, "even with --force: not one"),
        (ExistingDestination(UsageError("not one")), True, "despite --force: not one"),
    ],
)
def test_an_existing_destination_is_told_with_what_force_would_do(
    existing: ExistingDestination | None, has_force: bool, words: str | None
) -> None:
    expected = Forecast(free_bytes=1 << 40, needed_bytes=1 << 30, existing=existing, seconds=0.5)
    lines = {
        name: value.text if isinstance(value, Cell) else value
        for name, value in forecast_facts(expected, has_force=has_force)
    }
    assert lines["free space"] == "1.00 TiB, enough for 1.00 GiB to write"
    assert ("destination" in lines) == (words is not None)
    assert (words or "") in lines.get("destination", "")
