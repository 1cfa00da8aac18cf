"""Compare entries that are not tensors: arguments, settings, counters, random states, configs.

Values are inert trees (``core.pickle.inert``); nothing in them is run. The content is compared, not
the type of its container: equal are a list and a tuple with equal items, a dict and an OrderedDict,
1 and 1.0, NaN and NaN, a member of an enumeration and its value. Each difference is reported with
its path (``args.lr``, ``optimizer.param_groups.0.betas.1``).

The trees may come from hostile files, so nothing recurses, shared nodes are compared once, and the
number of comparisons is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest

from core.errors import CapacityError
from core.pickle.inert import (
    NO_STATE,
    Global,
    Inert,
    ObjectLeaf,
    Persistent,
    TensorLeaf,
    as_mapping,
)
from core.pickle.key_text import describe_key
from core.values import dataclass

MAX_PAIRS = 5_000_000
"""Maximum number of pairs to compare; a checkpoint of 10⁵ parameters has about as many."""
MAX_FOUND = 100_000
"""Maximum number of differences to report."""
_TEXT = 60
"""Maximum number of characters of a string in a report."""
_LONG = 16
"""Sequences of more numbers are compared as one value, not item by item."""
_MAX_NAME = 300
_MAX_PATH = 2000
"""Maximum numbers of characters of a name in a path, and of a path."""

SameTensors = Callable[[str, str], str | None]
"""A function that gets a key in A and one in B; returns how these tensors differ, or None."""


@dataclass(frozen=True, slots=True)
class EntryDiff:
    """An entry that differs.

    Args:
        path: path of the entry.
        kind: ``only_a``, ``only_b`` or ``changed``.
        a, b: the values in A and in B as short texts; None on the side that lacks the entry.
    """

    path: str
    kind: str
    a: str | None = None
    b: str | None = None


_Pair = tuple[str, object, object]
"""A name or path, and its values in A and in B."""


class _Absent:
    """The type of ``_ABSENT``."""

    __slots__ = ()


_ABSENT = _Absent()
"""The value on the side that lacks an entry."""


def entry_diffs(
    a: Mapping[str, object], b: Mapping[str, object], *, same_tensors: SameTensors
) -> tuple[list[EntryDiff], int]:
    """Compare the entries of two checkpoints.

    Args:
        a, b: inert values by name.
        same_tensors: compares tensors inside the values.

    Returns:
        The entries that differ, in A's order, at most ``MAX_FOUND`` and a last one that reports the
        limit; and the number of values without parts that were compared.

    Raises:
        CapacityError: there are more than ``MAX_PAIRS`` values.
        CheckpointingException: ``same_tensors`` cannot read a tensor.
    """
    diffs: list[EntryDiff] = []
    visited: set[tuple[int, int]] = set()
    n_pairs = n_leaves = 0
    # A stack of iterators instead of recursion: hostile trees may be deeper than Python's stack.
    stack: list[Iterator[_Pair]] = [iter([("", a, b)])]
    while stack and len(diffs) < MAX_FOUND:
        pair = next(stack[-1], None)
        if pair is None:
            stack.pop()
            continue
        path, first, second = pair
        n_pairs += 1
        if n_pairs > MAX_PAIRS:
            raise CapacityError(
                f"more than {MAX_PAIRS:,} values besides the tensors are too many to compare",
                hint="compare only the tensors: --tensors-only",
            )
        # Report values without parts; put the parts of others on the stack.
        parts = _parts(first, second)
        if parts is None:
            n_leaves += 1
            entry = _entry(path, first, second, same_tensors)
            if entry is not None:
                diffs.append(entry)
        elif (id(first), id(second)) not in visited:  # shared nodes once; containers may be cyclic
            visited.add((id(first), id(second)))
            stack.append(_below(path, parts))
    # A stack that is not empty means that the limit was reached.
    if stack:
        diffs.append(
            EntryDiff("…", "changed", f"more than {MAX_FOUND:,} entries", "comparison stopped here")
        )
    return diffs, n_leaves


def _entry(path: str, a: object, b: object, same_tensors: SameTensors) -> EntryDiff | None:
    """Compare two values without parts; return None if they are equal."""
    if a is _ABSENT:
        return EntryDiff(path, "only_b", b=shorten_value(b))
    if b is _ABSENT:
        return EntryDiff(path, "only_a", a=shorten_value(a))
    difference = _difference(a, b, same_tensors)
    return None if difference is None else EntryDiff(path, "changed", *difference)


def _below(path: str, parts: Iterator[_Pair]) -> Iterator[_Pair]:
    """Yield the parts with their complete paths.

    A very long path is not extended: all parts below it share it.
    """
    for name, a, b in parts:
        yield path if len(path) > _MAX_PATH else f"{path}.{name}" if path else name, a, b


def _parts(a: object, b: object) -> Iterator[_Pair] | None:
    """Match the parts of two containers of one kind by name; return None for other values."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        # Random states are sequences of hundreds of numbers, and interesting only as one value.
        if _are_many_numbers(a) and _are_many_numbers(b):
            return None
        items = enumerate(zip_longest(a, b, fillvalue=_ABSENT))
        return ((str(index), item_a, item_b) for index, (item_a, item_b) in items)
    if _enum_value(a) is not a and _enum_value(b) is not b:
        return None
    fields_a, fields_b = _fields(a), _fields(b)
    if fields_a is None or fields_b is None or _class_of(a) != _class_of(b):
        return None
    fields_a, fields_b = _by_text(fields_a), _by_text(fields_b)
    # A's names come first, and a name of both sides in A's form.
    return (
        (_name(name), fields_a.get(name, _ABSENT), fields_b.get(name, _ABSENT))
        for name in dict.fromkeys((*fields_a, *fields_b))
    )


def _are_many_numbers(values: list[object] | tuple[object, ...]) -> bool:
    """Return whether a sequence consists of more than ``_LONG`` numbers."""
    return len(values) > _LONG and all(map(_is_number, values))


def _by_text(fields: dict[object, object]) -> dict[object, object]:
    """Replace keys that are objects, which never compare equal, by texts."""
    if not any(map(_is_object, fields)):
        return fields
    result: dict[object, object] = {}
    count: Counter[str] = Counter()
    # Keys with equal texts get numbers, so that none is lost.
    for key, part in fields.items():
        name = key
        if _is_object(key):
            text = describe_key(key)
            count[text] += 1
            name = text if count[text] == 1 else f"{text}~{count[text]}"
        result[name] = part
    return result


def _fields(value: object) -> dict[object, object] | None:
    """Return the fields of a dict or an object by name, or None for any other value.

    The arguments and items of an object have the names ``[0]``, ``[1]`` …; a state that is not a
    dict has the name ``[state]``.
    """
    mapping = as_mapping(value)
    if mapping is not None:
        return mapping
    if not isinstance(value, Inert):
        return None
    fields: dict[object, object] = {
        f"[{index}]": part for index, part in enumerate((*value.args, *value.items))
    }
    fields.update(value.kwargs or {})
    if isinstance(value.state, dict):
        fields.update(value.state)
    elif value.state is not NO_STATE:
        fields["[state]"] = value.state
    return fields


def _is_object(key: object) -> bool:
    """Return whether a key of a mapping is an object, or a tuple with one."""
    return isinstance(key, Inert) or (
        isinstance(key, tuple) and any(isinstance(part, Inert) for part in key)
    )


def _class_of(value: object) -> str:
    """Return the class of a value; only values of one class are compared part by part."""
    if as_mapping(value) is not None:
        return "dict"
    return value.class_name if isinstance(value, Inert) else ""


def _name(key: object) -> str:
    """Return the text of a key in a path."""
    if isinstance(key, str):
        return key if len(key) <= _MAX_NAME else f"{key[:_MAX_NAME]}…"
    return shorten_value(key) if isinstance(key, (int, float, Global)) else f"<{_kind(key)}>"


def _difference(a: object, b: object, same_tensors: SameTensors) -> tuple[str, str] | None:
    """Return both values as texts if they differ, else None."""
    if isinstance(a, TensorLeaf) and isinstance(b, TensorLeaf):
        text = same_tensors(a.key, b.key)
        return None if text is None else ("a tensor", text)
    if _equal(a, b):
        return None
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        n_differing = sum(not _equal(x, y) for x, y in zip(a, b, strict=True))
        return (f"{len(a)} numbers", f"{n_differing} of them differ") if n_differing else None
    # Equal texts of different values need something that distinguishes them.
    text_a, text_b = shorten_value(a), shorten_value(b)
    if text_a != text_b:
        return text_a, text_b
    if _kind(a) != _kind(b):
        return f"{text_a} ({_kind(a)})", f"{text_b} ({_kind(b)})"
    return text_a, f"a different {text_b}"


def _equal(a: object, b: object) -> bool:
    """Return whether two values without named parts are equal."""
    a, b = _enum_value(a), _enum_value(b)
    if _is_number(a) and _is_number(b):
        return a == b or (a != a and b != b)
    if type(a) is not type(b):
        return False
    if isinstance(
        a, (str, bytes, bytearray, bool, Global, ObjectLeaf, set, frozenset, type(None), complex)
    ):
        return bool(a == b)
    if isinstance(a, Persistent) and isinstance(b, Persistent):
        return a is b or _equal(a.value, b.value)
    return a is b


def _enum_value(value: object) -> object:
    """Return the value of a member of an enumeration, or any other value unchanged.

    A member is pickled as its class, called with one number or string. The class is not imported,
    so other calls of this form count as members too.
    """
    if isinstance(value, Inert) and len(value.args) == 1 and isinstance(value.args[0], (int, str)):
        if not (value.kwargs or value.items or value.entries) and value.state is NO_STATE:
            return value.args[0]
    return value


def _is_number(value: object) -> bool:
    # bool is a subclass of int in Python, but True and 1 are different settings.
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shorten_value(value: object) -> str:
    """Return a short text for a value, in little time even for a huge value."""
    if value is None or isinstance(value, (bool, float, complex, Global)):
        return str(value)
    if isinstance(value, str):
        if len(value) <= _TEXT:
            return repr(value)
        return f"{value[: _TEXT - 20]!r}… ({len(value)} characters)"
    if isinstance(value, int):
        # Python takes quadratic time to print an integer, and a pickle may hold a huge one.
        n_bits = value.bit_length()
        return str(value) if n_bits < 256 else f"an integer of {n_bits} bits"
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    if isinstance(value, (list, tuple, set, frozenset)):
        if len(value) <= 8 and all(map(_is_number, value)):
            return f"[{', '.join(map(shorten_value, value))}]"
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return f"{type(value).__name__} of {len(value)}"
    return _kind(value)


def _kind(value: object) -> str:
    """Return the name of a value's type, or of the class of an object."""
    if isinstance(value, TensorLeaf):
        return "a tensor"
    if not isinstance(value, Inert):
        return type(value).__name__
    member = _enum_value(value)
    return (
        f"{value.class_name}({shorten_value(member)})" if member is not value else value.class_name
    )
