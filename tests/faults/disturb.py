"""What can happen to a process at one of its file operations."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from tests.faults.operations import READS, WRITES, Call, Disturb, Operation


def nothing(operation: Operation, call: Call) -> object:
    """All goes well."""
    return call.do()


def killed(number: int, when: str, *, also_others: bool = False) -> Disturb:
    """SIGKILL ``before``, ``after`` or ``half``-way through operation ``number``; of the whole
    process group or not.
    """

    def disturb(operation: Operation, call: Call) -> object:
        if operation.number != number:
            return call.do()
        if when == "half":
            call.half()
        try:
            if when == "after":
                call.do()
        finally:
            if also_others:
                os.killpg(0, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a killed process goes on")

    return disturb


def failed(number: int, error: int) -> Disturb:
    """One operation fails."""

    def disturb(operation: Operation, call: Call) -> object:
        return call.fail(error) if operation.number == number else call.do()

    return disturb


def failed_from(number: int, error: int, names: Collection[str]) -> Disturb:
    """All operations of these names fail from ``number`` on, as on a disk that is full and stays
    so.
    """

    def disturb(operation: Operation, call: Call) -> object:
        return (
            call.fail(error)
            if operation.number >= number and operation.name in names
            else call.do()
        )

    return disturb


def missing(error: int, names: Collection[str]) -> Disturb:
    """The system has none of these functions."""
    return failed_from(0, error, names)


def short(operation: Operation, call: Call) -> object:
    """Every read and every write moves half of what it was asked to."""
    return call.half() if operation.name in (*READS, *WRITES) else call.do()


def signalled(number: int, signal_number: signal.Signals, *, also: Disturb = nothing) -> Disturb:
    """A signal arrives during one operation."""

    def disturb(operation: Operation, call: Call) -> object:
        if operation.number == number:
            os.kill(os.getpid(), signal_number)
        return also(operation, call)

    return disturb


def paused(number: int, meanwhile: Callable[[], None], *, also: Disturb = nothing) -> Disturb:
    """Something else happens before one operation."""

    def disturb(operation: Operation, call: Call) -> object:
        if operation.number == number:
            meanwhile()
        return also(operation, call)

    return disturb


def observed(look: Callable[[Operation], None]) -> Disturb:
    """Somebody looks before and after every operation."""

    def disturb(operation: Operation, call: Call) -> object:
        look(operation)
        try:
            return call.do()
        finally:
            look(operation)

    return disturb


def counted_like(trace: Sequence[Operation], operation: Operation, disturb: Disturb) -> Disturb:
    """A disturbance of an operation by its number in a trace, of a process whose operations come in
    another order.

    It is told by its name and path, and by how many alike came before it.
    """
    n_before = sum(_are_alike(earlier, operation) for earlier in trace[: operation.number])
    n_seen = 0

    def renumbered(performed: Operation, call: Call) -> object:
        nonlocal n_seen
        number = -1 if n_seen <= n_before else operation.number + 1
        if _are_alike(performed, operation):
            number = operation.number if n_seen == n_before else number
            n_seen += 1
        return disturb(replace(performed, number=number), call)

    return renumbered


def _are_alike(first: Operation, other: Operation) -> bool:
    return (first.name, first.path, first.target) == (other.name, other.path, other.target)


def both(first: Disturb, second: Disturb) -> Disturb:
    """Two disturbances at once; where the first lets an operation pass, the second sees it."""

    def disturb(operation: Operation, call: Call) -> object:
        return first(operation, Call(lambda: second(operation, call), call.half, call.fail))

    return disturb
