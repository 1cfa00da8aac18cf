"""megatron-core 0.12.1, the last one with the backend zarr, loads what ``core.dist_checkpointing``
saves, and the other way round, bit for bit: tensors of several types, flattened pieces, objects and
common state.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from core.dist_checkpointing import mapping
from core.dist_checkpointing.serialization import load, save
from core.dist_checkpointing.strategies.tensorstore import TensorStoreLoadShardedStrategy
from core.dist_checkpointing.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from tests.dist_checkpointing.ranks import run_ranks
from tests.real_megatron.megatron import ROOT
from tests.real_megatron.zarr_state import state, wrong
from tests.support.zarr_files import files_of


@pytest.fixture(scope="module")
def old_python() -> str:
    """The Python that has megatron-core 0.12.1."""
    python = os.environ.get("CKPT_MEGATRON_OLD")
    if not python:
        pytest.skip("scripts/megatron-tests runs megatron-core 0.12.1")
    return python


def _in_old_megatron(python: str, doing: str, folder: Path, world: int) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [python, "-m", "tests.real_megatron.zarr_state", doing, str(folder), str(world)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]


def _save(rank: int, world: int, folder: str) -> None:
    save(state(mapping, rank, world), folder, ("zarr", 1))


def _load(rank: int, world: int, folder: str) -> list[tuple[str, str]]:
    """(strategy, name) of everything that is not what was saved."""
    strategies = {
        "engine": None,
        "tensorstore": TensorStoreLoadShardedStrategy(),
        "two_stage": TwoStageDataParallelLoadShardedStrategy(None),
    }
    problems: list[tuple[str, str]] = []
    for called, strategy in strategies.items():
        loaded = load(state(mapping, rank, world, is_filled=False), folder, strategy)
        problems += ((called, name) for name in wrong(loaded, mapping, rank, world))
    return problems


@pytest.mark.long
@pytest.mark.parametrize(("savers", "loaders"), [(1, 2), (2, 1), (4, 3)])
def test_old_megatron_loads_what_is_saved_here(
    old_python: str, tmp_path: Path, savers: int, loaders: int
) -> None:
    run_ranks(savers, _save, str(tmp_path))
    _in_old_megatron(old_python, "load", tmp_path, loaders)


@pytest.mark.long
@pytest.mark.parametrize(("savers", "loaders"), [(1, 2), (2, 1), (4, 3)])
def test_what_old_megatron_saves_is_loaded_here(
    old_python: str, tmp_path: Path, savers: int, loaders: int
) -> None:
    _in_old_megatron(old_python, "save", tmp_path, savers)
    assert run_ranks(loaders, _load, str(tmp_path)) == [[]] * loaders


@pytest.mark.long
def test_arrays_are_saved_as_old_megatron_saves_them(old_python: str, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "mine", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    run_ranks(2, _save, str(ours))
    _in_old_megatron(old_python, "save", theirs, 2)
    expected = {
        name: data
        for name, data in files_of(theirs).items()
        if ".sync/" not in name and ".pt" not in name
    }
    files = {name: data for name, data in files_of(ours).items() if ".pt" not in name}
    del expected["metadata.json"], files["metadata.json"]
    assert files == expected
