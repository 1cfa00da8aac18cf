"""The virtual machine that runs the opcodes of one pickle for ``core.pickle.reader``.

Source: CPython 3.11 ``pickle.py`` and ``pickletools.py`` (opcode semantics).
"""

from __future__ import annotations

import struct
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from core.errors import CorruptError, UnsafeError
from core.pickle.call_table import argument_uses
from core.pickle.inert import NO_STATE, Global, Inert, Persistent
from core.pickle.reduce import (
    GETATTR,
    MAX_NAME,
    PARTIAL,
    SCRIPT_OBJECT,
    KeyGuard,
    Name,
    normal_forms,
)
from core.pickle.text import LINES, SIZED, two_lines
from core.pickle.uses import (
    LOAD_FROM_BYTES,
    Use,
    use_of_extension,
    use_of_late_append,
    uses_by_state,
    uses_of_call,
    uses_of_persistent,
    uses_of_state,
)
from core.values import dataclass, n_text

Hook = Callable[..., object]
"""Creates the value of a call from its arguments; returns ``NotImplemented`` to leave it inert."""


@dataclass(frozen=True, slots=True)
class PickleLimits:
    """The limits on what a pickle may contain and demand.

    Args:
        max_objects: containers (60 to 70 bytes each); a record counts as three, a set as four.
        objects_per_byte: objects allowed for each byte of the pickle, in addition to
            ``_FREE_OBJECTS``. Real pickles have at most 0.1.
        max_depth: levels of nesting of the result along a depth-first walk; None for no limit.
        max_int_bytes: bytes of one integer; Python refuses to print much longer integers.
        max_string_bytes: bytes of one string.
        max_marks: MARKs that are open at the same time.
        max_names: distinct names of classes and functions. A model that is pickled with its
            classes has a few hundred.
        max_streams: calls of ``torch.storage._load_from_bytes``; a model that was pickled without
            ``torch.save`` has one for each tensor.
    """

    max_objects: int = 50_000_000
    objects_per_byte: float = 1 / 3
    max_depth: int | None = 1000
    max_int_bytes: int = 4096
    max_string_bytes: int = 1 << 32
    max_marks: int = 100_000
    max_names: int = 10_000
    max_streams: int = 10_000

    def objects_of(self, n_bytes: int) -> int:
        """Return the number of objects that a pickle of ``n_bytes`` bytes may create."""
        return min(self.max_objects, _FREE_OBJECTS + int(self.objects_per_byte * n_bytes))

    def copies_of(self, n_bytes: int) -> int:
        """Return the limit for the elements that a pickle of ``n_bytes`` bytes may have copied.

        Elements count as the bytes that spell them out: a pickle written by Python spells out every
        element that it passes to a constructor or sets as state.
        """
        return _FREE_COPIES + n_bytes


_FREE_OBJECTS = 1_000_000
_FREE_COPIES = 250_000
_MAX_ARGS = 16
"""Number of arguments up to which those of a call are not counted as copies."""
_LONG = 1 << 20
"""Bytes from which on a string is not copied before it is decoded."""
_MISSING = object()
_float = struct.Struct(">d").unpack_from
_int4 = struct.Struct("<i").unpack_from
_uint4 = struct.Struct("<I").unpack_from
_uint8 = struct.Struct("<Q").unpack_from


class Machine:
    """One run of the virtual machine.

    Attributes:
        at: byte position at which the run ended or failed.
        n_objects: number of containers and records that it created, as ``PickleLimits`` counts.
    """

    __slots__ = (
        "_acting",
        "_actions",
        "_called",
        "_copies_left",
        "_forms",
        "_getattr_forms",
        "_guard",
        "_hooks",
        "_instantiated",
        "_limits",
        "_makers",
        "_merged",
        "_n_streams",
        "_names",
        "_persistent_load",
        "_proto",
        "_uses",
        "at",
        "n_objects",
    )

    def __init__(
        self,
        persistent_load: Callable[[object], object] | None,
        hooks: Mapping[Name, Hook],
        limits: PickleLimits,
    ) -> None:
        self.at = 0
        self.n_objects = 0
        self._proto = 0
        self._limits = limits
        self._persistent_load = persistent_load
        self._hooks = hooks
        self._guard = KeyGuard()
        self._getattr_forms: set[bool] = set()
        """The ways ``getattr`` calls were read: as longer names (True), as calls (False)."""
        self._forms = normal_forms(
            self._guard, self._resolve, self._getattr_forms.add, self._count_copies
        )
        self._names: dict[Name, Global] = {}
        self._actions: dict[int, Hook] = {}
        """id of a Global (kept alive by _names) → the function that a REDUCE of it runs."""
        self._makers: dict[int, Hook] = {}
        """id of a Global → the function that a NEWOBJ of it runs, for few classes."""
        self._called: set[int] = set()
        """ids of the Globals that REDUCE calls, except in forms that become plain values."""
        self._instantiated: set[int] = set()
        """ids of the Globals that NEWOBJ instantiates."""
        self._acting: list[Inert] = []
        """Objects whose class acts on their state (``uses_by_state``), even if dropped later."""
        self._uses: set[Use] = set()
        """All other uses of names."""
        self._merged: dict[int, dict[object, object]] = {}
        """id → a state that was merged from several states and belongs to one object only."""
        self._copies_left = 0
        self._n_streams = 0

    def run(self, data: bytes, i: int) -> tuple[object, int]:
        """Run the opcodes from byte ``i`` to STOP, and return the value and the position after it.

        The loop is one function because a call per opcode doubles its time; the most frequent
        opcodes come first. Slices that reach beyond the end of the data come out short, and then
        ``i`` is beyond the end, so that fetching the next opcode raises IndexError: no length
        needs a check of its own.

        Raises:
            CorruptError: an unknown opcode, or an operand of the wrong type.
            UnsafeError: a limit is exceeded, or an opcode is refused.
            struct.error, ValueError, TypeError, AttributeError, LookupError: the pickle is
                truncated or malformed; ``core.pickle.reader.load_next`` translates them.
        """
        stack: list[Any] = []
        push = stack.append
        # The stacks below each open MARK.
        meta: list[list[Any]] = []
        # Memo entries by consecutive index, and those that leave a gap.
        memo: list[Any] = []
        memoize = memo.append
        sparse: dict[int, Any] = {}
        limits = self._limits
        max_objects = objects_left = limits.objects_of(len(data))
        self._copies_left = limits.copies_of(len(data))
        max_marks = limits.max_marks
        # A pickle ends with one value on the stack. Without a MARK every opcode replaces at most
        # three values by one that contains them, so a longer stack must become too deep.
        max_open = sys.maxsize if limits.max_depth is None else 3 * limits.max_depth
        actions = self._actions
        called = self._called
        instantiated = self._instantiated
        check_key = self._guard.check
        try:
            while True:
                op = data[i]
                i += 1
                if op == 0x94:  # MEMOIZE
                    if sparse:
                        # CPython counts entries, wherever their indexes are.
                        self._put(memo, sparse, len(memo) + len(sparse), stack[-1])
                    else:
                        memoize(stack[-1])
                elif op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
                    if op == 0x68:
                        index = data[i]
                        i += 1
                    else:
                        index = _uint4(data, i)[0]
                        i += 4
                    if index < len(memo):
                        push(memo[index])
                    else:
                        push(self._get(sparse, index))
                elif op == 0x4B:  # BININT1
                    push(data[i])
                    i += 1
                elif op == 0x71 or op == 0x72:  # BINPUT, LONG_BINPUT
                    if op == 0x71:
                        index = data[i]
                        i += 1
                    else:
                        index = _uint4(data, i)[0]
                        i += 4
                    if index == len(memo) and not sparse:
                        memoize(stack[-1])
                    else:
                        self._put(memo, sparse, index, stack[-1])
                elif op == 0x8C:  # SHORT_BINUNICODE
                    start = i + 1
                    i = start + data[i]
                    push(str(data[start:i], "utf-8", "surrogatepass"))
                elif op == 0x58:  # BINUNICODE
                    start = i + 4
                    size = _uint4(data, i)[0]
                    i = start + size
                    # Slicing is faster than a view, but copies.
                    raw = data[start:i] if size < _LONG else memoryview(data)[start:i]
                    push(str(raw, "utf-8", "surrogatepass"))
                elif op == 0x28:  # MARK
                    meta.append(stack)
                    stack = []
                    push = stack.append
                    if len(meta) > max_marks:
                        raise depth_error(max_marks)
                elif op == 0x75:  # SETITEMS
                    items = stack
                    stack = meta.pop()
                    push = stack.append
                    target = stack[-1]
                    if len(items) & 1:
                        raise CorruptError("malformed pickle: a key without a value")
                    # Only keys of type str, nearly all, are certainly cheap to hash.
                    if type(target) is dict:
                        pairs = iter(items)
                        for key in pairs:
                            if type(key) is not str:
                                check_key(key)
                            target[key] = next(pairs)
                    elif type(target) is Inert:
                        for key in items[::2]:
                            if type(key) is not str:
                                check_key(key)
                        target.entries += zip(items[::2], items[1::2], strict=True)
                    else:
                        self._change("mapping", target)
                elif op == 0x52:  # REDUCE
                    objects_left -= 3
                    args = stack.pop()
                    fn = stack[-1]
                    action = actions.get(id(fn))
                    if type(args) is not tuple:
                        _not_a("tuple of arguments", args)
                    if len(args) > _MAX_ARGS:
                        self._count_copies(len(args))
                    # For most calls, those of a name on plain values, it is enough to note the
                    # name. An inert argument may have methods of its own that the call runs.
                    if action is None:
                        if type(fn) is Global and not (args and type(args[0]) is Inert):
                            called.add(id(fn))
                        else:
                            self._check_callable("reduce", fn, args)
                        stack[-1] = Inert("reduce", fn, args)
                    else:
                        value = action(*args)
                        if value is NotImplemented:
                            self._check_callable("reduce", fn, args)
                            value = Inert("reduce", fn, args)
                        stack[-1] = value
                    if objects_left < 0:
                        self._refuse_size()
                elif op == 0x81:  # NEWOBJ
                    objects_left -= 3
                    args = stack.pop()
                    fn = stack[-1]
                    action = self._makers.get(id(fn))
                    if type(args) is not tuple:
                        _not_a("tuple of arguments", args)
                    if len(args) > _MAX_ARGS:
                        self._count_copies(len(args))
                    if type(fn) is Global:
                        instantiated.add(id(fn))
                    else:
                        self._check_callable("newobj", fn, args)
                    if action is None:
                        stack[-1] = Inert("newobj", fn, args)
                    else:
                        value = action(*args)
                        stack[-1] = Inert("newobj", fn, args) if value is NotImplemented else value
                    if objects_left < 0:
                        self._refuse_size()
                elif op == 0x62:  # BUILD
                    # Nearly always the first and only state of a record.
                    state = stack.pop()
                    target = stack[-1]
                    if type(target) is Inert and target.state is NO_STATE:
                        target.state = state
                    else:
                        i = self._build(target, state, data, i)
                elif op == 0x7D:  # EMPTY_DICT
                    objects_left -= 1
                    if objects_left < 0:
                        self._refuse_size()
                    if len(stack) > max_open and not meta:
                        raise depth_error(limits.max_depth)
                    push({})
                elif op == 0x29:  # EMPTY_TUPLE
                    push(())
                elif op == 0x85:  # TUPLE1
                    objects_left -= 1
                    stack[-1] = (stack[-1],)
                    if objects_left < 0:
                        self._refuse_size()
                elif op == 0x86:  # TUPLE2
                    objects_left -= 1
                    second = stack.pop()
                    stack[-1] = (stack[-1], second)
                    if objects_left < 0:
                        self._refuse_size()
                elif op == 0x87:  # TUPLE3
                    objects_left -= 1
                    third = stack.pop()
                    second = stack.pop()
                    stack[-1] = (stack[-1], second, third)
                    if objects_left < 0:
                        self._refuse_size()
                elif op == 0x74:  # TUPLE
                    objects_left -= 1
                    items = stack
                    stack = meta.pop()
                    push = stack.append
                    push(tuple(items))
                    if objects_left < 0:
                        self._refuse_size()
                elif op == 0x4D:  # BININT2
                    push(data[i] | data[i + 1] << 8)
                    i += 2
                elif op == 0x4A:  # BININT
                    push(_int4(data, i)[0])
                    i += 4
                elif op == 0x4E:  # NONE
                    push(None)
                elif op == 0x88:  # NEWTRUE
                    push(True)
                elif op == 0x89:  # NEWFALSE
                    push(False)
                elif op == 0x8A:  # LONG1
                    start = i + 1
                    i = start + data[i]
                    push(int.from_bytes(data[start:i], "little", signed=True))
                elif op == 0x73:  # SETITEM
                    value = stack.pop()
                    key = stack.pop()
                    target = stack[-1]
                    if type(key) is not str:
                        check_key(key)
                    if type(target) is dict:
                        target[key] = value
                    elif type(target) is Inert:
                        target.entries.append((key, value))
                    else:
                        self._change("mapping", target)
                elif op == 0x65:  # APPENDS
                    items = stack
                    stack = meta.pop()
                    push = stack.append
                    target = stack[-1]
                    if type(target) is list:
                        target += items
                    elif type(target) is Inert:
                        self._note_append(target)
                        target.items += items
                    else:
                        self._change("list", target)
                elif op == 0x61:  # APPEND
                    value = stack.pop()
                    target = stack[-1]
                    if type(target) is list:
                        target.append(value)
                    elif type(target) is Inert:
                        self._note_append(target)
                        target.items.append(value)
                    else:
                        self._change("list", target)
                elif op == 0x5D:  # EMPTY_LIST
                    objects_left -= 1
                    if objects_left < 0:
                        self._refuse_size()
                    if len(stack) > max_open and not meta:
                        raise depth_error(limits.max_depth)
                    push([])
                elif op == 0x47:  # BINFLOAT
                    push(_float(data, i)[0])
                    i += 8
                elif op == 0x51:  # BINPERSID
                    pid = stack.pop()
                    self._note_persistent(pid)
                    push(
                        Persistent(pid)
                        if self._persistent_load is None
                        else self._persistent_load(pid)
                    )
                    objects_left -= 1
                    if objects_left < 0:
                        self._refuse_size()
                elif op == 0x63:  # GLOBAL
                    module, name, i = two_lines(data, i)
                    push(self._read_global(module, name))
                elif op == 0x93:  # STACK_GLOBAL
                    name = stack.pop()
                    module = stack.pop()
                    push(self._read_global(module, name))
                elif op == 0x2E:  # STOP
                    value = stack.pop()
                    if stack or meta:
                        n_values = len(stack) + len(meta)
                        raise CorruptError(
                            f"malformed pickle: {n_text(n_values, 'unused value')} at its end"
                        )
                    return value, i
                elif op == 0x95:  # FRAME
                    # The frame is ignored, but must end inside the data.
                    i += 8
                    if i + _uint8(data, i - 8)[0] > len(data):
                        i = len(data)
                        raise IndexError("frame")
                elif op == 0x80:  # PROTO
                    self._proto = data[i]
                    i += 1
                    if self._proto > 5:
                        raise CorruptError(f"unknown pickle protocol {self._proto}")
                elif op == 0x8F:  # EMPTY_SET
                    objects_left -= 4
                    if objects_left < 0:
                        self._refuse_size()
                    push(set())
                elif op in SIZED:
                    width, convert = SIZED[op]
                    start = i + width
                    size = int.from_bytes(data[i:start], "little")
                    i = start + size
                    if size > limits.max_string_bytes:
                        raise UnsafeError(
                            f"a string is {size:,} bytes long; the limit is "
                            f"{limits.max_string_bytes:,} bytes"
                        )
                    # Checked before the slice, so that no short string is converted in vain.
                    if i >= len(data):
                        raise IndexError("string")
                    push(convert(data[start:i]))
                elif op in LINES:
                    stop = data.index(b"\n", i)
                    line = data[i:stop]
                    i = stop + 1
                    if op == 0x67:  # GET
                        index = int(line)
                        push(memo[index] if 0 <= index < len(memo) else self._get(sparse, index))
                    elif op == 0x70:  # PUT
                        index = int(line)
                        if index < 0:
                            raise CorruptError("malformed pickle: a negative memo index")
                        self._put(memo, sparse, index, stack[-1])
                    else:
                        push(LINES[op](line))  # type: ignore[misc]
                elif op == 0x8B:  # LONG4
                    size = _uint4(data, i)[0]
                    if size > limits.max_int_bytes:
                        raise UnsafeError(
                            f"an integer is {size:,} bytes long; the limit is "
                            f"{limits.max_int_bytes:,} bytes"
                        )
                    start = i + 4
                    i = start + size
                    push(int.from_bytes(data[start:i], "little", signed=True))
                elif (
                    op == 0x6C or op == 0x64 or op == 0x90 or op == 0x91
                ):  # LIST, DICT, ADDITEMS, FROZENSET
                    # All four take the values above the last MARK.
                    objects_left -= 4
                    if objects_left < 0:
                        self._refuse_size()
                    items = stack
                    stack = meta.pop()
                    push = stack.append
                    if op == 0x6C:
                        push(items)
                    elif op == 0x64:
                        mapping: dict[object, object] = {}
                        for key, value in zip(items[::2], items[1::2], strict=True):
                            check_key(key)
                            mapping[key] = value
                        push(mapping)
                    else:
                        for key in items:
                            check_key(key)
                        if op == 0x91:
                            push(frozenset(items))
                        elif type(stack[-1]) is set:
                            stack[-1].update(items)
                        else:
                            self._change("set", stack[-1])
                elif op == 0x92:  # NEWOBJ_EX
                    objects_left -= 3
                    if objects_left < 0:
                        self._refuse_size()
                    kwargs = stack.pop()
                    args = stack.pop()
                    if type(kwargs) is not dict or type(args) is not tuple:
                        _not_a("tuple and dict of arguments", args)
                    self._count_copies(len(args) + len(kwargs))
                    self._check_callable("newobj_ex", stack[-1], args, kwargs)
                    stack[-1] = Inert("newobj_ex", stack[-1], args, kwargs=kwargs)
                elif op == 0x69 or op == 0x6F:  # INST, OBJ
                    objects_left -= 3
                    if objects_left < 0:
                        self._refuse_size()
                    items = stack
                    stack = meta.pop()
                    push = stack.append
                    # INST names the class in the opcode, OBJ takes it from the stack.
                    if op == 0x69:
                        module, name, i = two_lines(data, i)
                        fn = self._read_global(module, name)
                    else:
                        fn = items.pop(0)
                    push(self._instantiate(fn, tuple(items)))
                elif op == 0x30:  # POP
                    # With nothing above the last MARK, POP removes the MARK, as in CPython.
                    if stack:
                        stack.pop()
                    else:
                        stack = meta.pop()
                        push = stack.append
                elif op == 0x31:  # POP_MARK
                    stack = meta.pop()
                    push = stack.append
                elif op == 0x32:  # DUP
                    push(stack[-1])
                else:
                    self._refuse(op)
        finally:
            self.at = i
            self.n_objects = max_objects - objects_left
            # These functions refer to the machine. With the cycle, it would be freed only by the
            # garbage collector, which is expensive for thousands of small pickles.
            self._forms.clear()
            self._actions.clear()
            self._makers.clear()

    @property
    def uses(self) -> set[Use]:
        """All uses of names in the pickle, those of values that it drops included.

        ``getattr`` is omitted if all its calls became longer names.
        """
        # Only at the end of the pickle are the states complete.
        uses = self._uses.union(*map(uses_by_state, self._acting))
        for name in self._names.values():
            if name == GETATTR and self._getattr_forms == {True}:
                continue
            uses.add(Use(name))
            if id(name) in self._called:
                uses.add(Use(name, "called"))
            if id(name) in self._instantiated:
                uses.add(Use(name, "made"))
        return uses

    def _check_callable(
        self,
        how: str,
        fn: object,
        args: tuple[object, ...],
        kwargs: dict[str, object] | None = None,
    ) -> None:
        """Record the uses of a call.

        Raises:
            CorruptError: ``fn`` cannot be called.
        """
        if not isinstance(fn, (Global, Inert)):
            _not_a("callable", fn)
        self._uses.update(uses_of_call(how, fn, args, kwargs))

    def _note_append(self, target: Inert) -> None:
        """Record an append to an object whose state or entries may contain an ``append``.

        Pickles written by Python append items first, then set entries, and set the state last.
        """
        if target.state is not NO_STATE or target.entries:
            self._uses.add(use_of_late_append(target))

    def _note_persistent(self, value: object) -> None:
        """Record the call of the class in a persistent id."""
        # The usual form, of which a checkpoint has one for each tensor, takes no new ``Use``.
        if (
            type(value) is tuple
            and len(value) > 1
            and value[0] == "storage"
            and type(value[1]) is Global
        ):
            self._called.add(id(value[1]))
        else:
            self._uses.update(uses_of_persistent(value))

    def _change(self, expected: str, target: object) -> NoReturn:
        """Refuse to fill an object that is not a container, after recording a change of a class.

        Raises:
            CorruptError: always.
        """
        if type(target) is Global:
            self._uses.add(Use(target, "changed"))
        _not_a(expected, target)

    def _build(self, target: object, state: object, data: bytes, i: int) -> int:
        """Run a BUILD of an object that is not a fresh record, and return the next position.

        Raises:
            CorruptError: the object takes no state, or not another one.
        """
        # Objects that a hook created take their state themselves. Some are followed by data
        # between the opcodes, such as the arrays of a joblib file.
        build = getattr(type(target), "build", None)
        if build is not None:
            build(target, state)
            bytes_behind = getattr(type(target), "bytes_behind", None)
            return i if bytes_behind is None else bytes_behind(target, data, i)
        # A second state adds attributes to the first.
        if not isinstance(target, Inert):
            self._change("record", target)
        if target.state is not NO_STATE:
            self._uses.update(uses_of_state(target.state))
        if type(target.state) is not dict or type(state) is not dict:
            raise CorruptError(f"malformed pickle: the state of a {target.class_name} is set twice")
        self._count_copies(2 * len(state))
        # The first state is copied once, because other parts of the tree may share it.
        if id(target.state) not in self._merged:
            self._count_copies(2 * len(target.state))
            target.state = dict(target.state)
            self._merged[id(target.state)] = target.state
        target.state.update(state)
        return i

    def _count_copies(self, n_bytes: int) -> None:
        """Count elements that are copied from one container into another.

        Args:
            n_bytes: the minimum number of bytes that spell out the elements in a pickle.

        Raises:
            UnsafeError: the pickle is too short to spell out all copies, so it must copy the same
                elements over and over.
        """
        self._copies_left -= n_bytes
        if self._copies_left < 0:
            self._refuse_size()

    def _refuse(self, op: int) -> NoReturn:
        """Raise for an opcode that is unknown or never run.

        Raises:
            CorruptError: the opcode is unknown.
            UnsafeError: the opcode is known, but never run.
        """
        name = _REFUSED.get(op)
        if name is None:
            raise CorruptError(f"malformed pickle: unknown opcode {op:#04x}")
        # Writers of these opcodes state their protocol first. Without it, they are first bytes of
        # other files: a MessagePack map, the length of a safetensors header.
        if op in _EXTENSIONS and self._proto >= 2:
            self._uses.add(use_of_extension())
        raise UnsafeError(
            f"the pickle uses {name}, which ckpt does not allow",
            hint="do not trust this file; no real checkpoint needs this feature",
        )

    def _refuse_size(self) -> NoReturn:
        """Raise UnsafeError for a pickle that creates too many objects for its length."""
        raise UnsafeError(
            "the pickle creates more objects than any genuine pickle of its length",
            hint="do not trust this file; if you wrote it yourself, report which program wrote it",
        )

    @staticmethod
    def _get(sparse: dict[int, Any], index: int) -> object:
        """Return a memo entry from those with a gap before their index.

        Raises:
            CorruptError: no entry has this index.
        """
        value = sparse.get(index, _MISSING)
        if value is _MISSING:
            raise CorruptError(f"malformed pickle: memo entry {index} is used but not set")
        return value

    @staticmethod
    def _put(memo: list[Any], sparse: dict[int, Any], index: int, value: object) -> None:
        """Set a memo entry: in the list if its index leaves no gap, else in the dict.

        The dict spares the memory for the indexes in between, of which a hostile pickle may leave
        billions.
        """
        if index < len(memo):
            memo[index] = value
        elif index == len(memo):
            memo.append(value)
            sparse.pop(index, None)
        else:
            sparse[index] = value

    def _read_global(self, module: object, name: object) -> Global:
        """Return the Global of a GLOBAL opcode; up to protocol 2 names are those of Python 2."""
        if type(module) is not str or type(name) is not str:
            _not_a("module and name", (module, name))
        if self._proto < 3:
            module, name = NAME_MAPPING.get(
                (module, name), (IMPORT_MAPPING.get(module, module), name)
            )
        return self._resolve(module, name)

    def _resolve(self, module: str, name: str) -> Global:
        """Return the one Global of a name in this load, and set up its actions if it is new.

        Raises:
            UnsafeError: the name is too long, or one name too many.
        """
        fn = self._names.get((module, name))
        if fn is not None:
            return fn
        if len(module) + len(name) > MAX_NAME:
            raise UnsafeError(
                f"the name of a class or function is longer than {MAX_NAME:,} characters"
            )
        if len(self._names) >= self._limits.max_names:
            raise UnsafeError(
                f"the pickle names more than {self._limits.max_names:,} classes and functions",
                hint="do not trust this file; genuine pickles name at most a few hundred",
            )
        fn = self._names[module, name] = Global(module, name)
        self._set_actions(fn)
        return fn

    def _set_actions(self, fn: Global) -> None:
        """Set the functions that a REDUCE and a NEWOBJ of a name run; most names have none."""
        # Hooks come before our own forms, as those of torch's files replace some of them.
        hook = self._hooks.get((fn.module, fn.name))
        if hook is not None:
            self._makers[id(fn)] = hook
        action = hook or self._forms.get((fn.module, fn.name)) or self._copyreg_action(fn)
        if fn == LOAD_FROM_BYTES or argument_uses(fn.module, fn.name):
            action = self._noting_arguments(fn, action)
        # The states of these objects are judged when the pickle ends (``uses``).
        if fn == PARTIAL and action is not None:
            action = self._keeping_results(action)
        if fn == SCRIPT_OBJECT:
            self._makers[id(fn)] = self._keeping_results(lambda *args: Inert("newobj", fn, args))
        if action is not None:
            self._actions[id(fn)] = action

    def _keeping_results(self, action: Hook) -> Hook:
        """Return an action that also keeps the inert objects it creates, to judge their states."""

        def keep_result(*args: object) -> object:
            value = action(*args)
            if type(value) is Inert:
                self._acting.append(value)
            return value

        return keep_result

    def _noting_arguments(self, fn: Global, action: Hook | None) -> Hook:
        """Return an action that also records the arguments that the function would call.

        Args:
            fn: the function.
            action: the action of the function itself, or None if its calls stay inert.
        """
        is_loading = fn == LOAD_FROM_BYTES

        def note_arguments(*args: object) -> object:
            self._n_streams += is_loading
            if self._n_streams > self._limits.max_streams:
                raise UnsafeError(
                    f"the pickle contains more than {self._limits.max_streams:,} nested pickles",
                    hint="save the tensors with torch.save, which stores them outside the pickle",
                )
            # Each use keeps a copy of its stream; a bytearray cannot be shared.
            self._count_copies(sum(len(arg) for arg in args if type(arg) is bytearray))
            self._uses.update(uses_of_call("reduce", fn, args, None))
            return NotImplemented if action is None else action(*args)

        return note_arguments

    def _copyreg_action(self, fn: Global) -> Hook | None:
        """Return the action of a copyreg function that creates objects; None for other functions.

        Protocols 0 and 1 create objects with them; the result is that of the equivalent NEWOBJ.
        """
        if fn.module != "copyreg":
            return None

        def newobj(*args: object) -> object:
            return self._instantiate(args[0], args[1:], how="newobj") if args else NotImplemented

        def reconstructor(*args: object) -> object:
            if len(args) == 3 and args[1] == Global("builtins", "object") and args[2] is None:
                return self._instantiate(args[0], (), how="newobj")
            return NotImplemented

        return {"__newobj__": newobj, "_reconstructor": reconstructor}.get(fn.name)

    def _instantiate(
        self, fn: object, args: tuple[object, ...], *, how: str | None = None
    ) -> object:
        """Instantiate a class with a hook or form that is set for it, else as an ``Inert``.

        Args:
            how: ``reduce`` or ``newobj``; None for INST and OBJ, which call ``__init__`` only
                with arguments.
        """
        how = how or ("reduce" if args else "newobj")
        self._check_callable(how, fn, args)
        action = (self._makers if how == "newobj" else self._actions).get(id(fn))
        if action is not None:
            value = action(*args)
            if value is not NotImplemented:
                return value
        return Inert(how, fn, args)


def _not_a(expected: str, value: object) -> NoReturn:
    """Raise CorruptError for a value of another type than an opcode needs."""
    raise CorruptError(f"malformed pickle: expected a {expected}, but got a {type(value).__name__}")


def depth_error(max_depth: int | None) -> UnsafeError:
    """Return the error for a pickle with more levels of nesting than allowed."""
    return UnsafeError(f"the pickle is nested more than {max_depth} levels deep")


_REFUSED = {
    0x50: "a text persistent id (PERSID)",
    0x82: "the copyreg extension registry (EXT1)",
    0x83: "the copyreg extension registry (EXT2)",
    0x84: "the copyreg extension registry (EXT4)",
    0x97: "an out-of-band buffer (NEXT_BUFFER)",
    0x98: "an out-of-band buffer (READONLY_BUFFER)",
}
"""Opcode → description of what it uses, for the message."""
_EXTENSIONS = frozenset((0x82, 0x83, 0x84))
