"""Writing of a planned save: each rank's part, and what remains for the coordinator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from core.arrays.box import Box, full_box
from core.arrays.dtypes import itemsize
from core.dist_checkpointing._directory.bucket_publication import read_lock_token
from core.dist_checkpointing._directory.sums import SUMS, sums_dir_of
from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing._engine.bridge import batches
from core.dist_checkpointing._live.destination import ArrayBytes, manifest_entries
from core.dist_checkpointing._live.share import HOLDER, ProcessShare, find_share
from core.dist_checkpointing._live.sums import complete_arrays
from core.dist_checkpointing._live.tensors import LiveTensor, live_source
from core.dist_checkpointing._live.upload import upload_files
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
from core.engine.catalog.catalog import Catalog, StoredObject, TargetCatalog
from core.engine.catalog.file_image import FileImage
from core.engine.catalog.stored import Extent, PlannedArray, StoredArray
from core.engine.catalog.tensor import TargetFragment
from core.engine.copy.options import CopyOptions
from core.engine.copy.run import execute
from core.engine.plan.plan import make_plan
from core.errors import CheckpointingException, StorageError, UsageError
from core.files.multipart.stream import Piece
from core.files.remote_path import is_remote
from core.files.store import MemoryStore
from core.formats.dcp.items import BEHIND
from core.formats.format import Format
from core.formats.torch.tree import load_object
from core.publish.manifest.file import FileSum, ManifestArray
from core.publish.manifest.of_copy import FileRanges
from core.publish.manifest.partial_sums import write_sums
from core.publish.stage.files import StageStore
from core.publish.stage.folder_lock import stage_dir_of


def write_part(
    plan: SavePlan, planner: SavePlanner, part: RankSave, dst: Path, *, threads: int, fsync: bool
) -> None:
    """Write the tensors of a rank's plan, in batches, and finish the files that it fills alone.

    Args:
        plan, planner: the plan and the planner of this rank.
        part: the part of the save that this rank writes.
        dst: the destination, which has a staging directory.
        threads: number of copying threads.
        fsync: wait for the disk; fsync on another machine would not flush what this rank writes.

    Raises:
        StorageError: this rank cannot see the coordinator's staging directory.
        UsageError: a tensor from the planner does not have the planned dtype or shape.
        UnsupportedError: a tensor is sparse, or on the meta device.
        CheckpointingException: a file cannot be written.
    """
    # On a file system that is not shared, the coordinator's token is missing.
    stage_dir = stage_dir_of(dst)
    if not token_path_of(stage_dir, part.token).exists():
        raise StorageError(
            "the coordinator created this directory, but this rank cannot see it",
            file=str(stage_dir),
            hint="use the same path on all ranks, on a file system that they share",
        )
    sums_dir = stage_dir / SUMS
    has_sums = sums_dir.is_dir()
    catalog = part.catalog()
    written: dict[str, ManifestArray] = {}
    files: list[FileSum] = []

    def crc_of(name: str) -> int:
        array = written.get(name)
        return (array and array.crc) or 0

    with closing(StageStore(stage_dir / "data", is_durable=fsync)) as store:
        # Write the tensors, in batches so that few of them are in host memory at a time.
        for batch in batches(
            filter(is_tensor, plan.items), lambda item: build_item_chunk(item).n_bytes
        ):
            tensors = [resolve_tensor(item, planner) for item in batch]
            live = [
                bridge.live_tensor(build_item_chunk(item), data)
                for item, data in zip(batch, tensors, strict=True)
            ]
            arrays = _write_tensors(
                live, catalog, part.images, store, threads=threads, with_digests=has_sums
            )
            written |= {array.name: array for array in arrays}
        # Write the headers and trailers of the files that this rank fills alone. They come after
        # the tensors, because they contain their checksums.
        for image in filter(is_finished_by_rank, part.images):
            store.create(image.path, image.size)
            ranges = FileRanges()
            of_image = [written.get(placed.array.name) for placed in image.arrays]
            for array in filter(None, of_image):
                n_bytes = itemsize(array.dtype) * prod(array.shape)
                ranges.add_sum(array.offset, n_bytes, array.crc or 0)
            for offset, data in image.literals(crc_of):
                store.write(image.path, offset, data)
                ranges.add(offset, data)
            # Without the checksum of an array, that of its file is computed by reading it later.
            if all(of_image):
                files.append(FileSum(image.path, image.size, ranges.crc_of(image)))
        if has_sums:
            write_sums(sums_dir, part.number, files, written.values())
        if fsync:
            store.sync_files()


def token_path_of(stage_dir: Path, token: str) -> Path:
    """Return the path of the file that identifies a save.

    A rank checks for this file to be sure that it sees the coordinator's staging directory, and not
    a directory on its own machine.
    """
    return stage_dir / f"save-{token}"


def upload_part(
    plan: SavePlan, planner: SavePlanner, part: RankSave, root: Path, *, threads: int, fsync: bool
) -> None:
    """Upload the files of a rank, with one tensor at a time in host memory for each thread.

    Args:
        plan, planner, part: as in ``write_part``.
        root: URL of the destination.
        threads: number of files at the same time.
        fsync: not used; an object is durable once it was put.

    Raises:
        StorageError: this rank does not see the coordinator's lock, or the store refuses.
        UsageError: a tensor from the planner does not have the planned dtype or shape.
    """
    assert is_remote(root)
    if read_lock_token(root) != part.token:
        raise StorageError(
            "the coordinator put a lock here, but this rank does not see it",
            file=str(root),
            hint="use the same URL, endpoint and credentials on all ranks",
        )
    # Which item fills which array; of several items for one region, any.
    items = {
        (item.index.fqn, build_item_chunk(item).box): item for item in plan.items if is_tensor(item)
    }
    fragments: dict[str, tuple[str, TargetFragment]] = {
        fragment.array.name: (key, fragment)
        for key, of_key in part.fragments.items()
        for fragment in of_key
        if fragment.array is not None
    }

    def pieces_of(array: PlannedArray) -> Iterator[Piece]:
        key, fragment = fragments[array.name]
        item = items[key, fragment.box]
        # The tensor has to outlive the reads of its memory.
        tensor = resolve_tensor(item, planner)
        source, memory = live_source([bridge.live_tensor(build_item_chunk(item), tensor)])
        tensor_of_item = replace(part.tensors[key], tiling=lambda: (fragment,))
        target: TargetCatalog = Catalog("live", None, {key: tensor_of_item})
        yield from ArrayBytes(ProcessShare(target, ()), source, memory).pieces(array)
        del tensor

    share = ProcessShare(part.catalog(), part.images)
    sums_dir = sums_dir_of(root)
    uploaded = upload_files(
        root, part.images, pieces_of, threads=threads, with_digests=sums_dir is not None
    )
    if sums_dir is not None:
        write_sums(sums_dir, part.number, uploaded.files, manifest_entries(share, uploaded))


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
        save: the combined plans.
        layout: the files into which ranks have written the tensors.
        streams: the other entries as streams of ``torch.save``, by key.
        format, dst, max_file_bytes: the arguments from which ``layout`` was computed.

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
