"""Write the tensors of several processes as one checkpoint, each process its share.

::

    chunks of all processes ─▶ target catalog ─ lay_out ─▶ file images
                                              ─ share_of ─▶ plan of this process

Every process knows the chunks of all, so each computes the same images; no positions are exchanged.
A *whole file* is written by the process that fills it, its container's checksums included. What is
left (metadata, headers of shared files, files without data) is written by one process after all
others are done.

``Format.partition`` says how tensors are cut into arrays. ``as_stored``: every box of a process is
an array, in a file of that process; ``grid``: every chunk of a regular grid is an array, also where
several processes have parts of it; ``whole``: every tensor is an array.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, fields, replace
from pathlib import Path

from core.arrays.box import Box, Shape, full_box
from core.arrays.coverage import is_tiled
from core.dist_checkpointing._live.destination import destination_of, refuse_shared_files
from core.dist_checkpointing._live.share import HOLDER, ProcessShare, find_share, has_one_holder
from core.dist_checkpointing._live.tensors import Chunk, LiveTensor, live_source, metas_of_chunks
from core.engine.catalog.catalog import Catalog, StoredObject, TargetCatalog
from core.engine.catalog.facets import WriteOptions
from core.engine.catalog.file_image import FileImage
from core.engine.catalog.stored import PlannedArray, array_name
from core.engine.catalog.tensor import AnyTensor, Fragment, TargetFragment, Tensor, bind_argument
from core.engine.plan.plan import DEFAULT_THREADS
from core.errors import UsageError
from core.formats.format import Format
from core.formats.zarr.grid import ChunkGrid
from core.publish.manifest.partial_sums import write_sums
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class ProcessContribution:
    """The tensors and objects that one process writes, without their data.

    Args:
        chunks: the chunks that it writes; no other process writes the same elements.
        streams: (key, length in bytes) of the serialized objects that it writes.
    """

    chunks: tuple[Chunk, ...]
    streams: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True, kw_only=True)
class LiveSave:
    """A save that this process takes part in.

    Args:
        format: a writable format.
        root: the directory to write to, which exists, or the URL of a prefix.
        number: number of this process, from 0.
        contributions: what each process writes, by its number.
        tensors: this process's chunks, in the order of ``contributions[number].chunks``.
        streams: (key, bytes) of this process's objects.
        options: how the files are to be written.
        without: paths of images that the caller writes itself.
        fsync: wait for the disk.
        threads: number of copying threads.
        sums_dir: existing directory for the checksums of what each process writes
            (``core.publish.manifest.partial_sums``); None computes none.
    """

    format: Format
    root: Path
    number: int
    contributions: Sequence[ProcessContribution]
    tensors: Sequence[LiveTensor] = ()
    streams: Sequence[tuple[str, bytes]] = ()
    options: WriteOptions = field(default_factory=WriteOptions)
    without: Collection[str] = ()
    fsync: bool = True
    threads: int = DEFAULT_THREADS
    sums_dir: Path | None = None
    _layout: tuple[TargetCatalog, tuple[FileImage, ...]] | None = None

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        """Return the state for another process of this rank, which computes the layout itself."""
        names = [entry.name for entry in fields(self)]
        return None, {name: None if name == "_layout" else getattr(self, name) for name in names}

    def laid_out(self) -> tuple[TargetCatalog, tuple[FileImage, ...]]:
        """Return the complete target and its file images, the same in every process.

        Raises:
            UsageError: two chunks of one key disagree on dtype or shape.
            UnsupportedError: the format cannot hold what is to be written.
        """
        if self._layout is None:
            assert self.format.lay_out is not None, (
                "the format was chosen because it can be written"
            )
            target = target_of(self.contributions, self.format, self.options)
            images = tuple(
                image for image in self.format.lay_out(target) if image.path not in self.without
            )
            if not destination_of(self.root, fsync=self.fsync).can_share_files:
                # Found out by every process, before any of them writes.
                boxes = {key: {*boxes} for key, boxes in _boxes_of(self.contributions).items()}
                refuse_shared_files(self.root, target, images, boxes)
            self._layout = (target, images)
        return self._layout

    def write(self) -> int:
        """Write this process's share and return the number of tensor bytes written.

        Raises:
            CheckpointingException: the copy failed; the caller removes the files that were begun.
        """
        share = self._share()
        source, memory = live_source(
            self.tensors, [(stream_key(key), data) for key, data in self.streams]
        )
        destination = destination_of(self.root, fsync=self.fsync)
        written = destination.write(
            share,
            source,
            memory,
            images=self.laid_out()[1],
            threads=self.threads,
            with_sums=self.sums_dir is not None,
        )
        if self.sums_dir is not None:
            write_sums(self.sums_dir, self.number, written.files, written.arrays)
        return written.n_bytes

    def finish(self) -> None:
        """Write headers of shared files and files without data, then metadata.

        To be called by one process, after all have written.

        Raises:
            CheckpointingException: a file cannot be written, or a shared file is missing.
        """
        _, images = self.laid_out()
        rest = [image for image in images if not has_one_holder(image)]
        destination_of(self.root, fsync=self.fsync).finish(rest)

    def _share(self) -> ProcessShare:
        target, images = self.laid_out()
        return find_share(target, images, _boxes_of([self.contributions[self.number]]))


def _boxes_of(contributions: Iterable[ProcessContribution]) -> dict[str, list[Box]]:
    """Return the boxes of tensors and objects that processes write, by key."""
    boxes: dict[str, list[Box]] = {}
    for contribution in contributions:
        for chunk in contribution.chunks:
            boxes.setdefault(chunk.key, []).extend(box for _, box in chunk.runs())
        for key, n_bytes in contribution.streams:
            boxes[stream_key(key)] = [full_box((n_bytes,))]
    return boxes


def target_of(
    contributions: Sequence[ProcessContribution], format: Format, options: WriteOptions
) -> TargetCatalog:
    """Return the target catalog for the tensors and objects of several processes.

    Raises:
        UsageError: two chunks of one key disagree on dtype or shape, or two processes write the
            same chunk or object.
    """
    metas = metas_of_chunks(
        chunk for contribution in contributions for chunk in contribution.chunks
    )
    _refuse_duplicates(contributions)
    # The arrays to write: those of tensors, and one hidden array of bytes for each object.
    boxes = _boxes_by_key(contributions, metas, format)
    streams: dict[str, int] = {}
    objects: dict[str, StoredObject] = {}
    has_files = format.lists_chunks
    for number, contribution in enumerate(contributions):
        for key, n_bytes in contribution.streams:
            hidden = stream_key(key)
            streams[hidden] = n_bytes
            boxes[hidden] = {full_box((n_bytes,)): number}
            coords = ((HOLDER, number),) if has_files else ()
            objects[key] = StoredObject(key, raw_key=hidden, coords=coords)

    def plan_fragments(key: str) -> Sequence[TargetFragment]:
        dtype = "uint8" if key in streams else metas[key].dtype
        fragments = []
        for box, number in boxes[key].items():
            # Where every process has files of its own, the coordinate chooses the file.
            array = PlannedArray(
                key if key in streams else array_name(key, box),
                dtype,
                box.shape,
                coords=((HOLDER, number),) if has_files else (),
            )
            fragments.append(Fragment(box, array, (0,) * box.rank))
        return tuple(fragments)

    return Catalog(
        format=format.name,
        version=None,
        tensors={
            key: replace(tensor, tiling=bind_argument(plan_fragments, key))
            for key, tensor in metas.items()
        },
        objects=objects,
        hidden={
            key: Tensor("uint8", (n_bytes,), bind_argument(plan_fragments, key))
            for key, n_bytes in streams.items()
        },
        write=options,
    )


def _boxes_by_key(
    contributions: Sequence[ProcessContribution],
    tensors: Mapping[str, AnyTensor],
    format: Format,
) -> dict[str, dict[Box, int]]:
    """Return the boxes of each tensor's arrays, with the number of the process that fills each."""
    boxes: dict[str, dict[Box, int]] = {key: {} for key in tensors}
    for number, contribution in enumerate(contributions):
        for chunk in contribution.chunks:
            if format.lists_chunks:
                boxes[chunk.key].update(
                    (box, number) for _, box in chunk.runs() if not box.is_empty
                )
            elif format.has_grids and not chunk.box.is_empty:
                # Several processes may have parts of a chunk; the first one stands for all.
                boxes[chunk.key].setdefault(chunk.box, number)
    # Partition ``whole``, and tensors without elements: one array for the tensor.
    for key, tensor in tensors.items():
        if format.has_grids:
            boxes[key] = dict.fromkeys(_regular_chunks(tensor.shape, [*boxes[key]]), 0)
        if not boxes[key]:
            boxes[key] = {full_box(tensor.shape): 0}
    return boxes


def _regular_chunks(shape: Shape, boxes: Sequence[Box]) -> Sequence[Box]:
    """Return the chunks of a regular grid for the boxes of a tensor.

    An axis that the boxes do not divide evenly is not divided at all, so that several processes
    have parts of the same chunk.

    Args:
        shape: shape of the tensor, in elements.
        boxes: disjoint boxes; returned as they are if they do not tile the tensor, for the format
            to refuse.
    """
    if not boxes or not is_tiled(full_box(shape), boxes):
        return boxes
    steps = []
    for axis, extent in enumerate(shape):
        starts = {box.offset[axis] for box in boxes}
        step, *others = {box.shape[axis] for box in boxes}
        is_even = not others and not any(start % step for start in (*starts, extent))
        steps.append(step if is_even else extent)
    grid = ChunkGrid(shape, tuple(steps))
    return [grid.box(index) for index in grid.indices()]


def _refuse_duplicates(contributions: Sequence[ProcessContribution]) -> None:
    """Raise if two processes write the same chunk or object.

    They would not agree on the checksum of its bytes.

    Raises:
        UsageError: two processes do.
    """
    holders: dict[object, int] = {}
    for number, contribution in enumerate(contributions):
        names = [
            (chunk.key, chunk.box, chunk.flat) for chunk in contribution.chunks if chunk.n_elements
        ]
        for name in (*names, *((key, None, None) for key, _ in contribution.streams)):
            first = holders.setdefault(name, number)
            if first != number:
                raise UsageError(
                    f"ranks {first} and {number} both save the same shard",
                    key=name[0],
                    rank=str(number),
                    hint="set a nonzero replica_id on all but one of its replicas",
                )


def stream_key(key: str) -> str:
    """Return the key of the hidden tensor that holds an object's stream."""
    return f"raw:{key}"
