"""Cases of several workers: one of them is killed, denied or frozen, or all are killed at once.

Whatever happens, no worker hangs, the destination is what it was before or complete, and nothing
but the resumable stage is left. The same command by another number of workers completes it, with
the bytes of a single process, and does no more again than what each worker had not recorded yet. A
worker that is left of a dead lead never writes into what a new run makes.
"""

from __future__ import annotations

import errno
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from core.publish.stage import workers_lock
from core.verbs.convert.workers.run import WorkSizes, run_shared
from tests.faults import disturb as how
from tests.faults.case import KNOWN_CODES, Case
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
from tests.faults.process import Ended
from tests.faults.target import BATCH_BYTES, Target, tree
from tests.faults.workers import Workers

N_WORKERS = 3
LATER = (2, 1, 4, 3)
"""Numbers of workers that continue, in turn."""
ITEM_BYTES = 6 << 10
WORKER_CODE = 8
"""Exit code of a worker that stops because of another."""


@dataclass
class WorkerCases:
    """All disturbances of one target that several workers write."""

    target: Target
    traces: list[list[Operation]] = field(init=False)
    array_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        assert run_shared.__kwdefaults__ is not None
        run_shared.__kwdefaults__["sizes"] = WorkSizes(
            item_bytes=ITEM_BYTES, buffer_bytes=4 * ITEM_BYTES, batch_bytes=BATCH_BYTES
        )
        self.target.begin_anew()
        ended = self._run()
        assert [process.code for process in ended] == [0] * N_WORKERS, [
            process.output for process in ended
        ]
        assert self.target.is_complete() and self.target.is_clean()
        self.traces = [process.trace for process in ended]
        self.target.begin_anew()
        published = next(
            o
            for o in self.traces[0]
            if o.name in RENAMES and o.target == f"place/{self.target.dst.name}"
        )
        self._run(r0=self._at(0, published, how.killed(published.number, "before")))
        self.array_bytes = _resumed_bytes(self._run()[0])

    def all(self) -> Iterator[Case]:
        """Every case."""
        for rank, trace in enumerate(self.traces):
            for operation, when in _kill_points(trace):
                name = _named(rank, operation)
                killed = how.killed(operation.number, when)
                yield Case(
                    "workers: SIGKILL of one",
                    f"{when} {name}",
                    self._killed(rank, operation, killed),
                )
                together = how.killed(operation.number, when, also_others=True)
                yield Case(
                    "workers: SIGKILL of all",
                    f"{when} {name}",
                    self._killed(rank, operation, together),
                )
            for number in (errno.EIO, errno.ENOSPC, errno.EACCES):
                for operation in trace:
                    if is_errno_of(operation, number):
                        failed = how.failed(operation.number, number)
                        name = f"{errno.errorcode[number]} {_named(rank, operation)}"
                        yield Case("workers: errors", name, self._failed(rank, operation, failed))
            for operation in trace:
                if operation.name in (*WRITES, "create"):
                    full = how.failed_from(
                        operation.number, errno.ENOSPC, (*WRITES, "create", "mkdir", "fallocate64")
                    )
                    name = _named(rank, operation)
                    yield Case(
                        "workers: full from then on", name, self._failed(rank, operation, full)
                    )
                    if rank:
                        yield Case("workers: frozen", name, self._frozen(rank, operation))
                if operation.name in (*CHANGES, "fsync", "flock"):
                    name = _named(rank, operation)
                    yield Case("workers: second team", name, self._beside_a_second(rank, operation))
                if operation.name not in LOOKS:
                    for signal_number in (signal.SIGINT, signal.SIGTERM):
                        name = f"{signal_number.name} {_named(rank, operation)}"
                        yield Case(
                            "workers: signals",
                            name,
                            self._signalled(rank, operation, signal_number),
                        )
                if operation.name in (*READS, "open"):
                    yield Case(
                        "workers: source changed",
                        _named(rank, operation),
                        self._source_changed(rank, operation),
                    )

    # ------------------------------------------------------------------ how they are judged

    def _at(self, rank: int, operation: Operation, disturb: Disturb) -> Disturb:
        return how.counted_like(self.traces[rank], operation, disturb)

    def _run(self, n: int = N_WORKERS, **disturbs: Disturb) -> list[Ended]:
        return self._start(
            n, {int(rank[1:]): disturb for rank, disturb in disturbs.items()}
        ).ended()

    def _start(self, n: int, disturbs: dict[int, Disturb], *, notes: str = "notes") -> Workers:
        notes_dir = self.target.work_dir / notes
        notes_dir.mkdir(exist_ok=True)
        return Workers(
            self.target.work(), n, root=self.target.root, notes_dir=notes_dir, disturbs=disturbs
        )

    def _killed(
        self, rank: int, operation: Operation, disturb: Disturb
    ) -> Callable[[], Iterator[str]]:
        def check() -> Iterator[str]:
            self.target.begin_anew()
            ended = self._run(**{f"r{rank}": self._at(rank, operation, disturb)})
            if ended[rank].code != -signal.SIGKILL and not _is_others(operation):
                yield f"not killed: {ended[rank].code} {ended[rank].output[-300:]}"
            for process in ended:
                if process.code not in (0, WORKER_CODE, -signal.SIGKILL):
                    yield f"another worker ended with {process.code}: {process.output[-600:]}"
            yield from self._whole()
            yield from self._again(ended, operation)

        return check

    def _failed(
        self, rank: int, operation: Operation, disturb: Disturb
    ) -> Callable[[], Iterator[str]]:
        def check() -> Iterator[str]:
            self.target.begin_anew()
            ended = self._run(**{f"r{rank}": self._at(rank, operation, disturb)})
            for process in ended:
                if process.code not in (0, WORKER_CODE, *KNOWN_CODES):
                    yield f"a worker ended with {process.code}: {process.output[-600:]}"
            yield from self._whole()
            is_new = self.target.state() == "new"
            if ended[0].code == 0 and not self.target.is_complete():
                yield f"success without a complete destination: {ended[0].output[-300:]}"
            if ended[0].code != 0 and is_new and "is complete" not in ended[0].output:
                yield f"it failed, and yet the destination is new: {ended[0].output[-300:]}"
            if ended[0].code != 0 or not is_new:
                yield from self._again(ended, operation)

        return check

    def _frozen(self, rank: int, operation: Operation) -> Callable[[], Iterator[str]]:
        """A worker stops for a while, the others die, and another run begins."""

        def check() -> Iterator[str]:
            self.target.begin_anew()
            mark, go = self._marks()
            frozen = how.paused(operation.number, lambda: _freeze(mark, go))
            stale = self._start(N_WORKERS, {rank: self._at(rank, operation, frozen)})
            while stale.is_running(rank) and not mark.exists():
                time.sleep(0.002)
            stale.kill([other for other in range(N_WORKERS) if other != rank])
            state = self.target.state()
            with _impatient():
                second = self._start(2, {}, notes="notes2").ended()
            go.touch()
            thawed = stale.ended()[rank]
            if thawed.code not in (0, WORKER_CODE, *KNOWN_CODES):
                yield f"the frozen worker ended with {thawed.code}: {thawed.output[-600:]}"
            if second[0].code == 0 and not self.target.is_complete():
                yield (
                    f"what the second run made is {self.target.state()}, after the frozen "
                    "worker has gone on"
                )
            elif second[0].code not in (0, 2, 6):
                yield f"the second run ended with {second[0].code}: {second[0].output[-300:]}"
            elif second[0].code == (2 if state == "new" else 6):
                if second[0].code == 6 and "workers of an earlier run" not in second[0].output:
                    yield f"the second run says: {second[0].output[-300:]}"
            elif second[0].code != 0:
                yield (
                    f"the destination was {state}, and the second run says: "
                    f"{second[0].output[-300:]}"
                )
            yield from self._whole()
            if second[0].code == 0 and not self.target.is_clean():
                yield "the frozen worker has left something"
            if second[0].code == 6:
                yield from self._again([thawed], operation)

        return check

    def _signalled(
        self, rank: int, operation: Operation, number: signal.Signals
    ) -> Callable[[], Iterator[str]]:
        def check() -> Iterator[str]:
            self.target.begin_anew()
            ended = self._run(
                **{f"r{rank}": self._at(rank, operation, how.signalled(operation.number, number))}
            )
            if ended[rank].code not in (0, 128 + number):
                yield f"exit code {ended[rank].code}: {ended[rank].output[-300:]}"
            for end in ended:
                if end.code not in (0, WORKER_CODE, 128 + number):
                    yield f"another worker ended with {end.code}: {end.output[-600:]}"
            yield from self._whole()
            if ended[0].code == 0 and not self.target.is_complete():
                yield "success without a complete destination"
            if ended[0].code != 0:
                yield from self._again(ended, operation)

        return check

    def _beside_a_second(self, rank: int, operation: Operation) -> Callable[[], Iterator[str]]:
        """Two workers try to write the same while the three are at it."""

        def check() -> Iterator[str]:
            self.target.begin_anew()
            mark, go = self._marks()
            frozen = how.paused(operation.number, lambda: _freeze(mark, go))
            first = self._start(N_WORKERS, {rank: self._at(rank, operation, frozen)})
            while first.is_running(rank) and not mark.exists():
                time.sleep(0.002)
            with _impatient():
                second = self._start(2, {}, notes="notes2").ended()
            go.touch()
            ended = first.ended()
            for end in second:
                if end.code not in (0, 2, 6, WORKER_CODE):
                    yield f"a worker of the second team ended with {end.code}: {end.output[-300:]}"
            for end in ended:
                if end.code not in (0, 2, 6, WORKER_CODE):
                    yield f"a worker of the first team ended with {end.code}: {end.output[-300:]}"
            if 0 not in (ended[0].code, second[0].code):
                yield f"both failed: {ended[0].output[-300:]} {second[0].output[-300:]}"
            if not self.target.is_complete():
                yield f"not complete: {ended[0].output[-300:]} {second[0].output[-300:]}"
            if (
                not self.target.is_clean() and "in the meantime" not in ended[0].output
            ):  # --force may go on from it
                yield f"something stays: {ended[0].output[-300:]}"
            yield from self._whole()

        return check

    def _source_changed(self, rank: int, operation: Operation) -> Callable[[], Iterator[str]]:
        def check() -> Iterator[str]:
            target = self.target
            target.begin_anew()
            ended = self._run(
                **{
                    f"r{rank}": self._at(
                        rank, operation, how.paused(operation.number, target.change_source)
                    )
                }
            )
            if ended[0].code == 0:
                before = tree(target.dst)
                if before != target.new:
                    target.begin_anew()
                    target.run()
                    if tree(target.dst) != before:
                        yield "a mixture of the source before and after"
            elif target.state() not in ("none", "old"):
                yield f"exit code {ended[0].code}, and the destination is {target.state()}"
            for process in ended:
                if process.code not in (0, WORKER_CODE, *KNOWN_CODES):
                    yield f"a worker ended with {process.code}: {process.output[-300:]}"
            target.restore_source()

        return check

    def _marks(self) -> tuple[Path, Path]:
        """What a frozen worker touches, and what it waits for."""
        mark, go = (self.target.work_dir / name for name in ("seen", "go"))
        mark.unlink(missing_ok=True)
        go.unlink(missing_ok=True)
        return mark, go

    def _whole(self) -> Iterator[str]:
        state = self.target.state()
        before = "old" if self.target.force else "none"
        if state not in ("new", before) and not (state == "none" and self.target.is_aside()):
            yield f"the destination is {state}"
        if not self.target.is_untouched_beside():
            yield "a file beside the destination has changed"

    def _again(self, before: Sequence[Ended], operation: Operation) -> Iterator[str]:
        """The same command by another number of workers, undisturbed."""
        n = LATER[operation.number % len(LATER)]
        is_there = self.target.state() == "new" and not self.target.force
        ended = self.target.run("--resume") if n == 1 else self._run(n)[0]
        if is_there:
            if ended.code != 2:
                yield (
                    f"the destination exists, and a second run ends with {ended.code}: "
                    f"{ended.output[-300:]}"
                )
        elif ended.code != 0:
            yield f"run again by {n}, it ends with {ended.code}: {ended.output[-300:]}"
        elif not self.target.is_complete():
            yield f"run again by {n}, the destination is {self.target.state()}"
        elif "continuing" in ended.output:
            yield from self._lost(before, ended)
        if not self.target.is_clean():
            yield f"run again by {n}, something stays: {ended.output[-300:]}"

    def _lost(self, before: Sequence[Ended], again: Ended) -> Iterator[str]:
        """What was done again although a worker had recorded it."""
        n_kept = 0
        for process in before:
            written = [
                o.n_bytes for o in process.trace if o.name == "pwrite" and "/data/" in o.path
            ]
            n_kept += max(0, sum(written) - 2 * BATCH_BYTES - 2 * max([*written, 64 << 10]))
        resumed, n_kept = (
            _resumed_bytes(again),
            min(n_kept, self.array_bytes),
        )  # the lead writes more than arrays
        if resumed < n_kept:
            yield f"{n_kept} bytes must have been recorded, only {resumed} of them were kept"


def _resumed_bytes(ended: Ended) -> int:
    assert ended.code == 0, ended.output
    n_bytes = json.loads(ended.output.splitlines()[-1])["bytes_resumed"]
    assert isinstance(n_bytes, int)
    return n_bytes


def _kill_points(trace: Sequence[Operation]) -> Iterator[tuple[Operation, str]]:
    for operation in trace:
        if operation.name not in (*READS, *LOOKS):
            yield operation, "before"
        if operation.name in CHANGES:
            yield operation, "after"
        if operation.name in WRITES and operation.n_bytes > 1:
            yield operation, "half"


@contextmanager
def _impatient() -> Iterator[None]:
    """New leads do not wait long for workers that are left."""
    assert workers_lock.claim_stage.__kwdefaults__ is not None
    workers_lock.claim_stage.__kwdefaults__["wait_s"] = 0.2
    yield
    workers_lock.claim_stage.__kwdefaults__["wait_s"] = workers_lock.WAIT_SECONDS


def _is_others(operation: Operation) -> bool:
    """Whether it is done only if another worker has come so far."""
    return operation.name in ("open", "read", "close", "fstat") and "/journal" in operation.path


def _freeze(mark: Path, go: Path) -> None:
    mark.touch()
    until = time.monotonic() + 60
    while not go.exists() and time.monotonic() < until:
        time.sleep(0.002)


def _named(rank: int, operation: Operation) -> str:
    return f"worker {rank}: {operation.name} #{operation.number} {operation.path}"
