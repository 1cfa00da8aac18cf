"""Write an object whose size is known only at its end, such as a manifest."""

from __future__ import annotations

import tempfile
from types import TracebackType
from typing import Self

from core.files.store import TargetStore, WriteStore, override, translate_os_errors

_IN_MEMORY_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 20


class SpooledFile(WriteStore):
    """One file that is written from its begin to its end; a context manager.

    It is in memory as long as it is short, and in a temporary file from then on.
    """

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @override
    def create(self, name: str, n_bytes: int) -> None:
        self._file.truncate(0)

    @override
    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        with translate_os_errors(tempfile.gettempdir(), doing="write to"):
            self._file.seek(offset)
            self._file.write(data)

    def copy_to(self, store: TargetStore, name: str) -> None:
        """Create the file in a store of which the size of a file must be known.

        Raises:
            CapacityError, StorageError: the store cannot write.
        """
        store.create(name, self._file.seek(0, 2))
        self._file.seek(0)
        offset = 0
        while chunk := self._file.read(_CHUNK_BYTES):
            store.write(name, offset, chunk)
            offset += len(chunk)
