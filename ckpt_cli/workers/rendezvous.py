"""Brings the workers together at the store, under a prefix that is new each time they start.

The store of an elastic agent outlives its workers, so entries of an earlier start may still exist.
Each worker therefore draws a random token; the lead's token is the prefix of all later entries::

    lead            the lead's token
    TOKEN/join/R    {"token": …, "host": …, …}    written by rank R after it has read the lead's token
    TOKEN/welcome   {"tokens": […], "hosts": […], "error": …}    written when the lead has seen all of them

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

from ckpt_cli.host.rank_env import WorkerIdentity
from ckpt_cli.workers.begin_check import error_from_record, error_record
from ckpt_cli.workers.store import StoreLine
from core.errors import CheckpointingException, UsageError, WorkerError

_PAUSE_S = 0.05
_ASKING_RANKS_PER_S = 1000
"""Workers that may query the store per second; it serves some ten thousand requests."""
_PART_S = 3.0
"""The longest time that a lead waits for the others to read its verdict, in seconds."""

MemberCheck = Callable[[Sequence[Mapping[str, Any]]], CheckpointingException | None]
"""Returns the reason why workers with these facts (by rank) cannot work together; None if they can.
"""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The result of a rendezvous.

    Args:
        line: connection to the store.
        prefix: prefix of the workers' entries in the store.
        hosts: host names, by rank.
        address: address of this host, as the store's host sees it.
    """

    line: StoreLine
    prefix: str
    hosts: Sequence[str]
    address: str


def meet_workers(
    identity: WorkerIdentity,
    facts: Mapping[str, Any],
    check_members: MemberCheck,
    *,
    timeout_s: float,
    join_timeout_s: float,
) -> Meeting:
    """Wait until all workers have come to the store and the lead has checked that they fit
    together.

    Args:
        identity: identity of this worker.
        facts: facts about it, as a JSON object.
        check_members: checks the facts of all workers; called at the lead.
        timeout_s: time limit of later requests to the store.
        join_timeout_s: the longest time to wait for the others.

    Raises:
        UsageError: the port is taken, or the workers do not fit together.
        WorkerError: not all workers have come in time.
    """
    # Connect to the store; the worker that runs it must start it before it can be reached.
    deadline = monotonic() + join_timeout_s
    if not identity.keeps_store:
        address = _wait_for_store(identity, deadline, join_timeout_s)
    line = StoreLine(
        lambda: _connect(identity, join_timeout_s),
        keeper=_keeper_name(identity),
        timeout_s=join_timeout_s,
    )
    line.ask(lambda store: None)
    if identity.keeps_store:
        address = _wait_for_store(identity, deadline, join_timeout_s)
    # Tell the lead who came, and read its answer.
    token = secrets.token_hex(8)
    own_facts = {"token": token, "host": socket.gethostname(), **facts}
    if identity.rank == 0:
        welcome = _welcome_others(
            line, identity, own_facts, check_members, deadline, join_timeout_s
        )
        prefix = token
    else:
        prefix, welcome = _join_lead(line, identity, own_facts, deadline, join_timeout_s)
    if welcome["error"] is not None:
        _confirm_failure(line, identity, prefix)
        raise error_from_record(welcome["error"])
    line.know(keeper=_keeper_name(identity, host=welcome["hosts"][0]), timeout_s=timeout_s)
    return Meeting(line, prefix, welcome["hosts"], address)


def _keeper_name(identity: WorkerIdentity, host: str | None = None) -> str:
    """Return who runs the store, for messages."""
    if identity.has_store:
        return f"the launcher at {identity.endpoint}"
    return f"rank 0 on {host} ({identity.endpoint})" if host else f"rank 0 at {identity.endpoint}"


def _wait_for_store(identity: WorkerIdentity, deadline: float, join_timeout_s: float) -> str:
    """Wait until something listens at the store's address.

    Return this host's address on the way there.

    Raises:
        WorkerError: nothing listens by the deadline.
    """
    while True:
        try:
            with socket.create_connection(
                (identity.address, identity.port), timeout=2.0
            ) as connection:
                return str(connection.getsockname()[0])
        except OSError as err:
            if monotonic() > deadline:
                raise WorkerError(
                    f"no answer from {identity.endpoint}, where the workers meet: {err.strerror or err} "
                    f"(rank {identity.rank} tried for {join_timeout_s:g} s)",
                    hint="check that rank 0 runs, that MASTER_ADDR is its host, and that MASTER_PORT is open",
                ) from err
        sleep(_PAUSE_S)


def _connect(identity: WorkerIdentity, join_timeout_s: float) -> Any:
    """Connect to the store, or start it if this worker is the one that runs it."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    try:
        return TCPStore(
            identity.address,
            identity.port,
            is_master=identity.keeps_store,
            wait_for_workers=False,
            timeout=timedelta(seconds=join_timeout_s),
        )
    except RuntimeError as err:  # DistNetworkError, whose message has the name of errno
        if "EADDRINUSE" in str(err):
            raise UsageError(
                f"port {identity.port} of {identity.address}, where the workers meet, is in use by another program",
                hint="set MASTER_PORT to a free one",
            ) from err
        raise


def _welcome_others(
    line: StoreLine,
    identity: WorkerIdentity,
    own_facts: Mapping[str, Any],
    check_members: MemberCheck,
    deadline: float,
    join_timeout_s: float,
) -> dict[str, Any]:
    """Wait for the other workers, check all of them, and write and return the welcome.

    Called at the lead.
    """
    prefix = own_facts["token"]
    line.ask(lambda store: store.set("lead", prefix))
    keys = {rank: f"{prefix}/join/{rank}" for rank in range(1, identity.size)}
    _wait_for(line, list(keys.values()), deadline)
    missing = [rank for rank, key in keys.items() if not _exist(line, [key])]
    # Check the workers that came, or tell those that came which are missing.
    if missing:
        error: CheckpointingException | None = WorkerError(
            f"{len(missing)} of {identity.size} workers have not joined at {identity.endpoint} "
            f"within {join_timeout_s:g} s: "
            f"rank {', '.join(map(str, missing[:8]))}{' …' if len(missing) > 8 else ''}",
            hint="check that they were started and their hosts can reach this one; --join-timeout waits longer",
        )
        members = [own_facts]
    else:
        records = line.ask(lambda store: store.multi_get(list(keys.values()))) if keys else []
        members = [own_facts, *(json.loads(bytes(record)) for record in records)]
        error = check_members(members)
    welcome = {
        "tokens": [member["token"] for member in members],
        "hosts": [member["host"] for member in members],
        "error": None if error is None else error_record(error),
    }
    text = json.dumps(welcome)
    line.ask(lambda store: store.set(f"{prefix}/welcome", text))
    return welcome


def _join_lead(
    line: StoreLine,
    identity: WorkerIdentity,
    own_facts: Mapping[str, Any],
    deadline: float,
    join_timeout_s: float,
) -> tuple[str, dict[str, Any]]:
    """Register with the lead; return its token and its welcome.

    Raises:
        WorkerError: there is no welcome by the deadline.
    """
    record = json.dumps(own_facts)
    prefix = ""
    while True:
        # The lead's token may still be that of an earlier start, and change later.
        if _exist(line, ["lead"]):
            token = bytes(line.ask(lambda store: store.get("lead"))).decode()
            if token != prefix:
                prefix = token
                line.ask(lambda store, key=f"{prefix}/join/{identity.rank}": store.set(key, record))  # type: ignore[misc]
        if prefix and _exist(line, [f"{prefix}/welcome"]):
            key = f"{prefix}/welcome"
            data = line.ask(lambda store, key=key: store.get(key))  # type: ignore[misc]
            welcome: dict[str, Any] = json.loads(bytes(data))
            if own_facts["token"] in welcome["tokens"] or welcome["error"] is not None:
                return prefix, welcome
        if monotonic() > deadline:
            raise WorkerError(
                f"rank 0 has not answered rank {identity.rank} at {identity.endpoint} within {join_timeout_s:g} s",
                hint="check that all workers were started, and that no other job uses the same MASTER_PORT",
            )
        sleep(max(_PAUSE_S, identity.size / _ASKING_RANKS_PER_S))


def _confirm_failure(line: StoreLine, identity: WorkerIdentity, prefix: str) -> None:
    """Confirm that this worker has read the lead's error.

    A lead that runs the store waits for all of them.
    """
    if identity.rank:
        line.ask(lambda store: store.set(f"{prefix}/heard/{identity.rank}", b""))
    elif identity.keeps_store:
        _wait_for(
            line,
            [f"{prefix}/heard/{rank}" for rank in range(1, identity.size)],
            monotonic() + _PART_S,
        )


def _wait_for(line: StoreLine, keys: Sequence[str], deadline: float) -> None:
    while keys and not _exist(line, keys) and monotonic() < deadline:
        sleep(_PAUSE_S)


def _exist(line: StoreLine, keys: Sequence[str]) -> bool:
    return bool(line.ask(lambda store: store.check(list(keys))))


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 or IPv6 address.

    Returns None if none has it. Linux only.

    By default gloo uses the interface of the host's name, which is often the loopback, or unknown.
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

    get_address = (
        0x8915  # SIOCGIFADDR, linux/sockios.h; the answer is a struct ifreq with a sockaddr_in
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        for _, name in socket.if_nameindex():
            request = os.fsencode(name)[:15].ljust(256, b"\0")
            with suppress(OSError):  # an interface without an address
                if fcntl.ioctl(connection, get_address, request)[20:24] == packed:
                    return name
    return None
