"""Turn the REDUCE of a well-known callable into the plain value that it stands for.

``normal_forms(…)[module, name](*args)`` returns the value that calling the function would give, or
``NotImplemented`` if the arguments do not have the usual form (the machine then keeps an
``Inert``). Only plain containers and numbers are made; no name is looked up.

Source: CPython 3.11 ``pickle.py``, ``copyreg.py``, ``Objects/*`` (``__reduce_ex__`` of the
builtins).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from core.errors import CorruptError, UnsafeError
from core.pickle.inert import NO_STATE, Global, Inert, ObjectLeaf, Size, TensorLeaf

MAX_KEY_DEPTH = 8
MAX_KEY_ELEMENTS = 4096
MAX_EQUAL_HASHES = 64

Name = tuple[str, str]
"""Module and name of a class or function."""


class KeyGuard:
    """A guard that decides which objects may be keys of a dict or members of a set.

    Hashing a tuple of shared tuples takes exponential time, hashing a deep one overflows the C
    stack, and keys chosen to have equal hashes make every insertion linear. So keys are scalars,
    names, records (hashed by identity) and small shallow tuples or frozensets of such.

    Source: docs/facts/safety.md 2.2 and 2.3.
    """

    __slots__ = ("_hashes",)

    def __init__(self) -> None:
        self._hashes: dict[int, int] = {}

    def check(self, key: object) -> None:
        """Raise unless an object may be hashed.

        Raises:
            CorruptError: Python cannot hash objects of its type.
            UnsafeError: hashing could take long.
        """
        kind = type(key)
        if kind in PLAIN_KEYS:
            return
        if kind is int:
            if not -(1 << 63) <= key < 1 << 64:  # type: ignore[operator]
                raise UnsafeError("a dict key is an integer of more than 64 bits")
            return
        if kind is tuple or kind is frozenset or kind is Size:
            self._check_nested(key)  # type: ignore[arg-type]
            return
        if kind.__hash__ is object.__hash__:  # an object made by a hook
            return
        raise CorruptError(f"a dict key or set member is a {kind.__name__}")

    def _check_nested(self, key: Iterable[object]) -> None:
        """Check a tuple or frozenset level by level, and count its hash."""
        # Level by level, so that deep and shared tuples are refused after few steps.
        level: list[object] = list(key)
        n_elements = 0
        for _ in range(MAX_KEY_DEPTH):
            n_elements += len(level)
            if n_elements > MAX_KEY_ELEMENTS:
                break
            below: list[object] = []
            for item in level:
                if type(item) is tuple or type(item) is frozenset or type(item) is Size:
                    below += item
                else:
                    self.check(item)
            if not below:
                self._count_hash(hash(key))
                return
            level = below
        raise UnsafeError(
            f"a dict key has more than {MAX_KEY_DEPTH} levels or {MAX_KEY_ELEMENTS:,} elements"
        )

    def _count_hash(self, value: int) -> None:
        """Raise UnsafeError if too many keys have the same hash."""
        n_equal = self._hashes.get(value, 0) + 1
        self._hashes[value] = n_equal
        if n_equal > MAX_EQUAL_HASHES and n_equal > 0.1 * len(self._hashes):
            raise UnsafeError("many dict keys have the same hash")


PLAIN_KEYS = frozenset({str, bool, float, bytes, type(None), Inert, Global, TensorLeaf, ObjectLeaf})
"""Types of keys that are safe with any value; ``str`` and ``bytes`` hash with a secret seed."""


def is_harmless_form(fn: object, args: tuple[object, ...]) -> bool:
    """Return whether a call is harmless though the same function may do harm with other arguments.

    ``typing.List[int]`` and ``int | None`` make types, ``iter([1, 2])`` an iterator over a plain
    container, and ``functools.partial(f)`` calls nothing; the function and arguments that it binds
    are judged by ``core.pickle.uses.uses_by_state``.
    """
    form = _FORMS.get(fn) if type(fn) is Global else None
    return form is not None and form(args)


def has_harmless_forms(fn: Global) -> bool:
    """Return whether it depends on the arguments of a function if a call of it is harmless."""
    return fn in _FORMS


def is_partial(value: object) -> bool:
    """Return whether a value is a ``functools.partial`` in the form in which Python pickles it."""
    return (
        type(value) is Inert
        and value.fn == PARTIAL
        and value.how == "reduce"
        and _is_of_function(value.args)
    )


def is_plain_iterator(value: object) -> bool:
    """Return whether a value is an iterator over a plain container."""
    return type(value) is Inert and value.fn in _ITERATORS and _is_of_container(value.args)


def _is_of_type(args: tuple[object, ...]) -> bool:
    return (
        len(args) == 2
        and type(args[0]) is Global
        and args[0].module in ("typing", "typing_extensions")
    )


def _is_union(args: tuple[object, ...]) -> bool:
    return (
        len(args) == 2 and args[0] == _OR and type(args[1]) is tuple and all(map(_is_type, args[1]))
    )


def _is_type(value: object) -> bool:
    if type(value) is Inert:
        return value.fn == _ALIAS or (
            value.how == "reduce" and value.fn == _GETITEM and _is_of_type(value.args)
        )
    return type(value) is Global or value is None


def _is_of_function(args: tuple[object, ...]) -> bool:
    return len(args) == 1 and type(args[0]) in (Global, Inert)


def _is_of_container(args: tuple[object, ...]) -> bool:
    if len(args) != 1:
        return False
    return type(args[0]) in _PLAIN or (
        type(args[0]) is Inert and args[0].fn == _RANGE and args[0].state is NO_STATE
    )


_PLAIN = (list, tuple, Size, dict, set, frozenset, str, bytes, bytearray)
_GETITEM = Global("_operator", "getitem")
_OR = Global("_operator", "or_")
_ALIAS = Global("types", "GenericAlias")
_RANGE = Global("builtins", "range")
_ITERATORS = (Global("builtins", "iter"), Global("builtins", "reversed"))
PARTIAL = Global("functools", "partial")
SCRIPT_OBJECT = Global("torch", "ScriptObject")
_FORMS: dict[Global, Callable[[tuple[object, ...]], bool]] = {
    _GETITEM: _is_of_type,
    Global("functools", "reduce"): _is_union,
    PARTIAL: _is_of_function,
    **dict.fromkeys(_ITERATORS, _is_of_container),
}
"""Function → test whether its arguments make a call harmless."""


def normal_forms(
    guard: KeyGuard,
    resolve: Callable[[str, str], Global],
    note_getattr: Callable[[bool], None],
    count_copies: Callable[[int], None],
) -> dict[Name, Callable[..., object]]:
    """Return the functions that make the plain values of one load, by module and name.

    Args:
        guard: checks set members and keys.
        resolve: returns the load's one ``Global`` of a module and a name.
        note_getattr: called with whether a ``getattr`` was turned into a longer name.
        count_copies: called with the least number of bytes that spell out an argument that is
            copied; it raises if there are too many.
    """

    # Containers, bytes and numbers.

    def make_size(*args: object) -> object:
        if len(args) == 1 and type(args[0]) is tuple:
            return args[0]
        if len(args) == 1 and type(args[0]) is list:
            count_copies(len(args[0]))
            return tuple(args[0])
        return () if not args else NotImplemented

    def make_bytes_of_text(*args: object) -> object:
        """Make bytes from text, which is how protocols 0 to 2 spell them."""
        if (
            len(args) == 2
            and type(args[0]) is str
            and args[1] in ("latin1", "latin-1", "iso-8859-1")
        ):
            count_copies(len(args[0]))
            return args[0].encode("latin-1")
        return NotImplemented

    def make_bytearray(*args: object) -> object:
        if not args:
            return bytearray()
        if len(args) == 1 and type(args[0]) is bytes:
            count_copies(len(args[0]))
            return bytearray(args[0])
        if len(args) == 2 and type(args[0]) is str and args[1] in ("latin-1", "latin1"):
            count_copies(len(args[0]))
            return bytearray(args[0].encode("latin-1"))
        return NotImplemented

    def make_complex(*args: object) -> object:
        if len(args) == 2 and all(type(part) in (int, float) for part in args):
            return complex(args[0], args[1])  # type: ignore[call-overload]
        return NotImplemented

    def make_set(*args: object) -> object:
        if len(args) > 1 or (args and type(args[0]) not in (list, tuple)):
            return NotImplemented
        members: list[object] = list(args[0]) if args else []  # type: ignore[call-overload]
        count_copies(2 * len(members))
        for member in members:
            guard.check(member)
        return set(members)

    def make_frozenset(*args: object) -> object:
        members = make_set(*args)
        return members if members is NotImplemented else frozenset(members)  # type: ignore[call-overload]

    # Names, and calls that stay inert.

    def get_attribute(*args: object) -> object:
        """Turn ``getattr(module.Class, "name")`` into a longer name.

        Enumerations of Python 3.11 and nested classes are pickled so.
        """
        if len(args) == 2 and type(args[0]) is Global and type(args[1]) is str:
            if len(args[0].name) + len(args[1]) > MAX_NAME:
                raise UnsafeError(f"the name of a global is longer than {MAX_NAME} characters")
            note_getattr(True)
            return resolve(args[0].module, f"{args[0].name}.{args[1]}")
        note_getattr(False)
        return NotImplemented

    def make_none_type(*args: object) -> object:
        """Turn ``type(None)``, which occurs in pickles of annotations, into a name."""
        return resolve("types", "NoneType") if args == (None,) else NotImplemented

    def keep_harmless_form(fn: Global) -> Callable[..., object]:
        return lambda *args: (
            Inert("reduce", fn, args) if is_harmless_form(fn, args) else NotImplemented
        )

    def make_ordered_dict(*args: object) -> object:
        """Make an inert OrderedDict, empty or from a list of pairs (as Python 2 wrote it)."""
        record = Inert("reduce", resolve("collections", "OrderedDict"))
        if not args:
            return record
        if (
            len(args) == 1
            and type(args[0]) is list
            and all(type(p) in (list, tuple) and len(p) == 2 for p in args[0])
        ):
            count_copies(4 * len(args[0]))
            for pair in args[0]:
                guard.check(pair[0])
            record.entries = [(pair[0], pair[1]) for pair in args[0]]
            return record
        return NotImplemented

    return {
        ("torch", "Size"): make_size,
        ("_codecs", "encode"): make_bytes_of_text,
        ("builtins", "bytes"): lambda *args: NotImplemented if args else b"",
        ("builtins", "bytearray"): make_bytearray,
        ("builtins", "complex"): make_complex,
        ("builtins", "set"): make_set,
        ("builtins", "frozenset"): make_frozenset,
        ("builtins", "getattr"): get_attribute,
        ("builtins", "type"): make_none_type,
        **{(fn.module, fn.name): keep_harmless_form(fn) for fn in _FORMS},
        ("collections", "OrderedDict"): make_ordered_dict,
    }


GETATTR = Global("builtins", "getattr")
MAX_NAME = 4096
"""Longest name of a global, in characters."""
