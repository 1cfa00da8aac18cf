"""Optimizers of models with towers: another layout keeps every state, also of frozen towers.

``megatron_tower_optimizers.tar.xz`` was written by Megatron-Bridge after a step of Adam.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from core.errors import UnsupportedError
from core.verbs.convert.job import TopologyChange
from core.verbs.convert.run import Job, run
from tests.hf.stored import stored_tensors
from tests.support.archives import unpacked

RUNS = ("frozen", "tp2", "ddp_frozen")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("megatron_tower_optimizers", tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", RUNS)
def test_another_layout_keeps_the_states_of_all_parameters_that_are_trained(
    name: str, runs: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for src, dst, topology in (
        (runs / name, first, TopologyChange(tp=1 if name == "tp2" else 2, pp=2)),
        (first, second, TopologyChange(tp=2 if name == "tp2" else 1, pp=1)),
    ):
        run(Job(src=src, dst=dst, to="torch_dist", topology=topology, fsync=False))
    theirs = stored_tensors(runs / name)
    for folder in (first, second):
        ours = stored_tensors(folder)
        assert ours.keys() == theirs.keys()
        # The vocabulary may have padding.
        assert all(torch.equal(ours[key][: len(value)], value) for key, value in theirs.items())
    states = {key for key in theirs if key.startswith("optimizer.") and ".visual." in key}
    assert states, "the merger is trained"
    assert any(".visual.blocks." in key for key in states) == (name == "tp2")
    # Groups, step and other entries, too; Transformer Engine's modules have further extra states.
    entries = [
        set(dcp.FileSystemReader(next(folder.glob("iter_*"))).read_metadata().state_dict_metadata)
        for folder in (runs / name, second)
    ]
    assert entries[0] <= entries[1]
    assert all("_extra_state" in key for key in entries[1] - entries[0])


def test_the_weights_get_the_names_of_transformers_without_the_optimizer(
    runs: Path, tmp_path: Path
) -> None:
    config = runs / "hf/config.json"
    job = Job(src=runs / "frozen", dst=tmp_path / "hf", to="hf", config=config, fsync=False)
    report = run(job)
    assert any("optimizer" in item for item in report.dropped)
    theirs = stored_tensors(runs / "frozen")
    for key, value in load_file(tmp_path / "hf/model.safetensors").items():
        if key.startswith("visual."):
            assert torch.equal(theirs[key], value), key

    # Formats without a config.json need it for the names as well; states keep Megatron's names.
    named = Job(src=runs / "frozen", dst=tmp_path / "x", to="dcp", names="hf", config=config)
    with pytest.raises(UnsupportedError, match="optimizer") as err:
        run(named)
    assert "--no-optim" in str(err.value.hint)
    assert not (tmp_path / "x").exists()
