"""Random states, the other entries of a training run, and copies that differ, when the layout
changes.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_cli.app import main
from core.engine.catalog.facets import MegatronModel, RankFacts
from core.errors import ReplicaMismatchError, UnsupportedError, UsageError
from core.megatron.extras.random_states import with_rng
from core.megatron.model.topology import Rank, Topology
from core.megatron.reshard.to_ranks import shard
from core.megatron.reshard.to_torch_dist import to_torch_dist
from core.megatron.reshard.unshard import unshard
from core.opening.open import open_checkpoint
from core.pickle.inert import as_mapping
from tests.megatron.support.megatron_gold import RULES
from tests.megatron.support.synthetic import Model
from tests.support.facets import facet_of, ranks_of, with_facts
from tests.support.materialize import tensor_bytes
from tests.support.moved import moved
from tests.support.rank_files import MODEL_FILE, load_rank_file, rank_dirs

DENSE = Path("mcore_legacy/dense_gqa")
DIST = Path("mcore_torch_dist/dense_gqa/tp2_pp2")
EXPERTS = Path("mcore_legacy/moe_seq")
MOE = Model(layers=2, experts=4, moe=(1,))


def seeded(topology: Topology) -> Any:
    """The global form of a model whose ranks have a random state each: the text of its
    coordinates.
    """
    _, catalog = MOE.catalog(topology)
    ranks = {}
    for coords, (folder, root) in ranks_of(catalog).items():
        rank = topology.rank_at(coords)
        ranks[coords] = (folder, {**root, "rng_state": [{"seed": str(rank)}]})
    return unshard(with_facts(catalog, RankFacts, ranks=ranks), rules=RULES)


def states_of(target: Any) -> dict[Rank, object]:
    topology = facet_of(target, Topology)
    return {
        topology.rank_at(coords): (as_mapping(root) or {}).get("rng_state")
        for coords, (_, root) in ranks_of(target).items()
    }


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Topology(tp=2, pp=2), Topology(tp=2, pp=2)),
        (Topology(tp=2, ep=4), Topology(tp=2, ep=2)),
        (Topology(tp=2, ep=4), Topology(tp=2, ep=1)),
        (Topology(tp=2, ep=2, etp=1), Topology(tp=2, ep=2, etp=1)),
        (Topology(tp=1, pp=2, ep=4), Topology(tp=1, pp=2, ep=4)),
        (Topology(tp=2, ep=4, etp=1), Topology(tp=2, ep=4, etp=1)),
    ],
)
def test_ranks_that_were_there_before_keep_their_states(a: Topology, b: Topology) -> None:
    target = shard(seeded(a), b, rules=RULES, rng="keep")
    assert states_of(target) == {rank: [{"seed": str(rank)}] for rank in b.ranks()}
    # Those of ranks that the destination does not have are listed.
    listed = [name for entry in target.dropped for name in entry.names if "rng" in name]
    assert len(listed) == len([*a.ranks()]) - len([*b.ranks()])


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        (Topology(tp=2, pp=2), Topology(tp=4, pp=1), "saved with TP2 PP2, not TP4 PP1"),
        (Topology(tp=2, pp=2), Topology(tp=2, pp=1), "saved with TP2 PP2, not TP2 PP1"),
        (
            Topology(tp=2, ep=2),
            Topology(tp=2, ep=4),
            "without a state for TP rank 0, PP rank 0, EP rank 2, ETP rank 0",
        ),
        (
            Topology(tp=2, ep=1),
            Topology(tp=2, ep=2),
            "without a state for TP rank 0, PP rank 0, EP rank 1, ETP rank 0",
        ),
        (
            Topology(tp=2, ep=2),
            Topology(tp=2, ep=2, etp=1),
            "without a state for TP rank 1, PP rank 0, EP rank 1, ETP rank 0",
        ),
        (
            Topology(tp=2, ep=4, etp=1),
            Topology(tp=2, ep=4),
            "without a state for TP rank 1, PP rank 0, EP rank 0, ETP rank 1",
        ),
    ],
)
def test_other_ranks_have_none_and_keep_says_why(a: Topology, b: Topology, why: str) -> None:
    source = seeded(a)
    target = shard(source, b, rules=RULES)
    assert set(states_of(target).values()) == {None}
    (text,) = (text for text in map(str, target.dropped) if "rng_state" in text)
    assert why in text and "--no-load-rng" in text
    with pytest.raises(UnsupportedError, match="random states cannot be kept") as caught:
        shard(source, b, rules=RULES, rng="keep")
    assert why in caught.value.message
    assert "--rng drop" in (caught.value.hint or "")


def test_states_can_be_dropped_and_absent_ones_cannot_be_kept() -> None:
    source = seeded(Topology(tp=2))
    dropped = with_rng(source, "drop", has_place=True, has_ranks=True)
    target = shard(dropped, Topology(tp=2), rules=RULES)
    assert set(states_of(target).values()) == {None}
    assert tuple(map(str, target.dropped)) == ("rng_state (start Megatron with --no-load-rng)",)
    assert with_rng(source, None, has_place=False, has_ranks=True) is source
    for catalog, has_place in ((dropped, True), (source, False)):
        with pytest.raises(UsageError, match="cannot be kept"):
            with_rng(catalog, "keep", has_place=has_place, has_ranks=True)


def test_states_beyond_one_for_each_tensor_and_pipeline_rank_are_listed() -> None:
    source = seeded(Topology(tp=2, pp=2, ep=4))
    for has_place in (True, False):
        result = with_rng(source, None, has_place=has_place, has_ranks=False)
        (dropped,) = result.dropped
        names = [f"rng_state of TP rank 0, PP rank {pp}, EP rank 2, ETP rank 0" for pp in (0, 1)]
        assert len(dropped.names) == 12 and {*names} <= {*dropped.names}
        assert dropped.reason == "only one random state per TP and PP rank is kept"
        assert not facet_of(result, MegatronModel).rng_states
    result = with_rng(source, "drop", has_place=True, has_ranks=False)
    assert list(map(str, result.dropped)) == ["rng_state (start Megatron with --no-load-rng)"]


def test_torch_dist_has_one_state_for_each_tensor_and_pipeline_rank() -> None:
    source = seeded(Topology(tp=2, ep=2, etp=1))
    stacked = to_torch_dist(source, Topology(tp=4), rules=RULES)
    states = {
        key: item.value
        for key, item in stacked.target.objects.items()
        if key.startswith("rng_state/")
    }
    seeds = [str(Rank(0, 0, 0, 0)), str(Rank(1, 0, 1, 0))]
    assert states == {
        f"rng_state/shard_0.{tp}_1.2": [[{"seed": seed}]] for tp, seed in enumerate(seeds)
    }
    again = unshard(replace(stacked.source, format="torch_dist"), rules=RULES)
    back = shard(again, Topology(tp=2, ep=2, etp=1), rules=RULES, rng="keep")
    assert states_of(back) == {
        rank: [{"seed": str(rank)}] for rank in Topology(tp=2, ep=2, etp=1).ranks()
    }


def test_states_by_data_parallel_rank_are_those_of_their_expert_ranks() -> None:
    topology = Topology(tp=1, ep=4)
    source = seeded(topology)
    states = facet_of(source, MegatronModel).rng_states
    item = next(item for key, item in source.objects.items() if key.startswith("rng_state/"))
    objects = {
        f"rng_state/shard_0.0.{dp}_1.1.8": replace(item, value=[states[topology.rank_of(dp, 0)]])
        for dp in range(8)
    }
    changed = with_facts(replace(source, objects=objects), MegatronModel, rng_states={})
    target = shard(changed, topology, rules=RULES, rng="keep")
    assert states_of(target) == {rank: [{"seed": str(rank)}] for rank in topology.ranks()}
    (dropped,) = target.dropped
    assert dropped.names == tuple(f"rng_state/shard_0.0.{dp}_1.1.8" for dp in range(4, 8))


def reshard(src: Path, dst: Path, *options: object) -> int:
    return main(
        ["reshard", str(src), str(dst), "--no-optim", "--no-fsync", "-q", *map(str, options)]
    )


def test_random_states_of_expert_ranks_move_bit_for_bit(golden: Path, tmp_path: Path) -> None:
    source = golden / EXPERTS / "tp1_pp1_ep4"
    assert reshard(source, tmp_path / "a", "--ep-new", 2, "--rng", "keep") == 0
    assert sorted(rank_dirs(tmp_path / "a")) == ["mp_rank_00_000", "mp_rank_00_001"]
    for name, path in rank_dirs(tmp_path / "a").items():
        ours = load_rank_file(path / MODEL_FILE)["rng_state"][0]
        theirs = load_rank_file(rank_dirs(source)[name] / MODEL_FILE)["rng_state"][0]
        assert torch.equal(ours["torch_rng_state"], theirs["torch_rng_state"])
        assert torch.equal(ours["cuda_rng_state"], theirs["cuda_rng_state"])
        assert ours["random_rng_state"] == theirs["random_rng_state"]


@pytest.mark.parametrize("to", ["dcp", "torch", "torch_dist", "zarr", "safetensors"])
def test_formats_without_ranks_have_no_states_of_expert_ranks(
    golden: Path, tmp_path: Path, to: str
) -> None:
    source = golden / EXPERTS / "tp2_pp1_ep2"
    command = [
        "convert",
        str(source),
        str(tmp_path / "a"),
        "--to",
        to,
        "--no-optim",
        "--no-fsync",
        "-q",
    ]
    assert main(command) == 0
    assert open_checkpoint(tmp_path / "a").catalog.tensors


def test_rng_on_the_command_line(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = golden / DENSE / "tp2_pp2"
    assert reshard(source, tmp_path / "a", "--tp-new", 1, "--rng", "keep") == 4
    assert "saved with TP2 PP2, not TP1 PP2" in " ".join(capsys.readouterr().err.split())
    assert reshard(source, tmp_path / "b", "--tp-new", 2, "--rng", "drop") == 0
    assert "--no-load-rng" in capsys.readouterr().err
    assert all(
        "rng_state" not in load_rank_file(path / MODEL_FILE)
        for path in rank_dirs(tmp_path / "b").values()
    )
    assert reshard(source, tmp_path / "c", "--to", "torch_dist", "--rng", "drop") == 0
    assert not any(
        key.startswith("rng_state") for key in open_checkpoint(tmp_path / "c").catalog.objects
    )
    assert reshard(tmp_path / "b", tmp_path / "d", "--tp-new", 2, "--rng", "keep") == 2
    assert "the checkpoint has no random states" in " ".join(capsys.readouterr().err.split())
    llama = golden / "hf/llama/safetensors_single"
    for command in (
        ["convert", source, tmp_path / "e", "--to", "dcp", "--rng", "keep"],
        ["convert", llama, tmp_path / "f", "--to", "megatron", "--rng", "drop"],
        ["convert", golden / "torch_dcp/tp2_only", tmp_path / "g.pt", "--rng", "drop"],
        ["reshard", DIST, tmp_path / "h", "--tp-new", 1, "--metadata-only", "--rng", "drop"],
    ):
        assert main([str(golden / word if word == DIST else word) for word in command]) == 2, (
            command
        )
        assert "--rng" in capsys.readouterr().err


# --- the other entries ---


@pytest.mark.parametrize("detour", [False, True])
def test_iteration_samples_and_scheduler_are_those_of_the_run(
    golden: Path, tmp_path: Path, detour: bool
) -> None:
    source = golden / DENSE / "tp2_pp2_optim"
    before = load_rank_file(rank_dirs(source)["mp_rank_00_000"] / MODEL_FILE)
    if detour:
        assert reshard(source, tmp_path / "dist", "--to", "torch_dist") == 0
    src = tmp_path / "dist" if detour else source
    assert reshard(src, tmp_path / "out", "--to", "megatron", "--tp-new", 4, "--pp-new", 1) == 0
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == "10"
    for path in rank_dirs(tmp_path / "out").values():
        after = load_rank_file(path / MODEL_FILE)
        for name in (
            "iteration",
            "checkpoint_version",
            "opt_param_scheduler",
            "num_floating_point_operations_so_far",
        ):
            assert after[name] == before[name], name
        for name in (
            "consumed_train_samples",
            "consumed_valid_samples",
            "skipped_train_samples",
            "lr",
            "seed",
        ):
            assert getattr(after["args"], name) == getattr(before["args"], name), name


# --- copies that differ ---


def test_tied_copies_that_differ_name_both_files_or_the_first_is_taken() -> None:
    model = Model(layers=2, is_tied=True)
    files = model.files(Topology(pp=2))
    files["mp_rank_00_001"]["output_layer.weight"] = (
        files["mp_rank_00_001"]["output_layer.weight"] + 1
    )
    store, catalog = model.catalog(Topology(pp=2), files=files)
    source = unshard(catalog, rules=RULES)
    key = "embedding.word_embeddings.weight"
    with pytest.raises(ReplicaMismatchError) as caught:
        moved(source, store)
    assert caught.value.key == key
    assert "mp_rank_00_000" in caught.value.message and "mp_rank_00_001" in caught.value.message
    hint = caught.value.hint or ""
    assert "--on-replica-mismatch first" in hint and "config" not in hint and "optim" not in hint
    assert moved(source, store, compares=False)[key] == model.tensors()[key].tobytes()


def test_the_first_of_copies_that_differ_is_taken_on_request(golden: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(golden / DENSE / "tp2_pp1", broken)
    path = rank_dirs(broken)["mp_rank_01"] / MODEL_FILE
    checkpoint = open_checkpoint(broken)
    fragment = checkpoint.catalog.fragments("mp_rank_01:model.decoder.final_layernorm.weight")[0]
    extent = fragment.array.extent  # type: ignore[union-attr]
    data = bytearray(path.read_bytes())
    data[extent.offset] ^= 1  # type: ignore[union-attr]
    path.write_bytes(data)
    assert reshard(broken, tmp_path / "a", "--tp-new", 1, "--no-crc") == 3
    assert not (tmp_path / "a").exists()
    good = golden / DENSE / "tp2_pp1"
    assert reshard(good, tmp_path / "good", "--tp-new", 1) == 0
    assert (
        reshard(broken, tmp_path / "b", "--tp-new", 1, "--on-replica-mismatch", "first", "--verify")
        == 0
    )
    key = "mp_rank_00:model.decoder.final_layernorm.weight"
    ours, theirs = (open_checkpoint(tmp_path / name) for name in ("b", "good"))
    assert (
        tensor_bytes(ours.catalog, ours.store, key)
        == tensor_bytes(theirs.catalog, theirs.store, key)
    ).all()


def test_ties_are_proven_so_the_first_copy_is_not_just_taken(golden: Path, tmp_path: Path) -> None:
    command = [
        "convert",
        str(golden / "hf/llama/safetensors_single"),
        str(tmp_path / "x.pt"),
        "--to",
        "torch",
    ]
    command += [
        "--tie",
        "lm_head.weight=model.embed_tokens.weight",
        "--on-replica-mismatch",
        "first",
    ]
    assert main(command) == 2
