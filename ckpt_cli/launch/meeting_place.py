"""The rendezvous of a job's hosts: read from the options, and checked before torch uses it.

torch's own rendezvous waits in native code, ignores Ctrl-C there and tells little when it fails. So
what can be checked with plain sockets is checked first: the name resolves, the port is free on the
host that must listen, and on the others a host listens there within the time limit.
"""

from __future__ import annotations

import errno
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from threading import Event, Thread
from typing import TYPE_CHECKING

from ckpt_cli.options.launch import parse_nodes, parse_settings
from core.errors import UsageError, WorkerError

if TYPE_CHECKING:
    from ckpt_cli.options.launch import LaunchOptions

_JOIN_S = 600
"""Default time to wait for hosts, in seconds: torch's own limit."""
_READ_S = 20
"""Limit of one request to the rendezvous: three times the time after which it counts a host as
lost."""
_C10D_PORT, _STATIC_PORT = 29400, 29500
_ETCD = ("etcd", "etcd-v2")
"""Backends that need a server, which must already listen at the endpoint."""
_PROBE_S = 10
"""How long a listening program may take to answer as a rendezvous does."""
_PROBE_MORE_S = 2
"""How much longer than torch this module waits."""
_PAUSE_S = 0.5
_QUIET_S = 5
"""Wait that is not mentioned to the user, in seconds."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous at which the agents of a job find each other.

    Args:
        backend: torch's name of it: c10d, static, etcd, etcd-v2.
        host, port: its address; port 0 is any free port.
        job_id: the same for all agents of the job.
        settings: further settings, as torch takes them; seconds are text.
        node_rank: rank of this host, if the user gave it.
    """

    backend: str
    host: str
    port: int
    job_id: str
    settings: Mapping[str, str] = field(default_factory=dict)
    node_rank: int | None = None

    @property
    def endpoint(self) -> str:
        """``host:port``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_standalone(self) -> bool:
        """Whether no other host takes part."""
        return self.port == 0

    @property
    def join_s(self) -> float:
        """Time to wait for hosts, in seconds."""
        return float(self.settings["timeout" if self.backend == "static" else "join_timeout"])


def rendezvous_of(options: LaunchOptions) -> Rendezvous:
    """Return the rendezvous that the options ask for.

    Raises:
        UsageError: they contradict each other, or do not tell where the hosts meet.
    """
    _, most = parse_nodes(options.nnodes)
    values = {
        "--rdzv-endpoint": options.rdzv_endpoint,
        "--rdzv-backend": options.rdzv_backend,
        "--node-rank": options.node_rank,
        "--master-addr": options.master_addr,
        "--master-port": options.master_port,
    }
    names = [name for name, value in values.items() if value is not None]
    if options.standalone and (names or most > 1):
        raise UsageError(
            f"--standalone uses only this host, so it excludes {names[0] if names else '--nnodes'}",
            hint="leave out one of them",
        )
    settings = _with_limits(parse_settings(options.rdzv_conf))
    # Only this host: any free port will do.
    if most == 1 and not names:
        return Rendezvous(
            "c10d", "localhost", 0, options.rdzv_id or f"ckpt-{uuid.uuid4().hex[:8]}", settings
        )
    # Several hosts, or one with an address: c10d unless the options are those of a static rendezvous.
    is_static = any(
        value is not None for value in (options.node_rank, options.master_addr, options.master_port)
    )
    backend = options.rdzv_backend or (
        "static" if is_static and options.rdzv_endpoint is None else "c10d"
    )
    job_id = options.rdzv_id or "ckpt"
    if backend == "static":
        return _static_rendezvous(options, job_id, settings)
    if is_static:
        name = next(
            name for name in ("--node-rank", "--master-addr", "--master-port") if name in names
        )
        raise UsageError(
            f"{name} only applies to a static rendezvous, not to {backend}",
            hint=f"leave out {name}",
        )
    if options.rdzv_endpoint is None:
        raise UsageError(
            f"no rendezvous for {most} hosts: --rdzv-endpoint is missing",
            hint="give all hosts the same one: --rdzv-endpoint HOST:PORT, with the name of one of them",
        )
    host, port = parse_endpoint(options.rdzv_endpoint, _C10D_PORT)
    return Rendezvous(backend, host, port, job_id, settings)


def _static_rendezvous(
    options: LaunchOptions, job_id: str, settings: Mapping[str, str]
) -> Rendezvous:
    """Return a static rendezvous, for which every host is given its rank and the address of host 0.

    Raises:
        UsageError: the options contradict each other, or one of them is missing.
    """
    least, most = parse_nodes(options.nnodes)
    rank = options.node_rank or 0
    if least != most:
        raise UsageError(
            "--nnodes MIN:MAX needs --rdzv-backend c10d: a static rendezvous has a fixed number of hosts"
        )
    if most > 1 and options.node_rank is None:
        raise UsageError(
            "--node-rank is missing: a static rendezvous needs the rank of each host",
            hint="give --node-rank 0, 1, …, or only --rdzv-endpoint HOST:PORT, which numbers the hosts automatically",
        )
    if options.rdzv_endpoint is not None and options.master_addr is not None:
        raise UsageError(
            "--rdzv-endpoint and --master-addr both give the address of host 0",
            hint="leave out one",
        )
    if rank >= most:
        raise UsageError(f"--node-rank {rank}, but --nnodes {most}: hosts are numbered from 0")
    if most > 1 and options.rdzv_endpoint is None and options.master_addr is None:
        raise UsageError(
            f"no rendezvous for {most} hosts: --master-addr is missing",
            hint="give all hosts the same one: --master-addr HOST, with the name of host 0",
        )
    endpoint = options.rdzv_endpoint or options.master_addr or "127.0.0.1"
    host, port = parse_endpoint(endpoint, options.master_port or _STATIC_PORT)
    return Rendezvous("static", host, port, job_id, settings, rank)


def _with_limits(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings with the default time limits added.

    Raises:
        UsageError: a time limit is not a number of seconds.
    """
    join_s = settings.get("join_timeout", str(_JOIN_S))
    limited = {"join_timeout": join_s, "timeout": join_s, "read_timeout": str(_READ_S), **settings}
    for name in ("join_timeout", "timeout", "read_timeout"):
        text = limited[name]
        if not text.isdigit() or int(text) == 0:
            raise UsageError(f"--rdzv-conf: {name}={text} is not a number of seconds")
    return limited


def parse_endpoint(text: str, port: int) -> tuple[str, int]:
    """Return host and port of ``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT``; ``port`` is the default.

    Raises:
        UsageError: the text has none of these forms.
    """
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, number = text, str(port)
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not number.isdigit() or not 0 < int(number) < 2**16:
        raise UsageError(
            f"{text!r} is not HOST:PORT",
            hint="write node1:29400, 10.0.0.1:29400 or [fd00::1]:29400",
        )
    return host, int(number)


def check_rendezvous(
    rendezvous: Rendezvous, *, is_listener: bool, note: Callable[[str], None]
) -> None:
    """Check, before torch tries, that the rendezvous can be reached.

    Wait for the host that must listen.

    Args:
        is_listener: this host is the one that must listen.
        note: prints a note for the user; called if the wait takes long.

    Raises:
        UsageError: no host has that name within the limit (on Kubernetes it gets its name when it
            starts), or etcd's client is missing.
        WorkerError: the port is in use, or no host listens within the limit.
    """
    if rendezvous.backend in _ETCD:
        try:
            import_module("etcd")
        except ImportError as err:
            raise UsageError(
                f"--rdzv-backend {rendezvous.backend} needs python-etcd, which cannot be imported: {err}",
                hint="install it, or leave out --rdzv-backend: the hosts then meet without a server",
            ) from err
        _wait_for_listener(rendezvous, note)
        return
    if rendezvous.is_standalone:
        return
    # The listener needs a free port, or one on which a rendezvous answers; other hosts need one that answers.
    if is_listener and _is_port_free(rendezvous):
        return
    if not is_listener:
        _wait_for_listener(rendezvous, note)
    if not _is_rendezvous(rendezvous):
        if is_listener:
            raise WorkerError(
                f"port {rendezvous.port} is in use by another program",
                hint="give another port, the same on all hosts",
            )
        raise WorkerError(
            f"the program listening at {rendezvous.endpoint} is not a rendezvous",
            hint="start the same command on that host, or give another port, the same on all hosts",
        )


def _is_port_free(rendezvous: Rendezvous) -> bool:
    """Return whether this host can listen on the port.

    Raises:
        WorkerError: it cannot, for another reason than that the port is in use.
    """
    with socket.socket(
        socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    ) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", rendezvous.port))
        except OSError as err:
            if err.errno == errno.EADDRINUSE:
                return False
            raise WorkerError(
                f"this host cannot listen on port {rendezvous.port}: {(err.strerror or str(err)).lower()}",
                hint="give another one, the same on all hosts",
            ) from err
    return True


def _wait_for_listener(rendezvous: Rendezvous, note: Callable[[str], None]) -> None:
    """Wait until a program listens at the rendezvous.

    Raises:
        UsageError, WorkerError: none does within the limit.
    """
    begun = time.monotonic()
    deadline = begun + rendezvous.join_s
    is_noted = False
    while True:
        try:
            remaining_s = max(deadline - time.monotonic(), _PAUSE_S)
            socket.create_connection(
                (rendezvous.host, rendezvous.port), timeout=min(remaining_s, _PROBE_S)
            ).close()
            return
        except (OSError, UnicodeError) as err:
            now = time.monotonic()
            if now + _PAUSE_S >= deadline:
                raise _unreachable_error(rendezvous, err) from err
            if not is_noted and now - begun > _QUIET_S:
                note(
                    f"waiting up to {rendezvous.join_s:g} s for {rendezvous.endpoint}: {_reason_text(err)}"
                )
                is_noted = True
            time.sleep(_PAUSE_S)


def _unreachable_error(
    rendezvous: Rendezvous, err: OSError | UnicodeError
) -> UsageError | WorkerError:
    """Return the error for a rendezvous that could not be reached."""
    if isinstance(err, (socket.gaierror, UnicodeError)):
        return UsageError(
            f"rendezvous host {rendezvous.host!r} not found: {_reason_text(err)}",
            hint="check the name, or give its address",
        )
    server = "etcd" if rendezvous.backend in _ETCD else "the same command"
    return WorkerError(
        f"no answer from {rendezvous.endpoint} within {rendezvous.join_s:g} s: {_reason_text(err)}",
        hint=f"start {server} on that host as well, and check the name and the port; "
        "--rdzv-conf join_timeout=SECONDS waits longer",
    )


def _reason_text(err: OSError | UnicodeError) -> str:
    """Return the system's message, in lower case."""
    reason = err.strerror if isinstance(err, OSError) else None
    return (reason or str(err) or type(err).__name__).lower()


def _is_rendezvous(rendezvous: Rendezvous) -> bool:
    """Return whether the program that listens at the rendezvous is torch's store.

    torch waits without a limit for an answer once the connection is accepted, so the probe runs in
    a thread, which is abandoned if it hangs.
    """
    from datetime import timedelta

    from torch.distributed import TCPStore

    limit_s = min(_PROBE_S, rendezvous.join_s)
    answers: list[bool] = []
    is_over = Event()

    def ask() -> None:
        try:
            TCPStore(
                rendezvous.host,
                rendezvous.port,
                is_master=False,
                timeout=timedelta(seconds=limit_s),
            )
            answers.append(True)
        except (RuntimeError, ValueError, TimeoutError):
            pass
        is_over.set()

    Thread(target=ask, name="probe", daemon=True).start()
    is_over.wait(limit_s + _PROBE_MORE_S)
    return bool(answers)
