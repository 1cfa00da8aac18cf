"""Zeros in place of weights, found at the lowest level (CK716), and zeros that are usual."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import zarr
from safetensors.torch import save_file

from core.files.store import LocalStore
from core.verbs.checks.check import Finding, Severity
from core.verbs.validate.run import validate


def lost(path: Path) -> list[Finding]:
    return [finding for finding in validate(path).findings if finding.code == "CK716"]


def digged(path: Path, start: int, stop: int | None = None) -> Path:
    """Make a part of a file a hole, as a copy that skips zeros does."""
    size = path.stat().st_size
    data = path.read_bytes()
    stop = size if stop is None else stop
    with path.open("wb") as file:
        file.write(data[:start])
        file.seek(stop)
        file.write(data[stop:])
        file.truncate(size)
    if not LocalStore(path.parent).holes(path.name):
        pytest.skip("this file system does not record holes")
    return path


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    names = ("embed_tokens", "layers.0.q_proj", "layers.0.o_proj")
    return {f"{name}.weight": torch.randn(256, 256, generator=generator) for name in names}


def test_a_hole_in_place_of_the_last_weights_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(tensors(), file)
    assert not lost(file)
    (finding,) = lost(digged(file, file.stat().st_size - 200_000))
    assert finding.severity is Severity.WARNING and finding.key == "layers.0.q_proj.weight"


def test_a_preallocated_file_that_was_not_filled_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(tensors(), file)
    data = file.read_bytes()
    with file.open("wb") as target:
        os.posix_fallocate(target.fileno(), 0, len(data))
        target.write(data[: len(data) // 2])
    if not LocalStore(tmp_path).holes(file.name):
        pytest.skip("this file system does not record holes")
    assert [finding.key for finding in lost(file)] == ["layers.0.q_proj.weight"]


def test_the_checksums_of_a_zip_tell_true_zeros_from_lost_bytes(tmp_path: Path) -> None:
    weight = tensors()["layers.0.o_proj.weight"]
    for name, values in (("full", weight), ("zeros", torch.zeros_like(weight))):
        torch.save({"o_proj.weight": values}, tmp_path / f"{name}.pt")
        size = (tmp_path / f"{name}.pt").stat().st_size
        digged(tmp_path / f"{name}.pt", 4096, size - 4096)
    assert [finding.key for finding in lost(tmp_path / "full.pt")] == ["o_proj.weight"]
    assert not lost(tmp_path / "zeros.pt")


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("layers.0.o_proj.bias", (65536,)),
        ("base_model.layers.0.q_proj.lora_B.weight", (256, 256)),
        ("optimizer.state.exp_avg.layers.0.q_proj.weight", (256, 256)),
        ("model.embed_tokens.weight", (256, 256)),
    ],
)
def test_zeros_that_are_usual_may_be_holes(
    tmp_path: Path, key: str, shape: tuple[int, ...]
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({key: torch.zeros(shape)}, file)
    assert not lost(digged(file, 4096))


def test_padding_in_a_hole_is_not_reported(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    weight = tensors()["layers.0.o_proj.weight"]
    weight[140:] = 0
    save_file({"weight": weight}, file)
    assert not lost(digged(file, file.stat().st_size - 116 * 1024))


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("dtype", ["<f4", ">f4"])
def test_a_raw_chunk_of_zeros_is_reported_if_other_chunks_are_not(
    tmp_path: Path, zarr_format: int, dtype: str
) -> None:
    array = zarr.create_array(
        tmp_path / "run",
        name="linear.weight",
        shape=(64, 64),
        chunks=(16, 64),
        dtype=dtype,
        zarr_format=zarr_format,  # type: ignore[arg-type]
        compressors=None,
        config={"write_empty_chunks": True},
    )
    array[:] = tensors()["layers.0.o_proj.weight"][:64, :64].numpy()
    files = sorted(
        path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size == 4096
    )
    assert len(files) == 4 and not lost(tmp_path / "run")
    files[1].write_bytes(bytes(4096))
    assert [finding.file for finding in lost(tmp_path / "run")] == [
        str(files[1].relative_to(tmp_path / "run"))
    ]
    array[:] = 0
    assert not lost(tmp_path / "run")


def test_a_checksum_after_a_raw_chunk_does_not_make_it_compressed(tmp_path: Path) -> None:
    weight = tensors()["layers.0.o_proj.weight"]
    weight[64:128] = 0
    array = zarr.create_array(
        tmp_path / "run",
        name="linear.weight",
        shape=weight.shape,
        chunks=weight.shape,
        dtype="f4",
        compressors=[zarr.codecs.Crc32cCodec()],
    )
    array[:] = weight.numpy()
    chunk = tmp_path / "run/linear.weight/c/0/0"
    assert not lost(digged(chunk, 64 << 10, 128 << 10).parents[3])


def test_a_chunk_of_megatron_s_zarr_is_reported(golden: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(golden / "mcore0121_zarr/dense_gqa/tp4_pp1", tmp_path / "run"))
    assert not lost(root)
    name = "decoder.layers.mlp.linear_fc2.weight"
    chunk = next(root.glob(f"*/{name}/1.0.1"))
    chunk.write_bytes(bytes(chunk.stat().st_size))
    assert [(item.key, item.file) for item in lost(root)] == [(name, f"{name}/1.0.1")]
