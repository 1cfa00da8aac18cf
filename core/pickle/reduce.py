"""Turn the REDUCE of a well-known callable into the plain value that the call would return.

``normal_forms(…)[module, name](*args)`` returns that value, or ``NotImplemented`` if the arguments
do not have the usual form (the machine then creates an ``Inert``). Only plain containers and
numbers are created; no name is looked up.

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

    Hashing a tuple of shared tuples takes exponential time, hashing a deeply nested tuple overflows
    the C stack, and keys chosen to have equal hashes make every insertion linear. So a key must be
    a scalar, a name, a record (hashed by identity), or a small shallow tuple or frozenset of these.

    Source: docs/facts/safety.md 2.2 and 2.3.
    """

    __slots__ = ("_hashes",)

    def __init__(self) -> None:
        self._hashes: dict[int, int] = {}

    def check(self, key: object) -> None:
        """Raise unless an object may be hashed.

        Raises:
            CorruptError: Python cannot hash objects of the key's type.
            UnsafeError: hashing the key, or inserting it, could take long.
        """
        kind = type(key)
        if kind in PLAIN_KEYS:
            return
        if kind is int:
            # Integers hash modulo 2**61 - 1, so a long one can be given any hash.
            if not -(1 << 63) <= key < 1 << 64:  # type: ignore[operator]
                raise UnsafeError("a dict key is an integer of more than 64 bits")
            return
        if kind is tuple or kind is frozenset or kind is Size:
            self._check_nested(key)  # type: ignore[arg-type]
            return
        # An object that a hook created, hashed by identity.
        if kind.__hash__ is object.__hash__:
            return
        raise CorruptError(f"a dict key or set member is a {kind.__name__}, which is not hashable")

    def _check_nested(self, key: Iterable[object]) -> None:
        """Check a tuple or frozenset and its parts, and count its hash.

        Raises:
            CorruptError, UnsafeError: as for ``check``.
        """
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
                # Tuples of numbers are hashed without a secret seed, so a file can choose their
                # hashes.
                key_hash = hash(key)
                n_equal = self._hashes.get(key_hash, 0) + 1
                self._hashes[key_hash] = n_equal
                if n_equal > MAX_EQUAL_HASHES and n_equal > 0.1 * len(self._hashes):
                    raise UnsafeError("too many dict keys have the same hash")
                return
            level = below
        raise UnsafeError(
            f"a dict key has more than {MAX_KEY_DEPTH} levels or {MAX_KEY_ELEMENTS:,} elements"
        )


PLAIN_KEYS = frozenset({str, bool, float, bytes, type(None), Inert, Global, TensorLeaf, ObjectLeaf})
"""Types of keys that are safe with any value; ``str`` and ``bytes`` hash with a secret seed."""


def is_harmless_form(fn: object, args: tuple[object, ...]) -> bool:
    """Return whether a call is harmless, although its function may do harm with other arguments.

    ``typing.List[int]`` and ``int | None`` create types, ``iter([1, 2])`` an iterator over a plain
    container, and ``functools.partial(f)`` calls nothing; the function and arguments that it binds
    are judged by ``core.pickle.uses.uses_by_state``.
    """
    form = _FORMS.get(fn) if type(fn) is Global else None
    return form is not None and form(args)


def has_harmless_forms(fn: Global) -> bool:
    """Return whether the arguments of a function decide if a call of it is harmless."""
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
    """Return whether the arguments are those of a subscript of a type, as in ``List[int]``."""
    return (
        len(args) == 2
        and type(args[0]) is Global
        and args[0].module in ("typing", "typing_extensions")
    )


def _is_union(args: tuple[object, ...]) -> bool:
    """Return whether the arguments are those of ``reduce`` for a union, as in ``int | None``."""
    return (
        len(args) == 2 and args[0] == _OR and type(args[1]) is tuple and all(map(_is_type, args[1]))
    )


def _is_type(value: object) -> bool:
    """Return whether a member of a union is a type: a name, a generic alias, or None."""
    if type(value) is Inert:
        return value.fn == _ALIAS or (
            value.how == "reduce" and value.fn == _GETITEM and _is_of_type(value.args)
        )
    return type(value) is Global or value is None


def _is_of_function(args: tuple[object, ...]) -> bool:
    """Return whether the arguments are one function."""
    return len(args) == 1 and type(args[0]) in (Global, Inert)


def _is_of_container(args: tuple[object, ...]) -> bool:
    """Return whether the arguments are one plain container or range, which run no code."""
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
"""Function → predicate on its arguments that is true if the call is harmless."""


def normal_forms(
    guard: KeyGuard,
    resolve: Callable[[str, str], Global],
    note_getattr: Callable[[bool], None],
    count_copies: Callable[[int], None],
) -> dict[Name, Callable[..., object]]:
    """Build the functions that create the plain values of one load, by module and name.

    Args:
        guard: checks set members and keys.
        resolve: returns the one ``Global`` that the load uses for a module and a name.
        note_getattr: called for each ``getattr``, with True if it was turned into a longer name.
        count_copies: called with the minimum number of bytes that spell out an argument that is
            copied; raises UnsafeError if there are too many.
    """

    # Containers, bytes and numbers. What a function copies counts, as a pickle could have one long
    # argument copied over and over.

    def make_size(*args: object) -> object:
        """Create the tuple of a ``torch.Size``; the hooks of torch's files keep the class."""
        if len(args) == 1 and type(args[0]) is tuple:
            return args[0]
        if len(args) == 1 and type(args[0]) is list:
            count_copies(len(args[0]))
            return tuple(args[0])
        return () if not args else NotImplemented

    def make_bytes_of_text(*args: object) -> object:
        """Create bytes from latin-1 text, the form in which protocols 0 to 2 store them."""
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
        # Protocols 0 to 2 store a bytearray as text too.
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
        return frozenset(members) if isinstance(members, set) else NotImplemented

    # Names, and calls that stay inert.

    def get_attribute(*args: object) -> object:
        """Turn ``getattr(module.Class, "name")`` into a longer name.

        This is how Python 3.11 pickles members of enumerations, and protocols below 4 pickle
        nested classes.
        """
        if len(args) == 2 and type(args[0]) is Global and type(args[1]) is str:
            if len(args[0].name) + len(args[1]) > MAX_NAME:
                raise UnsafeError(
                    f"the name of a class or function is longer than {MAX_NAME:,} characters"
                )
            note_getattr(True)
            return resolve(args[0].module, f"{args[0].name}.{args[1]}")
        note_getattr(False)
        return NotImplemented

    def make_none_type(*args: object) -> object:
        """Turn ``type(None)``, which occurs in pickles of annotations, into a name."""
        return resolve("types", "NoneType") if args == (None,) else NotImplemented

    def keep_harmless_form(fn: Global) -> Callable[..., object]:
        """Return the action of a function that the table judges by its arguments."""
        return lambda *args: (
            Inert("reduce", fn, args) if is_harmless_form(fn, args) else NotImplemented
        )

    def make_ordered_dict(*args: object) -> object:
        """Create an inert OrderedDict, empty or from a list of pairs (as Python 2 wrote it)."""
        record = Inert("reduce", resolve("collections", "OrderedDict"))
        if not args:
            return record
        if len(args) > 1 or type(args[0]) is not list:
            return NotImplemented
        pairs = args[0]
        if not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
            return NotImplemented
        count_copies(4 * len(pairs))
        for key, _ in pairs:
            guard.check(key)
        record.entries = [(key, item) for key, item in pairs]
        return record

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
