"""What Lightning's Trainer and Fabric save, as files and as directories: read with everything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from core.errors import UnsupportedError
from core.opening.open import open_checkpoint
from core.verbs.convert.run import Job, run
from tests.formats.dcp.test_lightning_meta import assert_same

DIRECTORIES = [
    "fabric_fsdp/state.ckpt",
    "fabric_model_parallel/state.ckpt",
]


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_directory_becomes_the_file_that_lightning_consolidates(
    lightning_runs: Path, tmp_path: Path, name: str
) -> None:
    source = lightning_runs / name
    run(Job(src=source, dst=tmp_path / "one.pt", to="torch", verify=True))
    theirs = torch.load(source.parent / "consolidated.pt", weights_only=False)
    assert_same(torch.load(tmp_path / "one.pt", weights_only=True), theirs)


def test_a_file_of_the_trainer_keeps_everything_in_a_dcp_directory(
    lightning_runs: Path, tmp_path: Path
) -> None:
    source = lightning_runs / "trainer/checkpoints/last.ckpt"
    run(Job(src=source, dst=tmp_path / "dcp", to="dcp"))
    run(Job(src=tmp_path / "dcp", dst=tmp_path / "again.ckpt", to="torch"))
    again = torch.load(tmp_path / "again.ckpt", weights_only=True)
    before = torch.load(source, weights_only=False)
    # DCP has only dicts with string keys. The groups prove what the numbers of parameters were.
    before["state_dict"] = dict(before["state_dict"])
    assert_same(again, before)


def test_steps_of_a_run_are_checkpoints_to_choose_from(lightning_runs: Path) -> None:
    with pytest.raises(UnsupportedError, match="contains 3 torch or safetensors files") as caught:
        open_checkpoint(lightning_runs / "trainer/checkpoints")
    names = re.findall(r"[^/]+\.ckpt", str(caught.value.hint))
    assert names == ["epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt", "last.ckpt"]


@pytest.mark.parametrize(
    ("name", "step"),
    [("trainer/checkpoints/epoch=0-step=2.ckpt", 2), ("trainer_fsdp/step.ckpt", 4)],
)
def test_the_iteration_is_the_global_step(lightning_runs: Path, name: str, step: int) -> None:
    opened = open_checkpoint(lightning_runs / name)
    opened.store.close()
    assert opened.iteration == step


def test_the_note_tells_how_to_write_only_the_model_of_an_fsdp_directory(
    lightning_runs: Path, tmp_path: Path
) -> None:
    source = lightning_runs / "trainer_fsdp/step.ckpt"
    report = run(Job(src=source, dst=tmp_path / "all", to="safetensors"))
    (note,) = [note for note in report.notes if note.startswith("to write only the model")]
    assert note.endswith("--include 'model.*' --strip-prefix model.")
