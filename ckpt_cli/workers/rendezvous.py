"""How workers find one another: at the store, under a name that is new each time they start.

The store of an elastic agent outlives its workers, so what they put there when they were started before may still be
there. Each worker therefore draws a random token; the lead's token is the prefix of all that follows::

    lead            the lead's token
    TOKEN/join/R    {"token": …, "host": …, …}    who has come as rank R, having read the lead's token
    TOKEN/welcome   {"tokens": […], "hosts": […], "error": …}    the lead has seen all of them

A worker that does not find its own token in the welcome has read an old one, and reads again.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from ckpt_cli.host.rank_env import Place
from ckpt_cli.workers.begin_check import error_of, record_of
from ckpt_cli.workers.store import StoreLine
from core.errors import CheckpointingException, UsageError, WorkerError

_PAUSE_S = 0.05
_ASKING_RANKS_PER_S = 1000
"""A store serves some ten thousand requests a second; so many workers may look into it."""
_PART_S = 3.0
"""Most seconds that a lead waits until the others have heard its verdict."""

Judge = Callable[[Sequence[Mapping[str, Any]]], CheckpointingException | None]
"""What is wrong with the facts of all workers, by rank; None if they can work together."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Workers that have found one another.

    Args:
        line: to the store.
        prefix: of all that they put there.
        hosts: by rank.
        address: of this host, as the store's host sees it.
    """

    line: StoreLine
    prefix: str
    hosts: Sequence[str]
    address: str


def met(place: Place, facts: Mapping[str, Any], judge: Judge, *, timeout_s: float, join_timeout_s: float) -> Meeting:
    """Waits until all workers are there.

    Args:
        place: of this worker.
        facts: about it that the lead judges; can be written as JSON.
        judge: called at the lead.
        timeout_s: of each request to the store, later on.
        join_timeout_s: most seconds to wait for the others.

    Raises:
        UsageError: the port is taken, or the lead's verdict.
        WorkerError: not all workers have come in time.
    """
    deadline = monotonic() + join_timeout_s
    if not place.keeps_store:
        address = _reached(place, deadline, join_timeout_s)
    line = StoreLine(lambda: _store(place, join_timeout_s), keeper=_keeper(place), timeout_s=join_timeout_s)
    line.ask(lambda store: None)
    if place.keeps_store:
        address = _reached(place, deadline, join_timeout_s)
    host = socket.gethostname()
    token = secrets.token_hex(8)
    mine = {"token": token, "host": host, **facts}
    if place.rank == 0:
        welcome = _welcomed(line, place, mine, judge, deadline, join_timeout_s)
        prefix = token
    else:
        prefix, welcome = _joined(line, place, mine, deadline, join_timeout_s)
    _part(line, place, prefix, has_failed=welcome["error"] is not None)
    if welcome["error"] is not None:
        raise error_of(welcome["error"])
    line.know(keeper=_keeper(place, host=welcome["hosts"][0]), timeout_s=timeout_s)
    return Meeting(line, prefix, welcome["hosts"], address)


def _keeper(place: Place, host: str | None = None) -> str:
    """Who keeps the store, for messages."""
    if place.has_store:
        return f"the launcher at {place.endpoint}"
    return f"rank 0 on {host} ({place.endpoint})" if host else f"rank 0 at {place.endpoint}"


def _reached(place: Place, deadline: float, join_timeout_s: float) -> str:
    """This host's address on the way to the store, once something listens there."""
    while True:
        try:
            with socket.create_connection((place.address, place.port), timeout=2.0) as found:
                return str(found.getsockname()[0])
        except OSError as err:
            if monotonic() > deadline:
                raise WorkerError(
                    f"nothing answers at {place.endpoint}, where the workers meet: {err.strerror or err} "
                    f"(rank {place.rank} has tried for {join_timeout_s:g} s)",
                    hint="see that rank 0 runs, that MASTER_ADDR is its host and MASTER_PORT is open between the hosts",
                ) from err
        sleep(_PAUSE_S)


def _store(place: Place, join_timeout_s: float) -> Any:
    from datetime import timedelta

    from torch.distributed import TCPStore

    try:
        return TCPStore(
            place.address,
            place.port,
            is_master=place.keeps_store,
            wait_for_workers=False,
            timeout=timedelta(seconds=join_timeout_s),
        )
    except RuntimeError as err:  # DistNetworkError, whose message has the name of errno
        if "EADDRINUSE" in str(err):
            raise UsageError(
                f"port {place.port} of {place.address}, where the workers are to meet, is taken by another program",
                hint="set MASTER_PORT to a free one",
            ) from err
        raise


def _welcomed(
    line: StoreLine, place: Place, mine: Mapping[str, Any], judge: Judge, deadline: float, join_timeout_s: float
) -> dict[str, Any]:
    """Waits for the others, judges, and tells them."""
    prefix = mine["token"]
    line.ask(lambda store: store.set("lead", prefix))
    keys = {rank: f"{prefix}/join/{rank}" for rank in range(1, place.size)}
    _wait_for(line, list(keys.values()), deadline)
    missing = [rank for rank, key in keys.items() if not _is_there(line, [key])]
    if missing:
        error: CheckpointingException | None = WorkerError(
            f"{len(missing)} of {place.size} workers have not come to {place.endpoint} within {join_timeout_s:g} s: "
            f"rank {', '.join(map(str, missing[:8]))}{' …' if len(missing) > 8 else ''}",
            hint="see whether they were started, and whether their hosts reach this one; --join-timeout waits longer",
        )
        members = [mine]
    else:
        found = line.ask(lambda store: store.multi_get(list(keys.values()))) if keys else []
        members = [mine, *(json.loads(bytes(data)) for data in found)]
        error = judge(members)
    welcome = {
        "tokens": [member["token"] for member in members],
        "hosts": [member["host"] for member in members],
        "error": None if error is None else record_of(error),
    }
    text = json.dumps(welcome)
    line.ask(lambda store: store.set(f"{prefix}/welcome", text))
    return welcome


def _joined(
    line: StoreLine, place: Place, mine: Mapping[str, Any], deadline: float, join_timeout_s: float
) -> tuple[str, dict[str, Any]]:
    """The lead's token, and its welcome."""
    record = json.dumps(mine)
    prefix = ""
    while True:
        if _is_there(line, ["lead"]):
            found = bytes(line.ask(lambda store: store.get("lead"))).decode()
            if found != prefix:
                prefix = found
                line.ask(lambda store, key=f"{prefix}/join/{place.rank}": store.set(key, record))  # type: ignore[misc]
        if prefix and _is_there(line, [f"{prefix}/welcome"]):
            key = f"{prefix}/welcome"
            welcome: dict[str, Any] = json.loads(bytes(line.ask(lambda store, key=key: store.get(key))))  # type: ignore[misc]
            if mine["token"] in welcome["tokens"] or welcome["error"] is not None:
                return prefix, welcome
        if monotonic() > deadline:
            raise WorkerError(
                f"rank 0 has not welcomed rank {place.rank} at {place.endpoint} within {join_timeout_s:g} s",
                hint="see whether all workers were started, and whether another job uses the same MASTER_PORT",
            )
        sleep(max(_PAUSE_S, place.size / _ASKING_RANKS_PER_S))


def _part(line: StoreLine, place: Place, prefix: str, *, has_failed: bool) -> None:
    """Where the lead keeps the store and goes because workers do not fit: waits until the others have heard it."""
    if not has_failed:
        return
    if place.rank:
        line.ask(lambda store: store.set(f"{prefix}/heard/{place.rank}", b""))
    elif place.keeps_store:
        _wait_for(line, [f"{prefix}/heard/{rank}" for rank in range(1, place.size)], monotonic() + _PART_S)


def _wait_for(line: StoreLine, keys: Sequence[str], deadline: float) -> None:
    while keys and not _is_there(line, keys) and monotonic() < deadline:
        sleep(_PAUSE_S)


def _is_there(line: StoreLine, keys: Sequence[str]) -> bool:
    return bool(line.ask(lambda store: store.check(list(keys))))


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 or IPv6 address; None if no one has it. Linux only.

    gloo looks for the interface of the host's name otherwise, which is often the loopback, or unknown.
    """
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
            for row in table:
                fields = row.split()
                if fields[0] == packed:
                    return fields[-1]
        return None
    with suppress(OSError, ImportError):
        return _interface_of_ipv4(socket.inet_aton(address))
    return None


def _interface_of_ipv4(packed: bytes) -> str | None:
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR, linux/sockios.h; the answer is a struct ifreq with a sockaddr_in
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = os.fsencode(name)[:15].ljust(256, b"\0")
            with suppress(OSError):  # an interface without an address
                if fcntl.ioctl(asked, get_address, request)[20:24] == packed:
                    return name
    return None
