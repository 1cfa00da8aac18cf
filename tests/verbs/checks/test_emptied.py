"""Parameters of shape [0], which ZeRO-3 leaves where it was not gathered, in every format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemWriter, save

from core.engine.catalog.emptied import EMPTIED_HINT
from core.errors import CorruptError
from core.verbs.convert.job import Job
from core.verbs.convert.run import run
from core.verbs.merge.request import Merge
from core.verbs.validate.run import validate
from tests.formats.deepspeed.deepspeed_samples import Zero
from tests.support.archives import unpacked

State = dict[str, torch.Tensor]
Q = "model.layers.0.self_attn.q_proj.weight"
STUB = torch.empty(0, dtype=torch.bfloat16)


def in_dcp(state: State, folder: Path) -> None:
    save(state, storage_writer=FileSystemWriter(folder))


def in_zarr(state: State, folder: Path) -> None:
    torch.save(state, folder / "source.pt")
    run(Job(src=folder / "source.pt", dst=folder / "zarr3", to="zarr3", fsync=False))
    (folder / "source.pt").unlink()


WRITERS: dict[str, Callable[[State, Path], None]] = {
    "safetensors": lambda state, folder: save_file(state, folder / "model.safetensors"),
    "torch_bin": lambda state, folder: torch.save(state, folder / "pytorch_model.bin"),
    "torch": lambda state, folder: torch.save({"model": state}, folder / "step.pt"),
    "dcp": in_dcp,
    "zarr3": in_zarr,
}


def write(folder: Path, format: str, state: State) -> Path:
    folder.mkdir()
    WRITERS[format](state, folder)
    return folder / {"torch": "step.pt", "zarr3": "zarr3"}.get(format, "")


def codes(folder: Path) -> list[tuple[str, str | None]]:
    return [(item.code, item.key) for item in validate(folder).findings]


@pytest.mark.parametrize("format", WRITERS)
def test_an_emptied_parameter_is_found_and_not_converted_to_a_model(
    tmp_path: Path, format: str
) -> None:
    state = {Q: STUB, "model.norm.weight": torch.ones(4), "cls_token": STUB.clone()}
    folder = write(tmp_path / "x", format, state)
    keys = [str(key).removeprefix("model.model.") for code, key in codes(folder) if code == "CK210"]
    assert len(keys) == 2 and any(key.endswith("q_proj.weight") for key in keys)
    for options in ({"to": "hf"}, {"to": "megatron"}, {"to": "dcp", "names": "hf"}):
        with pytest.raises(CorruptError, match=r"2 parameters, .* are empty") as caught:
            run(Job(src=folder, dst=tmp_path / "out", fsync=False, **options))  # type: ignore[arg-type]
        assert caught.value.hint == EMPTIED_HINT
    report = run(Job(src=folder, dst=tmp_path / "copy", to="dcp", fsync=False))
    assert any("2 parameters, such as" in note for note in report.notes)


@pytest.mark.parametrize("format", WRITERS)
def test_tensors_that_are_empty_by_intent_are_no_finding(tmp_path: Path, format: str) -> None:
    state = {
        Q: torch.ones(4, 4),
        "model.layers.0.self_attn.q_proj.g_idx": torch.empty(0, dtype=torch.int32),
        "model.layers.0.self_attn._extra_state": torch.empty(0, dtype=torch.uint8),
        "model.layers.0.cache": torch.empty(0),
        "model.layers.0.wide.weight": torch.empty(0, 4),
        "optimizer.state.0.weight": torch.empty(0),
    }
    folder = write(tmp_path / "x", format, state)
    assert not [code for code, _ in codes(folder) if code == "CK210"]


def test_what_is_left_out_does_not_count(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", "safetensors", {Q: STUB, "model.norm.weight": torch.ones(4)})
    report = run(
        Job(src=folder, dst=tmp_path / "out", to="dcp", exclude=("*q_proj*",), fsync=False)
    )
    assert not any("no elements" in note for note in report.notes)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of peft beside its base."""
    return unpacked("lora", tmp_path_factory.mktemp("adapters")) / "lora" / "llama"


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_an_adapter_saved_under_zero_3_is_found_and_not_merged(
    adapter: Path, tmp_path: Path, format: str
) -> None:
    state = load_file(adapter / "adapter" / "adapter_model.safetensors")
    emptied = {key: torch.empty(0, dtype=tensor.dtype) for key, tensor in state.items()}
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = json.loads((adapter / "adapter" / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if format == "bin":
        torch.save(emptied, folder / "adapter_model.bin")
    else:
        save_file(emptied, folder / "adapter_model.safetensors")
    assert {key for code, key in codes(folder) if code == "CK210"} == set(state)
    for merge, base in (
        (Merge(method="lora", others=(folder,)), adapter / "base"),
        (Merge(method="average", others=(adapter / "adapter",)), folder),
    ):
        with pytest.raises(CorruptError, match=r"are empty \(shape \[0\]\)"):
            run(Job(src=base, dst=tmp_path / "out", to="safetensors", merge=merge, fsync=False))


def test_the_model_files_of_zero_3_are_what_they_should_be(tmp_path: Path) -> None:
    folder = Zero(3, 2, groups=({"layer.weight": (4, 4), "layer.bias": (4,)},)).write(
        tmp_path / "x"
    )
    assert not codes(folder)
    assert not codes(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
