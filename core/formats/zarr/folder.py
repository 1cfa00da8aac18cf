"""A zarr array as a directory of metadata and chunks, read and written in the same way for zarr 2
and zarr 3.
"""

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
        file: the metadata file.
        chunks: its stored chunks and their positions.
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
    """Return the catalog of a hierarchy.

    Args:
        store: the checkpoint; indexes of shards are read from it when fragments are asked for.
        folders: the arrays by key.
    """

    @lru_cache(maxsize=4)
    def fragments_of(key: str) -> Sequence[Fragment]:
        zarr_folder = folders[key]
        return fragments_of_chunks(
            store, key, zarr_folder.array, zarr_folder.chunks, file=zarr_folder.file
        )

    incomplete = {
        key: zarr_folder.array.sharding is not None and not zarr_folder.chunks.absent
        for key, zarr_folder in folders.items()
        if zarr_folder.chunks.absent
        or (zarr_folder.chunks.fill is not None and zarr_folder.array.sharding is not None)
    }
    catalog = Catalog(
        format=format,
        version=version,
        tensors={
            key: TensorMeta(key, zarr_folder.array.dtype, zarr_folder.array.grid.shape)
            for key, zarr_folder in folders.items()
        },
        fragments_of=fragments_of,
        objects=objects or {},
    )
    return catalog.with_facet(ZarrFacts(incomplete)) if incomplete else catalog


def without_unread(
    catalog: Catalog, unread: Mapping[str, UnsupportedError | UnsafeError]
) -> Catalog:
    """Return the catalog of a hierarchy with objects in place of the arrays that were not read.

    Arrays of an unsupported kind are objects without a value, like such tensors in other formats
    (``Catalog.unsupported``); arrays of pickles are calls of the function that would read them. The
    rest can be inspected, and copied once these are left out.

    Args:
        unread: key → the error.

    Raises:
        UnsafeError: an array is unsafe for another reason than pickles.
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


def metadata_image(
    path: str, text: bytes, grid: ChunkGrid, arrays: Mapping[Shape, PlannedArray]
) -> FileImage:
    """Return the image of an array's metadata file.

    An array without elements lies in it, as it has no chunk.
    """
    image = literal_file(path, text)
    if grid.n_chunks:
        return image
    return replace(image, arrays=tuple(PlacedArray(0, array) for array in arrays.values()))


def chunk_files(
    folder: str, names: ChunkNames, grid: ChunkGrid, arrays: Mapping[Shape, PlannedArray]
) -> Iterator[tuple[str, PlannedArray]]:
    """Yield path and array of every chunk to write."""
    if grid.n_chunks:
        for index, array in arrays.items():
            yield f"{folder}/{names.name(index)}", array
