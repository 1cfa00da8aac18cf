"""``.metadata`` whose entries stay in the data files of another checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.catalog.catalog import (
    Catalog,
)
from core.catalog.file_image import literal_file
from core.errors import (
    UnsupportedError,
)
from core.formats.dcp.lightning_meta import meta_keys
from core.formats.dcp.metadata_writer import ChunkRow, ObjectRow, TensorRow, write_metadata
from core.formats.dcp.reading.data_files import METADATA
from core.formats.dcp.writing.key_paths import paths_of

if TYPE_CHECKING:
    from core.catalog.file_image import FileImage


def linked_metadata(catalog: Catalog) -> FileImage:
    """Write a ``.metadata`` whose entries stay in the source's data files.

    Args:
        catalog: a result of ``catalog_of``, with some entries dropped or renamed; entries of
            ``meta.pt`` are ignored.

    Raises:
        UnsupportedError: an entry is compressed or not an item of its own, so ``.metadata`` cannot
            refer to it.
    """
    in_meta = meta_keys(catalog)
    planner_data = {key: path for key, path in paths_of(catalog).items() if key not in in_meta}
    data = write_metadata(
        (_linked_row(catalog, key) for key in planner_data), planner_data=planner_data
    )
    return literal_file(METADATA, data, is_metadata=True)


def _linked_row(catalog: Catalog, key: str) -> TensorRow | ObjectRow:
    """Return the row of ``.metadata`` for an entry in the source's data files."""
    refusal = UnsupportedError(
        "the entry is compressed or not an item of its own, so new metadata cannot refer to it",
        key=key,
        hint="run without --metadata-only",
    )
    meta = catalog.tensors.get(key)
    if meta is None:
        raw_key = catalog.objects[key].raw_key
        array = None if raw_key is None else catalog.fragments(raw_key)[0].array
        if array is None or array.extent.encoding is not None:
            raise refusal
        return ObjectRow(key, array.extent.file, array.extent.offset, array.n_bytes)
    rows = []
    for chunk in catalog.fragments(key):
        array = chunk.array
        item = None if array is None else array.extent.item
        if array is None or item is None or array.shape != chunk.box.shape:
            raise refusal
        rows.append(
            ChunkRow(
                chunk.box.offset,
                chunk.box.shape,
                array.extent.file,
                array.extent.offset,
                item.n_bytes,
            )
        )
    return TensorRow(key, meta.dtype, meta.shape, rows)
