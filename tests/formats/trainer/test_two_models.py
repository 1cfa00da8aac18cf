"""Two models in one state of accelerate: each with its optimizer, and written to its own file."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from core.convert.run import Job, run
from core.opening.open import open_checkpoint


def test_each_optimizer_has_the_names_of_its_own_model(two_models: Path, tmp_path: Path) -> None:
    run(Job(src=two_models / "state", dst=tmp_path / "one.pt", to="torch"))
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


def test_each_model_is_written_to_a_file_of_its_own(two_models: Path, tmp_path: Path) -> None:
    run(Job(src=two_models / "state", dst=tmp_path / "out", to="safetensors"))
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
    assert any("which of 2 models is its own" in note for note in opened.catalog.notes)
