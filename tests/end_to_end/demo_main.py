"""Proofs for scripts/demo: reads what ckpt wrote with PyTorch's own readers and compares bit for
bit.

None of the project's code is used here. Rank files name classes of Megatron-LM; stand-ins take
their place.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

PER_RANK = {"rng_state"}
"""Belongs to the ranks that were; ckpt says that it does not carry it to others."""
PARALLEL_ARGS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "padded_vocab_size",
    "num_layers",
)


class _StandIn:
    """Takes the place of a Megatron class; equal if made from equal parts."""

    def __init__(self, *parts: object) -> None:
        self.parts = parts


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "megatron":
            return type(name, (_StandIn,), {"__module__": module})
        return super().find_class(module, name)


_PICKLE = types.ModuleType("stand_in_pickle")
_PICKLE.__dict__.update(pickle.__dict__, Unpickler=_Unpickler)


def fail(message: str) -> None:
    """Ends the demo."""
    raise SystemExit(f"NOT EQUAL: {message}")


def rank_file(path: Path) -> dict[str, Any]:
    """A Megatron rank file, by torch.load."""
    loaded: dict[str, Any] = torch.load(
        path, weights_only=False, pickle_module=_PICKLE, map_location="cpu"
    )
    return loaded


def rank_files(root_dir: Path) -> dict[str, dict[str, Any]]:
    """Rank directory and name → what the file holds, for the iteration that the tracker names."""
    iteration = int((root_dir / "latest_checkpointed_iteration.txt").read_text())
    paths = sorted(root_dir.glob(f"iter_{iteration:07d}/mp_rank_*/*.pt"))
    return {f"{path.parent.name}/{path.name}": rank_file(path) for path in paths}


def check_tensor(where: str, ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Compares dtype, shape and every bit; returns the number of bytes."""
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        fail(
            f"{where}: {ours.dtype} {tuple(ours.shape)} against {theirs.dtype} "
            f"{tuple(theirs.shape)}"
        )
    if not torch.equal(
        ours.contiguous().reshape(-1).view(torch.uint8),
        theirs.contiguous().reshape(-1).view(torch.uint8),
    ):
        fail(f"{where}: the bits differ")
    return ours.nbytes


def check_keys(where: str, ours: Any, theirs: Any) -> None:
    """Compares two sets of keys."""
    if set(ours) != set(theirs):
        fail(
            f"{where}: only ours {sorted(set(ours) - set(theirs))}, only theirs "
            f"{sorted(set(theirs) - set(ours))}"
        )


def check_same(where: str, ours: Any, theirs: Any) -> list[int]:
    """Compares nested containers with all that they hold; returns the bytes of each tensor."""
    if isinstance(theirs, torch.Tensor):
        if not isinstance(ours, torch.Tensor):
            fail(f"{where}: {type(ours).__name__} against a tensor")
        return [check_tensor(where, ours, theirs)]
    if isinstance(theirs, dict):
        check_keys(where, ours, theirs)
        return [
            n
            for key, value in theirs.items()
            for n in check_same(f"{where} {key}", ours[key], value)
        ]
    if isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            fail(f"{where}: {len(ours)} entries against {len(theirs)}")
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [
            n
            for at, (our_value, value) in pairs
            for n in check_same(f"{where} {at}", our_value, value)
        ]
    if ours != theirs:
        fail(f"{where}: {ours!r} against {theirs!r}")
    return []


def ranks(ours_dir: Path, theirs_dir: Path) -> str:
    """Rank files against rank files: every file, every entry (model, optimizer, scheduler …), the
    sizes.
    """
    ours, theirs = rank_files(ours_dir), rank_files(theirs_dir)
    check_keys("files", ours, theirs)
    sizes: dict[str, list[int]] = {}
    for file, rest in theirs.items():
        our_content = ours[file]
        for loaded in (our_content, rest):
            for name in PER_RANK:
                loaded.pop(name, None)
        args = our_content.pop("args", None), rest.pop("args", None)
        for name in PARALLEL_ARGS if args[1] is not None else ():
            if getattr(args[0], name) != getattr(args[1], name):
                fail(
                    f"{file} args.{name}: {getattr(args[0], name)} against {getattr(args[1], name)}"
                )
        check_keys(file, our_content, rest)
        for name, value in rest.items():
            part = "model" if str(name).startswith("model") else "optimizer"
            sizes.setdefault(part, []).extend(
                check_same(f"{file} {name}", our_content[name], value)
            )
    counts = " and ".join(
        f"{len(of)} tensors, {sum(of):,} bytes of the {label}" for label, of in sizes.items() if of
    )
    return (
        f"{counts} in {len(ours)} rank files equal what Megatron-LM saved, bit for bit, and "
        "so do all other entries"
    )


def dcp_directory(ours_dir: Path, theirs_dir: Path) -> str:
    """A DCP directory, by dcp.load, against the one rank file that Megatron-LM saved at TP1,
    PP1.
    """
    [theirs] = (rank["model"] for rank in rank_files(theirs_dir).values())
    weights = {key: value for key, value in theirs.items() if isinstance(value, torch.Tensor)}
    metadata = dcp.FileSystemReader(ours_dir).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(stored.size, dtype=stored.properties.dtype)
        for key, stored in metadata.items()
        if isinstance(stored, dcp.metadata.TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=ours_dir, no_dist=True)
    n_bytes = 0
    loaded = {key.removeprefix("model."): value for key, value in state.items()}
    for key, value in weights.items():
        if key not in loaded:
            fail(f"{key} is missing; there are {sorted(loaded)[:8]} …")
        ours = loaded[key]
        if ours.shape[0] < value.shape[0] and not value[ours.shape[0] :].any():
            value = value[
                : ours.shape[0]
            ]  # the rows that pad the vocabulary belong to one TP size only
        n_bytes += check_tensor(key, ours, value)
    return (
        f"{len(weights)} tensors, {n_bytes:,} bytes equal what Megatron-LM saved at TP1, "
        "bit for bit"
    )


def flat(value: Any, path: tuple[object, ...] = ()) -> dict[tuple[object, ...], Any]:
    """Path → leaf of nested dicts and lists."""
    if isinstance(value, dict) and value:
        return {
            at: leaf
            for key, inner in value.items()
            for at, leaf in flat(inner, (*path, key)).items()
        }
    if isinstance(value, (list, tuple)) and value:
        return {
            at: leaf
            for i, inner in enumerate(value)
            for at, leaf in flat(inner, (*path, i)).items()
        }
    return {path: value}


def torch_file(ours_path: Path, theirs_dir: Path) -> str:
    """A .pt file, by torch.load, against what torch's own dcp_to_torch_save makes of the DCP
    directory.
    """
    with tempfile.TemporaryDirectory() as folder:
        reference_path = Path(folder) / "reference.pt"
        dcp_to_torch_save(theirs_dir, reference_path)
        theirs = flat(torch.load(reference_path, weights_only=False))
    ours = flat(torch.load(ours_path))
    check_keys("entries", ours, theirs)
    n_tensors = n_bytes = 0
    for path, value in theirs.items():
        where = ".".join(map(str, path))
        if isinstance(value, torch.Tensor):
            n_bytes += check_tensor(where, ours[path], value)
            n_tensors += 1
        elif ours[path] != value:
            fail(f"{where}: {ours[path]!r} against {value!r}")
    return (
        f"{n_tensors} tensors, {n_bytes:,} bytes and {len(theirs) - n_tensors} other values "
        "equal what torch's own "
        "dcp_to_torch_save makes, bit for bit"
    )


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, or of those in a directory, read by safetensors."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        weights |= load_file(file)
    return weights


def safetensors_files(ours_dir: Path, theirs_path: Path) -> str:
    """safetensors against safetensors, by their own reader."""
    ours, theirs = weights_of(ours_dir), weights_of(theirs_path)
    check_keys("tensors", ours, theirs)
    n_bytes = sum(check_tensor(key, ours[key], value) for key, value in theirs.items())
    return f"{len(theirs)} tensors, {n_bytes:,} bytes equal {theirs_path.name}, bit for bit"


if __name__ == "__main__":
    checks = {
        "ranks": ranks,
        "dcp": dcp_directory,
        "torch": torch_file,
        "safetensors": safetensors_files,
    }
    proof = checks[sys.argv[1]]
    print("proof:", proof(Path(sys.argv[2]), Path(sys.argv[3])))
