"""Every golden checkpoint of Megatron, resharded to every other layout, equals what Megatron itself
saved there.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from core.opening.open import open_checkpoint
from core.verbs.convert.run import Job, TopologyChange, run
from tests.support.covering import covering_cases
from tests.support.materialize import tensor_bytes
from tests.support.rank_files import MODEL_FILE, assert_same_weights, load_rank_file, rank_dirs

_DENSE = ("tp1_pp1", "tp1_pp2", "tp2_pp1", "tp2_pp2", "tp4_pp1")
_LAYOUTS = {
    "dense_gqa": (*_DENSE, "tp1_pp2_vpp2", "tp2_pp2_vpp2"),
    "dense_gelu": _DENSE,
    "moe_seq": (
        "tp1_pp1",
        "tp1_pp1_ep2",
        "tp1_pp1_ep4",
        "tp1_pp2_ep2",
        "tp2_pp1",
        "tp2_pp1_ep2",
        "tp2_pp1_ep2_etp1",
    ),
}
_SOURCES = [
    ("mcore_legacy", "dense_gqa", [*_LAYOUTS["dense_gqa"], "tp2_pp2_optim", "tp1_pp1_dp2_distopt"]),
    ("mcore_legacy", "dense_gelu", list(_LAYOUTS["dense_gelu"])),
    (
        "mcore_torch_dist",
        "dense_gqa",
        ["tp1_pp1", "tp2_pp2", "tp2_pp2_vpp2", "tp4_pp1", "tp2_pp2_optim"],
    ),
    ("mcore_torch_dist", "dense_gelu", ["tp1_pp1", "tp2_pp2"]),
    ("mcore0161_torch_dist", "dense_gqa", ["tp2_pp2", "tp2_pp2_vpp2"]),
    ("mcore0161_torch_dist", "dense_gelu", ["tp2_pp2"]),
    (
        "mcore0121_torch_dist",
        "dense_gqa",
        ["tp2_pp2", "tp2_pp1_dp2_distopt_fully_sharded_model_space"],
    ),
    ("mcore0121_torch_dist", "dense_gelu", ["tp2_pp2"]),
    ("mcore_legacy", "moe_seq", list(_LAYOUTS["moe_seq"])),
    ("mcore0121_legacy", "moe_grouped", ["tp1_pp1", "tp2_pp1_ep2"]),
    ("mcore_torch_dist", "moe_seq", ["tp1_pp1", "tp2_pp2_ep2"]),
    ("mcore0121_torch_dist", "moe_seq", ["tp2_pp2_ep2"]),
    ("mcore0121_zarr", "moe_seq", ["tp2_pp2_ep2"]),
]
_CASES = [
    (family, model, source, target)
    for family, model, sources in _SOURCES
    for source in sources
    for target in _LAYOUTS[model.replace("grouped", "seq")]
]


def sizes(case: str) -> dict[str, int]:
    """The sizes of a layout by its name, those that it does not name at 1, and ETP at TP."""
    counts = {name: int(size) for name, size in re.findall(r"(?:^|_)(tp|pp|vpp|ep|etp)(\d+)", case)}
    return {"vpp": 1, "ep": 1, "etp": counts["tp"], **counts}


def reshard(
    src: Path, dst: Path, to: str | None = None, *, experts: str | None = None, **size: int
) -> None:
    """Weights only, to another layout."""
    change = TopologyChange(**{"vpp": 1, **size})  # type: ignore[arg-type]
    job = Job(
        src=src,
        dst=dst,
        to=to,
        topology=change,
        experts=experts,
        is_reshard=True,
        optim="drop",
    )
    run(replace(job, fsync=False))


@pytest.mark.parametrize(
    ("family", "model", "source", "target"),
    covering_cases(
        (pytest.param(*case, id="-".join(case)) for case in _CASES),
        lambda family, model, source, target: {
            "from": (family, model),
            "to": (model, target),
        },
    ),
)
def test_resharded_files_equal_those_that_megatron_saved(
    golden: Path, tmp_path: Path, family: str, model: str, source: str, target: str
) -> None:
    wanted = sizes(target)
    if "moe" not in model:
        del wanted["ep"], wanted["etp"]
    experts = "sequential" if model == "moe_grouped" else None
    reshard(
        golden / family / model / source, tmp_path / "out", "megatron", experts=experts, **wanted
    )
    assert_same_weights(
        tmp_path / "out", golden / "mcore_legacy" / model.replace("grouped", "seq") / target
    )


@pytest.mark.long  # each of its ways is another test's
def test_experts_there_and_back_give_the_first_files_again(golden: Path, tmp_path: Path) -> None:
    first = golden / "mcore_legacy" / "moe_seq" / "tp2_pp1_ep2_etp1"
    reshard(first, tmp_path / "a", tp=1, pp=2, ep=4, etp=1)
    reshard(tmp_path / "a", tmp_path / "b", "torch_dist", tp=4, pp=4, vpp=1, ep=1, etp=2)
    reshard(tmp_path / "b", tmp_path / "c", "megatron", tp=2, pp=2, vpp=2, ep=1, etp=2)
    reshard(tmp_path / "c", tmp_path / "d", tp=2, pp=1, ep=2, etp=1)
    assert_same_weights(tmp_path / "d", first)


def test_resharded_experts_equal_megatrons_own_torch_dist(golden: Path, tmp_path: Path) -> None:
    wanted = golden / "mcore_torch_dist" / "moe_seq" / "tp2_pp2_ep2"
    for family, model, source in (
        ("mcore_legacy", "moe_seq", "tp1_pp1_ep4"),
        ("mcore_legacy", "moe_seq", "tp2_pp1_ep2_etp1"),
        ("mcore0121_legacy", "moe_grouped", "tp2_pp1_ep2"),
        ("mcore_torch_dist", "moe_seq", "tp1_pp1"),
    ):
        dst = tmp_path / f"{model}-{source}"
        reshard(golden / family / model / source, dst, "torch_dist", tp=2, pp=2, vpp=1, ep=2, etp=2)
        ours, theirs = open_checkpoint(dst), open_checkpoint(wanted)
        assert dict(ours.catalog.tensors) == dict(theirs.catalog.tensors)
        for key in theirs.catalog.tensors:
            assert {piece.box for piece in ours.catalog.fragments(key)} == {
                piece.box for piece in theirs.catalog.fragments(key)
            }
            values, expected = (
                tensor_bytes(checkpoint.catalog, checkpoint.store, key)
                for checkpoint in (ours, theirs)
            )
            assert (values == expected).all(), key
        ours.store.close()
        theirs.store.close()


@pytest.mark.first(1)
@pytest.mark.parametrize("model", ["dense_gqa", "dense_gelu"])
def test_there_and_back_gives_the_first_files_again(
    golden: Path, tmp_path: Path, model: str
) -> None:
    first = golden / "mcore_legacy" / model / "tp2_pp2"
    reshard(first, tmp_path / "a", tp=4, pp=1)
    reshard(tmp_path / "a", tmp_path / "b", tp=1, pp=2)
    reshard(tmp_path / "b", tmp_path / "c", tp=2, pp=2)
    assert_same_weights(tmp_path / "c", first)


@pytest.mark.first(1)
@pytest.mark.parametrize("model", ["dense_gqa", "dense_gelu"])
def test_a_detour_through_torch_dist_changes_nothing(
    golden: Path, tmp_path: Path, model: str
) -> None:
    first = golden / "mcore_legacy" / model / "tp4_pp1"
    run(Job(src=first, dst=tmp_path / "dist", to="torch_dist", fsync=False))
    reshard(tmp_path / "dist", tmp_path / "b", to="megatron", tp=1, pp=2)
    assert_same_weights(tmp_path / "b", golden / "mcore_legacy" / model / "tp1_pp2")


def test_the_other_entries_and_the_arguments_follow_the_stated_policy(
    golden: Path, tmp_path: Path
) -> None:
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


def test_random_states_stay_where_tensor_and_pipeline_sizes_do(
    golden: Path, tmp_path: Path
) -> None:
    import torch

    source = golden / "mcore_legacy" / "dense_gqa" / "tp2_pp2"
    reshard(source, tmp_path / "out", tp=2, pp=2)
    for name, path in rank_dirs(tmp_path / "out").items():
        ours = load_rank_file(path / MODEL_FILE)["rng_state"][0]
        theirs = load_rank_file(rank_dirs(source)[name] / MODEL_FILE)["rng_state"][0]
        assert ours["random_rng_state"] == theirs["random_rng_state"]
        assert torch.equal(ours["torch_rng_state"], theirs["torch_rng_state"])
        assert (ours["np_rng_state"][1] == theirs["np_rng_state"][1]).all()
