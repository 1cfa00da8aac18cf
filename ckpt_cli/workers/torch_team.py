"""A team (``core.team.protocol.Team``) over torch.distributed.

Who has come to a meeting is known through the store, so that a wait for a worker that will never come ends; when all
have come, the data go through collectives of a process group. Whatever blocks in native code runs in a thread of its
own, and the caller waits in Python: it hears signals, and that another worker has gone.

::

    meet/N/R    size of what rank R brings to meeting N
    meet/N      the longest of them, set by the lead when all are there

Data: a gather moves at most ``_PART_BYTES`` over all ranks at a time, so that one long answer costs the lead no more
memory than that. A broadcast goes along gloo's tree, or nccl's ring.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt_cli.workers.rendezvous import Meeting, interface_of
from ckpt_cli.workers.store import POLL_S, GoneError, ScopedStore
from ckpt_cli.workers.team_watch import TeamWatch
from core.errors import WorkerError
from core.team.protocol import StoppedError

if TYPE_CHECKING:
    from ckpt_cli.host.rank_env import Place

T = TypeVar("T")

_PART_BYTES = 8 << 20
PART_MEMORY_BYTES = 2 * _PART_BYTES
"""What a meeting takes beside what the ranks say; a part is there as tensors, and as bytes."""
_WORD_S = 5.0
"""Most seconds that a worker tries to leave word when it ends."""
_EXPLAIN_S = 2.0
"""Seconds of silence, beside some beats, that make a worker the one that broke a collective."""
_END_S = 10.0
"""Most seconds that the end of a job waits for workers that are done as well."""


class TorchTeam:
    """See ``core.team.protocol.Team``.

    Args:
        place: of this worker.
        meeting: the workers that have found one another.
        backend: what torch.distributed is to use: ``gloo``, or ``cpu:gloo,cuda:nccl``.
        device: of the worker, as torch names it.
        data_device: where collectives have their data: ``cpu``, or the device.
        timeout_s: a worker that is silent for so long is given up.

    Attributes:
        collective_bytes: that all ranks together have sent through collectives, as the lead counts them.
    """

    def __init__(
        self, place: Place, meeting: Meeting, *, backend: str, device: str, data_device: str, timeout_s: float
    ) -> None:
        self.rank = place.rank
        self.size = place.size
        self.hosts: Sequence[str] = meeting.hosts
        self.runtime_bytes = 0
        self.collective_bytes = 0
        self._line = meeting.line
        self._place = place
        self._backend = backend
        self._device = device
        self._data_device = data_device
        self._timeout_s = timeout_s
        self._n_meetings = 0
        self._prefix = meeting.prefix
        self._watch = TeamWatch(self.rank, meeting.hosts, timeout_s=timeout_s)
        self._store: ScopedStore | None = None
        self._begin(meeting)

    def gather(self, data: bytes) -> list[bytes] | None:
        """See ``core.team.protocol.Team``."""
        longest, sizes = self._met(len(data))
        if self.rank == 0:
            return [data, *self._received(sizes)]
        for start, stop in self._parts(longest):
            self._watched(lambda part=data[start:stop], n=stop - start: self._give(part, n))  # type: ignore[misc]
        return None

    def broadcast(self, data: bytes) -> bytes:
        """See ``core.team.protocol.Team``."""
        n_bytes, _ = self._met(len(data) if self.rank == 0 else 0, only_lead=True)
        if not n_bytes:
            return b""
        self.collective_bytes += n_bytes * (self.size - 1)
        return self._watched(lambda: self._shared(data, n_bytes))

    def expect(self, n_bytes: int) -> None:
        """See ``core.team.protocol.Team``."""
        self._watch.expect(n_bytes)

    def advance(self, n_bytes: int) -> None:
        """See ``core.team.protocol.Team``."""
        self._watch.advance(n_bytes)
        if self._watch.is_alarmed or self._line.is_broken:
            raise StoppedError

    def alarm(self) -> None:
        """See ``core.team.protocol.Team``."""
        self._line.send(self._scoped(TeamWatch.alarm))

    def progress(self) -> list[tuple[int, int]]:
        """(bytes done, bytes to do) by rank; at the lead."""
        return self._watch.progress()

    def facts(self) -> dict[str, object]:
        """What ``--json`` says of the team beside the workers' figures; at the lead."""
        return {
            "launcher": self._place.launcher,
            "backend": self._backend,
            "device": self._device,
            "restarts": self._place.restarts,
            "n_meetings": self._n_meetings,
            "collective_bytes": self.collective_bytes,
            "store_bytes": self._watch.store_bytes(),
        }

    def leave(self, error: Exception) -> None:
        """Tells the others that this worker has failed and comes to no meeting any more; never raises."""
        with suppress(WorkerError):
            self._line.ask(self._scoped(lambda store: self._watch.leave(store, error)), within_s=_WORD_S)

    def end(self) -> None:
        """Ends the membership of a worker that has done its work; never raises.

        A lead that keeps the store waits for the others, who would lose it otherwise.
        """
        with suppress(WorkerError):
            self._line.ask(self._scoped(self._watch.end), within_s=_WORD_S)
            deadline = monotonic() + _END_S
            while self._place.keeps_store and self._watch.living() and monotonic() < deadline:
                self._line.check()
                Event().wait(POLL_S / 2)

    def _begin(self, meeting: Meeting) -> None:
        """Starts the beat, then makes the process group."""
        if self.rank == 0:
            self._ask(self._watch.begin)
        self._wait_for(["left"])
        self._line.beat_every(self._watch.interval_s, self._scoped(self._watch.beat))
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            is_loopback = meeting.address.startswith("127.") or meeting.address == "::1"
            name = None if is_loopback and len(set(self.hosts)) > 1 else interface_of(meeting.address)
            if name is not None:
                os.environ["GLOO_SOCKET_IFNAME"] = name
        self._watched(self._make_group)
        self._met(0)  # who has connected may end at once, but not before all others have

    def _make_group(self) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        store = dist.TCPStore(
            self._place.address,
            self._place.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._timeout_s),
        )
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore(f"{self._prefix}/group", store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self._timeout_s),
        )

    def _met(self, n_bytes: int, *, only_lead: bool = False) -> tuple[int, list[int]]:
        """Waits until all ranks have come.

        Args:
            n_bytes: of what this rank brings.
            only_lead: the others bring nothing.

        Returns:
            Bytes of the longest that is to travel; and of what each rank brings, at the lead.
        """
        number = self._n_meetings
        self._n_meetings += 1
        mine = f"meet/{number}/{self.rank}"
        self._ask(lambda store: store.set(mine, str(n_bytes)))
        if self.rank:
            self._wait_for([f"meet/{number}"])
            return int(self._ask(lambda store: store.get(f"meet/{number}"))), []
        keys = [f"meet/{number}/{rank}" for rank in range(self.size)]
        self._wait_for(keys)
        sizes = [int(value) for value in self._ask(lambda store: store.multi_get(keys))]
        longest = n_bytes if only_lead else max(sizes[1:])
        self._ask(lambda store: store.set(f"meet/{number}", str(longest)))
        return longest, sizes

    def _parts(self, longest: int) -> list[tuple[int, int]]:
        step = max(_PART_BYTES // self.size, 1 << 12)
        return [(start, min(start + step, longest)) for start in range(0, longest, step)]

    def _received(self, sizes: Sequence[int]) -> list[bytes]:
        """What the others bring, at the lead."""
        found = [bytearray() for _ in sizes]
        for start, stop in self._parts(max(sizes[1:])):
            parts = self._watched(lambda n=stop - start: self._take(n))  # type: ignore[misc]
            self.collective_bytes += (stop - start) * (self.size - 1)
            for rank, part in enumerate(parts):
                found[rank] += part[: max(min(sizes[rank], stop) - start, 0)]
        return [bytes(data) for data in found[1:]]

    def _give(self, part: bytes, n_bytes: int) -> None:
        import torch
        import torch.distributed as dist

        tensor = torch.frombuffer(bytearray(part.ljust(n_bytes, b"\0")), dtype=torch.uint8).to(self._data_device)
        dist.gather(tensor, None, dst=0)
        self._settle()

    def _take(self, n_bytes: int) -> list[bytes]:
        import torch
        import torch.distributed as dist

        def empty() -> Any:
            return torch.zeros(n_bytes, dtype=torch.uint8, device=self._data_device)

        tensors = [empty() for _ in range(self.size)]
        dist.gather(empty(), tensors, dst=0)
        self._settle()
        return [tensor.cpu().numpy().tobytes() for tensor in tensors]

    def _shared(self, data: bytes, n_bytes: int) -> bytes:
        import torch
        import torch.distributed as dist

        own = bytearray(data) if self.rank == 0 else bytearray(n_bytes)
        tensor = torch.frombuffer(own, dtype=torch.uint8).to(self._data_device)
        dist.broadcast(tensor, src=0)
        self._settle()
        found: bytes = data if self.rank == 0 else tensor.cpu().numpy().tobytes()
        return found

    def _settle(self) -> None:
        """Waits until what was started on a GPU is done."""
        if self._data_device != "cpu":
            import torch

            torch.cuda.synchronize(self._data_device)

    def _watched(self, work: Callable[[], T]) -> T:
        """What ``work()`` gives, run in a thread of its own, which is left behind if another worker is gone."""
        done = Event()
        found: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                found.append(work())
            except Exception as err:
                errors.append(err)
            done.set()

        Thread(target=run, name="collective", daemon=True).start()
        deadline = monotonic() + 2 * self._timeout_s
        while not done.wait(POLL_S):
            self._check()
            if monotonic() > deadline:
                raise GoneError(
                    f"workers that are all there have not exchanged their data within {2 * self._timeout_s:g} s",
                    hint="see that their hosts reach one another on all ports; GLOO_SOCKET_IFNAME names the interface",
                )
        if errors:
            self._explain(errors[0])
        return found[0]

    def _explain(self, err: Exception) -> None:
        """Raises for a collective that broke.

        The worker that broke it may have left word; of one that was killed the lead soon misses the beats, and tells
        the others, who wait for that a little longer.
        """
        interval_s = self._watch.interval_s
        begun = monotonic()
        missed_s = min(_EXPLAIN_S + 4 * interval_s, self._timeout_s)
        limit_s = missed_s if self.rank == 0 else missed_s + _EXPLAIN_S + 4 * interval_s
        while monotonic() < begun + limit_s:
            self._check()
            Event().wait(POLL_S)
        silent = self._watch.silent_for(missed_s - 2 * interval_s)
        if silent is not None:
            rank, seconds = silent
            gone = GoneError(
                f"rank {rank} on {self.hosts[rank]} is gone: the connection to it broke, "
                f"and it has given no sign for {seconds:.0f} s",
                hint="it was killed, or its host or network is down; run again to go on",
            )
            raise (gone if rank else gone.of_lead()) from err
        reason = str(err).split("\n")[0]
        raise GoneError(
            f"the connection between workers broke: {reason}",
            hint="one of them was killed, or a network is down; run again to go on",
        ) from err

    def _wait_for(self, keys: Sequence[str]) -> None:
        """Waits until all entries are there.

        Raises:
            WorkerError: a worker is gone.
        """
        pause_s = 0.002
        while True:
            ended = self._watch.ended()  # asked for before the entries: who ends has made them before
            if self._ask(lambda store: store.check(keys)):
                return
            self._check()
            others = [rank for rank in ended if rank != self.rank]
            if others:
                raise WorkerError(
                    f"rank {others[0]} on {self.hosts[others[0]]} has ended, but rank {self.rank} waits for it",
                    hint="this is a bug in ckpt: run again with --debug and report what it prints",
                )
            Event().wait(pause_s)
            pause_s = min(pause_s * 1.5, max(POLL_S, self.size / 2000))

    def _check(self) -> None:
        if self._watch.error is not None:
            raise self._watch.error
        self._line.check()

    def _ask(self, work: Callable[[ScopedStore], T]) -> T:
        return self._line.ask(self._scoped(work))

    def _scoped(self, work: Callable[[ScopedStore], T]) -> Callable[[Any], T]:
        """``work`` on the entries of these workers as they were started now."""

        def run(store: Any) -> T:
            if self._store is None:
                self._store = ScopedStore(store, self._prefix)
            return work(self._store)

        return run
