"""Multipart uploads in the order of the parts, through obstore, to any store.

obstore takes the bytes of an object from an iterator, and makes the object visible when the
iterator ends; an error of the iterator makes it delete what was sent. Here the iterator waits for
the caller: all of them wait in one thread, so that thousands of uploads may be unfinished.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias

from core.errors import StorageError, UsageError
from core.files.multipart.protocol import ObjectUpload, SentPart, UploadClient, checksum_of
from core.files.object_client import client_of, no_such_bucket, put_object, translate_store_errors
from core.files.object_listing import find_object, forget_listings
from core.files.remote_path import RemotePath
from core.files.requests.traffic import count_bytes
from core.files.requests.waiting import check_wait, last_moment
from core.files.store import override

N_IN_FLIGHT = 4
"""Number of requests of one object at the same time, that ``send`` does not wait for."""
_MAX_KEPT_BYTES = 1 << 20
"""Length up to which an object is kept until it is finished, and put by one request."""
_LEAST_BYTES = 5 << 20
"""Length of the shortest part that S3 and Google take, but for the last one."""
_MAX_PARTS = 9_999
"""Largest number of parts, without the rest at the end of an object."""
_POLL_S = 0.1
"""Seconds after which a thread that waits looks whether it is of use."""
_loop_lock = threading.Lock()


class OrderedUploads(UploadClient):
    """Uploads to one bucket or container."""

    def __init__(self, path: RemotePath) -> None:
        self.takes_any_order = False
        client_of(path)  # whose settings are checked before anything is read

    @override
    def begin(self, path: RemotePath, n_bytes: int, part_bytes: int) -> ObjectUpload:
        if n_bytes <= _MAX_KEPT_BYTES:
            return _KeptUpload(path, n_bytes)
        return _OrderedUpload(path, n_bytes)

    @override
    def attach(self, path: RemotePath, upload_id: str) -> ObjectUpload:
        raise UsageError(
            "uploads to this store cannot be resumed",
            file=str(path),
            hint="run the command again without --resume",
        )

    @override
    def unfinished(self, prefix: RemotePath) -> list[ObjectUpload]:
        return []


class _KeptUpload(ObjectUpload):
    """A small object, which is put by one request at the end."""

    def __init__(self, path: RemotePath, n_bytes: int) -> None:
        self.path = path
        self.upload_id = ""
        self._n_bytes = n_bytes
        self._parts: dict[int, bytes] = {}

    @override
    def send(self, number: int, data: memoryview) -> SentPart:
        self._parts[number] = bytes(data)
        return SentPart(number, len(self._parts[number]), "", checksum_of(data))

    @override
    def sent(self) -> dict[int, SentPart]:
        return {}

    @override
    def finish(self, *, replaces: bool) -> None:
        data = b"".join(self._parts[number] for number in sorted(self._parts))
        _check_length(self.path, len(data), self._n_bytes)
        forget_listings()
        put_object(self.path, data, replace=replaces)

    @override
    def abort(self) -> None:
        self._parts.clear()


class _Aborted(Exception):
    """Makes obstore abort an upload."""


_Piece: TypeAlias = tuple[bytes, Future[None]]
"""Bytes to send, and what is fulfilled when obstore has taken them."""


class _OrderedUpload(ObjectUpload):
    """An object of many bytes, of which the rest of a part is kept until more arrives.

    The parts have another length than those of the caller: one of which the last part of the object
    is a few bytes long, because obstore keeps this until the end.
    """

    def __init__(self, path: RemotePath, n_bytes: int) -> None:
        self.path = path
        self.upload_id = ""
        self._n_bytes = n_bytes
        n_parts = max(1, min(n_bytes // _LEAST_BYTES, _MAX_PARTS))
        self._chunk_bytes = n_bytes // n_parts
        self._pieces: asyncio.Queue[_Piece | _Aborted | None] = asyncio.Queue()
        """The bytes to upload; None ends the upload."""
        self._result: Future[None] | None = None
        """Fulfilled when the object is visible; None before the first part."""
        self._n_sent = 0
        self._is_over = False

    @override
    def send(self, number: int, data: memoryview) -> SentPart:
        if self._result is None:
            loop = _loop(os.getpid())
            self._result = asyncio.run_coroutine_threadsafe(self._run(), loop)
        is_taken: Future[None] = Future()
        # A copy, because obstore goes on reading it after it has asked for more.
        self._put((bytes(data), is_taken))
        _wait_for_first(is_taken, self._result)
        if not is_taken.done():
            self._wait_for_end()
        self._n_sent += data.nbytes
        count_bytes(data.nbytes)
        return SentPart(number, data.nbytes, "", checksum_of(data))

    async def _run(self) -> None:
        import obstore

        pieces: Any = self._take_pieces()
        await obstore.put_async(
            client_of(self.path),
            self.path.key,
            pieces,
            use_multipart=True,
            chunk_size=self._chunk_bytes,
            max_concurrency=N_IN_FLIGHT,
        )

    async def _take_pieces(self) -> AsyncIterator[bytes]:
        while True:
            piece = await self._pieces.get()
            if piece is None:
                return
            if isinstance(piece, _Aborted):
                raise piece
            data, is_taken = piece
            yield data
            is_taken.set_result(None)

    def _put(self, piece: _Piece | _Aborted | None) -> None:
        """Hand something to the thread of the uploads."""
        _loop(os.getpid()).call_soon_threadsafe(self._pieces.put_nowait, piece)

    def _wait_for_end(self) -> None:
        """Wait for the end of the upload, and raise its error in the words of the project."""
        if self._result is None:
            return
        with translate_store_errors(self.path, doing="write"):
            try:
                self._result.result()
            except FileNotFoundError as err:  # the object need not exist: it is the bucket
                raise no_such_bucket(self.path) from err
            except _Aborted:
                raise StorageError("the upload was aborted", file=str(self.path)) from None

    @override
    def sent(self) -> dict[int, SentPart]:
        return {}

    @override
    def finish(self, *, replaces: bool) -> None:
        _check_length(self.path, self._n_sent, self._n_bytes)
        # Neither Google nor Azure is asked to refuse at the end of an upload in parts.
        if not replaces and find_object(self.path) is not None:
            raise FileExistsError(str(self.path))
        forget_listings()
        self._is_over = True
        self._put(None)
        self._wait_for_end()

    @override
    def abort(self) -> None:
        if self._result is None or self._is_over:
            return
        self._is_over = True
        self._put(_Aborted())
        with suppress(StorageError):  # a silent store is left alone
            _wait_for_first(self._result)


def _wait_for_first(*futures: Future[None]) -> None:
    """Wait until one of the futures is done; signals and ``stop_waiting_when`` end the wait.

    Raises:
        StorageError: the wait was given up.
    """
    give_up_at = last_moment()
    while not wait(futures, timeout=_POLL_S, return_when=FIRST_COMPLETED).done:
        check_wait(give_up_at)


def _check_length(path: RemotePath, n_sent: int, n_bytes: int) -> None:
    """Raise unless all bytes of an object were sent."""
    if n_sent != n_bytes:
        raise StorageError(
            f"the upload is incomplete: {n_sent:,} of {n_bytes:,} bytes were sent",
            file=str(path),
            hint="run the command again",
        )


def _loop(process_id: int) -> asyncio.AbstractEventLoop:
    """Return the loop of the thread in which all uploads of a process wait."""
    # Without the lock, two threads that come first at the same time would get a loop each.
    with _loop_lock:
        return _begin_loop(process_id)


@cache
def _begin_loop(process_id: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="ckpt-uploads", daemon=True).start()
    return loop
