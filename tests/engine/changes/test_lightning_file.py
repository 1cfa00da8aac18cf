"""A directory of Lightning's Trainer becomes the file that the Trainer loads."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from core.verbs.convert.run import Job, run
from tests.formats.dcp.test_lightning_meta import as_trainer_file, assert_same

PYTHON = os.environ.get("CKPT_LIGHTNING_PYTHON")
"""An interpreter with Lightning, as scripts/framework-tests has it."""
PROGRAM = Path(__file__).parents[2] / "golden/frameworks/lightning_resume.py"


@pytest.mark.parametrize("case", ["trainer_fsdp", "trainer_fsdp_flat"])
def test_a_directory_of_the_trainer_becomes_its_file(
    lightning_runs: Path, tmp_path: Path, case: str
) -> None:
    source = lightning_runs / case
    report = run(Job(src=source / "step.ckpt", dst=tmp_path / "one.ckpt", to="torch", verify=True))
    ours = torch.load(tmp_path / "one.ckpt", weights_only=True)
    theirs = as_trainer_file(torch.load(source / "consolidated.pt", weights_only=True))
    # Flattened parameters are listed by unit there; the names of the states stay the same.
    (group,) = theirs["optimizer_states"][0]["param_groups"]
    weights = [name for name in theirs["state_dict"] if name in group["params"]]
    assert (group["params"] != weights) == (case == "trainer_fsdp_flat")
    group["params"] = weights
    assert_same(ours, theirs)
    notes = [note for note in report.notes if "Lightning" in note]
    assert "model became state_dict, optimizer_0 became optimizer_states.0" in notes[0]
    assert len(notes) == 1 + (case == "trainer_fsdp_flat")
    if PYTHON:
        command = [PYTHON, PROGRAM, tmp_path / "one.ckpt", source / "consolidated.pt"]
        subprocess.run(command, check=True)


def written(folder: Path, state: dict[str, Any]) -> Path:
    """Write a directory with the entries that Lightning's Trainer puts into ``meta.pt``."""
    dcp.save(state, checkpoint_id=folder)
    torch.save({"epoch": 1, "pytorch-lightning_version": "2.6.6"}, folder / "meta.pt")
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_optimizers_are_in_the_order_of_their_numbers_and_may_have_no_states(
    tmp_path: Path,
) -> None:
    weights = {"w": torch.arange(6.0), "v": torch.arange(3.0)}
    optimizers = {
        f"optimizer_{number}": {
            "state": {"w": {"momentum_buffer": torch.arange(6.0) + number}} if number % 2 else {},
            "param_groups": [{"lr": 0.1 * number, "params": ["v", "w"]}],
        }
        for number in range(11)
    }
    source = written(tmp_path / "step.ckpt", {"model": weights, **optimizers})
    run(Job(src=source, dst=tmp_path / "one.ckpt", to="torch"))
    states = torch.load(tmp_path / "one.ckpt", weights_only=True)["optimizer_states"]
    for optimizer in optimizers.values():
        optimizer["param_groups"][0]["params"] = ["w", "v"]
    assert_same(states, list(optimizers.values()))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"exclude": ("optimizer_0*",)}, {"state_dict", "optimizer_1"}),
        ({"optim": "drop"}, {"state_dict"}),
        ({"exclude": ("pytorch-lightning_version",)}, {"model", "optimizer_0", "optimizer_1"}),
    ],
)
def test_entries_keep_their_names_where_lightning_loads_no_file(
    tmp_path: Path, options: dict[str, Any], names: set[str]
) -> None:
    state = {"state": {"w": {"step": torch.tensor(2.0)}}, "param_groups": [{"params": ["w"]}]}
    both = {"optimizer_0": state, "optimizer_1": state}
    source = written(tmp_path / "step.ckpt", {"model": {"w": torch.arange(4.0)}, **both})
    run(Job(src=source, dst=tmp_path / "one", to="torch", **options))
    saved = torch.load(tmp_path / "one/checkpoint.pt", weights_only=True)
    assert saved.keys() - {"epoch", "pytorch-lightning_version"} == names
