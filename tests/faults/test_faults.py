"""A sample of what scripts/faults does at every operation: whatever happens, nothing is lost, mixed or left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.saved import SAVE
from tests.faults.target import KINDS


@pytest.mark.parametrize("kind", [kind.name for kind in (*KINDS, SAVE)])
def test_nothing_is_lost_whatever_happens(kind: str, golden: Path, tmp_path: Path, repo_dir: Path) -> None:
    modes = ["new", "force"] if kind in ("torch", "dcp", SAVE.name) else ["force"]
    ended = subprocess.run(
        [
            *(sys.executable, repo_dir / "scripts" / "faults_main.py", "--golden", golden, "--work", tmp_path),
            *("--targets", kind, "--modes", *modes, "--sample", "1", "--jobs", "1"),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:] + ended.stdout
    assert " 0 failures" in ended.stdout
