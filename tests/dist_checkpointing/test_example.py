"""The example under docs/examples: training that was killed goes on in another layout, with the
same losses.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.long  # starts three jobs; kills, saves and other layouts have tests of their own
@pytest.mark.parametrize(
    ("options", "resumed"),
    [
        (["--kill-after=10"], "tp 1, pp 4: goes on from step_000008"),
        # In the save of step 8.
        (
            ["--kill-after=8", "--async-save", "--layouts", "2,1", "1,2"],
            "tp 1, pp 2: goes on from step_00000[48]",
        ),
    ],
    ids=["between-saves", "in-an-asynchronous-save"],
)
def test_training_that_was_killed_goes_on_in_another_layout(
    repo_dir: Path, options: list[str], resumed: str
):
    done = subprocess.run(
        [
            sys.executable,
            "docs/examples/kill_and_resume.py",
            "--steps=12",
            "--save-every=4",
            *options,
        ],
        cwd=repo_dir,
        env=os.environ | {"PYTHONPATH": str(repo_dir)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(f"resumed, {resumed}\n", done.stdout)
