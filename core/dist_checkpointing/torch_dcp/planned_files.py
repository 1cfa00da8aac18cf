"""The bytes of a planned save: what every rank writes of its part, and what the coordinator writes in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from core.arrays.box import Box, full_box
from core.catalog.catalog import Catalog, StoredObject
from core.catalog.file_image import FileImage
from core.catalog.stored import Extent, StoredArray
from core.copy.options import CopyOptions
from core.copy.run import execute
from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing._engine.batches import batches
from core.dist_checkpointing.torch_dcp.planned_save import (
    Layout,
    Part,
    Planned,
    check_same_places,
    chunk_of,
    is_finished_here,
    is_tensor,
    lay_out,
)
from core.errors import CheckpointingException, CorruptError, UsageError
from core.files.store import MemoryStore, translate_os_errors
from core.formats.dcp.items import BEHIND
from core.formats.format import Format
from core.formats.torch.format import load_object
from core.live.save import finish_file
from core.live.share import HOLDER, share_of
from core.live.tensors import LiveTensor, live_source
from core.plan.plan import make_plan
from core.stage.files import StageStore


def write_part(
    plan: SavePlan, planner: SavePlanner, part: Part, store: StageStore, *, threads: int
) -> list[WriteResult]:
    """Writes the tensors of a rank's plan, a batch at a time, and finishes the files that are its own.

    Args:
        plan, planner: of this rank.
        part: what it writes.
        store: the stage.
        threads: that copy.

    Returns:
        For every item its size; for an entry that is no tensor also its stream, which the coordinator writes.

    Raises:
        UsageError: the planner gives another tensor than it planned.
        CheckpointingException: the system refuses.
    """
    catalog = part.catalog()
    crcs: dict[str, int] = {}
    results = []
    for batch in batches(filter(is_tensor, plan.items), lambda item: chunk_of(item).n_bytes):
        tensors = [_resolved(item, planner) for item in batch]
        live = [bridge.live(chunk_of(item), data) for item, data in zip(batch, tensors, strict=True)]
        crcs |= _write(live, catalog, part.images, store, threads=threads)
        results += [
            WriteResult(index=item.index, size_in_bytes=one.chunk.n_bytes, storage_data=None)
            for item, one in zip(batch, live, strict=True)
        ]
    for image in part.images:
        if is_finished_here(image):
            store.create(image.path, image.size)
            for offset, data in image.literals(lambda name: crcs.get(name, 0)):
                store.write(image.path, offset, data)
    for item in plan.items:
        if not is_tensor(item):
            stream = planner.resolve_data(item).getvalue()
            results.append(WriteResult(index=item.index, size_in_bytes=len(stream), storage_data=stream))
    return results


def _write(
    tensors: Sequence[LiveTensor], target: Catalog, images: Sequence[FileImage], store: StageStore, *, threads: int
) -> dict[str, int]:
    """Writes some tensors; returns the CRC-32 of every array that has been filled by them."""
    mine = [one for one in tensors if one.chunk.key in target.tensors and not one.chunk.box.is_empty]
    source, memory = live_source(mine)
    held: dict[str, list[Box]] = {}
    for one in mine:
        held.setdefault(one.chunk.key, []).append(one.chunk.box)
    share = share_of(target, images, held)
    plan = make_plan(source, share.target, share.images, threads=threads, compares=False, is_share=True)
    result = execute(plan, memory, store, CopyOptions(digest=False))
    arrays = [
        fragment.array
        for key in share.target.tensors
        for fragment in share.target.fragments(key)
        if fragment.array is not None and fragment.box.n_elements == prod(fragment.array.shape)
    ]
    return {array.name: result.crc_of(array.name) for array in arrays}


def write_rest(
    save: Planned,
    layout: Layout,
    streams: Mapping[str, bytes],
    store: StageStore,
    *,
    format: Format,
    dst: Path,
    max_file_bytes: int | None,
) -> None:
    """Writes entries that are no tensors, headers of files that ranks shared, and metadata last.

    Args:
        save: what is saved.
        layout: where ranks have written the tensors.
        streams: the other entries as streams of ``torch.save``, by key.
        store: the stage.
        format, dst, max_file_bytes: as for the layout.

    Raises:
        CheckpointingException: an entry is not handled, or the system refuses.
    """
    finished = {image.path: image.size for image in layout.images if is_finished_here(image)}
    _check_sizes(finished, store)
    if streams:
        objects, arrays, memory = _read(streams, save, is_verbatim=format.name == "dcp")
        whole_layout = lay_out(save, format, dst, objects=objects, arrays=arrays, max_file_bytes=max_file_bytes)
        check_same_places(layout, whole_layout)
        layout = whole_layout
        target = layout.target
        share = share_of(target, layout.images, {key: [full_box(meta.shape)] for key, meta in target.hidden.items()})
        plan = make_plan(layout.source, share.target, share.images, compares=False, is_share=True)
        execute(plan, memory, store, CopyOptions(crc=False, digest=False))
    for image in sorted(layout.images, key=lambda image: image.is_metadata):
        if image.path not in finished:
            finish_file(image, store)


def _check_sizes(sizes: Mapping[str, int], store: StageStore) -> None:
    """Returns if the files that ranks have finished are here.

    Raises:
        MissingShardError: one is not.
        CorruptError: one has another size.
    """
    for name, n_bytes in sizes.items():
        path = store.root / name
        with translate_os_errors(str(path), doing="check"):
            found = path.stat().st_size
        if found != n_bytes:
            raise CorruptError(f"a rank has written {found} bytes, and not {n_bytes}", file=name)


def _resolved(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """The tensor of an item in host memory.

    Raises:
        UsageError: the planner gives another shape or dtype than it planned.
        UnsupportedError: it is sparse, or lies nowhere.
    """
    chunk = chunk_of(item)
    data = planner.resolve_data(item).detach()
    if tuple(data.shape) != chunk.box.shape:
        raise UsageError(
            f"the planner gives a tensor of shape {tuple(data.shape)}, but planned {chunk.box.shape}", key=chunk.key
        )
    bridge.check_data(chunk, data)
    return bridge.on_host(chunk, data)


def _read(
    streams: Mapping[str, bytes], save: Planned, *, is_verbatim: bool
) -> tuple[dict[str, StoredObject], dict[str, StoredArray], MemoryStore]:
    """(entries that are no tensors, tensors inside them, the streams that hold these), in the order of the plans.

    Args:
        streams: of ``torch.save``, by key.
        save: what is saved.
        is_verbatim: whether the streams themselves are stored, in a further file of the first rank.

    Raises:
        UnsupportedError: a stream holds what is not handled.
    """
    objects: dict[str, StoredObject] = {}
    arrays: dict[str, StoredArray] = {}
    memory = MemoryStore({f"stream {key}": memoryview(data) for key, data in streams.items()})
    for key in save.objects:
        stream = StoredArray(f"raw:{key}", "uint8", (len(streams[key]),), Extent(f"stream {key}", 0))
        if is_verbatim:
            arrays[stream.name] = stream
            objects[key] = StoredObject(key, raw_key=stream.name, coords=((HOLDER, 0), *BEHIND))
            continue
        try:
            value, inside = load_object(memory, stream, key=key)
        except CheckpointingException as err:
            err.key = err.key or key
            raise
        objects[key] = StoredObject(key, value=value)
        arrays |= inside
    return objects, arrays, memory
