"""Several workers write one destination: the same bytes as one process, whatever the format, and whoever is killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from core.convert import Job, TopologyChange, run
from core.shared_convert import Sizes, run_shared
from core.team import Team
from tests.teams import run_team

FINE = Sizes(item_bytes=6 << 10, buffer_bytes=24 << 10, batch_bytes=16 << 10)
"""So that even the tensors of small checkpoints are cut."""


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a directory, or the file."""
    if folder.is_file():
        return {folder.name: folder.read_bytes()}
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def convert(team: Team, job: Job, sizes: Sizes = FINE) -> dict[str, Any]:
    """One worker of a conversion."""
    return run_shared(job, team, sizes=sizes).as_dict()


SHARDED = "mcore_legacy/dense_gqa/tp2_pp2"
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": (SHARDED, {"to": "torch"}),
    "dcp": (SHARDED, {"to": "dcp"}),
    "safetensors": ("torch_dcp/tp2_fsdp2_dp2", {"to": "safetensors"}),
    "zarr3": (SHARDED, {"to": "zarr3"}),
    "zarr": (SHARDED, {"to": "zarr"}),
    "torch_dist": (SHARDED, {"to": "torch_dist"}),
    "megatron": (SHARDED, {"topology": TopologyChange(tp=4, pp=1), "keeps_layout": True}),
    "deepspeed_universal": ("deepspeed/zero1_dp2_bf16", {"to": "deepspeed_universal"}),
}


def job_of(target: str, golden: Path, dst: Path) -> Job:
    source, options = TARGETS[target]
    return Job(src=golden / source, dst=dst, fsync=False, **options)


@pytest.mark.parametrize("target", TARGETS)
def test_any_number_of_workers_writes_the_same_bytes(target: str, golden: Path, tmp_path: Path) -> None:
    run(job_of(target, golden, tmp_path / "one" / "out"))
    wanted = tree(tmp_path / "one")
    for n in (2, 3, 5):
        found = run_team(n, convert, job_of(target, golden, tmp_path / str(n) / "out"))
        assert tree(tmp_path / str(n)) == wanted
        assert os.listdir(tmp_path / str(n)) == ["out"]
        figures = found[0]["launch"]["workers"]
        assert len(figures) == n and found[0]["launch"]["balance"] < n
