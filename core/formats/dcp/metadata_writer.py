"""Writing the ``.metadata`` pickle of a PyTorch distributed checkpoint, opcode by opcode.

A generic pickler takes 10 µs a chunk and needs 10⁶ objects; here every chunk is a few joined byte
strings. The bytes are a function of the arguments: no checkpoint_id (torch stores the path of the
directory there), no save_id.

Read by: torch 2.13 ``FileSystemReader.read_metadata`` (the tests compare field by field),
``dcp.load`` and Megatron's loader. Protocol 2, names as of torch 2.3 and later (torch#116248 moved
TensorProperties).

Source: torch 2.13 ``torch/distributed/checkpoint/{metadata,filesystem}.py``; docs/facts/formats.md
    2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from core.arrays.box import Shape
from core.pickle.inert import Global, Inert
from core.pickle.writer import PickleWriter, get, integer, put

_METADATA = "torch.distributed.checkpoint.metadata"


class ChunkRow(NamedTuple):
    """A chunk to list: its box in elements and the bytes ``[item_offset, item_offset +
    item_bytes)`` of a file.
    """

    offset: Shape
    shape: Shape
    file: str
    item_offset: int
    item_bytes: int


class TensorRow(NamedTuple):
    """A tensor to list. ``chunks`` is iterated over once."""

    key: str
    dtype: str
    shape: Shape
    chunks: Iterable[ChunkRow]
    requires_grad: bool = False


class ObjectRow(NamedTuple):
    """A non-tensor entry to list."""

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
    """Write the content of a ``.metadata`` file.

    Args:
        entries: tensors and objects with distinct keys; the order is the one in which torch
            rebuilds nested dicts.
        planner_data: key → path in the nested state dict; None where the loader flattens by itself
            (Megatron).
        version: DCP's, "1.0.0" since torch 2.3.
        attributes: additional attributes of Metadata, such as Megatron's ``mcore_data``, as inert
            trees.
    """
    return _MetadataWriter().write(entries, planner_data, version, attributes or {})


class _MetadataWriter:
    """Writes state_dict_metadata and storage_data in one pass, as two lists of opcodes.

    The second follows the first in the file. So what both refer to is memoised in the first, and
    what only the second uses has memo entries that the first never looks up.
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
        """Return the pickle."""
        pickle = self._pickle
        head = (
            pickle.name(Global(_METADATA, "Metadata"))
            + b")\x81}("
            + pickle.text("state_dict_metadata")
            + b"}"
        )
        self._prepare_names()
        # One pass over the entries fills both lists.
        for number, entry in enumerate(entries):
            self._entries.append(
                b"u(" if number and number % 1000 == 0 else b"" if number else b"("
            )
            if isinstance(entry, TensorRow):
                self._add_tensor(entry)
            else:
                self._add_object(entry)
        if self._entries:
            self._entries.append(b"u")
        if self._items:
            self._items.append(b"u")
        # The attributes of Metadata; storage_data is one of them.
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

    def _prepare_names(self) -> None:
        """Prepare the opcodes that occur in every chunk.

        The first use of each puts it into the memo.
        """
        self._size_class = self._memoised(_global_opcode("torch", "Size"))
        self._chunk_class = self._memoised(_global_opcode(_METADATA, "ChunkStorageMetadata"))
        self._offsets_name = self._memoised(_text_opcode("offsets"))
        self._sizes_name = self._memoised(_text_opcode("sizes"))
        self._index_class = self._memoised(_global_opcode(_METADATA, "MetadataIndex"))
        self._storage_class = self._memoised(
            _global_opcode("torch.distributed.checkpoint.filesystem", "_StorageInfo")
        )
        self._item_names = [self._memoised(_text_opcode(name)) for name in _ITEM_NAMES]

    def _memoised(self, opcodes: bytes) -> _MemoisedOpcodes:
        """Return opcodes with a memo entry of their own, which no other part of the pickle uses."""
        return _MemoisedOpcodes(opcodes, self._pickle.new_memo_index())

    def _add_tensor(self, row: TensorRow) -> None:
        """Add a tensor and its chunks."""
        pickle = self._pickle
        out = self._entries
        size = self._size_opcodes
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
            self._add_item(
                key, size(offset), integer(number), chunk.file, chunk.item_offset, chunk.item_bytes
            )
        out.append(b"eub" if number >= 0 else b"ub")

    def _add_object(self, row: ObjectRow) -> None:
        """Add a non-tensor entry."""
        pickle = self._pickle
        self._entries += (
            pickle.text(row.key),
            pickle.name(Global(_METADATA, "BytesStorageMetadata")),
            b")\x81",
        )
        self._add_item(pickle.text(row.key), b"N", b"N", row.file, row.item_offset, row.item_bytes)

    def _add_item(
        self, key: bytes, offset: bytes, number: bytes, file: str, item_offset: int, item_bytes: int
    ) -> None:
        """Add an entry of storage_data."""
        fqn_name, offset_name, index_name, path_name, start_name, length_name = self._item_names
        path_opcodes = self._files.get(file)
        if path_opcodes is None:
            memo_index = self._pickle.new_memo_index()
            path_opcodes = _text_opcode(file) + put(memo_index)
            self._files[file] = get(memo_index)
        self._items.append(
            b"".join(
                (
                    b"" if self._n_items % 1000 else b"u(" if self._n_items else b"(",
                    self._index_class.take(),
                    b")\x81}(",
                    fqn_name.take(),
                    key,
                    offset_name.take(),
                    offset,
                    index_name.take(),
                    number,
                    b"ub",
                    self._storage_class.take(),
                    b")\x81}(",
                    path_name.take(),
                    path_opcodes,
                    start_name.take(),
                    integer(item_offset),
                    length_name.take(),
                    integer(item_bytes),
                    b"ub",
                )
            )
        )
        self._n_items += 1

    def _size_opcodes(self, shape: Shape) -> bytes:
        """Return opcodes that push a torch.Size; equal sizes are one object."""
        opcodes = self._sizes.get(shape)
        if opcodes is not None:
            return opcodes
        index = self._pickle.new_memo_index()
        self._sizes[shape] = get(index)
        return self._size_class.take() + _tuple_opcodes(shape) + b"\x85R" + put(index)

    def _property_state(self, dtype: str, requires_grad: bool) -> bytes:
        """Return opcodes that push the state of a TensorProperties; equal states are one tuple."""
        opcodes = self._properties.get((dtype, requires_grad))
        if opcodes is not None:
            return opcodes
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


class _MemoisedOpcodes:
    """Opcodes that push a value and memoise it the first time, and get it from the memo
    afterwards.
    """

    __slots__ = ("_first", "_get")

    def __init__(self, opcodes: bytes, index: int) -> None:
        self._first: bytes | None = opcodes + put(index)
        self._get = get(index)

    def take(self) -> bytes:
        """Return the opcodes to add now."""
        first = self._first
        if first is None:
            return self._get
        self._first = None
        return first


_ITEM_NAMES = ("fqn", "offset", "index", "relative_path", "offset", "length")


def _global_opcode(module: str, name: str) -> bytes:
    """Return the opcode that pushes a class or function."""
    return f"c{module}\n{name}\n".encode()


def _text_opcode(text: str) -> bytes:
    """Return the opcode that pushes a string."""
    raw = text.encode("utf-8", "surrogatepass")
    return b"X" + len(raw).to_bytes(4, "little") + raw


def _tuple_opcodes(values: Shape) -> bytes:
    """Return opcodes that push a tuple of integers."""
    parts = [integer(value) for value in values]
    if len(parts) <= 3:
        return b"".join((*parts, (b")", b"\x85", b"\x86", b"\x87")[len(parts)]))
    return b"".join((b"(", *parts, b"t"))


def _storage_meta() -> Inert:
    """Return a StorageMeta that names no checkpoint."""
    storage_meta = Inert("newobj", Global(_METADATA, "StorageMeta"))
    storage_meta.state = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
    return storage_meta
