"""The options of ``ckpt launch``, named like torchrun's, and those passed on to its workers.

As with torchrun, the environment variables ``PET_NNODES``, ``PET_NPROC_PER_NODE``, … replace
options that are not given; training operators on Kubernetes set them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ckpt_cli.host.binding import MODES
from ckpt_cli.options.declaration import FAILURES, HOSTS, LOGS, WORKERS, argument, progress_option
from ckpt_cli.options.shared.values import one_of, whole_number
from ckpt_cli.options.worker import BACKENDS
from core.engine.device.device import NAMES as DEVICES
from core.errors import UsageError, did_you_mean
from core.values import dataclass

_COUNTS = ("auto", "cpu", "gpu")
"""Words that ``--nproc-per-node`` accepts instead of a number."""
_PORT = (1, 2**16 - 1)
"""Smallest and largest port number."""


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
            raise UsageError(f"{text!r} is not a number of seconds ≥ {low:g}")
        return number

    return parse


def _check_streams(text: str) -> str:
    """Return the text if it selects streams as in torchrun: ``3``, or ``0:3,1:2`` by local rank.

    Raises:
        UsageError: the text has neither form.
    """
    if not re.fullmatch(r"[0-3]|(\d:[0-3],)*\d:[0-3]", text):
        raise UsageError(
            f"{text!r} is not 0 (neither), 1 (stdout), 2 (stderr), 3 (both) or RANK:N,RANK:N,…"
        )
    return text


def parse_settings(text: str | None) -> dict[str, str]:
    """Parse ``KEY=VALUE,KEY=VALUE``."""
    pairs = [part.partition("=") for part in (text or "").split(",") if part]
    return {key.strip(): value.strip() for key, _, value in pairs}


def _check_settings(text: str) -> str:
    """Return the text if ``parse_settings`` finds a key and a value in each part, else raise."""
    if not all(key and value for key, value in parse_settings(text).items()):
        raise UsageError(f"{text!r} is not of the form KEY=VALUE,KEY=VALUE,…")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of ``ckpt launch``."""

    command: list[str] | None = argument(
        "[--] COMMAND ARGS…", "A ckpt command with its arguments.", default=None
    )
    # Workers of this host.
    nnodes: str | None = WORKERS.option(
        "--nnodes N|MIN:MAX",
        "Number of hosts; run the same command on each. [1]",
        parser=_check_nodes,
        envvar="PET_NNODES",
    )
    nproc_per_node: str | None = WORKERS.option(
        "--nproc-per-node N|auto|cpu|gpu",
        "Workers per host: a number, cpu (one per core), gpu (one per GPU) or auto "
        "(one per GPU unless --device is cpu, else one per core, at most 16). [auto]",
        parser=_check_workers,
        envvar="PET_NPROC_PER_NODE",
    )
    device: str | None = WORKERS.option(
        f"--device {'|'.join(DEVICES)}",
        "Device for casts and checks; cuda uses one GPU per worker. [cpu]",
        parser=one_of(*DEVICES),
    )
    backend: str | None = WORKERS.option(
        f"--backend {'|'.join(BACKENDS)}",
        "How workers communicate; auto: gloo, plus nccl on GPUs. [auto]",
        parser=one_of(*BACKENDS),
    )
    bind: str | None = WORKERS.option(
        f"--bind {'|'.join(MODES)}",
        "Pin each worker to its own cores or to a NUMA node; "
        "auto: to a node, if the host has several nodes and a worker for each. [auto]",
        parser=one_of(*MODES),
    )
    timeout: float | None = WORKERS.option(
        "--timeout SECONDS",
        "Give up on a worker after this long without a heartbeat. [60]",
        parser=seconds(1),
    )

    # How the hosts find each other.
    standalone: bool = HOSTS.flag(
        "--standalone", "Run on this host only. [default unless an option below is set]"
    )
    rdzv_endpoint: str | None = HOSTS.option(
        "--rdzv-endpoint HOST[:PORT]",
        "Host where all hosts meet; pass the same one on every host. [port 29400]",
        envvar="PET_RDZV_ENDPOINT",
    )
    rdzv_backend: str | None = HOSTS.option(
        "--rdzv-backend NAME",
        "Rendezvous backend: c10d, static, etcd, etcd-v2. "
        "[c10d; static with --node-rank or --master-addr]",
        parser=one_of("c10d", "static", "etcd", "etcd-v2"),
        envvar="PET_RDZV_BACKEND",
    )
    rdzv_id: str | None = HOSTS.option(
        "--rdzv-id NAME",
        "Job name; distinguishes jobs that share an endpoint. [ckpt]",
        envvar="PET_RDZV_ID",
    )
    rdzv_conf: str | None = HOSTS.option(
        "--rdzv-conf KEY=VALUE,…",
        "Rendezvous settings; join_timeout=SECONDS limits the wait for hosts. [600]",
        parser=_check_settings,
        envvar="PET_RDZV_CONF",
    )
    node_rank: int | None = HOSTS.option(
        "--node-rank N",
        "Rank of this host, starting at 0 (static rendezvous).",
        parser=whole_number(0),
        envvar="PET_NODE_RANK",
    )
    master_addr: str | None = HOSTS.option(
        "--master-addr HOST", "Address of host 0 (static rendezvous).", envvar="PET_MASTER_ADDR"
    )
    master_port: int | None = HOSTS.option(
        "--master-port PORT",
        "Port of host 0 (static rendezvous). [29500]",
        parser=whole_number(*_PORT),
        envvar="PET_MASTER_PORT",
    )
    local_addr: str | None = HOSTS.option(
        "--local-addr ADDRESS",
        "Address at which other hosts reach this host. [its fully qualified name]",
        envvar="PET_LOCAL_ADDR",
    )

    # What happens if a worker or host fails.
    max_restarts: int = FAILURES.option(
        "--max-restarts N",
        "Maximum number of restarts after a worker dies; workers continue where they stopped. [3]",
        default=3,
        parser=whole_number(0),
        envvar="PET_MAX_RESTARTS",
    )
    rejoin_timeout: float | None = FAILURES.option(
        "--rejoin-timeout SECONDS",
        "How long to wait for a lost host before the job fails. [--timeout plus 60]",
        parser=seconds(1),
    )
    monitor_interval: float = FAILURES.option(
        "--monitor-interval SECONDS",
        "How often to check on the workers. [0.1]",
        default=0.1,
        parser=seconds(0.01),
        envvar="PET_MONITOR_INTERVAL",
    )
    shutdown_timeout: int = FAILURES.option(
        "--shutdown-timeout SECONDS",
        "How long workers may take to exit before they are killed. [30]",
        default=30,
        parser=whole_number(1),
        envvar="PET_SHUTDOWN_TIMEOUT",
    )

    # The workers' output.
    log_dir: Path | None = LOGS.option(
        "--log-dir DIR",
        "Directory for worker logs. [a temporary directory, kept if the job fails]",
        envvar="PET_LOG_DIR",
    )
    redirects: str | None = LOGS.option(
        "-r, --redirects N",
        "Streams to redirect to log files: 1 stdout, 2 stderr, 3 both; "
        "or per local rank: 0:3,1:2. [both, except for local rank 0]",
        parser=_check_streams,
        envvar="PET_REDIRECTS",
    )
    tee: str | None = LOGS.option(
        "-t, --tee N",
        "Streams to write to both log files and the terminal.",
        parser=_check_streams,
        envvar="PET_TEE",
    )
    role: str = LOGS.option(
        "--role NAME",
        "Prefix for the lines that --tee prints. [ckpt]",
        default="ckpt",
        envvar="PET_ROLE",
    )
    progress: str | None = progress_option(
        LOGS, "Progress of COMMAND, unless COMMAND itself has this option: a bar, lines, or none."
    )
