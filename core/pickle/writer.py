"""Write an inert tree as a pickle that any Python can load: the inverse of ``core.pickle.reader``.

The bytes depend on the tree only: members of sets are sorted, equal strings share a memo entry, and
nothing depends on memory addresses. Shared and cyclic containers stay shared. The opcodes are those
of protocol 2 that ``torch.load(weights_only=True)`` accepts. Names with dots are written as a
``getattr``. The protocol is raised only where necessary: keyword arguments of ``__new__`` and
strings over 4 GiB need protocol 4.

Nothing recurses, so the depth of the tree does not matter.

Source: CPython 3.11 ``pickle.py`` (what unpicklers accept); torch 2.13
``torch/_weights_only_unpickler.py`` (its subset).
"""

from __future__ import annotations

import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from core.errors import CapacityError
from core.pickle.inert import NO_STATE, Global, Inert, Persistent, Size

PersistentId = Callable[[Any], object | None]
"""Returns the persistent id (a plain tree) of a leaf, or None if the leaf has no such id."""
Reducers = Mapping[type, Callable[[Any], object]]
"""Exact type of a leaf → the function that returns the value to write in its place."""

BATCH = 1000
"""Entries per APPENDS or SETITEMS, as in CPython."""


def dumps(
    tree: object,
    *,
    persistent_id: PersistentId | None = None,
    reducers: Reducers | None = None,
    protocol: int = 2,
) -> bytes:
    """Pickle an inert tree.

    Args:
        tree: plain values and instances of the classes in ``core.pickle.inert``.
        persistent_id: called for leaves that are neither plain nor records.
        reducers: called for leaves without a persistent id, once for each distinct object.
        protocol: minimum protocol, 2 to 5; the tree may need a higher one.

    Raises:
        TypeError: a leaf has neither a persistent id nor a reducer.
        CapacityError: an integer is too long for a pickle.
    """
    writer = PickleWriter(persistent_id=persistent_id, reducers=reducers, protocol=protocol)
    writer.write(tree)
    return writer.finish()


class _Raw(bytes):
    """Opcodes to write between values."""

    __slots__ = ()


class _End:
    """The opcodes that complete a value, to be written after its parts.

    Args:
        value: a tuple, set or record.
        opcodes: the opcodes that create the value from its parts.
        undo: the opcodes that drop the parts if a cycle has put ``value`` into the memo meanwhile.
        after: opcodes and values that follow, in order.
    """

    __slots__ = ("after", "opcodes", "undo", "value")

    def __init__(
        self, value: object, opcodes: bytes, undo: bytes, after: Sequence[object] = ()
    ) -> None:
        self.value = value
        self.opcodes = opcodes
        self.undo = undo
        self.after = after


class PickleWriter:
    """A pickle under construction: ``write`` pushes values, and ``emit`` adds opcodes.

    Memo indexes are explicit, so that a caller may emit parts with memo entries of its own
    (``new_memo_index``) in another order than that in which it created them.

    The arguments are those of ``dumps``.
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
        # One buffer: as objects of their own, the opcodes of a number take ten times their bytes.
        self._out = bytearray()
        self._n_memo = 0
        self._by_id: dict[int, tuple[int, object]] = {}
        """id → memo index, and the object, kept so that no other object gets its id."""
        self._by_value: dict[object, int] = {}
        """str, (bytes,), or Global → memo index."""
        self._reduced: dict[int, tuple[object, object]] = {}
        """id → the object, kept for the same reason, and the result of its reducer."""

    def finish(self) -> bytes:
        """Return the complete pickle, after which nothing can be added."""
        self._by_value.clear()  # the texts of bytes are as long as these
        self._out += b"."
        return b"".join((b"\x80", bytes([self._protocol]), self._out))

    def emit(self, opcodes: bytes) -> None:
        """Add opcodes as they are."""
        self._out += opcodes

    def take(self) -> bytes:
        """Return the opcodes so far and clear them, for callers that order parts themselves."""
        opcodes = bytes(self._out)
        self._out.clear()
        return opcodes

    def new_memo_index(self) -> int:
        """Reserve a memo index."""
        index = self._n_memo
        self._n_memo += 1
        return index

    def write(self, tree: object) -> None:
        """Add the opcodes that push a tree.

        Raises:
            TypeError: a leaf has neither a persistent id nor a reducer.
            CapacityError: an integer is too long for a pickle.
        """
        # Values that are still to be written; the last one is the next.
        todo: list[object] = [tree]
        emit = self._out.extend
        while todo:
            node = todo.pop()
            kind = type(node)
            # Values without parts are written immediately.
            if kind is _Raw:
                emit(node)  # type: ignore[arg-type]
            elif kind is str:
                emit(self.text(node))  # type: ignore[arg-type]
            elif kind in _SCALARS:
                emit(_SCALARS[kind](node))
            elif kind is bytes:
                self._add_bytes(node)  # type: ignore[arg-type]
            elif kind is Global:
                emit(self._global(node))  # type: ignore[arg-type]
            # Containers and leaves put what follows them onto ``todo``.
            elif kind is _End:
                todo += reversed(self._finish_value(node))  # type: ignore[arg-type]
            elif kind is tuple and not node:
                emit(b")")
            else:
                memoized = self._by_id.get(id(node))
                if memoized is not None:
                    emit(get(memoized[0]))
                else:
                    todo += reversed(self._begin_value(node))

    def _begin_value(self, node: Any) -> Sequence[object]:
        """Begin to write a container or leaf, and return the values and opcodes that follow."""
        kind = type(node)
        # Dicts and lists get their memo entry before their parts, which may refer to them.
        if kind is dict:
            self._out += b"}" + self._memoize(node)
            return _batches(node.items(), _SET_ONE, _SET_MANY)
        if kind is list:
            self._out += b"]" + self._memoize(node)
            return _batches(((item,) for item in node), _APPEND_ONE, _APPEND_MANY)
        # Tuples, records and sets exist only after their parts, so their memo entry comes last.
        if kind is tuple:
            if len(node) <= 3:
                return (*node, _End(node, _TUPLES[len(node)], b"0" * len(node)))
            self._out += b"("
            return (*node, _End(node, b"t", b"1"))
        if kind is Inert:
            # The values and opcodes that create a record.
            # As CPython orders them: the items, then the entries, the state last.
            after: list[object] = _batches(
                ((item,) for item in node.items), _APPEND_ONE, _APPEND_MANY
            )
            after += _batches(node.entries, _SET_ONE, _SET_MANY)
            if node.state is not NO_STATE:
                after += (node.state, _Raw(b"b"))
            if node.how == "newobj_ex":
                self._protocol = max(self._protocol, 4)
                return (node.fn, node.args, node.kwargs or {}, _End(node, b"\x92", b"000", after))
            opcode = b"\x81" if node.how == "newobj" else b"R"
            return (node.fn, node.args, _End(node, opcode, b"00", after))
        if kind in _REDUCED:
            fn, args = _REDUCED[kind](node)
            call = b"\x85R" if len(args) == 1 else b"\x86R"
            return (fn, *args, _End(node, call, b"0" * (1 + len(args))))
        # The values and opcodes that represent a leaf: a persistent id, or a reduced value.
        pid = self._persistent_id(node) if self._persistent_id is not None else None
        if pid is not None:
            return (pid, _Raw(b"Q"))
        reducer = self._reducers.get(type(node))
        if reducer is not None:
            # Once for each object, so that what several places share is written once.
            if id(node) not in self._reduced:
                self._reduced[id(node)] = (node, reducer(node))
            return (self._reduced[id(node)][1],)
        if isinstance(node, Persistent):
            return (node.value, _Raw(b"Q"))
        raise TypeError(f"a {type(node).__name__} cannot be written into a pickle")

    def _finish_value(self, end: _End) -> Sequence[object]:
        """Complete a value after its parts, and return the values and opcodes that follow."""
        # A part that contains the value has written it already: drop the parts, and refer to it.
        memoized = self._by_id.get(id(end.value))
        if memoized is not None:
            self._out += end.undo + get(memoized[0])
            return ()
        self._out += end.opcodes + self._memoize(end.value)
        return end.after

    def _memoize(self, node: object) -> bytes:
        """Assign a memo index to an object, and return the opcodes that store it."""
        index = self.new_memo_index()
        self._by_id[id(node)] = (index, node)
        return put(index)

    def text(self, text: str) -> bytes:
        """Return the opcodes that push a string; equal strings share a memo entry."""
        index = self._by_value.get(text)
        if index is not None:
            return get(index)
        raw = text.encode("utf-8", "surrogatepass")
        if len(raw) < 1 << 32:
            head = b"X" + len(raw).to_bytes(4, "little")
        else:
            self._protocol = max(self._protocol, 4)
            head = b"\x8d" + len(raw).to_bytes(8, "little")
        index = self._by_value[text] = self.new_memo_index()
        return b"".join((head, raw, put(index)))

    def _add_bytes(self, value: bytes) -> None:
        """Add the opcodes that push bytes; equal bytes share a memo entry."""
        index = self._by_value.get((value,))
        if index is not None:
            self._out += get(index)
            return
        if self._protocol >= 3:
            if len(value) < 256:
                self._out += b"C" + bytes([len(value)])
            elif len(value) < 1 << 32:
                self._out += b"B" + len(value).to_bytes(4, "little")
            else:
                self._protocol = max(self._protocol, 4)
                self._out += b"\x8e" + len(value).to_bytes(8, "little")
            self._out += value
        else:
            # Protocol 2 has no opcode for bytes: CPython calls ``_codecs.encode(text, "latin1")``.
            self._out += self.name(Global("_codecs", "encode"))
            self._out += self.text(value.decode("latin-1"))
            self._out += self.text("latin1") + b"\x86R"
        index = self._by_value[value,] = self.new_memo_index()
        self._out += put(index)

    def _global(self, node: Global) -> bytes:
        """Return the opcodes that push a name.

        Up to protocol 3 a nested name (``Class.name``) is an attribute of the outer name.
        """
        parts = node.name.split(".")
        if len(parts) == 1 or self._protocol >= 4 or node in self._by_value or not all(parts):
            return self.name(node)
        # getattr(getattr(outer, "name"), "name"): all functions first, then the arguments.
        opcodes = [self.name(_GETATTR) for _ in parts[1:]]
        opcodes.append(self.name(Global(node.module, parts[0])))
        opcodes += [self.text(part) + b"\x86R" for part in parts[1:]]
        index = self._by_value[node] = self.new_memo_index()
        return b"".join(opcodes) + put(index)

    def name(self, node: Global) -> bytes:
        """Return the opcodes that push a name without dots; equal names share a memo entry."""
        index = self._by_value.get(node)
        if index is not None:
            return get(index)
        # GLOBAL (``c``) takes two lines of text, STACK_GLOBAL of protocol 4 two strings.
        text = node.module + node.name
        fits_in_lines = text.isascii() and "\n" not in text and "\r" not in text
        if not fits_in_lines or self._protocol >= 4:
            self._protocol = max(self._protocol, 4)
            opcodes = self.text(node.module) + self.text(node.name) + b"\x93"
        else:
            # Up to protocol 2, readers would take this for a name of Python 2 and translate it.
            if (node.module, node.name) in NAME_MAPPING or node.module in IMPORT_MAPPING:
                self._protocol = max(self._protocol, 3)
            opcodes = f"c{node.module}\n{node.name}\n".encode()
        index = self._by_value[node] = self.new_memo_index()
        return opcodes + put(index)


def put(index: int) -> bytes:
    """Return the opcode that stores the top of the stack as memo entry ``index``."""
    return _PUTS[index] if index < 256 else _PUT4(0x72, index)


def get(index: int) -> bytes:
    """Return the opcode that pushes memo entry ``index``."""
    return _GETS[index] if index < 256 else _PUT4(0x6A, index)


def integer(value: int) -> bytes:
    """Return the opcodes that push an integer.

    Raises:
        CapacityError: the integer has more than 2**31 - 1 bytes.
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
    raise CapacityError(f"an integer of {len(raw):,} bytes does not fit in a pickle")


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
    """Return the values and opcodes that add entries to the container on the stack.

    Args:
        entries: one value for each item of a list, two for each entry of a dict.
        one, many: the opcodes that add one entry, or all entries since a MARK.
    """
    result: list[object] = []
    batch: list[object] = []
    n_entries = 0
    for entry in entries:
        batch += entry
        n_entries += 1
        if n_entries == BATCH:
            result += (_MARK, *batch, many)
            batch.clear()
            n_entries = 0
    # A single entry needs no MARK.
    if n_entries == 1:
        result += (*batch, one)
    elif n_entries:
        result += (_MARK, *batch, many)
    return result


def _description(value: object, levels: int = 3) -> str:
    """Return a text by which to sort the members of a set, independent of memory addresses.

    The text describes the complete value of a member, except that records are described only to a
    few levels.
    """
    if isinstance(value, (tuple, frozenset)):
        parts = [_description(item, levels) for item in value]
        if not isinstance(value, tuple):
            parts.sort()
        return f"{type(value).__name__}({','.join(parts)})"
    if isinstance(value, (list, dict, set)):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, Inert):
        if levels == 0:
            return value.class_name
        parts = [_description(item, levels - 1) for item in (*value.args[:8], *value.items[:8])]
        if isinstance(value.state, dict):
            parts += [
                f"{key}={_description(item, levels - 1)}"
                for key, item in list(value.state.items())[:8]
            ]
        return f"{value.class_name}({','.join(parts)})"
    return f"{type(value).__name__} {value!r}"


_REDUCED: dict[type, Callable[[Any], tuple[Global, tuple[object, ...]]]] = {
    set: lambda value: (Global("builtins", "set"), (sorted(value, key=_description),)),
    frozenset: lambda value: (Global("builtins", "frozenset"), (sorted(value, key=_description),)),
    bytearray: lambda value: (Global("builtins", "bytearray"), (bytes(value),)),
    complex: lambda value: (Global("builtins", "complex"), (value.real, value.imag)),
    Size: lambda value: (Global("torch", "Size"), (tuple(value),)),
}
"""Type that protocol 2 stores as a call → the callable and its one or two arguments."""
