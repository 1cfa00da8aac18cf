"""The rendezvous of workers at the store, under a prefix that is new each time they start.

The store of an elastic agent outlives its workers, so entries of an earlier start may still exist.
Each worker therefore draws a random token; the lead's token is the prefix of all later entries::

    lead            the lead's token
    TOKEN/join/R    {"token": …, "host": …, …}
                    written by rank R after it has read the lead's token
    TOKEN/welcome   {"tokens": […], "hosts": […], "error": …}
                    written by the lead after all others have joined
    TOKEN/heard/R   empty; written by rank R after it has read an error in the welcome

A worker that does not find its own token in the welcome has read one of an earlier start, and reads
again.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

from ckpt_cli.host.rank_env import WorkerIdentity
from ckpt_cli.workers.begin_check import error_from_record, error_record
from ckpt_cli.workers.store import StoreLine
from core.errors import CheckpointingException, UsageError, WorkerError
from core.values import dataclass

_PAUSE_S = 0.05
_ASKING_RANKS_PER_S = 1000
"""Workers that may query the store per second, which serves some ten thousand requests."""
_PART_S = 3.0
"""Seconds that a lead waits at most for the others to read the error in its welcome."""

MemberCheck = Callable[[Sequence[Mapping[str, Any]]], CheckpointingException | None]
"""Called with the workers' facts, by rank; returns why they cannot work together, or None."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The result of a rendezvous.

    Args:
        line: connection to the store.
        prefix: prefix of the workers' entries in the store.
        hosts: host names, by rank.
        address: address from which this host reaches the store.
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
    """Wait until all workers have joined at the store and the lead has checked them.

    Args:
        identity: identity of this worker.
        facts: facts about this worker, as a JSON object.
        check_members: checks the facts of all workers; called at the lead.
        timeout_s: time limit for later requests to the store, in seconds.
        join_timeout_s: seconds to wait at most for the others.

    Raises:
        UsageError: the port is in use, or ``check_members`` found an error of usage.
        WorkerError: not all workers joined in time, or ``check_members`` found another error.
        GoneError: the store is gone or silent.
    """
    # Connect to the store. Other workers first probe its port, because torch's client would wait in
    # native code; the worker that runs the store must start it before the probe can succeed.
    deadline = monotonic() + join_timeout_s
    if not identity.keeps_store:
        address = _wait_for_store(identity, deadline, join_timeout_s)
    line = StoreLine(
        lambda: _connect(identity, join_timeout_s),
        keeper=_keeper_name(identity),
        timeout_s=join_timeout_s,
    )
    line.ask(lambda store: None)  # returns after the thread has connected
    if identity.keeps_store:
        address = _wait_for_store(identity, deadline, join_timeout_s)
    # Join the lead; the lead itself waits for the others and welcomes them.
    token = secrets.token_hex(8)
    own_facts = {"token": token, "host": socket.gethostname(), **facts}
    if identity.rank == 0:
        welcome = _welcome_others(
            line, identity, own_facts, check_members, deadline, join_timeout_s
        )
        prefix = token
    else:
        prefix, welcome = _join_lead(line, identity, own_facts, deadline, join_timeout_s)
    # If the workers cannot work together, a lead that runs the store waits until all have read the
    # error: its exit would take the store away from them.
    if welcome["error"] is not None:
        if identity.rank:
            line.ask(lambda store: store.set(f"{prefix}/heard/{identity.rank}", b""))
        elif identity.keeps_store:
            keys = [f"{prefix}/heard/{rank}" for rank in range(1, identity.size)]
            _wait_for(line, keys, monotonic() + _PART_S)
        raise error_from_record(welcome["error"])
    # From here on requests have the shorter limit of a running job, and the lead's host is known.
    line.know(keeper=_keeper_name(identity, host=welcome["hosts"][0]), timeout_s=timeout_s)
    return Meeting(line, prefix, welcome["hosts"], address)


def _keeper_name(identity: WorkerIdentity, host: str | None = None) -> str:
    """Return a description of the process that runs the store, for messages."""
    if identity.has_store:
        return f"the launcher at {identity.endpoint}"
    return f"rank 0 on {host} ({identity.endpoint})" if host else f"rank 0 at {identity.endpoint}"


def _wait_for_store(identity: WorkerIdentity, deadline: float, join_timeout_s: float) -> str:
    """Wait until a process listens at the store's address.

    Returns:
        The address from which this host reaches the store.

    Raises:
        WorkerError: nothing listens there by the deadline.
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
                    f"rank {identity.rank} got no answer from {identity.endpoint}, where the "
                    f"workers meet, within {join_timeout_s:g} s: {err.strerror or err}",
                    hint="check that rank 0 is running, that MASTER_ADDR is its host, "
                    "and that MASTER_PORT is open",
                ) from err
        sleep(_PAUSE_S)


def _connect(identity: WorkerIdentity, join_timeout_s: float) -> Any:
    """Connect to the store; start it first if this worker is to run it.

    Raises:
        UsageError: another program uses the port.
    """
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
                f"port {identity.port} on {identity.address}, where the workers meet, "
                "is in use by another program",
                hint="set MASTER_PORT to a free port",
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
    # Publish the token, and wait for the others to write their facts under it.
    prefix = own_facts["token"]
    line.ask(lambda store: store.set("lead", prefix))
    keys = {rank: f"{prefix}/join/{rank}" for rank in range(1, identity.size)}
    _wait_for(line, list(keys.values()), deadline)
    missing = [rank for rank, key in keys.items() if not _exist(line, [key])]
    # Check the workers, or report to those that joined which are missing.
    if missing:
        error: CheckpointingException | None = WorkerError(
            f"{len(missing)} of {identity.size} workers did not join at {identity.endpoint} "
            f"within {join_timeout_s:g} s "
            f"(rank {', '.join(map(str, missing[:8]))}{' …' if len(missing) > 8 else ''})",
            hint="check that these workers were started and that their hosts can reach this host; "
            "to wait longer, pass --join-timeout SECONDS",
        )
        members = [own_facts]
    else:
        records = line.ask(lambda store: store.multi_get(list(keys.values()))) if keys else []
        members = [own_facts, *(json.loads(bytes(record)) for record in records)]
        error = check_members(members)
    # Write the welcome. The tokens show each worker whether this welcome is meant for it.
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
    """Join the lead; return the lead's token and its welcome.

    Raises:
        WorkerError: the lead has not written a welcome by the deadline.
    """
    record = json.dumps(own_facts)
    prefix = ""
    while True:
        # The token may be that of an earlier start and change later: then join again under the new
        # one. The lambdas bind the key as a default, because the thread may run them later.
        if _exist(line, ["lead"]):
            token = bytes(line.ask(lambda store: store.get("lead"))).decode()
            if token != prefix:
                prefix = token
                key = f"{prefix}/join/{identity.rank}"
                line.ask(lambda store, key=key: store.set(key, record))  # type: ignore[misc]
        # A welcome without this worker's token belongs to an earlier start. One with an error may
        # lack it as well, because the lead lists only itself if workers are missing.
        if prefix and _exist(line, [f"{prefix}/welcome"]):
            key = f"{prefix}/welcome"
            data = line.ask(lambda store, key=key: store.get(key))  # type: ignore[misc]
            welcome: dict[str, Any] = json.loads(bytes(data))
            if own_facts["token"] in welcome["tokens"] or welcome["error"] is not None:
                return prefix, welcome
        if monotonic() > deadline:
            raise WorkerError(
                f"rank 0 did not answer rank {identity.rank} at {identity.endpoint} "
                f"within {join_timeout_s:g} s",
                hint="check that all workers were started, "
                "and that no other job uses the same MASTER_PORT",
            )
        # The more workers poll, the longer each pauses, so that the store keeps up with them.
        sleep(max(_PAUSE_S, identity.size / _ASKING_RANKS_PER_S))


def _wait_for(line: StoreLine, keys: Sequence[str], deadline: float) -> None:
    """Wait until all entries exist, or the deadline has passed."""
    while keys and not _exist(line, keys) and monotonic() < deadline:
        sleep(_PAUSE_S)


def _exist(line: StoreLine, keys: Sequence[str]) -> bool:
    return bool(line.ask(lambda store: store.check(list(keys))))


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 or IPv6 address; None if unknown.

    By default gloo uses the interface that the host's own name resolves to, which often is the
    loopback, or does not resolve at all. Linux only; elsewhere the result is None.
    """
    # The kernel lists IPv6 addresses as 32 hex digits, each with its interface in the last column.
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
    """Return the network interface that has an IPv4 address (4 bytes); None if none has it."""
    import fcntl

    # SIOCGIFADDR (linux/sockios.h) takes a struct ifreq: 16 bytes of name, then room for an answer,
    # a sockaddr_in. Its family and port take 4 bytes, so the address is at bytes 20 to 23.
    get_address = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        for _, name in socket.if_nameindex():
            request = os.fsencode(name)[:15].ljust(256, b"\0")
            with suppress(OSError):  # raised for an interface without an IPv4 address
                if fcntl.ioctl(connection, get_address, request)[20:24] == packed:
                    return name
    return None
