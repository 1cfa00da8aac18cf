"""Writing of a planned save: each rank's part, and what remains for the coordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from core.arrays.box import Box, full_box
from core.arrays.dtypes import itemsize
from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing._engine.bridge import batches
from core.dist_checkpointing._live.file_end import finish_file
from core.dist_checkpointing._live.share import HOLDER, ProcessShare, find_share
from core.dist_checkpointing._live.sums import complete_arrays
from core.dist_checkpointing._live.tensors import LiveTensor, live_source
from core.dist_checkpointing.torch_dcp.planned_save import (
    PlannedSave,
    RankSave,
    SaveLayout,
    build_item_chunk,
    check_same_positions,
    is_finished_by_rank,
    is_tensor,
    lay_out,
)
from core.engine.catalog.catalog import StoredObject, TargetCatalog
from core.engine.catalog.file_image import FileImage
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.copy.options import CopyOptions
from core.engine.copy.run import execute
from core.engine.plan.plan import make_plan
from core.errors import CheckpointingException, CorruptError, UsageError
from core.files.store import MemoryStore, translate_os_errors
from core.formats.dcp.items import BEHIND
from core.formats.format import Format
from core.formats.torch.tree import load_object
from core.publish.manifest.file import FileSum, ManifestArray
from core.publish.manifest.of_copy import FileRanges
from core.publish.manifest.partial_sums import write_sums
from core.publish.stage.files import StageStore


def write_part(
    plan: SavePlan,
    planner: SavePlanner,
    part: RankSave,
    store: StageStore,
    *,
    threads: int,
    sums_dir: Path | None = None,
) -> list[WriteResult]:
    """Write the tensors of a rank's plan, in batches, and finish the files that it fills alone.

    Args:
        plan, planner: the plan and the planner of this rank.
        part: the part of the save that this rank writes.
        store: the staging directory.
        threads: number of copying threads.
        sums_dir: existing directory for the checksums of what this rank writes; None computes none.

    Returns:
        The size of every item. The result for an entry that is not a tensor also contains its
        stream, which the coordinator writes.

    Raises:
        UsageError: a tensor from the planner does not have the planned dtype or shape.
        UnsupportedError: a tensor is sparse, or on the meta device.
        CheckpointingException: a file cannot be written.
    """
    catalog = part.catalog()
    written: dict[str, ManifestArray] = {}
    results = []
    # Write the tensors, in batches so that few of them are in host memory at a time.
    for batch in batches(
        filter(is_tensor, plan.items), lambda item: build_item_chunk(item).n_bytes
    ):
        tensors = [resolve_tensor(item, planner) for item in batch]
        live = [
            bridge.live_tensor(build_item_chunk(item), data)
            for item, data in zip(batch, tensors, strict=True)
        ]
        written |= {
            array.name: array
            for array in _write_tensors(
                live,
                catalog,
                part.images,
                store,
                threads=threads,
                with_digests=sums_dir is not None,
            )
        }
        results += [
            WriteResult(index=item.index, size_in_bytes=tensor.chunk.n_bytes, storage_data=None)
            for item, tensor in zip(batch, live, strict=True)
        ]
    # Write the headers and trailers of the files that this rank fills alone. They come after the
    # tensors, because they contain their checksums.
    files: list[FileSum] = []

    def crc_of(name: str) -> int:
        array = written.get(name)
        return (array and array.crc) or 0

    for image in part.images:
        if is_finished_by_rank(image):
            store.create(image.path, image.size)
            ranges = FileRanges()
            arrays = [written.get(placed.array.name) for placed in image.arrays]
            for array in filter(None, arrays):
                n_bytes = itemsize(array.dtype) * prod(array.shape)
                ranges.add_sum(array.offset, n_bytes, array.crc or 0)
            for offset, data in image.literals(crc_of):
                store.write(image.path, offset, data)
                ranges.add(offset, data)
            # Without the checksum of an array, that of its file is computed by reading it later.
            if all(arrays):
                files.append(FileSum(image.path, image.size, ranges.crc_of(image)))
    if sums_dir is not None:
        write_sums(sums_dir, part.number, files, written.values())
    # Return every other entry, which torch sends to the coordinator with the results.
    for item in plan.items:
        if not is_tensor(item):
            stream = planner.resolve_data(item).getvalue()
            results.append(
                WriteResult(index=item.index, size_in_bytes=len(stream), storage_data=stream)
            )
    return results


def _write_tensors(
    tensors: Sequence[LiveTensor],
    target: TargetCatalog,
    images: Sequence[FileImage],
    store: StageStore,
    *,
    threads: int,
    with_digests: bool,
) -> list[ManifestArray]:
    """Write some tensors of this rank into their arrays.

    Args:
        tensors: a batch; those that this rank does not write are skipped.
        target: the arrays of this rank.
        images: the files that contain the arrays.
        store: the staging directory.
        threads: number of copying threads.
        with_digests: compute digests, too.

    Returns:
        The positions and checksums of the arrays that are completely written.
    """
    # Select the tensors that the combined plan has assigned to this rank.
    to_write = [
        tensor
        for tensor in tensors
        if tensor.chunk.key in target.tensors and not tensor.chunk.box.is_empty
    ]
    source, memory = live_source(to_write)
    boxes: dict[str, list[Box]] = {}
    for tensor in to_write:
        boxes.setdefault(tensor.chunk.key, []).append(tensor.chunk.box)
    # Plan the copies into the part of the target that these tensors fill, and execute them.
    share = find_share(target, images, boxes)
    plan = make_plan(
        source, share.target, share.images, threads=threads, compares=False, is_share=True
    )
    return complete_arrays(plan, execute(plan, memory, store, CopyOptions(digest=with_digests)))


def write_rest(
    save: PlannedSave,
    layout: SaveLayout,
    streams: Mapping[str, bytes],
    store: StageStore,
    *,
    format: Format,
    dst: Path,
    max_file_bytes: int | None,
) -> None:
    """Write entries that are not tensors, headers of files that ranks share, and metadata last.

    Args:
        save: the combined plans.
        layout: the files into which ranks have written the tensors.
        streams: the other entries as streams of ``torch.save``, by key.
        store: the staging directory.
        format, dst, max_file_bytes: the arguments from which ``layout`` was computed.

    Raises:
        CorruptError: a file that a rank has finished has the wrong size.
        UnsupportedError: an entry is not supported, or moves the tensors.
        CheckpointingException: a file is missing or cannot be written.
    """
    # Check the files that ranks have finished: they must exist and have the planned sizes.
    finished = {image.path: image.size for image in layout.images if is_finished_by_rank(image)}
    for name, n_bytes in finished.items():
        path = store.root / name
        with translate_os_errors(str(path), doing="check"):
            written_bytes = path.stat().st_size
        if written_bytes != n_bytes:
            raise CorruptError(
                f"the file has {written_bytes} bytes after the save, expected {n_bytes}", file=name
            )
    # Write the other entries.
    if streams:
        layout, memory = lay_out_rest(
            save, layout, streams, format=format, dst=dst, max_file_bytes=max_file_bytes
        )
        share = share_of_rest(layout)
        plan = make_plan(layout.source, share.target, share.images, compares=False, is_share=True)
        execute(plan, memory, store, CopyOptions(crc=False, digest=False))
    # Write headers and trailers. Metadata files come last, so that an incomplete checkpoint never
    # looks complete.
    for image in sorted(layout.images, key=lambda image: image.is_metadata):
        if image.path not in finished:
            finish_file(image, store)


def lay_out_rest(
    save: PlannedSave,
    layout: SaveLayout,
    streams: Mapping[str, bytes],
    *,
    format: Format,
    dst: Path,
    max_file_bytes: int | None,
) -> tuple[SaveLayout, MemoryStore]:
    """Lay out the files again, with the other entries, whose sizes were not known before.

    Args:
        save, layout, streams, format, dst, max_file_bytes: as in ``write_rest``.

    Returns:
        The layout, with the tensors where they were, and the memory of the other entries.

    Raises:
        UnsupportedError: an entry is not supported, or moves the tensors.
        UnsafeError: an entry refers to something that runs code.
    """
    objects, arrays, memory = _read_streams(streams, save, is_verbatim=format.has_live_objects)
    full_layout = lay_out(
        save, format, dst, objects=objects, arrays=arrays, max_file_bytes=max_file_bytes
    )
    check_same_positions(layout, full_layout)
    return full_layout, memory


def share_of_rest(layout: SaveLayout) -> ProcessShare:
    """Return the arrays that the coordinator fills: those of entries that are not tensors."""
    target = layout.target
    boxes = {key: [full_box(tensor.shape)] for key, tensor in target.hidden.items()}
    return find_share(target, layout.images, boxes)


def resolve_tensor(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """Return the tensor of an item in host memory.

    Raises:
        UsageError: the tensor does not have the planned dtype or shape.
        UnsupportedError: the tensor is sparse, or on the meta device.
    """
    chunk = build_item_chunk(item)
    data = planner.resolve_data(item).detach()
    if tuple(data.shape) != chunk.box.shape:
        raise UsageError(
            f"the planner returned a tensor of shape {tuple(data.shape)}, but planned shape "
            f"{chunk.box.shape}",
            key=chunk.key,
        )
    bridge.check_data(chunk, data)
    return bridge.to_host(chunk, data)


def _read_streams(
    streams: Mapping[str, bytes], save: PlannedSave, *, is_verbatim: bool
) -> tuple[dict[str, StoredObject], dict[str, StoredArray], MemoryStore]:
    """Read the entries that are not tensors from their streams, in the order of the plans.

    Args:
        streams: streams of ``torch.save``, by key.
        save: the combined plans.
        is_verbatim: store the streams themselves, in a further file of the first rank.

    Returns:
        The entries by key, the arrays to store with them by name, and the memory that contains
        those arrays.

    Raises:
        UnsupportedError: a stream contains a value that is not supported.
        UnsafeError: a stream refers to something that runs code.
    """
    objects: dict[str, StoredObject] = {}
    arrays: dict[str, StoredArray] = {}
    memory = MemoryStore({f"stream {key}": memoryview(data) for key, data in streams.items()})
    for key in save.objects:
        stream = StoredArray(
            f"raw:{key}", "uint8", (len(streams[key]),), Extent(f"stream {key}", 0)
        )
        # DCP stores every entry as such a stream, so it is copied byte for byte.
        if is_verbatim:
            arrays[stream.name] = stream
            objects[key] = StoredObject(key, raw_key=stream.name, coords=((HOLDER, 0), *BEHIND))
            continue
        # Other formats store the value, and the tensors inside as arrays.
        try:
            value, tensors_inside = load_object(memory, stream, key=key)
        except CheckpointingException as err:
            err.key = err.key or key
            raise
        objects[key] = StoredObject(key, value=value)
        arrays |= tensors_inside
    return objects, arrays, memory
