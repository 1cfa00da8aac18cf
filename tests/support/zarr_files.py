"""What the tests of zarr 2 and zarr 3 share: sources, and a whole run of the engine into a
directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from core.arrays.box import Box
from core.arrays.dtypes import DTYPES
from core.engine.catalog.catalog import Catalog, StoredObject, TargetCatalog
from core.engine.catalog.facets import WriteOptions
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment, Tensor
from core.engine.copy.run import execute
from core.engine.plan.plan import make_plan
from core.files.store import MemoryStore, ReadStore
from core.formats.format import Format
from core.opening.objects import loaded
from core.opening.target import source_and_target
from core.publish.manifest.of_copy import finish_files
from core.publish.stage.files import StageStore
from tests.support.fragments import with_fragments


def element_bytes(
    key: str, dtype: str, shape: tuple[int, ...]
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Dense elements as bytes (the shape, then one axis of itemsize): a function of key and
    index.
    """
    size, n_bits = DTYPES[dtype].itemsize, DTYPES[dtype].value_bits
    n = int(np.prod(shape, dtype=np.int64)) * size
    numbers = np.arange(n, dtype=np.uint64) * 2654435761 + sum(key.encode()) * 97
    data = ((numbers >> 7) ^ (numbers >> 19)).astype(np.uint8)
    if dtype == "bool":
        data &= 1
    elif n_bits is not None:  # in the low bits of a byte
        data &= (1 << n_bits) - 1
    return data.reshape(*shape, size)


def source_of(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    chunks: Mapping[str, tuple[int, ...]] | None = None,
    objects: Mapping[str, object] | None = None,
    iteration: int | None = None,
) -> tuple[Catalog, MemoryStore]:
    """A source with these tensors, those with a chunk shape cut into such pieces, one file each."""
    chunks = chunks or {}
    files: dict[str, bytes | bytearray] = {}
    fragments: dict[str, list[Fragment]] = {}
    for key, (dtype, shape) in tensors.items():
        data = element_bytes(key, dtype, shape)
        step = chunks.get(key, shape)
        fragments[key] = []
        for offset in np.ndindex(
            *(-(-n // max(s, 1)) or 1 for n, s in zip(shape, step, strict=True))
        ):
            start = tuple(o * s for o, s in zip(offset, step, strict=True))
            end = tuple(min(o + s, n) for o, s, n in zip(start, step, shape, strict=True))
            box = Box(start, tuple(e - o for o, e in zip(start, end, strict=True)))
            name = f"{key}@{start}"
            files[name] = data[
                tuple(slice(o, e) for o, e in zip(start, end, strict=True))
            ].tobytes()
            array = StoredArray(name, dtype, box.shape, Extent(name, 0))
            fragments[key].append(Fragment(box, array, (0,) * len(shape)))
    catalog = Catalog(
        "memory",
        None,
        with_fragments(
            {key: Tensor(dtype, shape) for key, (dtype, shape) in tensors.items()},
            fragments.__getitem__,
        ),
        objects={key: StoredObject(key, value=value) for key, value in (objects or {}).items()},
        iteration=iteration,
    )
    return catalog, MemoryStore(files)


def written(
    catalog: Catalog, store: ReadStore, format: Format, folder: Path, **options: Any
) -> Path:
    """Return the checkpoint that the engine makes of a source.

    Args:
        options: of ``WriteOptions``.
    """
    source, target = source_and_target(loaded(catalog, store), format)
    return filled(source, store, replace(target, write=WriteOptions(**options)), format, folder)


def filled(
    source: Catalog, store: ReadStore, target: TargetCatalog, format: Format, folder: Path
) -> Path:
    """The checkpoint of a target catalog."""
    assert format.lay_out is not None
    plan = make_plan(source, target, tuple(format.lay_out(target)))
    folder.mkdir(parents=True)
    stage = StageStore(folder, is_durable=False)
    finish_files(plan, execute(plan, store, stage), stage, crc=True)
    stage.close()
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    """Relative name → bytes, of every file below a directory."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in _paths(folder)}


def _paths(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def by_tensorstore(folder: Path, driver: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The elements of an array as tensorstore reads them, as bytes."""
    import tensorstore as ts

    spec = {"driver": driver, "kvstore": f"file://{folder}/"}
    return as_bytes(ts.open(spec, open=True, read=True).result().read().result())


def as_bytes(elements: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Elements as bytes, like ``element_bytes``."""
    dense = np.asarray(elements)
    return np.frombuffer(dense.tobytes(), np.uint8).reshape(*dense.shape, dense.dtype.itemsize)
