"""The files of DeepSpeed's ranks, also of checkpoints that cannot be opened."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpt_cli.pages.pictures.zero_ranks import zero_lines
from ckpt_cli.screen.terminal import Screen, columns_of
from core.verbs.pictures.zero_ranks import ZeroFile, ZeroGrid, read_zero_grid
from core.verbs.validate.run import validate
from tests.support.edited import copied


@pytest.mark.parametrize(
    ("name", "lost", "kind", "rank"),
    [
        ("zero1_dp2_bf16", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "optimizer", 1),
        ("zero2_dp2_fp32", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "optimizer", 0),
        ("zero3_dp2_bf16", "zero_pp_rank_1_mp_rank_00_model_states.pt", "model", 1),
    ],
)
def test_a_missing_file_is_missing_in_the_grid_and_nothing_else(
    name: str, lost: str, kind: str, rank: int, golden: Path, tmp_path: Path
) -> None:
    complete = read_zero_grid(golden / "deepspeed" / name)
    assert complete is not None and complete.n_ranks == 2 and not complete.missing
    # The only model file of ZeRO-1 and 2 is that of rank 0.
    n_models = 2 if "zero3" in name else 1
    assert {key: len(files) for key, files in complete.kinds.items()} == {
        "model": n_models,
        "optimizer": 2,
    }
    path = copied(golden, f"deepspeed/{name}", tmp_path)
    next(path.rglob(lost)).unlink()
    grid = read_zero_grid(path)
    assert grid is not None and grid.n_ranks == 2
    assert grid.missing == [ZeroFile(rank, lost, None)]
    assert grid.missing[0] in grid.kinds[kind]


@pytest.mark.parametrize(
    ("case", "lost"),
    [
        ("pipeline_tp2_zero1", "mp_rank_03_model_states.pt"),
        ("pipeline_zero1", "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt"),
        ("autotp_zero3", "zero_pp_rank_0_mp_rank_01_model_states.pt"),
    ],
)
def test_every_model_parallel_rank_has_its_own_files(
    case: str, lost: str, deepspeed_parallel: Path, tmp_path: Path
) -> None:
    shutil.copytree(deepspeed_parallel / case, tmp_path / "x")
    complete = read_zero_grid(tmp_path / "x")
    assert complete is not None and not complete.missing
    names = [file.name for files in complete.kinds.values() for file in files]
    stored = {path.name for path in (tmp_path / "x/global_step2").glob("*mp_rank_*")}
    assert sorted(names) == sorted(stored)
    (tmp_path / "x/global_step2" / lost).unlink()
    grid = read_zero_grid(tmp_path / "x")
    assert grid is not None
    assert [file.name for file in grid.missing] == [lost]
    lines = list(zero_lines(Screen(60), grid))
    codes = {(item.code, item.file) for item in validate(tmp_path / "x").findings}
    assert ("CK160" if "zero_pp_rank" in lost else "CK101", lost) in codes
    number = int(lost.split("mp_rank_")[1][:2])
    assert any(line.startswith(("model", "optimizer")) and f"mp {number}" in line for line in lines)
    assert lost in lines[-1]


@pytest.mark.parametrize(
    "name",
    [
        "deepspeed/zero0_dp2_bf16",
        "deepspeed_universal/zero1_dp2_bf16",
        "mcore_legacy/dense_gqa/tp2_pp2",
        "hf/llama/safetensors_single",
    ],
)
def test_other_checkpoints_have_no_grid_of_zero(name: str, golden: Path, tmp_path: Path) -> None:
    assert read_zero_grid(golden / name) is None
    assert read_zero_grid(tmp_path / "absent") is None


def grid_of(n_ranks: int, missing: set[int]) -> ZeroGrid:
    files = tuple(
        ZeroFile(rank, f"r{rank}.pt", None if rank in missing else 10 << 20)
        for rank in range(n_ranks)
    )
    return ZeroGrid(n_ranks, {"model": (ZeroFile(0, "model.pt", 5 << 20),), "optimizer": files})


@pytest.mark.parametrize("has_unicode", [True, False])
@pytest.mark.parametrize("n_ranks", [1, 4, 8, 64, 4096])
def test_every_grid_of_zero_fits_and_names_what_is_missing(
    n_ranks: int, *, has_unicode: bool
) -> None:
    screen = Screen(80, has_unicode=has_unicode)
    lines = list(zero_lines(screen, grid_of(n_ranks, {n_ranks - 1})))
    assert max(map(columns_of, lines)) <= 80
    assert len(lines) < 12
    assert has_unicode or all(line.isascii() for line in lines)
    assert lines[0].endswith("1 file missing")
    assert lines[-1] == f"missing: dp {n_ranks - 1}, r{n_ranks - 1}.pt"


def test_a_complete_grid_of_zero_reports_nothing_missing() -> None:
    text = "\n".join(zero_lines(Screen(80), grid_of(300, set())))
    assert "missing:" not in text and "file missing" not in text
    assert "5 more rows without missing files" in text
