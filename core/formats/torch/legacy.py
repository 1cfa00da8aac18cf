"""The stream that ``torch.save`` wrote before torch 1.6, and still does with ``_use_new_zipfile_serialization=False``.

On disk, one after the other without gaps::

    pickle    0x1950a86a20f9469cfc6c
    pickle    1001                                 protocol version
    pickle    {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    pickle    the object; tensors are persistent ids that name storages
    pickle    ["94082…", …]                        keys of the storages, sorted
    i64 n, n elements                              a storage, for every key

A storage's persistent id is ``("storage", torch.FloatStorage, key, location, n, view)``. The class tells the size of an
element, so the places of the storages follow from all ids together. ``view`` is None, or ``(key, offset, n)`` in
elements for a storage that is a part of another one (torch before 0.4 or so). A class of modules is
``("module", class, file, source)``; it becomes the class alone, as it stands in a zip, and the source text is dropped.

Numbers are little endian whatever machine wrote them, ``n`` too, and torch ignores ``little_endian``: an ``n`` that a
writer before torch 1.0 or so stated in the order of a big-endian machine is refused, as torch 2 refuses it. Complex
numbers of such a machine were turned round as if they were one number; they are refused as well.

A stream says where it ends, and may lie inside a bigger file; what follows it there is refused, because torch would
ignore it without a word.

Source: torch 2.13 ``torch/serialization.py`` (``_legacy_save``, ``_legacy_load``), ``torch/csrc/serialization.cpp``;
files that torch 2.13 wrote, pinned in tests/golden (``hf/llama/torch_single/*_legacy.pt``).
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
    """What a stream holds.

    Args:
        value: the inert object.
        records: ``data/<key>`` → where the storage of that key lies, as in a zip.
    """

    value: object
    records: Mapping[str, Record]


def read_legacy(
    store: ReadStore, file: str, *, start: int, n_bytes: int, hooks: Mapping[tuple[str, str], Hook]
) -> LegacyStream:
    """The content of a stream; its storages are not read.

    Args:
        file: name in the store.
        start, n_bytes: which bytes of the file are the stream.
        hooks: what makes tensors of their pickles, see ``core.formats.torch.tensors``.

    Raises:
        TruncatedError: the stream ends too early.
        CorruptError: it contradicts itself.
        UnsupportedError: an unknown version, or a storage of an unknown element type.
        UnsafeError: a hostile pickle.
        CapacityError: a pickle of more than 1 GiB.
    """
    stop = start + n_bytes
    at = start
    storages = _Storages()

    def value_of(**options: object) -> object:
        nonlocal at
        end = pickle_end(store, file, at, stop)
        made = load(store.read(file, at, end - at), label=file, **options)  # type: ignore[arg-type]
        at = end
        return made

    value_of()  # the magic number
    version, system = value_of(), value_of()
    if version != VERSION:
        raise UnsupportedError(f"a legacy torch file of version {version!r:.40}, not {VERSION}", file=file)
    is_little = not (isinstance(system, dict) and system.get("little_endian") is False)
    value = value_of(persistent_load=storages.taken, hooks=hooks)
    keys = value_of()
    if not isinstance(keys, list) or any(type(key) is not str for key in keys):
        raise CorruptError("the list of storages is malformed", file=file, span=(start, at))
    records = storages.records(keys, _Places(store, file, at, stop, is_little))
    return LegacyStream(value, records)


@dataclass(slots=True)
class _Storage:
    """A storage as its first persistent id describes it: class, elements, bytes of an element."""

    kind: Global
    n: int
    itemsize: int

    @property
    def n_bytes(self) -> int:
        return self.n * self.itemsize


class _Storages:
    """The storages that an object refers to, and the parts of them that are called storages of their own."""

    def __init__(self) -> None:
        self._roots: dict[str, _Storage] = {}
        self._views: dict[str, tuple[str, int, int]] = {}
        """Key of a part → key of the storage, first byte, bytes."""

    def taken(self, pid: object) -> object:
        """What stands in the tree for a persistent id: a ``Persistent`` as zips have it, or a class.

        Raises:
            CorruptError: it is none that torch writes, or contradicts another one.
            UnsupportedError: the element type has no known size.
        """
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module" and isinstance(pid[1], Global):
            return pid[1]
        if not isinstance(pid, tuple) or len(pid) != 6:
            raise CorruptError(f"a persistent id is {pid!r:.120}")
        view = pid[5]
        plain = Persistent(pid[:5])
        kind, key, n = storage_of(plain)
        itemsize = storage_itemsize(kind)
        if itemsize is None:
            raise UnsupportedError(f"a storage of the unknown type {kind}")
        first = self._roots.setdefault(key, _Storage(kind, n, itemsize))
        if first.n_bytes != n * itemsize:
            raise CorruptError(f"storage {key!r:.80} has {first.n_bytes} bytes at one place, {n * itemsize} at another")
        if view is None:
            return plain
        return self._view(kind, key, itemsize, view)

    def _view(self, kind: Global, root: str, itemsize: int, view: object) -> Persistent:
        if not isinstance(view, tuple) or len(view) != 3 or type(view[0]) is not str:
            raise CorruptError(f"a view of a storage is {view!r:.120}")
        key, offset, n = view
        size = self._roots[root].n_bytes
        if not all(type(number) is int and number >= 0 for number in (offset, n)) or (offset + n) * itemsize > size:
            raise CorruptError(f"a view of a storage of {size} bytes is {view!r:.120}, in elements of {itemsize} bytes")
        part = (root, offset * itemsize, n * itemsize)
        if self._views.setdefault(key, part) != part:
            raise CorruptError(f"the view {key!r:.80} is stated in two ways")
        return Persistent(("storage", kind, key, "cpu", n))

    def records(self, keys: list[str], places: _Places) -> dict[str, Record]:
        """Where the storages and their parts lie.

        Args:
            keys: the storages in their order in the file.

        Raises:
            CorruptError: a storage is listed and not used, used and not listed, listed twice, or of another length.
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
                raise CorruptError(f"the object refers to storage {key!r:.80}, which is not listed", file=places.file)
        for key, (root, offset, n_bytes) in self._views.items():
            part = Record(records[f"data/{root}"].offset + offset, n_bytes)
            if records.setdefault(f"data/{key}", part) != part:
                raise CorruptError(f"{key!r:.80} is both a storage and a part of another one", file=places.file)
        return records


class _Places:
    """The storages of a stream, from the first to the last."""

    def __init__(self, store: ReadStore, file: str, at: int, stop: int, is_little: bool) -> None:
        self.file = file
        self._store = store
        self._at = at
        self._stop = stop
        self._is_little = is_little

    def take(self, key: str, storage: _Storage) -> Record:
        """The next storage, which has to be as its persistent id says."""
        begin = self._at + 8
        if begin > self._stop:
            raise TruncatedError(
                f"the file ends before storage {key!r:.80}", file=self.file, span=(self._at, begin), hint=_HINT
            )
        if not self._is_little and storage.kind.name.startswith("Complex"):
            raise UnsupportedError("complex numbers that a big-endian machine saved", file=self.file)
        stated = int.from_bytes(self._store.read(self.file, self._at, 8), "little", signed=True)
        if stated != storage.n:
            raise CorruptError(
                f"storage {key!r:.80} has {stated} elements, the object says {storage.n}",
                file=self.file,
                span=(self._at, begin),
                hint=_HINT,
            )
        self._at = begin + storage.n_bytes
        if self._at > self._stop:
            raise TruncatedError(
                f"storage {key!r:.80} has {storage.n_bytes} bytes, of which the file holds {self._stop - begin}",
                file=self.file,
                span=(begin, self._at),
                hint=_HINT,
            )
        return Record(begin, storage.n_bytes)

    def finish(self) -> None:
        """Nothing may follow the last storage."""
        if self._at == self._stop:
            return
        behind = self._store.read(self.file, self._at, min(32, self._stop - self._at))
        if MAGIC.match(behind):
            raise UnsupportedError(
                "several objects were saved into the file, one after the other",
                file=self.file,
                span=(self._at, self._stop),
                hint="load them with torch, by as many calls of torch.load on one open file, and save each to its own",
            )
        raise CorruptError(
            f"{self._stop - self._at} bytes follow the last storage", file=self.file, span=(self._at, self._stop)
        )


_HINT = "copy the file again, or use an older checkpoint"


def _argument_bytes() -> list[int]:
    """Opcode → bytes of its argument, or as ``pickletools`` has it: -1 for lines, -2 … -5 for a length before them."""
    found = [_UNKNOWN] * 256
    for opcode in pickletools.opcodes:
        found[ord(opcode.code)] = 0 if opcode.arg is None else opcode.arg.n
    return found


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
    """The byte after the pickle that begins at byte ``start``; skips from opcode to opcode and makes nothing.

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
        """The bytes from ``at`` on."""
        if at >= limit:
            _refuse_long(file, start, stop, limit)
        return store.read(file, at, min(_WINDOW_BYTES, limit - at))

    i = 0
    while True:
        if i >= len(data):
            base, i = base + i, 0
            data = window(base)
        op = data[i]
        i += 1
        n = _ARGUMENT_BYTES[op]
        if n >= 0:
            if op == _STOP:
                return base + i
            i += n
        elif n == pickletools.UP_TO_NEWLINE:
            for _ in range(2 if op in _TWO_LINES else 1):
                while (end := data.find(b"\n", i)) < 0:
                    base, i = base + max(i, len(data)), 0
                    data = window(base)
                i = end + 1
        elif n == _UNKNOWN:
            raise CorruptError(f"malformed pickle at byte {base + i - 1 - start}: opcode {op:#04x}", file=file)
        else:
            width = _LENGTH_BYTES[n]
            if i + width > len(data):
                base, i = base + i, 0
                data = window(base)
            i += width + int.from_bytes(data[i : i + width], "little")


def _refuse_long(file: str, start: int, stop: int, limit: int) -> None:
    if limit < stop:
        raise CapacityError(f"a pickle of more than {MAX_PICKLE_BYTES} bytes", file=file, span=(start, limit))
    raise TruncatedError("the file ends inside a pickle", file=file, span=(start, stop), hint=_HINT)
