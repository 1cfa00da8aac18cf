"""core.formats.mcore.local: the files of local checkpoints, with the classes of megatron-core."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.files.store import LocalStore
from core.formats.mcore.local import FORMAT
from core.opening.open import open_checkpoint
from core.verbs.convert.contract import check_reading
from core.verbs.convert.run import Job, run
from core.verbs.diff.run import DiffJob, diff
from tests.support.local_checkpoint import LAYERS, WEIGHT, saved, state_of
from tests.support.materialize import tensor_bytes
from tests.support.rounds import rounds


def test_a_directory_has_the_tensors_of_all_ranks(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(tmp_path / "local"))
    catalog, store = checkpoint.catalog, checkpoint.store
    assert (checkpoint.format.name, checkpoint.iteration) == ("mcore_local", 7)
    assert {key: meta.shape for key, meta in catalog.tensors.items()} == {
        "weight": (6, 4),
        "layers": (2, 6),
        "norm": (3,),
    }
    assert list(catalog.objects) == ["rng/shard_0_2", "rng/shard_1_2"]
    assert len(catalog.hidden) == 3  # the seed of the common state, and one number of each rank
    expected = {"weight": WEIGHT, "layers": LAYERS, "norm": torch.ones(3)}
    for key, tensor in expected.items():
        values = bytearray(tensor_bytes(catalog, store, key))
        assert torch.equal(torch.frombuffer(values, dtype=tensor.dtype).view(tensor.shape), tensor)


def test_a_file_has_the_shards_of_its_rank(tmp_path: Path) -> None:
    file = saved(tmp_path / "local") / "1/iter_0000007_1_local.pt"
    catalog = open_checkpoint(file).catalog
    assert {key: tensor.shape for key, tensor in catalog.tensors.items()} == {
        "weight@3,0": (3, 4),
        "layers@1,0": (1, 6),
    }


def test_two_checkpoints_are_compared(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b", scale=2)
    result = diff(DiffJob(a=a, b=b))
    assert sorted(row.key for row in result.tensors if not row.is_same) == ["norm", "weight"]
    rank = "0/iter_0000007_0_local.pt"
    result = diff(DiffJob(a=a / rank, b=b / rank))
    assert sorted(row.key for row in result.tensors if not row.is_same) == ["norm", "weight@0,0"]


def test_a_local_checkpoint_becomes_a_distributed_one(tmp_path: Path) -> None:
    source = saved(tmp_path / "local")
    run(Job(src=source, dst=tmp_path / "global", to="torch_dist", fsync=False))
    result = diff(DiffJob(a=source, b=tmp_path / "global"))
    assert result.same


def test_the_newest_iteration_of_most_ranks_is_read(tmp_path: Path) -> None:
    folder = saved(saved(tmp_path / "local"), iteration=9)
    (folder / "1/iter_0000009_1_local.pt").unlink()
    (folder / "0/iter_0000009_0_local.dirty.pt").touch()
    catalog = open_checkpoint(folder).catalog
    assert set(catalog.tensors) == {"weight", "layers", "norm"}
    assert catalog.notes == (
        "iteration 7 was read; the directory also contains other iterations (9)",
    )


def test_shards_of_other_nodes_are_reported_missing(tmp_path: Path) -> None:
    folder = saved(tmp_path / "local")
    shutil.rmtree(folder / "1")
    (note,) = open_checkpoint(folder).catalog.notes
    assert note.startswith("shards of weight and 1 more are missing")
    with pytest.raises(MissingShardError, match="weight"):
        diff(DiffJob(a=folder, b=folder))


def test_shards_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "iter_0000007_0_local.pt"

    def refusal(**changes: object) -> pytest.ExceptionInfo[Exception]:
        state = state_of(0)
        for name, value in changes.items():
            setattr(state.sharded_state_dict["norm"], name, value)
        torch.save(state, file)
        with pytest.raises((CorruptError, UnsupportedError), match="tensor norm") as caught:
            FORMAT.read(LocalStore(tmp_path))
        return caught

    assert "flattened" in str(refusal(flattened_range=slice(0, 2)).value)
    assert "not a plain tensor" in str(refusal(data=torch.ones(3).to_sparse()).value)
    assert "does not fit" in str(refusal(global_offset=(1,)).value)
    assert "does not fit" in str(refusal(local_shape=(2,)).value)
    assert "integers" in str(refusal(global_shape=("3",)).value)


def test_other_classes_in_such_files_are_torch_files(tmp_path: Path) -> None:
    file = tmp_path / "0/iter_0000007_0_local.pt"
    file.parent.mkdir()
    torch.save({"w": torch.ones(2)}, file)
    assert open_checkpoint(file).format.name == "torch"
    assert not FORMAT.sniff(LocalStore(tmp_path))


def test_damage_leads_to_errors_of_this_project_only(tmp_path: Path) -> None:
    check_reading(FORMAT, saved(tmp_path / "local"), tmp_path / "damage", n_flips=rounds(50))
