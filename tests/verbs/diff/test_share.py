"""What the ranks of a team say of two checkpoints is what one process says, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan, pi
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from core.engine.numbers.difference import Tolerance
from core.engine.numbers.tally import ExactSum
from core.engine.team.protocol import ALONE, Figures, Team
from core.errors import CheckpointingException
from core.verbs.diff.result import Diff
from core.verbs.diff.run import DiffJob, diff
from tests.support.teams import PipeTeam, run_team

Said = tuple[object, ...]


def without_times(result: Diff) -> Said:
    """What a result says; without what cannot be pickled, and without times."""
    rest = (
        result.entries,
        result.of_layout,
        result.n_entries,
        result.left_out,
        result.notes,
        result.read_bytes,
    )
    return result.same, result.tensors, *rest


def compared(team: Team, jobs: list[DiffJob]) -> list[tuple[Said, tuple[Figures, ...]]]:
    results = [diff(job, team=team) for job in jobs]
    return [(without_times(result), result.figures) for result in results]


def alone(jobs: list[DiffJob]) -> list[Said]:
    return [result for result, _ in compared(ALONE, jobs)]


def check(n: int, jobs: list[DiffJob]) -> list[tuple[Figures, ...]]:
    """Asserts that a team says what one process does; returns what its ranks did."""
    lead, *rest = run_team(n, compared, jobs)
    expected = alone(jobs)
    for (result, _), wanted in zip(lead, expected, strict=True):
        assert repr(result) == repr(wanted)  # NaN is equal to itself here
    for other in rest:
        assert [item[0] for item, _ in other] == [item[0] for item in expected]
    return [figures for _, figures in lead]


def test_golden_checkpoints(golden: Path) -> None:
    optimizer = golden / "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt"
    pairs = [
        ("hf/llama/safetensors_single", "hf/llama/bin_sharded"),
        ("mcore_legacy/dense_gqa/tp4_pp1", "mcore0121_zarr/dense_gqa/tp4_pp1"),
        ("mcore_legacy/dense_gqa/tp1_pp1", "mcore_legacy/dense_gelu/tp1_pp1"),
        ("deepspeed/zero1_dp2_bf16", "deepspeed_universal/zero1_dp2_bf16"),
    ]
    jobs = [DiffJob(a=golden / a, b=golden / b) for a, b in pairs]
    jobs.append(
        DiffJob(
            a=optimizer, b=golden / "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dpreshardable"
        )
    )
    jobs.append(replace(jobs[0], reads=False))
    check(3, jobs)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints with tensors of several MiB, some of which differ in a few bands, or in
    type.
    """
    folder = tmp_path_factory.mktemp("pair")
    make = torch.Generator().manual_seed(5)
    first = {
        "differs.weight": torch.randn(1500, 1201, generator=make) * 1e-3,
        "equal.weight": torch.randn(1001, 801, generator=make),
        "cast.weight": torch.randn(900, 901, generator=make),
        "huge.weight": torch.full((700, 600), 3e38),
        "bias": torch.zeros(3),
        "empty": torch.zeros(0, 4),
        "nan": torch.tensor([1.0, nan, inf]),
        "only_a": torch.ones(2),
    }
    other = {key: value.clone() for key, value in first.items() if key != "only_a"}
    for row in (0, 700, 1499):
        other["differs.weight"][row, 1200] *= 1.5
    other["cast.weight"] = first["cast.weight"].bfloat16()
    other["huge.weight"][699, 0] = -inf
    other["nan"][1] = 2.0
    paths = folder / "a.safetensors", folder / "b.safetensors"
    for path, tensors in zip(paths, (first, other), strict=True):
        save_file(tensors, path)
    return paths


def test_tensors_that_several_ranks_share(pair: tuple[Path, Path]) -> None:
    a, b = pair
    rules = (None, Tolerance(1e-2, 1e-6), Tolerance(1e-5, 0.0, False))
    jobs = [DiffJob(a=a, b=b, rule=rule) for rule in rules] + [DiffJob(a=a, b=a), DiffJob(a=b, b=a)]
    for n in (2, 5):
        for figures, job in zip(check(n, jobs), jobs, strict=True):
            read = [figure.read_bytes for figure in figures]
            assert all(read) and max(read) - min(read) < 8 << 20, (job, read)
    difference = diff(jobs[0])
    kinds = {tensor.key: tensor.kind for tensor in difference.tensors}
    assert (
        kinds["differs.weight"] == "values"
        and kinds["cast.weight"] == "dtype"
        and kinds["equal.weight"] == "equal"
    )


def refused(team: PipeTeam, job: DiffJob) -> str:
    try:
        diff(job, team=team)
    except CheckpointingException as err:
        return f"{type(err).__name__}: {err.sentence}"
    return ""


def test_an_error_is_the_same_on_every_rank(pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = pair
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(b.read_bytes()[:-4096])
    for job in (
        DiffJob(a=a, b=tmp_path / "nowhere"),
        DiffJob(a=a, b=cut),
        DiffJob(a=a, b=b, include=["nothing"]),
    ):
        errors = run_team(3, refused, job)
        assert errors == [refused(ALONE, job)] * 3 and errors[0]
    small = DiffJob(a=a, b=b, memory_bytes=1 << 20)
    assert all(error.startswith("CapacityError") for error in run_team(2, refused, small))


def test_a_sum_is_exact_in_any_order() -> None:
    chance = Random(3)
    numbers = [chance.uniform(-1, 1) * 2.0 ** chance.randint(-1070, 900) for _ in range(500)] + [
        5e-324,
        1e308,
        1e308,
    ]
    sums = []
    for _ in range(4):
        chance.shuffle(numbers)
        first, other = ExactSum(), ExactSum()
        for number in numbers:
            chance.choice((first, other)).add(number)
        first.join(other)
        sums.append(first.value)
    assert len(set(sums)) == 1
    few = ExactSum()
    for number in (1e16, pi, -1e16):
        few.add(number)
    assert few.value == pi
    few.add(inf)
    assert few.value == inf
    few.add(-inf)
    assert np.isnan(few.value)
