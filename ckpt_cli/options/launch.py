"""The options of ``ckpt launch``: torchrun's names, and what workers take.

As for torchrun, a variable ``PET_NNODES``, ``PET_NPROC_PER_NODE``, … stands for an option that is not given; training
operators on Kubernetes set them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

from ckpt_cli.host.binding import MODES
from ckpt_cli.options.typer_command import LAUNCH_PANELS
from ckpt_cli.options.values import one_of, whole
from ckpt_cli.options.worker import BACKENDS
from core.device.device import NAMES as DEVICES

WORKERS, HOSTS, FAILURES, LOGS = LAUNCH_PANELS
_COUNTS = ("auto", "cpu", "gpu")
"""Words for the number of workers a host."""
_PORT = (1, 2**16 - 1)
_TEXT = partial(Option, show_default=False, show_envvar=False)


def nodes_in(text: str | None) -> tuple[int, int]:
    """Least and most hosts of ``N`` or ``MIN:MAX``; one host without a text."""
    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text or "1")
    return (int(found[1]), int(found[2] or found[1])) if found else (0, 0)


def _nodes(text: str) -> str:
    low, high = nodes_in(text)
    if not 1 <= low <= high:
        raise BadParameter(f"{text!r} is neither a number of hosts nor MIN:MAX")
    return text


def _workers(text: str) -> str:
    if text not in _COUNTS and not re.fullmatch(r"0*[1-9]\d{0,4}", text):
        raise BadParameter(f"{text!r} is neither a number of workers nor one of: {', '.join(_COUNTS)}")
    return text


def seconds(low: float) -> Callable[[str | float], float]:
    """A parser for a number of seconds that is at least ``low``."""

    def parse(text: str | float) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not low <= number < 1e9:
            raise BadParameter(f"{text!r} is not a number of seconds of at least {low:g}")
        return number

    return parse


def _streams(text: str) -> str:
    """torchrun's words for streams: ``3``, or ``0:3,1:2`` by local rank."""
    if not re.fullmatch(r"[0-3]|(\d:[0-3],)*\d:[0-3]", text):
        raise BadParameter(f"{text!r} is neither 0, 1 (stdout), 2 (stderr), 3 (both) nor RANK:N,RANK:N,…")
    return text


def settings_in(text: str | None) -> dict[str, str]:
    """The settings of ``KEY=VALUE,KEY=VALUE``."""
    pairs = [part.partition("=") for part in (text or "").split(",") if part]
    return {key.strip(): value.strip() for key, _, value in pairs}


def _settings(text: str) -> str:
    if not all(key and value for key, value in settings_in(text).items()):
        raise BadParameter(f"{text!r} is not KEY=VALUE,KEY=VALUE,…")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """``ckpt launch``."""

    command: Annotated[
        list[str] | None,
        Argument(
            metavar="[--] COMMAND ARGS…", show_default=False, help="A command of ckpt, with all that belongs to it."
        ),
    ] = None
    nnodes: Annotated[
        str | None,
        _TEXT(
            "--nnodes",
            metavar="N|MIN:MAX",
            parser=_nodes,
            envvar="PET_NNODES",
            rich_help_panel=WORKERS,
            help="Hosts; the same command runs on each. [1]",
        ),
    ] = None
    nproc_per_node: Annotated[
        str | None,
        _TEXT(
            "--nproc-per-node",
            metavar="N|auto|cpu|gpu",
            parser=_workers,
            envvar="PET_NPROC_PER_NODE",
            rich_help_panel=WORKERS,
            help="Workers on each host: a number, one a core (cpu), one a GPU (gpu); "
            "auto: one a GPU unless --device is cpu, else one a core, 16 at most. [auto]",
        ),
    ] = None
    device: Annotated[
        str | None,
        _TEXT(
            "--device",
            metavar="|".join(DEVICES),
            parser=one_of(*DEVICES),
            rich_help_panel=WORKERS,
            help="Where numbers are worked on: cuda is one GPU a worker. [cpu]",
        ),
    ] = None
    backend: Annotated[
        str | None,
        _TEXT(
            "--backend",
            metavar="|".join(BACKENDS),
            parser=one_of(*BACKENDS),
            rich_help_panel=WORKERS,
            help="How workers talk; auto: gloo, and nccl beside it on GPUs. [auto]",
        ),
    ] = None
    bind: Annotated[
        str | None,
        _TEXT(
            "--bind",
            metavar="|".join(MODES),
            parser=one_of(*MODES),
            rich_help_panel=WORKERS,
            help="Keep each worker on cores of its own, or on a NUMA node; "
            "auto: on a node, where there are several and a worker for each. [auto]",
        ),
    ] = None
    timeout: Annotated[
        float | None,
        _TEXT(
            "--timeout",
            metavar="SECONDS",
            parser=seconds(1),
            rich_help_panel=WORKERS,
            help="A worker that is silent for so long is given up. [60]",
        ),
    ] = None

    standalone: Annotated[
        bool,
        _TEXT("--standalone", rich_help_panel=HOSTS, help="One host, no other to meet. [if nothing below is given]"),
    ] = False
    rdzv_endpoint: Annotated[
        str | None,
        _TEXT(
            "--rdzv-endpoint",
            metavar="HOST[:PORT]",
            envvar="PET_RDZV_ENDPOINT",
            rich_help_panel=HOSTS,
            help="Where the hosts meet: one of them, the same on all. [port 29400]",
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
            help="How they meet: c10d, static, etcd, etcd-v2. [c10d; static with --node-rank or --master-addr]",
        ),
    ] = None
    rdzv_id: Annotated[
        str | None,
        _TEXT(
            "--rdzv-id",
            metavar="NAME",
            envvar="PET_RDZV_ID",
            rich_help_panel=HOSTS,
            help="Tells jobs with one endpoint apart. [ckpt]",
        ),
    ] = None
    rdzv_conf: Annotated[
        str | None,
        _TEXT(
            "--rdzv-conf",
            metavar="KEY=VALUE,…",
            parser=_settings,
            envvar="PET_RDZV_CONF",
            rich_help_panel=HOSTS,
            help="Settings of the rendezvous; join_timeout=SECONDS is how long hosts are waited for. [600]",
        ),
    ] = None
    node_rank: Annotated[
        int | None,
        _TEXT(
            "--node-rank",
            metavar="N",
            parser=whole(0),
            envvar="PET_NODE_RANK",
            rich_help_panel=HOSTS,
            help="Number of this host, from 0 (static).",
        ),
    ] = None
    master_addr: Annotated[
        str | None,
        _TEXT(
            "--master-addr",
            metavar="HOST",
            envvar="PET_MASTER_ADDR",
            rich_help_panel=HOSTS,
            help="Address of host 0 (static).",
        ),
    ] = None
    master_port: Annotated[
        int | None,
        _TEXT(
            "--master-port",
            metavar="PORT",
            parser=whole(*_PORT),
            envvar="PET_MASTER_PORT",
            rich_help_panel=HOSTS,
            help="Port of host 0 (static). [29500]",
        ),
    ] = None
    local_addr: Annotated[
        str | None,
        _TEXT(
            "--local-addr",
            metavar="ADDRESS",
            envvar="PET_LOCAL_ADDR",
            rich_help_panel=HOSTS,
            help="Address under which the others reach this host. [its full name]",
        ),
    ] = None

    max_restarts: Annotated[
        int,
        _TEXT(
            "--max-restarts",
            metavar="N",
            parser=whole(0),
            envvar="PET_MAX_RESTARTS",
            rich_help_panel=FAILURES,
            help="How often workers are started again after one has died; they go on where they were. [3]",
        ),
    ] = 3
    rejoin_timeout: Annotated[
        float | None,
        _TEXT(
            "--rejoin-timeout",
            metavar="SECONDS",
            parser=seconds(1),
            rich_help_panel=FAILURES,
            help="How long a host that was lost is waited for before the job is given up. [--timeout and 60 more]",
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
            help="How often workers are looked after. [0.1]",
        ),
    ] = 0.1
    shutdown_timeout: Annotated[
        int,
        _TEXT(
            "--shutdown-timeout",
            metavar="SECONDS",
            parser=whole(1),
            envvar="PET_SHUTDOWN_TIMEOUT",
            rich_help_panel=FAILURES,
            help="How long workers may take to end before they are killed. [30]",
        ),
    ] = 30

    log_dir: Annotated[
        Path | None,
        _TEXT(
            "--log-dir",
            metavar="DIR",
            envvar="PET_LOG_DIR",
            rich_help_panel=LOGS,
            help="Keep what workers print there. [a temporary one, kept if the job fails]",
        ),
    ] = None
    redirects: Annotated[
        str | None,
        _TEXT(
            "-r",
            "--redirects",
            metavar="N",
            parser=_streams,
            envvar="PET_REDIRECTS",
            rich_help_panel=LOGS,
            help="Streams that go to files: 1 stdout, 2 stderr, 3 both, or by local rank: 0:3,1:2. "
            "[both, save of local rank 0]",
        ),
    ] = None
    tee: Annotated[
        str | None,
        _TEXT(
            "-t",
            "--tee",
            metavar="N",
            parser=_streams,
            envvar="PET_TEE",
            rich_help_panel=LOGS,
            help="Streams that go to files and to the terminal.",
        ),
    ] = None
    role: Annotated[
        str,
        _TEXT(
            "--role",
            metavar="NAME",
            envvar="PET_ROLE",
            rich_help_panel=LOGS,
            help="What teed lines begin with. [ckpt]",
        ),
    ] = "ckpt"
