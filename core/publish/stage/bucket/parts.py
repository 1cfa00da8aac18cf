"""Fill the parts of many objects in any order, and send each part as soon as it is complete."""

from __future__ import annotations

import threading
from array import array as columns
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from core.engine.team.threads import RunningThreads
from core.errors import CorruptError, StorageError
from core.files.multipart.stream import part_bytes_of
from core.files.object_listing import N_REQUESTS
from core.files.requests.ending import stop_waiting_when
from core.files.store import TargetStore, check_name, override
from core.publish.stage.bucket.scratch import Scratch
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.multipart.protocol import ObjectUpload, SentPart, UploadClient
    from core.files.remote_path import RemotePath

_ZEROS = memoryview(bytes(1 << 20))
_WAITING_PER_THREAD = 4
"""Number of complete parts per sending thread that may wait before writers have to wait."""
_WAIT_S = 0.5
"""Timeout of one wait, so that signals are handled."""
_LAST_S = 2.0
"""Seconds that a store has to answer when it is no longer needed, before sending is given up."""


@dataclass(frozen=True, slots=True)
class SentShare:
    """The parts that one worker has sent, and the bytes of others that it has written.

    Args:
        parts: name → numbers of the parts that it has sent.
        leftovers: object with the bytes of the ranges in ``ranges``, one after the other; None if
            there are none.
        ranges: name, offset, length and CRC-32 of each range.
    """

    parts: Mapping[str, list[int]]
    leftovers: RemotePath | None
    ranges: tuple[tuple[str, int, int, int], ...]


class PartStore(TargetStore):
    """Objects that are being written, from any number of threads; none is visible yet.

    Bytes go to a temporary file until their part is complete. Then one of the sending threads reads
    the part, sends it, and frees its place.

    Args:
        base: URL that the names of the objects are relative to.
        client: makes the uploads.
        n_threads: number of sending threads, each with a buffer of one part.
        notes_ranges: note which bytes of incomplete parts have been written, for ``leftovers``.

    Attributes:
        uploads: name → upload of every object that has been begun.
        resumed_bytes: bytes of parts that an earlier run had sent.
    """

    is_readable = False

    def __init__(
        self,
        base: RemotePath,
        client: UploadClient,
        *,
        n_threads: int,
        notes_ranges: bool = False,
    ) -> None:
        self.uploads: dict[str, ObjectUpload] = {}
        self.resumed_bytes = 0
        self._base = base
        self._client = client
        self._earlier: Mapping[str, ObjectUpload] = {}
        self._objects: dict[str, _Object] = {}
        self._scratch: dict[int, Scratch] = {}  # by size of the parts
        self._queue: deque[tuple[_Object, int]] = deque()
        self._max_waiting = _WAITING_PER_THREAD * n_threads
        self._n_unsent = 0
        self._n_sending = 0
        self._notes_ranges = notes_ranges
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_closed = False
        self._is_abandoned = False
        self._threads = [
            threading.Thread(target=self._run, name=f"send-{n}", daemon=True)
            for n in range(n_threads)
        ]
        self._running = RunningThreads()

    def continue_uploads(self, uploads: Mapping[str, ObjectUpload]) -> None:
        """Use unfinished uploads of an earlier run, by name: equal parts are not sent again."""
        self._earlier = uploads

    @override
    def create(self, name: str, n_bytes: int) -> None:
        part_bytes = part_bytes_of(n_bytes)
        with self._changed:
            if name in self._objects:
                return
            if not self._objects:
                for thread in self._threads:
                    thread.start()
            scratch = self._scratch.get(part_bytes)
            if scratch is None:
                scratch = self._scratch[part_bytes] = Scratch(part_bytes)
            file = self._objects[check_name(name)] = _Object(name, n_bytes, part_bytes, scratch)
            self._n_unsent += len(file.missing)

    @override
    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Write bytes; wait while too many parts are waiting to be sent.

        Raises:
            CapacityError: the disk of the temporary file is full.
            StorageError: a part could not be sent.
        """
        self._wait(lambda: len(self._queue) <= self._max_waiting)
        file = self._objects[name]
        for number, start, piece in file.split(offset, memoryview(data).cast("B")):
            with self._changed:
                slot = file.slots.get(number)
                if slot is None:
                    slot = file.slots[number] = file.scratch.take()
            file.scratch.write(slot, start, piece)
            with self._changed:
                file.missing[number] -= len(piece)
                if self._notes_ranges:
                    file.note_range(number, start, start + len(piece))
                self._queue_if_complete(file, number)

    @override
    def zero(self, name: str, offset: int, n_bytes: int) -> None:
        for start in range(offset, offset + n_bytes, len(_ZEROS)):
            self.write(name, start, _ZEROS[: offset + n_bytes - start])

    @override
    def hold(self, name: str, offset: int, n_bytes: int) -> None:
        file = self._objects[name]
        with self._changed:
            if n_bytes and (offset, n_bytes) not in file.held:
                file.held.add((offset, n_bytes))
                for number in file.numbers(offset, n_bytes):
                    file.holds[number] = file.holds.get(number, 0) + 1

    @override
    def release(self, name: str, offset: int, n_bytes: int) -> None:
        file = self._objects[name]
        with self._changed:
            if (offset, n_bytes) not in file.held:
                return
            file.held.remove((offset, n_bytes))
            for number in file.numbers(offset, n_bytes):
                file.holds[number] -= 1
                if file.holds[number] == 0:
                    del file.holds[number]
                    self._queue_if_complete(file, number)

    @override
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of a held range, or of parts that have not been sent.

        Raises:
            StorageError: the bytes have been sent.
        """
        file = self._objects[name]
        for number, start, piece in file.split(offset, buffer):
            slot = file.slots.get(number)
            if slot is None:
                raise StorageError(
                    "this part has already been uploaded, so it cannot be read back",
                    file=str(self._base / name),
                )
            file.scratch.read(slot, start, piece)

    def begin_uploads(self) -> dict[str, tuple[int, str]]:
        """Begin the uploads of all objects now.

        Returns:
            Name → size and ID of the upload, by which another process can send parts.

        Raises:
            StorageError: the store refuses, or cannot be reached.
        """
        begun = [file for file in self._objects.values() if file.n_bytes]
        with ThreadPoolExecutor(N_REQUESTS) as pool:
            uploads = pool.map(self._upload_of, begun)
            return {
                file.name: (file.n_bytes, upload.upload_id)
                for file, upload in zip(begun, uploads, strict=True)
            }

    def take_sent(self, name: str, numbers: Iterable[int]) -> None:
        """Take note of parts that another process has sent."""
        file = self._objects[name]
        with self._changed:
            for number in numbers:
                file.missing[number] = 0
                self._n_unsent -= 1

    def drain(self) -> None:
        """Wait until all complete parts have been sent.

        Raises:
            StorageError: a part could not be sent.
        """
        self._wait(lambda: self._n_sending == 0)

    def sent(self) -> dict[str, list[int]]:
        """Return name → numbers of the parts that have been sent, after ``drain``."""
        return {
            name: [
                number
                for number, n_missing in enumerate(file.missing)
                if not n_missing and number not in file.holds
            ]
            for name, file in self._objects.items()
        }

    def leftovers(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, offset and length of the written ranges of parts that were not sent."""
        for name, file in self._objects.items():
            for number, ranges in sorted(file.ranges.items()):
                for start, stop in ranges:
                    yield name, number * file.part_bytes + start, stop - start

    def finish(self) -> None:
        """Wait until all parts of all objects have been sent.

        Raises:
            CorruptError: bytes of an object were never written, or twice.
            StorageError: a part could not be sent.
        """
        self._wait(lambda: True)
        with self._changed:
            incomplete = [
                f"{file.name}, part {number + 1}: {n} bytes missing"
                for file in self._objects.values()
                for number, n in enumerate(file.missing)
                if n
            ]
        if incomplete:
            raise CorruptError(
                f"some bytes were not written ({'; '.join(incomplete[:3])})", file=str(self._base)
            )
        self._wait(lambda: self._n_unsent == 0)

    def publish(self, name: str) -> None:
        """Make an object visible, after ``finish``.

        Raises:
            FileExistsError: another object has this name.
            StorageError: the store refuses, or cannot be reached.
        """
        self.uploads[name].finish(replaces=False)

    def close(self) -> None:
        """Stop sending, and remove the temporary files; uploads stay as they are.

        Parts that are being sent have a moment to arrive, but a silent store is not waited for.
        """
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify_all()
        self._running.wait(_LAST_S)
        self._is_abandoned = True
        self._running.wait()
        for scratch in self._scratch.values():
            scratch.close()

    def empty_names(self) -> list[str]:
        """Return the names of the objects without any bytes, which have no upload."""
        return [name for name, file in self._objects.items() if not file.missing]

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, or raise the error of a sending thread."""
        with self._changed:
            while self._error is None and not condition():
                self._changed.wait(_WAIT_S)
            if self._error is not None:
                raise self._error

    def _queue_if_complete(self, file: _Object, number: int) -> None:
        """Queue a part if it is complete and not held; in order where the store needs it."""
        if file.missing[number] or number in file.holds:
            return
        file.ranges.pop(number, None)
        self._n_sending += 1
        if self._client.takes_any_order:
            self._queue.append((file, number))
        else:
            file.waiting.add(number)
            self._queue_in_order(file)
        self._changed.notify()

    def _queue_in_order(self, file: _Object) -> None:
        if file.turn in file.waiting:
            file.waiting.remove(file.turn)
            self._queue.append((file, file.turn))

    def _run(self) -> None:
        stop_waiting_when(lambda: self._is_abandoned)
        with self._running.include():
            self._work()

    def _work(self) -> None:
        """Send parts until the store is closed."""
        buffer = memoryview(b"")
        while True:
            with self._changed:
                if not self._queue:
                    buffer = memoryview(b"")  # no memory while there is nothing to send
                while not self._queue and not self._is_closed:
                    self._changed.wait(_WAIT_S)
                if self._is_closed:
                    return
                file, number = self._queue.popleft()
            try:
                n_bytes = file.bytes_of(number)
                if len(buffer) < n_bytes:
                    buffer = memoryview(bytearray(file.part_bytes))
                self._send(file, number, buffer[:n_bytes])
            except BaseException as err:
                with self._changed:
                    self._error = self._error or err
                    self._changed.notify_all()
                return

    def _send(self, file: _Object, number: int, buffer: memoryview) -> None:
        file.scratch.read(file.slots[number], 0, buffer)
        upload = self._upload_of(file)
        sent = file.sent.get(number + 1)
        is_sent = sent is not None and sent.is_of(buffer)
        if not is_sent:
            upload.send(number + 1, buffer)
        with self._changed:
            file.scratch.give_back(file.slots.pop(number))
            if is_sent:
                self.resumed_bytes += len(buffer)
            self._n_unsent -= 1
            self._n_sending -= 1
            if not self._client.takes_any_order:
                file.turn += 1
                self._queue_in_order(file)
            self._changed.notify_all()

    def _upload_of(self, file: _Object) -> ObjectUpload:
        """Return the upload of an object, which is begun or continued when it is first needed."""
        with file.lock:
            upload = self.uploads.get(file.name)
            if upload is None:
                upload = self._earlier.get(file.name)
                if upload is not None:
                    file.sent = upload.sent()
                else:
                    upload = self._client.begin(
                        self._base / file.name, file.n_bytes, file.part_bytes
                    )
                self.uploads[file.name] = upload
            return upload


class _Object:
    """An object that is being written.

    Attributes:
        missing: number of bytes of each part that have not been written.
        slots: part → its place in the temporary file, from its first byte until it is sent.
        held: ranges that must stay readable; ``holds`` counts those of each part.
        turn: the part to be sent next, if the store needs an order; ``waiting`` are complete ones.
        sent: number → part that an earlier run has sent.
        ranges: part → ranges of it that have been written, if they are noted.
    """

    def __init__(self, name: str, n_bytes: int, part_bytes: int, scratch: Scratch) -> None:
        self.name = name
        self.n_bytes = n_bytes
        self.part_bytes = part_bytes
        self.scratch = scratch
        self.missing = columns(
            "q", (min(part_bytes, n_bytes - start) for start in range(0, n_bytes, part_bytes))
        )
        self.slots: dict[int, int] = {}
        self.held: set[tuple[int, int]] = set()
        self.holds: dict[int, int] = {}
        self.turn = 0
        self.waiting: set[int] = set()
        self.sent: Mapping[int, SentPart] = {}
        self.ranges: dict[int, list[tuple[int, int]]] = {}
        self.lock = threading.Lock()

    def note_range(self, number: int, start: int, stop: int) -> None:
        """Note that a range of a part was written; ranges that touch become one."""
        ranges = self.ranges.setdefault(number, [])
        index = bisect_left(ranges, (start, stop))
        if index < len(ranges) and ranges[index][0] == stop:
            stop = ranges.pop(index)[1]
        if index and ranges[index - 1][1] == start:
            index -= 1
            start = ranges.pop(index)[0]
        ranges.insert(index, (start, stop))

    def bytes_of(self, number: int) -> int:
        """Return the number of bytes of a part."""
        return min(self.part_bytes, self.n_bytes - number * self.part_bytes)

    def numbers(self, offset: int, n_bytes: int) -> range:
        """Return the numbers of the parts that a range touches."""
        return range(offset // self.part_bytes, -(-(offset + n_bytes) // self.part_bytes))

    def split(self, offset: int, data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
        """Divide bytes by parts; yield number of the part, position in it, and the bytes."""
        done = 0
        while done < len(data):
            number, start = divmod(offset + done, self.part_bytes)
            piece = data[done : done + self.part_bytes - start]
            yield number, start, piece
            done += len(piece)
