"""The rendezvous of a job's hosts: read from the options, and checked before torch uses it.

torch's own rendezvous waits in native code, ignores Ctrl-C there, and its errors explain little. So
everything that plain sockets can check is checked first: the name resolves, the port is free on the
host that must listen, and the other hosts reach a listener there within the time limit.
"""

from __future__ import annotations

import errno
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import field
from importlib import import_module
from threading import Event, Thread
from typing import TYPE_CHECKING

from ckpt_cli.options.launch import parse_nodes, parse_settings
from core.errors import NoEffect, UsageError, WorkerError, refuse_without_effect
from core.values import changed_fields, dataclass

if TYPE_CHECKING:
    from ckpt_cli.options.launch import LaunchOptions

_JOIN_S = 600
"""Default time to wait for hosts, in seconds: torch's own limit."""
_READ_S = 20
"""Time limit of one request to the rendezvous, in seconds: three times that after which torch
counts a host as lost."""
_C10D_PORT, _STATIC_PORT = 29400, 29500
_OTHER_PORT = "choose a different port and use it on all hosts"
_ETCD = ("etcd", "etcd-v2")
"""Backends that need a server, which must already listen at the endpoint."""
_PROBE_S = 10
"""Seconds that a listening program may take to answer as a rendezvous does."""
_PROBE_MORE_S = 2
"""Seconds that this module waits longer than torch's own limit."""
_PAUSE_S = 0.5
_QUIET_S = 5
"""Seconds of waiting before the user is informed."""
_STATIC_OPTIONS = ("node_rank", "master_addr", "master_port")
"""Options that only a static rendezvous has."""
_OPTIONS = ("rdzv_endpoint", "rdzv_backend", *_STATIC_OPTIONS)
"""Options that describe a rendezvous of several hosts."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous at which the agents of a job find each other.

    Args:
        backend: torch's name for the kind of rendezvous: c10d, static, etcd or etcd-v2.
        host, port: address of the rendezvous; port 0 is any free port.
        job_id: id that all agents of the job share.
        settings: further settings in torch's format, where seconds are strings.
        node_rank: rank of this host in a static rendezvous; None for the other kinds.
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
        """True if this host is the only one."""
        return self.port == 0

    @property
    def join_s(self) -> float:
        """Time to wait for hosts, in seconds."""
        return float(self.settings["timeout" if self.backend == "static" else "join_timeout"])


def rendezvous_of(options: LaunchOptions) -> Rendezvous:
    """Return the rendezvous that the options specify.

    Raises:
        UsageError: the options contradict each other, or one of them is missing or invalid.
    """
    _, most = parse_nodes(options.nnodes)
    names = [name for name in _OPTIONS if getattr(options, name) is not None]
    others = [*names, "nnodes"] if most > 1 else names
    reason = "--standalone uses only this host"
    hint = "omit either it or --standalone"
    refuse_without_effect(others, [NoEffect(others, options.standalone, reason, hint)])
    settings = _with_limits(parse_settings(options.rdzv_conf))
    # Only this host: any free port will do, and no other host needs to know the id.
    if most == 1 and not names:
        return Rendezvous(
            "c10d", "localhost", 0, options.rdzv_id or f"ckpt-{uuid.uuid4().hex[:8]}", settings
        )
    # Several hosts, or one with an address: c10d, unless the only options given are those of a
    # static rendezvous.
    is_static = not set(names).isdisjoint(_STATIC_OPTIONS) and options.rdzv_endpoint is None
    default = "static" if is_static else "c10d"
    backend = options.rdzv_backend or default
    job_id = options.rdzv_id or "ckpt"
    if backend == "static":
        return _static_rendezvous(options, job_id, settings)
    return _served_rendezvous(options, backend, job_id, settings)


def _static_rendezvous(
    options: LaunchOptions, job_id: str, settings: Mapping[str, str]
) -> Rendezvous:
    """Return a static rendezvous, for which the user gives each host its rank and host 0's address.

    Raises:
        UsageError: the options contradict each other, or one of them is missing.
    """
    # The number of hosts is fixed, and each host needs its rank among them.
    least, most = parse_nodes(options.nnodes)
    rank = options.node_rank or 0
    if least != most:
        raise UsageError(
            "--nnodes MIN:MAX needs --rdzv-backend c10d, because a static rendezvous has a fixed "
            "number of hosts"
        )
    if most > 1 and options.node_rank is None:
        raise UsageError(
            "--node-rank is missing, but a static rendezvous needs each host's rank",
            hint="pass --node-rank 0 on the first host, 1 on the second, …, or pass only "
            "--rdzv-endpoint HOST:PORT, which numbers the hosts automatically",
        )
    if options.rdzv_endpoint is not None and options.master_addr is not None:
        raise UsageError(
            "--rdzv-endpoint and --master-addr both specify the address of host 0",
            hint="omit one of the two options",
        )
    if rank >= most:
        raise UsageError(
            f"--node-rank is {rank}, but --nnodes is {most}",
            hint=f"number the hosts from 0 to {most - 1}",
        )
    # Several hosts also need the address of host 0.
    if most > 1 and options.rdzv_endpoint is None and options.master_addr is None:
        raise UsageError(
            f"--master-addr is missing, so the {most} hosts cannot find each other",
            hint="pass the same --master-addr HOST on all hosts, where HOST is host 0",
        )
    endpoint = options.rdzv_endpoint or options.master_addr or "127.0.0.1"
    host, port = parse_endpoint(endpoint, options.master_port or _STATIC_PORT)
    return Rendezvous("static", host, port, job_id, settings, rank)


def _served_rendezvous(
    options: LaunchOptions, backend: str, job_id: str, settings: Mapping[str, str]
) -> Rendezvous:
    """Return a rendezvous at a server (c10d or etcd), which numbers the hosts itself.

    Raises:
        UsageError: an option is only for a static rendezvous, or the endpoint is missing.
    """
    numbered = NoEffect(_STATIC_OPTIONS, True, f"{backend} numbers the hosts itself")
    refuse_without_effect(changed_fields(options), [numbered])
    if options.rdzv_endpoint is None:
        _, most = parse_nodes(options.nnodes)
        raise UsageError(
            f"--rdzv-endpoint is missing, so the {most} hosts cannot find each other",
            hint="pass the same --rdzv-endpoint HOST:PORT on all hosts, where HOST is one of them",
        )
    host, port = parse_endpoint(options.rdzv_endpoint, _C10D_PORT)
    return Rendezvous(backend, host, port, job_id, settings)


def _with_limits(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings with the default time limits added.

    Raises:
        UsageError: a time limit is not a number of seconds.
    """
    # torch calls the time to wait for hosts ``timeout`` if the rendezvous is static.
    join_s = settings.get("join_timeout", str(_JOIN_S))
    limited = {"join_timeout": join_s, "timeout": join_s, "read_timeout": str(_READ_S), **settings}
    for name in ("join_timeout", "timeout", "read_timeout"):
        text = limited[name]
        if not text.isdigit() or int(text) == 0:
            raise UsageError(
                f"--rdzv-conf {name} must be a positive whole number of seconds, not {text!r}"
            )
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
            f"{text!r} is not of the form HOST:PORT",
            hint="write, for example, node1:29400, 10.0.0.1:29400 or [fd00::1]:29400",
        )
    return host, int(number)


def check_rendezvous(
    rendezvous: Rendezvous, *, is_listener: bool, note: Callable[[str], None]
) -> None:
    """Check that the rendezvous can be reached; wait for the host that must listen.

    Args:
        is_listener: this host must listen.
        note: prints a note for the user; called if the wait takes long.

    Raises:
        UsageError: the host's name does not resolve within the limit, or etcd's client is missing.
        WorkerError: the port is in use, or no host listens within the limit.
    """
    if rendezvous.backend in _ETCD:
        try:
            import_module("etcd")
        except ImportError as err:
            raise UsageError(
                f"--rdzv-backend {rendezvous.backend} needs python-etcd, "
                f"which cannot be imported: {err}",
                hint="install python-etcd, or omit --rdzv-backend to run without an etcd server",
            ) from err
        _wait_for_listener(rendezvous, note)
        return
    if rendezvous.is_standalone:
        return
    # The listener needs a free port, or one on which a rendezvous already answers: another agent of
    # this host may have started it. All other hosts need one that answers.
    if is_listener and _is_port_free(rendezvous):
        return
    if not is_listener:
        _wait_for_listener(rendezvous, note)
    if not _is_rendezvous(rendezvous):
        if is_listener:
            raise WorkerError(
                f"port {rendezvous.port} is in use by another program",
                hint=_OTHER_PORT,
            )
        raise WorkerError(
            f"the program listening at {rendezvous.endpoint} is not a rendezvous",
            hint=f"start the same command on that host, or {_OTHER_PORT}",
        )


def _is_port_free(rendezvous: Rendezvous) -> bool:
    """Return True if this host can listen on the port, False if the port is in use.

    Raises:
        WorkerError: this host cannot listen on the port for another reason.
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
                f"this host cannot listen on port {rendezvous.port}: {_reason_text(err)}",
                hint=_OTHER_PORT,
            ) from err
    return True


def _wait_for_listener(rendezvous: Rendezvous, note: Callable[[str], None]) -> None:
    """Wait until a program listens at the rendezvous.

    Raises:
        UsageError: the host's name does not resolve within the limit.
        WorkerError: no program listens within the limit.
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
            # An unknown name is no reason to stop: on Kubernetes a host gets its name when it
            # starts. UnicodeError is raised for a name that cannot be one (an empty label).
            cause = err
        now = time.monotonic()
        if now + _PAUSE_S >= deadline:
            break
        if not is_noted and now - begun > _QUIET_S:
            note(
                f"waiting up to {rendezvous.join_s:g} s for {rendezvous.endpoint}: "
                f"{_reason_text(cause)}"
            )
            is_noted = True
        time.sleep(_PAUSE_S)
    # The last attempt decides whether the name or the host is to blame.
    if isinstance(cause, (socket.gaierror, UnicodeError)):
        raise UsageError(
            f"the rendezvous host {rendezvous.host!r} was not found: {_reason_text(cause)}",
            hint="check the host name, or use the host's IP address",
        ) from cause
    server = "etcd" if rendezvous.backend in _ETCD else "the same command"
    raise WorkerError(
        f"no answer from {rendezvous.endpoint} within {rendezvous.join_s:g} s: "
        f"{_reason_text(cause)}",
        hint=f"start {server} on that host and check the host name and port, or wait longer "
        "with --rdzv-conf join_timeout=SECONDS",
    ) from cause


def _reason_text(err: OSError | UnicodeError) -> str:
    """Return the system's message for the error, in lower case."""
    reason = err.strerror if isinstance(err, OSError) else None
    return (reason or str(err) or type(err).__name__).lower()


def _is_rendezvous(rendezvous: Rendezvous) -> bool:
    """Return True if the program that listens at the rendezvous is torch's store."""
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

    # After the connection is accepted, torch waits for an answer without a limit. So the probe runs
    # in a thread, which is abandoned if it hangs.
    Thread(target=ask, name="probe", daemon=True).start()
    is_over.wait(limit_s + _PROBE_MORE_S)
    return bool(answers)
