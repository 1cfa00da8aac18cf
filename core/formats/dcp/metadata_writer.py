"""Writing the ``.metadata`` pickle of a PyTorch distributed checkpoint, opcode by opcode.

A generic pickler takes 10 µs per chunk and needs 10⁶ objects; here every chunk is a few joined byte
strings. The output depends only on the arguments: it has no checkpoint_id (torch stores the path of
the directory there) and no save_id.

Read by: torch 2.13 ``FileSystemReader.read_metadata`` (the tests compare field by field),
``dcp.load`` and Megatron's loader. Pickle protocol 2, class names of torch 2.3 and later
(torch#116248 moved TensorProperties).

Source: torch 2.13 ``torch/distributed/checkpoint/{metadata,filesystem}.py``; section 2 of
    docs/facts/formats.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from core.arrays.box import Shape
from core.formats.dcp.plans import PlanRow, plan_opcodes
from core.pickle.inert import Global, Inert
from core.pickle.writer import PickleWriter, get, integer, put

DCP_VERSION = "1.0.0"
"""The version of the metadata's contents, which torch has written since 2.3."""

_METADATA = "torch.distributed.checkpoint.metadata"


class ChunkRow(NamedTuple):
    """A chunk to list: its box in elements and the position of its item in a file, in bytes."""

    offset: Shape
    shape: Shape
    file: str
    item_offset: int
    item_bytes: int


class TensorRow(NamedTuple):
    """A tensor to list; ``chunks`` is iterated over only once."""

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
    version: str = DCP_VERSION,
    attributes: Mapping[str, object] | None = None,
    plans: Sequence[Iterable[PlanRow]] | None = None,
) -> bytes:
    """Return the content of a ``.metadata`` file.

    Args:
        entries: tensors and objects with distinct keys; torch rebuilds nested dicts in this order.
        planner_data: key → path in the nested state dict; None for Megatron, whose loader flattens
            the state dict itself.
        version: version of DCP.
        attributes: additional attributes of Metadata, such as Megatron's ``mcore_data``, as inert
            trees.
        plans: the entries that each rank has written, for Megatron's ``all_local_plans``; None to
            omit the attribute.
    """
    return _MetadataWriter().write(entries, planner_data, version, attributes or {}, plans)


class _MetadataWriter:
    """Writer of state_dict_metadata and storage_data as two lists of opcodes, in one pass.

    storage_data follows state_dict_metadata in the file. So values of both are memoised in the
    first list, and values of only storage_data have memo entries that the first list never uses.
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
        plans: Sequence[Iterable[PlanRow]] | None,
    ) -> bytes:
        """Return the pickle; the arguments are those of ``write_metadata``."""
        pickle = self._pickle
        # Metadata(), called without arguments; its attributes are in the dict that follows.
        head = (
            pickle.name(Global(_METADATA, "Metadata"))
            + b")\x81}("
            + pickle.text("state_dict_metadata")
            + b"}"
        )
        # Prepare the opcodes that occur in every chunk; the first use of each memoises it.
        self._size_class = self._memoised(_global_opcode("torch", "Size"))
        self._chunk_class = self._memoised(_global_opcode(_METADATA, "ChunkStorageMetadata"))
        self._offsets_name = self._memoised(_text_opcode("offsets"))
        self._sizes_name = self._memoised(_text_opcode("sizes"))
        self._index_class = self._memoised(_global_opcode(_METADATA, "MetadataIndex"))
        self._storage_class = self._memoised(
            _global_opcode("torch.distributed.checkpoint.filesystem", "_StorageInfo")
        )
        self._item_names = [self._memoised(_text_opcode(name)) for name in _ITEM_NAMES]

        # One pass over the entries fills both lists. SETITEMS adds 1,000 items at a time, as
        # Python's pickler does, so that a reader's stack stays small.
        for number, entry in enumerate(entries):
            if number % 1000 == 0:
                self._entries.append(b"u(" if number else b"(")
            if isinstance(entry, TensorRow):
                self._add_tensor(entry)
            else:
                self._add_object(entry)
        if self._entries:
            self._entries.append(b"u")
        if self._items:
            self._items.append(b"u")

        # Write the other attributes in torch's order; storage_data is one of them. The StorageMeta
        # does not name a checkpoint, so that the output depends on nothing else.
        storage_meta = Inert("newobj", Global(_METADATA, "StorageMeta"))
        no_ids: dict[str, object] = {"checkpoint_id": None, "save_id": None, "load_id": None}
        storage_meta.state = {**no_ids, "modules": []}
        parts = [head, *self._entries]
        for name, value in (
            ("planner_data", None if planner_data is None else dict(planner_data)),
            ("storage_data", self._items),
            ("storage_meta", storage_meta),
            ("version", version),
            *attributes.items(),
        ):
            parts.append(pickle.text(name))
            if value is self._items:
                parts += (b"}", *self._items)
            else:
                pickle.write(value)
                parts.append(pickle.take())
        if plans is not None:
            parts += (pickle.text("all_local_plans"), plan_opcodes(pickle, plans))
        pickle.emit(b"".join(parts))
        pickle.emit(b"ub")
        return pickle.finish()

    def _memoised(self, opcodes: bytes) -> _MemoisedOpcodes:
        """Return opcodes with a memo entry that no other part of the pickle uses."""
        return _MemoisedOpcodes(opcodes, self._pickle.new_memo_index())

    def _add_tensor(self, row: TensorRow) -> None:
        """Add a tensor and its chunks."""
        pickle = self._pickle
        out = self._entries
        size = self._size_opcodes
        # TensorStorageMetadata with properties, size and a list of chunks.
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
        # Each chunk, and its item in storage_data.
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
        """Add an entry of storage_data.

        Args:
            key: opcodes of the fqn.
            offset, number: opcodes of the chunk's offset and of its index in the tensor; those of
                None for an object.
            file, item_offset, item_bytes: position of the item, in bytes.
        """
        fqn_name, offset_name, index_name, path_name, start_name, length_name = self._item_names
        path_opcodes = self._files.get(file)
        if path_opcodes is None:
            memo_index = self._pickle.new_memo_index()
            path_opcodes = _text_opcode(file) + put(memo_index)
            self._files[file] = get(memo_index)
        if self._n_items % 1000 == 0:
            self._items.append(b"u(" if self._n_items else b"(")
        # MetadataIndex(fqn, offset, index) → _StorageInfo(relative_path, offset, length).
        self._items.append(
            b"".join(
                (
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
        # Tuples of up to three elements have opcodes of their own; longer ones need a mark.
        n_axes = len(shape)
        mark, end = (
            (b"", (b")", b"\x85", b"\x86", b"\x87")[n_axes]) if n_axes <= 3 else (b"(", b"t")
        )
        elements = b"".join((mark, *map(integer, shape), end))
        return self._size_class.take() + elements + b"\x85R" + put(index)

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
    """Opcodes that push a value, from the memo after the first use."""

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
