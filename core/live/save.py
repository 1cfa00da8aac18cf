"""Writes what several processes hold as one checkpoint, every process its share.

::

    chunks of all processes ─▶ target catalog ─ lay_out ─▶ file images ─ share_of ─▶ plan of this process

All processes know the chunks of all, so that each computes the same images; nobody tells anybody where to write.
A *whole file* is written by the process that fills it, its container's checksums included. What is left (metadata,
headers of shared files, files without data) is written by one process after all others are done.

How tensors are cut into arrays: by ``Format.partition``. ``as_stored``: every held box is an array, in a file of its
holder's; ``grid``: every chunk is one, whoever holds parts of it; ``whole``: every tensor is one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from core.arrays.box import Box, full_box
from core.arrays.checksum import BLOCK_BYTES, crc32
from core.catalog.catalog import Catalog, Fragment, StoredObject, TargetCatalog, TargetFragment, TensorMeta
from core.catalog.facets import WriteOptions
from core.catalog.file_image import FileImage
from core.catalog.stored import PlannedArray, array_name
from core.copy.options import CopyOptions
from core.copy.run import execute
from core.errors import UsageError
from core.files.folders import sync_folders
from core.formats.format import Format
from core.live.share import HOLDER, Share, is_own, share_of
from core.live.tensors import Chunk, LiveTensor, live_source, metas_of_chunks
from core.manifest.of_copy import finish_files
from core.plan.plan import DEFAULT_THREADS, make_plan
from core.plan.positions import Places
from core.stage.files import StageStore


@dataclass(frozen=True, slots=True)
class Held:
    """What one process contributes, without data.

    Args:
        chunks: that it writes; nobody else writes the same elements.
        streams: (key, bytes) of objects that it writes, by their serialized length.
    """

    chunks: tuple[Chunk, ...]
    streams: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True, kw_only=True)
class LiveSave:
    """A save that this process takes part in.

    Args:
        format: a writable one.
        root: the directory to write to; it exists.
        number: of this process.
        held: what every process contributes, by its number.
        tensors: this process's chunks, in the order of ``held[number].chunks``.
        streams: (key, bytes) of this process's objects.
        options: how the files are to be written.
        without: paths of images that somebody else writes.
        fsync: wait for the disk.
        threads: that copy.
    """

    format: Format
    root: Path
    number: int
    held: Sequence[Held]
    tensors: Sequence[LiveTensor] = ()
    streams: Sequence[tuple[str, bytes]] = ()
    options: WriteOptions = field(default_factory=WriteOptions)
    without: Collection[str] = ()
    fsync: bool = True
    threads: int = DEFAULT_THREADS
    _made: tuple[TargetCatalog, tuple[FileImage, ...]] | None = None

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        """For another process of this rank, without what it can compute itself."""
        return None, {one.name: None if one.name == "_made" else getattr(self, one.name) for one in fields(self)}

    def laid_out(self) -> tuple[TargetCatalog, tuple[FileImage, ...]]:
        """The whole target and its file images; the same in every process.

        Raises:
            UsageError: two chunks of one key disagree on dtype or shape.
            UnsupportedError: the format cannot hold what is to be written.
        """
        if self._made is None:
            assert self.format.lay_out is not None, "the format was chosen because it can be written"
            target = target_of(self.held, self.format, self.options)
            images = tuple(image for image in self.format.lay_out(target) if image.path not in self.without)
            self._made = (target, images)
        return self._made

    def write(self) -> int:
        """Writes this process's share; returns the bytes of tensors that it wrote.

        Raises:
            CheckpointingException: as for any copy; files that were begun are left for the caller to remove.
        """
        share = self._share()
        source, memory = live_source(self.tensors, [(stream_key(key), data) for key, data in self.streams])
        plan = make_plan(source, share.target, share.images, threads=self.threads, compares=False, is_share=True)
        stage = StageStore(self.root, is_durable=self.fsync)
        try:
            result = execute(plan, memory, stage, CopyOptions(digest=False))
            finish_files(plan, result, stage, crc=False)
            if self.fsync:
                stage.sync_files()
        finally:
            stage.close()
        return result.written_bytes

    def finish(self) -> None:
        """Writes what is nobody's own: headers of shared files, files without data, metadata last.

        For one process, once all have written.

        Raises:
            CheckpointingException: the system refuses, or a shared file is not there.
        """
        _, images = self.laid_out()
        rest = sorted((image for image in images if not is_own(image)), key=lambda image: image.is_metadata)
        stage = StageStore(self.root, is_durable=self.fsync)
        try:
            for image in rest:
                if image.is_metadata and self.fsync:
                    stage.sync_files()
                finish_file(image, stage)
            if self.fsync:
                stage.sync_files()
        finally:
            stage.close()
        if self.fsync:
            sync_folders(self.root)

    def _share(self) -> Share:
        target, images = self.laid_out()
        boxes: dict[str, list[Box]] = {}
        for chunk in self.held[self.number].chunks:
            boxes.setdefault(chunk.key, []).extend(box for _, box in chunk.runs())
        for key, n_bytes in self.held[self.number].streams:
            boxes[stream_key(key)] = [full_box((n_bytes,))]
        return share_of(target, images, boxes)


def finish_file(image: FileImage, stage: StageStore) -> None:
    """Writes what a file holds beside its arrays, which processes have filled; makes it if there are none.

    Raises:
        CheckpointingException: the system refuses.
    """
    stage.create(image.path, image.size)
    places = Places([image])

    def crc_of(name: str) -> int:
        number = places.number_of(name)
        assert number is not None, "a literal states the CRC of an array of its own file"
        return _crc_of_range(stage, image.path, places.offset_of(number), places.bytes_of(number))

    for offset, data in image.literals(crc_of):
        stage.write(image.path, offset, data)


def target_of(held: Sequence[Held], format: Format, options: WriteOptions) -> TargetCatalog:
    """The target catalog of what several processes hold, see the module's docstring.

    Raises:
        UsageError: two chunks of one key disagree on dtype or shape, or two processes contribute one and the same.
    """
    metas = metas_of_chunks(chunk for one in held for chunk in one.chunks)
    _check_each_is_held_once(held)
    boxes: dict[str, dict[Box, int]] = {key: {} for key in metas}
    for number, one in enumerate(held):
        for chunk in one.chunks:
            found = boxes[chunk.key]
            if format.partition == "as_stored":
                found.update((box, number) for _, box in chunk.runs())
            elif format.partition == "grid":
                found.setdefault(chunk.box, number)
    for key, meta in metas.items():
        if not boxes[key]:
            boxes[key] = {full_box(meta.shape): 0}
    streams = {stream_key(key): (n_bytes, number) for number, one in enumerate(held) for key, n_bytes in one.streams}
    has_files = format.partition == "as_stored"

    def array(name: str, meta: TensorMeta, box: Box, number: int) -> PlannedArray:
        return PlannedArray(name, meta.dtype, box.shape, coords=((HOLDER, number),) if has_files else ())

    def fragments_of(key: str) -> Sequence[TargetFragment]:
        if key in streams:
            n_bytes, number = streams[key]
            meta = TensorMeta(key, "uint8", (n_bytes,))
            return (Fragment(key, full_box(meta.shape), array(key, meta, full_box(meta.shape), number), (0,)),)
        meta = metas[key]
        return tuple(
            Fragment(key, box, array(array_name(key, box), meta, box, number), (0,) * box.rank)
            for box, number in boxes[key].items()
        )

    return Catalog(
        format=format.name,
        version=None,
        tensors=metas,
        fragments_of=fragments_of,
        objects={
            key: StoredObject(key, raw_key=stream_key(key), coords=((HOLDER, number),) if has_files else ())
            for number, one in enumerate(held)
            for key, _ in one.streams
        },
        hidden={key: TensorMeta(key, "uint8", (n_bytes,)) for key, (n_bytes, _) in streams.items()},
        write=options,
    )


def _check_each_is_held_once(held: Sequence[Held]) -> None:
    """Two processes that fill the same bytes would not agree on the checksum beside them.

    Raises:
        UsageError: two contribute the same chunk or object.
    """
    holders: dict[object, int] = {}
    for number, one in enumerate(held):
        names = [(chunk.key, chunk.box, chunk.flat) for chunk in one.chunks if chunk.n_elements]
        for name in (*names, *((key, None, None) for key, _ in one.streams)):
            first = holders.setdefault(name, number)
            if first != number:
                raise UsageError(
                    f"ranks {first} and {number} both save the same shard",
                    key=name[0],
                    rank=str(number),
                    hint="give all but one of its replicas a replica_id that is not zero",
                )


def stream_key(key: str) -> str:
    """The hidden tensor that is an object's stream."""
    return f"raw:{key}"


def _crc_of_range(stage: StageStore, path: str, offset: int, n_bytes: int) -> int:
    """CRC-32 of bytes that several processes have written."""
    buffer = memoryview(bytearray(min(BLOCK_BYTES, n_bytes)))
    crc = 0
    for start in range(0, n_bytes, BLOCK_BYTES):
        piece = buffer[: min(BLOCK_BYTES, n_bytes - start)]
        stage.read_into(path, offset + start, piece)
        crc = crc32(piece, crc)
    return crc
