"""The stream that ``torch.save`` wrote before torch 1.6, and still writes on request.

The request is ``_use_new_zipfile_serialization=False``. On disk, one after the other without gaps::

    pickle    0x1950a86a20f9469cfc6c
    pickle    1001                                 protocol version
    pickle    {"protocol_version": 1001, "little_endian": True,
               "type_sizes": {"short": 2, "int": 4, "long": 4}}
    pickle    the object; tensors are persistent ids that name storages
    pickle    ["94082…", …]                        keys of the storages, sorted
    i64 n, n elements                              a storage, for every key

A storage's persistent id is ``("storage", torch.FloatStorage, key, location, n, view)``. The class
determines the bytes per element, so the positions of the storages follow from all ids together.
``view`` is None, or ``(key, offset, n)`` in elements for a storage that is a part of another one
(torch before 0.4 or so). A class of modules is ``("module", class, file, source)``; it becomes the
class alone, as in a zip, and the source text is dropped.

Numbers are little endian whatever machine wrote them, ``n`` too, and torch ignores
``little_endian``. Before torch 1.0 or so, a big-endian machine wrote ``n`` in its own order; such
a stream is refused, as torch 2 refuses it. Such a machine also reversed the bytes of a complex
number as if it were a single real one; these are refused as well.

The end of a stream follows from its content, and it may be part of a bigger file. Anything between
its end and that of the given bytes is refused, because torch would silently ignore it.

Source: torch 2.13 ``torch/serialization.py`` (``_legacy_save``, ``_legacy_load``),
``torch/csrc/serialization.cpp``; files that torch 2.13 wrote, pinned in tests/golden
(``hf/llama/torch_single/*_legacy.pt``).
"""

from __future__ import annotations

import pickletools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from core.errors import CapacityError, CorruptError, TruncatedError, UnsupportedError
from core.formats.torch.stream import MAGIC
from core.formats.torch.tensors import storage_itemsize, storage_of
from core.formats.torch.zip.container import Record
from core.pickle.fields import describe_value
from core.pickle.inert import Global, Persistent
from core.pickle.reader import load
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.pickle.machine import Hook

VERSION = 1001
MAX_PICKLE_BYTES = 1 << 30
_WINDOW_BYTES = 128 << 10
"""Bytes that ``pickle_end`` reads at once."""


def read_legacy(
    store: ReadStore, file: str, *, start: int, n_bytes: int, hooks: Mapping[tuple[str, str], Hook]
) -> tuple[object, dict[str, Record]]:
    """Read a stream; the data of its storages is not read.

    Args:
        start, n_bytes: the bytes of the file that are the stream.
        hooks: build the tensors, see ``core.formats.torch.tensors``.

    Returns:
        The inert object; and ``data/<key>`` → position of the storage with that key, named as in a
        zip.

    Raises:
        TruncatedError: the stream ends too early.
        CorruptError: the stream is malformed or contradicts itself.
        UnsupportedError: an unknown version, or a storage of an unknown element type.
        UnsafeError: a hostile pickle.
        CapacityError: a pickle of more than 1 GiB.
    """
    stop = start + n_bytes
    at = start
    storages = _StorageTable()

    def read_next(**options: object) -> object:
        nonlocal at
        end = pickle_end(store, file, at, stop)
        content = load(store.read(file, at, end - at), label=file, **options)  # type: ignore[arg-type]
        at = end
        return content

    # The pickles, in order: magic number, version, system, object, keys of the storages.
    read_next()
    version, system = read_next(), read_next()
    if version != VERSION:
        raise UnsupportedError(
            f"version {describe_value(version)} of the legacy torch format is not supported; only "
            f"version {VERSION} is",
            file=file,
        )
    is_little = not (isinstance(system, dict) and system.get("little_endian") is False)
    value = read_next(persistent_load=storages.resolve, hooks=hooks)
    keys = read_next()
    if not isinstance(keys, list) or any(type(key) is not str for key in keys):
        raise CorruptError("the list of storage keys is malformed", file=file, span=(start, at))
    # The storages follow in the order of their keys.
    records = storages.records(keys, _StorageCursor(store, file, at, stop, is_little))
    return value, records


@dataclass(slots=True)
class _LegacyStorage:
    """A storage according to its first persistent id: class, elements, bytes per element."""

    kind: Global
    n: int
    itemsize: int

    @property
    def n_bytes(self) -> int:
        """Size of the storage, in bytes."""
        return self.n * self.itemsize


class _StorageTable:
    """The storages that an object refers to, and the parts of them that are storages themselves."""

    def __init__(self) -> None:
        self._roots: dict[str, _LegacyStorage] = {}
        self._views: dict[str, tuple[str, int, int]] = {}
        """Key of a part → key of the storage, first byte, bytes."""

    def resolve(self, pid: object) -> object:
        """Return the class or the ``Persistent``, as in zips, that replaces a persistent id.

        Raises:
            CorruptError: torch does not write such an id, or it contradicts another one.
            UnsupportedError: the element type has no known size.
        """
        # A class of modules comes with its source text, which is dropped.
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module":
            if isinstance(pid[1], Global):
                return pid[1]
        if not isinstance(pid, tuple) or len(pid) != 6:
            raise CorruptError(f"the pickle has a malformed persistent ID: {describe_value(pid)}")
        # Several ids may refer to one storage; the first determines its length.
        view = pid[5]
        plain = Persistent(pid[:5])
        kind, key, n = storage_of(plain)
        itemsize = storage_itemsize(kind)
        if itemsize is None:
            raise UnsupportedError(f"the storage type {kind} is not supported")
        first = self._roots.setdefault(key, _LegacyStorage(kind, n, itemsize))
        if first.n_bytes != n * itemsize:
            raise CorruptError(
                f"the length of storage {key!r:.80} is {first.n_bytes} bytes in one place of the "
                f"pickle and {n * itemsize} bytes in another"
            )
        return plain if view is None else self._resolve_view(kind, key, itemsize, view)

    def _resolve_view(self, kind: Global, root: str, itemsize: int, view: object) -> Persistent:
        """Return the ``Persistent`` of a part of the storage ``root``, as if it were a storage.

        Raises:
            CorruptError: the view is malformed, is not inside its storage, or contradicts another
                one with its key.
        """
        if not isinstance(view, tuple) or len(view) != 3 or type(view[0]) is not str:
            raise CorruptError(
                f"the pickle has a malformed view of a storage: {describe_value(view)}"
            )
        key, offset, n = view
        storage_bytes = self._roots[root].n_bytes
        is_valid = all(type(number) is int and number >= 0 for number in (offset, n))
        if not is_valid or (offset + n) * itemsize > storage_bytes:
            raise CorruptError(
                f"the view {describe_value(view)} of {itemsize}-byte elements does not fit in its "
                f"storage of {storage_bytes} bytes"
            )
        part = (root, offset * itemsize, n * itemsize)
        if self._views.setdefault(key, part) != part:
            raise CorruptError(f"the view {key!r:.80} has two contradictory definitions")
        return Persistent(("storage", kind, key, "cpu", n))

    def records(self, keys: list[str], cursor: _StorageCursor) -> dict[str, Record]:
        """Return the positions of the storages and of their parts.

        Args:
            keys: the storages in their order in the file.
            cursor: a cursor at the first storage; it is moved to the end of the last one.

        Raises:
            CorruptError: a storage is listed but not used, used but not listed, listed twice, or
                has another length than the object's ids for it; or bytes follow the last one.
            TruncatedError: the stream ends too early.
            UnsupportedError: complex numbers of a big-endian machine, or several objects in a file.
        """
        # Every listed storage must be used, as its length follows from the ids that refer to it.
        records: dict[str, Record] = {}
        for key in keys:
            name = f"data/{key}"
            storage = self._roots.get(key)
            if storage is None:
                raise CorruptError(
                    f"the file lists storage {key!r:.80}, but nothing refers to it, so its length "
                    "is unknown",
                    file=cursor.file,
                )
            if name in records:
                raise CorruptError(f"the file lists storage {key!r:.80} twice", file=cursor.file)
            records[name] = cursor.take(key, storage)
        cursor.finish()
        # Every used storage must be listed.
        for key in self._roots:
            if f"data/{key}" not in records:
                raise CorruptError(
                    f"the object refers to storage {key!r:.80}, which the file does not list",
                    file=cursor.file,
                )
        # Parts of storages have no data of their own; their positions are inside other records.
        for key, (root, offset, n_bytes) in self._views.items():
            part = Record(records[f"data/{root}"].offset + offset, n_bytes)
            if records.setdefault(f"data/{key}", part) != part:
                raise CorruptError(
                    f"{key!r:.80} is both a storage and a part of a different storage",
                    file=cursor.file,
                )
        return records


class _StorageCursor:
    """A cursor over the storages of a stream, from the first to the last."""

    def __init__(self, store: ReadStore, file: str, at: int, stop: int, is_little: bool) -> None:
        self.file = file
        self._store = store
        self._at = at
        self._stop = stop
        self._is_little = is_little

    def take(self, key: str, storage: _LegacyStorage) -> Record:
        """Return the position of the next storage, after comparing it with its persistent id.

        Raises:
            TruncatedError: the stream ends in or before the storage.
            CorruptError: the storage has another number of elements than its id.
            UnsupportedError: complex numbers of a big-endian machine.
        """
        # The number of elements precedes the data.
        data_start = self._at + 8
        if data_start > self._stop:
            raise TruncatedError(
                f"the file ends before storage {key!r:.80}",
                file=self.file,
                span=(self._at, data_start),
                hint=_HINT,
            )
        # Big-endian machines reversed the bytes of a complex number as if it were a real one.
        if not self._is_little and storage.kind.name.startswith("Complex"):
            raise UnsupportedError(
                "complex numbers saved by a big-endian machine are not supported", file=self.file
            )
        # torch writes the number in little endian on every machine. Before torch 1.0, a big-endian
        # machine wrote it in its own order, which is refused here as a contradiction.
        n_recorded = int.from_bytes(self._store.read(self.file, self._at, 8), "little", signed=True)
        if n_recorded != storage.n:
            raise CorruptError(
                f"storage {key!r:.80} has {n_recorded} elements according to its header, but "
                f"{storage.n} according to the pickle",
                file=self.file,
                span=(self._at, data_start),
                hint=_HINT,
            )
        # The data itself is not read; the next storage follows it without a gap.
        self._at = data_start + storage.n_bytes
        if self._at > self._stop:
            raise TruncatedError(
                f"storage {key!r:.80} should be {storage.n_bytes} bytes long, but the file "
                f"contains only {self._stop - data_start} of its bytes",
                file=self.file,
                span=(data_start, self._at),
                hint=_HINT,
            )
        return Record(data_start, storage.n_bytes)

    def finish(self) -> None:
        """Raise if anything follows the last storage.

        Raises:
            UnsupportedError: another object follows it.
            CorruptError: something else follows it.
        """
        if self._at == self._stop:
            return
        head = self._store.read(self.file, self._at, min(32, self._stop - self._at))
        if MAGIC.match(head):
            raise UnsupportedError(
                "the file contains several objects, saved one after the other",
                file=self.file,
                span=(self._at, self._stop),
                hint="open the file, call torch.load on it once per object, and save each object "
                "to a separate file",
            )
        raise CorruptError(
            f"the file has {self._stop - self._at} unexpected bytes after the last storage",
            file=self.file,
            span=(self._at, self._stop),
        )


_HINT = "copy the file again, or use an older checkpoint"


_ARGUMENT_BYTES = {
    ord(opcode.code): 0 if opcode.arg is None else opcode.arg.n for opcode in pickletools.opcodes
}
"""Opcode → bytes of its argument; negative as in ``pickletools``: -1 for lines, -2 … -5 for data
after their length.
"""
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
"""Kind of argument that begins with its length → bytes of that length."""
_TWO_LINES = frozenset(b"ci")
"""GLOBAL and INST, whose argument is two lines: module and name."""
_STOP = ord(".")


def pickle_end(store: ReadStore, file: str, start: int, stop: int) -> int:
    """Return the address of the byte after a pickle, by skipping from opcode to opcode.

    Args:
        start: address of the pickle's first byte.
        stop: address at which the stream ends.

    Raises:
        TruncatedError: the stream ends before the pickle.
        CorruptError: an unknown opcode.
        CapacityError: the pickle has more than 1 GiB.
    """
    limit = min(stop, start + MAX_PICKLE_BYTES)
    data, base = b"", start

    def read_window(at: int) -> bytes:
        """Return the next bytes of the file, from ``at`` on."""
        if at >= limit:
            if limit < stop:
                message = f"a pickle is longer than the limit of {MAX_PICKLE_BYTES >> 30} GiB"
                hint = (
                    "ask whoever wrote the file to save its data as tensors, not inside the pickle"
                )
                raise CapacityError(message, file=file, span=(start, limit), hint=hint)
            raise TruncatedError(
                "the file ends inside a pickle", file=file, span=(start, stop), hint=_HINT
            )
        return store.read(file, at, min(_WINDOW_BYTES, limit - at))

    position = 0
    while True:
        # Refill the window at an opcode.
        if position >= len(data):
            base, position = base + position, 0
            data = read_window(base)
        op = data[position]
        position += 1
        # Opcodes that Python does not have occur only in damaged pickles.
        n_argument = _ARGUMENT_BYTES.get(op)
        if n_argument is None:
            raise CorruptError(
                f"the pickle has the invalid opcode {op:#04x} at byte "
                f"{base + position - 1 - start}",
                file=file,
            )
        if op == _STOP:
            return base + position
        # Skip the argument: of fixed length, up to a newline, or preceded by its length. It may
        # end after the window; only its length and newlines must be inside one.
        if n_argument >= 0:
            position += n_argument
        elif n_argument == pickletools.UP_TO_NEWLINE:
            for _ in range(2 if op in _TWO_LINES else 1):
                while (end := data.find(b"\n", position)) < 0:
                    base, position = base + max(position, len(data)), 0
                    data = read_window(base)
                position = end + 1
        else:
            width = _LENGTH_BYTES[n_argument]
            if position + width > len(data):
                base, position = base + position, 0
                data = read_window(base)
            position += width + int.from_bytes(data[position : position + width], "little")
