"""Two models in one state of accelerate: each with its optimizer, and written to its own file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.errors import CorruptError
from core.opening.open import open_checkpoint
from core.verbs.convert.run import Job, run


@pytest.mark.parametrize("state", ["state", "state_bin"])
def test_each_optimizer_has_the_names_of_its_own_model(
    state: str, two_models: Path, tmp_path: Path
) -> None:
    run(Job(src=two_models / state, dst=tmp_path / "one.pt", to="torch"))
    ours = torch.load(tmp_path / "one.pt", weights_only=True)
    truth = torch.load(two_models / "truth.pt")
    for entry, prefix, optimizer in zip(
        ("optimizer", "optimizer_1"), ("", "model_1."), truth, strict=True
    ):
        states = ours[entry]["state"]
        assert states.keys() == {f"{prefix}{name}" for name in optimizer["state"]}
        for name, state in optimizer["state"].items():
            for kind, tensor in state.items():
                assert torch.equal(states[f"{prefix}{name}"][kind], tensor), (entry, name, kind)


@pytest.mark.parametrize("state", ["state", "state_bin"])
def test_each_model_is_written_to_a_file_of_its_own(
    state: str, two_models: Path, tmp_path: Path
) -> None:
    run(Job(src=two_models / state, dst=tmp_path / "out", to="safetensors"))
    for name in ("model.safetensors", "model_1.safetensors"):
        before, after = load_file(two_models / "state" / name), load_file(tmp_path / "out" / name)
        assert before.keys() == after.keys()
        assert all(torch.equal(after[key], before[key]) for key in before)


def test_optimizers_keep_their_numbers_if_it_is_unknown_whose_they_are(
    two_models: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(two_models / "state", tmp_path / "state"))
    (folder / "optimizer.bin").unlink()
    opened = open_checkpoint(folder)
    opened.store.close()
    assert "optimizer_1.state.0.exp_avg" in opened.catalog.tensors
    assert any(
        "which of its 2 models the optimizer belongs to" in note for note in opened.catalog.notes
    )


def test_a_second_model_in_a_torch_file_is_told_from_the_first(
    two_models: Path, tmp_path: Path
) -> None:
    run(Job(src=two_models / "state_bin", dst=tmp_path / "one.pt", to="torch"))
    ours = torch.load(tmp_path / "one.pt", weights_only=True)
    first = torch.load(two_models / "state_bin" / "pytorch_model.bin")
    second = torch.load(two_models / "state_bin" / "pytorch_model_1.bin")
    assert all(torch.equal(ours[key], tensor) for key, tensor in first.items())
    assert ours["model_1"].keys() == second.keys()
    assert all(torch.equal(ours["model_1"][key], tensor) for key, tensor in second.items())

    # Neither a model that has the name of another one nor a damaged one goes unnoticed.
    folder = Path(shutil.copytree(two_models / "state_bin", tmp_path / "state"))
    torch.save({**first, "model_1": torch.zeros(1)}, folder / "pytorch_model.bin")
    with pytest.raises(CorruptError, match="the first model already has an entry with this name"):
        open_checkpoint(folder)
    torch.save(first, folder / "pytorch_model.bin")
    (folder / "pytorch_model_1.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(CorruptError):
        open_checkpoint(folder)
