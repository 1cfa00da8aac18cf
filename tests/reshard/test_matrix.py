"""Every dense golden checkpoint, resharded to every other layout, equals what Megatron itself saved there."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.convert import Job, TopologyChange, run
from tests.rank_files import MODEL_FILE, assert_same_weights, load_rank_file, rank_dirs

_LAYOUTS = {
    "dense_gqa": {
        "tp1_pp1": (1, 1),
        "tp1_pp2": (1, 2),
        "tp2_pp1": (2, 1),
        "tp2_pp2": (2, 2),
        "tp4_pp1": (4, 1),
    },
    "dense_gelu": {"tp1_pp1": (1, 1), "tp1_pp2": (1, 2), "tp2_pp1": (2, 1), "tp2_pp2": (2, 2), "tp4_pp1": (4, 1)},
}
_SOURCES = [
    (
        "mcore_legacy",
        "dense_gqa",
        [*_LAYOUTS["dense_gqa"], "tp1_pp2_vpp2", "tp2_pp2_vpp2", "tp2_pp2_optim", "tp1_pp1_dp2_distopt"],
    ),
    ("mcore_legacy", "dense_gelu", list(_LAYOUTS["dense_gelu"])),
    ("mcore_torch_dist", "dense_gqa", ["tp1_pp1", "tp2_pp2", "tp2_pp2_vpp2", "tp4_pp1", "tp2_pp2_optim"]),
    ("mcore_torch_dist", "dense_gelu", ["tp1_pp1", "tp2_pp2"]),
    ("mcore0161_torch_dist", "dense_gqa", ["tp2_pp2", "tp2_pp2_vpp2"]),
    ("mcore0161_torch_dist", "dense_gelu", ["tp2_pp2"]),
    ("mcore0121_torch_dist", "dense_gqa", ["tp2_pp2", "tp2_pp1_dp2_distopt_fully_sharded_model_space"]),
    ("mcore0121_torch_dist", "dense_gelu", ["tp2_pp2"]),
]
_CASES = [
    (family, model, source, target)
    for family, model, sources in _SOURCES
    for source in sources
    for target in _LAYOUTS[model]
]


def reshard(src: Path, dst: Path, *, tp: int, pp: int, to: str | None = None) -> None:
    """Weights only, to another layout."""
    change = TopologyChange(tp=tp, pp=pp, vpp=1)
    run(Job(src=src, dst=dst, to=to, topology=change, keeps_layout=True, optim="drop", fsync=False))


@pytest.mark.parametrize(("family", "model", "source", "target"), _CASES, ids=["-".join(case) for case in _CASES])
def test_resharded_files_equal_those_that_megatron_saved(
    golden: Path, tmp_path: Path, family: str, model: str, source: str, target: str
) -> None:
    tp, pp = _LAYOUTS[model][target]
    reshard(golden / family / model / source, tmp_path / "out", tp=tp, pp=pp, to="megatron")
    assert_same_weights(tmp_path / "out", golden / "mcore_legacy" / model / target)


@pytest.mark.parametrize("model", list(_LAYOUTS))
def test_there_and_back_gives_the_first_files_again(golden: Path, tmp_path: Path, model: str) -> None:
    first = golden / "mcore_legacy" / model / "tp2_pp2"
    reshard(first, tmp_path / "a", tp=4, pp=1)
    reshard(tmp_path / "a", tmp_path / "b", tp=1, pp=2)
    reshard(tmp_path / "b", tmp_path / "c", tp=2, pp=2)
    assert_same_weights(tmp_path / "c", first)


@pytest.mark.parametrize("model", list(_LAYOUTS))
def test_a_detour_through_torch_dist_changes_nothing(golden: Path, tmp_path: Path, model: str) -> None:
    first = golden / "mcore_legacy" / model / "tp4_pp1"
    run(Job(src=first, dst=tmp_path / "dist", to="torch_dist", fsync=False))
    reshard(tmp_path / "dist", tmp_path / "b", tp=1, pp=2, to="megatron")
    assert_same_weights(tmp_path / "b", golden / "mcore_legacy" / model / "tp1_pp2")


def test_the_other_entries_and_the_arguments_follow_the_stated_policy(golden: Path, tmp_path: Path) -> None:
    source = golden / "mcore_legacy" / "dense_gqa" / "tp4_pp1"
    reshard(source, tmp_path / "out", tp=2, pp=2)
    before = load_rank_file(rank_dirs(source)["mp_rank_00"] / MODEL_FILE)
    for name, path in rank_dirs(tmp_path / "out").items():
        after = load_rank_file(path / MODEL_FILE)
        assert after["iteration"] == before["iteration"] == 10, name
        assert after["checkpoint_version"] == 3.0
        args = vars(after["args"])
        assert args["tensor_model_parallel_size"] == 2
        assert args["pipeline_model_parallel_size"] == 2
        assert args["padded_vocab_size"] == 384
        assert args["vocab_size"] == 300
        assert args["consumed_train_samples"] == 80
        assert list(args) == list(vars(before["args"]))
        assert "rng_state" not in after


def test_random_states_stay_where_tensor_and_pipeline_sizes_do(golden: Path, tmp_path: Path) -> None:
    import torch

    source = golden / "mcore_legacy" / "dense_gqa" / "tp2_pp2"
    reshard(source, tmp_path / "out", tp=2, pp=2)
    for name, path in rank_dirs(tmp_path / "out").items():
        ours = load_rank_file(path / MODEL_FILE)["rng_state"][0]
        theirs = load_rank_file(rank_dirs(source)[name] / MODEL_FILE)["rng_state"][0]
        assert ours["random_rng_state"] == theirs["random_rng_state"]
        assert torch.equal(ours["torch_rng_state"], theirs["torch_rng_state"])
        assert (ours["np_rng_state"][1] == theirs["np_rng_state"][1]).all()
