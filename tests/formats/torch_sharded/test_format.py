"""Torch files of each rank, written by torch 2.13, against the full state dicts of the same run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

from core.engine.catalog.facets import TorchShardedFacts
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.files.source_store import open_store
from core.formats.torch_sharded.format import FORMAT
from core.opening.open import open_checkpoint
from core.verbs.checks.finding import Finding, Level, Severity
from core.verbs.convert.contract import check_reading
from core.verbs.convert.run import Job, run
from core.verbs.validate.run import validate
from tests.support.facets import facet_of
from tests.support.real_readers import READERS, Tensors, of_tensor
from tests.support.rounds import rounds

CASES = {
    "fsdp1_dp2": "optim",
    "fsdp2_axis1_dp2": "optim",
    "fsdp2_named_dp2": "optim",
    "fsdp2_dp4": "optim",
    "tp2_fsdp2_dp2": "optim",
    "hsdp_dp2x2": "optimizer",
}
"""Case → name of the optimizer in it."""


def _flat(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flat(item, f"{path}{name}.")
    elif isinstance(value, torch.Tensor):
        yield path[:-1], value


def _full(gold: Path, case: str) -> Tensors:
    """The tensors of the full state dicts, under the keys of the ranks' files."""
    full = torch.load(gold / f"full/{case}.pt", weights_only=False)
    states = full["optim"].get("state", {})
    if case not in ("fsdp1_dp2", "fsdp2_named_dp2"):
        names = full["optim"]["param_groups"][0]["params"]
        states = {number: states[name] for number, name in enumerate(names)}
    tree = {"model": full["model"], CASES[case]: {"state": states}}
    return {key: of_tensor(tensor) for key, tensor in _flat(tree)}


@pytest.mark.each_value
@pytest.mark.parametrize("target", ["safetensors", "dcp"])
@pytest.mark.parametrize("case", list(CASES))
def test_the_files_of_all_ranks_are_the_full_state_dict_bit_for_bit(
    case: str, target: str, gold: Path, tmp_path: Path
) -> None:
    run(Job(src=gold / case, dst=tmp_path / "out", to=target, fsync=False))
    read = READERS[target](tmp_path / "out")
    own = {key for key in read if key.startswith("extra_state.rng.rank_")}
    assert {key: tensor for key, tensor in read.items() if key not in own} == _full(gold, case)
    assert len(own) == (4 if case in ("fsdp2_dp4", "tp2_fsdp2_dp2") else 0)


@pytest.mark.parametrize("case", ["fsdp1_local_dp2", "fsdp1_local_flat_dp2"])
def test_local_state_dicts_hold_flat_parameters(case: str, gold: Path, tmp_path: Path) -> None:
    run(Job(src=gold / case, dst=tmp_path / "out", to="safetensors", fsync=False))
    read = READERS["safetensors"](tmp_path / "out")
    model = torch.load(gold / f"full/{case}.pt")["model"]
    # With use_orig_params the parameters are there as well, with one axis.
    if case == "fsdp1_local_dp2":
        for key, tensor in model.items():
            expected = tensor if key.endswith("steps") else tensor.flatten()
            assert read[f"model.{key}"] == of_tensor(expected)
    layer = [model[f"layers.0.{name}"] for name in ("fc1.weight", "fc1.bias", "fc2.weight")]
    layer += [model["layers.0.norm.weight"], model["layers.0.norm.bias"]]
    flat = torch.frombuffer(bytearray(read["model.layers.0._flat_param"][2]), dtype=torch.float32)
    for tensor in layer:  # parameters are aligned, so that there may be gaps
        windows = flat.unfold(0, tensor.numel(), 1)
        assert (windows == tensor.flatten()).all(dim=1).any()


def test_a_file_stands_for_its_family_and_a_directory_for_all_of_them(gold: Path) -> None:
    single = open_checkpoint(gold / "fsdp2_dp4/model_world_size_4_rank_2.pt")
    family = open_checkpoint(gold / "fsdp2_dp4")
    assert single.format.name == family.format.name == "torch_sharded"
    assert "embed.weight" in single.catalog.tensors
    assert single.catalog.tensors["embed.weight"].shape == (11, 6)
    assert {key.partition(".")[0] for key in family.catalog.tensors} == {
        "model",
        "optim",
        "extra_state",
    }
    assert family.catalog.objects["extra_state.lr_scheduler.last"].value == 2
    assert family.catalog.objects["extra_state.rng.rank_3.seed"].value == 3


def test_a_lone_file_is_shown_with_what_is_missing(gold: Path, tmp_path: Path) -> None:
    shutil.copy(gold / "tp2_fsdp2_dp2/model_world_size_4_rank_1.pt", tmp_path / "renamed.pt")
    opened = open_checkpoint(tmp_path / "renamed.pt")
    assert opened.catalog.tensors["layers.0.fc1.weight"].shape == (10, 6)
    assert facet_of(opened.catalog, TorchShardedFacts).ranks == (0, 1, 2, 3)
    assert any("3 other ranks" in note for note in opened.catalog.notes)
    with pytest.raises(MissingShardError):
        run(Job(src=tmp_path / "renamed.pt", dst=tmp_path / "out", to="dcp", fsync=False))
    assert not (tmp_path / "out").exists()


def _without_rank(gold: Path, case: str, rank: int, folder: Path) -> Path:
    shutil.copytree(gold / case, folder)
    for path in folder.glob(f"*rank*{rank}.pt"):
        path.unlink()
    return folder


def _findings(path: Path) -> list[Finding]:
    return list(validate(path).findings)


def test_a_missing_rank_is_a_finding_and_no_conversion_fills_its_place(
    gold: Path, tmp_path: Path
) -> None:
    src = _without_rank(gold, "tp2_fsdp2_dp2", 2, tmp_path / "src")
    missing = [finding for finding in _findings(src) if finding.code == "CK160"]
    assert {finding.file for finding in missing} == {
        f"{name}_world_size_4_rank_2.pt" for name in ("model", "optim", "extra_state")
    }
    with pytest.raises(MissingShardError, match=r"fc1"):
        run(Job(src=src, dst=tmp_path / "out", to="safetensors", fsync=False))


def test_a_missing_replica_is_a_finding_but_loses_nothing(gold: Path, tmp_path: Path) -> None:
    src = _without_rank(gold, "hsdp_dp2x2", 2, tmp_path / "src")
    assert [finding.code for finding in _findings(src)] == ["CK160"]
    run(Job(src=src, dst=tmp_path / "out", to="safetensors", fsync=False))
    assert READERS["safetensors"](tmp_path / "out") == _full(gold, "hsdp_dp2x2")


def test_files_of_two_saves_are_not_mixed(gold: Path, tmp_path: Path) -> None:
    for rank, step in ((0, 10), (1, 10), (0, 20), (1, 20)):
        source = gold / f"fsdp1_dp2/model_world_size_2_rank_{rank}.pt"
        shutil.copy(source, tmp_path / f"step{step}_rank{rank}.pt")
    with pytest.raises(UnsupportedError, match="several saves") as refusal:
        open_checkpoint(tmp_path)
    assert "pass any file" in (refusal.value.hint or "")
    opened = open_checkpoint(tmp_path / "step20_rank1.pt")
    assert len(opened.catalog.fragments("embed.weight")) == 2
    # The same rank twice, under names that look like two ranks.
    shutil.copy(tmp_path / "step10_rank0.pt", tmp_path / "step10_rank7.pt")
    with pytest.raises(CorruptError, match="are both from rank 0"):
        open_checkpoint(tmp_path / "step10_rank7.pt")


def test_the_content_and_not_the_name_says_where_a_part_belongs(gold: Path, tmp_path: Path) -> None:
    for rank in range(4):
        source = gold / f"tp2_fsdp2_dp2/model_world_size_4_rank_{rank}.pt"
        shutil.copy(source, tmp_path / f"part-{3 - rank}.pth")
    run(Job(src=tmp_path, dst=tmp_path / "out", to="safetensors", fsync=False))
    expected = _full(gold, "tp2_fsdp2_dp2")
    read = READERS["safetensors"](tmp_path / "out")
    assert read == {
        key.removeprefix("model."): tensor
        for key, tensor in expected.items()
        if key.startswith("model.")
    }


@pytest.mark.parametrize(
    "case", ["fsdp1_local_flat_dp2", pytest.param("hsdp_dp2x2", marks=pytest.mark.long)]
)
def test_damage_is_survived(case: str, gold: Path, tmp_path: Path) -> None:
    check_reading(FORMAT, gold / case, tmp_path / "damage", n_flips=rounds(50))


# Forms that the archive does not have, made by torch's own classes, rank by rank in one process


def _save(folder: Path, rank: int, state: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / f"rank_{rank}.pt")


def test_the_order_of_shards_is_kept(each_rank: Callable[..., None], tmp_path: Path) -> None:
    full = torch.arange(24.0).reshape(12, 2)

    def write(rank: int, mesh: Any) -> None:
        # The second axis of the mesh cuts first.
        first, second = rank // 2, rank % 2
        local = full.chunk(2)[second].chunk(2)[first].clone()
        spec = DTensorSpec(
            mesh,
            (Shard(0), Shard(0)),
            TensorMeta(full.shape, full.stride(), full.dtype),
            shard_order=(ShardOrderEntry(0, (1, 0)),),
        )
        _save(tmp_path / "src", rank, {"w": DTensor(local, spec, requires_grad=False)})

    each_rank((2, 2), write)
    run(Job(src=tmp_path / "src", dst=tmp_path / "out", to="safetensors", fsync=False))
    assert READERS["safetensors"](tmp_path / "out") == {"w": of_tensor(full)}


def test_partial_sums_are_refused_by_name(each_rank: Callable[..., None], tmp_path: Path) -> None:
    def write(rank: int, mesh: Any) -> None:
        summand = DTensor.from_local(torch.ones(2) * rank, mesh, [Partial()])
        sharded = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        _save(tmp_path / "src", rank, {"grad": summand, "w": sharded})

    each_rank((2,), write)
    assert "w" in open_checkpoint(tmp_path / "src").catalog.tensors
    with pytest.raises(
        UnsupportedError, match="placement Partial, where every rank has a partial sum"
    ) as e:
        run(Job(src=tmp_path / "src", dst=tmp_path / "out", to="safetensors", fsync=False))
    assert e.value.key == "grad"
    job = Job(src=tmp_path / "src", dst=tmp_path / "out", to="dcp", exclude=("grad",), fsync=False)
    run(job)


def test_parts_that_contradict_the_placements_are_damage(
    each_rank: Callable[..., None], tmp_path: Path
) -> None:
    def write(rank: int, mesh: Any) -> None:
        spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(torch.Size((4,)), (1,), torch.float32))
        local = torch.ones(3)
        _save(tmp_path / "src", rank, {"w": DTensor(local, spec, requires_grad=False)})

    each_rank((2,), write)
    with pytest.raises(
        CorruptError, match=r"local part of shape \(3,\).*imply a local shape of \(2,\)"
    ) as error:
        FORMAT.read(open_store(tmp_path / "src"))
    assert (error.value.file, error.value.key) == ("rank_0.pt", "w")


def test_tied_parameters_are_written_once(each_rank: Callable[..., None], tmp_path: Path) -> None:
    def write(rank: int, mesh: Any) -> None:
        weight = DTensor.from_local(torch.ones(2) * rank, mesh, [Shard(0)])
        _save(tmp_path / "src", rank, {"embed": weight, "head": weight})

    each_rank((2,), write)
    assert open_checkpoint(tmp_path / "src").catalog.ties == {"head": "embed"}


def test_a_parameter_stays_one(each_rank: Callable[..., None], tmp_path: Path) -> None:
    def write(rank: int, mesh: Any) -> None:
        weight = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        _save(tmp_path / "src", rank, {"w": torch.nn.Parameter(weight)})

    each_rank((1,), write)
    run(Job(src=tmp_path / "src/rank_0.pt", dst=tmp_path / "out.pt", to="torch", fsync=False))
    weight = torch.load(tmp_path / "out.pt")["w"]
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.requires_grad and weight.tolist() == [1, 1]


def test_ranks_that_differ_in_a_value_or_a_buffer_are_reported(
    each_rank: Callable[..., None], tmp_path: Path
) -> None:
    def write(rank: int, mesh: Any) -> None:
        weight = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        model = {"w": weight, "buffer": torch.ones(2) * rank, "name": f"of {rank}"}
        _save(tmp_path / "src", rank, {"model": model, "epoch": 3, "data": {"seen": rank}})

    each_rank((2,), write)
    catalog = open_checkpoint(tmp_path / "src").catalog
    assert catalog.objects["epoch"].value == 3
    assert [catalog.objects[f"data.rank_{rank}.seen"].value for rank in range(2)] == [0, 1]
    assert tuple(map(str, catalog.dropped)) == (
        "model.name of rank 1 (differs from the value on rank 0)",
    )
    with pytest.raises(CorruptError, match="differ") as error:
        run(Job(src=tmp_path / "src", dst=tmp_path / "out", to="torch", fsync=False))
    assert error.value.key == "model.buffer"


def test_statistics_of_batch_norm_may_differ_between_ranks(
    each_rank: Callable[..., None], tmp_path: Path
) -> None:
    """FSDP shards parameters only, and each rank computes its buffers from its own batches."""
    full = torch.arange(24.0).reshape(12, 2)

    def save(rank: int, mesh: Any) -> None:
        state = {
            "fc.weight": DTensor.from_local(full.chunk(2)[rank].clone(), mesh, [Shard(0)]),
            "bn.running_mean": torch.full((3,), float(rank)),
            "bn.num_batches_tracked": torch.tensor(5 + rank),
            "scale": torch.tensor([2.0]),
        }
        _save(tmp_path / "run", rank, state)

    each_rank((2,), save)
    findings = validate(tmp_path / "run", level=Level.DEEP).findings
    assert {(finding.key, finding.severity) for finding in findings if finding.code == "CK720"} == {
        ("bn.running_mean", Severity.NOTE),
        ("bn.num_batches_tracked", Severity.NOTE),
    }
    assert max(finding.severity for finding in findings) == Severity.NOTE
