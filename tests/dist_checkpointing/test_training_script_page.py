"""The Python of docs/howto/training-script.md runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.dist
@pytest.mark.slow
def test_the_examples_of_the_page_run_one_after_the_other(tmp_path):
    page = ROOT / "docs/howto/training-script.md"
    save, convert = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    (tmp_path / "train.py").write_text(save)
    (tmp_path / "convert.py").write_text(convert)
    for command in (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"],
        ["convert.py"],
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr[-4000:]
    assert [path.name for path in sorted((tmp_path / "model").iterdir())] == ["model.safetensors"]
