"""Runs without ZeRO, and optimizers that cannot be read: the weights of the model files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.errors import CheckpointingException, CorruptError, MissingShardError, UnsupportedError
from core.files.store import LocalStore
from core.formats.deepspeed import format as deepspeed
from core.verbs.convert.job import Job
from core.verbs.convert.run import run
from core.verbs.merge.request import build_merge
from tests.formats.deepspeed.deepspeed_samples import MODEL, Zero, values
from tests.support.deepspeed_files import edited
from tests.support.materialize import tensor_bytes


def forget_shapes(file: str, content: Any) -> None:
    content.pop("param_shapes", None)


@pytest.mark.parametrize("case", ["pipeline_zero1", "pipeline_tp2_zero1", "autotp_zero1"])
def test_masters_without_recorded_shapes_are_those_of_ds_to_universal(
    deepspeed_parallel: Path, tmp_path: Path, case: str
) -> None:
    """BF16_Optimizer without ZeRO writes the same files, but no ``param_shapes``."""
    store = edited(deepspeed_parallel / case / "global_step2", tmp_path / "x", forget_shapes)
    catalog = deepspeed.read(store)
    truth = torch.load(deepspeed_parallel / case / "truth.pt", weights_only=True)
    for name, files in truth.items():
        for state, content in files.items():
            key = name if state == "fp32" else f"optimizer.state.{name}.{state}"
            wanted = content["param"] if isinstance(content, dict) else content
            assert catalog.tensors[key].shape == tuple(wanted.shape), key
            assert (
                tensor_bytes(catalog, store, key).tobytes() == wanted.detach().numpy().tobytes()
            ), key


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_shapes_come_from_the_model_file(tmp_path: Path, n_ranks: int) -> None:
    run = Zero(1, n_ranks)
    store = LocalStore(run.write(tmp_path / "x", forget_shapes))
    catalog = deepspeed.read(store)
    for group in run.groups:
        for name, shape in group.items():
            assert catalog.tensors[name].shape == shape
            wanted = values(name, shape).numpy().tobytes()
            assert tensor_bytes(catalog, store, name).tobytes() == wanted


def test_without_shapes_a_parameter_of_another_size_is_named(tmp_path: Path) -> None:
    def change(file: str, content: dict[str, Any]) -> None:
        forget_shapes(file, content)
        if file == MODEL:
            content["module"]["wide"] = torch.zeros(4, 11)

    folder = Zero(1, 2).write(tmp_path / "x", change)
    with pytest.raises(CorruptError, match="records 33 elements") as caught:
        deepspeed.read(LocalStore(folder))
    assert caught.value.key == "wide"


LAYERS = {0: {"weight": (6, 4)}, 2: {"weight": (4, 4), "bias": (4,)}, 5: {"weight": (3, 4)}}


def write_pipeline(folder: Path, pp: int) -> Path:
    """Write a float32 pipeline without ZeRO: files of layers, and an optimizer of each stage."""
    folder.mkdir()
    stages = [list(LAYERS)[rank::pp] for rank in range(pp)]
    for rank, layers in enumerate(stages):
        names = [f"{layer}.{name}" for layer in layers for name in LAYERS[layer]]
        state = {number: {"exp_avg": torch.full((2,), rank + 0.5)} for number in range(len(names))}
        content = {
            "module": None,
            "param_shapes": None,
            "optimizer": {
                "state": state,
                "param_groups": [{"lr": 0.5, "params": list(range(len(names)))}],
            },
            "global_steps": 3,
            "dp_world_size": 2,
            "mp_world_size": pp,
            "checkpoint_parallel_dimensions": {"tp_degree": 1, "pp_degree": pp},
            "ds_config": {},
        }
        torch.save(content, folder / f"mp_rank_{rank:02d}_model_states.pt")
    for layer, shapes in LAYERS.items():
        tensors = {name: values(f"{layer}{name}", shape) for name, shape in shapes.items()}
        torch.save(tensors, folder / f"layer_{layer:02d}-model_00-model_states.pt")
    return folder


@pytest.mark.parametrize("pp", [1, 2])
def test_a_pipeline_without_zero_has_the_weights_of_its_layers(tmp_path: Path, pp: int) -> None:
    store = LocalStore(write_pipeline(tmp_path / "x", pp))
    catalog = deepspeed.read(store)
    for layer, shapes in LAYERS.items():
        for name, shape in shapes.items():
            data = tensor_bytes(catalog, store, f"{layer}.{name}").tobytes()
            assert data == values(f"{layer}{name}", shape).numpy().tobytes()
    for rank in range(pp):
        part = "" if pp == 1 else f"model_parallel_rank_{rank}."
        data = tensor_bytes(catalog, store, f"optimizer.{part}state.0.exp_avg").tobytes()
        assert data == torch.full((2,), rank + 0.5).numpy().tobytes()
    assert run(Job(src=tmp_path / "x", dst=tmp_path / "st", to="safetensors", optim="drop"))


@pytest.mark.parametrize("optim", ["carry", "drop"])
def test_a_pipeline_without_zero_that_lacks_a_layer_is_refused(tmp_path: Path, optim: Any) -> None:
    folder = write_pipeline(tmp_path / "x", 2)
    (folder / "layer_02-model_00-model_states.pt").unlink()
    with pytest.raises(MissingShardError, match="have 4 parameters, but .* 2 tensors"):
        run(Job(src=folder, dst=tmp_path / "dcp", to="dcp", optim=optim))


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    torch.save({}, path)


def rewrite_state(path: Path) -> None:
    content = torch.load(path, weights_only=False)
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] = torch.zeros(3, 3)
    torch.save(content, path)


@pytest.mark.each_value
@pytest.mark.parametrize("damage", [remove, cut, empty, rewrite_state])
@pytest.mark.parametrize("stage", [1, 2])
def test_an_unreadable_optimizer_does_not_block_weights_alone(
    tmp_path: Path, stage: int, damage: Callable[[Path], None]
) -> None:
    sample = Zero(stage, 3, buffers={"freq": torch.arange(3.0)}, shared={"head": "embed"})
    folder = sample.write(tmp_path / "x")
    damage(folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointingException):
        run(Job(src=folder, dst=tmp_path / "all", to="dcp"))
    report = run(Job(src=folder, dst=tmp_path / "w.pt", to="torch", optim="drop"))
    (note,) = [note for note in report.notes if "the optimizer cannot be read" in note]
    assert "zero_pp_rank_1" in note and "in those files' precision" in note
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    for name, tensor in torch.load(folder / MODEL, weights_only=False)["module"].items():
        assert torch.equal(weights[name], tensor) and weights[name].dtype == tensor.dtype
    # A merge drops the optimizers of all sources, and notes which weights it has taken.
    sound = sample.write(tmp_path / "sound")
    for sources in ((folder, sound), (sound, folder)):
        merge = build_merge(sources, average=True)
        dst = tmp_path / "merged"
        report = run(Job(src=sources[0], dst=dst, to="dcp", merge=merge, force=True))
        (note,) = [note for note in report.notes if "the optimizer cannot be read" in note]
        assert "zero_pp_rank_1" in note


@pytest.mark.parametrize(
    "case", ["pipeline_zero1", "pipeline_tp2_zero1", "autotp_zero1", "moe_zero1"]
)
def test_weights_alone_have_the_shapes_of_the_masters(
    deepspeed_parallel: Path, tmp_path: Path, case: str
) -> None:
    folder = tmp_path / "x"
    shutil.copytree(deepspeed_parallel / case / "global_step2", folder)
    wanted = deepspeed.read(LocalStore(folder))
    for path in folder.glob("*zero_pp_rank_0*optim_states.pt"):
        path.unlink()
    store = LocalStore(folder)
    catalog = deepspeed.read_weights(store)
    assert catalog.tensors
    for key, tensor in catalog.tensors.items():
        if key in wanted.tensors:  # the files of tied layers have names of their own
            assert tensor.shape == wanted.tensors[key].shape
    lacking = {key for key in wanted.tensors if not key.startswith("optimizer.")} - {
        *catalog.tensors
    }
    assert all(key.startswith("tied_modules.") for key in lacking)


def test_zero_3_has_its_weights_in_the_optimizer_files_only(tmp_path: Path) -> None:
    folder = Zero(3, 2).write(tmp_path / "x")
    (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(MissingShardError, match="data-parallel rank 0"):
        run(Job(src=folder, dst=tmp_path / "dcp", to="dcp", optim="drop"))


def test_states_on_nvme_do_not_block_weights_alone(tmp_path: Path) -> None:
    folder = Zero(2, 2).write(tmp_path / "x")
    (folder / "offloaded_tensors").mkdir()
    (folder / "offloaded_tensors" / "a.swp").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match="NVMe"):
        run(Job(src=folder, dst=tmp_path / "all", to="dcp"))
    assert run(Job(src=folder, dst=tmp_path / "dcp", to="dcp", optim="drop"))


@pytest.mark.parametrize("damage", [remove, cut, empty])
def test_a_distributed_optimizer_of_megatron_does_not_block_weights_alone(
    golden: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    source = golden / "mcore_legacy" / "dense_gqa" / "tp2_pp1_dp2_distopt"
    shutil.copytree(source, tmp_path / "x")
    damage(next((tmp_path / "x").rglob("distrib_optim.pt")))
    with pytest.raises(CheckpointingException):
        run(Job(src=tmp_path / "x", dst=tmp_path / "all", to="torch_dist"))
    for folder, name in ((source, "wanted"), (tmp_path / "x", "weights")):
        run(Job(src=folder, dst=tmp_path / name, to="safetensors", optim="drop"))
    wanted = load_file(tmp_path / "wanted" / "model.safetensors")
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    assert wanted.keys() == weights.keys()
    assert all(torch.equal(wanted[key], weights[key]) for key in wanted)
