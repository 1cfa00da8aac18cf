"""The stream that ``torch.save`` wrote before torch 1.6, and still does with
``_use_new_zipfile_serialization=False``.

On disk, one after the other without gaps::

    pickle    0x1950a86a20f9469cfc6c
    pickle    1001                                 protocol version
    pickle    {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    pickle    the object; tensors are persistent ids that name storages
    pickle    ["94082…", …]                        keys of the storages, sorted
    i64 n, n elements                              a storage, for every key

A storage's persistent id is ``("storage", torch.FloatStorage, key, location, n, view)``. The class
tells the size of an element, so the places of the storages follow from all ids together. ``view``
is None, or ``(key, offset, n)`` in elements for a storage that is a part of another one (torch
before 0.4 or so). A class of modules is ``("module", class, file, source)``; it becomes the class
alone, as it stands in a zip, and the source text is dropped.

Numbers are little endian whatever machine wrote them, ``n`` too, and torch ignores
``little_endian``: an ``n`` that a writer before torch 1.0 or so stated in the order of a big-endian
machine is refused, as torch 2 refuses it. Complex numbers of such a machine were turned round as if
they were one number; they are refused as well.

A stream says where it ends, and may lie inside a bigger file; what follows it there is refused,
because torch would ignore it without a word.

Source: torch 2.13 ``torch/serialization.py`` (``_legacy_save``, ``_legacy_load``),
``torch/csrc/serialization.cpp``; files that torch 2.13 wrote, pinned in tests/golden
(``hf/llama/torch_single/*_legacy.pt``).
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.errors import CapacityError, CorruptError, TruncatedError, UnsupportedError
from core.formats.torch.tensors import storage_itemsize, storage_of
from core.formats.torch.zip.container import Record
from core.pickle.inert import Global, Persistent
from core.pickle.reader import load

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.pickle.machine import Hook

MAGIC = re.compile(
    rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e|L119547037146038801333356L\n\.",
    re.DOTALL,
)
"""What a stream begins with: the first pickle, in protocol 2 to 5, or 0 and 1."""

VERSION = 1001
MAX_PICKLE_BYTES = 1 << 30
_WINDOW_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class LegacyStream:
    """The content of a stream.

    Args:
        value: the inert object.
        records: ``data/<key>`` → where the storage of that key lies, as in a zip.
    """

    value: object
    records: Mapping[str, Record]


def read_legacy(
    store: ReadStore, file: str, *, start: int, n_bytes: int, hooks: Mapping[tuple[str, str], Hook]
) -> LegacyStream:
    """Read a stream; the data of its storages is not read.

    Args:
        start, n_bytes: the bytes of the file that are the stream.
        hooks: build tensors, see ``core.formats.torch.tensors``.

    Raises:
        TruncatedError: the stream ends too early.
        CorruptError: the stream contradicts itself.
        UnsupportedError: an unknown version, or a storage of an unknown element type.
        UnsafeError: a hostile pickle.
        CapacityError: a pickle of more than 1 GiB.
    """
    stop = start + n_bytes
    at = start
    storages = _StorageTable()

    def next_value(**options: object) -> object:
        nonlocal at
        end = pickle_end(store, file, at, stop)
        content = load(store.read(file, at, end - at), label=file, **options)  # type: ignore[arg-type]
        at = end
        return content

    # Four pickles precede the storages: magic number, version, system, object; then the keys.
    next_value()
    version, system = next_value(), next_value()
    if version != VERSION:
        raise UnsupportedError(
            f"version {version!r:.40} of the legacy torch format is not supported, only {VERSION}",
            file=file,
        )
    is_little = not (isinstance(system, dict) and system.get("little_endian") is False)
    value = next_value(persistent_load=storages.resolve, hooks=hooks)
    keys = next_value()
    if not isinstance(keys, list) or any(type(key) is not str for key in keys):
        raise CorruptError("the list of storage keys is malformed", file=file, span=(start, at))
    records = storages.records(keys, _StorageCursor(store, file, at, stop, is_little))
    return LegacyStream(value, records)


@dataclass(slots=True)
class _LegacyStorage:
    """A storage as its first persistent id describes it: class, elements, bytes per element."""

    kind: Global
    n: int
    itemsize: int

    @property
    def n_bytes(self) -> int:
        """Return the size of the storage in bytes."""
        return self.n * self.itemsize


class _StorageTable:
    """The storages that an object refers to, and the parts of them that count as storages of their
    own.
    """

    def __init__(self) -> None:
        self._roots: dict[str, _LegacyStorage] = {}
        self._views: dict[str, tuple[str, int, int]] = {}
        """Key of a part → key of the storage, first byte, bytes."""

    def resolve(self, pid: object) -> object:
        """Return what stands in the tree for a persistent id: a ``Persistent`` as in zips, or a
        class.

        Raises:
            CorruptError: torch does not write such an id, or it contradicts another one.
            UnsupportedError: the element type has no known size.
        """
        if (
            isinstance(pid, tuple)
            and len(pid) == 4
            and pid[0] == "module"
            and isinstance(pid[1], Global)
        ):
            return pid[1]
        if not isinstance(pid, tuple) or len(pid) != 6:
            raise CorruptError(f"malformed persistent id {pid!r:.120}")
        view = pid[5]
        plain = Persistent(pid[:5])
        kind, key, n = storage_of(plain)
        itemsize = storage_itemsize(kind)
        if itemsize is None:
            raise UnsupportedError(f"unknown storage type {kind}")
        first = self._roots.setdefault(key, _LegacyStorage(kind, n, itemsize))
        if first.n_bytes != n * itemsize:
            raise CorruptError(
                f"storage {key!r:.80} has {first.n_bytes} bytes at one place, {n * itemsize} at another"
            )
        if view is None:
            return plain
        return self._view(kind, key, itemsize, view)

    def _view(self, kind: Global, root: str, itemsize: int, view: object) -> Persistent:
        if not isinstance(view, tuple) or len(view) != 3 or type(view[0]) is not str:
            raise CorruptError(f"a view of a storage is {view!r:.120}")
        key, offset, n = view
        size = self._roots[root].n_bytes
        if (
            not all(type(number) is int and number >= 0 for number in (offset, n))
            or (offset + n) * itemsize > size
        ):
            raise CorruptError(
                f"a view of a storage of {size} bytes is {view!r:.120}, in elements of {itemsize} bytes"
            )
        part = (root, offset * itemsize, n * itemsize)
        if self._views.setdefault(key, part) != part:
            raise CorruptError(f"the view {key!r:.80} is stated in two ways")
        return Persistent(("storage", kind, key, "cpu", n))

    def records(self, keys: list[str], places: _StorageCursor) -> dict[str, Record]:
        """Return the positions of the storages and of their parts.

        Args:
            keys: the storages in their order in the file.

        Raises:
            CorruptError: a storage is listed and not used, used and not listed, listed twice, or of
                another length.
            TruncatedError: the stream ends too early.
        """
        records: dict[str, Record] = {}
        for key in keys:
            name = f"data/{key}"
            storage = self._roots.get(key)
            if storage is None:
                raise CorruptError(
                    f"storage {key!r:.80} is listed, but nothing refers to it, so its length is unknown",
                    file=places.file,
                )
            if name in records:
                raise CorruptError(f"storage {key!r:.80} is listed twice", file=places.file)
            records[name] = places.take(key, storage)
        places.finish()
        for key in self._roots:
            if f"data/{key}" not in records:
                raise CorruptError(
                    f"the object refers to storage {key!r:.80}, which is not listed",
                    file=places.file,
                )
        for key, (root, offset, n_bytes) in self._views.items():
            part = Record(records[f"data/{root}"].offset + offset, n_bytes)
            if records.setdefault(f"data/{key}", part) != part:
                raise CorruptError(
                    f"{key!r:.80} is both a storage and a part of another one", file=places.file
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
        """Return the position of the next storage, after comparing it with its persistent id."""
        data_start = self._at + 8
        if data_start > self._stop:
            raise TruncatedError(
                f"the file ends before storage {key!r:.80}",
                file=self.file,
                span=(self._at, data_start),
                hint=_HINT,
            )
        if not self._is_little and storage.kind.name.startswith("Complex"):
            raise UnsupportedError(
                "complex numbers saved by a big-endian machine are not supported", file=self.file
            )
        n_stated = int.from_bytes(self._store.read(self.file, self._at, 8), "little", signed=True)
        if n_stated != storage.n:
            raise CorruptError(
                f"storage {key!r:.80} has {n_stated} elements, but the object refers to {storage.n}",
                file=self.file,
                span=(self._at, data_start),
                hint=_HINT,
            )
        self._at = data_start + storage.n_bytes
        if self._at > self._stop:
            raise TruncatedError(
                f"storage {key!r:.80} has {storage.n_bytes} bytes, of which the file holds {self._stop - data_start}",
                file=self.file,
                span=(data_start, self._at),
                hint=_HINT,
            )
        return Record(data_start, storage.n_bytes)

    def finish(self) -> None:
        """Raise if anything follows the last storage."""
        if self._at == self._stop:
            return
        rest = self._store.read(self.file, self._at, min(32, self._stop - self._at))
        if MAGIC.match(rest):
            raise UnsupportedError(
                "several objects were saved into the file, one after the other",
                file=self.file,
                span=(self._at, self._stop),
                hint="load them with torch, by as many calls of torch.load on one open file, and save each to its own",
            )
        raise CorruptError(
            f"{self._stop - self._at} bytes follow the last storage",
            file=self.file,
            span=(self._at, self._stop),
        )


_HINT = "copy the file again, or use an older checkpoint"


def _argument_bytes() -> list[int]:
    """Return the length of the argument of every opcode.

    Negative numbers as ``pickletools`` has them: -1 for lines, -2 … -5 for a length before the
    data.
    """
    lengths = [_UNKNOWN] * 256
    for opcode in pickletools.opcodes:
        lengths[ord(opcode.code)] = 0 if opcode.arg is None else opcode.arg.n
    return lengths


_UNKNOWN = -100
_ARGUMENT_BYTES = _argument_bytes()
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_TWO_LINES = frozenset(b"ci")
_STOP = ord(".")


def pickle_end(store: ReadStore, file: str, start: int, stop: int) -> int:
    """Return the byte after the pickle that begins at byte ``start``, by skipping from opcode to
    opcode.

    Args:
        stop: where the stream ends.

    Raises:
        TruncatedError: the stream ends before the pickle.
        CorruptError: an unknown opcode.
        CapacityError: the pickle has more than 1 GiB.
    """
    limit = min(stop, start + MAX_PICKLE_BYTES)
    data, base = b"", start

    def window(at: int) -> bytes:
        """Return the next bytes of the file, from ``at`` on."""
        if at >= limit:
            if limit < stop:
                message = f"a pickle of more than {MAX_PICKLE_BYTES >> 30} GiB"
                raise CapacityError(message, file=file, span=(start, limit))
            raise TruncatedError(
                "the file ends inside a pickle", file=file, span=(start, stop), hint=_HINT
            )
        return store.read(file, at, min(_WINDOW_BYTES, limit - at))

    position = 0
    while True:
        # Refill the window at an opcode.
        if position >= len(data):
            base, position = base + position, 0
            data = window(base)
        op = data[position]
        position += 1
        # Skip the argument: of fixed length, up to a newline, or with its length before it.
        n_argument = _ARGUMENT_BYTES[op]
        if n_argument >= 0:
            if op == _STOP:
                return base + position
            position += n_argument
        elif n_argument == pickletools.UP_TO_NEWLINE:
            for _ in range(2 if op in _TWO_LINES else 1):
                while (end := data.find(b"\n", position)) < 0:
                    base, position = base + max(position, len(data)), 0
                    data = window(base)
                position = end + 1
        elif n_argument == _UNKNOWN:
            raise CorruptError(
                f"malformed pickle at byte {base + position - 1 - start}: opcode {op:#04x}",
                file=file,
            )
        else:
            width = _LENGTH_BYTES[n_argument]
            if position + width > len(data):
                base, position = base + position, 0
                data = window(base)
            position += width + int.from_bytes(data[position : position + width], "little")
