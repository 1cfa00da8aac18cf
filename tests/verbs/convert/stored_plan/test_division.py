"""Who does what: every byte is somebody's, nobody has much more than others."""

from __future__ import annotations

import random

import pytest

from core.verbs.convert.stored_plan.division import Division, KeyWork, divide_by_hosts, divide_work


def owned(division: Division, works: list[KeyWork]) -> list[int]:
    """Bytes of each worker; every tensor is done exactly once."""
    loads = [0] * division.n_workers
    for number, work in enumerate(works):
        parts = division.shared.get(number)
        if division.owners[number] >= 0:
            assert parts is None
            loads[division.owners[number]] += work.n_bytes
            continue
        assert parts is not None
        at = 0
        for worker, part in parts:
            assert part.start == at
            at = work.n_bytes if part.stop is None else part.stop
            loads[worker] += part.n_bytes
        assert at == work.n_bytes and parts[-1][1].stop is None
        assert sum(part.n_bytes for _, part in parts) == work.n_bytes
    return loads


@pytest.mark.each_value
@pytest.mark.parametrize("n", [1, 2, 3, 8, 64, 512])
@pytest.mark.parametrize("shape", ["one", "equal", "mixed", "small", "none", "whole"])
def test_every_byte_has_one_owner_and_shares_are_alike(n: int, shape: str) -> None:
    pick = random.Random(n)
    sizes = {
        "one": [10**12],
        "equal": [3 * 10**8] * 4096,
        "mixed": [int(2 ** pick.uniform(3, 36)) for _ in range(3000)],
        "small": [pick.randrange(2000) for _ in range(50_000)],
        "none": [],
        "whole": [10**9] * 1024,
    }[shape]
    works = [
        KeyWork(size, is_made=pick.random() < 0.3, is_cuttable=shape != "whole") for size in sizes
    ]
    division = divide_work(works, n)
    loads = owned(division, works)
    assert loads == list(division.loads) and sum(loads) == sum(sizes)
    assert division.balance <= 1.01
    assert (shape in ("one", "mixed") and n > 1) == bool(division.shared) or shape == "equal"


def test_what_is_cast_is_shared_by_all_as_well() -> None:
    works = [KeyWork(10**11, is_made=True), KeyWork(10**11)]
    division = divide_work(works, 4)
    assert [len(division.shared[number]) for number in (0, 1)] == [4, 4]


@pytest.mark.parametrize("n_groups", [1, 3, 40])
def test_where_hosts_do_not_share_files_each_file_has_one_host(n_groups: int) -> None:
    pick = random.Random(n_groups)
    hosts = ["a", "a", "b", "b", "b", "c"]
    files = [
        (group := pick.randrange(n_groups), n_groups + 2 * group + pick.randrange(2))
        for _ in range(500)
    ] + [()]
    works = [KeyWork(int(2 ** pick.uniform(3, 32))) for _ in files]
    division = divide_by_hosts(works, files, hosts)
    assert owned(division, works) == list(division.loads)
    writers: dict[int, set[str]] = {}
    for number, files_of_host in enumerate(files):
        owner = division.owners[number]
        workers = [owner] if owner >= 0 else [worker for worker, _ in division.shared[number]]
        for file in files_of_host:
            writers.setdefault(file, set()).update(hosts[worker] for worker in workers)
    assert all(len(hosts_of_file) == 1 for hosts_of_file in writers.values())
    assert n_groups < 40 or division.balance < 1.5
