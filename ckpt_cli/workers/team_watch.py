"""Heartbeats of workers: each writes its beat to the store and reads the lead's.

The lead reads all beats. The entries of the store::

    beat/R    written by rank R at every interval: counter, total bytes, bytes done and
              bytes exchanged with the store (4 × int64); b"ended" after a regular end
    alarm     b"", or b"1" if a rank has failed: stop at the next advance
    left      b"", or the pickled (rank, error) of a rank that failed and joins no meeting
    n_left    number of ranks that have failed

A rank whose beat does not change for the time limit counts as lost: the lead notices it and informs
the others by ``left``; every worker notices the loss of the lead.
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
GONE_HINT = (
    "the worker was killed, or its host or network is down; rerun the same command to continue"
)


class TeamWatch:
    """The heartbeat of this worker, and the beats of other workers that it has read.

    Args:
        rank: rank of this worker.
        hosts: hosts of all workers, by rank.
        timeout_s: time without a new beat after which a worker counts as lost.

    Attributes:
        is_alarmed: a worker has failed, so further work is useless.
        error: the reason why no meeting can succeed any more; None while all workers are alive.
    """

    def __init__(self, rank: int, hosts: Sequence[str], *, timeout_s: float) -> None:
        self.is_alarmed = False
        self.error: Exception | None = None
        self._rank = rank
        self._hosts = hosts
        self._timeout_s = timeout_s
        self._watched = range(len(hosts)) if rank == 0 else range(1)
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._lock = Lock()
        self._read_at = monotonic()
        self._counter = 0
        self._total = 0
        self._done = 0

    @property
    def interval_s(self) -> float:
        """Seconds between two beats; more with many workers, so that the store keeps up."""
        # The store serves some thousand requests per second. At least five beats fit into the time
        # limit, so that a single late beat is not taken for a lost worker.
        return min(self._timeout_s / 5, max(0.25, len(self._hosts) / 512))

    def expect(self, n_bytes: int) -> None:
        """Add to the total bytes of this worker."""
        with self._lock:
            self._total += n_bytes

    def advance(self, n_bytes: int) -> None:
        """Add to the finished bytes of this worker."""
        with self._lock:
            self._done += n_bytes

    def progress(self) -> list[tuple[int, int]]:
        """Return (bytes done, total bytes) by rank; complete only at the lead."""
        # Copy the beats before iterating: the store's thread changes them meanwhile. An empty beat
        # is one that has not begun, and b"ended" has no figures either.
        amounts = [(0, 0)] * len(self._hosts)
        for rank, (value, _) in list(self._beats.items()):
            if len(value) == _BEAT.size:
                _, total, done, _ = _BEAT.unpack(value)
                amounts[rank] = (done, total)
        amounts[self._rank] = (self._done, self._total)  # newer than this worker's own last beat
        return amounts

    def store_bytes(self) -> int:
        """Return the bytes that all workers have exchanged with the store.

        The sum is complete only at the lead.
        """
        return sum(
            _BEAT.unpack(value)[3]
            for value, _ in list(self._beats.values())
            if len(value) == _BEAT.size
        )

    def ended(self) -> list[int]:
        """Return the watched ranks that have finished regularly."""
        return [rank for rank, (value, _) in list(self._beats.items()) if value == _ENDED]

    def living(self) -> list[int]:
        """Return the other watched ranks that have not ended and whose beat changed recently."""
        earliest = monotonic() - 4 * self.interval_s - 1.0
        beats = list(self._beats.items())
        return [
            rank
            for rank, (value, at) in beats
            if rank != self._rank and value != _ENDED and at > earliest
        ]

    def silent_for(self, seconds: float) -> tuple[int, float] | None:
        """Return the watched rank that has been silent the longest, and for how many seconds.

        Returns None if no rank has been silent for ``seconds``, or if this worker itself has not
        read the beats recently.
        """
        now = monotonic()
        if now - self._read_at > seconds / 2:
            return None
        beats = list(self._beats.items())
        silences = [
            (now - at, rank)
            for rank, (value, at) in beats
            if rank != self._rank and value != _ENDED
        ]
        longest, rank = max(silences, default=(0.0, 0))
        return (rank, longest) if longest >= seconds else None

    def begin(self, store: ScopedStore) -> None:
        """Create the entries that all workers read; called at the lead before any worker beats."""
        # ``left`` comes last: workers wait for it before they begin, and reading a missing entry
        # of the store would block.
        for rank in range(len(self._hosts)):
            store.set(f"beat/{rank}", b"")
        store.set("alarm", b"")
        store.set("left", b"")

    def beat(self, store: ScopedStore) -> None:
        """Write this worker's beat to the store, read the others' and notice lost workers."""
        # Write this worker's beat; read the watched ones, the alarm and the error of a worker that
        # left. The counter changes the beat even if no work was done.
        self._counter += 1
        store.set(
            f"beat/{self._rank}",
            _BEAT.pack(self._counter, self._total, self._done, store.sent_bytes),
        )
        *beats, alarm, departure = store.multi_get(
            [*(f"beat/{rank}" for rank in self._watched), "alarm", "left"]
        )
        now = monotonic()
        self._record_beats(beats, now)
        # Stop for an error that another worker left, or for a worker that is silent for too long.
        # The error gets the rank that left, unless that rank gave up on a third one (GoneError).
        # ``self.error`` is set last, because other threads raise it as soon as it is set.
        if departure and self.error is None:
            error: Exception
            rank, error = pickle.loads(departure)
            if not isinstance(error, GoneError):
                error.worker = rank  # type: ignore[attr-defined]
            self.error = error
        if self.error is None:
            self._check_silence(store, now)
        self.is_alarmed = bool(alarm) or self.error is not None

    def end(self, store: ScopedStore) -> None:
        """Announce that this worker has finished regularly and joins no further meeting."""
        store.set(f"beat/{self._rank}", _ENDED)

    @staticmethod
    def alarm(store: ScopedStore) -> None:
        """Make the others stop at their next advance."""
        store.set("alarm", b"1")

    def leave(self, store: ScopedStore, error: Exception) -> None:
        """Announce that this worker leaves because of ``error``."""
        # Only the first error is kept: the later ones usually follow from it.
        if store.add("n_left", 1) == 1:
            store.set("left", pickle.dumps((self._rank, error)))
        self.alarm(store)

    def _record_beats(self, values: Sequence[bytes], now: float) -> None:
        """Record when the watched beats changed last, given their values at the time ``now``."""
        # If this worker has not read the beats for a while, subtract that time from the others'
        # silence. Either this worker was stopped, or the store stood still, as torch's does while
        # it looks up a client's name in a DNS that does not answer; then no beat could change.
        missed_s = now - self._read_at
        self._read_at = now
        if missed_s > self._timeout_s / 4:  # regular beats are at most a fifth of it apart
            self._beats = {
                rank: (value, since + missed_s) for rank, (value, since) in self._beats.items()
            }
        for rank, value in zip(self._watched, values, strict=True):
            if rank not in self._beats or self._beats[rank][0] != value:
                self._beats[rank] = (value, now)

    def _check_silence(self, store: ScopedStore, now: float) -> None:
        """Set the error if a watched worker has been silent for longer than the time limit.

        The lead also informs the others.
        """
        for rank, (value, since) in self._beats.items():
            if rank == self._rank or value == _ENDED or now - since <= self._timeout_s:
                continue
            # ``launch.failure`` recognizes the beginning of this message.
            self.error = error = GoneError(
                f"rank {rank} on {self._hosts[rank]} has sent no heartbeat "
                f"for {self._timeout_s:g} s",
                hint=GONE_HINT,
            )
            if self._rank == 0:
                self.leave(store, error)
            else:
                error.of_lead()
            return
