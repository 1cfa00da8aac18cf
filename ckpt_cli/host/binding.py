"""Which cores a worker works on: how many there are for it, and whether it is kept on them.

A host's workers share the cores that this process may use: its affinity mask (what ``taskset``, Slurm's cgroup or a
container's cpuset left), and no more than a container's processor quota. ``--bind`` says how they are shared:

``none``   the kernel moves threads as it likes; each worker starts as many as its share of the cores.
``cores``  worker *i* of *n* gets the *i*-th *n*-th of the cores, in the order of NUMA nodes.
``numa``   it gets the cores of one NUMA node (that of its GPU, where it has one), shared with that node's workers.
           Memory then comes from that node as well, as Linux takes it where a page is first touched.
``auto``   ``numa`` where the cores lie on several nodes and each node gets a worker, else ``none``. Only below an
           elastic agent (``ckpt launch``, torchrun): srun and MPI launchers bind by themselves.

Linux tells the nodes in ``/sys/devices/system/node``; without that directory there is one node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MODES = ("auto", "none", "cores", "numa")


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker of a host may use.

    Args:
        cores: numbers of the processors that its threads are kept on; None where they are not bound.
        n_threads: how many threads are worth having, >= 1.
    """

    cores: frozenset[int] | None
    n_threads: int


def bind(
    mode: str, *, local_rank: int, local_size: int, is_below_agent: bool, environ: Mapping[str, str] = os.environ
) -> Share:
    """Keeps this process (and the threads that it starts from now on) on its share of the host's cores.

    To be called before torch is imported, as its threads are started with the mask of then.

    Args:
        mode: one of ``MODES``.
        local_rank, local_size: of the worker among those of its host.
        is_below_agent: the workers of the host inherit one mask from an elastic agent.
        environ: where ``CUDA_VISIBLE_DEVICES`` is read.

    Returns:
        The share; set ``OMP_NUM_THREADS`` to ``n_threads`` if it is not set.
    """
    allowed = allowed_cores()
    if mode == "auto" and not is_below_agent:
        is_bound = len(allowed) < (os.cpu_count() or 1)  # by srun or mpirun, which gave each worker its own
        return Share(None, max(1, n_cores(allowed) // (1 if is_bound else local_size)))
    share = share_of(
        mode,
        local_rank=local_rank,
        local_size=local_size,
        nodes=nodes_of(allowed),
        n_usable=n_cores(allowed),
        near=node_of_gpu(local_rank, environ),
    )
    if share.cores is not None:
        os.sched_setaffinity(0, share.cores)
    return share


def share_of(
    mode: str,
    *,
    local_rank: int,
    local_size: int,
    nodes: Sequence[Sequence[int]],
    n_usable: int,
    near: int | None = None,
) -> Share:
    """One worker's share of some cores.

    Args:
        mode: one of ``MODES``.
        local_rank, local_size: of the worker among those of its host.
        nodes: the cores that may be used, by NUMA node; no node is empty.
        n_usable: how many of them the quota lets run at a time.
        near: index in ``nodes`` of the one that the worker's GPU is at.
    """
    n_threads = max(1, n_usable // local_size)
    if mode == "auto":
        mode = "numa" if 1 < len(nodes) <= local_size else "none"
    if mode == "none":
        return Share(None, n_threads)
    if mode == "numa":
        mine = local_rank * len(nodes) // local_size if near is None else near
        return Share(frozenset(nodes[mine]), max(1, min(n_threads, len(nodes[mine]))))
    cores = [core for node in nodes for core in node]
    start, stop = (position * len(cores) // local_size for position in (local_rank, local_rank + 1))
    mine_too = cores[start:stop] or [cores[local_rank % len(cores)]]  # more workers than cores
    return Share(frozenset(mine_too), max(1, min(n_threads, len(mine_too))))


def allowed_cores() -> frozenset[int]:
    """The processors that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def n_cores(allowed: Collection[int], *, cgroup_dir: Path = Path("/sys/fs/cgroup")) -> int:
    """How many of the processors can run at a time: all, or as many as the container's quota pays for, rounded up."""
    quota = _quota(cgroup_dir)
    return max(1, len(allowed) if quota is None else min(len(allowed), -int(-quota // 1)))


def _quota(cgroup_dir: Path) -> float | None:
    """Processors that the control group pays for; None without a limit."""
    try:
        used, period = (cgroup_dir / "cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        try:  # version 1
            used = (cgroup_dir / "cpu/cpu.cfs_quota_us").read_text("ascii").strip()
            period = (cgroup_dir / "cpu/cpu.cfs_period_us").read_text("ascii").strip()
        except (OSError, ValueError):
            return None
    if not used.isdigit() or not period.isdigit() or int(period) == 0:
        return None  # "max", "-1"
    return int(used) / int(period)


def nodes_of(allowed: Collection[int], *, node_dir: Path = Path("/sys/devices/system/node")) -> list[list[int]]:
    """The cores by NUMA node, without nodes that have none of them; one node where the system tells of none."""
    found = []
    for path in sorted(node_dir.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            cores = cores_in((path / "cpulist").read_text("ascii"))
        except (OSError, ValueError):
            continue
        found.append(sorted(cores & set(allowed)))
    nodes = [cores for cores in found if cores]
    missing = sorted(set(allowed).difference(*nodes))
    return [*nodes, missing] if missing else nodes


def cores_in(text: str) -> set[int]:
    """The numbers of a kernel list such as ``0-3,8,10-11``.

    Raises:
        ValueError: it is none.
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found


def node_of_gpu(
    local_rank: int,
    environ: Mapping[str, str],
    *,
    driver_dir: Path = Path("/proc/driver/nvidia/gpus"),
    bus_dir: Path = Path("/sys/bus/pci/devices"),
    node_dir: Path = Path("/sys/devices/system/node"),
) -> int | None:
    """Index among the NUMA nodes that hold allowed cores of the one that worker ``local_rank``'s GPU is at.

    None without such a GPU, or where the system does not say. GPUs are taken in the order of their bus addresses,
    which is CUDA's for alike ones; torch is not asked, as it is imported after the process is bound.
    """
    addresses = sorted(path.name for path in driver_dir.glob("*")) if driver_dir.is_dir() else []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        numbers = [part.strip() for part in visible.split(",")]
        if not all(re.fullmatch(r"\d+", number) and int(number) < len(addresses) for number in numbers):
            return None  # names (GPU-…, MIG-…), or none at all
        addresses = [addresses[int(number)] for number in numbers]
    if local_rank >= len(addresses):
        return None
    try:
        number = int((bus_dir / addresses[local_rank].lower() / "numa_node").read_text("ascii"))
        cores = cores_in((node_dir / f"node{number}" / "cpulist").read_text("ascii"))
    except (OSError, ValueError):
        return None
    nodes = nodes_of(allowed_cores(), node_dir=node_dir)
    return next((index for index, node in enumerate(nodes) if cores & set(node)), None)
