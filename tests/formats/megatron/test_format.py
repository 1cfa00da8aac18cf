"""core.formats.megatron.format: rank files as Megatron wrote them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from core.engine.catalog.facets import RankFacts
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    TruncatedError,
    UnsupportedError,
)
from core.files.store import LocalStore
from core.formats.megatron import format as megatron
from core.formats.registry import sniffed
from core.megatron.model.topology import Topology
from core.megatron.reshard.to_ranks import shard
from core.megatron.reshard.unshard import unshard
from core.megatron.rules.tables import load_rules
from core.opening.open import open_checkpoint
from core.pickle.inert import TensorLeaf, as_mapping, walk
from tests.support.facets import facet_of, ranks_of

RULES = load_rules()


def iteration(golden: Path, case: str) -> Path:
    return golden / "mcore_legacy" / case / "iter_0000010"


def copied(golden: Path, case: str, folder: Path) -> Path:
    return Path(shutil.copytree(iteration(golden, case), folder / "iter_0000010"))


def test_a_rank_catalog_names_every_rank(golden: Path) -> None:
    catalog = megatron.read(LocalStore(iteration(golden, "dense_gqa/tp2_pp2")))
    facts = facet_of(catalog, RankFacts)
    assert (facts.is_single_rank, facts.n_unopened, facts.optimizer_kind) == (False, 0, None)
    assert catalog.is_rank_local
    assert catalog.facet(Topology) == Topology(tp=2, pp=2)
    assert catalog.iteration == 10
    assert catalog.version == "3.0"
    assert {coords: folder for coords, (folder, _) in facts.ranks.items()} == {
        (("tp", 0), ("pp", 0)): "mp_rank_00_000",
        (("tp", 0), ("pp", 1)): "mp_rank_00_001",
        (("tp", 1), ("pp", 0)): "mp_rank_01_000",
        (("tp", 1), ("pp", 1)): "mp_rank_01_001",
    }
    key = "mp_rank_01_001:model.decoder.layers.1.mlp.linear_fc2.weight"
    assert catalog.tensors[key].shape == (64, 48)
    (fragment,) = catalog.fragments(key)
    assert fragment.array is not None
    assert fragment.array.coords == (("tp", 1), ("pp", 1))


def test_random_states_are_hidden_inside_their_object(golden: Path) -> None:
    catalog = megatron.read(LocalStore(iteration(golden, "dense_gqa/tp1_pp1")))
    assert not any("rng_state" in key for key in catalog.tensors)
    inside = {
        leaf.key
        for leaf in walk(catalog.objects["mp_rank_00:rng_state"].value)
        if isinstance(leaf, TensorLeaf)
    }
    assert inside == set(catalog.hidden)
    assert "mp_rank_00:rng_state.0.torch_rng_state" in inside
    assert catalog.objects["mp_rank_00:iteration"].value == 10
    assert catalog.objects["mp_rank_00:model.output_layer._extra_state"].value is None


@pytest.mark.parametrize(
    ("case", "kind", "key"),
    [
        ("tp2_pp1_optim", "float16", "mp_rank_01:optimizer.fp32_from_fp16_params.0.0"),
        ("tp2_pp1_dp2_distopt", "distributed", "mp_rank_01:distrib_optim."),
    ],
)
def test_the_kind_of_optimizer_is_known(golden: Path, case: str, kind: str, key: str) -> None:
    catalog = megatron.read(LocalStore(iteration(golden, f"dense_gqa/{case}")))
    assert facet_of(catalog, RankFacts).optimizer_kind == kind
    assert any(name.startswith(key) for name in catalog.tensors)


@pytest.mark.parametrize(
    ("case", "n_ranks"),
    [
        ("tp1_pp1_ep4", 4),
        ("tp1_pp2_ep2", 4),
        ("tp2_pp1", 2),
        ("tp2_pp1_ep2", 4),
        ("tp2_pp1_ep2_etp1", 2),
    ],
)
def test_expert_parallel_files_can_be_looked_at(golden: Path, case: str, n_ranks: int) -> None:
    catalog = megatron.read(LocalStore(iteration(golden, f"moe_seq/{case}")))
    ranks = ranks_of(catalog)
    assert len(ranks) == n_ranks
    assert all(len(coords) == (3 if "ep" in case else 2) for coords in ranks)


@pytest.mark.parametrize("name", ["", "mp_rank_01", "mp_rank_01/model_optim_rng.pt"])
def test_a_root_a_rank_directory_and_a_rank_file_open(golden: Path, name: str) -> None:
    path = iteration(golden, "dense_gelu/tp2_pp1")
    opened = open_checkpoint(path / name if name else path.parent)
    assert opened.format.name == "megatron"
    assert opened.iteration == 10
    assert facet_of(opened.catalog, RankFacts).is_single_rank is bool(name)
    assert any(key.startswith("mp_rank_01:model.") for key in opened.catalog.tensors)
    opened.store.close()


def test_other_directories_are_not_taken_for_rank_files(golden: Path, tmp_path: Path) -> None:
    for path in (
        golden / "mcore_torch_dist/dense_gqa/tp2_pp2/iter_0000010",
        golden / "hf/llama/torch_single",
        tmp_path,
    ):
        assert not megatron.sniff(LocalStore(path))
    assert sniffed(LocalStore(iteration(golden, "dense_gqa/tp1_pp1"))).name == "megatron"


def test_a_missing_rank_is_named(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, "dense_gqa/tp2_pp2", tmp_path)
    shutil.rmtree(folder / "mp_rank_01_000")
    with pytest.raises(
        MissingShardError,
        match="TP2 PP2, which means 4 rank directories, but mp_rank_01_000 is missing",
    ):
        megatron.read(LocalStore(folder))


def test_a_missing_file_is_named(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, "dense_gqa/tp2_pp1", tmp_path)
    (folder / "mp_rank_01/model_optim_rng.pt").unlink()
    with pytest.raises(MissingShardError) as caught:
        megatron.read(LocalStore(folder))
    assert caught.value.file == "mp_rank_01/model_optim_rng.pt"


def test_a_directory_of_another_run_is_named(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, "dense_gqa/tp2_pp1", tmp_path)
    shutil.copytree(folder / "mp_rank_01", folder / "mp_rank_02")
    with pytest.raises(CorruptError, match="mp_rank_02 is unexpected"):
        megatron.read(LocalStore(folder))


def test_ranks_of_different_checkpoints_are_told_apart(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, "dense_gqa/tp2_pp1", tmp_path)
    shutil.copy(
        iteration(golden, "dense_gelu/tp2_pp1") / "mp_rank_01/model_optim_rng.pt",
        folder / "mp_rank_01",
    )
    with pytest.raises(CorruptError, match=r"argument \w+ is .* in mp_rank_00"):
        megatron.read(LocalStore(folder))


def test_a_truncated_rank_file_is_named(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, "dense_gqa/tp2_pp1", tmp_path)
    path = folder / "mp_rank_01/model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises((CorruptError, TruncatedError)) as caught:
        megatron.read(LocalStore(folder))
    assert caught.value.file == "mp_rank_01/model_optim_rng.pt"


@pytest.mark.parametrize("name", ["optim.pt", "model_weights.ckpt"])
def test_other_kinds_of_rank_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "mp_rank_00_000").mkdir()
    (tmp_path / "mp_rank_00_000" / name).write_bytes(b"x")
    store = LocalStore(tmp_path)
    assert megatron.sniff(store)
    with pytest.raises(UnsupportedError, match=name):
        megatron.read(store)


@pytest.mark.each_value
@pytest.mark.parametrize("case", ["dense_gqa/tp2_pp1", "dense_gqa/tp2_pp2"])
@pytest.mark.parametrize("n_optim", [0, 2])
def test_model_files_beside_the_old_distributed_optimizer_are_read(
    golden: Path, tmp_path: Path, case: str, n_optim: int
) -> None:
    import torch

    from core.verbs.checks.finding import Level
    from core.verbs.convert.job import Job
    from core.verbs.convert.run import run
    from core.verbs.validate.run import validate

    folder = copied(golden, case, tmp_path)
    expected = megatron.read(LocalStore(folder)).tensors
    for rank in list(folder.glob("mp_rank_*")):
        (rank / "model_optim_rng.pt").rename(rank / "model_rng.pt")
        for number in range(n_optim):
            optim = folder / f"{rank.name}_{number:03d}"
            optim.mkdir()
            torch.save({"shard": torch.zeros(4)}, optim / "optim.pt")
    (folder / "ckpt-manifest.json").unlink(missing_ok=True)
    assert megatron.read(LocalStore(folder)).tensors == expected
    assert megatron.sample(LocalStore(folder)).tensors
    store = LocalStore(folder / next(folder.glob("mp_rank_*")).name)
    assert megatron.sniff(store) == (store.exists("model_rng.pt"))
    for level in Level:
        assert validate(folder, level=level).findings == ()
    job = Job(src=folder, dst=tmp_path / "out", to="safetensors", fsync=False)
    if n_optim:
        with pytest.raises(UnsupportedError, match=r"optim\.pt") as caught:
            run(job)
        assert "--no-optim" in str(caught.value.hint)
    run(replace(job, optim="drop"))


def test_files_without_arguments_are_refused(tmp_path: Path) -> None:
    import torch

    (tmp_path / "mp_rank_00").mkdir()
    torch.save({"model": {"a": torch.zeros(2)}}, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(UnsupportedError, match="no training arguments"):
        megatron.read(LocalStore(tmp_path))
    torch.save([1, 2], tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(CheckpointingException):
        megatron.read(LocalStore(tmp_path))


def test_lay_out_writes_a_root_with_its_tracker(golden: Path) -> None:
    source = unshard(megatron.read(LocalStore(iteration(golden, "dense_gqa/tp2_pp1"))), rules=RULES)
    target = shard(source, Topology(tp=1, pp=2), rules=RULES)
    images = megatron.lay_out(target)
    assert [(image.path, image.is_metadata) for image in images] == [
        ("iter_0000010/mp_rank_00_000/model_optim_rng.pt", False),
        ("iter_0000010/mp_rank_00_001/model_optim_rng.pt", False),
        ("latest_checkpointed_iteration.txt", True),
    ]
    assert list(images[-1].literals(lambda name: 0)) == [(0, b"10")]
    placed = {array.array.name for image in images for array in image.arrays}
    assert placed == {
        fragment.array.name for fragment in target.all_fragments() if fragment.array is not None
    }


def test_without_an_iteration_the_checkpoint_is_a_release(golden: Path) -> None:
    source = unshard(megatron.read(LocalStore(iteration(golden, "dense_gqa/tp1_pp1"))), rules=RULES)
    target = replace(shard(source, Topology(), rules=RULES), iteration=None)
    images = megatron.lay_out(target)
    assert images[0].path == "release/mp_rank_00/model_optim_rng.pt"
    assert list(images[-1].literals(lambda name: 0)) == [(0, b"release")]


def test_a_catalog_without_a_layout_cannot_become_rank_files(golden: Path) -> None:
    source = unshard(megatron.read(LocalStore(iteration(golden, "dense_gqa/tp1_pp1"))), rules=RULES)
    with pytest.raises(UnsupportedError, match="parallel layout"):
        megatron.lay_out(source)


def test_the_skeleton_is_the_file(golden: Path) -> None:
    catalog = megatron.read(LocalStore(iteration(golden, "dense_gqa/tp1_pp2_vpp2")))
    ranks = ranks_of(catalog)
    root = as_mapping(ranks[(("tp", 0), ("pp", 1))][1])
    assert root is not None
    assert list(root) == [
        "args",
        "checkpoint_version",
        "iteration",
        "model0",
        "model1",
        "rng_state",
        "num_floating_point_operations_so_far",
    ]
