"""Cases: one disturbance of one command, and whether anything was lost by it.

Whatever happens, the destination is what it was before or complete, other files are untouched, and
the same command run again succeeds and leaves nothing behind. In addition, by kind of fault:

- an error or a signal leaves no stage, and one error of the documented kinds;
- a killed run leaves a stage that the next one names and removes, or continues with ``--resume``
  without doing more again than its last batches.
"""

from __future__ import annotations

import errno
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import disturb as how
from tests.faults.operations import (
    CHANGES,
    LOOKS,
    READS,
    RENAMES,
    WRITES,
    Disturb,
    Operation,
    is_errno_of,
)
from tests.faults.order import unordered
from tests.faults.process import Ended
from tests.faults.saved import SavedTarget
from tests.faults.target import BATCH_BYTES, Target, tree

KNOWN_CODES = (2, 3, 6, 7)
"""Exit codes that a fault of the system may lead to."""


@dataclass(frozen=True, slots=True)
class Case:
    """One disturbance.

    Args:
        fault: its kind, as the table calls it.
        name: what happens where.
        check: runs it and yields what was wrong.
    """

    fault: str
    name: str
    check: Callable[[], Iterator[str]]


@dataclass
class Cases:
    """All disturbances of one target."""

    target: Target | SavedTarget
    trace: list[Operation] = field(init=False)

    def __post_init__(self) -> None:
        self.target.begin_anew()
        self.trace = self.target.run().trace
        assert self.target.is_complete()

    def all(self) -> Iterator[Case]:
        """Every case."""
        yield from self.kills()
        yield from self.errors()
        yield from self.lacking()
        yield from self.signals()
        if isinstance(self.target, Target):
            yield from self.order(self.target)
            yield from self.kills_with_resume()
            yield from self.changed_sources(self.target)
        yield from self.others()

    def kills(self) -> Iterator[Case]:
        """SIGKILL before, after and half-way through everything."""
        for operation, when in self._kill_points():
            yield Case("SIGKILL", f"{when} {_named(operation)}", self._killed(operation, when))

    def kills_with_resume(self) -> Iterator[Case]:
        """The same with ``--resume``."""
        for operation, when in self._kill_points():
            name = f"{when} {_named(operation)}"
            yield Case("SIGKILL, --resume", name, self._killed(operation, when, "--resume"))

    def order(self, target: Target) -> Iterator[Case]:
        """Data is on the disk before a name says that it is there."""

        def check(name: str, *more: str) -> Iterator[str]:
            target.begin_anew()
            ended = target.run(*more, dst=target.place / name)
            yield from unordered(ended.trace, dst=f"place/{name}")
            if ended.code != 0:
                yield f"exit code {ended.code}: {ended.output[-300:]}"

        name = target.kind.dst
        yield Case("order of syncs", "whole run", lambda: check(name))
        yield Case("order of syncs", "with a journal", lambda: check(name, "--resume"))
        yield Case("order of syncs", "in new directories", lambda: check(f"made/here/{name}"))

    def errors(self) -> Iterator[Case]:
        """Each operation fails once, in every way that the kernel knows, or all of them from one
        on: a full disk.
        """
        for number in (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EMFILE):
            for operation in self.trace:
                if is_errno_of(operation, number):
                    name = errno.errorcode[number]
                    disturb = how.failed(operation.number, number)
                    yield Case(name, _named(operation), self._failed(operation, disturb))

        names = (*WRITES, "create", "mkdir", "fallocate64")
        for operation in self.trace:
            if operation.name in names:
                for more in ((), ("--resume",)) if isinstance(self.target, Target) else ((),):
                    disturb = how.failed_from(operation.number, errno.ENOSPC, names)
                    yield Case(
                        "full from then on",
                        f"{_named(operation)} {more}",
                        self._failed(operation, disturb, *more),
                    )

    def lacking(self) -> Iterator[Case]:
        """Short reads and writes, and a system that lacks functions: all goes well all the same."""
        yield Case("short reads, writes", "all", self._fine(how.short))
        for name in ("fallocate64", "renameat2", "sync_file_range"):
            yield Case("no such function", name, self._fine(how.missing(errno.ENOSYS, [name])))
        no_rename = how.missing(errno.ENOSYS, ["renameat2"])
        trace: list[Operation] = []
        self.target.begin_anew()
        trace = self.target.run(disturb=no_rename).trace
        first = next((o.number for o in trace if o.name == "renameat2"), len(trace))
        for operation in trace[first:]:
            if operation.name in CHANGES:
                for when in ("before", "after"):
                    kill = how.both(how.killed(operation.number, when), no_rename)
                    name = f"SIGKILL {when} {_named(operation)}, without renameat2"
                    yield Case(
                        "no such function", name, self._killed(operation, when, disturb=kill)
                    )
                    yield Case(
                        "no such function",
                        f"{name}, --resume",
                        self._killed(operation, when, "--resume", disturb=kill),
                    )
            if is_errno_of(operation, errno.EIO) and operation.name != "renameat2":
                fail = how.both(how.failed(operation.number, errno.EIO), no_rename)
                yield Case(
                    "no such function",
                    f"EIO at {_named(operation)}, no renameat2",
                    self._failed(operation, fail),
                )
            interrupt = how.signalled(operation.number, signal.SIGINT, also=no_rename)
            yield Case(
                "no such function",
                f"SIGINT at {_named(operation)}, no renameat2",
                self._signalled(2, interrupt),
            )

    def signals(self) -> Iterator[Case]:
        """Ctrl-C and a polite request to end, at any moment."""
        for number in (
            (signal.SIGINT, signal.SIGTERM) if isinstance(self.target, Target) else (signal.SIGINT,)
        ):
            for operation in self.trace:
                if operation.name not in LOOKS:
                    disturb = how.signalled(operation.number, number)
                    yield Case(
                        "SIGINT, SIGTERM",
                        f"{number.name} {_named(operation)}",
                        self._signalled(number, disturb),
                    )

    def others(self) -> Iterator[Case]:
        """Somebody else writes the same, or looks at the destination."""
        for operation in self.trace:
            if operation.name in (*CHANGES, "fsync", "flock"):
                yield Case("second writer", _named(operation), self._beside_a_second(operation))
        yield Case("reader meanwhile", "at every operation", self._looked_at)

    def changed_sources(self, target: Target) -> Iterator[Case]:
        """The source changes while it is read."""
        for operation in self.trace:
            if operation.name in (*READS, "open", *RENAMES):
                yield Case(
                    "source changed", _named(operation), self._source_changed(target, operation)
                )

    # ------------------------------------------------------------------ how they are judged

    def _kill_points(self) -> Iterator[tuple[Operation, str]]:
        for operation in self.trace:
            if operation.name not in (*READS, *LOOKS):
                yield operation, "before"
            if operation.name in CHANGES:
                yield operation, "after"
            if operation.name in WRITES and operation.n_bytes > 1:
                yield operation, "half"

    def _killed(
        self, operation: Operation, when: str, *more: str, disturb: Disturb | None = None
    ) -> Callable[[], Iterator[str]]:
        def check() -> Iterator[str]:
            self.target.begin_anew()
            ended = self.target.run(*more, disturb=disturb or how.killed(operation.number, when))
            if ended.code != -signal.SIGKILL:
                yield f"not killed: {ended.code} {ended.output[-300:]}"
            yield from self._whole(ended)
            had_stage = any(self.target.stage_dir.glob("*")) and self.target.state() != "new"
            again = yield from self._again(*more)
            if (
                had_stage
                and isinstance(self.target, Target)
                and again is not None
                and "ckpt-stage" not in again.output
                and not more
            ):
                yield f"the stage that was left behind is not named: {again.output[-300:]}"
            if more and again is not None and "continuing" in again.output:
                yield from self._lost(ended, again)

        return check

    def _failed(
        self, operation: Operation, disturb: Disturb, *more: str
    ) -> Callable[[], Iterator[str]]:
        def check() -> Iterator[str]:
            self.target.begin_anew()
            ended = self.target.run(*more, disturb=disturb)
            yield from self._whole(ended)
            yield from self._judged(ended, operation)
            if not more and not self.target.is_clean() and not _is_said(ended):
                yield f"left behind, and not said: {ended.output[-300:]}"
            yield from self._finished(*more)

        return check

    def _fine(self, disturb: Disturb) -> Callable[[], Iterator[str]]:
        def check() -> Iterator[str]:
            self.target.begin_anew()
            ended = self.target.run(disturb=disturb)
            if ended.code != 0:
                yield f"exit code {ended.code}: {ended.output[-300:]}"
            yield from self._whole(ended)
            if not self.target.is_complete() or not self.target.is_clean():
                yield "not complete, or not clean"

        return check

    def _signalled(self, number: int, disturb: Disturb) -> Callable[[], Iterator[str]]:
        def check() -> Iterator[str]:
            self.target.begin_anew()
            ended = self.target.run(disturb=disturb)
            yield from self._whole(ended)
            if ended.code not in (0, 128 + number):
                yield f"exit code {ended.code}: {ended.output[-300:]}"
            if ended.code == 0 and not self.target.is_complete():
                yield "success without a complete destination"
            if not self.target.is_clean():
                yield f"left behind: {ended.output[-300:]}"
            yield from self._finished()

        return check

    def _beside_a_second(self, operation: Operation) -> Callable[[], Iterator[str]]:
        def check() -> Iterator[str]:
            self.target.begin_anew()
            second_notes = self.target.work_dir / "second"
            second_notes.mkdir(exist_ok=True)
            answer = second_notes / "told"
            answer.unlink(missing_ok=True)

            def second() -> None:
                from tests.faults.process import run

                # the fork watches nothing: it sees this directory only
                ended = run(self.target.work(), root=second_notes, notes_dir=second_notes)
                answer.write_text(f"{ended.code} {ended.output}")

            ended = self.target.run(disturb=how.paused(operation.number, second))
            yield from self._whole(ended)
            code = answer.read_text().split()[0] if answer.exists() else "none"
            if code not in ("0", "6", "2"):
                yield f"the second writer ended with {answer.read_text()[:300]}"
            if ended.code not in (0, 2):
                yield f"the first writer ended with {ended.code}: {ended.output[-300:]}"
            if not self.target.is_complete() or not self.target.is_clean():
                yield "not complete, or not clean"

        return check

    def _source_changed(self, target: Target, operation: Operation) -> Callable[[], Iterator[str]]:
        def check() -> Iterator[str]:
            target.begin_anew()
            ended = target.run(disturb=how.paused(operation.number, target.change_source))
            if ended.code == 0:
                begun = [
                    o
                    for o in ended.trace
                    if o.number < operation.number and o.path.startswith("src")
                ]
                if target.state() == "new" or not any(o.name in ("open", *READS) for o in begun):
                    pass  # changed after the last look, or before the first
                elif self._is_of_now(target):
                    pass
                else:
                    yield "a mixture of the source before and after"
            elif target.state() not in ("none", "old"):
                yield f"exit code {ended.code}, and the destination is {target.state()}"
            elif ended.code not in KNOWN_CODES:
                yield f"exit code {ended.code}: {ended.output[-300:]}"
            target.restore_source()

        return check

    def _is_of_now(self, target: Target) -> bool:
        before = tree(target.dst)
        target.begin_anew()
        target.run()
        return tree(target.dst) == before

    def _looked_at(self) -> Iterator[str]:
        self.target.begin_anew()
        states: Path = self.target.work_dir / "states"
        states.write_text("")
        states_so_far: list[str] = []

        def look(operation: Operation) -> None:
            if operation.name not in CHANGES or (
                operation.name in WRITES and "stage" in operation.path
            ):
                return
            state = self.target.state()
            if not states_so_far or state != states_so_far[-1]:
                states_so_far.append(state)
                states.write_text("\n".join(states_so_far))

        ended = self.target.run(disturb=how.observed(look))
        wanted = ["old" if self.target.force else "none", "new"]
        if isinstance(self.target, SavedTarget) and self.target.force:
            wanted.insert(1, "none")
        if ended.code != 0 or states.read_text().split("\n") != wanted:
            yield (
                f"exit code {ended.code}; seen one after the other: "
                f"{states.read_text().split(chr(10))}"
            )

    def _whole(self, ended: Ended) -> Iterator[str]:
        state = self.target.state()
        allowed = ("new", "old" if self.target.force else "none")
        if state not in allowed and not (state == "none" and self._may_be_aside(ended)):
            yield f"the destination is {state}; {ended.code} {ended.output[-300:]}"
        if not self.target.is_untouched_beside():
            yield "a file beside the destination has changed"

    def _may_be_aside(self, ended: Ended) -> bool:
        """Without an exchange of names there is a moment between two renames; the old one must be
        safe then.
        """
        return ended.code == -signal.SIGKILL and self.target.is_aside()

    def _judged(self, ended: Ended, operation: Operation) -> Iterator[str]:
        if ended.code is None:
            yield "hangs"
        elif ended.code == 0:
            if not self.target.is_complete():
                yield f"success without a complete destination: {ended.output[-300:]}"
        elif ended.code not in KNOWN_CODES:
            yield f"exit code {ended.code}: {ended.output[-600:]}"
        elif self.target.state() == "new" and "is complete" not in ended.output:
            yield f"it failed, and yet the destination is new: {ended.output[-300:]}"

    def _again(self, *more: str) -> Iterator[str] | object:
        """The same command, undisturbed; what it ended with."""
        yield from ()
        if self.target.state() == "new" and not self.target.force:
            ended = self.target.run(*more)
            if ended.code != 2:
                yield (
                    f"the destination exists, and a second run ends with {ended.code}: "
                    f"{ended.output[-300:]}"
                )
            if not self.target.is_clean():
                yield f"the stage of a finished run stays: {ended.output[-300:]}"
            return None
        ended = self.target.run(*more)
        if ended.code != 0:
            yield f"run again, it ends with {ended.code}: {ended.output[-300:]}"
        elif not self.target.is_complete():
            yield f"run again, the destination is {self.target.state()}"
        elif not self.target.is_clean():
            yield f"run again, a stage stays: {ended.output[-300:]}"
        return ended

    def _finished(self, *more: str) -> Iterator[str]:
        yield from self._again(*more)  # type: ignore[misc]

    def _lost(self, ended: Ended, again: Ended) -> Iterator[str]:
        import json

        resumed = json.loads(again.output.splitlines()[-1])["bytes_resumed"]
        in_stage = [o for o in ended.trace if o.name == "pwrite" and "/data/" in o.path]
        total = sum(o.n_bytes for o in in_stage)
        largest = max((o.n_bytes for o in in_stage), default=0)
        arrays = min(total, self._array_bytes())
        if resumed < arrays - 2 * BATCH_BYTES - 2 * max(largest, self._item_bytes()):
            yield f"{arrays} bytes were written, only {resumed} of them were kept"

    def _array_bytes(self) -> int:
        return sum(o.n_bytes for o in self.trace if o.name == "pwrite" and "/data/" in o.path) // 2

    def _item_bytes(self) -> int:
        return 64 << 10


def _named(operation: Operation) -> str:
    return f"{operation.name} #{operation.number} {operation.path}"


def _is_said(ended: Ended) -> bool:
    return "could not be removed" in ended.output


def sampled(cases: Sequence[Case], n: int, *, seed: int) -> list[Case]:
    """``n`` of the cases of each fault."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.fault, []).append(case)
    chosen = []
    for fault in groups:
        group = groups[fault]
        chosen += group if len(group) <= n else random.Random(f"{seed} {fault}").sample(group, n)
    return chosen
