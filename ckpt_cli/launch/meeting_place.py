"""Where the hosts of a job meet: what the options say, and whether somebody is there.

torch's own rendezvous waits inside native code, hears no Ctrl-C there and says little when it fails; so what can be
known before is looked at first, with plain sockets: the name resolves, the port is free on the host that is to listen,
and on the others somebody listens, for as long as hosts are waited for.
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

from ckpt_cli.options.launch import nodes_in, settings_in
from core.errors import UsageError, WorkerError

if TYPE_CHECKING:
    from ckpt_cli.options.launch import LaunchOptions

_JOIN_S = 600
"""How long hosts are waited for, if nothing else is said: torch's own limit."""
_READ_S = 20
"""How long one question to the rendezvous may take: three times the time after which a host counts as lost there."""
_C10D_PORT, _STATIC_PORT = 29400, 29500
_ETCD = ("etcd", "etcd-v2")
"""Backends that need a server, which listens at the endpoint already."""
_PROBE_S = 10
"""How long whoever listens may take to answer as a rendezvous does."""
_PROBE_MORE_S = 2
"""How much longer we wait than torch is told to."""
_PAUSE_S = 0.5
_QUIET_S = 5
"""How long nothing is said of waiting."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How the agents of a job find each other.

    Args:
        backend: torch's name: c10d, static, etcd, etcd-v2.
        host, port: where; port 0 is any free one.
        job_id: the same for all agents of the job.
        settings: further ones, as torch takes them; values in seconds are text.
        node_rank: number of this host, where it is given and not found out.
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
        """How long hosts are waited for, in seconds."""
        return float(self.settings["timeout" if self.backend == "static" else "join_timeout"])


def rendezvous_of(options: LaunchOptions) -> Rendezvous:
    """The rendezvous that the options ask for.

    Raises:
        UsageError: they contradict one another, or do not say where the hosts meet.
    """
    least, most = nodes_in(options.nnodes)
    given = {
        "--rdzv-endpoint": options.rdzv_endpoint,
        "--rdzv-backend": options.rdzv_backend,
        "--node-rank": options.node_rank,
        "--master-addr": options.master_addr,
        "--master-port": options.master_port,
    }
    names = [name for name, value in given.items() if value is not None]
    if options.standalone and (names or most > 1):
        raise UsageError(
            f"--standalone is one host that meets no other: it goes without {names[0] if names else '--nnodes'}",
            hint="leave one of them out",
        )
    settings = _with_limits(settings_in(options.rdzv_conf))
    if most == 1 and not names:
        return Rendezvous("c10d", "localhost", 0, options.rdzv_id or f"ckpt-{uuid.uuid4().hex[:8]}", settings)
    is_static = any(value is not None for value in (options.node_rank, options.master_addr, options.master_port))
    backend = options.rdzv_backend or ("static" if is_static and options.rdzv_endpoint is None else "c10d")
    job_id = options.rdzv_id or "ckpt"
    if backend == "static":
        if least != most:
            raise UsageError("--nnodes MIN:MAX needs --rdzv-backend c10d: static hosts are all there, or none")
        if most > 1 and options.node_rank is None:
            raise UsageError(
                "--node-rank is missing: each host of a static rendezvous says which one it is",
                hint="give --node-rank 0, 1, …, or --rdzv-endpoint HOST:PORT alone, which numbers the hosts by itself",
            )
        if options.rdzv_endpoint is not None and options.master_addr is not None:
            raise UsageError("--rdzv-endpoint and --master-addr both say where host 0 is", hint="leave one of them out")
        rank = options.node_rank or 0
        if rank >= most:
            raise UsageError(f"--node-rank {rank}, but --nnodes {most}: hosts are numbered from 0")
        if most > 1 and options.rdzv_endpoint is None and options.master_addr is None:
            raise UsageError(
                f"where do the {most} hosts meet? --master-addr is missing",
                hint="give all of them the same one: --master-addr HOST, with the name of host 0",
            )
        endpoint = options.rdzv_endpoint or options.master_addr or "127.0.0.1"
        host, port = endpoint_of(endpoint, options.master_port or _STATIC_PORT)
        return Rendezvous(backend, host, port, job_id, settings, rank)
    if is_static:
        name = next(name for name in ("--node-rank", "--master-addr", "--master-port") if name in names)
        raise UsageError(f"{name} belongs to a static rendezvous, and this one is {backend}", hint=f"leave {name} out")
    if options.rdzv_endpoint is None:
        raise UsageError(
            f"where do the {most} hosts meet? --rdzv-endpoint is missing",
            hint="give all of them the same one: --rdzv-endpoint HOST:PORT, with the name of one of them",
        )
    host, port = endpoint_of(options.rdzv_endpoint, _C10D_PORT)
    return Rendezvous(backend, host, port, job_id, settings)


def _with_limits(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings, and how long hosts are waited for."""
    join_s = settings.get("join_timeout", str(_JOIN_S))
    found = {"join_timeout": join_s, "timeout": join_s, "read_timeout": str(_READ_S), **settings}
    for name in ("join_timeout", "timeout", "read_timeout"):
        text = found[name]
        if not text.isdigit() or int(text) == 0:
            raise UsageError(f"--rdzv-conf: {name}={text} is no number of seconds")
    return found


def endpoint_of(text: str, port: int) -> tuple[str, int]:
    """Host and port of ``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT``.

    Raises:
        UsageError: it is none.
    """
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, number = text, str(port)
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not number.isdigit() or not 0 < int(number) < 2**16:
        raise UsageError(f"{text!r} is not HOST:PORT", hint="write node1:29400, 10.0.0.1:29400 or [fd00::1]:29400")
    return host, int(number)


def look(rendezvous: Rendezvous, *, is_listener: bool, say: Callable[[str], None]) -> None:
    """Looks whether a rendezvous can be had there, before torch tries; waits for whoever is to listen.

    Args:
        is_listener: this host is the one that is to listen.
        say: tells the user that there is something to wait for.

    Raises:
        UsageError: there is no host of that name within the limit (on Kubernetes it gets its name when it starts), or
            etcd's client is missing.
        WorkerError: the port is taken, or nobody listens within the limit.
    """
    if rendezvous.backend in _ETCD:
        _check_etcd(rendezvous.backend)
        _wait(rendezvous, say)
        return
    if rendezvous.is_standalone:
        return
    if is_listener and _is_free(rendezvous):
        return
    if not is_listener:
        _wait(rendezvous, say)
    if not _answers(rendezvous):
        if is_listener:
            raise WorkerError(
                f"port {rendezvous.port} is taken by another program", hint="give another one, the same on all hosts"
            )
        raise WorkerError(
            f"what listens at {rendezvous.endpoint} is no rendezvous",
            hint="start the same command on that host, or give another port, the same on all hosts",
        )


def _check_etcd(backend: str) -> None:
    try:
        import_module("etcd")
    except ImportError as err:
        raise UsageError(
            f"--rdzv-backend {backend} needs python-etcd, which cannot be imported: {err}",
            hint="install it, or leave --rdzv-backend out: hosts meet without a server then",
        ) from err


def _is_free(rendezvous: Rendezvous) -> bool:
    """Whether this host may listen on the port."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(("", rendezvous.port))
        except OSError as err:
            if err.errno == errno.EADDRINUSE:
                return False
            raise WorkerError(
                f"this host cannot listen on port {rendezvous.port}: {(err.strerror or str(err)).lower()}",
                hint="give another one, the same on all hosts",
            ) from err
    return True


def _wait(rendezvous: Rendezvous, say: Callable[[str], None]) -> None:
    """Waits until somebody listens."""
    begun = time.monotonic()
    deadline = begun + rendezvous.join_s
    is_said = False
    while True:
        try:
            left_s = max(deadline - time.monotonic(), _PAUSE_S)
            socket.create_connection((rendezvous.host, rendezvous.port), timeout=min(left_s, _PROBE_S)).close()
            return
        except (OSError, UnicodeError) as err:
            now = time.monotonic()
            if now + _PAUSE_S >= deadline:
                raise _absent(rendezvous, err) from err
            if not is_said and now - begun > _QUIET_S:
                say(f"waiting for {rendezvous.endpoint} up to {rendezvous.join_s:g} s: {_reason_of(err)}")
                is_said = True
            time.sleep(_PAUSE_S)


def _absent(rendezvous: Rendezvous, err: OSError | UnicodeError) -> UsageError | WorkerError:
    """What it means that nobody could be reached."""
    if isinstance(err, (socket.gaierror, UnicodeError)):
        return UsageError(
            f"there is no host {rendezvous.host!r} to meet at: {_reason_of(err)}",
            hint="check the name, or give its address",
        )
    start = "etcd" if rendezvous.backend in _ETCD else "the same command"
    return WorkerError(
        f"nobody answers at {rendezvous.endpoint} within {rendezvous.join_s:g} s: {_reason_of(err)}",
        hint=f"start {start} on that host as well, and check the name and the port; "
        "--rdzv-conf join_timeout=SECONDS waits longer",
    )


def _reason_of(err: OSError | UnicodeError) -> str:
    """What the system said, in lower case."""
    said = err.strerror if isinstance(err, OSError) else None
    return (said or str(err) or type(err).__name__).lower()


def _answers(rendezvous: Rendezvous) -> bool:
    """Whether what listens there is torch's store.

    torch waits without a limit for an answer of whoever has accepted the connection, so it does that in a thread, which
    is left behind.
    """
    from datetime import timedelta

    from torch.distributed import TCPStore

    limit_s = min(_PROBE_S, rendezvous.join_s)
    found: list[bool] = []
    is_over = Event()

    def ask() -> None:
        try:
            TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timedelta(seconds=limit_s))
            found.append(True)
        except (RuntimeError, ValueError, TimeoutError):
            pass
        is_over.set()

    Thread(target=ask, name="probe", daemon=True).start()
    is_over.wait(limit_s + _PROBE_MORE_S)
    return bool(found)
