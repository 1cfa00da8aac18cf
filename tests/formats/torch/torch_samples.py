"""Values to save with torch, and what comes of them: for the tests of torch files."""

from __future__ import annotations

import contextlib
import io
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import TorchFileFacts
from core.errors import CheckpointingException
from core.files.store import MemoryStore, ReadStore
from core.formats.torch.format import FORMAT, lay_out
from core.opening.target import partitioned
from core.pickle.inert import Global, Inert, Persistent, walk
from core.pickle.plain import to_plain
from core.pickle.reader import load
from core.pickle.writer import dumps
from tests.support.facets import facet_of
from tests.support.materialize import materialized, tensor_bytes

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
    torch.complex128,
    torch.complex64,
    torch.complex32,
)


def filled(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor whose bytes are all its own: a function of index, shape and seed."""
    size = torch.empty(0, dtype=dtype).element_size()
    n = int(np.prod(shape, dtype=np.int64)) * size
    generator = np.random.default_rng([seed, n, *shape])
    if not n:
        return torch.empty(shape, dtype=dtype)
    raw = generator.integers(0, 256 if dtype != torch.bool else 2, size=n, dtype=np.uint8)
    return torch.frombuffer(bytearray(raw.tobytes()), dtype=torch.uint8).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in C order."""
    dense = tensor.detach().contiguous()
    return b"" if not dense.numel() else dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(actual: Any, expected: Any) -> None:
    """Equal types, nesting and order; tensors equal bit for bit."""
    assert type(actual) is type(expected), f"{type(actual)} for {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape, actual.requires_grad) == (
            expected.dtype,
            expected.shape,
            expected.requires_grad,
        )
        assert bits(actual) == bits(expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, item in expected.items():
            assert_same(actual[key], item)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for our_item, other in zip(actual, expected, strict=True):
            assert_same(our_item, other)
    else:
        assert actual == expected


def kinds_of(dtype: torch.dtype) -> dict[str, Any]:
    """Every way in which a tensor can lie in its storage."""
    base = filled(dtype, 6, 5, seed=1)
    storage = filled(dtype, 60, seed=2)
    return {
        "whole": base,
        "same again": base,
        "rows": base[2:4],
        "columns": base[:, 1:3],
        "transposed": base.t(),
        "strided": storage[3:40:4],
        "blocks": storage.as_strided((3, 2, 2), (1, 20, 5), 7),
        "scalar": filled(dtype, seed=3),
        "one of many": storage[17],
        "expanded": filled(dtype, 1, seed=4).expand(3, 4),
        "channels last": filled(dtype, 2, 3, 4, 5, seed=5).permute(0, 3, 1, 2),
        "empty": filled(dtype, 0),
        "empty matrix": filled(dtype, 3, 0, 2),
        "empty view": storage[4:4],
        "ones": filled(dtype, 1, 7, 1, seed=6),
        "nested": {"list": [storage[:5], (storage[5:6], {"deep": base[1]})]},
    }


def saved(value: object, **options: Any) -> bytes:
    """What torch.save writes."""
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def saved_legacy(value: object, **options: Any) -> bytes:
    """What torch.save wrote before torch 1.6."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Couldn't retrieve source code")
        return saved(value, _use_new_zipfile_serialization=False, **options)


def deflated(data: bytes) -> bytes:
    """A torch zip packed again by another program."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as source,
        zipfile.ZipFile(stream, "w", compression=zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return stream.getvalue()


def opened(data: bytes, name: str = "f.pt") -> tuple[Catalog, MemoryStore]:
    """The catalog of a file."""
    store = MemoryStore({name: data}, entry=name)
    assert FORMAT.sniff(store)
    return FORMAT.read(store), store


def written(catalog: Catalog, store: ReadStore) -> bytes:
    """The file that the format makes of a catalog."""
    target = partitioned(catalog, format="torch", by="whole")
    images = lay_out(target)
    (data,) = materialized(images, target=target, source=catalog, store=store).values()
    return data


def rewritten(data: bytes) -> bytes:
    """What the format writes of what it reads."""
    catalog, store = opened(data)
    return written(catalog, store)


def attempt(data: bytes) -> None:
    """Reads and writes a file; only errors of ours may come."""
    store = MemoryStore({"f.pt": data}, entry="f.pt")
    with contextlib.suppress(CheckpointingException):
        if FORMAT.sniff(store):
            written(FORMAT.read(store), store)


def entry_bytes(catalog: Catalog, store: ReadStore, key: str) -> bytes:
    """The elements of one tensor of a catalog."""
    return tensor_bytes(catalog, store, key).tobytes()


def loads(data: bytes, path: Path, *, weights_only: bool = True) -> list[Any]:
    """What every way of loading makes of a file."""
    path.write_bytes(data)
    return [
        torch.load(path, weights_only=weights_only),
        torch.load(path, weights_only=False),
        torch.load(path, weights_only=weights_only, mmap=True),
        torch.load(io.BytesIO(data), weights_only=weights_only),
    ]


def a_tensor(
    shape: object = (2, 3),
    strides: object = (3, 1),
    offset: object = 0,
    *,
    numel: object = 16,
    key: object = "0",
    kind: str = "FloatStorage",
    pid: object = None,
) -> Inert:
    """The call that makes a tensor, with any arguments."""
    storage = Persistent(
        pid if pid is not None else ("storage", Global("torch", kind), key, "cpu", numel)
    )
    return Inert(
        "reduce",
        Global("torch._utils", "_rebuild_tensor_v2"),
        (storage, offset, shape, strides, False, None),
    )


def repickled(
    tree: object, *, data: bytes = bytes(64), extra: tuple[tuple[str, bytes], ...] = ()
) -> bytes:
    """A zip with one storage ``data/0`` and any pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a/data.pkl", tree if isinstance(tree, bytes) else dumps(tree))
        archive.writestr("a/data/0", data)
        for name, content in extra:
            archive.writestr(name, content)
    return stream.getvalue()


MAGIC = 0x1950A86A20F9469CFC6C
SYSTEM = {
    "protocol_version": 1001,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}


def legacy_stream(
    tree: object,
    storages: dict[str, tuple[int, bytes]],
    *,
    keys: object = None,
    version: object = 1001,
    system: object = SYSTEM,
) -> bytes:
    """A stream as torch wrote it before 1.6, of any tree.

    Args:
        tree: inert; a storage is ``Persistent(("storage", class, key, location, n, view))``.
        storages: key → (number of elements as stated before the data, data).
        keys: the list of storages; None for those of ``storages``.
    """
    heads = [MAGIC, version, system, tree, list(storages) if keys is None else keys]
    bodies = [n.to_bytes(8, "little", signed=True) + data for n, data in storages.values()]
    return b"".join([*map(dumps, heads), *bodies])


def facts_of(catalog: Catalog) -> list[object]:
    """Return what a file says beside its tensors and objects, in a form that ``==`` compares."""
    facts = facet_of(catalog, TorchFileFacts)
    fields = (
        catalog.iteration,
        catalog.args,
        catalog.ties,
        catalog.refused,
        catalog.notes,
        facts.shared,
    )
    return [facts.is_set_aside, *map(to_plain, fields)]


def as_legacy(data: bytes) -> bytes:
    """The content of a torch zip as a stream; classes need not be importable."""
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        root = source.namelist()[0].split("/")[0]
        tree = load(source.read(f"{root}/data.pkl"), label="zip")
        pids = {node.value[2]: node.value for node in walk(tree) if isinstance(node, Persistent)}  # type: ignore[index]
        storages = {
            key: (pid[4], source.read(f"{root}/data/{key}")) for key, pid in sorted(pids.items())
        }
    heads = [dumps(head) for head in (MAGIC, 1001, SYSTEM)]
    heads.append(dumps(tree, persistent_id=lambda leaf: (*leaf.value, None)))
    heads.append(dumps(list(storages)))
    return b"".join([*heads, *(n.to_bytes(8, "little") + body for n, body in storages.values())])
