"""The slow, obvious way from a source catalog to finished files: for tests of formats, without plan
and copy.

Everything goes through one numpy array per tensor; nothing here shares code with the engine.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from core.arrays.dtypes import itemsize
from core.engine.catalog.decoded import DecodedStore

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog, TargetCatalog
    from core.engine.catalog.file_image import FileImage
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
"""Elements as bytes: the shape of the tensor, then one axis of itemsize."""


def array_bytes(catalog: Catalog, store: ReadStore, array: StoredArray) -> Bytes:
    """The elements of one stored array, its strides resolved."""
    size = itemsize(array.dtype)
    store = DecodedStore(store)
    bound = store.placed(array.locate(store))
    extent = bound.extent
    assert not extent.is_late and extent.encoding is None
    shape = array.shape
    if 0 in shape:
        return np.zeros((*shape, size), np.uint8)
    strides = extent.strides
    if strides is None:
        return np.frombuffer(
            store.read(extent.file, extent.offset, array.n_bytes), np.uint8
        ).reshape(*shape, size)
    span = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    flat = np.frombuffer(store.read(extent.file, extent.offset, span * size), np.uint8)
    return np.lib.stride_tricks.as_strided(
        flat, (*shape, size), (*(step * size for step in strides), 1)
    ).copy()


def tensor_bytes(catalog: Catalog, store: ReadStore, key: str) -> Bytes:
    """All elements of one global tensor; every element must have a source, and replicas must
    agree.
    """
    tensor = catalog.tensor(key)
    values = np.zeros((*tensor.shape, itemsize(tensor.dtype)), np.uint8)
    is_covered = np.zeros(tensor.shape, bool)
    for fragment in catalog.fragments(key):
        region = tuple(
            slice(o, e) for o, e in zip(fragment.box.offset, fragment.box.end, strict=True)
        )
        piece: Bytes = np.zeros((*fragment.box.shape, values.shape[-1]), np.uint8)
        if fragment.array is not None:
            piece = _region(
                array_bytes(catalog, store, fragment.array), fragment.at, fragment.box.shape
            )
        if is_covered[region].all():
            assert (values[region] == piece).all(), f"replicas of {key} differ"
        values[region] = piece
        is_covered[region] = True
    assert is_covered.all(), f"{key} has elements without a source"
    return values


def _region(stored: Bytes, at: tuple[int, ...], shape: tuple[int, ...]) -> Bytes:
    """The box of a stored array that begins at ``at``; the two are aligned at their last axis."""
    full = ((1,) * (len(at) - len(shape)) + shape)[-len(at) :] if at else ()
    region = stored[tuple(slice(o, o + n) for o, n in zip(at, full, strict=True))]
    return region.reshape(*shape, stored.shape[-1])


def materialized(
    images: Sequence[FileImage], *, target: TargetCatalog, source: Catalog, store: ReadStore
) -> Mapping[str, bytes]:
    """The finished files.

    Args:
        images: what ``lay_out`` made of ``target``.
        target: arrays without extent.
        source: tensors and hidden tensors of the same keys.
        store: where ``source`` lies.
    """
    content: dict[str, bytes] = {}
    for key, _ in target.all_tensors():
        values = tensor_bytes(source, store, key)
        for fragment in target.fragments(key):
            assert fragment.array is not None
            box = fragment.box
            piece = values[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))]
            assert set(fragment.at) <= {0}, "only whole arrays here"
            assert piece.size == fragment.array.n_bytes
            content[fragment.array.name] = piece.tobytes()
    files: dict[str, bytes] = {}
    for image in images:
        image_bytes = bytearray(image.size)
        taken = np.zeros(image.size, bool)
        for placed in image.arrays:
            data = content[placed.array.name]
            end = placed.offset + len(data)
            assert end <= image.size and not taken[placed.offset : end].any(), (
                f"{placed.array.name} overlaps"
            )
            taken[placed.offset : end] = True
            image_bytes[placed.offset : end] = data
        for offset, data in image.literals(lambda name: zlib.crc32(content[name])):
            end = offset + len(data)
            assert end <= image.size and not taken[offset:end].any(), (
                f"{image.path}: literal at {offset} overlaps"
            )
            taken[offset:end] = True
            image_bytes[offset:end] = data
        files[image.path] = bytes(image_bytes)
    return files


def write_files(files: Mapping[str, bytes], folder: Path) -> Path:
    """Puts finished files into a directory."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder
