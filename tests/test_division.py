"""Who does what: every byte is somebody's, nobody has much more than others."""

from __future__ import annotations

import random

import pytest

from core.division import Division, KeyWork, divided


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
    works = [KeyWork(size, is_made=pick.random() < 0.3, is_cuttable=shape != "whole") for size in sizes]
    division = divided(works, n)
    loads = owned(division, works)
    assert loads == list(division.loads) and sum(loads) == sum(sizes)
    assert division.balance <= 1.01
    assert (shape in ("one", "mixed") and n > 1) == bool(division.shared) or shape == "equal"


def test_what_is_cast_is_shared_by_all_as_well() -> None:
    works = [KeyWork(10**11, is_made=True), KeyWork(10**11)]
    division = divided(works, 4)
    assert [len(division.shared[number]) for number in (0, 1)] == [4, 4]
