"""Buckets, objects and unfinished uploads of the server.

Data are files of a directory, without holes filled: an object is a sequence of files, so that
completing an upload copies nothing. A file is deleted when no object has it any more. Names are in
memory.
"""

from __future__ import annotations

import bisect
import hashlib
import io
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.support.s3.checksums import MAKERS, Checksum, encoded

_ZEROS = bytes(1 << 20)


class S3Error(Exception):
    """A refusal.

    Args:
        status: of the answer.
        code: S3's name of the error.
        message: for people.
    """

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message or code


class Blob:
    """A file with the bytes of an object or of a part.

    Args:
        path: the file; an empty blob needs none.
        size: number of bytes that the file has already.
    """

    def __init__(self, path: Path, size: int = 0) -> None:
        self.path = path
        self.size = size

    def open_new(self) -> io.FileIO:
        """Make the file, which is deleted when nobody has the blob any more."""
        weakref.finalize(self, os.unlink, self.path).atexit = False
        return io.FileIO(self.path, "wb")

    def reader(self) -> Iterator[bytes]:
        """Yield the content."""
        if self.size == 0:
            return
        with self.path.open("rb") as file:
            while data := file.read(1 << 20):
                yield data


class BlobWriter:
    """A blob that is being written, and its checksums.

    Args:
        path: a new file, made at the first byte.
        sums: names of the checksums, see ``checksums.MAKERS``.
    """

    def __init__(self, path: Path, sums: Sequence[str]) -> None:
        self._file: io.FileIO | None = None
        self.blob = Blob(path)
        self.sums: dict[str, Checksum] = {name: MAKERS[name]() for name in sums}

    def write(self, data: memoryview) -> None:
        """Append data; zeros become holes."""
        for checksum in self.sums.values():
            checksum.update(data)
        if self._file is None:
            self._file = self.blob.open_new()
        if data == _ZEROS[: len(data)]:
            self._file.seek(len(data), os.SEEK_CUR)
        else:
            view = data
            while view:
                view = view[self._file.write(view) :]
        self.blob.size += len(data)

    def close(self) -> None:
        """Give the file its size."""
        if self._file is not None and not self._file.closed:
            self._file.truncate(self.blob.size)
            self._file.close()


@dataclass(frozen=True)
class StoredObject:
    """A version of an object.

    Args:
        blobs: its content.
        stated_tag: its ETag, with quotes; None for the MD5 sum of the content, read when it is
            asked for.
        headers: what the client wants to be told when it reads: content type, metadata, checksums.
        modified_ns: nanoseconds since 1970.
    """

    blobs: tuple[Blob, ...]
    stated_tag: str | None
    headers: dict[str, str] = field(default_factory=dict)
    modified_ns: int = field(default_factory=time.time_ns)

    @property
    def size(self) -> int:
        """Number of bytes."""
        return sum(blob.size for blob in self.blobs)

    @cached_property
    def e_tag(self) -> str:
        """Its ETag, with quotes."""
        if self.stated_tag is not None:
            return self.stated_tag
        md5 = hashlib.md5()
        for blob in self.blobs:
            for data in blob.reader():
                md5.update(data)
        return f'"{md5.hexdigest()}"'


@dataclass(frozen=True)
class MultipartUpload:
    """An unfinished upload.

    Args:
        bucket, key: the object that it becomes.
        parts: number → part.
        algorithm: kind of the checksums of the parts; "" if the client asked for none.
    """

    bucket: str
    key: str
    headers: dict[str, str]
    parts: dict[int, StoredObject] = field(default_factory=dict)
    begun_ns: int = field(default_factory=time.time_ns)
    algorithm: str = ""


class Objects:
    """Everything that the server holds.

    Args:
        folder: directory for data.
        are_tags_opaque: ETags are no MD5 sums, as those of objects that S3 encrypts by KMS; for
            benchmarks.
        min_part_bytes: smallest size of a part that is not the last.
    """

    def __init__(
        self, folder: Path, *, are_tags_opaque: bool = False, min_part_bytes: int = 5 << 20
    ) -> None:
        self.folder = folder
        self.are_tags_opaque = are_tags_opaque
        self.min_part_bytes = min_part_bytes
        self.lock = threading.RLock()
        self.buckets: dict[str, dict[str, StoredObject]] = {}
        self.uploads: dict[str, MultipartUpload] = {}
        self._order: dict[str, list[str] | None] = {}
        """Bucket → its keys in order; None after a change."""
        self._constant: dict[Path, dict[str, StoredObject]] = {}
        """Directory whose files never change → its files."""
        self._numbers = itertools.count(1)

    def new_writer(self, sums: Sequence[str]) -> BlobWriter:
        """Return a new blob to write to."""
        md5 = () if self.are_tags_opaque else ("content-md5",)
        path = self.folder / f"blob-{next(self._numbers)}"
        return BlobWriter(path, [*dict.fromkeys([*md5, *sums])])

    def finish(self, writer: BlobWriter, headers: dict[str, str]) -> StoredObject:
        """Return an object, not in any bucket yet, of a blob that has been written."""
        writer.close()
        if self.are_tags_opaque:
            tag = f"{time.time_ns():x}{next(self._numbers):x}"
        else:
            tag = writer.sums["content-md5"].digest().hex()
        return StoredObject((writer.blob,), f'"{tag}"', headers)

    def mount(self, bucket: str, prefix: str, folder: Path, *, is_constant: bool = False) -> None:
        """Make the files of a directory objects, without copying them.

        Args:
            is_constant: the files never change: when the directory is mounted again, it is not
                looked at again.
        """
        files = self._constant.get(folder)
        if files is None:
            files = self._list_files(folder)
            if is_constant:
                self._constant[folder] = files
        with self.lock:
            objects = self.buckets.setdefault(bucket, {})
            objects.update((prefix + name, entry) for name, entry in files.items())
            self._order[bucket] = None

    def _list_files(self, folder: Path) -> dict[str, StoredObject]:
        """Return the files below a directory by their paths in it."""
        files = {}
        for parent, _, names in os.walk(folder):
            for name in names:
                path = Path(parent, name)
                if path.exists():  # a link may lead nowhere
                    files[path.relative_to(folder).as_posix()] = self._of_file(path)
        return files

    def _of_file(self, path: Path) -> StoredObject:
        status = path.stat()
        blob = Blob(path, status.st_size)
        opaque_tag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
        tag = opaque_tag if self.are_tags_opaque else None
        return StoredObject((blob,), tag, {}, status.st_mtime_ns)

    def clear(self) -> None:
        """Forget every bucket, with what is in it."""
        with self.lock:
            for bucket in self.buckets:
                self.delete_below(bucket, "")
            self.buckets.clear()
            self._order.clear()

    def bucket(self, name: str) -> dict[str, StoredObject]:
        """Return key → object of a bucket.

        Raises:
            S3Error: there is no such bucket.
        """
        if name not in self.buckets:
            raise S3Error(404, "NoSuchBucket", f"The specified bucket does not exist: {name}")
        return self.buckets[name]

    def get(self, bucket: str, key: str) -> StoredObject:
        """Return an object.

        Raises:
            S3Error: there is none, or no bucket.
        """
        match = self.bucket(bucket).get(key)
        if match is None:
            raise S3Error(404, "NoSuchKey", "The specified key does not exist.")
        return match

    def put(
        self, bucket: str, key: str, new: StoredObject, check: Callable[[StoredObject | None], None]
    ) -> None:
        """Put an object into a bucket.

        Args:
            check: called with the existing object or None; raises if it must not be replaced.
        """
        with self.lock:
            objects = self.bucket(bucket)
            check(objects.get(key))
            objects[key] = new
            self._order[bucket] = None

    def delete(self, bucket: str, key: str) -> None:
        """Delete an object, if there is one."""
        with self.lock:
            if self.bucket(bucket).pop(key, None) is not None:
                self._order[bucket] = None

    def delete_below(self, bucket: str, prefix: str) -> None:
        """Delete objects and unfinished uploads whose keys begin with a prefix."""
        with self.lock:
            for key in [key for key in self.bucket(bucket) if key.startswith(prefix)]:
                self.delete(bucket, key)
            for number in [
                number
                for number, upload in self.uploads.items()
                if upload.bucket == bucket and upload.key.startswith(prefix)
            ]:
                del self.uploads[number]

    def keys(self, bucket: str, prefix: str, after: str) -> Iterator[str]:
        """Yield the keys with a prefix that come after one, in order."""
        with self.lock:
            self.bucket(bucket)
            order = self._order.get(bucket)
            if order is None:
                order = self._order[bucket] = sorted(self.buckets[bucket], key=str.encode)
        start = bisect.bisect_left(order, prefix.encode(), key=str.encode)
        if after >= prefix:
            start = bisect.bisect_right(order, after.encode(), key=str.encode)
        for key in itertools.islice(order, start, None):
            if not key.startswith(prefix):
                return
            yield key

    def begin_upload(self, bucket: str, key: str, headers: dict[str, str], algorithm: str) -> str:
        """Return the id of a new upload."""
        self.bucket(bucket)
        upload_id = f"upload-{next(self._numbers)}"
        self.uploads[upload_id] = MultipartUpload(bucket, key, headers, algorithm=algorithm)
        return upload_id

    def upload(self, bucket: str, key: str, upload_id: str) -> MultipartUpload:
        """Return an unfinished upload.

        Raises:
            S3Error: there is none of this object.
        """
        match = self.uploads.get(upload_id)
        if match is None or (match.bucket, match.key) != (bucket, key):
            raise S3Error(404, "NoSuchUpload", "The specified multipart upload does not exist.")
        return match

    def joined(self, upload: MultipartUpload, wanted: Sequence[tuple[int, str]]) -> StoredObject:
        """Return the object of the parts of an upload, not in any bucket yet.

        Args:
            wanted: number and ETag of the parts.

        Raises:
            S3Error: a part is missing, another one, too small, or out of order.
        """
        numbers = [number for number, _ in wanted]
        if not numbers or numbers != sorted(set(numbers)):
            raise S3Error(400, "InvalidPartOrder" if numbers else "MalformedXML")
        parts = []
        for number, tag in wanted:
            part = upload.parts.get(number)
            if part is None or part.e_tag.strip('"') != tag.strip('"'):
                raise S3Error(400, "InvalidPart", f"part {number} is missing, or another one")
            parts.append(part)
        if any(part.size < self.min_part_bytes for part in parts[:-1]):
            raise S3Error(400, "EntityTooSmall", "a part is smaller than allowed")
        tags = [part.e_tag.strip('"') for part in parts]
        if self.are_tags_opaque:
            tag = hashlib.md5("".join(tags).encode()).hexdigest()
        else:
            tag = hashlib.md5(b"".join(map(bytes.fromhex, tags))).hexdigest()
        blobs = tuple(blob for part in parts for blob in part.blobs)
        return StoredObject(blobs, f'"{tag}-{len(parts)}"', upload.headers)


def check_sums(writer: BlobWriter, stated: dict[str, str]) -> None:
    """Raise if a body does not have the checksums that the client stated.

    Raises:
        S3Error: one differs.
    """
    for name, value in stated.items():
        if encoded(writer.sums[name]) != value:
            code = "XAmzContentChecksumMismatch" if name.startswith("x-amz") else "BadDigest"
            raise S3Error(400, code, f"{name} does not match the body")
