"""A sample of what scripts/faults does at every operation: whatever happens, nothing is lost, mixed
or left behind.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.saved import SAVE
from tests.faults.target import KINDS

BOTH = ("torch", "dcp", SAVE.name)
"""Of these, also new destinations are disturbed."""
OTHERS = ("safetensors", "zarr3", "megatron", "torch_dist")
"""Of these, only with ``--long``: they are replaced as the directories of the others are."""
RUNS = {
    "new": ("new", BOTH),
    "force": ("force", [kind.name for kind in (*KINDS, SAVE) if kind.name not in OTHERS]),
    "force-others": ("force", OTHERS),
    "workers": ("workers", ("torch", "verified")),
    "workers-others": ("workers", ("zarr",)),
    "s3": ("s3", ("s3 → directory", "reshard in s3", "save to s3")),
}
"""What a process tries that has imported everything once: a mode and targets."""
IN_S3 = ("SIGKILL", "500", "503 SlowDown", "slow", "cut")
"""Faults of requests that are tried here; the script tries more."""


@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=pytest.mark.long if "others" in run else ()) for run in RUNS],
)
def test_nothing_is_lost_whatever_happens(
    run: str, golden: Path, tmp_path: Path, repo_dir: Path
) -> None:
    mode, targets = RUNS[run]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "tests.faults.main", "--golden", golden, "--work", tmp_path),
            *("--targets", *targets, "--modes", mode, "--sample", "1", "--jobs", "1"),
            *(("--faults", *IN_S3) if mode == "s3" else ()),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:] + ended.stdout
    assert " 0 failures" in ended.stdout
