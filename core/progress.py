"""The progress of a long operation: its phase, and how much of the phase is done.

The engine never prints. It calls a function with a ``Progress`` when a phase begins and after each
step of it, from any thread; whoever called the engine decides what becomes of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Literal

from core.values import dataclass


class Phase(StrEnum):
    """A part of an operation, as users read it."""

    STARTING = "starting workers"
    MEETING = "waiting for all workers"
    OPENING = "reading metadata"
    PLANNING = "planning"
    COPYING = "copying"
    FINGERPRINTING = "fingerprinting"
    VERIFYING = "verifying"
    SYNCING = "syncing"
    PUBLISHING = "publishing"
    CHECKSUMMING = "checksumming"
    CHECKING = "checking"
    COMPARING = "comparing"
    MEASURING = "measuring"
    REMOVING = "removing"


Unit = Literal["bytes", "files"]


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of one phase.

    Args:
        phase: the phase.
        done, total: amounts in ``unit``; a total of 0 is unknown.
        unit: what the amounts count.
    """

    phase: Phase
    done: int = 0
    total: int = 0
    unit: Unit = "bytes"


OnProgress = Callable[[Progress], None]
"""Called from any thread, so it has to return at once."""


def begin_phase(report: OnProgress | None, phase: Phase) -> None:
    """Report that a phase begins whose amounts are unknown."""
    if report is not None:
        report(Progress(phase))


def count_steps(
    report: OnProgress | None, phase: Phase, total: int = 0, *, unit: Unit = "bytes"
) -> Callable[[int], None] | None:
    """Begin a phase, and return a thread-safe function that adds to what is done.

    Returns None if nobody wants the report.
    """
    if report is None:
        return None
    lock = threading.Lock()
    done = 0
    report(Progress(phase, 0, total, unit))

    def step(amount: int) -> None:
        nonlocal done
        with lock:
            done += amount
            report(Progress(phase, done, total, unit))

    return step


def report_bytes(report: OnProgress | None, phase: Phase) -> Callable[[int, int], None] | None:
    """Begin a phase, and return a function that reports (bytes done, bytes in total) of it.

    Returns None if nobody wants the report.
    """
    if report is None:
        return None
    report(Progress(phase))
    return lambda done, total: report(Progress(phase, done, total))


def bytes_only(callback: Callable[[int, int], None] | None) -> OnProgress | None:
    """Return a report that passes on (bytes done, bytes in total), and no other phases."""
    if callback is None:
        return None

    def report(progress: Progress) -> None:
        if progress.unit == "bytes" and progress.total:
            callback(progress.done, progress.total)

    return report
