"""Writes an inert tree as a pickle that any Python can load: the inverse of ``core.pickle.reader``.

The bytes are a function of the tree alone: members of sets are sorted, equal strings are one memo entry, nothing
depends on addresses. Shared and cyclic containers stay shared. The opcodes are those of protocol 2 that
``torch.load(weights_only=True)`` accepts; only where one does not suffice is the protocol raised: names with
dots cost a ``getattr``, keyword arguments of ``__new__`` need protocol 4, strings over 4 GiB too.

No recursion: the depth of the tree does not matter.

Source: CPython 3.11 ``pickle.py`` (what unpicklers accept); torch 2.13 ``torch/_weights_only_unpickler.py`` (its
subset).
"""

from __future__ import annotations

import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from core.errors import CapacityError
from core.pickle.inert import NO_STATE, Global, Inert, Persistent, Size

PersistentId = Callable[[Any], object | None]
Reducers = Mapping[type, Callable[[Any], object]]

BATCH = 1000
"""Entries per APPENDS or SETITEMS, as CPython has it."""


def dumps(
    tree: object,
    *,
    persistent_id: PersistentId | None = None,
    reducers: Reducers | None = None,
    protocol: int = 2,
) -> bytes:
    """The pickle of an inert tree.

    Args:
        tree: plain values and the classes of ``core.pickle.inert``.
        persistent_id: gives the persistent id (a plain tree) of a leaf that is neither plain nor a record, or None.
        reducers: by exact type of a leaf, what stands for it in the pickle; called once for each distinct leaf object.
        protocol: 2 to 5; raised where the tree needs it.

    Raises:
        TypeError: a leaf that no reducer and no persistent id explains.
        CapacityError: an integer or name too long for a pickle.
    """
    writer = PickleWriter(persistent_id=persistent_id, reducers=reducers, protocol=protocol)
    writer.write(tree)
    return writer.finish()


class _Raw(bytes):
    """Opcodes to emit between values."""

    __slots__ = ()


class _End:
    """What remains to be written when the parts of ``value`` are.

    Args:
        value: a tuple, set or record.
        opcodes: what makes it of its parts.
        undo: what drops the parts if ``value`` came into the memo meanwhile, through a cycle.
        after: opcodes and values that follow, in order.
    """

    __slots__ = ("after", "opcodes", "undo", "value")

    def __init__(self, value: object, opcodes: bytes, undo: bytes, after: Sequence[object] = ()) -> None:
        self.value = value
        self.opcodes = opcodes
        self.undo = undo
        self.after = after


class PickleWriter:
    """A pickle in the making: values are pushed by ``write`` and joined by ``emit``.

    Memo indexes are explicit, so that a caller may emit parts with memo entries of its own (``new_memo_index``) in
    another order than it made them.

    Args: those of ``dumps``.
    """

    def __init__(
        self,
        *,
        persistent_id: PersistentId | None = None,
        reducers: Reducers | None = None,
        protocol: int = 2,
    ) -> None:
        self._persistent_id = persistent_id
        self._reducers = reducers or {}
        self._protocol = max(protocol, 2)
        self._out: list[bytes] = []
        self._n_memo = 0
        self._by_id: dict[int, tuple[int, object]] = {}
        """id → memo index, and the object so that its id stays its own."""
        self._by_value: dict[object, int] = {}
        """str, (bytes,), or Global → memo index."""
        self._reduced: dict[int, tuple[object, object]] = {}

    def finish(self) -> bytes:
        """The whole pickle."""
        return b"".join((b"\x80", bytes([self._protocol]), *self._out, b"."))

    def emit(self, opcodes: bytes) -> None:
        """Adds opcodes as they are."""
        self._out.append(opcodes)

    def take(self) -> bytes:
        """The opcodes so far, which are then forgotten: for callers that order parts themselves."""
        taken = b"".join(self._out)
        self._out.clear()
        return taken

    def new_memo_index(self) -> int:
        """A memo index that nothing else uses."""
        index = self._n_memo
        self._n_memo += 1
        return index

    def write(self, tree: object) -> None:
        """Adds the opcodes that push ``tree``."""
        todo: list[object] = [tree]
        emit = self._out.append
        while todo:
            node = todo.pop()
            kind = type(node)
            if kind is _Raw:
                emit(node)  # type: ignore[arg-type]
            elif kind is str:
                emit(self.text(node))  # type: ignore[arg-type]
            elif kind in _SCALARS:
                emit(_SCALARS[kind](node))
            elif kind is bytes:
                emit(self._bytes(node))  # type: ignore[arg-type]
            elif kind is Global:
                emit(self._global(node))  # type: ignore[arg-type]
            elif kind is _End:
                self._end(node, todo)  # type: ignore[arg-type]
            elif kind is tuple and not node:
                emit(b")")
            else:
                known = self._by_id.get(id(node))
                if known is not None:
                    emit(get(known[0]))
                else:
                    self._container(node, todo)

    def _container(self, node: Any, todo: list[object]) -> None:
        kind = type(node)
        if kind is dict:
            self._out += (b"}", self._memoized(node))
            todo += reversed(_batches(node.items(), _SET_ONE, _SET_MANY))
        elif kind is list:
            self._out += (b"]", self._memoized(node))
            todo += reversed(_batches(((item,) for item in node), _APPEND_ONE, _APPEND_MANY))
        elif kind is tuple:
            if len(node) <= 3:
                todo.append(_End(node, _TUPLES[len(node)], b"0" * len(node)))
                todo += reversed(node)
            else:
                todo.append(_End(node, b"t", b"1"))
                todo += reversed(node)
                self._out.append(b"(")
        elif kind is Inert:
            self._record(node, todo)
        elif kind in _REDUCED:
            fn, args = _REDUCED[kind](node)
            todo += (_End(node, b"\x85R" if len(args) == 1 else b"\x86R", b"0" * (1 + len(args))), *reversed(args), fn)
        else:
            self._leaf(node, todo)

    def _record(self, node: Inert, todo: list[object]) -> None:
        after: list[object] = _batches(((item,) for item in node.items), _APPEND_ONE, _APPEND_MANY)
        after += _batches(node.entries, _SET_ONE, _SET_MANY)
        if node.state is not NO_STATE:
            after += (node.state, _Raw(b"b"))
        if node.how == "newobj_ex":
            self._protocol = max(self._protocol, 4)
            todo += (_End(node, b"\x92", b"000", after), node.kwargs or {}, node.args, node.fn)
        else:
            todo += (_End(node, b"\x81" if node.how == "newobj" else b"R", b"00", after), node.args, node.fn)

    def _leaf(self, node: object, todo: list[object]) -> None:
        """A leaf that is not plain. It is looked up first, so that reducers may share what they return."""
        pid = self._persistent_id(node) if self._persistent_id is not None else None
        if pid is not None:
            todo += (_Raw(b"Q"), pid)
            return
        reducer = self._reducers.get(type(node))
        if reducer is not None:
            if id(node) not in self._reduced:
                self._reduced[id(node)] = (node, reducer(node))
            todo.append(self._reduced[id(node)][1])
        elif isinstance(node, Persistent):
            todo += (_Raw(b"Q"), node.value)
        else:
            raise TypeError(f"a {type(node).__name__} cannot be written into a pickle")

    def _end(self, end: _End, todo: list[object]) -> None:
        known = self._by_id.get(id(end.value))
        if known is not None:
            self._out += (end.undo, get(known[0]))
            return
        self._out += (end.opcodes, self._memoized(end.value))
        todo += reversed(end.after)

    def _memoized(self, node: object) -> bytes:
        index = self.new_memo_index()
        self._by_id[id(node)] = (index, node)
        return put(index)

    def text(self, text: str) -> bytes:
        """Opcodes that push a string; one memo entry for all equal ones."""
        index = self._by_value.get(text)
        if index is not None:
            return get(index)
        raw = text.encode("utf-8", "surrogatepass")
        if len(raw) < 1 << 32:
            opcodes = b"X" + len(raw).to_bytes(4, "little") + raw
        else:
            self._protocol = max(self._protocol, 4)
            opcodes = b"\x8d" + len(raw).to_bytes(8, "little") + raw
        index = self._by_value[text] = self.new_memo_index()
        return opcodes + put(index)

    def _bytes(self, value: bytes) -> bytes:
        index = self._by_value.get((value,))
        if index is not None:
            return get(index)
        if self._protocol >= 3:
            if len(value) < 256:
                opcodes = b"C" + bytes([len(value)]) + value
            elif len(value) < 1 << 32:
                opcodes = b"B" + len(value).to_bytes(4, "little") + value
            else:
                self._protocol = max(self._protocol, 4)
                opcodes = b"\x8e" + len(value).to_bytes(8, "little") + value
        else:
            encode = self.name(Global("_codecs", "encode"))
            opcodes = encode + self.text(value.decode("latin-1")) + self.text("latin1") + b"\x86R"
        index = self._by_value[value,] = self.new_memo_index()
        return opcodes + put(index)

    def _global(self, node: Global) -> bytes:
        """A name; up to protocol 3 a nested one (``Class.name``) is an attribute of the outer one."""
        parts = node.name.split(".")
        if len(parts) == 1 or self._protocol >= 4 or node in self._by_value or not all(parts):
            return self.name(node)
        opcodes = [self.name(_GETATTR) for _ in parts[1:]]
        opcodes.append(self.name(Global(node.module, parts[0])))
        opcodes += [self.text(part) + b"\x86R" for part in parts[1:]]
        index = self._by_value[node] = self.new_memo_index()
        return b"".join(opcodes) + put(index)

    def name(self, node: Global) -> bytes:
        """Opcodes that push a name without dots; one memo entry for all equal ones."""
        index = self._by_value.get(node)
        if index is not None:
            return get(index)
        if not _fits_in_lines(node) or self._protocol >= 4:
            self._protocol = max(self._protocol, 4)
            opcodes = self.text(node.module) + self.text(node.name) + b"\x93"
        else:
            if (node.module, node.name) in NAME_MAPPING or node.module in IMPORT_MAPPING:
                self._protocol = max(self._protocol, 3)  # up to 2, readers take it for a name of Python 2
            opcodes = f"c{node.module}\n{node.name}\n".encode()
        index = self._by_value[node] = self.new_memo_index()
        return opcodes + put(index)


def _fits_in_lines(node: Global) -> bool:
    text = node.module + node.name
    return text.isascii() and "\n" not in text and "\r" not in text


def put(index: int) -> bytes:
    """Opcode that stores the top of the stack as memo entry ``index``."""
    return _PUTS[index] if index < 256 else _PUT4(0x72, index)


def get(index: int) -> bytes:
    """Opcode that pushes memo entry ``index``."""
    return _GETS[index] if index < 256 else _PUT4(0x6A, index)


def integer(value: int) -> bytes:
    """Opcodes that push an integer.

    Raises:
        CapacityError: more than 2**31 - 1 bytes.
    """
    if 0 <= value < 256:
        return _INTS[value]
    if 0 <= value < 65536:
        return b"M" + value.to_bytes(2, "little")
    if -0x80000000 <= value < 0x80000000:
        return b"J" + value.to_bytes(4, "little", signed=True)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(raw) < 256:
        return b"\x8a" + bytes([len(raw)]) + raw
    if len(raw) < 0x80000000:
        return b"\x8b" + len(raw).to_bytes(4, "little") + raw
    raise CapacityError(f"an integer of {len(raw)} bytes does not fit in a pickle")


_PUT4 = struct.Struct("<BI").pack
_PUTS = [b"q" + bytes([i]) for i in range(256)]
_GETS = [b"h" + bytes([i]) for i in range(256)]
_INTS = [b"K" + bytes([i]) for i in range(256)]
_TUPLES = (b")", b"\x85", b"\x86", b"\x87")
_GETATTR = Global("builtins", "getattr")
_SET_ONE, _SET_MANY = _Raw(b"s"), _Raw(b"u")
_APPEND_ONE, _APPEND_MANY = _Raw(b"a"), _Raw(b"e")
_MARK = _Raw(b"(")

_SCALARS: dict[type, Callable[[Any], bytes]] = {
    int: integer,
    bool: lambda value: b"\x88" if value else b"\x89",
    type(None): lambda value: b"N",
    float: lambda value: b"G" + struct.pack(">d", value),
}


def _batches(entries: Iterable[Sequence[object]], one: _Raw, many: _Raw) -> list[object]:
    """Values and opcodes that put ``entries`` (of one or two values each) into the container below them."""
    found: list[object] = []
    batch: list[object] = []
    n_entries = 0
    for entry in entries:
        batch += entry
        n_entries += 1
        if n_entries == BATCH:
            found += (_MARK, *batch, many)
            batch.clear()
            n_entries = 0
    if n_entries == 1:
        found += (*batch, one)
    elif n_entries:
        found += (_MARK, *batch, many)
    return found


def _sorted(members: Iterable[object]) -> list[object]:
    """The members of a set in an order that depends on their values alone."""
    return sorted(members, key=_description)


def _description(value: object, levels: int = 3) -> str:
    """A text by which members of a set are ordered: their whole value, but records only to a few levels."""
    if isinstance(value, (tuple, frozenset)):
        parts = [_description(item, levels) for item in value]
        return f"{type(value).__name__}({','.join(parts if isinstance(value, tuple) else sorted(parts))})"
    if isinstance(value, (list, dict, set)):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, Inert):
        if levels == 0:
            return value.class_name
        parts = [_description(item, levels - 1) for item in (*value.args[:8], *value.items[:8])]
        if isinstance(value.state, dict):
            parts += [f"{key}={_description(item, levels - 1)}" for key, item in list(value.state.items())[:8]]
        return f"{value.class_name}({','.join(parts)})"
    return f"{type(value).__name__} {value!r}"


def _set_parts(fn: Global) -> Callable[[Iterable[object]], tuple[Global, tuple[object, ...]]]:
    return lambda members: (fn, (_sorted(members),))


_REDUCED: dict[type, Callable[[Any], tuple[Global, tuple[object, ...]]]] = {
    set: _set_parts(Global("builtins", "set")),
    frozenset: _set_parts(Global("builtins", "frozenset")),
    bytearray: lambda value: (Global("builtins", "bytearray"), (bytes(value),)),
    complex: lambda value: (Global("builtins", "complex"), (value.real, value.imag)),
    Size: lambda value: (Global("torch", "Size"), (tuple(value),)),
}
"""Types that protocol 2 knows only as a call: the callable and its one or two arguments."""
