"""The raw keys of a checkpoint: everything that its files hold, without the project's readers.

A raw key is a file, an entry of a zip, a header or an index, an array, or a leaf of a pickle or of
JSON, each with its value. ``unaccounted`` finds those that a conversion has lost without saying so:
a value has arrived if it is somewhere in the target, under the last part of its name at least if it
is one that occurs by accident. Containers without content are no raw keys.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

KNOWN_MODULES = re.compile(
    r"torch(\.(?!distributed\.(?!checkpoint))|$)|collections$|builtins$|argparse$|_?io$|_codecs$|numpy"
)
"""Modules whose classes are unpickled; all others become stand-ins."""
JSON = {".zattrs", ".zgroup", "_METADATA", "_sharding", "_CHECKPOINT_METADATA", "process_0"}
"""Names of files of JSON without a suffix."""
GLOBAL = "$global"
"""Key of the module and name of a class or constant, as the project itself writes them."""


@dataclass(frozen=True)
class RawKey:
    """Something that a file of a checkpoint holds.

    Args:
        file: path of the file, relative to the checkpoint.
        path: where it is in the file: () for the file itself.
        value: a tensor, the bytes of a file, or another leaf.
    """

    file: str
    path: tuple[str, ...]
    value: object

    def __str__(self) -> str:
        return f"{self.file}: {'.'.join(self.path)}"


class StandIn:
    """An object of a class that is not looked up: what its pickle says of it."""

    content: dict[str, object]

    def __new__(cls, *args: object, **kwargs: object) -> StandIn:
        instance = object.__new__(cls)
        instance.content = {"args": args, **kwargs}
        return instance

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.content["state"] = state

    def __setitem__(self, key: object, value: object) -> None:
        self.content[str(key)] = value

    def append(self, value: object) -> None:
        self.content[str(len(self.content))] = value

    def extend(self, values: Iterable[object]) -> None:
        for value in values:
            self.append(value)

    add = append


def _rebuild_tensor(func: Any, kind: type, args: Any, state: Any) -> object:
    """Rebuild a tensor with attributes; of one that consists of others, return those."""
    if issubclass(kind, torch.Tensor):
        return torch._tensor._rebuild_from_type_v2(func, kind, args, state)
    parts = state if isinstance(state, tuple) else (state,)
    return [part for part in parts if part is not None]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "_rebuild_from_type_v2":
            return _rebuild_tensor
        if name == "_rebuild_wrapper_subclass":
            return type(name, (StandIn,), {"__module__": module})
        if KNOWN_MODULES.match(module):
            return super().find_class(module, name)
        return type(name, (StandIn,), {"__module__": module})


_PICKLE = SimpleNamespace(
    Unpickler=_Unpickler, load=pickle.load, loads=pickle.loads, __name__="raw_keys_pickle"
)


def read_raw_keys(root: Path) -> list[RawKey]:
    """Read all raw keys of a checkpoint, a file or a directory."""
    paths = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    base = root.parent if root.is_file() else root
    keys: list[RawKey] = []
    for path in paths:
        if _is_data(path):
            continue
        name = path.relative_to(base).as_posix()
        inside = [RawKey(name, place, value) for place, value in _read_file(path)]
        # A file whose content is read below is not compared as a whole.
        keys += inside or [RawKey(name, (), path.read_bytes())]
    return keys


def _is_data(path: Path) -> bool:
    """Return whether a file holds parts of arrays that another file describes."""
    if path.suffix == ".distcp":
        return (path.parent / ".metadata").exists()
    if path.name in (".zarray", ".zattrs", "zarr.json"):
        return False
    folders = [*path.parents][:5]
    is_array = any(
        (folder / name).exists() for folder in folders for name in (".zarray", "zarr.json")
    )
    return is_array or any(
        folder.name == "d" or folder.name.startswith("ocdbt.process") for folder in folders
    )


Pairs = Iterator[tuple[tuple[str, ...], object]]


def _read_file(path: Path) -> Pairs:
    """Yield place and value of everything in a file; nothing if the file is of no known kind."""
    name = path.name
    if name == ".metadata":
        yield from _read_dcp(path)
    elif name.endswith(".safetensors"):
        yield from _read_safetensors(path)
    elif (name.endswith(".json") and name != "zarr.json") or name in JSON:
        yield from walk(json.loads(path.read_bytes()))
    elif name in (".zarray", "zarr.json"):
        yield from _read_zarr(path)
    elif name == "manifest.ocdbt":
        yield from _read_ocdbt(path.parent)
    elif name.endswith((".pt", ".pth", ".bin", ".ckpt", ".pkl")) or zipfile.is_zipfile(path):
        yield from _read_torch(path.read_bytes())


def _read_torch(data: bytes) -> Pairs:
    """Yield the records and the leaves of a file of ``torch.save``; nothing if it is none."""
    options: dict[str, Any] = {}
    if zipfile.is_zipfile(io.BytesIO(data)):
        options = {"pickle_module": _PICKLE}
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
        if not any(name.endswith("/data.pkl") for name in names):
            return
        for name in names:
            yield ("@record", name.partition("/")[2]), None
    try:
        value = torch.load(
            io.BytesIO(data), map_location="cpu", weights_only=not options, **options
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        return
    yield from walk(value)


def walk(value: object, path: tuple[str, ...] = (), above: tuple[int, ...] = ()) -> Pairs:
    """Yield the path and value of every leaf of a tree, with attributes of tensors and mappings."""
    if id(value) in above:
        return
    above = (*above, id(value))
    children: Iterable[tuple[object, object]] = ()
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield path, value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
    elif isinstance(value, StandIn):
        kind = type(value)
        children = {GLOBAL: (kind.__module__, kind.__qualname__), **value.content}.items()
    elif isinstance(value, torch.dtype):
        children = {GLOBAL: str(value).split(".")}.items()
    elif isinstance(value, torch.device):
        children = {GLOBAL: ("torch", "device"), "args": (value.type,)}.items()
    elif isinstance(value, argparse.Namespace):
        children = vars(value).items()
    elif isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, (list, tuple, set, frozenset)) and not isinstance(value, torch.Size):
        children = ((str(number), item) for number, item in enumerate(value))
    elif isinstance(value, io.BytesIO):
        yield path, value.getvalue()
    else:
        yield path, value
    for key, item in children:
        yield from walk(item, (*path, str(key)), above)
    if isinstance(value, (torch.Tensor, Mapping)):
        for name, item in getattr(value, "__dict__", {}).items():
            yield from walk(item, (*path, f"@{name}"), above)


def _read_safetensors(path: Path) -> Pairs:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        yield from walk({"__metadata__": file.metadata() or {}})
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            yield (key,), file.get_tensor(key)


def _read_dcp(path: Path) -> Pairs:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    metadata: Any = _Unpickler(io.BytesIO(path.read_bytes())).load()
    for name in ("planner_data", "storage_meta"):
        yield from walk(getattr(metadata, name, None), ("@metadata", name))

    def read(index: MetadataIndex) -> bytes:
        place = metadata.storage_data[index]
        with (path.parent / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            return file.read(place.length)

    for key, item in metadata.state_dict_metadata.items():
        if not isinstance(item, TensorStorageMetadata):
            data = read(MetadataIndex(key))
            pairs = [pair for pair in _read_torch(data) if pair[0][:1] != ("@record",)]
            for place, value in pairs or [((), data)]:
                yield (key, *place), value
            continue
        full = torch.zeros(item.size, dtype=item.properties.dtype)
        for chunk in item.chunks:
            stream = io.BytesIO(read(MetadataIndex(key, chunk.offsets)))
            piece = torch.load(stream, weights_only=False, pickle_module=_PICKLE)
            if not isinstance(piece, torch.Tensor):  # one that consists of others
                yield from walk(piece, (key,))
                continue
            box = tuple(
                slice(start, start + n) for start, n in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            full[box] = piece
        yield (key,), full


def _read_zarr(path: Path) -> Pairs:
    document = json.loads(path.read_bytes())
    yield from walk(document.get("attributes", {}), ("attributes",))
    yield from walk(document.get("dimension_names"), ("dimension_names",))
    if path.parent.name.endswith(".sync") or document.get("node_type") == "group":
        return
    driver = "zarr3" if path.name == "zarr.json" else "zarr"
    yield (path.parent.name,), _open_tensorstore(driver, f"file://{path.parent}/")


def _open_tensorstore(driver: str, kvstore: object) -> torch.Tensor:
    import tensorstore as ts

    opened = ts.open({"driver": driver, "kvstore": kvstore}, open=True, read=True).result()
    data = np.ascontiguousarray(opened.read().result())
    if opened.dtype.name == "bfloat16":
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(data if data.shape else data.reshape(()))


def _read_ocdbt(folder: Path) -> Pairs:
    import tensorstore as ts

    base = {"driver": "ocdbt", "base": f"file://{folder}/"}
    for key in ts.KvStore.open(base).result().list().result():
        name, _, marker = key.decode().rpartition("/")
        driver = {".zarray": "zarr", "zarr.json": "zarr3"}.get(marker)
        if driver is not None:
            yield (name,), _open_tensorstore(driver, {**base, "path": f"{name}/"})


@dataclass
class Contents:
    """Where values of a target can be found.

    Args:
        keys: the raw keys of the target.
    """

    keys: list[RawKey]
    elements: dict[torch.dtype, np.ndarray] = field(default_factory=dict)

    @cached_property
    def digests(self) -> set[str]:
        """Digests of all tensors, of all files and of byte strings."""
        return {_digest(key.value) for key in self.keys} - {""}

    @cached_property
    def leaves(self) -> set[tuple[str, str]]:
        """The last part of the path of every other leaf, and its value; tensors of one element."""
        return {
            (_last(key.path), _text(key.value))
            for key in self.keys
            if not isinstance(key.value, torch.Tensor) or key.value.numel() == 1
        }

    @cached_property
    def texts(self) -> set[str]:
        """The values of all leaves."""
        return {text for _, text in self.leaves}

    @cached_property
    def small_elements(self) -> bytes:
        """The elements of all tensors whose elements are one byte, which tell nothing singly."""
        return b"".join(
            _bytes(key.value)
            for key in self.keys
            if isinstance(key.value, torch.Tensor) and key.value.dtype.itemsize == 1
        )

    def elements_of(self, dtype: torch.dtype) -> np.ndarray:
        """Return the different elements of all tensors of a dtype, as integers."""
        if dtype not in self.elements:
            parts = [
                _as_integers(key.value)
                for key in self.keys
                if isinstance(key.value, torch.Tensor) and key.value.dtype == dtype
            ]
            self.elements[dtype] = np.unique(np.concatenate([*parts, np.zeros(1, np.int64)]))
        return self.elements[dtype]

    def hold(self, key: RawKey) -> bool:
        """Return whether a value is somewhere in the target.

        A tensor may have been cut or joined: its elements are looked for, if they tell something.
        """
        value = key.value
        if _digest(value) in self.digests:
            return True
        if not isinstance(value, torch.Tensor) or value.numel() == 1:
            if (_last(key.path), _text(value)) in self.leaves:
                return True
        if isinstance(value, torch.Tensor):
            if value.dtype.itemsize == 1:
                rows = value.reshape(-1, value.shape[-1] if value.ndim else 1)
                return all(_bytes(row) in self.small_elements for row in rows)
            elements, wanted = self.elements_of(value.dtype), _as_integers(value)
            places = np.searchsorted(elements, wanted).clip(max=len(elements) - 1)
            return bool((elements[places] == wanted).all())
        # A value that hardly occurs by accident may have another name.
        is_telling = (
            len(value) > 5
            if isinstance(value, (str, bytes))
            else (isinstance(value, float) and value % 1 != 0)
            or (isinstance(value, int) and abs(value) > 99)
        )
        return is_telling and _text(value) in self.texts


def _as_integers(tensor: torch.Tensor) -> np.ndarray:
    """Return the elements that are not zero, as integers of the same bits."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().contiguous().reshape(-1)
    bits = flat.view(kinds[tensor.dtype.itemsize]).numpy().astype(np.int64)
    return bits[bits != 0]


def _last(path: tuple[str, ...]) -> str:
    """Return the last part of a path that is no number."""
    names = (
        part for part in reversed(path) if part == GLOBAL or not re.fullmatch(r"\d+|\$.*", part)
    )
    return next(names, "").rpartition(".")[2]


def _text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return repr(value.item())
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _digest(value: object) -> str:
    if isinstance(value, torch.Tensor):
        value = _bytes(value)
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else ""


def is_listed(key: RawKey, names: Iterable[str]) -> bool:
    """Return whether one of the names of a report stands for a raw key, or for what contains it."""
    # Megatron names the shards of an entry "ENTRY/shard_0_1".
    path = f".{'.'.join(part.removeprefix('@') for part in key.path)}.".replace("/", ".")
    for name in names:
        if key.file == name or key.file.startswith(f"{name}/"):
            return True
        # "optimizer state 'x' of flat group 0" is about x, "w of rank 1" about w.
        quoted = re.search("'(.+)'", name)
        name = quoted[1] if quoted else name.partition(" ")[0]
        if key.path and f".{name.strip('.*').replace('/', '.')}." in path:
            return True
    return False


def unaccounted(
    source: list[RawKey],
    target: list[RawKey],
    listed: Iterable[str],
    structure: Mapping[str, str],
) -> list[RawKey]:
    """Return the raw keys of a source that are neither structure, nor carried, nor listed.

    Args:
        listed: names of the entries that the report lists as not carried.
        structure: pattern of ``FILE: PATH = VALUE`` → why such a key is no content.
    """
    contents, names = Contents(target), list(listed)
    is_structure = re.compile("|".join(map(translate, structure))).match
    return [
        key
        for key in source
        if not (
            is_structure(f"{key} = {_text(key.value)}")
            or contents.hold(key)
            or is_listed(key, names)
        )
    ]
