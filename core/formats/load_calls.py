"""The call of a library that loads what was written in a format (``Format.load_call``).

Each function takes the path of the destination, the catalog that was written and the files, and
returns a line of Python. A plug-in has a function of its own.

Source: safetensors 0.8, torch 2.13, zarr-python 3.1.6, tensorstore 0.1.86, orbax-checkpoint 0.12.8,
DeepSpeed 0.19.8.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from core.engine.catalog.catalog import TargetCatalog
from core.engine.catalog.facets import WeightFileFacts
from core.engine.catalog.file_image import FileImage
from core.pickle.inert import Global
from core.pickle.names import globals_of

_NOT_IN_ZARR_PYTHON = ("bfloat16", "float8")
_WINDOWS_PATH = Global("pathlib", "WindowsPath")


def torch_load(dst: Path, target: TargetCatalog, images: Sequence[FileImage]) -> str:
    """Return the call of ``torch.load``."""
    from core.formats.torch.weights_only import find_refused

    file = quoted(dst if target.write.is_file else dst / images[0].path)
    objects = [] if target.write.weights_only else find_refused(target.skeleton)
    line = f"torch.load({file}, weights_only={not objects})"
    # Python refuses to make the paths of another system.
    if any(_WINDOWS_PATH in globals_of(value) for _, value in objects):
        return f"{line} on Windows; elsewhere convert again with --weights-only"
    return line


def dcp_load(dst: Path, target: TargetCatalog, images: Sequence[FileImage]) -> str:
    """Return the call of ``torch.distributed.checkpoint.load``, for torch_dist, too."""
    metadata = next(Path(image.path) for image in images if ".metadata" in image.path)
    return f"dcp.load(state_dict, checkpoint_id={quoted(dst / metadata.parent)})"


def deepspeed_load(dst: Path, target: TargetCatalog, images: Sequence[FileImage]) -> str:
    """Return the call of DeepSpeed's engine, with the setting that it needs."""
    return (
        f'engine.load_checkpoint({quoted(dst)})  # config: "checkpoint": {{"load_universal": true}}'
    )


def orbax_restore(dst: Path, target: TargetCatalog, images: Sequence[FileImage]) -> str:
    """Return the call of Orbax, which takes absolute paths only."""
    if target.write.is_step:
        parent = quoted(Path(os.path.abspath(dst.parent)))
        step = int(dst.name)
        return f"ocp.CheckpointManager({parent}).restore({step}, args=ocp.args.StandardRestore())"
    return f"ocp.StandardCheckpointer().restore({quoted(Path(os.path.abspath(dst)))})"


def zarr_open(dst: Path, target: TargetCatalog, images: Sequence[FileImage]) -> str | None:
    """Return the call of TensorStore for an array of zarr 2; None if there is no array."""
    return _tensorstore_open(dst, images, ".zarray", driver="zarr")


def zarr3_open(dst: Path, target: TargetCatalog, images: Sequence[FileImage]) -> str | None:
    """Return the call of zarr-python, or of TensorStore for types that only it has."""
    dtypes = [tensor.dtype for tensor in target.tensors.values()]
    if not any(dtype.startswith(_NOT_IN_ZARR_PYTHON) for dtype in dtypes):
        return f'zarr.open_group({quoted(dst)}, mode="r")'
    return _tensorstore_open(dst, images, "/zarr.json", driver="zarr3")


def _tensorstore_open(
    dst: Path, images: Sequence[FileImage], suffix: str, *, driver: str
) -> str | None:
    # The directory of the first tensor stands for that of any.
    paths = [image.path for image in images if image.path.endswith(suffix)]
    if not paths:
        return None
    store = {"driver": "file", "path": str(dst / Path(paths[0]).parent)}
    return f"tensorstore.open({json.dumps({'driver': driver, 'kvstore': store})}).result()"


def safetensors_load(dst: Path, target: TargetCatalog, images: Sequence[FileImage]) -> str:
    """Return the calls of safetensors for one file or several."""
    if target.write.is_file:
        return f"load_file({quoted(dst)})"
    paths = [image.path for image in images if image.path.endswith(".safetensors")]
    if len(paths) == 1:
        return f"load_file({quoted(dst / paths[0])})"
    facts = target.facet(WeightFileFacts)
    if facts is not None and facts.further_models:  # their tensors may have the same names
        return ", ".join(f"load_file({quoted(dst / path)})" for path in paths)
    pattern = quoted(dst / "*.safetensors")
    return f"{{k: v for file in glob.glob({pattern}) for k, v in load_file(file).items()}}"


def quoted(path: Path) -> str:
    """Return a path as a string of Python's syntax."""
    return json.dumps(str(path), ensure_ascii=False)
