"""The options of ``ckpt launch``, named like torchrun's, and those passed on to its workers.

As with torchrun, the environment variables ``PET_NNODES``, ``PET_NPROC_PER_NODE``, … replace
options that are not given; training operators on Kubernetes set them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ckpt_cli.host.binding import MODES
from ckpt_cli.options.shared.progress import progress_option
from ckpt_cli.options.shared.values import one_of, whole_number
from ckpt_cli.options.typer_command import LAUNCH_PANELS
from ckpt_cli.options.worker import BACKENDS
from core.device.device import NAMES as DEVICES
from core.errors import UsageError, did_you_mean
from core.values import dataclass

WORKERS, HOSTS, FAILURES, LOGS = LAUNCH_PANELS
_COUNTS = ("auto", "cpu", "gpu")
"""Words that ``--nproc-per-node`` accepts instead of a number."""
_PORT = (1, 2**16 - 1)
"""Smallest and largest port number."""
_TEXT = partial(Option, show_default=False, show_envvar=False)
"""An option whose help text contains its default; the ``PET_`` variable is not shown."""


def parse_nodes(text: str | None) -> tuple[int, int]:
    """Parse ``N`` or ``MIN:MAX`` into the smallest and largest number of hosts.

    Returns:
        (1, 1) without a text; (0, 0), which no job can have, if the text has neither form.
    """
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text or "1")
    return (int(match[1]), int(match[2] or match[1])) if match else (0, 0)


def _check_nodes(text: str) -> str:
    """Return the text if it is a number of hosts or ``MIN:MAX``, else raise UsageError."""
    low, high = parse_nodes(text)
    if not 1 <= low <= high:
        raise UsageError(f"{text!r} is neither a number of hosts nor MIN:MAX")
    return text


def _check_workers(text: str) -> str:
    """Return the text if it is a positive number or one of ``_COUNTS``, else raise UsageError."""
    if text not in _COUNTS and not re.fullmatch(r"0*[1-9]\d{0,4}", text):
        raise UsageError(
            f"{text!r} is neither a number of workers nor one of: {', '.join(_COUNTS)}",
            hint=did_you_mean(text, _COUNTS),
        )
    return text


def seconds(low: float) -> Callable[[str | float], float]:
    """Return a typer parser for a number of seconds that is at least ``low``."""

    def parse(text: str | float) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not low <= number < 1e9:
            raise UsageError(f"{text!r} is not a number of seconds of at least {low:g}")
        return number

    return parse


def _check_streams(text: str) -> str:
    """Return the text if it selects streams as in torchrun: ``3``, or ``0:3,1:2`` by local rank.

    Raises:
        UsageError: the text has neither form.
    """
    if not re.fullmatch(r"[0-3]|(\d:[0-3],)*\d:[0-3]", text):
        raise UsageError(
            f"{text!r} is neither 0, 1 (stdout), 2 (stderr), 3 (both) nor RANK:N,RANK:N,…"
        )
    return text


def parse_settings(text: str | None) -> dict[str, str]:
    """Parse ``KEY=VALUE,KEY=VALUE``."""
    pairs = [part.partition("=") for part in (text or "").split(",") if part]
    return {key.strip(): value.strip() for key, _, value in pairs}


def _check_settings(text: str) -> str:
    """Return the text if ``parse_settings`` finds a key and a value in each part, else raise."""
    if not all(key and value for key, value in parse_settings(text).items()):
        raise UsageError(f"{text!r} is not KEY=VALUE,KEY=VALUE,…")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of ``ckpt launch``."""

    command: Annotated[
        list[str] | None,
        Argument(
            metavar="[--] COMMAND ARGS…",
            show_default=False,
            help="A ckpt command with its arguments.",
        ),
    ] = None
    # Workers of this host.
    nnodes: Annotated[
        str | None,
        _TEXT(
            "--nnodes",
            metavar="N|MIN:MAX",
            parser=_check_nodes,
            envvar="PET_NNODES",
            rich_help_panel=WORKERS,
            help="Number of hosts; run the same command on each. [1]",
        ),
    ] = None
    nproc_per_node: Annotated[
        str | None,
        _TEXT(
            "--nproc-per-node",
            metavar="N|auto|cpu|gpu",
            parser=_check_workers,
            envvar="PET_NPROC_PER_NODE",
            rich_help_panel=WORKERS,
            help="Workers per host: a number, cpu (one per core), gpu (one per GPU); "
            "auto: one per GPU unless --device is cpu, else one per core, at most 16. [auto]",
        ),
    ] = None
    device: Annotated[
        str | None,
        _TEXT(
            "--device",
            metavar="|".join(DEVICES),
            parser=one_of(*DEVICES),
            rich_help_panel=WORKERS,
            help="Device for casts and checks; cuda uses one GPU per worker. [cpu]",
        ),
    ] = None
    backend: Annotated[
        str | None,
        _TEXT(
            "--backend",
            metavar="|".join(BACKENDS),
            parser=one_of(*BACKENDS),
            rich_help_panel=WORKERS,
            help="How workers communicate; auto: gloo, plus nccl on GPUs. [auto]",
        ),
    ] = None
    bind: Annotated[
        str | None,
        _TEXT(
            "--bind",
            metavar="|".join(MODES),
            parser=one_of(*MODES),
            rich_help_panel=WORKERS,
            help="Pin each worker to its own cores or to a NUMA node; "
            "auto: to a node, if there are several nodes and a worker for each. [auto]",
        ),
    ] = None
    timeout: Annotated[
        float | None,
        _TEXT(
            "--timeout",
            metavar="SECONDS",
            parser=seconds(1),
            rich_help_panel=WORKERS,
            help="Give up on a worker after this long without a heartbeat. [60]",
        ),
    ] = None

    # How the hosts find each other.
    standalone: Annotated[
        bool,
        _TEXT(
            "--standalone",
            rich_help_panel=HOSTS,
            help="Run on this host only. [unless an option below is given]",
        ),
    ] = False
    rdzv_endpoint: Annotated[
        str | None,
        _TEXT(
            "--rdzv-endpoint",
            metavar="HOST[:PORT]",
            envvar="PET_RDZV_ENDPOINT",
            rich_help_panel=HOSTS,
            help="Meeting point of the hosts: one of them, the same for all. [port 29400]",
        ),
    ] = None
    rdzv_backend: Annotated[
        str | None,
        _TEXT(
            "--rdzv-backend",
            metavar="NAME",
            parser=one_of("c10d", "static", "etcd", "etcd-v2"),
            envvar="PET_RDZV_BACKEND",
            rich_help_panel=HOSTS,
            help="Rendezvous backend: c10d, static, etcd, etcd-v2. "
            "[c10d; static with --node-rank or --master-addr]",
        ),
    ] = None
    rdzv_id: Annotated[
        str | None,
        _TEXT(
            "--rdzv-id",
            metavar="NAME",
            envvar="PET_RDZV_ID",
            rich_help_panel=HOSTS,
            help="Job name; distinguishes jobs that share an endpoint. [ckpt]",
        ),
    ] = None
    rdzv_conf: Annotated[
        str | None,
        _TEXT(
            "--rdzv-conf",
            metavar="KEY=VALUE,…",
            parser=_check_settings,
            envvar="PET_RDZV_CONF",
            rich_help_panel=HOSTS,
            help="Rendezvous settings; join_timeout=SECONDS limits the wait for hosts. [600]",
        ),
    ] = None
    node_rank: Annotated[
        int | None,
        _TEXT(
            "--node-rank",
            metavar="N",
            parser=whole_number(0),
            envvar="PET_NODE_RANK",
            rich_help_panel=HOSTS,
            help="Rank of this host, from 0 (static rendezvous).",
        ),
    ] = None
    master_addr: Annotated[
        str | None,
        _TEXT(
            "--master-addr",
            metavar="HOST",
            envvar="PET_MASTER_ADDR",
            rich_help_panel=HOSTS,
            help="Address of host 0 (static rendezvous).",
        ),
    ] = None
    master_port: Annotated[
        int | None,
        _TEXT(
            "--master-port",
            metavar="PORT",
            parser=whole_number(*_PORT),
            envvar="PET_MASTER_PORT",
            rich_help_panel=HOSTS,
            help="Port of host 0 (static rendezvous). [29500]",
        ),
    ] = None
    local_addr: Annotated[
        str | None,
        _TEXT(
            "--local-addr",
            metavar="ADDRESS",
            envvar="PET_LOCAL_ADDR",
            rich_help_panel=HOSTS,
            help="Address at which other hosts reach this one. [its fully qualified name]",
        ),
    ] = None

    # What happens if a worker or host fails.
    max_restarts: Annotated[
        int,
        _TEXT(
            "--max-restarts",
            metavar="N",
            parser=whole_number(0),
            envvar="PET_MAX_RESTARTS",
            rich_help_panel=FAILURES,
            help="Maximum number of restarts after a worker dies; workers continue where they "
            "stopped. [3]",
        ),
    ] = 3
    rejoin_timeout: Annotated[
        float | None,
        _TEXT(
            "--rejoin-timeout",
            metavar="SECONDS",
            parser=seconds(1),
            rich_help_panel=FAILURES,
            help="How long to wait for a lost host before the job fails. [--timeout plus 60]",
        ),
    ] = None
    monitor_interval: Annotated[
        float,
        _TEXT(
            "--monitor-interval",
            metavar="SECONDS",
            parser=seconds(0.01),
            envvar="PET_MONITOR_INTERVAL",
            rich_help_panel=FAILURES,
            help="Time between checks on the workers. [0.1]",
        ),
    ] = 0.1
    shutdown_timeout: Annotated[
        int,
        _TEXT(
            "--shutdown-timeout",
            metavar="SECONDS",
            parser=whole_number(1),
            envvar="PET_SHUTDOWN_TIMEOUT",
            rich_help_panel=FAILURES,
            help="How long workers may take to exit before they are killed. [30]",
        ),
    ] = 30

    # The workers' output.
    log_dir: Annotated[
        Path | None,
        _TEXT(
            "--log-dir",
            metavar="DIR",
            envvar="PET_LOG_DIR",
            rich_help_panel=LOGS,
            help="Directory for worker logs. [a temporary one, kept if the job fails]",
        ),
    ] = None
    redirects: Annotated[
        str | None,
        _TEXT(
            "-r",
            "--redirects",
            metavar="N",
            parser=_check_streams,
            envvar="PET_REDIRECTS",
            rich_help_panel=LOGS,
            help="Streams redirected to log files: 1 stdout, 2 stderr, 3 both; "
            "or per local rank: 0:3,1:2. [both, except for local rank 0]",
        ),
    ] = None
    tee: Annotated[
        str | None,
        _TEXT(
            "-t",
            "--tee",
            metavar="N",
            parser=_check_streams,
            envvar="PET_TEE",
            rich_help_panel=LOGS,
            help="Streams written to log files and to the terminal.",
        ),
    ] = None
    role: Annotated[
        str,
        _TEXT(
            "--role",
            metavar="NAME",
            envvar="PET_ROLE",
            rich_help_panel=LOGS,
            help="Prefix of teed lines. [ckpt]",
        ),
    ] = "ckpt"
    progress: Annotated[
        str | None,
        progress_option(
            LOGS, "Progress of COMMAND, unless it has this option itself: a bar, lines, or none."
        ),
    ] = None
