"""How workers know of one another: each puts its beat into the store, and reads the lead's; the lead reads all.

::

    beat/R    counter, bytes to do, bytes done, bytes from and to the store  of rank R, every interval
    alarm     b"" or b"1"                                                    a rank has failed: stop at the next advance
    left      b"" or (rank, error)                                           a rank has failed and comes to no meeting

A rank whose beat has stood still for the time limit is given up: by the lead, who tells all others by ``left``, and for
the lead by everyone.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from threading import Lock
from time import monotonic

from ckpt_cli.workers.store import GoneError, ScopedStore

_BEAT = struct.Struct("<qqqq")
_ENDED = b"ended"


class TeamWatch:
    """What a worker tells of itself and knows of the others.

    Args:
        rank: of this worker.
        hosts: of all workers, by rank.
        timeout_s: a worker whose beat stands still for so long is given up.

    Attributes:
        is_alarmed: a worker has failed; work makes no sense any more.
        error: why this worker can wait for no meeting any more; None while all live.
    """

    def __init__(self, rank: int, hosts: Sequence[str], *, timeout_s: float) -> None:
        self.is_alarmed = False
        self.error: Exception | None = None
        self._rank = rank
        self._hosts = hosts
        self._timeout_s = timeout_s
        self._watched = range(len(hosts)) if rank == 0 else range(1)
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._lock = Lock()
        self._looked_at = monotonic()
        self._counter = 0
        self._total = 0
        self._done = 0

    @property
    def interval_s(self) -> float:
        """Seconds from beat to beat: a store serves some thousand requests a second."""
        return min(self._timeout_s / 5, max(0.25, len(self._hosts) / 512))

    def expect(self, n_bytes: int) -> None:
        """Adds to what this worker has to do."""
        with self._lock:
            self._total += n_bytes

    def advance(self, n_bytes: int) -> None:
        """Adds to what this worker has done."""
        with self._lock:
            self._done += n_bytes

    def progress(self) -> list[tuple[int, int]]:
        """(bytes done, bytes to do) by rank, as the lead knows it; elsewhere of this worker and the lead only."""
        found = [(0, 0)] * len(self._hosts)
        for rank, (value, _) in list(self._seen.items()):
            if len(value) == _BEAT.size:
                _, total, done, _ = _BEAT.unpack(value)
                found[rank] = (done, total)
        found[self._rank] = (self._done, self._total)
        return found

    def store_bytes(self) -> int:
        """Bytes that all workers have exchanged with the store, as the lead knows it."""
        return sum(_BEAT.unpack(value)[3] for value, _ in list(self._seen.values()) if len(value) == _BEAT.size)

    def ended(self) -> list[int]:
        """The ranks that have ended in order, of those that this one watches."""
        return [rank for rank, (value, _) in list(self._seen.items()) if value == _ENDED]

    def living(self) -> list[int]:
        """The other ranks that have not ended and gave a sign lately, of those that this one watches."""
        since = monotonic() - 4 * self.interval_s - 1.0
        seen = list(self._seen.items())
        return [rank for rank, (value, at) in seen if rank != self._rank and value != _ENDED and at > since]

    def silent_for(self, seconds: float) -> tuple[int, float] | None:
        """Of the ranks that this one watches, the one that is silent for longest, and how long: ``seconds`` at least.

        None without one, and where this worker itself has not looked lately.
        """
        now = monotonic()
        if now - self._looked_at > seconds / 2:
            return None
        seen = list(self._seen.items())
        found = [(now - at, rank) for rank, (value, at) in seen if rank != self._rank and value != _ENDED]
        longest, rank = max(found, default=(0.0, 0))
        return (rank, longest) if longest >= seconds else None

    def begin(self, store: ScopedStore) -> None:
        """Makes the entries that all read, ``left`` last; the lead calls it before any other worker beats."""
        for rank in range(len(self._hosts)):
            store.set(f"beat/{rank}", b"")
        store.set("alarm", b"")
        store.set("left", b"")

    def beat(self, store: ScopedStore) -> None:
        """Puts this worker's beat into the store and reads what it has to know of the others."""
        self._counter += 1
        store.set(f"beat/{self._rank}", _BEAT.pack(self._counter, self._total, self._done, store.sent_bytes))
        *beats, alarm, left = store.multi_get([*(f"beat/{rank}" for rank in self._watched), "alarm", "left"])
        now = monotonic()
        self._forgive(now)
        for rank, value in zip(self._watched, beats, strict=True):
            if rank not in self._seen or self._seen[rank][0] != value:
                self._seen[rank] = (value, now)
        if left and self.error is None:
            self.error = self._told(left)
        if self.error is None:
            self._find_silent(store, now)
        self.is_alarmed = bool(alarm) or self.error is not None

    def end(self, store: ScopedStore) -> None:
        """Says that this worker ends in order and comes to no meeting."""
        store.set(f"beat/{self._rank}", _ENDED)

    @staticmethod
    def alarm(store: ScopedStore) -> None:
        """Has the others stop at their next advance."""
        store.set("alarm", b"1")

    def leave(self, store: ScopedStore, error: Exception) -> None:
        """Says that this worker comes to no meeting, because of ``error``; the first to leave is heard."""
        if store.add("n_left", 1) == 1:
            store.set("left", pickle.dumps((self._rank, error)))
        self.alarm(store)

    def _told(self, left: bytes) -> Exception:
        rank, error = pickle.loads(left)
        if not isinstance(error, GoneError):
            error.worker = rank
        found: Exception = error
        return found

    def _forgive(self, now: float) -> None:
        """Takes out of the others' silence the time in which this worker did not look.

        It was stopped, or the store stood still, as torch's does while it looks up the name of who connects in a DNS
        that does not answer; then nobody's beat could move.
        """
        missed_s = now - self._looked_at
        self._looked_at = now
        if missed_s > self._timeout_s / 4:  # beats are at most a fifth apart
            self._seen = {rank: (value, since + missed_s) for rank, (value, since) in self._seen.items()}

    def _find_silent(self, store: ScopedStore, now: float) -> None:
        for rank, (value, since) in self._seen.items():
            if rank == self._rank or value == _ENDED or now - since <= self._timeout_s:
                continue
            self.error = error = GoneError(
                f"rank {rank} on {self._hosts[rank]} has given no sign for {self._timeout_s:g} s",
                hint="it was killed, or its host or network is down; run again to go on",
            )
            if self._rank == 0:
                self.leave(store, error)
            else:
                error.of_lead()
            return
