"""Training state that the Trainer and accelerate save above a directory of DeepSpeed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from core.convert.prepare import prepare
from core.convert.run import Job, run
from tests.formats.dcp.test_folders import assert_equal

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
