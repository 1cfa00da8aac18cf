"""Writing of a planned save: each rank's part, and what remains for the coordinator."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from typing_extensions import override

from core.arrays.box import full_box
from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing._live.destination import destination_of
from core.dist_checkpointing._live.share import HOLDER, ProcessShare, find_share
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
from core.engine.catalog.catalog import StoredObject
from core.engine.catalog.stored import Extent, StoredArray
from core.errors import CheckpointingException, UsageError
from core.files.store import MemoryStore
from core.formats.dcp.items import BEHIND
from core.formats.format import Format
from core.formats.torch.tree import load_object
from core.publish.manifest.partial_sums import write_sums


def write_part(
    plan: SavePlan,
    planner: SavePlanner,
    part: RankSave,
    data_dir: Path,
    *,
    threads: int,
    fsync: bool,
    sums_dir: Path | None,
) -> None:
    """Write the tensors of a rank's plan, and finish the files that it fills alone.

    Args:
        plan, planner: the plan and the planner of this rank.
        part: the part of the save that this rank writes.
        data_dir: the directory or prefix to write to.
        threads: number of copying threads.
        fsync: wait for the disk; fsync on another machine would not flush what this rank writes.
        sums_dir: place for the checksums of what this rank writes; None computes none.

    Raises:
        UsageError: a tensor from the planner does not have the planned dtype or shape.
        UnsupportedError: a tensor is sparse, or on the meta device.
        CheckpointingException: a file cannot be written.
    """
    if torch.cuda.is_initialized():
        # Threads copy by streams of their own, which do not wait for this one's work.
        torch.cuda.current_stream().synchronize()
    # Several items may stand for one region.
    items = {
        (item.index.fqn, build_item_chunk(item).box): item for item in plan.items if is_tensor(item)
    }
    tensors = PlannedTensors([*items.values()], planner)
    source, _ = live_source(
        [LiveTensor(build_item_chunk(item), memoryview(b"")) for item in items.values()]
    )
    written = destination_of(data_dir, fsync=fsync).write(
        ProcessShare(part.catalog(), part.images),
        source,
        tensors,
        images=[image for image in part.images if is_finished_by_rank(image)],
        threads=threads,
        with_sums=sums_dir is not None,
    )
    if sums_dir is not None:
        write_sums(sums_dir, part.number, written.files, written.arrays)


class PlannedTensors(MemoryStore):
    """The tensors of a plan as files, each in host memory from its first read to its last one.

    A destination reads the tensors one after the other, so that each thread has about one of them
    in host memory (of a file in which slices of a tensor alternate, all slices that this rank has);
    safe for threads.

    Args:
        items: the tensors; the file ``0`` is the first one.
        planner: has the tensors.
    """

    def __init__(self, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        super().__init__()
        self._items = items
        self._planner = planner
        self._hosts: dict[str, _HostTensor] = {}
        self._lock = threading.Lock()

    @override
    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        buffer = bytearray(n_bytes)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    @override
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Copy bytes of a tensor, which is fetched from the planner if it is not here.

        Raises:
            UsageError, UnsupportedError: as ``resolve_tensor``.
        """
        with self._lock:
            host = self._hosts.setdefault(name, _HostTensor())
        with host.lock:
            if host.data is None:
                host.data = resolve_tensor(self._items[int(name)], self._planner).contiguous()
                host.n_unread = host.data.nbytes
        buffer[:] = bridge.memory_of(host.data)[offset : offset + len(buffer)]
        with self._lock:
            host.n_unread -= len(buffer)
            if not host.n_unread:
                del self._hosts[name]


@dataclass(slots=True)
class _HostTensor:
    """A tensor in host memory, and the number of its bytes that have not been read."""

    data: torch.Tensor | None = None
    n_unread: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


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
    share = find_share(target, layout.images, boxes)
    # A file of nothing but such arrays is the coordinator's alone, with the bytes around them.
    names = {placed.array.name for image in share.images for placed in image.arrays}
    own = {
        image.path: image
        for image in layout.images
        if all(placed.array.name in names for placed in image.arrays if placed.array.n_bytes)
    }
    return replace(share, images=tuple(own.get(image.path, image) for image in share.images))


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
            f"the planner returned a tensor of shape {tuple(data.shape)}, but the plan says "
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
