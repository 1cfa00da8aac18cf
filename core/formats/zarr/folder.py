"""zarr arrays as directories of metadata and chunks: the parts that zarr 2 and zarr 3 share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.facets import ZarrFacts
from core.engine.catalog.file_image import FileImage, PlacedArray, literal_file
from core.engine.catalog.tensor import Tensor, bind_argument
from core.errors import UnsafeError, UnsupportedError
from core.formats.zarr.array import PICKLED
from core.formats.zarr.chunks import Chunks, fragments_of_chunks
from core.pickle.inert import Global, Inert
from core.values import dataclass

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.engine.catalog.attributes import AttributesByPath
    from core.engine.catalog.stored import PlannedArray
    from core.engine.catalog.tensor import Fragment
    from core.files.store import ReadStore
    from core.formats.zarr.array import ZarrArray
    from core.formats.zarr.grid import ChunkGrid, ChunkNames


@dataclass(frozen=True, slots=True)
class ZarrFolder:
    """An array that is stored in a directory.

    Args:
        array: the parsed metadata.
        file: path of the metadata file.
        chunks: the stored chunks and their locations.
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
    attributes: AttributesByPath | None = None,
) -> Catalog:
    """Return the catalog of a hierarchy.

    Args:
        store: the checkpoint; the indexes of shards are read from it when a tensor's fragments are
            requested.
        folders: the arrays by key.
        format, version: name of the format and its version, for the catalog.
        objects: everything that is not a tensor, by key.
        attributes: path of a group → its attributes.
    """

    @lru_cache(maxsize=4)
    def read_fragments(key: str) -> Sequence[Fragment]:
        zarr_folder = folders[key]
        return fragments_of_chunks(
            store, key, zarr_folder.array, zarr_folder.chunks, file=zarr_folder.file
        )

    # Tensors that may be partly fill value: files are missing, or shards may lack inner chunks.
    # The latter is known only after reading every index, so that it is left to ``fill.unstored``.
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
            key: Tensor(
                zarr_folder.array.dtype,
                zarr_folder.array.grid.shape,
                bind_argument(read_fragments, key),
                attributes=zarr_folder.array.attributes or None,
            )
            for key, zarr_folder in folders.items()
        },
        objects=objects or {},
        attributes={path: values for path, values in (attributes or {}).items() if values},
    )
    return catalog.with_facet(ZarrFacts(incomplete)) if incomplete else catalog


def without_unread(
    catalog: Catalog, unread: Mapping[str, UnsupportedError | UnsafeError]
) -> Catalog:
    """Return the catalog with placeholder objects for the arrays that could not be read.

    Arrays of an unsupported kind become objects without a value, like such tensors in other formats
    (``StoredObject.refused``); arrays of pickles become calls of the function that would read them.
    The other arrays can be inspected, and copied after the placeholders have been excluded.

    Args:
        unread: key of an array → the error raised while reading it.

    Raises:
        UnsafeError: an array is unsafe for another reason than pickles.
    """
    if not unread:
        return catalog
    objects: dict[str, StoredObject] = {}
    for key, err in unread.items():
        if isinstance(err, UnsupportedError):
            kind = f"Zarr array of this kind ({err.message})"
            objects[key] = StoredObject(key, value=f"not read: {err.message}", refused=kind)
        elif err.rule == PICKLED:
            objects[key] = StoredObject(key, value=Inert("reduce", _READS_PICKLES, (err.message,)))
        else:
            raise err
    return replace(catalog, objects={**catalog.objects, **objects})


_READS_PICKLES = Global("numcodecs.pickles", "Pickle.decode")


def lay_out_metadata(
    path: str, text: bytes, grid: ChunkGrid, arrays: Mapping[Shape, PlannedArray]
) -> FileImage:
    """Return the layout of an array's metadata file.

    Args:
        text: content of the file.
        arrays: index of a chunk → the array that is written to it.
    """
    image = literal_file(path, text)
    if grid.n_chunks:
        return image
    # Every planned array needs a file, but an array without elements has no chunk file.
    return replace(image, arrays=tuple(PlacedArray(0, array) for array in arrays.values()))


def chunk_files(
    folder: str, names: ChunkNames, grid: ChunkGrid, arrays: Mapping[Shape, PlannedArray]
) -> Iterator[tuple[str, PlannedArray]]:
    """Yield the path and the array of every chunk to write; nothing if there are no elements."""
    if grid.n_chunks:
        for index, array in arrays.items():
            yield f"{folder}/{names.name(index)}", array
