"""torch_dist checkpoints of ours in other hands, and theirs in ours: megatron-core, torch, the
engine's converter.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from core.dist_checkpointing import serialization
from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing.dict_utils import dict_list_map_outplace
from core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from core.files.store import LocalStore
from core.formats.dcp.reading.stored_metadata import metadata_of
from core.verbs.convert.job import Job
from core.verbs.convert.run import run as convert
from tests.dist_checkpointing.ranks import run_ranks
from tests.dist_checkpointing.test_torch_strategy import differences, on_ranks, state_of
from tests.support.real_readers import Tensors, of_tensor, read_dcp

has_megatron = (
    importlib.util.find_spec("megatron") is not None
    and importlib.util.find_spec("megatron.core") is not None
)
needs_megatron = pytest.mark.skipif(not has_megatron, reason="megatron-core is not installed")


def _without_flat(state: dict[str, Any]) -> dict[str, Any]:
    """megatron-core 0.16.1 knows no flattened tensors any more."""
    del state["optimizer"]["flat"]
    return state


def _theirs(state: Any) -> Any:
    """The same state of megatron-core's ShardedTensors and ShardedObjects."""
    from megatron.core.dist_checkpointing import mapping

    def make_leaf(leaf: ShardedTensor | ShardedObject) -> Any:
        values = {
            field.name: getattr(leaf, field.name)
            for field in fields(leaf)
            if field.name != "flattened_range"
        }
        return getattr(mapping, type(leaf).__name__)(**values)

    return dict_list_map_outplace(make_leaf, state)


def _megatron() -> Any:
    from tests.real_megatron import cpu

    cpu.install()
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    return strategies


def _ours_save(rank: int, world: int, folder: Path, options: dict[str, Any]) -> None:
    TorchDistSaveShardedStrategy("torch_dist", 1, **options).save(
        _without_flat(state_of(rank, world)), folder
    )


def _theirs_load(rank: int, world: int, folder: Path, with_objects: bool) -> list[str]:
    asked, wanted = (
        _without_flat(state_of(rank, world, is_filled=filled)) for filled in (False, True)
    )
    if not with_objects:
        del asked["rng"], wanted["rng"]
    loaded = _megatron().TorchDistLoadShardedStrategy().load(_theirs(asked), folder)
    return differences(loaded, wanted)


def _theirs_save(rank: int, world: int, folder: Path) -> None:
    saved = _theirs(_without_flat(state_of(rank, world)))
    _megatron().TorchDistSaveShardedStrategy("torch_dist", 1).save(saved, folder)
    dist.barrier()


def _ours_load(rank: int, world: int, folder: Path, with_objects: bool) -> list[str]:
    asked, wanted = (
        _without_flat(state_of(rank, world, is_filled=filled)) for filled in (False, True)
    )
    if not with_objects:
        del asked["rng"], wanted["rng"]
    return differences(TorchDistLoadShardedStrategy().load(asked, folder), wanted)


@needs_megatron
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_saved", "n_loaded", "options"),
    [(1, 2, {}), (2, 2, {"separation_hint": "optimizer"}), (4, 1, {})],
)
def test_megatron_core_loads_what_we_save(n_saved, n_loaded, options, tmp_path):
    on_ranks(n_saved, _ours_save, tmp_path, options)
    assert run_ranks(n_loaded, _theirs_load, tmp_path, n_loaded == n_saved) == [[]] * n_loaded


@needs_megatron
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("n_saved", [2, 1])
def test_we_load_what_megatron_core_saves(n_saved, tmp_path):
    run_ranks(n_saved, _theirs_save, tmp_path)
    for n_loaded in (1, 2, 4):
        assert on_ranks(n_loaded, _ours_load, tmp_path, n_loaded == n_saved) == [[]] * n_loaded


def _theirs_remove(rank: int, world: int, folder: Path) -> None:
    strategies = _megatron()
    # 0.16.1 asks for what torch 2.13 does not have any more.
    dcp.FileSystemWriter.metadata_path = property(lambda writer: writer.path / ".metadata")
    strategies.TorchDistLoadShardedStrategy().remove_sharded_tensors(folder, "optimizer")


@needs_megatron
@pytest.mark.dist
@pytest.mark.slow
def test_megatron_core_removes_what_we_kept_apart_and_leaves_what_we_leave(tmp_path):
    states = []
    for name in ("theirs", "ours"):
        folder = tmp_path / name
        folder.mkdir()
        _ours_save(0, 1, folder, {"separation_hint": "optimizer"})
        if name == "ours":
            TorchDistLoadShardedStrategy().remove_sharded_tensors(folder, "optimizer")
        else:
            run_ranks(1, _theirs_remove, folder)
        metadata = {
            key: repr(item)
            for key, item in TorchDistLoadShardedStrategy().load_sharded_metadata(folder).items()
        }
        states.append((metadata, read_dcp(folder), {file.name for file in folder.iterdir()}))
    assert states[0] == states[1]
    assert states[0][2] == {".metadata", "__0_0.distcp"}


GOLDEN = (
    pytest.param("mcore0161_torch_dist/dense_gqa/tp2_pp2", marks=pytest.mark.long),
    pytest.param("mcore0161_torch_dist/dense_gqa/tp2_pp2_optim", marks=pytest.mark.long),
    pytest.param("mcore0121_torch_dist/dense_gelu/tp2_pp2", marks=pytest.mark.long),
    "mcore0121_torch_dist/moe_seq/tp2_pp2_ep2",
    pytest.param("mcore_torch_dist/dense_gqa/tp2_pp2", marks=pytest.mark.long),
    "mcore_torch_dist/dense_gqa/tp2_pp2_optim",
)


def _read_by_torch(folder: Path) -> Tensors:
    """As ``read_dcp``, but ``.metadata`` may name classes of Megatron."""
    reader = CachedMetadataFileSystemReader(folder)
    state = {
        key: torch.empty(item.size, dtype=item.properties.dtype)
        for key, item in reader.read_metadata().state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {key: of_tensor(tensor) for key, tensor in state.items()}


@pytest.mark.parametrize("name", GOLDEN)
def test_checkpoints_of_three_megatrons_are_loaded_whole_and_in_parts(golden, name):
    (folder,) = (path.parent for path in (golden / name).rglob(".metadata"))
    strategy = TorchDistLoadShardedStrategy()
    listed = strategy.load_sharded_metadata(folder)
    tensors = {key: item for key, item in listed.items() if isinstance(item, ShardedTensor)}
    objects = {key: item for key, item in listed.items() if isinstance(item, ShardedObject)}
    loaded = strategy.load({**tensors, **objects}, folder)
    assert loaded.keys() == listed.keys() and objects
    wanted = _read_by_torch(folder)
    assert tensors.keys() == wanted.keys()
    for key in tensors:
        _, shape, _ = wanted[key]
        assert of_tensor(loaded[key].reshape(shape)) == wanted[key], key
        if loaded[key].dim() and loaded[key].shape[0] % 2 == 0:
            local = (loaded[key].shape[0] // 2, *loaded[key].shape[1:])
            empty = torch.empty(local, dtype=loaded[key].dtype)
            parts = [
                ShardedTensor.from_rank_offsets(key, empty.clone(), (0, n, 2)) for n in range(2)
            ]
            assert torch.equal(torch.cat(strategy.load({"p": parts}, folder)["p"]), loaded[key]), (
                key
            )


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("mcore0161_torch_dist/dense_gqa/tp2_pp2_optim", "optimizer"),
        ("mcore0121_torch_dist/moe_seq/tp2_pp2_ep2", "decoder.layers.mlp"),
        ("mcore_torch_dist/dense_gqa/tp2_pp2_optim", "optimizer"),
    ],
)
def test_removing_from_a_checkpoint_of_megatron_leaves_the_rest_as_it_was(
    golden, tmp_path, name, prefix
):
    (source,) = (path.parent for path in (golden / name).rglob(".metadata"))
    folder = shutil.copytree(source, tmp_path / "copy")
    strategy = TorchDistLoadShardedStrategy()
    before, tensors = strategy.load_sharded_metadata(folder), _read_by_torch(folder)
    items = _items(folder)
    strategy.remove_sharded_tensors(folder, prefix)
    remaining = {key for key in before if not key.startswith(prefix)}
    assert 0 < len(remaining) < len(before)
    metadata = strategy.load_sharded_metadata(folder)
    assert {key: repr(item) for key, item in metadata.items()} == {
        key: repr(before[key]) for key in remaining
    }
    assert _read_by_torch(folder) == {
        key: tensor for key, tensor in tensors.items() if key in remaining
    }
    assert _items(folder) == {
        (key, at): data for (key, at), data in items.items() if not key.startswith(prefix)
    }
    assert bridge.load_common(folder).keys() == bridge.load_common(source).keys()


def _save_whole(rank: int, world: int, folder: Path, with_objects: bool) -> None:
    state = state_of(rank, world) | {"iteration": 7, "args": {"hidden_size": 8}}
    if not with_objects:
        del state["rng"], state["once"]
    # The converter writes one file for each of the source's.
    serialization.save(state, folder, TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1))


def _items(folder: Path) -> dict[tuple[str, tuple[int, ...] | None], bytes]:
    """Bytes of every item of a directory, by key and offset."""
    store = LocalStore(folder)
    metadata = metadata_of(store)
    items = {
        (key, box.offset): store.read(item.file, item.offset, item.n_bytes)
        for key in metadata.tensors
        for box, item in metadata.chunks(key)
    }
    return items | {
        (key, None): store.read(item.file, item.offset, item.n_bytes)
        for key, item in metadata.objects.items()
    }


@pytest.mark.dist
@pytest.mark.first(2)
@pytest.mark.parametrize(("n", "with_objects"), [(2, True), (2, False), (1, True), (4, False)])
def test_what_is_saved_is_byte_for_byte_what_the_converter_makes_of_it(n, with_objects, tmp_path):
    saved, converted = tmp_path / "saved", tmp_path / "made"
    saved.mkdir()
    on_ranks(n, _save_whole, saved, with_objects)
    convert(Job(src=saved, dst=converted, to="torch_dist"))
    (again,) = (path.parent for path in converted.rglob(".metadata"))
    assert _items(again) == _items(saved)
    assert {file.name for file in again.iterdir()} == {file.name for file in saved.iterdir()}
    for file in again.iterdir():
        # The converter puts objects into the first file, whatever rank's file they were in.
        if n == 1 or not with_objects or file.suffix in (".pt", ".json"):
            assert file.read_bytes() == (saved / file.name).read_bytes(), file.name
