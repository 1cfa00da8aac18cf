"""Keep the parts of objects that are not complete yet in an anonymous temporary file."""

from __future__ import annotations

import os
import tempfile
import threading
from heapq import heappop, heappush

from core.errors import TruncatedError
from core.files.store import translate_os_errors


class Scratch:
    """Slots of equal size in a temporary file, which has no name and ends with the process.

    The lowest free slot is taken first, so that the file stays as short as possible and mostly in
    the page cache. A new slot may contain old bytes.

    Args:
        slot_bytes: size of a slot.
    """

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        with translate_os_errors(tempfile.gettempdir(), doing="create a temporary file in"):
            self._file = tempfile.TemporaryFile(prefix="ckpt-")  # see close
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._n_slots = 0

    def take(self) -> int:
        """Return the number of a free slot."""
        with self._lock:
            if self._free:
                return heappop(self._free)
            self._n_slots += 1
            return self._n_slots - 1

    def give_back(self, slot: int) -> None:
        """Free a slot."""
        with self._lock:
            heappush(self._free, slot)

    def write(self, slot: int, start: int, data: memoryview) -> None:
        """Write bytes at position ``start`` of a slot.

        Raises:
            CapacityError: the disk is full; ``TMPDIR`` names another one.
            StorageError: the file cannot be written.
        """
        offset = slot * self._slot_bytes + start
        with translate_os_errors(self._label, doing="write"):
            done = 0
            while done < len(data):
                done += os.pwrite(self._file.fileno(), data[done:], offset + done)

    def read(self, slot: int, start: int, buffer: memoryview) -> None:
        """Fill a buffer from position ``start`` of a slot.

        Raises:
            TruncatedError: the bytes were never written.
            StorageError: the file cannot be read.
        """
        offset = slot * self._slot_bytes + start
        with translate_os_errors(self._label, doing="read"):
            done = 0
            while done < len(buffer):
                n = os.preadv(self._file.fileno(), [buffer[done:]], offset + done)
                if n == 0:
                    raise TruncatedError("the temporary file is too short", file=self._label)
                done += n

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    @property
    def _label(self) -> str:
        return os.path.join(tempfile.gettempdir(), "(temporary file, see TMPDIR)")
