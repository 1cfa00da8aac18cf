"""The division of a host's cores among its workers, and the pinning of each worker to its share.

A host's workers share the cores that this process may use: its affinity mask (set by ``taskset``,
Slurm's cgroup or a container's cpuset), but no more than a container's processor quota. ``--bind``
chooses how they are shared:

``none``   workers are not pinned; each starts as many threads as its share of the cores.
``cores``  worker *i* of *n* gets the *i*-th *n*-th of the cores, in the order of NUMA nodes.
``numa``   a worker gets the cores of one NUMA node (that of its GPU, if it has one), shared with
           that node's workers. Its memory then comes from that node too, as Linux allocates a page
           where it is first touched.
``auto``   ``numa`` if the cores are on several nodes and each node gets a worker, else ``none``.
           Only below an elastic agent (``ckpt launch``, torchrun): srun and MPI launchers bind by
           themselves.

Linux lists the nodes in ``/sys/devices/system/node``; without that directory there is one node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from core.errors import UnsupportedError
from core.files.syscalls import allowed_cores, bind_to_cores
from core.values import dataclass

MODES = ("auto", "none", "cores", "numa")


@dataclass(frozen=True, slots=True)
class CpuShare:
    """One worker's share of its host's cores.

    Args:
        cores: numbers of the cores to which the worker's threads are pinned; None if not pinned.
        n_threads: number of threads to start, >= 1.
    """

    cores: frozenset[int] | None
    n_threads: int


def bind(
    mode: str,
    *,
    local_rank: int,
    local_size: int,
    is_below_agent: bool,
    environ: Mapping[str, str] = os.environ,
) -> CpuShare:
    """Pin this process and its future threads to its share of the host's cores.

    Call it before torch is imported, because torch's threads inherit the mask of that moment.

    Args:
        mode: one of ``MODES``.
        local_rank, local_size: the worker's rank among the workers of its host, and their number.
        is_below_agent: the workers of the host inherit one mask from an elastic agent.
        environ: environment with ``CUDA_VISIBLE_DEVICES``.

    Returns:
        The share; the caller sets ``OMP_NUM_THREADS`` to ``n_threads`` if it is not set.

    Raises:
        UnsupportedError: the system cannot bind processes (macOS), and ``mode`` requests it.
    """
    # srun and mpirun bind by themselves: with a smaller mask, each worker has got cores of its own.
    allowed = allowed_cores()
    if mode == "auto" and not is_below_agent:
        is_bound = len(allowed) < (os.cpu_count() or 1)
        return CpuShare(None, max(1, n_cores(allowed) // (1 if is_bound else local_size)))
    share = cpu_share(
        mode,
        local_rank=local_rank,
        local_size=local_size,
        nodes=nodes_of(allowed),
        n_usable=n_cores(allowed),
        near=node_of_gpu(local_rank, environ),
    )
    if share.cores is not None and not bind_to_cores(share.cores):
        raise UnsupportedError(
            f"--bind {mode} is not supported: this system cannot pin processes to cores",
            hint="omit --bind",
        )
    return share


def cpu_share(
    mode: str,
    *,
    local_rank: int,
    local_size: int,
    nodes: Sequence[Sequence[int]],
    n_usable: int,
    near: int | None = None,
) -> CpuShare:
    """Return one worker's share of the cores.

    Args:
        mode: one of ``MODES``.
        local_rank, local_size: the worker's rank among the workers of its host, and their number.
        nodes: the allowed cores, by NUMA node; no node is empty.
        n_usable: number of these cores that the quota allows to run at a time.
        near: index in ``nodes`` of the NUMA node of the worker's GPU; None without one.
    """
    n_threads = max(1, n_usable // local_size)
    if mode == "auto":
        mode = "numa" if 1 < len(nodes) <= local_size else "none"
    if mode == "none":
        return CpuShare(None, n_threads)
    if mode == "numa":
        cores = nodes[local_rank * len(nodes) // local_size if near is None else near]
    else:
        all_cores = [core for node in nodes for core in node]
        start, stop = (
            position * len(all_cores) // local_size for position in (local_rank, local_rank + 1)
        )
        # With more workers than cores, workers share a core.
        cores = all_cores[start:stop] or [all_cores[local_rank % len(all_cores)]]
    return CpuShare(frozenset(cores), max(1, min(n_threads, len(cores))))


def n_cores(allowed: Collection[int], *, cgroup_dir: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that can run at a time: all, or a container's quota, rounded up.

    Args:
        allowed: numbers of the cores that this process may run on.
        cgroup_dir: mount point of the control groups.
    """
    quota = _quota(cgroup_dir)
    return max(1, len(allowed) if quota is None else min(len(allowed), -int(-quota // 1)))


def _quota(cgroup_dir: Path) -> float | None:
    """Return the number of cores that the control group's quota allows; None without a limit."""
    # cgroup v2 has one file, "max 100000" or "400000 100000": the time per period, in microseconds.
    # v1 has a file for each number, and -1 without a limit.
    try:
        used, period = (cgroup_dir / "cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        try:
            used = (cgroup_dir / "cpu/cpu.cfs_quota_us").read_text("ascii").strip()
            period = (cgroup_dir / "cpu/cpu.cfs_period_us").read_text("ascii").strip()
        except (OSError, ValueError):
            return None
    if not used.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(used) / int(period)


def nodes_of(
    allowed: Collection[int], *, node_dir: Path = Path("/sys/devices/system/node")
) -> list[list[int]]:
    """Return the allowed cores by NUMA node, without empty nodes.

    If the system does not list the nodes, the result is one node.
    """
    # Sort by number: node10 comes after node2.
    nodes = []
    for path in sorted(node_dir.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            cores = parse_cores((path / "cpulist").read_text("ascii"))
        except (OSError, ValueError):
            continue
        nodes.append(sorted(cores & set(allowed)))
    nodes = [cores for cores in nodes if cores]
    # Cores of no listed node form one of their own, so that every allowed core is used.
    unlisted = sorted(set(allowed).difference(*nodes))
    return [*nodes, unlisted] if unlisted else nodes


def parse_cores(text: str) -> set[int]:
    """Parse a core list of the kernel, such as ``0-3,8,10-11``.

    Raises:
        ValueError: the text is not such a list.
    """
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def node_of_gpu(
    local_rank: int,
    environ: Mapping[str, str],
    *,
    driver_dir: Path = Path("/proc/driver/nvidia/gpus"),
    bus_dir: Path = Path("/sys/bus/pci/devices"),
    node_dir: Path = Path("/sys/devices/system/node"),
) -> int | None:
    """Return the NUMA node of a worker's GPU, as an index into the result of ``nodes_of``.

    Returns None if the worker has no GPU, or the system does not list the GPU's node. GPUs count in
    the order of their bus addresses, which is CUDA's order for GPUs of one kind. torch cannot be
    used here, because it is imported only after the process is pinned.
    """
    # The bus addresses of the GPUs that this process sees. CUDA_VISIBLE_DEVICES selects and orders
    # them, by number or by name (GPU-…, MIG-…); names cannot be resolved without the driver.
    addresses = sorted(path.name for path in driver_dir.glob("*")) if driver_dir.is_dir() else []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        numbers = [part.strip() for part in visible.split(",")]
        if not all(
            re.fullmatch(r"\d+", number) and int(number) < len(addresses) for number in numbers
        ):
            return None
        addresses = [addresses[int(number)] for number in numbers]
    if local_rank >= len(addresses):
        return None
    # The node of the worker's GPU. Nodes without allowed cores are not counted by ``nodes_of``, so
    # the index is looked up by the node's cores.
    try:
        number = int((bus_dir / addresses[local_rank].lower() / "numa_node").read_text("ascii"))
        cores = parse_cores((node_dir / f"node{number}" / "cpulist").read_text("ascii"))
    except (OSError, ValueError):
        return None
    nodes = nodes_of(allowed_cores(), node_dir=node_dir)
    return next((index for index, node in enumerate(nodes) if cores & set(node)), None)
