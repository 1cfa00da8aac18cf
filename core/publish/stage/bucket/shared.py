"""Let several processes send the parts of one object.

::

    lead      begins all uploads ─┬─ its share ─┬─ leftovers, literals, the rest ── commit
    others                        └─ its share ─┘

Parts that one process has written completely are sent by it. What it has written of other parts,
such as those with bytes around arrays, it puts into an object beside the destination, from which
the lead completes them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from core.arrays.checksum import crc32
from core.errors import CorruptError, UsageError
from core.files.multipart.client import upload_client
from core.files.multipart.stream import upload_stream
from core.files.object_listing import forget_listings
from core.files.remote_path import RemotePath
from core.files.remote_store import RemoteStore
from core.files.store import TargetStore, override, translate_os_errors
from core.publish.stage.bucket.parts import PartStore, SentShare
from core.publish.stage.protocol import SharedStage, ShareResult
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.plan.positions import Places
    from core.publish.stage.journal import FileJournal

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SharedUploads(SharedStage):
    """The uploads of a destination, as the lead tells them to all workers.

    Args:
        base: URL that the names of the objects are relative to.
        uploads: name → size of the object and ID of its upload.
        n_threads: number of parts that each worker has in flight.
        stage_dir: prefix of what the workers put beside the destination.
    """

    base: RemotePath
    uploads: Mapping[str, tuple[int, str]]
    n_threads: int
    stage_dir: RemotePath

    def open(self) -> PartStore:
        """Return a store that sends parts of these uploads."""
        client = upload_client(self.base)
        store = PartStore(self.base, client, n_threads=self.n_threads, notes_ranges=True)
        store.continue_uploads(
            {
                name: client.attach(self.base / name, upload_id)
                for name, (_, upload_id) in self.uploads.items()
            }
        )
        for name, (n_bytes, _) in self.uploads.items():
            store.create(name, n_bytes)
        return store

    @override
    def find_incoherent_file_system(self) -> None:
        """Return None: every byte is sent by one worker."""

    @override
    def write_plan(self, name: str, file: IO[bytes]) -> RemotePath:
        path = self.stage_dir / name
        n_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        upload_stream(path, iter(lambda: file.read(_CHUNK_BYTES), b""), n_bytes)
        return path

    @override
    def open_plan(
        self, path: Path, *, is_lead: bool, wait_for: Callable[[Path, str], None]
    ) -> AbstractContextManager[Path]:
        return _local_copy(self.stage_dir / path.name)

    @override
    def copy_share(
        self,
        copy: Callable[[TargetStore, FileJournal | None], ShareResult],
        *,
        rank: int,
        places: Places,
        tensors: Container[int],
    ) -> ShareResult:
        with closing(self.open()) as store:
            result = copy(store, None)
            # Arrays that others complete need not be read back here.
            for number, part in result.state.open.items():
                if not part.n_unsummed:
                    store.release(
                        places.file_of(number), places.offset_of(number), places.bytes_of(number)
                    )
            sent = send_share(store, self.stage_dir / f"leftovers-{rank}")
            return replace(result, sent=sent, resumed_bytes=store.resumed_bytes)


def send_share(store: PartStore, leftovers: RemotePath) -> SentShare:
    """Send the complete parts of a share, and put what is left into an object.

    Args:
        store: a store of ``SharedUploads.open``; everything of the share has been written.
        leftovers: URL of the object; one of an earlier run is replaced.

    Raises:
        StorageError: the store refuses, or cannot be reached.
    """
    store.drain()
    ranges: list[tuple[str, int, int, int]] = []

    def content() -> Iterator[bytes]:
        for name, offset, n_bytes in store.leftovers():
            crc = 0
            for chunk in _chunks(offset, n_bytes):
                buffer = bytearray(chunk.stop - chunk.start)
                store.read_into(name, chunk.start, memoryview(buffer))
                crc = crc32(buffer, crc)
                yield bytes(buffer)
            ranges.append((name, offset, n_bytes, crc))

    n_bytes = sum(n_bytes for _, _, n_bytes in store.leftovers())
    if not n_bytes:
        return SentShare(store.sent(), None, ())
    upload_stream(leftovers, content(), n_bytes)
    return SentShare(store.sent(), leftovers, tuple(ranges))


def join_shares(store: PartStore, shares: Iterable[SentShare]) -> None:
    """Complete the lead's parts by what the workers have sent and left.

    Args:
        store: the lead's store.
        shares: what each worker has sent.

    Raises:
        CorruptError: leftovers are not those that the worker has put.
        StorageError: the store refuses, or cannot be reached.
    """
    # A listing made before the workers put their leftovers does not name them.
    forget_listings()
    for share in shares:
        for name, numbers in share.parts.items():
            store.take_sent(name, numbers)
        if share.leftovers is None:
            continue
        source = RemoteStore(share.leftovers.parent)
        try:
            position = 0
            for name, offset, n_bytes, expected in share.ranges:
                crc = 0
                for chunk in _chunks(offset, n_bytes):
                    n = chunk.stop - chunk.start
                    data = source.read(share.leftovers.name, position, n)
                    crc = crc32(data, crc)
                    store.write(name, chunk.start, data)
                    position += n
                if crc != expected:
                    raise CorruptError(
                        "another process has replaced this object",
                        file=str(share.leftovers),
                        hint="make sure that only one run at a time writes to a destination",
                    )
        finally:
            source.close()


@contextmanager
def _local_copy(path: RemotePath) -> Iterator[Path]:
    """Copy an object into a temporary file, and remove that after the block.

    Raises:
        StorageError: the store refuses, or cannot be reached.
    """
    label = tempfile.gettempdir()
    forget_listings()  # another process may have put the object after the last listing
    with translate_os_errors(label, doing="create a file in"):
        file = tempfile.NamedTemporaryFile(prefix="ckpt-")
    with file, closing(RemoteStore(path.parent)) as store:
        for chunk in _chunks(0, store.size(path.name)):
            data = store.read(path.name, chunk.start, chunk.stop - chunk.start)
            with translate_os_errors(label, doing="write to"):
                file.write(data)
                file.flush()
        yield Path(file.name)


def check_shareable(dst: RemotePath) -> None:
    """Raise unless several processes can send parts of one object to a store.

    Raises:
        UsageError: they cannot.
    """
    if not upload_client(dst).takes_any_order:
        raise UsageError(
            f"the installed client does not let several workers write to {dst.scheme}://",
            file=str(dst),
            hint="for s3://, install boto3 (pip install 'ckpt-toolkit[s3]'); for other stores, run "
            "the command without ckpt launch",
        )


def _chunks(offset: int, n_bytes: int) -> Iterator[slice]:
    end = offset + n_bytes
    return (
        slice(start, min(start + _CHUNK_BYTES, end)) for start in range(offset, end, _CHUNK_BYTES)
    )
