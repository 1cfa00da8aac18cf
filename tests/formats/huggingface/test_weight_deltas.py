"""Weight updates of RL trainers (slime, miles): recognised by their index, and not converted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_cli.app import main
from core.errors import UnsupportedError
from core.opening.open import open_checkpoint
from core.verbs.convert.run import Job, run

TITLE = "weight deltas (xor, zstd) from version 000001 to 000002, not full weights"


@pytest.fixture
def update(tmp_path: Path) -> Path:
    """A version directory, as slime's UpdateWeightFromDiskDelta writes it."""
    folder = tmp_path / "weight_v000002"
    folder.mkdir()
    diffs = {
        f"model.layers.{n}.mlp.up_proj.weight": np.arange(9 + n, dtype=np.uint8) for n in (0, 1)
    }
    name = "model-00000-of-00001.safetensors"
    save_file(diffs, folder / name, metadata=dict.fromkeys(diffs, "0123456789abcdef"))
    metadata = {
        "version": "000002",
        "base_version": "000001",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    index = {"metadata": metadata, "weight_map": dict.fromkeys(diffs, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    "name", ["", "model.safetensors.index.json", "model-00000-of-00001.safetensors"]
)
def test_update_is_named_by_inspect_and_refused_by_convert(
    name: str, update: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = update / name
    assert main(["inspect", str(path)]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert f"these are {TITLE}" in page
    assert "✓ convert" not in page
    for to in ("torch", "dcp", "torch_dist", "zarr"):
        with pytest.raises(UnsupportedError) as error:
            run(Job(src=path, dst=tmp_path / "out.pt", to=to))
        assert TITLE in error.value.message
        assert error.value.hint is not None
        assert "apply them to a checkpoint of version 000001 first" in error.value.hint
    assert main(["convert", str(path), str(tmp_path / "out.pt")]) == 4


def test_update_without_changes_is_read(update: Path) -> None:
    path = update / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"weight_map": {}}))
    (update / "model-00000-of-00001.safetensors").unlink()
    opened = open_checkpoint(update)
    opened.store.close()
    assert opened.catalog.tensors == {}
    assert f"these are {TITLE}" in opened.catalog.notes


def test_update_is_not_merged(update: Path, tmp_path: Path) -> None:
    assert main(["merge", str(update), str(update), "-o", str(tmp_path / "out"), "--average"]) == 4
