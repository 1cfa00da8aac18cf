"""The destination of a save by several processes: a directory, or a prefix of an object store.

::

    DirectoryDestination   files of their full size, filled at any position by any number of
                           processes; the caller renames the directory when it is complete
    BucketDestination      objects, each uploaded by the one process that has all of its bytes;
                           an object cannot be filled in part, nor renamed

``destination_of`` chooses one by the path.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

from core.arrays.box import Box
from core.arrays.checksum import BLOCK_BYTES, crc32
from core.arrays.dtypes import itemsize
from core.dist_checkpointing._live.share import ProcessShare, has_one_holder
from core.dist_checkpointing._live.sums import complete_arrays, complete_files
from core.dist_checkpointing._live.upload import (
    UploadedFiles,
    bytes_of_literals,
    upload_files,
    upload_object,
)
from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.file_image import FileImage
from core.engine.catalog.stored import PlannedArray
from core.engine.catalog.tensor import Fragment, TargetFragment, Tensor
from core.engine.copy.options import CopyOptions
from core.engine.copy.run import execute
from core.engine.plan.box_reader import BoxReader, bands
from core.engine.plan.plan import make_plan
from core.engine.plan.positions import Places
from core.errors import UnsupportedError
from core.files.folders import sync_folders
from core.files.multipart.stream import PART_BYTES, Piece
from core.files.object_listing import N_REQUESTS
from core.files.remote_path import RemotePath, is_remote
from core.files.requests.daemon_threads import DaemonThreads
from core.files.requests.waiting import map_in
from core.files.store import ReadStore, override
from core.publish.manifest.file import FileSum, ManifestArray
from core.publish.manifest.of_copy import finish_files
from core.publish.stage.files import StageStore
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class WrittenShare:
    """The result of writing the share of one process.

    Args:
        n_bytes: number of bytes of tensors.
        files, arrays: entries of a manifest for what the process has written completely.
    """

    n_bytes: int
    files: Sequence[FileSum]
    arrays: Sequence[ManifestArray]


class SaveDestination(Protocol):
    """The files that several processes write together."""

    @property
    def can_share_files(self) -> bool:
        """True if several processes can write parts of one file."""

    def write(
        self,
        share: ProcessShare,
        source: Catalog,
        memory: ReadStore,
        *,
        images: Sequence[FileImage],
        threads: int,
        with_sums: bool,
    ) -> WrittenShare:
        """Write the share of this process.

        Args:
            share: the share.
            source, memory: the tensors of this process.
            images: all files.
            threads: number of threads.
            with_sums: compute the entries of a manifest.

        Raises:
            CheckpointingException: it cannot be written.
        """

    def finish(self, images: Sequence[FileImage]) -> None:
        """Write headers of shared files and files without data, then metadata; by one process.

        Args:
            images: the files that are left.

        Raises:
            CheckpointingException: a file cannot be written, or a shared file is missing.
        """


def destination_of(root: Path, *, fsync: bool) -> SaveDestination:
    """Return access to a directory or a prefix that is being written.

    Args:
        root: the directory, which exists, or the URL of a prefix.
        fsync: wait for the disk.
    """
    if is_remote(root):
        return BucketDestination(root)
    return DirectoryDestination(root, fsync)


@dataclass(frozen=True, slots=True)
class DirectoryDestination(SaveDestination):
    """A directory; see ``SaveDestination``.

    Args:
        root: the directory, which exists.
        fsync: wait for the disk.
        store: access to the directory that stays open; None to open it for each call.
    """

    root: Path
    fsync: bool
    store: StageStore | None = None

    @contextmanager
    def _open(self) -> Iterator[StageStore]:
        if self.store is not None:
            yield self.store
        else:
            with closing(StageStore(self.root, is_durable=self.fsync)) as store:
                yield store

    @property
    @override
    def can_share_files(self) -> bool:
        return True

    @override
    def write(
        self,
        share: ProcessShare,
        source: Catalog,
        memory: ReadStore,
        *,
        images: Sequence[FileImage],
        threads: int,
        with_sums: bool,
    ) -> WrittenShare:
        plan = make_plan(
            source, share.target, share.images, threads=threads, compares=False, is_share=True
        )
        with self._open() as store:
            result = execute(plan, memory, store, CopyOptions(digest=with_sums))
            files = finish_files(plan, result, store, crc=with_sums)
            if self.fsync:
                store.sync_files()
        arrays = complete_arrays(plan, result) if with_sums else []
        return WrittenShare(
            result.written_bytes, complete_files(files, images, arrays) if with_sums else [], arrays
        )

    @override
    def finish(self, images: Sequence[FileImage]) -> None:
        with self._open() as store:
            for image in sorted(images, key=lambda image: image.is_metadata):
                if image.is_metadata and self.fsync:
                    store.sync_files()
                _finish_file(image, store)
            if self.fsync:
                store.sync_files()
        if self.fsync:
            sync_folders(self.root)


def _finish_file(image: FileImage, store: StageStore) -> None:
    """Write the bytes of a file around its arrays, which other processes have filled.

    A file without arrays is created.

    Raises:
        CheckpointingException: the file cannot be written.
    """
    store.create(image.path, image.size)
    places = Places([image])

    def crc_of(name: str) -> int:
        number = places.number_of(name)
        assert number is not None, "a literal states the CRC of an array of its own file"
        return _crc_of_range(store, image.path, places.offset_of(number), places.bytes_of(number))

    for offset, data in image.literals(crc_of):
        store.write(image.path, offset, data)


def _crc_of_range(store: StageStore, path: str, offset: int, n_bytes: int) -> int:
    """Return the CRC-32 of bytes that several processes have written."""
    buffer = memoryview(bytearray(min(BLOCK_BYTES, n_bytes)))
    crc = 0
    for start in range(0, n_bytes, BLOCK_BYTES):
        piece = buffer[: min(BLOCK_BYTES, n_bytes - start)]
        store.read_into(path, offset + start, piece)
        crc = crc32(piece, crc)
    return crc


@dataclass(frozen=True, slots=True)
class BucketDestination(SaveDestination):
    """A prefix of an object store; see ``SaveDestination``."""

    root: RemotePath

    @property
    @override
    def can_share_files(self) -> bool:
        return False

    @override
    def write(
        self,
        share: ProcessShare,
        source: Catalog,
        memory: ReadStore,
        *,
        images: Sequence[FileImage],
        threads: int,
        with_sums: bool,
    ) -> WrittenShare:
        arrays = ArrayBytes(share, source, memory)
        uploaded = upload_files(
            self.root, share.images, arrays.pieces, threads=threads, with_digests=with_sums
        )
        entries = manifest_entries(share, uploaded) if with_sums else []
        return WrittenShare(uploaded.n_bytes, uploaded.files, entries)

    @override
    def finish(self, images: Sequence[FileImage]) -> None:
        # What has data was uploaded by the rank that has it. The rest is small.
        rest = [image for image in images if not any(item.array.n_bytes for item in image.arrays)]

        def put(image: FileImage) -> None:
            upload_object(self.root / image.path, bytes_of_literals(image))

        threads = DaemonThreads(N_REQUESTS, "ckpt-put")
        map_in(threads, put, [image for image in rest if not image.is_metadata])
        threads.shutdown()
        for image in rest:
            if image.is_metadata:
                put(image)


def refuse_shared_files(
    root: Path,
    target: TargetCatalog,
    images: Sequence[FileImage],
    boxes_of: Mapping[str, Collection[Box]],
) -> None:
    """Raise if several processes would have to write parts of one file.

    Args:
        root: the destination, for the error.
        target: the catalog of everything that is written.
        images: all files.
        boxes_of: key → the boxes that processes have, each in one of them.

    Raises:
        UnsupportedError: they would.
    """
    filled = {
        fragment.array.name
        for key, boxes in boxes_of.items()
        for fragment in target.fragments(key)
        if fragment.array is not None and fragment.box in boxes
    }
    for image in images:
        names = [placed.array.name for placed in image.arrays if placed.array.n_bytes]
        is_of_one = len(names) <= 1 or has_one_holder(image)
        if not is_of_one or not filled.issuperset(names):
            raise UnsupportedError(
                f"several ranks hold parts of this {target.format} file, but only one rank can "
                "write an object",
                file=str(root / image.path),
                hint="save as torch_dist or dcp, or save to a local directory",
            )


class ArrayBytes:
    """The bytes of the arrays of a share, read from the memory of its process.

    Args:
        share: the arrays, and the boxes of tensors that fill them.
        source, memory: the tensors.
    """

    def __init__(self, share: ProcessShare, source: Catalog, memory: ReadStore) -> None:
        self._source = source
        self._memory = memory
        self._fragments: dict[str, list[tuple[str, TargetFragment]]] = {}
        for key in (*share.target.tensors, *share.target.hidden):
            for fragment in share.target.fragments(key):
                if fragment.array is not None:
                    self._fragments.setdefault(fragment.array.name, []).append((key, fragment))

    def pieces(self, array: PlannedArray) -> Iterator[Piece]:
        """Yield the bytes of an array in C order, in pieces of up to ``PART_BYTES``.

        Raises:
            MissingShardError: the tensors do not cover the array.
        """
        # A catalog in which the array is the only tensor.
        fragments = []
        for key, wanted in self._fragments.get(array.name, ()):
            shift = tuple(a - b for a, b in zip(wanted.at, wanted.box.offset, strict=True))
            for stored in self._source.fragments(key):
                common = wanted.box.intersect(stored.box)
                if common is not None and not common.is_empty:
                    at = tuple(
                        a + b - c
                        for a, b, c in zip(stored.at, common.offset, stored.box.offset, strict=True)
                    )
                    fragments.append(Fragment(common.shift(shift), stored.array, at))
        catalog = Catalog(
            format="live",
            version=None,
            tensors={array.name: Tensor(array.dtype, array.shape, lambda: fragments)},
        )
        # The client keeps a piece until it is sent, so that each has memory of its own.
        reader = BoxReader(catalog, self._memory).tensor(array.name)
        size = itemsize(array.dtype)
        raw = memoryview(bytearray(_RAW_BYTES))
        for box in bands(array.shape, size, PART_BYTES):
            piece = bytearray(box.n_elements * size)
            reader.read(box, memoryview(piece), raw)
            yield piece


_RAW_BYTES = 1 << 20
"""Scratch space for tensors that are not dense."""


def manifest_entries(share: ProcessShare, uploaded: UploadedFiles) -> list[ManifestArray]:
    """Return the entries of uploaded arrays for a manifest."""
    places: Mapping[str, tuple[str, int]] = {
        placed.array.name: (image.path, placed.offset)
        for image in share.images
        for placed in image.arrays
    }
    entries: dict[str, ManifestArray] = {}
    for key in (*share.target.tensors, *share.target.hidden):
        for fragment in share.target.fragments(key):
            array = fragment.array
            if array is None or not array.n_bytes:
                continue
            if array.name in places and array.name not in entries:
                entries[array.name] = ManifestArray(
                    key,
                    array.name,
                    *places[array.name],
                    array.dtype,
                    array.shape,
                    uploaded.sums[array.name].crc,
                    uploaded.digest_of(array.name),
                )
    return list(entries.values())
