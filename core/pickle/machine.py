"""The virtual machine of ``core.pickle.reader``: one run of the opcodes of a pickle.

Source: CPython 3.11 ``pickle.py`` and ``pickletools.py`` (opcode semantics).
"""

from __future__ import annotations

import struct
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from core.errors import CorruptError, UnsafeError
from core.pickle.call_table import handed
from core.pickle.inert import NO_STATE, Global, Inert, Persistent
from core.pickle.reduce import GETATTR, MAX_NAME, PARTIAL, SCRIPT_OBJECT, KeyGuard, Name, normal_forms
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

Hook = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pickle may ask for.

    Args:
        max_objects: containers (60 to 70 bytes each); a record counts as three, a set as four.
        objects_per_byte: as many objects a byte of the pickle, beside ``_FREE_OBJECTS``. Real pickles have at most 0.1.
        max_depth: nesting of the result, None for any. Counted along a depth-first walk.
        max_int_bytes: bytes of one integer; Python refuses to print much longer ones.
        max_string_bytes: bytes of one string.
        max_marks: open MARKs.
        max_names: distinct names of classes and functions. A whole model pickled by its classes has some hundred.
        max_streams: calls of ``torch.storage._load_from_bytes``, a tensor each where a model was pickled without
            ``torch.save``.
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
        """Objects that a pickle of that length may make."""
        return min(self.max_objects, _FREE_OBJECTS + int(self.objects_per_byte * n_bytes))

    def copies_of(self, n_bytes: int) -> int:
        """Return how much a pickle of that length may have copied, counted in the bytes that would spell it out.

        A pickle that Python writes spells out every element that it hands over to a constructor, or sets as state.
        """
        return _FREE_COPIES + n_bytes


_FREE_OBJECTS = 1_000_000
_FREE_COPIES = 250_000
_MAX_ARGS = 16
"""Arguments of a call that are not counted as copies."""
_MISSING = object()
_float = struct.Struct(">d").unpack_from
_int4 = struct.Struct("<i").unpack_from
_uint4 = struct.Struct("<I").unpack_from
_uint8 = struct.Struct("<Q").unpack_from


class Machine:
    """One run of the virtual machine.

    Attributes:
        at: byte position when the run ended or failed.
        n_objects: containers and records made.
    """

    __slots__ = (
        "_acting",
        "_actions",
        "_called",
        "_copies_left",
        "_folds",
        "_forms",
        "_guard",
        "_hooks",
        "_limits",
        "_made_of",
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
        self, persistent_load: Callable[[object], object] | None, hooks: Mapping[Name, Hook], limits: Limits
    ) -> None:
        self.at = 0
        self.n_objects = 0
        self._proto = 0
        self._limits = limits
        self._persistent_load = persistent_load
        self._hooks = hooks
        self._guard = KeyGuard()
        self._folds: set[bool] = set()
        self._forms = normal_forms(self._guard, self._named, self._folds, self._count_copies)
        self._names: dict[Name, Global] = {}
        self._actions: dict[int, Hook] = {}
        """id of a Global (kept alive by _names) → what a REDUCE of it does."""
        self._makers: dict[int, Hook] = {}
        """The same for NEWOBJ, which only hooks have."""
        self._called: set[int] = set()
        self._made_of: set[int] = set()
        """ids of the Globals that REDUCE calls, save in forms that are understood, and that NEWOBJ instantiates."""
        self._acting: list[Inert] = []
        """Objects whose class acts on their state (``uses_by_state``), also those that the pickle drops again."""
        self._uses: set[Use] = set()
        """Whatever else is done with names."""
        self._merged: dict[int, dict[object, object]] = {}
        """id → a state that was merged of several, which is nobody else's."""
        self._copies_left = 0
        self._n_streams = 0

    def run(self, data: bytes, i: int) -> tuple[object, int]:
        """Runs from byte ``i`` to STOP. The loop is one function because a call per opcode doubles its time.

        Where slices reach beyond the end of the data they come out short and ``i`` lies beyond the end, so that
        fetching the next opcode raises IndexError; no length needs a check of its own.
        """
        stack: list[Any] = []
        push = stack.append
        meta: list[list[Any]] = []
        memo: list[Any] = []
        memoize = memo.append
        sparse: dict[int, Any] = {}
        limits = self._limits
        most = left = limits.objects_of(len(data))
        self._copies_left = limits.copies_of(len(data))
        max_marks = limits.max_marks
        # without a MARK, every opcode takes at most three values off the stack, and puts one around them
        max_open = sys.maxsize if limits.max_depth is None else 3 * limits.max_depth
        actions = self._actions
        called = self._called
        made_of = self._made_of
        check_key = self._guard.check
        try:
            while True:
                op = data[i]
                i += 1
                if op == 0x94:  # MEMOIZE
                    if sparse:
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
                    push(str(data[start:i], "utf-8", "surrogatepass"))
                elif op == 0x28:  # MARK
                    meta.append(stack)
                    stack = []
                    push = stack.append
                    if len(meta) > max_marks:
                        raise UnsafeError(f"the pickle nests more than {max_marks} levels deep")
                elif op == 0x75:  # SETITEMS
                    items = stack
                    stack = meta.pop()
                    push = stack.append
                    target = stack[-1]
                    if len(items) & 1:
                        raise CorruptError("malformed pickle: a key without a value")
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
                    left -= 3
                    args = stack.pop()
                    fn = stack[-1]
                    action = actions.get(id(fn))
                    if type(args) is not tuple:
                        _not_a("tuple of arguments", args)
                    if len(args) > _MAX_ARGS:
                        self._count_copies(len(args))
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
                    if left < 0:
                        self._too_many()
                elif op == 0x81:  # NEWOBJ
                    left -= 3
                    args = stack.pop()
                    fn = stack[-1]
                    action = self._makers.get(id(fn))
                    if type(args) is not tuple:
                        _not_a("tuple of arguments", args)
                    if len(args) > _MAX_ARGS:
                        self._count_copies(len(args))
                    if type(fn) is Global:
                        made_of.add(id(fn))
                    else:
                        self._check_callable("newobj", fn, args)
                    if action is None:
                        stack[-1] = Inert("newobj", fn, args)
                    else:
                        value = action(*args)
                        stack[-1] = Inert("newobj", fn, args) if value is NotImplemented else value
                    if left < 0:
                        self._too_many()
                elif op == 0x62:  # BUILD
                    state = stack.pop()
                    target = stack[-1]
                    if type(target) is Inert and target.state is NO_STATE:
                        target.state = state
                    else:
                        i = self._build(target, state, data, i)
                elif op == 0x7D:  # EMPTY_DICT
                    left -= 1
                    if left < 0:
                        self._too_many()
                    if len(stack) > max_open and not meta:
                        raise UnsafeError(f"the pickle nests more than {limits.max_depth} levels deep")
                    push({})
                elif op == 0x29:  # EMPTY_TUPLE
                    push(())
                elif op == 0x85:  # TUPLE1
                    left -= 1
                    stack[-1] = (stack[-1],)
                    if left < 0:
                        self._too_many()
                elif op == 0x86:  # TUPLE2
                    left -= 1
                    second = stack.pop()
                    stack[-1] = (stack[-1], second)
                    if left < 0:
                        self._too_many()
                elif op == 0x87:  # TUPLE3
                    left -= 1
                    third = stack.pop()
                    second = stack.pop()
                    stack[-1] = (stack[-1], second, third)
                    if left < 0:
                        self._too_many()
                elif op == 0x74:  # TUPLE
                    left -= 1
                    items = stack
                    stack = meta.pop()
                    push = stack.append
                    push(tuple(items))
                    if left < 0:
                        self._too_many()
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
                    left -= 1
                    if left < 0:
                        self._too_many()
                    if len(stack) > max_open and not meta:
                        raise UnsafeError(f"the pickle nests more than {limits.max_depth} levels deep")
                    push([])
                elif op == 0x47:  # BINFLOAT
                    push(_float(data, i)[0])
                    i += 8
                elif op == 0x51:  # BINPERSID
                    pid = stack.pop()
                    self._note_persistent(pid)
                    push(Persistent(pid) if self._persistent_load is None else self._persistent_load(pid))
                    left -= 1
                    if left < 0:
                        self._too_many()
                elif op == 0x63:  # GLOBAL
                    module, name, i = two_lines(data, i)
                    push(self._global(module, name))
                elif op == 0x93:  # STACK_GLOBAL
                    name = stack.pop()
                    module = stack.pop()
                    push(self._global(module, name))
                elif op == 0x2E:  # STOP
                    value = stack.pop()
                    if stack or meta:
                        raise CorruptError(f"malformed pickle: {len(stack) + len(meta)} values are left at its end")
                    return value, i
                elif op == 0x95:  # FRAME
                    i += 8
                    if i + _uint8(data, i - 8)[0] > len(data):
                        i = len(data)
                        raise IndexError("frame")
                elif op == 0x80:  # PROTO
                    self._proto = data[i]
                    i += 1
                    if self._proto > 5:
                        raise CorruptError(f"pickle protocol {self._proto} is not known")
                elif op == 0x8F:  # EMPTY_SET
                    left -= 4
                    if left < 0:
                        self._too_many()
                    push(set())
                elif op in SIZED:
                    width, convert = SIZED[op]
                    start = i + width
                    size = int.from_bytes(data[i:start], "little")
                    i = start + size
                    if size > limits.max_string_bytes:
                        raise UnsafeError(f"a string of {size} bytes, more than the limit")
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
                        raise UnsafeError(f"an integer of {size} bytes, more than the limit of {limits.max_int_bytes}")
                    start = i + 4
                    i = start + size
                    push(int.from_bytes(data[start:i], "little", signed=True))
                elif op == 0x6C or op == 0x64 or op == 0x90 or op == 0x91:  # LIST, DICT, ADDITEMS, FROZENSET
                    left -= 4
                    if left < 0:
                        self._too_many()
                    items = stack
                    stack = meta.pop()
                    push = stack.append
                    if op == 0x6C:
                        push(items)
                    elif op == 0x64:
                        made: dict[object, object] = {}
                        for key, value in zip(items[::2], items[1::2], strict=True):
                            check_key(key)
                            made[key] = value
                        push(made)
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
                    left -= 3
                    if left < 0:
                        self._too_many()
                    kwargs = stack.pop()
                    args = stack.pop()
                    if type(kwargs) is not dict or type(args) is not tuple:
                        _not_a("tuple and dict of arguments", args)
                    self._count_copies(len(args) + len(kwargs))
                    self._check_callable("newobj_ex", stack[-1], args, kwargs)
                    stack[-1] = Inert("newobj_ex", stack[-1], args, kwargs=kwargs)
                elif op == 0x69 or op == 0x6F:  # INST, OBJ
                    left -= 3
                    if left < 0:
                        self._too_many()
                    items = stack
                    stack = meta.pop()
                    push = stack.append
                    if op == 0x69:
                        module, name, i = two_lines(data, i)
                        fn = self._global(module, name)
                    else:
                        fn = items.pop(0)
                    push(self._made(fn, tuple(items)))
                elif op == 0x30:  # POP
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
            self.n_objects = most - left
            # Their functions refer to the machine: thousands of small pickles would wait for the garbage collector.
            self._forms.clear()
            self._actions.clear()
            self._makers.clear()

    @property
    def uses(self) -> set[Use]:
        """What the pickle does with names, also with those it drops again.

        ``getattr`` only where it was called for something else than a longer name, or not called at all.
        """
        uses = self._uses.union(*map(uses_by_state, self._acting))
        for name in self._names.values():
            if name == GETATTR and self._folds == {True}:
                continue
            uses.add(Use(name))
            if id(name) in self._called:
                uses.add(Use(name, "called"))
            if id(name) in self._made_of:
                uses.add(Use(name, "made"))
        return uses

    def _check_callable(
        self, how: str, fn: object, args: tuple[object, ...], kwargs: dict[str, object] | None = None
    ) -> None:
        """Note a call.

        Raises:
            CorruptError: nothing that might be called.
        """
        if not isinstance(fn, (Global, Inert)):
            _not_a("callable", fn)
        self._uses.update(uses_of_call(how, fn, args, kwargs))

    def _note_hooks(self, target: Inert) -> None:
        """Note what an object of this state calls when it gets another one."""
        if target.state is not NO_STATE:
            self._uses.update(uses_of_state(target.state))

    def _note_append(self, target: Inert) -> None:
        """Note an object that is appended to after it got a state or entries, where a method may have been hidden.

        Pickles that Python writes append first, set entries then, and give the state last.
        """
        if target.state is not NO_STATE or target.entries:
            self._uses.add(use_of_late_append(target))

    def _note_persistent(self, value: object) -> None:
        """Note the class in a persistent id, once."""
        if type(value) is tuple and len(value) > 1 and value[0] == "storage" and type(value[1]) is Global:
            self._called.add(id(value[1]))
        else:
            self._uses.update(uses_of_persistent(value))

    def _change(self, wanted: str, target: object) -> NoReturn:
        """Note that a pickle changes what it should only name, which is refused.

        Raises:
            CorruptError: always.
        """
        if type(target) is Global:
            self._uses.add(Use(target, "changed"))
        _not_a(wanted, target)

    def _build(self, target: object, state: object, data: bytes, i: int) -> int:
        """BUILD of something that is not a fresh record; returns where the next opcode is."""
        build = getattr(type(target), "build", None)
        if build is not None:
            build(target, state)
            bytes_behind = getattr(type(target), "bytes_behind", None)
            return i if bytes_behind is None else bytes_behind(target, data, i)
        if not isinstance(target, Inert):
            self._change("record", target)
        self._note_hooks(target)
        if type(target.state) is not dict or type(state) is not dict:
            raise CorruptError(f"malformed pickle: the state of a {target.class_name} is set twice")
        self._count_copies(2 * len(state))
        if id(target.state) not in self._merged:  # the first state may also stand elsewhere in the tree
            self._count_copies(2 * len(target.state))
            target.state = dict(target.state)
            self._merged[id(target.state)] = target.state
        target.state.update(state)
        return i

    def _count_copies(self, n_bytes: int) -> None:
        """Count what is copied from one container into another.

        Args:
            n_bytes: the least that a pickle needs to spell it out.

        Raises:
            UnsafeError: there are more than the pickle can have spelled out, so it has the same ones copied for ever.
        """
        self._copies_left -= n_bytes
        if self._copies_left < 0:
            self._too_many()

    def _refuse(self, op: int) -> NoReturn:
        name = _REFUSED.get(op)
        if name is None:
            raise CorruptError(f"malformed pickle: opcode {op:#04x} is not known")
        if op in _EXTENSIONS:
            self._uses.add(use_of_extension())
        raise UnsafeError(f"the pickle uses {name}", hint="do not trust this file; no checkpoint needs that")

    def _too_many(self) -> NoReturn:
        raise UnsafeError(
            "the pickle makes more objects than pickles of its length do",
            hint="do not trust this file; if it is yours, report what wrote it",
        )

    @staticmethod
    def _get(sparse: dict[int, Any], index: int) -> object:
        value = sparse.get(index, _MISSING)
        if value is _MISSING:
            raise CorruptError(f"malformed pickle: memo entry {index} is used but not set")
        return value

    @staticmethod
    def _put(memo: list[Any], sparse: dict[int, Any], index: int, value: object) -> None:
        """Sets a memo entry; entries without gaps lie in a list, others in a dict (no allocation by index)."""
        if index < len(memo):
            memo[index] = value
        elif index == len(memo):
            memo.append(value)
            sparse.pop(index, None)
        else:
            sparse[index] = value

    def _global(self, module: object, name: object) -> Global:
        """The Global of a GLOBAL opcode; up to protocol 2 it has the names of Python 2."""
        if type(module) is not str or type(name) is not str:
            _not_a("module and name", (module, name))
        if self._proto < 3:
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        return self._named(module, name)

    def _named(self, module: str, name: str) -> Global:
        """The load's one Global of a name; sets up what a REDUCE of it does."""
        found = self._names.get((module, name))
        if found is None:
            if len(module) + len(name) > MAX_NAME:
                raise UnsafeError(f"the name of a global is longer than {MAX_NAME} characters")
            if len(self._names) >= self._limits.max_names:
                raise UnsafeError(
                    f"the pickle names more than {self._limits.max_names:,} classes and functions, the limit",
                    hint="do not trust this file; real ones name some hundred",
                )
            found = self._names[module, name] = Global(module, name)
            hook = self._hooks.get((module, name))
            if hook is not None:
                self._makers[id(found)] = hook
            action = hook or self._forms.get((module, name)) or self._copyreg(module, name)
            if found == LOAD_FROM_BYTES or handed(module, name):
                action = self._noted(found, action)
            if found == PARTIAL and action is not None:
                action = self._watched(action)
            if found == SCRIPT_OBJECT:
                self._makers[id(found)] = self._watched(lambda *args: Inert("newobj", found, args))
            if action is not None:
                self._actions[id(found)] = action
        return found

    def _watched(self, action: Hook) -> Hook:
        """Return the action that makes objects whose state is to be judged when the pickle ends."""

        def watched(*args: object) -> object:
            value = action(*args)
            if type(value) is Inert:
                self._acting.append(value)
            return value

        return watched

    def _noted(self, fn: Global, action: Hook | None) -> Hook:
        """Return the action of a function that calls its arguments: it notes those as well."""

        is_loading = fn == LOAD_FROM_BYTES

        def noted(*args: object) -> object:
            self._n_streams += is_loading
            if self._n_streams > self._limits.max_streams:
                raise UnsafeError(
                    f"the pickle loads more than {self._limits.max_streams:,} streams inside it, the limit",
                    hint="save it with torch.save, which keeps the tensors beside the pickle",
                )
            self._count_copies(sum(len(arg) for arg in args if type(arg) is bytearray))
            self._uses.update(uses_of_call("reduce", fn, args, None))
            return NotImplemented if action is None else action(*args)

        return noted

    def _copyreg(self, module: str, name: str) -> Hook | None:
        """The functions of copyreg by which protocols 0 and 1 make objects, as the NEWOBJ that they mean."""
        if module != "copyreg":
            return None

        def newobj(*args: object) -> object:
            return self._made(args[0], args[1:], how="newobj") if args else NotImplemented

        def reconstructor(*args: object) -> object:
            if len(args) == 3 and args[1] == Global("builtins", "object") and args[2] is None:
                return self._made(args[0], (), how="newobj")
            return NotImplemented

        return {"__newobj__": newobj, "_reconstructor": reconstructor}.get(name)

    def _made(self, fn: object, args: tuple[object, ...], *, how: str | None = None) -> object:
        """What instantiating ``fn`` gives; ``how`` as for INST and OBJ if it is None."""
        how = how or ("reduce" if args else "newobj")
        self._check_callable(how, fn, args)
        action = (self._makers if how == "newobj" else self._actions).get(id(fn))
        if action is not None:
            value = action(*args)
            if value is not NotImplemented:
                return value
        return Inert(how, fn, args)


def _not_a(wanted: str, found: object) -> NoReturn:
    raise CorruptError(f"malformed pickle: a {type(found).__name__} where a {wanted} is needed")


_REFUSED = {
    0x50: "a text persistent id (PERSID)",
    0x82: "the copyreg extension registry (EXT1)",
    0x83: "the copyreg extension registry (EXT2)",
    0x84: "the copyreg extension registry (EXT4)",
    0x97: "an out-of-band buffer (NEXT_BUFFER)",
    0x98: "an out-of-band buffer (READONLY_BUFFER)",
}
_EXTENSIONS = frozenset((0x82, 0x83, 0x84))
