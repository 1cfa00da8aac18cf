"""Writes the ``.metadata`` pickle of a PyTorch distributed checkpoint, opcode by opcode.

A generic pickler takes 10 µs a chunk and needs 10⁶ objects; here every chunk is a few joined byte strings. The bytes
are a function of the arguments: no checkpoint_id (torch stores the path of the directory there), no save_id.

Read by: torch 2.13 ``FileSystemReader.read_metadata`` (the tests compare field by field), ``dcp.load`` and Megatron's
loader. Protocol 2, names as of torch 2.3 and later (torch#116248 moved TensorProperties).

Source: torch 2.13 ``torch/distributed/checkpoint/{metadata,filesystem}.py``; docs/facts/formats.md 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from core.arrays.box import Shape
from core.pickle.inert import Global, Inert
from core.pickle.writer import PickleWriter, get, integer, put

_METADATA = "torch.distributed.checkpoint.metadata"


class ChunkRow(NamedTuple):
    """A chunk to be listed: its box in elements and the bytes ``[item_offset, item_offset + item_bytes)`` of a file."""

    offset: Shape
    shape: Shape
    file: str
    item_offset: int
    item_bytes: int


class TensorRow(NamedTuple):
    """A tensor to be listed. ``chunks`` is gone through once."""

    key: str
    dtype: str
    shape: Shape
    chunks: Iterable[ChunkRow]
    requires_grad: bool = False


class ObjectRow(NamedTuple):
    """A non-tensor entry to be listed."""

    key: str
    file: str
    item_offset: int
    item_bytes: int


def write_metadata(
    entries: Iterable[TensorRow | ObjectRow],
    *,
    planner_data: Mapping[str, tuple[str | int, ...]] | None,
    version: str = "1.0.0",
    attributes: Mapping[str, object] | None = None,
) -> bytes:
    """The content of a ``.metadata`` file.

    Args:
        entries: tensors and objects with distinct keys; the order is the one in which torch rebuilds nested dicts.
        planner_data: key → path in the nested state dict; None where the loader flattens by itself (Megatron).
        version: DCP's, "1.0.0" since torch 2.3.
        attributes: more attributes of Metadata, such as Megatron's ``mcore_data``, as inert trees.
    """
    return _MetadataWriter().write(entries, planner_data, version, attributes or {})


class _MetadataWriter:
    """Makes state_dict_metadata and storage_data in one pass, as two lists of opcodes.

    The second follows the first in the file. So what both refer to is memoised in the first, and what only the second
    uses has memo entries that the first never looks up.
    """

    def __init__(self) -> None:
        self._pickle = PickleWriter()
        self._entries: list[bytes] = []
        self._items: list[bytes] = []
        self._sizes: dict[Shape, bytes] = {}
        self._properties: dict[tuple[str, bool], bytes] = {}
        self._files: dict[str, bytes] = {}
        self._n_items = 0

    def write(
        self,
        entries: Iterable[TensorRow | ObjectRow],
        planner_data: Mapping[str, tuple[str | int, ...]] | None,
        version: str,
        attributes: Mapping[str, object],
    ) -> bytes:
        """The pickle."""
        pickle = self._pickle
        head = pickle.name(Global(_METADATA, "Metadata")) + b")\x81}(" + pickle.text("state_dict_metadata") + b"}"
        self._prepare()
        for number, entry in enumerate(entries):
            self._entries.append(b"u(" if number and number % 1000 == 0 else b"" if number else b"(")
            if isinstance(entry, TensorRow):
                self._tensor(entry)
            else:
                self._object(entry)
        if self._entries:
            self._entries.append(b"u")
        if self._items:
            self._items.append(b"u")
        parts = [head, *self._entries]
        for name, value in (
            ("planner_data", planner_data if planner_data is None else dict(planner_data)),
            ("storage_data", self._items),
            ("storage_meta", _storage_meta()),
            ("version", version),
            *attributes.items(),
        ):
            parts.append(pickle.text(name))
            if value is self._items:
                parts += (b"}", *self._items)
            else:
                pickle.write(value)
                parts.append(pickle.take())
        pickle.emit(b"".join(parts))
        pickle.emit(b"ub")
        return pickle.finish()

    def _prepare(self) -> None:
        """Opcodes that occur in every chunk. What is used first in a list puts itself into the memo there."""
        self._size_class = self._lazy(_global("torch", "Size"))
        self._chunk_class = self._lazy(_global(_METADATA, "ChunkStorageMetadata"))
        self._offsets_name = self._lazy(_text("offsets"))
        self._sizes_name = self._lazy(_text("sizes"))
        self._index_class = self._lazy(_global(_METADATA, "MetadataIndex"))
        self._storage_class = self._lazy(_global("torch.distributed.checkpoint.filesystem", "_StorageInfo"))
        self._item_names = [self._lazy(_text(name)) for name in _ITEM_NAMES]

    def _lazy(self, opcodes: bytes) -> _Lazy:
        """Something with a memo entry of its own, which no other part of the pickle uses."""
        return _Lazy(opcodes, self._pickle.new_memo_index())

    def _tensor(self, row: TensorRow) -> None:
        pickle = self._pickle
        out = self._entries
        size = self._size
        out += (
            pickle.text(row.key),
            pickle.name(Global(_METADATA, "TensorStorageMetadata")),
            b")\x81}(",
            pickle.text("properties"),
            pickle.name(Global(_METADATA, "TensorProperties")),
            b")\x81",
            self._property_state(row.dtype, row.requires_grad),
            b"b",
            pickle.text("size"),
            size(tuple(row.shape)),
            pickle.text("chunks"),
            b"]",
        )
        key = pickle.text(row.key)
        number = -1
        for number, chunk in enumerate(row.chunks):
            offset = tuple(chunk.offset)
            out.append(b"(" if number == 0 else b"")
            out += (
                self._chunk_class.take(),
                b")\x81}(",
                self._offsets_name.take(),
                size(offset),
                self._sizes_name.take(),
                size(tuple(chunk.shape)),
                b"ub",
            )
            self._item(key, size(offset), integer(number), chunk.file, chunk.item_offset, chunk.item_bytes)
        out.append(b"eub" if number >= 0 else b"ub")

    def _object(self, row: ObjectRow) -> None:
        pickle = self._pickle
        self._entries += (pickle.text(row.key), pickle.name(Global(_METADATA, "BytesStorageMetadata")), b")\x81")
        self._item(pickle.text(row.key), b"N", b"N", row.file, row.item_offset, row.item_bytes)

    def _item(self, key: bytes, offset: bytes, number: bytes, file: str, item_offset: int, item_bytes: int) -> None:
        """Adds an entry of storage_data."""
        fqn, at, index, path, start, length = self._item_names
        path_opcodes = self._files.get(file)
        if path_opcodes is None:
            memo_index = self._pickle.new_memo_index()
            path_opcodes = _text(file) + put(memo_index)
            self._files[file] = get(memo_index)
        self._items.append(
            b"".join(
                (
                    b"" if self._n_items % 1000 else b"u(" if self._n_items else b"(",
                    self._index_class.take(),
                    b")\x81}(",
                    fqn.take(),
                    key,
                    at.take(),
                    offset,
                    index.take(),
                    number,
                    b"ub",
                    self._storage_class.take(),
                    b")\x81}(",
                    path.take(),
                    path_opcodes,
                    start.take(),
                    integer(item_offset),
                    length.take(),
                    integer(item_bytes),
                    b"ub",
                )
            )
        )
        self._n_items += 1

    def _size(self, shape: Shape) -> bytes:
        """Opcodes that push a torch.Size; equal ones are one object."""
        found = self._sizes.get(shape)
        if found is not None:
            return found
        index = self._pickle.new_memo_index()
        self._sizes[shape] = get(index)
        return self._size_class.take() + _integers(shape) + b"\x85R" + put(index)

    def _property_state(self, dtype: str, requires_grad: bool) -> bytes:
        """Opcodes that push the state of a TensorProperties; equal ones are one tuple."""
        found = self._properties.get((dtype, requires_grad))
        if found is not None:
            return found
        pickle = self._pickle
        layout = Inert("reduce", Global("torch.serialization", "_get_layout"), ("torch.strided",))
        memory_format = Inert("reduce", Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
        pickle.write(Global("torch", dtype))
        pickle.write(layout)
        pickle.write(requires_grad)
        pickle.write(memory_format)
        pickle.write(False)
        index = pickle.new_memo_index()
        self._properties[dtype, requires_grad] = get(index)
        return b"(" + pickle.take() + b"t" + put(index)


class _Lazy:
    """Opcodes that push something and put it into the memo the first time, and get it from there afterwards."""

    __slots__ = ("_first", "_get")

    def __init__(self, opcodes: bytes, index: int) -> None:
        self._first: bytes | None = opcodes + put(index)
        self._get = get(index)

    def take(self) -> bytes:
        """The opcodes to be added now."""
        first = self._first
        if first is None:
            return self._get
        self._first = None
        return first


_ITEM_NAMES = ("fqn", "offset", "index", "relative_path", "offset", "length")


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return b"X" + len(raw).to_bytes(4, "little") + raw


def _integers(values: Shape) -> bytes:
    """Opcodes that push a tuple of integers."""
    parts = [integer(value) for value in values]
    if len(parts) <= 3:
        return b"".join((*parts, (b")", b"\x85", b"\x86", b"\x87")[len(parts)]))
    return b"".join((b"(", *parts, b"t"))


def _storage_meta() -> Inert:
    made = Inert("newobj", Global(_METADATA, "StorageMeta"))
    made.state = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
    return made
