"""Sharded state dicts go through torch's own dcp.save and dcp.load, with the documented functions
and planners.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    FileSystemReader,
    FileSystemWriter,
    SavePlan,
)

from core.dist_checkpointing.mapping import ShardedObject
from core.dist_checkpointing.strategies._torch.state import group_by_key
from core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    flatten_state_dict,
    mcore_to_pyt_state_dict,
    sharded_tensor_to_torch_sharded_tensor,
)
from core.errors import CheckpointingException
from tests.dist_checkpointing.ranks import run_ranks
from tests.dist_checkpointing.sharded import global_tensor, part_of
from tests.dist_checkpointing.test_torch_strategy import (
    check_tensors,
    differences,
    on_ranks,
    state_of,
)
from tests.support.real_readers import read_dcp


def _torch_saves(rank: int, world: int, folder: Path) -> None:
    state = mcore_to_pyt_state_dict(group_by_key(state_of(rank, world), only_main_replicas=True))
    dcp.save(
        state,
        storage_writer=FileSystemWriter(folder),
        planner=MCoreSavePlanner(flatten_state_dict=False),
    )


def _torch_loads(rank: int, world: int, folder: Path) -> list[str]:
    asked = state_of(rank, world, is_filled=False)
    leaves = group_by_key(asked)
    state: dict[str, Any] = mcore_to_pyt_state_dict(leaves, is_loading=True)
    tensors = [
        leaf
        for several in leaves.values()
        for leaf in several
        if not isinstance(leaf, ShardedObject)
    ]
    planner = MCoreLoadPlanner(shapes_validation_sharded_tensors=tensors)
    dcp.load(state, storage_reader=CachedMetadataFileSystemReader(folder), planner=planner)
    for key, several in leaves.items():
        if isinstance(several[0], ShardedObject):
            (several[0].data,) = state[key]
    loaded = _values(asked)
    return differences(loaded, state_of(rank, world))


def _values(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _values(item) for key, item in state.items()}
    return [_values(item) for item in state] if isinstance(state, list) else state.data


def _ours_load(rank: int, world: int, folder: Path) -> list[str]:
    asked = state_of(rank, world, is_filled=False)
    return differences(TorchDistLoadShardedStrategy().load(asked, folder), state_of(rank, world))


@pytest.mark.dist
@pytest.mark.first(1)
@pytest.mark.parametrize("n", [2, 1, 4])
def test_what_torch_saves_with_our_planner_is_loaded_by_torch_and_by_the_strategy(n, tmp_path):
    on_ranks(n, _torch_saves, tmp_path)
    check_tensors(read_dcp(tmp_path))
    assert on_ranks(n, _torch_loads, tmp_path) == [[]] * n
    assert on_ranks(n, _ours_load, tmp_path) == [[]] * n


def _ours_saves(rank: int, world: int, folder: Path) -> None:
    TorchDistSaveShardedStrategy("torch_dist", 1).save(state_of(rank, world), folder)


@pytest.mark.dist
def test_what_the_strategy_saves_is_loaded_by_torch_with_our_planner(tmp_path):
    run_ranks(2, _ours_saves, tmp_path)
    assert run_ranks(2, _torch_loads, tmp_path) == [[], []]


def test_shapes_are_compared_unless_a_mismatch_is_allowed(tmp_path):
    dcp.save(mcore_to_pyt_state_dict({"w": [part_of("w", (4, 3))]}), checkpoint_id=tmp_path)

    def loaded(part, **options: object) -> torch.Tensor:
        state = mcore_to_pyt_state_dict({part.key: [part]}, is_loading=True)
        dcp.load(state, checkpoint_id=tmp_path, planner=MCoreLoadPlanner(**options))
        return part.data

    wrong = part_of("w", (6, 3))
    with pytest.raises(CheckpointException, match=r"\(4, 3\) in the checkpoint, expected \(6, 3\)"):
        loaded(wrong, shapes_validation_sharded_tensors=[wrong])
    absent = part_of("v", (4,))
    with pytest.raises(CheckpointException, match="the tensor is not in the checkpoint"):
        loaded(absent, shapes_validation_sharded_tensors=[absent])
    for rows in (2, 6):
        part = part_of("w", (rows, 3), is_filled=False, allow_shape_mismatch=True)
        want = torch.zeros(rows, 3)
        want[:4] = global_tensor("w", (4, 3))[:rows]
        assert torch.equal(loaded(part, allow_shape_mismatch_sharded_tensors={"w": part}), want)


class Runs:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.file}",))


def test_an_object_that_would_run_code_is_refused_on_loading(tmp_path):
    stream = io.BytesIO()
    torch.save([Runs(tmp_path / "ran")], stream)
    dcp.save(
        {"o": stream}, checkpoint_id=tmp_path, planner=MCoreSavePlanner(flatten_state_dict=False)
    )
    for flatten in (True, False):
        with pytest.raises(CheckpointException, match="can run arbitrary code"):
            dcp.load(
                {"o": None},
                checkpoint_id=tmp_path,
                planner=MCoreLoadPlanner(flatten_state_dict=flatten),
            )
    assert not (tmp_path / "ran").exists()


def test_objects_that_are_no_streams_yet_become_such(tmp_path):
    dcp.save(
        {"o": {"a": 1}}, checkpoint_id=tmp_path, planner=MCoreSavePlanner(flatten_state_dict=False)
    )
    state = {"o": None}
    dcp.load(state, checkpoint_id=tmp_path, planner=MCoreLoadPlanner())
    assert state == {"o": {"a": 1}}


def test_a_decentralized_plan_is_the_local_one():
    planner = MCoreSavePlanner(flatten_state_dict=False)
    assert planner.can_run_decentralized_global_plan
    plan = SavePlan([])
    assert planner.create_decentralized_global_plan(plan) is plan
    with pytest.raises(CheckpointingException, match="planner data"):
        planner.create_decentralized_global_plan(SavePlan([], planner_data={"a": ("a",)}))
    with pytest.raises(CheckpointingException, match="flatten_state_dict=False"):
        MCoreSavePlanner()
    with pytest.raises(CheckpointingException, match="replicas"):
        MCoreSavePlanner(flatten_state_dict=False, dedup_replicated_tensors=True)
    central = MCoreSavePlanner(can_run_decentralized_global_plan=False)
    with pytest.raises(CheckpointingException, match="cannot flatten the state dict"):
        central.create_decentralized_global_plan(plan)


def test_metadata_are_read_once_without_unpickling_and_are_those_that_torch_reads(
    tmp_path, monkeypatch
):
    TorchDistSaveShardedStrategy("torch_dist", 1).save(state_of(0, 1), tmp_path)
    theirs = FileSystemReader(tmp_path).read_metadata()

    def refused(*args: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr("pickle.load", refused)
    monkeypatch.setattr("pickle.Unpickler", refused)
    reader = CachedMetadataFileSystemReader(tmp_path)
    ours = reader.read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert list(ours.storage_data) == list(theirs.storage_data)
    for index, item in theirs.storage_data.items():
        assert vars(ours.storage_data[index]) == {"transform_descriptors": None} | vars(item)
    assert (ours.planner_data, ours.version) == (theirs.planner_data, theirs.version)
    (tmp_path / ".metadata").unlink()
    assert reader.read_metadata() is ours
    reader.reset()
    assert reader.read_metadata() is ours
    reader.reset(tmp_path)
    with pytest.raises(CheckpointingException, match="metadata"):
        reader.read_metadata()


def test_a_nested_state_is_flattened_by_its_paths():
    w, b = part_of("w", (2,)), torch.zeros(2)
    state = {"a": {0: w, "list": [b, {"c": w}], "plain": [1, 2]}, "empty": {}, "n": None}
    flat, paths = flatten_state_dict(state)
    assert list(flat) == ["a.0", "a.list.0", "a.list.1.c", "a.plain", "n"]
    assert (
        flat["a.0"] is w
        and flat["a.list.0"] is b
        and flat["a.list.1.c"] is w
        and flat["a.plain"] == [1, 2]
    )
    assert paths == {
        "a.0": ("a", "0"),
        "a.list.0": ("a", "list", 0),
        "a.list.1.c": ("a", "list", 1, "c"),
        "a.plain": ("a", "plain"),
        "n": ("n",),
    }
    with pytest.raises(ValueError, match="have the same flattened name: 'a.b'"):
        flatten_state_dict({"a": {"b": 1}, "a.b": 2})


def test_shards_of_one_tensor_become_one_value():
    sharded = sharded_tensor_to_torch_sharded_tensor([part_of("w", (4,), (0, 0, 2))])
    assert (
        isinstance(sharded, CheckpointableShardedTensor)
        and sharded.key == "w"
        and sharded.mcore_sh_ten.data is None
    )
    two = sharded_tensor_to_torch_sharded_tensor(
        [part_of("w", (4,), (0, n, 2)) for n in range(2)], 3
    )
    assert isinstance(two, LocalShardsContainer) and two.size() == (4,)
    objects = mcore_to_pyt_state_dict({"o/shard_0_1": [ShardedObject("o", {"a": 1}, (1,), (0,))]})
    assert torch.load(objects["o/shard_0_1"]) == [{"a": 1}]
    with pytest.raises(CheckpointingException, match="no data"):
        mcore_to_pyt_state_dict({"w": [part_of("w", (4,)).without_data()]})
    asked = part_of("w", (4,)).without_data()
    mcore_to_pyt_state_dict({"w": [asked]}, is_loading=True)
    assert asked.data.shape == (4,)
