"""``.metadata`` as a file layout: for items that are written, or that stay in another checkpoint.

Its planner_data records the paths of the entries in the nested state dict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import AnyCatalog, Catalog, TargetCatalog
from core.engine.catalog.file_image import literal_file
from core.errors import UnsupportedError
from core.formats.dcp.items import ItemLayout
from core.formats.dcp.lightning_meta import meta_keys
from core.formats.dcp.metadata_writer import ChunkRow, ObjectRow, TensorRow, write_metadata
from core.formats.dcp.plans import PlanRow
from core.formats.dcp.reading.data_files import METADATA
from core.pickle.key_text import describe_key
from core.pickle.nesting import ListIndex, entries

if TYPE_CHECKING:
    from core.engine.catalog.file_image import FileImage


def metadata_image(
    target: TargetCatalog,
    layout: ItemLayout,
    *,
    planner_data: Mapping[str, tuple[str | int, ...]] | None,
    mcore_data: Mapping[str, object] | None = None,
    plans: Sequence[Sequence[PlanRow]] | None = None,
) -> FileImage:
    """Write ``.metadata`` and return it as a file layout.

    Args:
        target: the catalog that is written.
        layout: the positions of its items.
        planner_data: paths of the keys; None for Megatron.
        mcore_data: Megatron's facts about tensors; None to omit the attribute.
        plans: the entries that each rank writes; None to omit the attribute.
    """
    names = [image.path for image in layout.files]

    def rows() -> Iterator[TensorRow | ObjectRow]:
        for key in (*target.tensors, *layout.objects) if planner_data is None else planner_data:
            tensor = target.tensors.get(key)
            if tensor is None:
                item = layout.objects[key]
                yield ObjectRow(key, names[item.file], item.offset, item.size)
                continue
            chunks = []
            for item in layout.chunks[key]:
                assert item.box is not None, "the items of tensors have boxes"
                chunks.append(
                    ChunkRow(
                        item.box.offset, item.box.shape, names[item.file], item.offset, item.size
                    )
                )
            yield TensorRow(key, tensor.dtype, tensor.shape, chunks)

    attributes = {} if mcore_data is None else {"mcore_data": dict(mcore_data)}
    data = write_metadata(rows(), planner_data=planner_data, attributes=attributes, plans=plans)
    return literal_file(METADATA, data, is_metadata=True)


def linked_metadata(catalog: Catalog) -> FileImage:
    """Write a ``.metadata`` whose entries stay in the source's data files.

    Args:
        catalog: a result of ``build_catalog``, with some entries dropped or renamed; entries of
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
        "the entry is compressed or is not stored as an item, so new metadata cannot refer to it",
        key=key,
        hint="run the command again without --metadata-only",
    )
    tensor = catalog.tensors.get(key)
    if tensor is None:
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
    return TensorRow(key, tensor.dtype, tensor.shape, rows)


def paths_of(catalog: AnyCatalog) -> dict[str, tuple[str | int, ...]]:
    """Return the path of every tensor and object in the nested state dict, by key.

    torch flattens a state dict by joining paths with dots. An entry whose key is not its joined
    path is placed at the root, under its key.
    """
    paths: dict[str, tuple[str | int, ...]] = {}
    if catalog.skeleton is not None:
        for entry in entries(catalog.skeleton):
            path = tuple(
                int(part) if isinstance(part, ListIndex) else describe_key(part)
                for part in entry.path
            )
            if ".".join(map(str, path)) == entry.key and (
                entry.key in catalog.tensors or entry.key in catalog.objects
            ):
                paths[entry.key] = path
    for key in (*catalog.tensors, *catalog.objects):
        paths.setdefault(key, (key,))
    return paths
