"""``.metadata`` for items that are written, as a file layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from core.catalog.catalog import (
    TargetCatalog,
)
from core.catalog.file_image import literal_file
from core.formats.dcp.items import ItemLayout
from core.formats.dcp.metadata_writer import ChunkRow, ObjectRow, TensorRow, write_metadata
from core.formats.dcp.plans import PlanRow
from core.formats.dcp.reading.data_files import METADATA

if TYPE_CHECKING:
    from core.catalog.file_image import FileImage


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
            meta = target.tensors.get(key)
            if meta is None:
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
            yield TensorRow(key, meta.dtype, meta.shape, chunks)

    attributes = {} if mcore_data is None else {"mcore_data": dict(mcore_data)}
    data = write_metadata(rows(), planner_data=planner_data, attributes=attributes, plans=plans)
    return literal_file(METADATA, data, is_metadata=True)
