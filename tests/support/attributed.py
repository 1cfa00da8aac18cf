"""Checkpoints with attributes: metadata of files and indexes, names of axes, kinds of keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import zarr
from safetensors.torch import save_file

from core.verbs.convert.run import Job, run
from tests.support.archives import unpacked

LORA = {"ss_network_dim": "4", "modelspec.title": "x", "format": "pt"}


def make_file(folder: Path) -> Path:
    save_file({"w": torch.arange(3.0)}, folder / "lora.safetensors", metadata=LORA)
    return folder / "lora.safetensors"


def make_sharded(folder: Path) -> Path:
    weights = {"w": torch.arange(3.0), "v": torch.arange(4)}
    for number, (name, value) in enumerate(weights.items(), 1):
        file = folder / f"model-{number:05d}-of-00002.safetensors"
        save_file({name: value}, file, metadata={"format": "pt", "run": "a"})
    metadata = {"total_size": 44, "total_parameters": 7, "base": {"commit": "abc"}}
    names = {name: f"model-{n:05d}-of-00002.safetensors" for n, name in enumerate(weights, 1)}
    index = {"metadata": metadata, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def make_zarr3(folder: Path) -> Path:
    group = zarr.open_group(folder / "z", mode="w", zarr_format=3)
    group.attrs.update(step=1200, run={"name": "a", "w": "w"}, title="w")
    array = group.create_array("w", shape=(3,), dtype="f4", dimension_names=["x"])
    array[:] = [1, 2, 3]
    array.attrs["scale"] = 0.5
    inner = group.create_group("sub")
    inner.attrs["note"] = "n"
    inner.create_array("v", shape=(2, 2), dtype="i4")[:] = 7
    return folder / "z"


def make_zarr2(folder: Path) -> Path:
    group = zarr.open_group(folder / "z", mode="w", zarr_format=2)
    group.attrs["step"] = 3
    array = group.create_array("w", shape=(3,), dtype="f4")
    array[:] = [1, 2, 3]
    array.attrs.update(scale=0.5, _ARRAY_DIMENSIONS=["x"])
    return folder / "z"


def make_keys(folder: Path) -> Path:
    return unpacked("orbax_keys", folder) / "keys"


def make_step(folder: Path) -> Path:
    step = unpacked("orbax_keys", folder) / "steps" / "3"
    file = step / "_CHECKPOINT_METADATA"
    file.write_text(json.dumps({**json.loads(file.read_text()), "metrics": {"loss": 0.5}}))
    return step


SOURCES: dict[str, Callable[[Path], Path]] = {
    "safetensors": make_file,
    "sharded": make_sharded,
    "zarr3": make_zarr3,
    "zarr2": make_zarr2,
    "orbax_keys": make_keys,
    "orbax_step": make_step,
}


ENTRIES: dict[str, Any] = {
    "__metadata__": {"run": "a"},
    "__attributes__": {"a.w": {"unit": "m"}, "a.v": {"unit": "m"}, "b.w": {"unit": "s"}},
}
WEIGHTS = {"a.w": torch.arange(3.0), "a.v": torch.arange(4), "b.w": torch.arange(5)}


def make_state_dict(path: Path, source: str) -> Path:
    """Write weights and the entries that hold attributes as torch does, or as attributes."""
    path.mkdir()
    if source == "torch":
        torch.save({**WEIGHTS, **ENTRIES}, path / "a.pt")
        return path / "a.pt"
    dcp.save({**WEIGHTS, **ENTRIES}, checkpoint_id=path / "dcp", no_dist=True)
    if source != "dcp":
        run(Job(src=path / "dcp", dst=path / "out", to=source))
    return path / ("dcp" if source == "dcp" else "out")
