"""torch.distributed.checkpoint.save writes every format through CkptStorageWriter, equal for the
real readers.
"""

from __future__ import annotations

import io
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from core.dist_checkpointing.storage_reader import CkptStorageReader
from core.dist_checkpointing.storage_writer import CkptStorageWriter
from core.dist_checkpointing.torch_dcp.planned_files import PlannedTensors
from core.errors import MissingShardError, UnsupportedError, UsageError
from core.verbs.convert.job import TopologyChange
from tests.dist_checkpointing.ranks import run_ranks
from tests.dist_checkpointing.test_storage_reader import Net, load_all, tensors_of
from tests.support.rank_files import assert_same_weights, rank_dirs
from tests.support.real_readers import READERS, Tensors, leaves, of_tensor

FORMATS = ["dcp", "torch_dist", "zarr", "zarr3", "safetensors", "torch"]


def state_of(size: int = 5) -> dict[str, Any]:
    """Tensors of several kinds, nested."""
    torch.manual_seed(size)
    return {
        "model": {
            "w": torch.randn(size, 6),
            "half": torch.randn(7, 3).bfloat16(),
            "bias": torch.randn(size),
            "transposed": torch.randn(4, 6).t(),
            "part": torch.randn(9, 9)[2:5, 1::2],
        },
        "scale": torch.tensor(2.5),
        "ids": torch.arange(12).reshape(3, 4),
    }


def flat(state: dict[str, Any]) -> Tensors:
    """Every tensor of a nested state dict, as its readers know it."""
    return {
        key: of_tensor(item.full_tensor() if isinstance(item, DTensor) else item)
        for key, item in leaves(state)
    }


@pytest.mark.parametrize("format", FORMATS)
def test_one_process_writes_what_the_real_reader_reads(tmp_path: Path, format: str):
    state = state_of()
    metadata = dcp.save(state, storage_writer=CkptStorageWriter(tmp_path / "out", format))
    assert READERS[format](tmp_path / "out") == flat(state)
    assert metadata.version == CURRENT_DCP_VERSION
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _save_cut(
    rank: int, world: int, folder: str, formats: list[str], mesh_shape: tuple[int, ...]
) -> Tensors:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[-len(mesh_shape) :])
    state = state_of(7)
    model = state["model"]
    kinds = [Shard(0), Shard(1), Replicate()]
    for number, (key, item) in enumerate(model.items()):
        placements = [kinds[(number + axis) % 3] for axis in range(len(mesh_shape))]
        placements = [
            Shard(0) if isinstance(placement, Shard) and placement.dim >= item.dim() else placement
            for placement in placements
        ]
        model[key] = distribute_tensor(item.contiguous(), mesh, placements)
    for format in formats:
        dcp.save(state, storage_writer=CkptStorageWriter(f"{folder}/{format}", format))
    return flat(state)


@pytest.mark.dist
@pytest.mark.parametrize("mesh_shape", [(2,), pytest.param((4,), marks=pytest.mark.long), (2, 2)])
def test_ranks_with_dtensors_write_one_checkpoint_in_any_format(
    tmp_path: Path, mesh_shape: tuple[int, ...]
):
    world = 4 if len(mesh_shape) == 2 else mesh_shape[0]
    true = run_ranks(world, _save_cut, str(tmp_path), FORMATS, mesh_shape)[0]
    assert true == flat(state_of(7))
    for format in FORMATS:
        assert READERS[format](tmp_path / format) == true, format
    assert {path.name for path in tmp_path.iterdir()} == set(FORMATS)


@pytest.mark.dist
def test_every_rank_writes_a_file_of_its_own_in_dcp(tmp_path: Path):
    run_ranks(2, _save_cut, str(tmp_path), ["dcp"], (2,))
    assert sorted(path.name for path in (tmp_path / "dcp").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    ]


def _save_fsdp(rank: int, world: int, paths: dict[str, str], tp: int, plain: bool) -> Any:
    torch.manual_seed(3)
    net = Net()
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        parallelize_module(
            net, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()}
        )
    fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25)
    for parameter in net.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    model, states = get_state_dict(net, optimizer)
    state = {
        "model": model,
        "optim": states,
        "step": 4,
        "args": Namespace(lr=0.25) if not plain else 0,
    }
    for format, path in paths.items():
        dcp.save(state, storage_writer=CkptStorageWriter(path, format))
    return flat({"model": model, "optim": states})


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "tp"), [(1, 1), pytest.param(2, 1, marks=pytest.mark.long), (4, 2)]
)
def test_fsdp2_and_tensor_parallel_save_model_and_optimizer(tmp_path: Path, world: int, tp: int):
    paths = {format: str(tmp_path / format) for format in FORMATS}
    true = run_ranks(world, _save_fsdp, paths, tp, False)[0]
    # A torch file keeps the class, as torch.save does. safe_globals removes at its end what it was
    # given, so a class that Megatron registered is not given to it.
    missing = [kind for kind in [Namespace] if kind not in torch.serialization.get_safe_globals()]
    for format in FORMATS:
        with torch.serialization.safe_globals(missing):
            assert READERS[format](tmp_path / format) == true
        loaded = load_all(tmp_path / format)
        assert tensors_of(loaded) == true
        assert loaded["step"] == 4 and loaded["args"] == Namespace(lr=0.25)
        assert loaded["optim.param_groups.0.lr"] == 0.25
    assert {path.name for path in tmp_path.iterdir()} == set(FORMATS)


@pytest.mark.dist
def test_torch_loads_what_ranks_wrote_to_one_file_as_the_nested_state_dict_it_was(tmp_path: Path):
    run_ranks(2, _save_fsdp, {"torch": str(tmp_path / "all.pt")}, 1, True)
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert loaded["step"] == 4 and loaded["optim"]["param_groups"][0]["lr"] == 0.25
    assert set(loaded["model"]) == {"first.weight", "first.bias", "second.weight", "seen"}


@pytest.mark.parametrize("format", ["dcp", "torch_dist", "zarr3", "safetensors", "torch"])
def test_entries_that_are_no_tensors_come_back(tmp_path: Path, format: str):
    state = {
        "w": torch.arange(6.0),
        "args": Namespace(sizes=(1, 2)),
        "rng": [torch.arange(4, dtype=torch.uint8), "text"],
        "plain": {"betas": (0.9, 0.99), "none": None},
    }
    dcp.save(state, storage_writer=CkptStorageWriter(tmp_path / "out", format))
    loaded = load_all(tmp_path / "out")
    assert torch.equal(loaded["w"], state["w"]) and loaded["args"] == state["args"]
    assert loaded["plain.betas"] == (0.9, 0.99) and loaded["plain.none"] is None
    assert torch.equal(loaded["rng.0"], state["rng"][0])
    if format == "torch_dist":  # its common state has no place for tensors
        assert loaded["rng"] == [None, "text"]
    else:
        assert loaded["rng.1"] == "text"


@pytest.mark.parametrize("format", FORMATS)
def test_streams_come_back_as_streams(tmp_path: Path, format: str):
    state = {"losses": io.BytesIO(b"saved by the script"), "blob": b"bytes"}
    dcp.save({"train": state}, storage_writer=CkptStorageWriter(tmp_path / "out", format))
    loaded = {"train": {"losses": io.BytesIO(), "blob": b""}}
    dcp.load(loaded, storage_reader=CkptStorageReader(tmp_path / "out"))
    assert loaded["train"]["losses"].getvalue() == b"saved by the script"
    assert loaded["train"]["blob"] == b"bytes"


@pytest.mark.parametrize("format", FORMATS)
def test_an_empty_state_dict_is_saved_and_replaced(tmp_path: Path, format: str):
    dcp.save({}, storage_writer=CkptStorageWriter(tmp_path / "out", format))
    dcp.load({}, storage_reader=CkptStorageReader(tmp_path / "out"))
    writer = CkptStorageWriter(tmp_path / "out", format, overwrite=True)
    dcp.save(state_of(), storage_writer=writer)
    assert READERS[format](tmp_path / "out") == flat(state_of())


def test_torch_loads_objects_of_any_class_from_dcp(tmp_path: Path):
    state = {
        "w": torch.ones(3),
        "args": Namespace(lr=0.5),
        "nested": {"inside": (torch.arange(3), "x")},
    }
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=CkptStorageWriter(tmp_path / "out"), planner=planner)
    loaded: dict[str, Any] = {"w": torch.zeros(3), "args": None, "nested": None}
    plan = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path / "out"), planner=plan)
    assert torch.equal(loaded["w"], state["w"]) and loaded["args"] == state["args"]
    assert (
        torch.equal(loaded["nested"]["inside"][0], torch.arange(3))
        and loaded["nested"]["inside"][1] == "x"
    )


def test_objects_of_dcp_lie_behind_the_tensors_of_the_first_rank(tmp_path: Path):
    dcp.save({"w": torch.ones(3), "step": 3}, storage_writer=CkptStorageWriter(tmp_path / "out"))
    names = [".metadata", "__0_0.distcp", "__0_1.distcp"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    dcp.save({"step": 3}, storage_writer=CkptStorageWriter(tmp_path / "only"))
    assert sorted(path.name for path in (tmp_path / "only").iterdir()) == names[:2]
    assert load_all(tmp_path / "only") == {"step": 3}


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_one_file_is_written_where_the_destination_says_so(tmp_path: Path, name: str):
    format = "torch" if name.endswith(".pt") else "safetensors"
    dcp.save(state_of(), storage_writer=CkptStorageWriter(tmp_path / name, format))
    assert (tmp_path / name).is_file() and READERS[format](tmp_path / name) == flat(state_of())


def test_a_safetensors_file_refuses_what_it_cannot_hold(tmp_path: Path):
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.save(
            {"w": torch.ones(2), "step": 3},
            storage_writer=CkptStorageWriter(tmp_path / "w.safetensors", "hf"),
        )
    assert isinstance(_cause(raised.value), UsageError) and not list(tmp_path.iterdir())


def _cause(error: dcp.CheckpointException) -> BaseException:
    """What a rank raised."""
    return next(iter(error.failures.values()))[0]


def test_tensors_are_split_into_files_of_a_size(tmp_path: Path):
    state = {f"w{n}": torch.full((100,), float(n)) for n in range(4)}
    dcp.save(
        state, storage_writer=CkptStorageWriter(tmp_path / "out", "safetensors", max_file_bytes=800)
    )
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    assert READERS["safetensors"](tmp_path / "out") == flat(state)


def test_a_tensor_is_in_host_memory_from_its_first_byte_to_its_last():
    fetched = []

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            fetched.append(write_item.index.fqn)
            return super().resolve_data(write_item)

    planner = Planner()
    weight = torch.arange(8.0).reshape(2, 4)
    planner.set_up_planner({"w": weight.T}, is_coordinator=True)
    tensors = PlannedTensors(planner.create_local_plan().items, planner)
    data = tensors.read("0", 0, 20) + tensors.read("0", 20, 12)
    assert data == weight.T.contiguous().numpy().tobytes() and fetched == ["w"]
    tensors.read("0", 0, 32)
    assert fetched == ["w", "w"]


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_an_existing_checkpoint_is_replaced_only_if_that_was_said(tmp_path: Path, format: str):
    out = tmp_path / "out"
    out.mkdir()
    dcp.save(state_of(3), storage_writer=CkptStorageWriter(out, format))
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.save(state_of(4), storage_writer=CkptStorageWriter(out, format))
    assert isinstance(_cause(raised.value), UsageError) and "overwrite=True" in str(
        _cause(raised.value)
    )
    assert READERS[format](out) == flat(state_of(3))
    dcp.save(state_of(4), storage_writer=CkptStorageWriter(out, format, overwrite=True))
    assert READERS[format](out) == flat(state_of(4))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(dcp.CheckpointException):
        dcp.save(
            state_of(4), storage_writer=CkptStorageWriter(tmp_path / "mine", format, overwrite=True)
        )
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


class Failing(DefaultSavePlanner):
    """Cannot give the tensors of rank 1, or of a single process."""

    def resolve_data(self, write_item: Any) -> Any:
        import torch.distributed as dist

        if not dist.is_initialized() or dist.get_rank() == 1:
            raise OSError("the device is gone")
        return super().resolve_data(write_item)


def _fail(rank: int, world: int, folder: str, formats: list[str]) -> list[str]:
    mesh = init_device_mesh("cpu", (world,))
    state = {"w": distribute_tensor(torch.arange(24.0).reshape(6, 4), mesh, [Shard(0)])}
    existing = []
    for format in formats:
        path = Path(folder, format)
        writer = CkptStorageWriter(path, format)
        with pytest.raises(dcp.CheckpointException):
            dcp.save(state, storage_writer=writer, planner=Failing())
        existing += [str(path)] if path.exists() else []
        dcp.save(state, storage_writer=CkptStorageWriter(path, format))
    return existing


@pytest.mark.dist
def test_a_rank_that_fails_leaves_nothing_and_the_next_save_succeeds(tmp_path: Path):
    assert run_ranks(2, _fail, str(tmp_path), FORMATS) == [[], []]
    for format in FORMATS:
        assert READERS[format](tmp_path / format) == flat({"w": torch.arange(24.0).reshape(6, 4)})
    assert {path.name for path in tmp_path.iterdir()} == set(FORMATS)


def _save_elsewhere(rank: int, world: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    state = {"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
    dcp.save(state, storage_writer=CkptStorageWriter(f"{folder}/{rank}/out", "safetensors"))


@pytest.mark.dist
def test_ranks_that_share_no_directory_are_told(tmp_path: Path):
    kind, text = run_ranks(2, _save_elsewhere, str(tmp_path), allow_failure=True)[0]
    assert kind == "CheckpointException" and "a file system that they share" in text
    assert not list(tmp_path.glob("*/out"))


def test_a_failure_of_the_coordinator_removes_the_stage(tmp_path: Path):
    with pytest.raises(dcp.CheckpointException):
        dcp.save(state_of(), storage_writer=CkptStorageWriter(tmp_path / "out"), planner=Failing())
    assert not list(tmp_path.iterdir())


def test_one_writer_saves_again_and_again(tmp_path: Path):
    writer = CkptStorageWriter(tmp_path / "first", "safetensors")
    ids = set()
    for n in range(3):
        dcp.save(state_of(n), checkpoint_id=tmp_path / str(n), storage_writer=writer)
        assert READERS["safetensors"](tmp_path / str(n)) == flat(
            state_of(n)
        ) and writer.checkpoint_id.name == str(n)
        ids.add(writer.save_id)
    assert len(ids) == 3 and not (tmp_path / "first").exists()


def test_a_writer_can_be_sent_to_the_process_of_an_asynchronous_save(tmp_path: Path):
    writer = CkptStorageWriter(tmp_path / "first", "safetensors", overwrite=True)
    dcp.save(state_of(), storage_writer=writer)
    copy = pickle.loads(pickle.dumps(writer))
    dcp.save(state_of(3), storage_writer=copy, checkpoint_id=tmp_path / "second")
    assert READERS["safetensors"](tmp_path / "first") == flat(state_of())
    assert READERS["safetensors"](tmp_path / "second") == flat(state_of(3))


def _save_and_load_shards(rank: int, world: int, path: str) -> None:
    def rows(*sizes: int) -> EnumerableShardingSpec:
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        return EnumerableShardingSpec(
            [
                ShardMetadata([start, 0], [size, 4], f"rank:{n % world}/cpu")
                for n, (start, size) in enumerate(zip(starts, sizes, strict=True))
            ]
        )

    def local_shards(cuts: list[int], fill: torch.Tensor) -> DTensor:
        start, stop = cuts[rank : rank + 2]
        shards = LocalShardsWrapper([fill[start:stop].clone()], [(start, 0)])
        mesh = init_device_mesh("cpu", (world,))
        return DTensor.from_local(
            shards, mesh, [Shard(0)], shape=torch.Size([10, 4]), stride=(4, 1), run_check=False
        )

    # Save shards of uneven sizes, several on a rank.
    full = torch.arange(40.0).reshape(10, 4)
    sharded = sharded_tensor.zeros(rows(2, 1, 3, 4), 10, 4)
    for shard in sharded.local_shards():
        start, size = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        shard.tensor.copy_(full[start : start + size])
    saved = {"sharded": sharded, "wrapped": local_shards([0, 7, 10], -full)}
    dcp.save(saved, storage_writer=CkptStorageWriter(path))
    # Load them cut elsewhere, each kind also as an ordinary tensor.
    loaded = {
        "sharded": torch.zeros(10, 4),
        "wrapped": local_shards([0, 2, 10], torch.zeros(10, 4)),
    }
    dcp.load(loaded, storage_reader=CkptStorageReader(path))
    assert torch.equal(loaded["sharded"], full)
    shard = loaded["wrapped"].to_local().local_shards()[0]
    assert torch.equal(shard, -full[:2] if rank == 0 else -full[2:])
    swapped = {"wrapped": torch.zeros(10, 4), "sharded": sharded_tensor.zeros(rows(9, 1), 10, 4)}
    dcp.load(swapped, storage_reader=CkptStorageReader(path))
    assert torch.equal(swapped["wrapped"], -full)
    local = swapped["sharded"].local_shards()[0].tensor
    assert torch.equal(local, full[:9] if rank == 0 else full[9:])


@pytest.mark.dist
def test_sharded_tensors_and_local_shards_are_loaded_cut_elsewhere(tmp_path: Path):
    run_ranks(2, _save_and_load_shards, str(tmp_path / "out"))


def _save_async(rank: int, world: int, folder: str, formats: list[str]) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for format in formats:
        weight = distribute_tensor(torch.arange(40.0).reshape(10, 4), mesh, [Shard(0)])
        future = dcp.async_save(
            {"w": weight, "step": 3}, storage_writer=CkptStorageWriter(f"{folder}/{format}", format)
        )
        with torch.no_grad():
            weight.to_local().zero_()
        getattr(future, "upload_completion", future).result()


@pytest.mark.dist
def test_an_asynchronous_save_holds_the_values_of_its_beginning(tmp_path: Path):
    run_ranks(2, _save_async, str(tmp_path), FORMATS)
    for format in FORMATS:
        assert READERS[format](tmp_path / format) == flat({"w": torch.arange(40.0).reshape(10, 4)})


def _save_cached(rank: int, world: int, folder: str, format: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for n in range(3):
        state = {
            "w": distribute_tensor(torch.full((5, 4), float(n)), mesh, [Shard(0)]),
            "n": torch.tensor(n),
        }
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=CkptStorageWriter(f"{folder}/{n}", format), planner=planner)


@pytest.mark.dist
def test_plans_that_torch_has_cached_are_written(tmp_path: Path):
    run_ranks(2, _save_cached, str(tmp_path), "safetensors")
    for n in range(3):
        true = flat({"w": torch.full((5, 4), float(n)), "n": torch.tensor(n)})
        assert READERS["safetensors"](tmp_path / str(n)) == true


def test_a_checkpoint_is_renamed_and_cast_on_the_way(tmp_path: Path):
    state = {"net": {"w": torch.randn(4, 4)}}
    writer = CkptStorageWriter(
        tmp_path / "out", "safetensors", rename=((r"^net\.", ""),), dtype=((None, "bfloat16"),)
    )
    dcp.save(state, storage_writer=writer)
    assert READERS["safetensors"](tmp_path / "out") == flat({"w": state["net"]["w"].bfloat16()})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _nested(state: dict[str, Any]) -> dict[str, Any]:
    """What a reader shows of rank files, as the nested state dict that a training program would
    have.
    """
    nested: dict[str, Any] = {"model": {}}
    for key, value in state.items():
        name, _, rest = key.partition(".")
        if name == "model":
            nested["model"][rest] = value
        elif not rest:
            nested[name] = value
    return nested


def test_rank_files_are_written_of_a_model_with_the_names_and_arguments_of_megatron(
    tmp_path: Path, golden: Path
):
    state = load_all(golden / "mcore_legacy" / "dense_gqa" / "tp2_pp2")
    nested = _nested(state)
    dcp.save(nested, storage_writer=CkptStorageWriter(tmp_path / "out", "megatron"))
    again = load_all(tmp_path / "out", tensors_only=True)
    assert tensors_of(again) == {
        key: item for key, item in tensors_of(state).items() if key in again
    }
    names = {key for key, item in nested["model"].items() if isinstance(item, torch.Tensor)}
    assert {key[6:] for key in again if key.startswith("model.")} == names
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _reshard_live(rank: int, world: int, source: str, path: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    nested = _nested(load_all(Path(source)))
    for key, item in nested["model"].items():
        if isinstance(item, torch.Tensor):
            nested["model"][key] = distribute_tensor(item, mesh, [Shard(0)])
    writer = CkptStorageWriter(path, "megatron", topology=TopologyChange(tp=4, pp=1))
    dcp.save(nested, storage_writer=writer)


@pytest.mark.dist
def test_what_fsdp_ranks_hold_becomes_rank_files_of_another_layout(tmp_path: Path, golden: Path):
    models = golden / "mcore_legacy" / "dense_gqa"
    run_ranks(2, _reshard_live, str(models / "tp2_pp2"), str(tmp_path / "out"))
    assert len(rank_dirs(tmp_path / "out")) == 4
    assert_same_weights(tmp_path / "out", models / "tp4_pp1")


def test_rank_files_of_a_model_with_other_names_are_refused(tmp_path: Path):
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.save(state_of(), storage_writer=CkptStorageWriter(tmp_path / "out", "megatron"))
    assert isinstance(_cause(raised.value), UnsupportedError) and not list(tmp_path.iterdir())


def test_wrong_arguments_are_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="unknown format"):
        CkptStorageWriter(tmp_path / "out", "pickle")
    with pytest.raises(UnsupportedError, match="not written"):
        CkptStorageWriter(tmp_path / "out", "flax")
    with pytest.raises(TypeError):
        CkptStorageWriter(tmp_path / "out", "dcp", layers=3)
    assert CkptStorageWriter.validate_checkpoint_id("gs://bucket/x")
    assert not CkptStorageWriter.validate_checkpoint_id("https://host/x")
    assert not CkptStorageWriter.validate_checkpoint_id("hdfs://bucket/x")


def test_a_region_that_nobody_writes_is_told(tmp_path: Path):
    class Forgetting(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            item = plans[0].items[0]
            chunk = type(item.tensor_data.chunk)(torch.Size((0,)), torch.Size((4,)))
            data = type(item.tensor_data)(chunk, item.tensor_data.properties, item.tensor_data.size)
            plans[0].items[0] = type(item)(item.index, item.type, tensor_data=data)
            return plans, metadata

    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.save(
            {"w": torch.arange(6)},
            storage_writer=CkptStorageWriter(tmp_path / "out"),
            planner=Forgetting(),
        )
    assert isinstance(_cause(raised.value), MissingShardError) and not list(tmp_path.iterdir())
