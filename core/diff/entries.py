"""Compare what is not a tensor: arguments, settings, counters, random states, configurations.

Values are inert trees (``core.pickle.inert``); nothing in them is run. Two values are equal if they
hold the same: a list and a tuple of equal parts are, as are a dict and an OrderedDict, 1 and 1.0,
NaN and NaN, a member of an enumeration and its value. Each difference is reported with the path
that leads to it (``args.lr``, ``optimizer.param_groups.0.betas.1``). Nothing recurses, shared parts
are compared once, and the work is bounded: trees of hostile files may be anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

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
from core.pickle.key_text import text_of

MAX_PAIRS = 5_000_000
"""Maximum number of pairs to compare; a checkpoint of 10⁵ parameters has about as many."""
MAX_FOUND = 100_000
"""Maximum number of differences to report."""
_TEXT = 60
_LONG = 16
_MAX_NAME = 300
_MAX_PATH = 2000

SameTensors = Callable[[str, str], str | None]
"""A function that returns how two tensors differ, by their keys, or None."""


@dataclass(frozen=True, slots=True)
class EntryDiff:
    """An entry that differs.

    Args:
        path: path of the entry.
        kind: ``only_a``, ``only_b`` or ``changed``.
        a, b: the values in A and in B as short texts; None where one has none.
    """

    path: str
    kind: str
    a: str | None = None
    b: str | None = None


_Pair = tuple[str, object, object]
"""A path, and the values there in A and in B."""


class _Absent:
    """The type of ``_ABSENT``."""

    __slots__ = ()


_ABSENT = _Absent()


def entry_diffs(
    a: Mapping[str, object], b: Mapping[str, object], *, same_tensors: SameTensors
) -> tuple[list[EntryDiff], int]:
    """Compare the entries of two checkpoints.

    Args:
        a, b: inert values by name.
        same_tensors: compares tensors inside the values.

    Returns:
        The entries that differ, in A's order, and the number of values that were compared.

    Raises:
        CapacityError: there are more than ``MAX_PAIRS`` values.
    """
    diffs: list[EntryDiff] = []
    visited: set[tuple[int, int]] = set()
    n_pairs = n_leaves = 0
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
                f"more than {MAX_PAIRS:,} values beside the tensors, too many to compare",
                hint="compare only the tensors: --tensors-only",
            )
        parts = None if first is _ABSENT or second is _ABSENT else _parts(first, second)
        if parts is None:
            n_leaves += 1
            entry = _entry(path, first, second, same_tensors)
            if entry is not None:
                diffs.append(entry)
        elif (id(first), id(second)) not in visited:
            visited.add((id(first), id(second)))
            stack.append(_below(path, parts))
    if stack:
        diffs.append(
            EntryDiff("…", "changed", f"more than {MAX_FOUND:,} entries", "comparison stopped here")
        )
    return diffs, n_leaves


def _entry(path: str, a: object, b: object, same_tensors: SameTensors) -> EntryDiff | None:
    """Return how two values without parts differ, or None if they do not."""
    if a is _ABSENT or b is _ABSENT:
        return EntryDiff(
            path, "only_b" if a is _ABSENT else "only_a", _value_text(a), _value_text(b)
        )
    difference = _difference(a, b, same_tensors)
    return None if difference is None else EntryDiff(path, "changed", *difference)


def _below(path: str, parts: Iterator[_Pair]) -> Iterator[_Pair]:
    """Yield the parts with their whole paths.

    Very long paths are cut, and then shared by everything below them.
    """
    for name, a, b in parts:
        yield path if len(path) > _MAX_PATH else f"{path}.{name}" if path else name, a, b


def _parts(a: object, b: object) -> Iterator[tuple[str, object, object]] | None:
    """Return (name, part of A, part of B) of two containers of one kind, or None."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return None if _are_numbers(a) and _are_numbers(b) else _of_sequences(a, b)
    if _enum_value(a) is not a and _enum_value(b) is not b:
        return None
    fields_a, fields_b = _fields(a), _fields(b)
    if fields_a is None or fields_b is None or _class_of(a) != _class_of(b):
        return None
    return _of_fields(fields_a, fields_b)


def _are_numbers(values: list[object] | tuple[object, ...]) -> bool:
    """Return whether a sequence is long and of numbers, such as a random state: one value."""
    return len(values) > _LONG and all(map(_is_number, values))


def _of_sequences(
    a: list[object] | tuple[object, ...], b: list[object] | tuple[object, ...]
) -> Iterator[tuple[str, object, object]]:
    """Yield (index, item of A, item of B) of two sequences."""
    for at in range(max(len(a), len(b))):
        yield str(at), a[at] if at < len(a) else _ABSENT, b[at] if at < len(b) else _ABSENT


def _of_fields(
    a: dict[object, object], b: dict[object, object]
) -> Iterator[tuple[str, object, object]]:
    """Yield (name, field of A, field of B) of two mappings or objects."""
    a, b = _by_text(a), _by_text(b)
    for name in a:
        yield _name(name), a[name], b.get(name, _ABSENT)
    for name in b:
        if name not in a:
            yield _name(name), _ABSENT, b[name]


def _by_text(fields: dict[object, object]) -> dict[object, object]:
    """Return the fields with texts in place of keys that are objects, which never compare equal."""
    if not any(map(_is_object, fields)):
        return fields
    result: dict[object, object] = {}
    count: Counter[str] = Counter()
    for key, part in fields.items():
        name = key
        if _is_object(key):
            text = text_of(key)
            count[text] += 1
            name = text if count[text] == 1 else f"{text}~{count[text]}"
        result[name] = part
    return result


def _fields(value: object) -> dict[object, object] | None:
    """Return what is inside a dict or an object by name, or None for any other value."""
    mapping = as_mapping(value)
    if mapping is not None:
        return mapping
    if not isinstance(value, Inert):
        return None
    fields: dict[object, object] = {
        f"[{at}]": part for at, part in enumerate((*value.args, *value.items))
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
    """Return the class that two values must share to be compared part by part."""
    return (
        "dict"
        if as_mapping(value) is not None
        else value.class_name
        if isinstance(value, Inert)
        else ""
    )


def _name(key: object) -> str:
    """Return a key as a part of a path."""
    if isinstance(key, str):
        return key if len(key) <= _MAX_NAME else f"{key[:_MAX_NAME]}…"
    return str(_value_text(key)) if isinstance(key, (int, float, Global)) else f"<{_kind(key)}>"


def _difference(a: object, b: object, same_tensors: SameTensors) -> tuple[str, str] | None:
    """Return both values as texts if they differ, else None."""
    if isinstance(a, TensorLeaf) and isinstance(b, TensorLeaf):
        text = same_tensors(a.key, b.key)
        return None if text is None else ("a tensor", text)
    if _equal(a, b):
        return None
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        n = sum(not _equal(x, y) for x, y in zip(a, b, strict=True))
        return None if n == 0 else (f"{len(a)} numbers", f"{n} of them differ")
    text_a, text_b = _value_text(a), _value_text(b)
    assert text_a is not None and text_b is not None
    if text_a == text_b and _kind(a) != _kind(b):
        return f"{text_a} ({_kind(a)})", f"{text_b} ({_kind(b)})"
    return text_a, f"another {text_b}" if text_a == text_b else text_b


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
    """Return the value of what looks like a member of an enumeration, or any other value unchanged.

    Such a member is a class that is called with one number or text.
    """
    if isinstance(value, Inert) and len(value.args) == 1 and isinstance(value.args[0], (int, str)):
        if not (value.kwargs or value.items or value.entries) and value.state is NO_STATE:
            return value.args[0]
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _value_text(value: object) -> str | None:
    """Return a short text for a value; making it is never long work, whatever the value is."""
    if value is _ABSENT:
        return None
    if isinstance(value, str):
        return (
            repr(value)
            if len(value) <= _TEXT
            else f"{value[: _TEXT - 20]!r}… ({len(value)} characters)"
        )
    if isinstance(value, int) and not isinstance(value, bool):
        return (
            str(value) if value.bit_length() < 256 else f"an integer of {value.bit_length()} bits"
        )
    if value is None or isinstance(value, (bool, float, complex, Global)):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        if (
            len(value) <= 8
            and not isinstance(value, dict)
            and all(_is_number(part) for part in value)
        ):
            return f"[{', '.join(str(_value_text(part)) for part in value)}]"
        return f"{type(value).__name__} of {len(value)}"
    return _kind(value)


def _kind(value: object) -> str:
    """Return the name of a value's type, or of the class of an object."""
    if isinstance(value, TensorLeaf):
        return "a tensor"
    if not isinstance(value, Inert):
        return type(value).__name__
    member = _enum_value(value)
    return f"{value.class_name}({_value_text(member)})" if member is not value else value.class_name
