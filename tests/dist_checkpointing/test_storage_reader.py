"""torch.distributed.checkpoint.load reads every format through CkptStorageReader, however ranks cut
the tensors.
"""

from __future__ import annotations

import io
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from core.dist_checkpointing._values.stand_in import StandIn
from core.dist_checkpointing.storage_reader import CkptLoadPlanner, CkptStorageReader
from core.errors import CorruptError, MissingShardError, UnsafeError, UnsupportedError, UsageError
from tests.dist_checkpointing.ranks import run_ranks
from tests.megatron.support.megatron_gold import oracle
from tests.support.real_readers import (
    Tensors,
    of_tensor,
    read_dcp,
    read_safetensors,
    read_torch,
    read_zarr,
)

FLAT = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
GOLD = {
    "zarr": ("mcore0121_zarr/dense_gqa/tp2_pp2_optim", read_zarr),
    "torch_dist": ("mcore0161_torch_dist/dense_gqa/tp2_pp2", read_dcp),
    "common_object": ("mcore_torch_dist/dense_gqa/tp2_pp2", read_dcp),
    "safetensors": ("hf/llama/safetensors_sharded", read_safetensors),
    "fsdp2": ("torch_dcp/fsdp2_dp2", read_dcp),
    "tp2_fsdp2": ("torch_dcp/tp2_fsdp2_dp2", read_dcp),
    "torch": ("hf/llama/torch_single/model_zip.pt", read_torch),
}
"""Checkpoints of other software, and what reads them beside this project."""
PLACEMENTS = {
    1: [(Shard(0),), (Shard(1),), (Replicate(),)],
    2: [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Shard(0))],
}
"""Axes of the mesh → placements that the tensors get in turn."""


def empty_state(metadata: Metadata) -> dict[str, Any]:
    """A flat state dict with an entry for everything."""
    return {
        key: torch.zeros(item.size, dtype=item.properties.dtype)
        if isinstance(item, TensorStorageMetadata)
        else None
        for key, item in metadata.state_dict_metadata.items()
    }


def load_all(path: Path, *, tensors_only: bool = False, **options: Any) -> dict[str, Any]:
    """Everything that a reader shows."""
    state = empty_state(CkptStorageReader(path, **options).read_metadata())
    if tensors_only:
        state = {key: item for key, item in state.items() if item is not None}
    dcp.load(state, storage_reader=CkptStorageReader(path, **options), planner=FLAT, no_dist=True)
    return state


def tensors_of(state: dict[str, Any]) -> Tensors:
    return {key: of_tensor(item) for key, item in state.items() if isinstance(item, torch.Tensor)}


@pytest.mark.parametrize("name", GOLD)
def test_one_process_loads_what_the_real_reader_reads(golden: Path, name: str):
    path, real = GOLD[name]
    assert (
        tensors_of(load_all(golden / path, tensors_only=True)).items()
        >= real(golden / path).items()
    )


def _read_cut(
    rank: int, world: int, path: str, mesh_shape: tuple[int, ...], options: dict[str, Any]
) -> Tensors | None:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[-len(mesh_shape) :])
    reader = CkptStorageReader(path, **options)
    state = {
        key: item for key, item in empty_state(reader.read_metadata()).items() if item is not None
    }
    for number, (key, item) in enumerate(state.items()):
        if isinstance(item, torch.Tensor) and item.is_floating_point() and item.dim():
            kinds = PLACEMENTS[len(mesh_shape)]
            placements = [
                placement
                if not isinstance(placement, Shard) or placement.dim < item.dim()
                else Shard(0)
                for placement in kinds[number % len(kinds)]
            ]
            state[key] = distribute_tensor(item, mesh, placements)
    dcp.load(state, storage_reader=reader, planner=FLAT)
    tensors = {
        key: item.full_tensor() if isinstance(item, DTensor) else item
        for key, item in state.items()
    }
    return tensors_of(tensors) if rank == 0 else None


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "mesh_shape"),
    [
        ("zarr", (2,)),
        ("zarr", (2, 2)),
        ("torch_dist", (4,)),
        ("torch_dist", (2, 2)),
        ("safetensors", (3,)),
        ("safetensors", (2, 2)),
        ("fsdp2", (4,)),
        ("tp2_fsdp2", (3,)),
        ("torch", (2, 2)),
    ],
)
def test_ranks_with_dtensors_of_any_placement_load_the_global_tensors(
    golden: Path, name: str, mesh_shape: tuple[int, ...]
):
    path, real = GOLD[name]
    world = 1
    for n in mesh_shape:
        world *= n
    tensors = run_ranks(world, _read_cut, str(golden / path), mesh_shape, {})[0]
    assert tensors.items() >= real(golden / path).items()


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["tp2_pp2", "tp4_pp1", "tp2_pp2_vpp2"])
def test_megatron_rank_files_load_as_the_true_global_tensors(golden: Path, layout: str):
    true = oracle(golden, "dense_gqa")
    path = golden / "mcore_legacy" / "dense_gqa" / layout
    tensors = run_ranks(2, _read_cut, str(path), (2,), {"root": "model"})[0]
    both = {key: item for key, item in tensors.items() if key in true}
    assert len(both) > 2
    for key, (_, shape, data) in both.items():
        assert (shape, data) == (true[key].shape[:-1], true[key].tobytes())


def test_megatron_checkpoints_of_any_format_load_alike_under_the_names_of_transformers(
    golden: Path,
):
    paths = [
        "mcore_legacy/dense_gqa/tp2_pp2",
        "mcore0121_zarr/dense_gqa/tp4_pp1",
        "mcore0161_torch_dist/dense_gqa/tp2_pp2",
    ]
    tensors = [
        tensors_of(load_all(golden / path, names="hf:qwen2", tensors_only=True)) for path in paths
    ]
    assert "model.layers.0.self_attn.q_proj.weight" in tensors[0]
    assert tensors[0] == tensors[1] == tensors[2]


class Net(torch.nn.Module):
    """Uneven sizes, a tied and a persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 5)
        self.second = torch.nn.Linear(5, 3, bias=False)
        self.register_buffer("seen", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def trained() -> tuple[Net, torch.optim.Optimizer]:
    """A model after two steps, the same in every process."""
    torch.manual_seed(5)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.125)
    for _ in range(2):
        net(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def written(folder: Path, kind: str) -> Path:
    """A trained model and its optimizer in a file of torch, safetensors or DCP, keys as
    get_state_dict has them.
    """
    net, optimizer = trained()
    model, states = get_state_dict(net, optimizer)
    if kind == "torch":
        torch.save({"model": model, "optim": states, "step": 2}, folder / "all.pt")
        return folder / "all.pt"
    if kind == "dcp":
        dcp.save(
            {"model": model, "optim": states, "step": 2}, checkpoint_id=folder / "dcp", no_dist=True
        )
        return folder / "dcp"
    save_file(dict(model), folder / "model.safetensors")
    return folder / "model.safetensors"


def _load_fsdp(rank: int, world: int, path: str, with_optimizer: bool, prefix: str) -> Any:
    mesh = init_device_mesh("cpu", (world,))
    net = Net()
    fully_shard(net.first, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
    model, states = get_state_dict(net, optimizer)
    state: dict[str, Any] = {"model": model}
    if with_optimizer:
        state |= {"optim": states, "step": -1}
    dcp.load(state, storage_reader=CkptStorageReader(path, prefix=prefix))
    set_state_dict(
        net, optimizer, model_state_dict=state["model"], optim_state_dict=state.get("optim", states)
    )
    full = {
        key: item.full_tensor() if isinstance(item, DTensor) else item
        for key, item in net.state_dict().items()
    }
    moments = {
        f"{key}.{name}": value.full_tensor() if isinstance(value, DTensor) else value
        for key, of_key in get_state_dict(net, optimizer)[1]["state"].items()
        for name, value in of_key.items()
    }
    return tensors_of(full), tensors_of(moments), optimizer.param_groups[0]["lr"], state.get("step")


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_fsdp2_resumes_model_and_optimizer(tmp_path: Path, kind: str, world: int):
    net, optimizer = trained()
    states = get_state_dict(net, optimizer)[1]["state"]
    moments = {
        f"{key}.{name}": value for key, of_key in states.items() for name, value in of_key.items()
    }
    for loaded in run_ranks(world, _load_fsdp, str(written(tmp_path, kind)), True, ""):
        assert loaded == (tensors_of(net.state_dict()), tensors_of(moments), 0.125, 2)


@pytest.mark.dist
def test_fsdp2_starts_from_a_safetensors_file_with_shorter_keys(tmp_path: Path):
    net, _ = trained()
    for loaded in run_ranks(2, _load_fsdp, str(written(tmp_path, "safetensors")), False, "model."):
        assert loaded[0] == tensors_of(net.state_dict())


def test_a_part_of_the_checkpoint_is_loaded_without_its_first_name(tmp_path: Path):
    net, _ = trained()
    other = Net()
    dcp.load(
        other.state_dict(),
        storage_reader=CkptStorageReader(written(tmp_path, "torch"), root="model"),
    )
    assert tensors_of(dict(other.state_dict())) == tensors_of(dict(net.state_dict()))


def test_nesting_is_rebuilt_without_a_state_dict_to_fill(tmp_path: Path):
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    tree = {
        "a": [torch.arange(3), {"b": torch.ones(2)}],
        "c": {"d": 5, "e": [1, 2]},
        "f": torch.tensor(2.5),
    }
    torch.save(tree, tmp_path / "tree.pt")
    state: dict[str, Any] = {}
    reader = CkptStorageReader(tmp_path / "tree.pt", prefix="top.")
    _load_state_dict(
        state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    top = state["top"]
    assert torch.equal(top["a"][0], tree["a"][0]) and torch.equal(
        top["a"][1]["b"], tree["a"][1]["b"]
    )
    assert top["c"] == tree["c"] and torch.equal(top["f"], tree["f"])


def test_other_objects_come_back_live(tmp_path: Path):
    value = {
        "args": Namespace(lr=0.5, sizes=(1, 2)),
        "rng": [torch.arange(4, dtype=torch.uint8)],
        "names": {"x", "y"},
    }
    torch.save({"extra": value}, tmp_path / "extra.pt")
    state = load_all(tmp_path / "extra.pt")
    assert state["extra.args"] == value["args"] and state["extra.names"] == value["names"]
    assert torch.equal(state["extra.rng.0"], value["rng"][0])


def test_tensors_inside_the_objects_of_dcp_come_back(tmp_path: Path):
    value = {"inside": (torch.arange(6).reshape(2, 3).t(), "text")}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"entry": value}, checkpoint_id=tmp_path / "c", planner=planner, no_dist=True)
    state = load_all(tmp_path / "c")
    assert (
        torch.equal(state["entry"]["inside"][0], value["inside"][0])
        and state["entry"]["inside"][1] == "text"
    )


class Alien:
    """A class that nobody registered."""


def test_an_object_of_an_unknown_class_is_a_stand_in_and_no_class_is_called(tmp_path: Path):
    dcp.save({"w": torch.ones(2), "alien": Alien()}, checkpoint_id=tmp_path / "c", no_dist=True)
    state = {"w": torch.zeros(2), "alien": None}
    dcp.load(state, storage_reader=CkptStorageReader(tmp_path / "c"), no_dist=True)
    assert torch.equal(state["w"], torch.ones(2))
    assert isinstance(state["alien"], StandIn) and state["alien"].name == "Alien"


class Attack:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch attacked",)


def test_a_dangerous_object_is_refused_only_if_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    dcp.save({"w": torch.ones(2), "attack": Attack()}, checkpoint_id=tmp_path / "c", no_dist=True)
    state = {"w": torch.zeros(2)}
    dcp.load(state, storage_reader=CkptStorageReader(tmp_path / "c"), no_dist=True)
    assert torch.equal(state["w"], torch.ones(2))
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.load({"attack": None}, storage_reader=CkptStorageReader(tmp_path / "c"), no_dist=True)
    assert isinstance(_cause(raised.value), UnsafeError) and not Path("attacked").exists()


def _cause(error: dcp.CheckpointException) -> BaseException:
    """What a rank raised."""
    return next(iter(error.failures.values()))[0]


@pytest.mark.parametrize("planner", [CkptLoadPlanner, None])
def test_a_key_that_is_not_there_is_refused(tmp_path: Path, planner: Any):
    path = written(tmp_path, "safetensors")
    state = {"first.wieght": torch.zeros(5, 6)}
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.load(
            state,
            storage_reader=CkptStorageReader(path),
            planner=planner and planner(),
            no_dist=True,
        )
    error = _cause(raised.value)
    if planner is not None:
        assert isinstance(error, MissingShardError) and "first.weight" in str(error)
    assert not state["first.wieght"].any()


def test_a_key_with_another_prefix_is_named(tmp_path: Path):
    with pytest.raises(dcp.CheckpointException, match=r"Similar keys: second\.weight"):
        dcp.load(
            {"model": {"second.weight": torch.zeros(3, 5)}},
            storage_reader=CkptStorageReader(written(tmp_path, "safetensors")),
            planner=CkptLoadPlanner(),
            no_dist=True,
        )


def test_keys_may_be_left_out_if_the_planner_allows_it(tmp_path: Path):
    state = {"first.bias": torch.zeros(5), "new": torch.full((2,), 3.0)}
    planner = CkptLoadPlanner(allow_partial_load=True)
    dcp.load(
        state,
        storage_reader=CkptStorageReader(written(tmp_path, "safetensors")),
        planner=planner,
        no_dist=True,
    )
    assert torch.equal(state["first.bias"], trained()[0].first.bias) and state["new"].tolist() == [
        3,
        3,
    ]


def test_tensors_are_cast_to_the_dtype_of_the_program_unless_that_is_refused(tmp_path: Path):
    save_file({"w": torch.randn(7, 3)}, tmp_path / "w.safetensors")
    true = load_all(tmp_path / "w.safetensors")["w"]
    state = {"w": torch.zeros(3, 7, dtype=torch.bfloat16).t()}
    dcp.load(state, storage_reader=CkptStorageReader(tmp_path / "w.safetensors"), no_dist=True)
    assert torch.equal(state["w"], true.bfloat16()) and not state["w"].is_contiguous()
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.load(
            state,
            storage_reader=CkptStorageReader(tmp_path / "w.safetensors", casts=False),
            no_dist=True,
        )
    assert isinstance(_cause(raised.value), UnsupportedError)


def test_damage_is_found_while_loading(tmp_path: Path):
    file = written(tmp_path, "torch")
    data = bytearray(file.read_bytes())
    at = data.find(trained()[0].first.weight.detach().numpy().tobytes())
    assert at > 0
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.load(
            {"model": Net().state_dict()}, storage_reader=CkptStorageReader(file), no_dist=True
        )
    assert isinstance(_cause(raised.value), CorruptError)


@pytest.mark.parametrize("name", ["fsdp2", "zarr"])
def test_metadata_has_the_version_that_torch_gives_its_own(golden: Path, name: str):
    planner = DefaultLoadPlanner(allow_partial_load=True)
    reader = CkptStorageReader(golden / GOLD[name][0])
    dcp.load({"new": torch.zeros(1)}, storage_reader=reader, planner=planner, no_dist=True)
    assert planner.metadata.version == CURRENT_DCP_VERSION


def test_reset_turns_to_another_checkpoint(tmp_path: Path, golden: Path):
    reader = CkptStorageReader(golden / GOLD["zarr"][0])
    before = reader.load_id
    assert CkptStorageReader.validate_checkpoint_id(tmp_path)
    assert CkptStorageReader.validate_checkpoint_id("s3://bucket/ckpt")
    assert not CkptStorageReader.validate_checkpoint_id(tmp_path / "missing")
    path = written(tmp_path, "safetensors")
    state = {"seen": torch.tensor(0)}
    dcp.load(state, checkpoint_id=path, storage_reader=reader, no_dist=True)
    assert state["seen"].item() == 7 and reader.checkpoint_id == path and reader.load_id != before


def test_a_root_is_read_at_the_iteration_that_is_asked_for(tmp_path: Path):
    for iteration in (3, 5):
        folder = tmp_path / f"step-{iteration}"
        dcp.save({"w": torch.full((2,), float(iteration))}, checkpoint_id=folder, no_dist=True)
    for options, value in (({}, 5), ({"iteration": 3}, 3)):
        assert load_all(tmp_path, **options)["w"].tolist() == [value, value]


def test_renamed_keys_and_excluded_tensors(tmp_path: Path):
    path = written(tmp_path, "safetensors")
    state = load_all(path, rename=[("^first", "one")], exclude=("second.*",))
    assert set(state) == {"one.weight", "one.bias", "seen"}
    with pytest.raises(UsageError, match="no entry 'modle'"):
        CkptStorageReader(path, root="modle").read_metadata()
    with pytest.raises(TypeError):
        CkptStorageReader(path, layers=3)


def test_a_missing_file_is_told_by_name(tmp_path: Path):
    path = written(tmp_path, "dcp")
    shutil.move(next(path.glob("*.distcp")), tmp_path / "away")
    with pytest.raises(MissingShardError, match=r"__0_0\.distcp"):
        CkptStorageReader(path).read_metadata()


def test_a_planner_gets_objects_as_streams_that_weights_only_loads(tmp_path: Path):
    torch.save({"n": {"step": 3, "betas": (0.9, 0.99)}}, tmp_path / "n.pt")
    got: dict[str, object] = {}

    class Careful(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            got[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    reader = CkptStorageReader(tmp_path / "n.pt")
    dcp.load(
        {"n": {"step": 0, "betas": ()}}, storage_reader=reader, planner=Careful(), no_dist=True
    )
    assert got == {"n.step": 3, "n.betas": (0.9, 0.99)}
