"""Directories of transformers' Trainer and of accelerate: weights and training state, by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dist_cp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from core.engine.catalog.facets import TrainingState
from core.errors import CheckpointingException, CorruptError
from core.opening.open import open_checkpoint
from core.verbs.checks.finding import Level
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import Job, run
from core.verbs.validate.run import validate
from tests.formats.dcp.test_folders import assert_equal
from tests.support.archives import unpacked

TRAINER = ("llama", "llama_tied_bf16", "llama_adafactor", "gpt2", "bert")
CHECKPOINT = "checkpoint-2"


def converted(source: Path, tmp_path: Path) -> dict[str, object]:
    """A checkpoint as a torch file, loaded by torch."""
    run(Job(src=source, dst=tmp_path / "out.pt", to="torch", fsync=False))
    loaded: dict[str, object] = torch.load(tmp_path / "out.pt", weights_only=False)
    return loaded


@pytest.mark.parametrize("case", TRAINER)
def test_the_optimizer_of_the_trainer_gets_the_names_that_the_live_one_had(
    frameworks: Path, tmp_path: Path, case: str
) -> None:
    source = frameworks / "trainer" / case / CHECKPOINT
    optimizer = converted(source, tmp_path)["optimizer"]
    truth: list[list[str]] = torch.load(source.parent / "truth.pt", weights_only=True)
    theirs = torch.load(source / "optimizer.pt", weights_only=True)
    names = [name for group in truth for name in group]
    expected = {
        "state": {names[number]: state for number, state in theirs["state"].items()},
        "param_groups": [
            {**group, "params": params}
            for group, params in zip(theirs["param_groups"], truth, strict=True)
        ],
    }
    assert_equal(optimizer, expected)


@pytest.mark.parametrize("case", ["ddp_bin", "fsdp1_full", "fsdp2_full", "fsdp2_sharded"])
def test_accelerates_model_and_optimizer_are_those_that_torch_gathers(
    frameworks: Path, tmp_path: Path, case: str
) -> None:
    source = frameworks / "accelerate" / case / "state"
    truth = torch.load(source.parent / "truth.pt", weights_only=False)
    ours = converted(source, tmp_path)
    model = ours["model"] if case == "fsdp2_sharded" else ours
    assert isinstance(model, dict)
    assert_equal({name: model[name] for name in truth["model"]}, truth["model"])
    optimizer = ours["optimizer"]
    assert isinstance(optimizer, dict)
    assert_equal(optimizer["state"], truth["optimizer"]["state"])
    assert {"scheduler", "random_states_0", "custom_checkpoint_0"} <= ours.keys()


def test_dcp_of_accelerates_fsdp1_holds_what_torch_loads_from_its_directories(
    frameworks: Path, tmp_path: Path
) -> None:
    source = frameworks / "accelerate" / "fsdp1_sharded" / "state"
    ours = converted(source, tmp_path)
    for folder, entry in (("pytorch_model_fsdp_0", "model"), ("optimizer_0", "optimizer")):
        dcp_to_torch_save(source / folder, tmp_path / "theirs.pt")
        theirs = torch.load(tmp_path / "theirs.pt", weights_only=False)
        assert_equal(ours[entry], theirs[entry])


def test_torch_loads_the_named_optimizer_from_dcp_into_a_model(
    frameworks: Path, tmp_path: Path
) -> None:
    source = frameworks / "trainer" / "llama" / CHECKPOINT
    run(Job(src=source, dst=tmp_path / "out", to="dcp", fsync=False))
    truth: list[list[str]] = torch.load(source.parent / "truth.pt", weights_only=True)
    weights = load_file(source / "model.safetensors")
    # A module that has the parameters under their names.
    model = torch.nn.Module()
    for name, weight in weights.items():
        *above, last = name.split(".")
        module = model
        for part in above:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, torch.nn.Parameter(weight))
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [parameters[n] for n in group]} for group in truth])
    stored: dict[str, dict[str, object]] = {}
    _load_state_dict(
        stored,
        storage_reader=dist_cp.FileSystemReader(tmp_path / "out"),
        planner=_EmptyStateDictLoadPlanner(keys={"optimizer"}),
        no_dist=True,
    )
    set_optimizer_state_dict(model, optimizer, stored["optimizer"])
    theirs = torch.load(source / "optimizer.pt", weights_only=True)
    assert_equal(optimizer.state_dict()["state"], theirs["state"])
    assert [group["lr"] for group in optimizer.param_groups] == [
        group["lr"] for group in theirs["param_groups"]
    ]


def test_names_that_shapes_leave_open_stay_numbers_with_a_note(frameworks: Path) -> None:
    # The embedding and the head of this model have one shape, and safetensors sorts them.
    opened = open_checkpoint(frameworks / "accelerate" / "ddp" / "state")
    assert "optimizer.state.0.exp_avg" in opened.catalog.tensors
    assert any("their names are uncertain" in note for note in opened.catalog.notes)


def test_an_optimizer_of_another_model_keeps_its_numbers(frameworks: Path, tmp_path: Path) -> None:
    source = frameworks / "trainer" / "llama" / CHECKPOINT
    folder = Path(shutil.copytree(source, tmp_path / CHECKPOINT))
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].T.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    opened = open_checkpoint(folder)
    assert "optimizer.state.0.exp_avg" in opened.catalog.tensors
    assert any("several orders" in note for note in opened.catalog.notes)


@pytest.mark.parametrize("to", ["safetensors", "hf", "megatron"])
def test_formats_of_weights_leave_the_state_out_and_list_its_files(
    frameworks: Path, tmp_path: Path, to: str
) -> None:
    source = frameworks / "trainer" / "llama" / CHECKPOINT
    with prepare(Job(src=source, dst=tmp_path / "out", to=to)) as prepared:
        assert not any("optimizer" in key for key in prepared.form.tensors)
        assert not prepared.form.objects or to == "megatron"
        (line,) = [line for line in prepared.dropped if line.startswith("training state")]
    files = "optimizer.pt, scheduler.pt, rng_state.pth, training_args.bin"
    assert line.endswith(f": {files}")


def test_dcp_leaves_out_the_arguments_whose_classes_it_cannot_hold(
    frameworks: Path, tmp_path: Path
) -> None:
    source = frameworks / "trainer" / "llama" / CHECKPOINT
    with prepare(Job(src=source, dst=tmp_path / "out", to="dcp")) as prepared:
        assert {"scheduler", "rng_state"} <= prepared.form.objects.keys()
        assert "training_args" not in prepared.form.objects
        assert any("training_args.bin" in line for line in prepared.dropped)


def test_state_of_the_trainer_next_to_fsdp_folders_belongs_to_the_checkpoint(
    frameworks: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(frameworks / "accelerate" / "fsdp1_sharded" / "state", folder)
    trainer = frameworks / "trainer" / "llama" / CHECKPOINT
    for name in ("scheduler.pt", "trainer_state.json", "training_args.bin"):
        shutil.copy(trainer / name, folder / name)
    (folder / "scheduler.bin").unlink()
    shutil.copy(trainer / "rng_state.pth", folder / "rng_state_0.pth")
    catalog = open_checkpoint(tmp_path).catalog
    facet = catalog.facet(TrainingState)
    assert facet is not None
    assert facet.files["scheduler"] == "scheduler.pt"
    assert facet.files["rng_state_0"] == "rng_state_0.pth"
    assert "optimizer.state.head.weight.exp_avg" in catalog.tensors


@pytest.mark.parametrize(
    "name", [*(f"trainer/{case}" for case in TRAINER), "accelerate/fsdp2_full"]
)
def test_such_directories_are_sound_at_every_level(frameworks: Path, name: str) -> None:
    folder = frameworks / name
    for level in (Level.METADATA, Level.DEEP):
        path = folder / (CHECKPOINT if name.startswith("trainer") else "state")
        result = validate(path, level=level)
        # safetensors has no checksums, of which the deepest level tells.
        messages = [finding.message for finding in result.findings]
        assert [text for text in messages if "have no checksum" not in text] == []


def test_a_damaged_optimizer_names_its_file_and_how_to_read_the_weights(
    frameworks: Path, tmp_path: Path
) -> None:
    source = frameworks / "trainer" / "llama" / CHECKPOINT
    folder = Path(shutil.copytree(source, tmp_path / CHECKPOINT))
    data = (folder / "optimizer.pt").read_bytes()
    (folder / "optimizer.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointingException) as raised:
        open_checkpoint(folder)
    assert raised.value.file == "optimizer.pt"
    assert "pass the weights file" in (raised.value.hint or "")


def test_files_of_other_programs_with_these_names_are_listed(
    frameworks: Path, tmp_path: Path
) -> None:
    source = frameworks / "trainer" / "llama" / CHECKPOINT
    folder = Path(shutil.copytree(source, tmp_path / CHECKPOINT))
    torch.save([1, 2], folder / "optimizer.pt")
    (folder / "scheduler.pt").write_text(json.dumps({"last_epoch": 2}))
    opened = open_checkpoint(folder)
    assert any("optimizer.pt was not read" in note for note in opened.catalog.notes)
    with prepare(Job(src=folder, dst=tmp_path / "out", to="dcp")) as prepared:
        listed = " ".join(prepared.dropped)
        assert "optimizer.pt" in listed
        assert "scheduler.pt" in listed


def test_a_configuration_that_is_no_json_is_refused(frameworks: Path, tmp_path: Path) -> None:
    source = frameworks / "trainer" / "llama" / CHECKPOINT
    folder = Path(shutil.copytree(source, tmp_path / CHECKPOINT))
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptError):
        open_checkpoint(folder)


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "lion_8bit", "adamw_torch_8bit"])
def test_states_of_8_bits_get_the_names_that_the_trainer_gave_them(
    optim: str, tmp_path: Path
) -> None:
    unpacked("quantized_states", tmp_path)
    source = tmp_path / "trainer" / optim
    groups = json.loads((source / "names.json").read_text())
    run(Job(src=source, dst=tmp_path / "out.pt", to="torch", fsync=False))
    result = torch.load(tmp_path / "out.pt", weights_only=False)["optimizer"]
    assert [group["params"] for group in result["param_groups"]] == groups

    # What is under a name is what the file has under the parameter's number.
    if optim == "adamw_torch_8bit":  # torchao's classes; as their parts
        run(Job(src=source / "optimizer.pt", dst=tmp_path / "parts.pt", to="torch", fsync=False))
        numbered = torch.load(tmp_path / "parts.pt", weights_only=False)
    else:
        numbered = torch.load(source / "optimizer.pt")
    for number, name in enumerate(name for group in groups for name in group):
        assert_equal(result["state"][name], numbered["state"][number])


ACCELERATE, TRAINER = "accelerate/zero2_dp2/checkpoint_0", "trainer/zero2_dp2/checkpoint-2"
FILES = {
    TRAINER: {"rng_state": "rng_state.pth", "training_args": "training_args.bin"},
    ACCELERATE: {"scheduler": "scheduler.bin", "random_states_0": "random_states_0.pkl"},
}


@pytest.mark.parametrize("case", FILES)
def test_the_state_above_goes_with_the_weights_and_the_optimizer(
    golden: Path, tmp_path: Path, case: str
) -> None:
    run(Job(src=golden / case, dst=tmp_path / "out", to="dcp", fsync=False))
    run(Job(src=tmp_path / "out", dst=tmp_path / "out.pt", to="torch", fsync=False))
    ours = torch.load(tmp_path / "out.pt", weights_only=True)
    for entry, file in FILES[case].items():
        # DCP holds no classes of transformers.
        assert (entry in ours) == (entry != "training_args")
        if entry in ours:
            # Arrays of numpy are set aside, as from any other source.
            theirs = torch.load(golden / case / file, weights_only=False)
            ours[entry] |= {key: theirs[key] for key in theirs if key.startswith("numpy")}
            assert_equal(ours[entry], theirs)
    assert any("exp_avg" in states for states in ours["optimizer"]["state"].values())


def test_formats_of_weights_list_the_state_above_by_its_files(golden: Path, tmp_path: Path) -> None:
    with prepare(Job(src=golden / TRAINER, dst=tmp_path / "out", to="hf")) as prepared:
        (line,) = [line for line in prepared.dropped if line.startswith("training state")]
        assert "trainer_state.json" in {image.path for image in prepared.images}
    assert line.endswith(": checkpoint-2/rng_state.pth, checkpoint-2/training_args.bin")


def test_an_entry_that_deepspeed_has_itself_is_listed(golden: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(golden / ACCELERATE, tmp_path / "state"))
    (model,) = source.glob("pytorch_model/mp_rank_00_model_states.pt")
    content = torch.load(model, weights_only=False)
    torch.save({**content, "scheduler": "of the script"}, model)
    shutil.copy(source / "scheduler.bin", source / "optimizer.bin")
    with prepare(Job(src=source, dst=tmp_path / "out", to="dcp")) as prepared:
        assert any("state/scheduler.bin was not read" in note for note in prepared.notes)
        listed = " ".join(prepared.dropped)
    assert "state/scheduler.bin" in listed
    assert "state/optimizer.bin" in listed
