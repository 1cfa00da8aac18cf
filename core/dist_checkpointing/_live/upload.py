"""Write objects of a store: small ones by one request, files from memory by parts.

A file of a checkpoint is uploaded in the order of its bytes, while they are read from the memory of
the process. Nothing of it is kept: a few parts of a file are in flight. An upload
that fails is aborted, and the objects that were finished before are deleted.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import field
from operator import itemgetter
from typing import TypeAlias

from core.arrays.checksum import RunSum, crc32, digest_of_blocks
from core.engine.catalog.file_image import FileImage
from core.engine.catalog.stored import PlannedArray
from core.engine.team.threads import ThreadGroup
from core.errors import CheckpointingException, CorruptError, StorageError, UsageError
from core.files import object_client
from core.files.multipart.stream import PART_BYTES, Piece, upload_stream
from core.files.object_listing import delete_objects, forget_listings
from core.files.remote_path import RemotePath
from core.publish.manifest.file import FileSum
from core.values import dataclass

PiecesOf: TypeAlias = Callable[[PlannedArray], Iterator[Piece]]
"""Returns the bytes of an array, dense in C order, in pieces; may be called twice for an array."""


def upload_object(path: RemotePath, data: bytes, *, replaces: bool = False) -> None:
    """Write an object by one request, after which it exists completely, or as it was before.

    Args:
        path: URL of the object.
        data: its content.
        replaces: replace an existing object.

    Raises:
        UsageError: the object exists.
        StorageError: the store refuses or cannot be reached, or has no conditional writes.
    """
    forget_listings()
    try:
        object_client.put_object(path, data, replace=replaces)
    except FileExistsError:
        raise UsageError(
            "the object already exists",
            file=str(path),
            hint="choose a different URL, or pass overwrite=True",
        ) from None


@dataclass(slots=True)
class UploadedFiles:
    """The files that were uploaded, with their checksums.

    Args:
        files: the entries of the files.
        sums: name of the array → its checksums.
    """

    files: list[FileSum] = field(default_factory=list)
    sums: dict[str, RunSum] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """Number of bytes of all arrays."""
        return sum(total.n_bytes for total in self.sums.values())

    def digest_of(self, name: str) -> str | None:
        """Return the digest of an array in hexadecimal digits; None if none was computed."""
        blocks = self.sums[name].blocks
        return digest_of_blocks(blocks).hex() if blocks else None


def upload_files(
    root: RemotePath,
    images: Sequence[FileImage],
    pieces_of: PiecesOf,
    *,
    threads: int,
    with_digests: bool = False,
) -> UploadedFiles:
    """Upload files, several at the same time, from the bytes of their arrays.

    Args:
        root: prefix of the files.
        images: the files.
        pieces_of: the arrays in them.
        threads: number of files at the same time.
        with_digests: compute digests, too.

    Raises:
        CheckpointingException: a file cannot be uploaded; none of them exists then.
    """
    uploaded = UploadedFiles()
    waiting = iter(images)
    begun: list[RemotePath] = []
    group = ThreadGroup("upload")
    lock = threading.Lock()

    def send(image: FileImage) -> FileSum:
        crc = 0

        def checked() -> Iterator[Piece]:
            nonlocal crc
            for piece in file_pieces(image, pieces_of, crc_of):
                # Another thread has failed: this error makes the client abort the upload.
                if group.is_stopped():
                    raise StorageError(
                        "the upload was stopped because another upload failed",
                        file=str(root / image.path),
                    )
                crc = crc32(piece, crc)
                yield piece

        upload_stream(root / image.path, checked(), image.size)
        return FileSum(image.path, image.size, crc)

    def crc_of(name: str) -> int:
        # Containers state the checksum of an array behind it, or before: it is computed first.
        return uploaded.sums[name].crc

    def work() -> None:
        while not group.is_stopped():
            with lock:
                image = next(waiting, None)
                if image is None:
                    return
                begun.append(root / image.path)
            sums = {
                placed.array.name: _sum_of(placed.array, pieces_of, with_digests=with_digests)
                for placed in image.arrays
            }
            with lock:
                uploaded.sums.update(sums)
            entry = send(image)
            with lock:
                uploaded.files.append(entry)

    try:
        group.run(work, min(threads, len(images)))
    except BaseException:
        _delete_quietly(begun)
        raise
    return uploaded


def _sum_of(array: PlannedArray, pieces_of: PiecesOf, *, with_digests: bool) -> RunSum:
    total = RunSum(0, array.n_bytes, crc=True, digest=with_digests)
    for piece in pieces_of(array):
        total.feed(memoryview(piece))
    return total


def _delete_quietly(paths: Sequence[RemotePath]) -> None:
    """Delete the objects of a failed upload; its error matters more than one of the deletion."""
    with suppress(CheckpointingException):
        delete_objects(paths)


def bytes_of_literals(image: FileImage) -> bytes:
    """Return the content of a file without arrays."""
    data = bytearray(image.size)
    for offset, literal in image.literals(lambda name: 0):
        data[offset : offset + len(literal)] = literal
    return bytes(data)


def file_pieces(
    image: FileImage, pieces_of: PiecesOf, crc_of: Callable[[str], int]
) -> Iterator[Piece]:
    """Yield the bytes of a file in order: arrays, what is around them, and zeros between.

    Args:
        image: the file.
        pieces_of: the arrays in it.
        crc_of: returns the CRC-32 of an array, by name.

    Raises:
        CorruptError: parts of the file overlap, or an array has another length than planned.
    """
    parts: Iterable[tuple[int, bytes | PlannedArray]] = heapq.merge(
        ((placed.offset, placed.array) for placed in image.arrays if placed.array.n_bytes),
        ((offset, data) for offset, data in image.literals(crc_of) if data),
        ((image.size, b""),),
        key=itemgetter(0),
    )
    end = 0
    for offset, part in parts:
        if offset < end:
            raise CorruptError(
                f"parts of the file overlap: one part ends at byte {end}, but the next begins at "
                f"byte {offset}",
                file=image.path,
            )
        for start in range(end, offset, PART_BYTES):
            yield bytes(min(PART_BYTES, offset - start))
        end = offset
        for piece in (part,) if isinstance(part, bytes) else pieces_of(part):
            yield piece
            end += len(piece)
        n_bytes = len(part) if isinstance(part, bytes) else part.n_bytes
        if end - offset != n_bytes:
            raise CorruptError(
                f"{end - offset} bytes were read for a part that is {n_bytes} bytes long",
                file=image.path,
            )
