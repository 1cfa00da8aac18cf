"""A zarr array that is a directory: its metadata file and its chunks, read and written alike by zarr 2 and zarr 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from core.catalog.catalog import Catalog, StoredObject, TensorMeta
from core.catalog.file_image import FileImage, PlacedArray, literal_file
from core.errors import UnsafeError, UnsupportedError
from core.formats.zarr.array import PICKLED
from core.formats.zarr.chunks import Chunks, fragments_of_chunks
from core.formats.zarr.facets import ZarrFacts
from core.pickle.inert import Global, Inert

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.catalog.catalog import Fragment
    from core.catalog.stored import PlannedArray
    from core.files.store import ReadStore
    from core.formats.zarr.array import ZarrArray
    from core.formats.zarr.grid import ChunkGrid, ChunkNames


@dataclass(frozen=True, slots=True)
class ZarrFolder:
    """An array in a directory.

    Args:
        array: its metadata.
        file: that holds them.
        chunks: which of its chunks are stored, and where.
    """

    array: ZarrArray
    file: str
    chunks: Chunks


def catalog_of_folders(
    store: ReadStore,
    folders: Mapping[str, ZarrFolder],
    *,
    format: str,
    version: str,
    objects: Mapping[str, StoredObject] | None = None,
) -> Catalog:
    """The catalog of a hierarchy.

    Args:
        store: from which the indexes of shards are read, when the fragments are asked for.
        folders: the arrays by key.
    """

    @lru_cache(maxsize=4)
    def fragments_of(key: str) -> Sequence[Fragment]:
        found = folders[key]
        return fragments_of_chunks(store, key, found.array, found.chunks, file=found.file)

    incomplete = {
        key: found.array.sharding is not None and not found.chunks.absent
        for key, found in folders.items()
        if found.chunks.absent or (found.chunks.fill is not None and found.array.sharding is not None)
    }
    catalog = Catalog(
        format=format,
        version=version,
        tensors={key: TensorMeta(key, found.array.dtype, found.array.grid.shape) for key, found in folders.items()},
        fragments_of=fragments_of,
        objects=objects or {},
    )
    return catalog.with_facet(ZarrFacts(incomplete)) if incomplete else catalog


def without_unread(catalog: Catalog, unread: Mapping[str, UnsupportedError | UnsafeError]) -> Catalog:
    """The catalog of a hierarchy in which some arrays are not read.

    Those of a kind that is not handled are objects without a value, as the other formats have such tensors
    (``Catalog.unsupported``); those of pickles are calls of what would read them. The rest can be looked at, and copied
    once they are left out.

    Args:
        unread: key → why.

    Raises:
        UnsafeError: something else than pickles.
    """
    if not unread:
        return catalog
    objects: dict[str, StoredObject] = {}
    kinds: dict[str, str] = {}
    for key, err in unread.items():
        if isinstance(err, UnsupportedError):
            kinds[key] = f"zarr array of that kind ({err.message})"
            objects[key] = StoredObject(key, value=f"not read: {err.message}")
        elif err.rule == PICKLED:
            objects[key] = StoredObject(key, value=Inert("reduce", _READS_PICKLES, (err.message,)))
        else:
            raise err
    return replace(catalog, objects={**catalog.objects, **objects}, unsupported=kinds)


_READS_PICKLES = Global("numcodecs.pickles", "Pickle.decode")


def metadata_image(path: str, text: bytes, grid: ChunkGrid, arrays: Mapping[Shape, PlannedArray]) -> FileImage:
    """The image of an array's metadata file, in which an array without elements lies, as it has no chunk."""
    image = literal_file(path, text)
    if grid.n_chunks:
        return image
    return replace(image, arrays=tuple(PlacedArray(0, array) for array in arrays.values()))


def chunk_files(
    folder: str, names: ChunkNames, grid: ChunkGrid, arrays: Mapping[Shape, PlannedArray]
) -> Iterator[tuple[str, PlannedArray]]:
    """(path, array) of every chunk that is to be written."""
    if grid.n_chunks:
        for index, array in arrays.items():
            yield f"{folder}/{names.name(index)}", array
