"""What a REDUCE of a well-known callable means, as plain values.

``NORMAL[(module, name)](*args)`` returns the value that calling it would give, or ``NotImplemented`` if the arguments
are not of the usual form (the caller then keeps an ``Inert``). Only plain containers and numbers are made here; no
name is looked up.

Source: CPython 3.11 ``pickle.py``, ``copyreg.py``, ``Objects/*`` (``__reduce_ex__`` of the builtins).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from core.errors import CorruptError, UnsafeError
from core.pickle.inert import NO_STATE, Global, Inert, ObjectLeaf, Size, TensorLeaf

MAX_KEY_DEPTH = 8
MAX_KEY_ELEMENTS = 4096
MAX_EQUAL_HASHES = 64

Name = tuple[str, str]


class KeyGuard:
    """Decides which objects may be keys of a dict or members of a set.

    Hashing a tuple of shared tuples takes exponential time, hashing a deep one overflows the C stack, and keys chosen
    to have equal hashes make every insertion linear. So keys are scalars, names, records (hashed by identity) and
    small shallow tuples or frozensets of such.

    Source: docs/facts/safety.md 2.2 and 2.3.
    """

    __slots__ = ("_hashes",)

    def __init__(self) -> None:
        self._hashes: dict[int, int] = {}

    def check(self, key: object) -> None:
        """Returns if ``key`` may be hashed.

        Raises:
            CorruptError: a type that Python could not hash.
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
        if kind.__hash__ is object.__hash__:  # what a hook made
            return
        raise CorruptError(f"a dict key or set member is a {kind.__name__}")

    def _check_nested(self, key: Iterable[object]) -> None:
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
                self._count(hash(key))
                return
            level = below
        raise UnsafeError(f"a dict key is a tuple of more than {MAX_KEY_DEPTH} levels or {MAX_KEY_ELEMENTS} elements")

    def _count(self, value: int) -> None:
        n_equal = self._hashes.get(value, 0) + 1
        self._hashes[value] = n_equal
        if n_equal > MAX_EQUAL_HASHES and n_equal > 0.1 * len(self._hashes):
            raise UnsafeError("many dict keys have the same hash")


PLAIN_KEYS = frozenset({str, bool, float, bytes, type(None), Inert, Global, TensorLeaf, ObjectLeaf})
"""Types of keys that need no look at the value. (``str`` and ``bytes`` hash with a secret seed.)"""


def _bytes(*args: object) -> object:
    return b"" if not args else NotImplemented


def _complex(*args: object) -> object:
    if len(args) == 2 and all(type(part) in (int, float) for part in args):
        return complex(args[0], args[1])  # type: ignore[call-overload]
    return NotImplemented


def is_harmless_form(fn: object, args: tuple[object, ...]) -> bool:
    """Return whether a call of a function that must not be called with any arguments has a form that does no harm.

    ``typing.List[int]`` and ``int | None`` make types, ``iter([1, 2])`` an iterator over a plain container, and
    ``functools.partial(f)`` calls nothing; what it binds is judged by ``core.pickle.uses.uses_by_state``.
    """
    form = _FORMS.get(fn) if type(fn) is Global else None
    return form is not None and form(args)


def has_harmless_forms(fn: Global) -> bool:
    """Return whether a function does harm or none depending on how it is called."""
    return fn in _FORMS


def is_partial(value: object) -> bool:
    """Return whether a value is a ``functools.partial`` as Python pickles it."""
    return type(value) is Inert and value.fn == PARTIAL and value.how == "reduce" and _is_of_function(value.args)


def is_plain_iterator(value: object) -> bool:
    """Return whether a value is an iterator over a plain container."""
    return type(value) is Inert and value.fn in _ITERATORS and _is_of_container(value.args)


def _is_of_type(args: tuple[object, ...]) -> bool:
    return len(args) == 2 and type(args[0]) is Global and args[0].module in ("typing", "typing_extensions")


def _is_union(args: tuple[object, ...]) -> bool:
    return len(args) == 2 and args[0] == _OR and type(args[1]) is tuple and all(map(_is_type, args[1]))


def _is_type(value: object) -> bool:
    if type(value) is Inert:
        return value.fn == _ALIAS or (value.how == "reduce" and value.fn == _GETITEM and _is_of_type(value.args))
    return type(value) is Global or value is None


def _is_of_function(args: tuple[object, ...]) -> bool:
    return len(args) == 1 and type(args[0]) in (Global, Inert)


def _is_of_container(args: tuple[object, ...]) -> bool:
    if len(args) != 1:
        return False
    return type(args[0]) in _PLAIN or (type(args[0]) is Inert and args[0].fn == _RANGE and args[0].state is NO_STATE)


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


def normal_forms(
    guard: KeyGuard, named: Callable[[str, str], Global], folds: set[bool], count_copies: Callable[[int], None]
) -> dict[Name, Callable[..., object]]:
    """The table of normalisations for one load.

    Args:
        guard: checks set members.
        named: the load's one ``Global`` of a module and a name.
        folds: gets True when ``getattr`` makes a longer name, False when it is called in another way.
        count_copies: told how many bytes at least would spell out the argument that is copied; it refuses too many.
    """

    def a_size(*args: object) -> object:
        if len(args) == 1 and type(args[0]) is tuple:
            return args[0]
        if len(args) == 1 and type(args[0]) is list:
            count_copies(len(args[0]))
            return tuple(args[0])
        return () if not args else NotImplemented

    def encoded(*args: object) -> object:
        """Bytes, as protocols 0 to 2 spell them."""
        if len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1", "iso-8859-1"):
            count_copies(len(args[0]))
            return args[0].encode("latin-1")
        return NotImplemented

    def a_bytearray(*args: object) -> object:
        if not args:
            return bytearray()
        if len(args) == 1 and type(args[0]) is bytes:
            count_copies(len(args[0]))
            return bytearray(args[0])
        if len(args) == 2 and type(args[0]) is str and args[1] in ("latin-1", "latin1"):
            count_copies(len(args[0]))
            return bytearray(args[0].encode("latin-1"))
        return NotImplemented

    def a_set(*args: object) -> object:
        if len(args) > 1 or (args and type(args[0]) not in (list, tuple)):
            return NotImplemented
        members: list[object] = list(args[0]) if args else []  # type: ignore[call-overload]
        count_copies(2 * len(members))
        for member in members:
            guard.check(member)
        return set(members)

    def a_frozenset(*args: object) -> object:
        made = a_set(*args)
        return made if made is NotImplemented else frozenset(made)  # type: ignore[call-overload]

    def an_attribute(*args: object) -> object:
        """``getattr(module.Class, "name")`` is a longer name (enums of Python 3.11, nested classes)."""
        if len(args) == 2 and type(args[0]) is Global and type(args[1]) is str:
            if len(args[0].name) + len(args[1]) > MAX_NAME:
                raise UnsafeError(f"the name of a global is longer than {MAX_NAME} characters")
            folds.add(True)
            return named(args[0].module, f"{args[0].name}.{args[1]}")
        folds.add(False)
        return NotImplemented

    def a_type(*args: object) -> object:
        """``type(None)``, as pickles of annotations have it."""
        return named("types", "NoneType") if args == (None,) else NotImplemented

    def a_harmless_form(fn: Global) -> Callable[..., object]:
        return lambda *args: Inert("reduce", fn, args) if is_harmless_form(fn, args) else NotImplemented

    def an_ordered_dict(*args: object) -> object:
        """An empty inert OrderedDict, or one of a list of pairs (as Python 2 wrote it)."""
        made = Inert("reduce", named("collections", "OrderedDict"))
        if not args:
            return made
        if len(args) == 1 and type(args[0]) is list and all(type(p) in (list, tuple) and len(p) == 2 for p in args[0]):
            count_copies(4 * len(args[0]))
            for pair in args[0]:
                guard.check(pair[0])
            made.entries = [(pair[0], pair[1]) for pair in args[0]]
            return made
        return NotImplemented

    return {
        ("torch", "Size"): a_size,
        ("_codecs", "encode"): encoded,
        ("builtins", "bytes"): _bytes,
        ("builtins", "bytearray"): a_bytearray,
        ("builtins", "complex"): _complex,
        ("builtins", "set"): a_set,
        ("builtins", "frozenset"): a_frozenset,
        ("builtins", "getattr"): an_attribute,
        ("builtins", "type"): a_type,
        **{(fn.module, fn.name): a_harmless_form(fn) for fn in _FORMS},
        ("collections", "OrderedDict"): an_ordered_dict,
    }


GETATTR = Global("builtins", "getattr")
MAX_NAME = 4096
"""Characters of a global's name."""
