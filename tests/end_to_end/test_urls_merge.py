"""Checkpoints of an object store are merged as those of a directory are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt_cli.app import main
from tests.support.object_stores import mounted_store
from tests.support.s3.client import S3Server

SOURCES = ("mcore_legacy/dense_gqa/tp2_pp1_optim", "mcore_torch_dist/dense_gqa/tp2_pp2")


@pytest.fixture
def store(golden: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Returns an S3 server whose bucket ``runs`` is tests/golden."""
    with mounted_store(golden, monkeypatch, is_constant=True) as server:
        yield server


def _merge(*words: str | Path) -> int:
    return main(["merge", *map(str, words)])


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    (file,) = directory.glob("*.safetensors")
    return load_file(file)


def test_sources_of_a_store_and_of_a_directory_make_the_same_mean(
    store: S3Server, golden: Path, tmp_path: Path
) -> None:
    options = ("--average", "--to", "safetensors", "--quiet")
    local, remote, mixed = (tmp_path / name for name in ("local", "remote", "mixed"))
    paths = [golden / source for source in SOURCES]
    urls = [f"s3://runs/{source}" for source in SOURCES]
    assert _merge(*paths, "-o", local, *options) == 0
    assert _merge(*urls, "-o", remote, *options) == 0
    assert _merge(paths[0], urls[1], "-o", mixed, *options) == 0
    truth = _weights(local)
    for merged in (remote, mixed):
        weights = _weights(merged)
        assert weights.keys() == truth.keys()
        assert all(weights[key].equal(truth[key]) for key in truth)


def test_a_mean_is_written_to_a_store(store: S3Server, golden: Path, tmp_path: Path) -> None:
    paths = [golden / source for source in SOURCES]
    options = ("--average", "--to", "safetensors", "--quiet")
    assert _merge(*paths, "-o", tmp_path / "local", *options) == 0
    assert _merge(*paths, "-o", "s3://runs/made/mean", *options, "--verify") == 0
    assert main(["diff", "s3://runs/made/mean", str(tmp_path / "local"), "--quiet"]) == 0
