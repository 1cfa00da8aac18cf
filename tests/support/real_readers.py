"""What other software reads of the checkpoints that we wrote: every tensor as a key and its bytes.

Nothing here imports the project.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Key → (torch's name of the dtype, shape, dense bytes)."""


def of_tensor(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    dense = tensor.detach().contiguous().reshape(-1)
    data = dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data


def leaves(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of nested mappings and lists, under its dot-joined path."""
    if isinstance(value, torch.Tensor):
        yield ".".join(path), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            if not isinstance(item, (int, str)):  # random states are lists of millions of them
                yield from leaves(item, (*path, str(number)))


def read_torch(path: Path) -> Tensors:
    file = path / "checkpoint.pt" if path.is_dir() else path
    return {key: of_tensor(tensor) for key, tensor in leaves(torch.load(file, weights_only=True))}


def read_dcp(path: Path) -> Tensors:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    folder = _iteration(path)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    state: dict[str, Any] = {
        key: torch.empty(item.size, dtype=item.properties.dtype)
        for key, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return {key: of_tensor(tensor) for key, tensor in state.items()}


def _iteration(path: Path) -> Path:
    iterations = sorted(path.glob("iter_*"))
    return iterations[0] if iterations else path


def read_safetensors(path: Path) -> Tensors:
    from safetensors import safe_open

    tensors: Tensors = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with safe_open(file, framework="pt") as opened:
            aliases = opened.metadata() or {}
            for key in opened.keys():  # noqa: SIM118 - it is no mapping
                assert key not in tensors, f"{key} is in two files"
                tensors[key] = of_tensor(opened.get_tensor(key))
            tensors |= {
                alias: tensors[original]
                for alias, original in aliases.items()
                if original in tensors
            }
    index = path / "model.safetensors.index.json"
    if path.is_dir() and index.exists():
        listed = json.loads(index.read_text())["weight_map"]
        assert set(listed) <= set(tensors)
    return tensors


def _read_tensorstore(folder: Path, driver: str, marker: str) -> Tensors:
    import tensorstore as ts

    tensors: Tensors = {}
    for path in sorted(folder.rglob(marker)):
        if path.parent.name.endswith(".sync"):
            continue  # locks that Megatron leaves behind
        if driver == "zarr3" and json.loads(path.read_text())["node_type"] != "array":
            continue
        spec = {"driver": driver, "kvstore": f"file://{path.parent}/"}
        opened = ts.open(spec, open=True, read=True).result()
        data = np.ascontiguousarray(opened.read().result())
        tensors[path.parent.relative_to(folder).as_posix()] = (
            opened.dtype.name,
            tuple(opened.shape),
            data.tobytes(),
        )
    return tensors


def read_zarr(path: Path) -> Tensors:
    return _read_tensorstore(_iteration(path), "zarr", ".zarray")


def read_zarr3(path: Path) -> Tensors:
    return _read_tensorstore(path, "zarr3", "zarr.json")


def read_orbax(path: Path) -> Tensors:
    import tensorstore as ts

    tensors: Tensors = {}
    tree = json.loads((path / "_METADATA").read_text())["tree_metadata"]
    for leaf in tree.values():
        if leaf["value_metadata"]["value_type"] != "np.ndarray":
            continue  # numbers and strings, which were no tensors
        name = ".".join(step["key"] for step in leaf["key_metadata"])
        store = {"driver": "ocdbt", "base": f"file://{path}/", "path": f"{name}/"}
        opened = ts.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result()
        data = np.ascontiguousarray(opened.read().result())
        tensors[name] = opened.dtype.name, tuple(opened.shape), data.tobytes()
    return tensors


def read_universal(path: Path) -> Tensors:
    tensors: Tensors = {}
    zero = next(iter(path.rglob("zero")))
    for file in sorted(zero.glob("*/*.pt")):
        name = file.parent.relative_to(zero).as_posix()
        value = torch.load(file, weights_only=True)
        tensor = value["param"] if isinstance(value, dict) else value
        key = name if file.stem == "fp32" else f"optimizer.state.{name}.{file.stem}"
        if isinstance(tensor, torch.Tensor):
            tensors[key] = of_tensor(tensor)
    return tensors


READERS: dict[str, Callable[[Path], Tensors]] = {
    "torch": read_torch,
    "dcp": read_dcp,
    "torch_dist": read_dcp,
    "safetensors": read_safetensors,
    "zarr": read_zarr,
    "zarr3": read_zarr3,
    "orbax": read_orbax,
    "deepspeed_universal": read_universal,
}
"""Format → torch, safetensors or tensorstore reading it."""
