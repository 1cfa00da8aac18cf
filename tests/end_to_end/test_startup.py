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
    [
        ["--help"],
        ["--version"],
        ["inspect", "--help"],
        ["explore", "--help"],
        ["convert", "--help"],
        ["reshard", "--help"],
        ["validate", "--help"],
    ],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(arguments: list[str], repo_dir: Path) -> None:
    assert imported_by(*arguments, repo_dir=repo_dir) & (HEAVY | {"rich", "textual"}) == set()


def test_a_usage_error_imports_nothing_heavy(repo_dir: Path) -> None:
    assert (
        imported_by("inspect", "--no-such-option", repo_dir=repo_dir, exit_code=2) & HEAVY == set()
    )


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
        ["hf/llama/safetensors_single"],
        ["mcore0121_zarr/dense_gqa/tp2_pp2_optim"],
        ["deepspeed/zero1_dp2_bf16"],
        ["orbax/ocdbt_zarr3"],
    ],
    ids=" ".join,
)
def test_inspect_imports_nothing_heavy(arguments: list[str], golden: Path, repo_dir: Path) -> None:
    name, *options = arguments
    assert imported_by("inspect", str(golden / name), *options, repo_dir=repo_dir) & HEAVY == set()


@pytest.mark.parametrize(
    "name",
    [
        "torch_dcp/fsdp2_dp2",
        "mcore_legacy/dense_gqa/tp2_pp2",
        "mcore_legacy/dense_gqa/tp2_pp1_optim",
        "mcore_torch_dist/dense_gqa/tp2_pp2_optim",
        "mcore0121_zarr/dense_gqa/tp2_pp2",
        "hf/llama/safetensors_sharded",
        "hf/llama/torch_single/model_zip.pt",
        "deepspeed/zero1_dp2_bf16",
    ],
)
def test_validate_imports_nothing_heavy_unless_it_is_deep(
    name: str, golden: Path, repo_dir: Path
) -> None:
    assert (
        imported_by("validate", str(golden / name), "--headers", repo_dir=repo_dir)
        & (HEAVY | {"rich"})
        == set()
    )


@pytest.mark.parametrize("format", ["text", "json", "junit", "sarif", "github"])
def test_no_report_imports_anything_heavy(format: str, golden: Path, repo_dir: Path) -> None:
    arguments = ["validate", str(golden / "torch_dcp/tp2_only"), "--format", format]
    assert imported_by(*arguments, repo_dir=repo_dir) & (HEAVY | {"rich"}) == set()


def test_the_table_of_checks_imports_nothing_heavy(repo_dir: Path) -> None:
    assert imported_by("validate", "--list-checks", repo_dir=repo_dir) & (HEAVY | {"rich"}) == set()


def test_a_newest_iteration_is_found_without_anything_heavy(golden: Path, repo_dir: Path) -> None:
    root = golden / "mcore_torch_dist/dense_gqa/tp2_pp2"
    assert (
        imported_by("validate", "--newest-valid", str(root), repo_dir=repo_dir) & (HEAVY | {"rich"})
        == set()
    )
