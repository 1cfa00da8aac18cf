"""The commands work without what only Linux has; see ``tests/support/like_macos``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def ckpt(*arguments: str | Path, expected: int = 0, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.like_macos", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expected, done.stderr
    return done.stdout + done.stderr


def test_megatron_rank_files(golden: Path, tmp_path: Path) -> None:
    src, dst = golden / "mcore_legacy/dense_gqa/tp2_pp2", tmp_path / "tp1"
    ckpt("inspect", src)
    ckpt("validate", "--deep", src)
    ckpt("reshard", src, dst, "--tp-new", "1", "--verify", "--resume")
    ckpt("manifest", dst, "--force")
    ckpt("validate", "--deep", dst)
    ckpt("diff", src, dst)


def test_hugging_face_weights(golden: Path, tmp_path: Path) -> None:
    src, dst = golden / "hf/llama/safetensors_sharded", tmp_path / "zarr3"
    ckpt("convert", src, dst, "--to", "zarr3", "--verify")
    ckpt("convert", src, dst, "--to", "zarr3", "--force")  # replaces it without renameat2
    ckpt("diff", src, dst)


def test_dcp_metadata_are_read_without_the_sandbox(golden: Path, tmp_path: Path) -> None:
    src, dst = golden / "torch_dcp/fsdp2_dp2", tmp_path / "model.pt"
    ckpt("inspect", src)
    ckpt("convert", src, dst, "--to", "torch", "--verify")


def test_completion(golden: Path, tmp_path: Path) -> None:
    root = golden / "mcore_legacy/dense_gqa/tp2_pp2"
    text = ckpt(
        _CKPT_COMPLETE="complete_bash",
        COMP_WORDS=f"ckpt\nvalidate\n{root}\n--iteration\n",
        COMP_CWORD="4",
        CKPT_COMPLETION_TIMEOUT="60",
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert text == "10"
