"""A team (``core.engine.team.protocol.Team``) over torch.distributed.

A gather or broadcast is a *meeting* of all workers. They announce themselves for each meeting in
the store, so that a wait for a worker that never comes can end; after all have come, the data go
through collectives of a process group. Calls that block in native code run in a thread of their own
while the caller waits in Python, where it handles signals and notices that another worker is gone.
The entries of the store::

    meet/N/R    size of the data that rank R brings to meeting N, in bytes
    meet/N      the largest of these sizes, set by the lead after all have come

A gather moves at most ``_PART_BYTES`` over all ranks at a time, so that one long answer costs the
lead no more memory than that. A broadcast goes along gloo's tree, or nccl's ring.
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
from ckpt_cli.workers.team_watch import GONE_HINT, TeamWatch
from core.engine.team.protocol import StoppedError
from core.errors import WorkerError

if TYPE_CHECKING:
    from ckpt_cli.host.rank_env import WorkerIdentity

T = TypeVar("T")

_PART_BYTES = 8 << 20
PART_MEMORY_BYTES = 2 * _PART_BYTES
"""Memory that a meeting needs in addition to its data: one part, as tensors and as bytes."""
_FAREWELL_S = 5.0
"""Seconds that a worker tries at most to write to the store when it ends."""
_EXPLAIN_S = 2.0
"""Seconds of silence, in addition to four beats, after which a worker is blamed for a broken
collective."""
_END_S = 10.0
"""Seconds that the lead waits at most at the end of a job for the others to end."""


class TorchTeam:
    """A team whose members are processes of torch.distributed.

    Args:
        identity: identity of this worker.
        meeting: the result of the rendezvous.
        backend: backend of torch.distributed: ``gloo``, or ``cpu:gloo,cuda:nccl``.
        device: the worker's device, as torch names it.
        data_device: device of the collectives' data: ``cpu``, or the worker's device.
        timeout_s: time without a heartbeat after which a worker counts as lost.

    Attributes:
        hosts: host names, by rank.
        collective_bytes: bytes that all ranks together have sent through collectives, counted by
            the lead.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        meeting: Meeting,
        *,
        backend: str,
        device: str,
        data_device: str,
        timeout_s: float,
    ) -> None:
        self.rank = identity.rank
        self.size = identity.size
        self.hosts: Sequence[str] = meeting.hosts
        self.runtime_bytes = 0
        self.collective_bytes = 0
        self._line = meeting.line
        self._identity = identity
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
        longest, sizes = self._meet(len(data))
        if self.rank == 0:
            return [data, *self._receive_parts(sizes)]
        # All ranks make the same number of collective calls, so shorter data are padded.
        for start, stop in self._part_ranges(longest):
            self._run_watched(lambda part=data[start:stop], n=stop - start: self._give(part, n))  # type: ignore[misc]
        return None

    def broadcast(self, data: bytes) -> bytes:
        n_bytes, _ = self._meet(len(data) if self.rank == 0 else 0, only_lead=True)
        if not n_bytes:
            return b""
        self.collective_bytes += n_bytes * (self.size - 1)
        return self._run_watched(lambda: self._broadcast_tensor(data, n_bytes))

    def expect(self, n_bytes: int) -> None:
        self._watch.expect(n_bytes)

    def advance(self, n_bytes: int) -> None:
        self._watch.advance(n_bytes)
        if self._watch.is_alarmed or self._line.is_broken:
            raise StoppedError

    def alarm(self) -> None:
        self._line.send(self._scoped(TeamWatch.alarm))

    def progress(self) -> list[tuple[int, int]]:
        """Return (bytes done, total bytes) by rank; complete only at the lead."""
        return self._watch.progress()

    def facts(self) -> dict[str, object]:
        """Return the fields about the team that ``--json`` prints; called at the lead."""
        return {
            "launcher": self._identity.launcher,
            "backend": self._backend,
            "device": self._device,
            "restarts": self._identity.restarts,
            "n_meetings": self._n_meetings,
            "collective_bytes": self.collective_bytes,
            "store_bytes": self._watch.store_bytes(),
        }

    def leave(self, error: Exception) -> None:
        """Announce that this worker has failed and joins no further meeting; never raises."""
        with suppress(WorkerError):
            self._line.ask(
                self._scoped(lambda store: self._watch.leave(store, error)), within_s=_FAREWELL_S
            )

    def end(self) -> None:
        """End the membership of a worker that has done its work; never raises."""
        with suppress(WorkerError):
            self._line.ask(self._scoped(self._watch.end), within_s=_FAREWELL_S)
            # A lead that runs the store waits for the others, which would lose the store otherwise.
            deadline = monotonic() + _END_S
            while self._identity.keeps_store and self._watch.living() and monotonic() < deadline:
                self._line.check()
                Event().wait(POLL_S / 2)

    def _begin(self, meeting: Meeting) -> None:
        """Start the heartbeat, then create the process group."""
        # The lead creates the entries; every worker's heartbeat begins after they exist.
        if self.rank == 0:
            self._ask(self._watch.begin)
        self._wait_for(["left"])
        self._line.beat_every(self._watch.interval_s, self._scoped(self._watch.beat))
        # Let gloo use the interface that leads to the store, unless the user chose one. On the host
        # of the store that may be the loopback, which does not reach workers on other hosts.
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            is_loopback = meeting.address.startswith("127.") or meeting.address == "::1"
            name = (
                None if is_loopback and len(set(self.hosts)) > 1 else interface_of(meeting.address)
            )
            if name is not None:
                os.environ["GLOO_SOCKET_IFNAME"] = name
        self._run_watched(self._make_group)
        # A worker may end right after it has connected, but not before all others have.
        self._meet(0)

    def _make_group(self) -> None:
        """Create torch's process group, over a connection to the store of its own."""
        from datetime import timedelta

        import torch.distributed as dist

        store = dist.TCPStore(
            self._identity.address,
            self._identity.port,
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

    def _meet(self, n_bytes: int, *, only_lead: bool = False) -> tuple[int, list[int]]:
        """Wait until all ranks have announced themselves for the next meeting.

        Args:
            n_bytes: size of the data that this rank brings.
            only_lead: only the lead brings data.

        Returns:
            The largest size to be transferred, and at the lead the size that each rank brings.

        Raises:
            WorkerError: a worker is gone.
        """
        number = self._n_meetings
        self._n_meetings += 1
        own_key = f"meet/{number}/{self.rank}"
        self._ask(lambda store: store.set(own_key, str(n_bytes)))
        # The others wait for the lead's answer only, so the store gets few requests per meeting.
        if self.rank:
            self._wait_for([f"meet/{number}"])
            return int(self._ask(lambda store: store.get(f"meet/{number}"))), []
        # In a gather the lead's own data is not transferred, so its size does not count.
        keys = [f"meet/{number}/{rank}" for rank in range(self.size)]
        self._wait_for(keys)
        sizes = [int(value) for value in self._ask(lambda store: store.multi_get(keys))]
        longest = n_bytes if only_lead else max(sizes[1:])
        self._ask(lambda store: store.set(f"meet/{number}", str(longest)))
        return longest, sizes

    def _part_ranges(self, longest: int) -> list[tuple[int, int]]:
        """Return the (start, stop) byte ranges in which a gather moves up to ``longest`` bytes."""
        step = max(_PART_BYTES // self.size, 1 << 12)
        return [(start, min(start + step, longest)) for start in range(0, longest, step)]

    def _receive_parts(self, sizes: Sequence[int]) -> list[bytes]:
        """Receive and return the data of all other ranks; called at the lead."""
        buffers = [bytearray() for _ in sizes]
        for start, stop in self._part_ranges(max(sizes[1:])):
            parts = self._run_watched(lambda n=stop - start: self._take(n))  # type: ignore[misc]
            self.collective_bytes += (stop - start) * (self.size - 1)
            for rank, part in enumerate(parts):
                buffers[rank] += part[: max(min(sizes[rank], stop) - start, 0)]
        return [bytes(buffer) for buffer in buffers[1:]]

    def _give(self, part: bytes, n_bytes: int) -> None:
        """Send one part, padded to ``n_bytes``, to the lead."""
        import torch
        import torch.distributed as dist

        tensor = torch.frombuffer(bytearray(part.ljust(n_bytes, b"\0")), dtype=torch.uint8).to(
            self._data_device
        )
        dist.gather(tensor, None, dst=0)
        self._synchronize()

    def _take(self, n_bytes: int) -> list[bytes]:
        """Receive one part of ``n_bytes`` from every rank; called at the lead."""
        import torch
        import torch.distributed as dist

        def empty() -> Any:
            return torch.zeros(n_bytes, dtype=torch.uint8, device=self._data_device)

        tensors = [empty() for _ in range(self.size)]
        dist.gather(empty(), tensors, dst=0)
        self._synchronize()
        return [tensor.cpu().numpy().tobytes() for tensor in tensors]

    def _broadcast_tensor(self, data: bytes, n_bytes: int) -> bytes:
        """Send the lead's data to all ranks, and return it on each."""
        import torch
        import torch.distributed as dist

        buffer = bytearray(data) if self.rank == 0 else bytearray(n_bytes)
        tensor = torch.frombuffer(buffer, dtype=torch.uint8).to(self._data_device)
        dist.broadcast(tensor, src=0)
        self._synchronize()
        received: bytes = data if self.rank == 0 else tensor.cpu().numpy().tobytes()
        return received

    def _synchronize(self) -> None:
        """Wait until the collective is done."""
        # nccl's calls only queue work on the GPU; gloo's return after the transfer.
        if self._data_device != "cpu":
            import torch

            torch.cuda.synchronize(self._data_device)

    def _run_watched(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread and return its result; abandon the thread if a worker is gone.

        Raises:
            GoneError: another worker is gone, or the work takes longer than twice the time limit.
            Exception: another worker failed and left this error.
        """
        done = Event()
        results: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(work())
            except Exception as err:
                errors.append(err)
            done.set()

        # A daemon thread, because an abandoned one may block forever and must not delay the exit.
        Thread(target=run, name="collective", daemon=True).start()
        deadline = monotonic() + 2 * self._timeout_s
        # Waiting in short steps lets this thread handle signals and notice a worker that is gone.
        while not done.wait(POLL_S):
            self._check()
            if monotonic() > deadline:
                raise GoneError(
                    "the workers joined, but did not exchange data "
                    f"within {2 * self._timeout_s:g} s",
                    hint="check that the hosts can reach each other on all ports; "
                    "set GLOO_SOCKET_IFNAME to choose the network interface",
                )
        if errors:
            self._explain(errors[0])
        return results[0]

    def _explain(self, err: Exception) -> None:
        """Raise the error for a broken collective.

        Raises:
            GoneError: a worker is gone; the message names it if it can be known.
            Exception: a worker failed and left this error.
        """
        # Wait until the worker that broke the collective can be known: it may leave its error in
        # the store. If it was killed, the lead soon misses its beats and informs the others, which
        # therefore wait a little longer than the lead.
        interval_s = self._watch.interval_s
        begun = monotonic()
        missed_s = min(_EXPLAIN_S + 4 * interval_s, self._timeout_s)
        limit_s = missed_s if self.rank == 0 else missed_s + _EXPLAIN_S + 4 * interval_s
        while monotonic() < begun + limit_s:
            self._check()
            Event().wait(POLL_S)
        # Blame the worker that has been silent the longest, if there is one.
        silent = self._watch.silent_for(missed_s - 2 * interval_s)
        if silent is not None:
            rank, seconds = silent
            error = GoneError(
                f"lost contact with rank {rank} on {self.hosts[rank]}: the connection broke, "
                f"and it has sent no heartbeat for {seconds:.0f} s",
                hint=GONE_HINT,
            )
            raise (error if rank else error.of_lead()) from err
        reason = str(err).split("\n")[0]
        raise GoneError(
            f"the connection between workers broke: {reason}",
            hint="a worker was killed, or a network is down; rerun the same command to continue",
        ) from err

    def _wait_for(self, keys: Sequence[str]) -> None:
        """Wait until all entries exist.

        Raises:
            WorkerError: a worker is gone, or has ended without writing its entry.
        """
        pause_s = 0.002
        while True:
            # Read who has ended before the entries: a worker writes its entries before it ends, so
            # if an entry is missing then, that worker will not write it any more.
            ended = self._watch.ended()
            if self._ask(lambda store: store.check(keys)):
                return
            self._check()
            missing = next((rank for rank in ended if rank != self.rank), None)
            if missing is not None:
                raise WorkerError(
                    f"rank {missing} on {self.hosts[missing]} has exited, "
                    f"but rank {self.rank} is still waiting for it",
                    hint="this is a bug in ckpt: rerun with --debug and report the output",
                )
            # Most waits are short, so pause briefly first; longer with many workers, which share
            # the store.
            Event().wait(pause_s)
            pause_s = min(pause_s * 1.5, max(POLL_S, self.size / 2000))

    def _check(self) -> None:
        if self._watch.error is not None:
            raise self._watch.error
        self._line.check()

    def _ask(self, work: Callable[[ScopedStore], T]) -> T:
        return self._line.ask(self._scoped(work))

    def _scoped(self, work: Callable[[ScopedStore], T]) -> Callable[[Any], T]:
        """Return a function that calls ``work`` with the store under this team's prefix."""

        def run(store: Any) -> T:
            if self._store is None:
                self._store = ScopedStore(store, self._prefix)
            return work(self._store)

        return run
