"""Start-up: what the commands import, seen from outside by ``-X importtime``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"ml_dtypes", "numpy", "safetensors", "tensorstore", "torch", "zarr"}


def imported_by(*arguments: str, repo_dir: Path, exit_code: int = 0) -> set[str]:
    """Top-level names of the modules that ``python -m ckpt_cli`` imports with these arguments."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ckpt_cli", *arguments],
        capture_output=True,
        text=True,
        cwd=repo_dir,
        check=False,
    )
    lines = done.stderr.splitlines()
    talk = "\n".join(line for line in lines if not line.startswith("import time:"))
    assert done.returncode == exit_code, talk
    names = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "ckpt_cli.app" in names
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["inspect", "--help"], ["convert", "--help"], ["reshard", "--help"]],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(arguments: list[str], repo_dir: Path) -> None:
    assert imported_by(*arguments, repo_dir=repo_dir) & (HEAVY | {"rich"}) == set()


def test_a_usage_error_imports_nothing_heavy(repo_dir: Path) -> None:
    assert imported_by("inspect", "--no-such-option", repo_dir=repo_dir, exit_code=2) & HEAVY == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["torch_dcp/fsdp2_dp2"],
        ["torch_dcp/fsdp2_dp2", "--json"],
        ["mcore_legacy/dense_gqa/tp2_pp1"],
        ["mcore_legacy/dense_gqa/tp1_pp1_optim", "--json"],
        ["mcore_torch_dist/dense_gqa/tp2_pp2_optim"],
        ["mcore0121_torch_dist/dense_gqa/tp2_pp2_optim"],
        ["hf/llama/torch_single/model_zip.pt"],
    ],
    ids=" ".join,
)
def test_inspect_imports_nothing_heavy(arguments: list[str], golden: Path, repo_dir: Path) -> None:
    name, *options = arguments
    assert imported_by("inspect", str(golden / name), *options, repo_dir=repo_dir) & HEAVY == set()
