"""ckpt_cli.host.binding: which cores a worker gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_cli.host.binding import (
    CpuShare,
    bind,
    cpu_share,
    n_cores,
    node_of_gpu,
    nodes_of,
    parse_cores,
)
from core.errors import UnsupportedError

TWO_NODES = [[0, 1, 2, 3], [4, 5, 6, 7]]


def shares(mode: str, n: int, nodes: list[list[int]], **more: int) -> list[CpuShare]:
    n_usable = more.pop("n_usable", sum(map(len, nodes)))
    return [
        cpu_share(mode, local_rank=i, local_size=n, nodes=nodes, n_usable=n_usable, **more)
        for i in range(n)
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_cores_are_shared_out_without_rest_or_overlap(n: int) -> None:
    core_sets = [share.cores or frozenset() for share in shares("cores", n, TWO_NODES)]
    assert sorted(core for cores in core_sets for core in cores) == list(range(8))
    assert max(map(len, core_sets)) - min(map(len, core_sets)) <= 1


def test_more_workers_than_cores_share_them() -> None:
    worker_shares = shares("cores", 3, [[5]])
    assert [share.cores for share in worker_shares] == [frozenset({5})] * 3
    assert [share.n_threads for share in worker_shares] == [1, 1, 1]


def test_numa_gives_each_worker_one_node_and_its_part_of_the_threads() -> None:
    worker_shares = shares("numa", 4, TWO_NODES)
    assert [share.cores for share in worker_shares] == [frozenset(TWO_NODES[0])] * 2 + [
        frozenset(TWO_NODES[1])
    ] * 2
    assert [share.n_threads for share in worker_shares] == [2] * 4


def test_a_worker_with_a_gpu_goes_to_the_node_of_the_gpu() -> None:
    assert shares("numa", 1, TWO_NODES, near=1) == [CpuShare(frozenset(TWO_NODES[1]), 4)]


def test_auto_binds_where_every_node_gets_a_worker() -> None:
    assert shares("auto", 2, TWO_NODES) == shares("numa", 2, TWO_NODES)
    assert shares("auto", 1, TWO_NODES) == [CpuShare(None, 8)]
    assert shares("auto", 2, [[0, 1]]) == [CpuShare(None, 1)] * 2


def test_threads_follow_the_quota() -> None:
    assert [share.n_threads for share in shares("none", 2, TWO_NODES, n_usable=4)] == [2, 2]
    assert [share.n_threads for share in shares("cores", 2, TWO_NODES, n_usable=4)] == [2, 2]


@pytest.mark.parametrize(
    ("files", "n"),
    [
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({}, 8),
    ],
)
def test_the_quota_of_a_container_limits_the_cores(
    files: dict[str, str], n: int, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert n_cores(range(8), cgroup_dir=tmp_path) == n


def nodes_on_disk(folder: Path, lists: list[str]) -> Path:
    for number, text in enumerate(lists):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}" / "cpulist").write_text(f"{text}\n")
    return folder


def test_nodes_are_those_of_the_allowed_cores(tmp_path: Path) -> None:
    node_dir = nodes_on_disk(tmp_path, ["0-3,8", "4-7", ""])
    assert nodes_of({1, 2, 5, 8, 9}, node_dir=node_dir) == [[1, 2, 8], [5], [9]]
    assert nodes_of({4}, node_dir=node_dir) == [[4]]
    assert nodes_of({4, 0}, node_dir=tmp_path / "none") == [[0, 4]]


def test_the_kernels_lists_are_read() -> None:
    assert parse_cores("0-2,5,7-8\n") == {0, 1, 2, 5, 7, 8}
    assert parse_cores("\n") == set()


def test_the_node_of_a_gpu_is_found_by_its_bus_address(tmp_path: Path) -> None:
    own_core = min(os.sched_getaffinity(0))
    node_dir = nodes_on_disk(tmp_path / "nodes", [f"{own_core}", "4096"])
    for address, node in (("0000:3B:00.0", 0), ("0000:AF:00.0", -1)):
        (tmp_path / "gpus" / address).mkdir(parents=True)
        (tmp_path / "bus" / address.lower()).mkdir(parents=True)
        (tmp_path / "bus" / address.lower() / "numa_node").write_text(f"{node}\n")
    places = {"driver_dir": tmp_path / "gpus", "bus_dir": tmp_path / "bus", "node_dir": node_dir}
    assert node_of_gpu(0, {}, **places) == 0
    assert node_of_gpu(1, {}, **places) is None, "the system does not say"
    assert node_of_gpu(1, {"CUDA_VISIBLE_DEVICES": "1,0"}, **places) == 0
    assert node_of_gpu(0, {"CUDA_VISIBLE_DEVICES": "GPU-8a3f"}, **places) is None
    assert node_of_gpu(0, {"CUDA_VISIBLE_DEVICES": ""}, **places) is None
    assert node_of_gpu(2, {}, **places) is None


def test_a_bound_process_runs_on_its_cores_only(repo_dir: Path) -> None:
    code = (
        "import os; from ckpt_cli.host.binding import bind\n"
        "share = bind('cores', local_rank=0, local_size=len(os.sched_getaffinity(0)), "
        "is_below_agent=True)\n"
        "assert os.sched_getaffinity(0) == share.cores and len(share.cores) == share.n_threads == 1"
    )
    subprocess.run([sys.executable, "-c", code], cwd=repo_dir, check=True)


def test_cores_cannot_be_chosen_where_the_system_does_not_bind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    share = bind("none", local_rank=0, local_size=1, is_below_agent=True)
    assert share.cores is None and share.n_threads >= 1
    with pytest.raises(UnsupportedError, match="--bind cores"):
        bind("cores", local_rank=0, local_size=1, is_below_agent=True)
