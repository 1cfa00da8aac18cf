"""What an interrupted run may be continued with: the same plan, from the same files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import Job, run
from core.verbs.convert.stored_plan.file import identity_of


def identity(src: Path, dst: Path, **options: object) -> str:
    with prepare(Job(src=src, dst=dst, to="torch", **options)) as prepared:  # type: ignore[arg-type]
        return identity_of(prepared.plan, prepared.source.store)


def touch(file: Path) -> None:
    """Gives a file another time of modification, as if another one of the same size had been copied
    there.
    """
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))


FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def scaled(folder: Path) -> Path:
    """A float8 matrix in one file, its scales in another."""
    folder.mkdir()
    save_file({"w.weight": torch.ones(256, 256).to(torch.float8_e4m3fn)}, folder / FILES[0])
    save_file({"w.weight_scale_inv": torch.ones(2, 2)}, folder / FILES[1])
    return folder


@pytest.mark.parametrize("changed", FILES)
def test_a_tensor_that_is_computed_from_two_files_depends_on_both(
    changed: str, tmp_path: Path
) -> None:
    src = scaled(tmp_path / "src")
    before = identity(src, tmp_path / "o.pt", dequantize="bf16")
    assert identity(src, tmp_path / "o.pt", dequantize="bf16") == before
    touch(src / changed)
    assert identity(src, tmp_path / "o.pt", dequantize="bf16") != before


def test_a_plan_depends_on_the_files_that_tell_how_the_others_are_stored(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "a.pt")
    src = tmp_path / "src"
    run(Job(src=tmp_path / "a.pt", dst=src, to="zarr3", fsync=False))
    before = identity(src, tmp_path / "o.pt")
    assert identity(src, tmp_path / "o.pt") == before
    touch(src / "w" / "zarr.json")
    assert identity(src, tmp_path / "o.pt") != before
