"""The ranks of Megatron's own checkpoints, whose names say how they are cut."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import core
from core.opening.damaged import open_readable_part
from core.verbs.pictures.ranks import RankGrid, rank_grid, read_rank_grid
from tests.support.edited import copied


def grid_of(path: Path, *, samples: bool = False) -> RankGrid | None:
    checkpoint = open_readable_part(path, samples=samples)
    try:
        return rank_grid(checkpoint)
    finally:
        checkpoint.store.close()


def layers_of(grid: RankGrid) -> dict[tuple[int, int, int], tuple[str, str]]:
    return {(cell.pp, cell.ep, cell.tp): (cell.layers, cell.experts) for cell in grid.cells}


@pytest.mark.parametrize(
    "name",
    [
        "mcore_legacy/dense_gqa/tp2_pp1_optim",
        "mcore_legacy/dense_gqa/tp2_pp2_vpp2",
        "mcore_legacy/dense_gelu/tp1_pp2",
        "mcore_legacy/moe_seq/tp1_pp2_ep2",
        "mcore_legacy/moe_seq/tp1_pp1_ep4",
        "mcore_legacy/moe_seq/tp2_pp1_ep2",
        "mcore_torch_dist/dense_gqa/tp2_pp2_vpp2",
        "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dpreshardable",
        "mcore_torch_dist/moe_seq/tp2_pp2_ep2",
        "mcore0121_torch_dist/moe_seq/tp2_pp2_ep2",
        "mcore0161_torch_dist/dense_gqa/tp2_pp2_vpp2",
    ],
)
def test_every_rank_has_its_layers_and_experts(name: str, golden: Path) -> None:
    sizes = {group: int(size) for group, size in re.findall(r"(tp|pp|vpp|ep)(\d)", name)}
    tp, pp, ep, vpp = (sizes.get(group, 1) for group in ("tp", "pp", "ep", "vpp"))
    grid = grid_of(golden / name)
    assert grid is not None
    assert (grid.tp, grid.pp, grid.ep, grid.vpp) == (tp, pp, ep, vpp)
    stages = {
        (1, 1): ["0-3"],
        (2, 1): ["0-1", "2-3"],
        (2, 2): ["0, 2", "1, 3"],
    }[pp, vpp]
    experts = {1: ["0-3"], 2: ["0-1", "2-3"], 4: ["0", "1", "2", "3"]}[ep]
    assert layers_of(grid) == {
        (p, e, t): (stages[p], experts[e] if "moe" in name else "")
        for p in range(pp)
        for e in range(ep)
        for t in range(tp)
    }
    first, last = grid.cells[0], grid.cells[-1]
    assert "embedding" in first.others
    # With tied embeddings, the last stage has a copy.
    assert pp == 1 or ("embedding" in last.others) == ("dense_gelu" in name)
    assert not any(cell.is_missing for cell in grid.cells)
    assert all(cell.model_bytes > 0 and cell.files for cell in grid.cells)
    assert any(cell.optimizer_bytes for cell in grid.cells) == ("opt" in name)


@pytest.mark.parametrize("family", ["mcore_torch_dist", "mcore0121_torch_dist"])
def test_boxes_of_torch_dist_add_up_to_the_tensors(family: str, golden: Path) -> None:
    checkpoint = open_readable_part(golden / family / "moe_seq/tp2_pp2_ep2")
    grid = rank_grid(checkpoint)
    assert grid is not None
    assert sum(cell.model_bytes for cell in grid.cells) == checkpoint.catalog.n_bytes
    checkpoint.store.close()


def test_bytes_of_rank_files_are_those_of_their_tensors(golden: Path) -> None:
    checkpoint = open_readable_part(golden / "mcore_legacy/dense_gqa/tp2_pp2_optim")
    grid = rank_grid(checkpoint)
    assert grid is not None
    n_bytes = sum(cell.model_bytes + cell.optimizer_bytes for cell in grid.cells)
    assert n_bytes == checkpoint.catalog.n_bytes
    checkpoint.store.close()


def test_sampling_ranks_gives_the_same_grid(golden: Path) -> None:
    path = golden / "mcore_legacy/moe_seq/tp2_pp1_ep2"
    assert grid_of(path, samples=True) == grid_of(path)


@pytest.mark.parametrize("name", ["dense_gqa/tp2_pp2_vpp2", "moe_seq/tp1_pp2_ep2"])
def test_missing_rank_has_the_layers_that_it_should_have(
    name: str, golden: Path, tmp_path: Path
) -> None:
    complete = grid_of(golden / "mcore_legacy" / name)
    path = copied(golden, f"mcore_legacy/{name}", tmp_path)
    folder = max(path.glob("mp_rank_*"))
    shutil.rmtree(folder)
    grid = grid_of(path)
    assert complete is not None
    assert grid is not None
    assert layers_of(grid) == layers_of(complete)
    (cell,) = (cell for cell in grid.cells if cell.is_missing)
    assert (cell.pp, cell.tp, cell.ep) == (1, grid.tp - 1, grid.ep - 1)
    assert (cell.model_bytes, cell.files) == (0, ())


def test_damaged_rank_is_missing_and_lists_its_file(golden: Path, tmp_path: Path) -> None:
    path = copied(golden, "mcore_legacy/dense_gqa/tp2_pp1", tmp_path)
    file = next(path.glob("mp_rank_01/model_optim_rng.pt"))
    file.write_bytes(file.read_bytes()[:1000])
    grid = grid_of(path)
    assert grid is not None
    assert [cell.is_missing for cell in grid.cells] == [False, True]
    assert grid.cells[1].files == ("mp_rank_01/model_optim_rng.pt",)


def test_missing_file_of_torch_dist_is_a_missing_rank(golden: Path, tmp_path: Path) -> None:
    path = copied(golden, "mcore_torch_dist/dense_gqa/tp2_pp2", tmp_path)
    next(path.glob("__3_0.distcp")).unlink()
    grid = grid_of(path)
    assert grid is not None
    assert [(cell.pp, cell.tp) for cell in grid.cells if cell.is_missing] == [(1, 1)]
    assert grid.cells[3].model_bytes == 0
    assert grid.cells[3].layers == "2-3"


def test_converted_torch_dist_in_one_file_has_no_grid(golden: Path, tmp_path: Path) -> None:
    source, target = golden / "mcore_torch_dist/dense_gqa/tp2_pp2", tmp_path / "target"
    core.reshard(source, target, tp_new=4, pp_new=1)
    assert grid_of(target) is None


@pytest.mark.parametrize(
    "name",
    [
        "mcore0121_zarr/moe_seq/tp2_pp2_ep2",
        "hf/llama/safetensors_sharded",
        "deepspeed/zero1_dp2_bf16",
        "torch_dcp/fsdp2_dp2",
        "mcore_legacy/dense_gqa/tp2_pp2/iter_0000010/mp_rank_00_000",
    ],
)
def test_other_checkpoints_have_no_grid(name: str, golden: Path) -> None:
    assert grid_of(golden / name) is None


def test_a_grid_is_read_from_a_path_and_none_from_what_is_no_checkpoint(
    golden: Path, tmp_path: Path
) -> None:
    grid = read_rank_grid(golden / "mcore_legacy/dense_gqa/tp2_pp2")
    assert grid is not None and (grid.tp, grid.pp) == (2, 2)
    assert read_rank_grid(golden / "hf/llama/safetensors_single") is None
    assert read_rank_grid(str(tmp_path / "absent")) is None
