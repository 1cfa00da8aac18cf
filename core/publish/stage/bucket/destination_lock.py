"""Let one run at a time write a destination in an object store.

::

    .out.ckpt-stage/lock          names the run; put only if it does not exist (If-None-Match: *)
    .out.ckpt-stage/alive-TOKEN   put again and again while the run works

A bucket does not release a lock when its owner dies. So another run takes a lock over if the
process in it is gone, which can be seen on the same machine only, or if the store has seen no sign
of life of it for three minutes, by its own clock. A run whose lock was taken over finds that out
before it publishes anything.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Self

from core.engine.team.threads import RunningThreads
from core.errors import CheckpointingException, StorageError
from core.files.object_client import put_object, read_object
from core.files.object_listing import delete_objects, find_object
from core.files.remote_path import RemotePath
from core.values import dataclass

NAME = "lock"
_ALIVE = "alive-"
_BEAT_S = 20.0
"""Time between two signs of life."""
_SILENT_S = 180.0
"""After this time without one, a run is taken for dead."""
_N_ATTEMPTS = 3
"""How often a lock is tried to take that is released or replaced meanwhile."""
_STOP_S = 2.0
"""Longest wait for a sign of life that is under way."""

_own_tokens: set[str] = set()
"""Tokens of the locks that this process holds."""


@dataclass(frozen=True, slots=True)
class LockOwner:
    """The content of a lock.

    Args:
        token: random name of the run.
        host: name of its host.
        machine: identity of the running system that knows the process; "" if it states none.
        pid: number of the process there.
        started: time at which the process was started, in ticks of its machine.
        since: when it took the lock, for messages.
    """

    token: str
    host: str
    machine: str
    pid: int
    started: int
    since: str

    @classmethod
    def of_this_process(cls) -> Self:
        """Return what this process writes into a lock."""
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            machine=_this_machine(),
            pid=os.getpid(),
            started=_start_of(os.getpid()) or 0,
            since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        )

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        """Parse the content of a lock; None if it is not one of this program."""
        try:
            content: Mapping[str, object] = json.loads(data)
            return cls(
                str(content["token"]),
                str(content["host"]),
                str(content["machine"]),
                int(str(content["pid"])),
                int(str(content["started"])),
                str(content["since"]),
            )
        except (ValueError, KeyError, TypeError):
            return None

    @property
    def is_alive(self) -> bool | None:
        """Whether its run goes on; None if that cannot be seen from here."""
        if not self.machine or self.machine != _this_machine():
            return None
        if self.pid == os.getpid():
            return self.token in _own_tokens
        return _start_of(self.pid) == self.started


class DestinationLock:
    """The lock of a destination; ``take`` and ``release`` it.

    Args:
        dst: the destination, for messages.
        stage_dir: the hidden prefix beside it.
    """

    def __init__(self, dst: RemotePath, stage_dir: RemotePath) -> None:
        self._dst = dst
        self._stage_dir = stage_dir
        self._path = stage_dir / NAME
        self._own: LockOwner | None = None
        self._is_ended = threading.Event()
        self._beating = RunningThreads()

    def take(self) -> None:
        """Take the lock, also one whose run is dead.

        Raises:
            StorageError: another run is writing the destination, or the store refuses, cannot be
                reached, or has no conditional writes.
        """
        owner = LockOwner.of_this_process()
        data = json.dumps(asdict(owner)).encode()
        n_attempts = 0
        while True:
            n_attempts += 1
            try:
                put_object(self._path, data, replace=False)
                break
            except FileExistsError:
                other = self._read()
            if other is None and n_attempts < _N_ATTEMPTS and find_object(self._path) is None:
                continue  # it was released meanwhile
            if other is None or not self._is_dead(other, owner):
                raise self._refusal(other)
            put_object(self._path, data, replace=True)
            with suppress(CheckpointingException):
                delete_objects([self._stage_dir / f"{_ALIVE}{other.token}"])
            break
        self._own = owner
        _own_tokens.add(owner.token)
        threading.Thread(target=self._keep_alive, name="ckpt-lock", daemon=True).start()

    def check(self) -> None:
        """Raise if another run has taken over the lock, or somebody has deleted it.

        Raises:
            StorageError: so it is, or the store refuses or cannot be reached.
        """
        if not self.is_own():
            raise StorageError(
                "another run has taken over this destination, or its lock was deleted",
                file=str(self._dst),
                hint="run the command again when nothing else is writing to the destination",
            )

    def is_own(self) -> bool:
        """Ask the store whether the lock is that of this run.

        Raises:
            StorageError: the store refuses or cannot be reached.
        """
        other = self._read()
        return self._own is not None and other is not None and other.token == self._own.token

    def release(self) -> None:
        """Delete the lock, unless another run has taken it over; do nothing without one.

        It can be repeated if it was interrupted.
        """
        own = self._own
        if own is None:
            return
        self._is_ended.set()
        self._beating.wait(_STOP_S)
        with suppress(CheckpointingException):
            other = self._read()
            is_own = other is not None and other.token == own.token
            alive = [self._stage_dir / f"{_ALIVE}{own.token}"]
            delete_objects([*alive, self._path] if is_own else alive)
        _own_tokens.discard(own.token)
        self._own = None

    def _read(self) -> LockOwner | None:
        """Return who has the lock; None if there is none, or it cannot be understood."""
        data = read_object(self._path)
        return None if data is None else LockOwner.parse(data)

    def _is_dead(self, other: LockOwner, own: LockOwner) -> bool:
        """Return whether the run of a lock has ended without releasing it."""
        is_alive = other.is_alive
        if is_alive is not None:
            return not is_alive
        # Compare times of the store, whose clock need not be that of this machine.
        now = self._stage_dir / f"{_ALIVE}{own.token}"
        put_object(now, b"", replace=True)
        times = {
            path: entry.modified_ns
            for path in (self._path, self._stage_dir / f"{_ALIVE}{other.token}", now)
            if (entry := find_object(path)) is not None
        }
        last_ns = max((time_ns for path, time_ns in times.items() if path != now), default=0)
        is_dead = now in times and times[now] - last_ns > _SILENT_S * 1e9
        if not is_dead:
            delete_objects([now])
        return is_dead

    def _refusal(self, other: LockOwner | None) -> StorageError:
        """Return the error for a destination that another run writes."""
        if other is None:
            return StorageError(
                "another run is writing to this destination",
                file=str(self._dst),
                hint=f"wait until that run has finished, or delete {self._path} if it was killed",
            )
        return StorageError(
            f"another run is writing to this destination: process {other.pid} on {other.host}, "
            f"since {other.since}",
            file=str(self._dst),
            hint="wait until that run has finished"
            if other.is_alive
            else "wait until that run has finished; if it was killed, try again in "
            f"{_SILENT_S / 60:.0f} minutes, or delete {self._path}",
        )

    def _keep_alive(self) -> None:
        """Put signs of life until the lock is released; one that fails is not missed."""
        own = self._own
        assert own is not None
        with self._beating.include():
            while not self._is_ended.wait(_BEAT_S):
                with suppress(CheckpointingException):
                    put_object(self._stage_dir / f"{_ALIVE}{own.token}", b"", replace=True)


def is_of_lock(name: str) -> bool:
    """Return whether an object of the hidden prefix belongs to a lock, of this run or another."""
    return name == NAME or name.startswith(_ALIVE)


def _this_machine() -> str:
    """Return an identity of the running system and of its namespace of processes; "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> int | None:
    """Return when a process was started, in ticks since the start of the machine; None if gone.

    Source: proc(5), ``/proc/pid/stat``, fields 3 (state) and 22 (starttime).
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
