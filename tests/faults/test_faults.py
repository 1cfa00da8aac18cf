"""A sample of what scripts/faults does at every operation: whatever happens, nothing is lost, mixed
or left behind.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.saved import SAVE

RUNS = {
    "new": ("new", ("dcp", SAVE.name)),
    "new-others": ("new", ("torch",)),
    "force": ("force", ("torch", "dcp")),
    "force-others": ("force", ("safetensors", "zarr3", "megatron", "torch_dist", SAVE.name)),
    "workers": ("workers", ("verified",)),
    "workers-others": ("workers", ("torch", "zarr")),
    "s3": ("s3", ("reshard in s3", "save to s3")),
    "s3-others": ("s3", ("s3 → directory",)),
}
"""What a process tries that has imported everything once: a mode and targets. The others, only with
``--long``, are published as these are.
"""
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
            sys.executable,
            "-m",
            "tests.faults.main",
            "--golden",
            golden,
            "--work",
            tmp_path,
            "--targets",
            *targets,
            "--modes",
            mode,
            "--sample",
            "1",
            "--jobs",
            "1",
            *(("--faults", *IN_S3) if mode == "s3" else ()),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:] + ended.stdout
    assert " 0 failures" in ended.stdout
