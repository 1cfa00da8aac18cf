"""What is no tensor, compared: arguments, settings, counters, random states, configurations.

Values are inert trees (``core.pickle.inert``); nothing in them is run. Two of them are equal if they hold the same: a
list and a tuple of equal parts are, as are a dict and an OrderedDict, 1 and 1.0, NaN and NaN, a member of an
enumeration and its value. Each difference is told with the
path that leads to it (``args.lr``, ``optimizer.param_groups.0.betas.1``). Nothing recurses, shared parts are compared
once, and the work is bounded: trees of hostile files may be anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from core.errors import CapacityError
from core.pickle.inert import NO_STATE, Global, Inert, ObjectLeaf, Persistent, TensorLeaf, as_mapping
from core.pickle.key_text import text_of

MAX_PAIRS = 5_000_000
"""Most pairs of values that are compared; a checkpoint of 10⁵ parameters has about as many."""
MAX_FOUND = 100_000
"""Most differences that are told."""
_TEXT = 60
_LONG = 16
_MAX_NAME = 300
_MAX_PATH = 2000

SameTensors = Callable[[str, str], str | None]
"""Compares the tensors of two leaves, by their keys; None if they are equal, else how they differ."""


@dataclass(frozen=True, slots=True)
class EntryDiff:
    """An entry that differs.

    Args:
        path: of the entry.
        kind: ``only_a``, ``only_b`` or ``changed``.
        a, b: the values as short texts; None where there is none.
    """

    path: str
    kind: str
    a: str | None = None
    b: str | None = None


_Pair = tuple[str, object, object]
"""A path, and what is there in A and in B."""


class _Absent:
    """The type of ``_ABSENT``."""

    __slots__ = ()


_ABSENT = _Absent()


def entry_diffs(
    a: Mapping[str, object], b: Mapping[str, object], *, same_tensors: SameTensors
) -> tuple[list[EntryDiff], int]:
    """Compares the entries of two checkpoints.

    Args:
        a, b: inert values by name.
        same_tensors: compares tensors that stand in them.

    Returns:
        What differs, in A's order, and the number of values that were compared.

    Raises:
        CapacityError: there are too many.
    """
    found: list[EntryDiff] = []
    seen: set[tuple[int, int]] = set()
    n_pairs = n_leaves = 0
    stack: list[Iterator[_Pair]] = [iter([("", a, b)])]
    while stack and len(found) < MAX_FOUND:
        pair = next(stack[-1], None)
        if pair is None:
            stack.pop()
            continue
        path, one, other = pair
        n_pairs += 1
        if n_pairs > MAX_PAIRS:
            raise CapacityError(
                f"more than {MAX_PAIRS} values that are no tensors are not compared",
                hint="leave them out: --tensors-only",
            )
        inside = None if one is _ABSENT or other is _ABSENT else _parts(one, other)
        if inside is None:
            n_leaves += 1
            entry = _entry(path, one, other, same_tensors)
            if entry is not None:
                found.append(entry)
        elif (id(one), id(other)) not in seen:
            seen.add((id(one), id(other)))
            stack.append(_below(path, inside))
    if stack:
        found.append(EntryDiff("…", "changed", f"more than {MAX_FOUND} entries", "not compared any further"))
    return found, n_leaves


def _entry(path: str, one: object, other: object, same_tensors: SameTensors) -> EntryDiff | None:
    """How two values without parts differ, or None."""
    if one is _ABSENT or other is _ABSENT:
        return EntryDiff(path, "only_b" if one is _ABSENT else "only_a", _shown(one), _shown(other))
    difference = _difference(one, other, same_tensors)
    return None if difference is None else EntryDiff(path, "changed", *difference)


def _below(path: str, inside: Iterator[_Pair]) -> Iterator[_Pair]:
    """The parts with their whole paths; very long ones are cut, and then shared by all that is below."""
    for name, one, other in inside:
        yield path if len(path) > _MAX_PATH else f"{path}.{name}" if path else name, one, other


def _parts(one: object, other: object) -> Iterator[tuple[str, object, object]] | None:
    """(name, part of A, part of B) of two containers of one kind; None if they are not."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return None if _are_numbers(one) and _are_numbers(other) else _of_sequences(one, other)
    if _enum_value(one) is not one and _enum_value(other) is not other:
        return None
    fields, others = _fields(one), _fields(other)
    if fields is None or others is None or _class_of(one) != _class_of(other):
        return None
    return _of_fields(fields, others)


def _are_numbers(values: list[object] | tuple[object, ...]) -> bool:
    """Whether a sequence is a long one of numbers (random states), which is one value."""
    return len(values) > _LONG and all(map(_is_number, values))


def _of_sequences(
    one: list[object] | tuple[object, ...], other: list[object] | tuple[object, ...]
) -> Iterator[tuple[str, object, object]]:
    for at in range(max(len(one), len(other))):
        yield str(at), one[at] if at < len(one) else _ABSENT, other[at] if at < len(other) else _ABSENT


def _of_fields(one: dict[object, object], other: dict[object, object]) -> Iterator[tuple[str, object, object]]:
    one, other = _by_text(one), _by_text(other)
    for name in one:
        yield _name(name), one[name], other.get(name, _ABSENT)
    for name in other:
        if name not in one:
            yield _name(name), _ABSENT, other[name]


def _by_text(fields: dict[object, object]) -> dict[object, object]:
    """Return the fields under the texts of their keys where those are objects, of which two are never equal."""
    if not any(map(_is_object, fields)):
        return fields
    named: dict[object, object] = {}
    count: Counter[str] = Counter()
    for key, part in fields.items():
        name = key
        if _is_object(key):
            text = text_of(key)
            count[text] += 1
            name = text if count[text] == 1 else f"{text}~{count[text]}"
        named[name] = part
    return named


def _fields(value: object) -> dict[object, object] | None:
    """What is inside a dict or an object, by name; None for what has no names inside."""
    mapping = as_mapping(value)
    if mapping is not None:
        return mapping
    if not isinstance(value, Inert):
        return None
    fields: dict[object, object] = {f"[{at}]": part for at, part in enumerate((*value.args, *value.items))}
    fields.update(value.kwargs or {})
    if isinstance(value.state, dict):
        fields.update(value.state)
    elif value.state is not NO_STATE:
        fields["[state]"] = value.state
    return fields


def _is_object(key: object) -> bool:
    return isinstance(key, Inert) or (isinstance(key, tuple) and any(isinstance(part, Inert) for part in key))


def _class_of(value: object) -> str:
    return "dict" if as_mapping(value) is not None else value.class_name if isinstance(value, Inert) else ""


def _name(key: object) -> str:
    """A key as a part of a path."""
    if isinstance(key, str):
        return key if len(key) <= _MAX_NAME else f"{key[:_MAX_NAME]}…"
    return str(_shown(key)) if isinstance(key, (int, float, Global)) else f"<{_kind(key)}>"


def _difference(one: object, other: object, same_tensors: SameTensors) -> tuple[str, str] | None:
    """Both values as texts if they differ."""
    if isinstance(one, TensorLeaf) and isinstance(other, TensorLeaf):
        text = same_tensors(one.key, other.key)
        return None if text is None else ("a tensor", text)
    if _equal(one, other):
        return None
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        n = sum(not _equal(x, y) for x, y in zip(one, other, strict=True))
        return None if n == 0 else (f"{len(one)} numbers", f"{n} of them differ")
    a, b = _shown(one), _shown(other)
    assert a is not None and b is not None
    if a == b and _kind(one) != _kind(other):
        a, b = f"{a} ({_kind(one)})", f"{b} ({_kind(other)})"
    elif a == b:
        b = f"another {b}"
    return a, b


def _equal(one: object, other: object) -> bool:
    one, other = _enum_value(one), _enum_value(other)
    if _is_number(one) and _is_number(other):
        return one == other or (one != one and other != other)
    if type(one) is not type(other):
        return False
    if isinstance(one, (str, bytes, bytearray, bool, Global, ObjectLeaf, set, frozenset, type(None), complex)):
        return bool(one == other)
    if isinstance(one, Persistent) and isinstance(other, Persistent):
        return one is other or _equal(one.value, other.value)
    return one is other


def _enum_value(value: object) -> object:
    """The value of what looks like a member of an enumeration: a class called with one number or text."""
    if isinstance(value, Inert) and len(value.args) == 1 and isinstance(value.args[0], (int, str)):
        if not (value.kwargs or value.items or value.entries) and value.state is NO_STATE:
            return value.args[0]
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: object) -> str | None:
    """A short text for a value; never long to make, whatever the value is."""
    if value is _ABSENT:
        return None
    if isinstance(value, str):
        return repr(value) if len(value) <= _TEXT else f"{value[: _TEXT - 20]!r}… ({len(value)} characters)"
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if value.bit_length() < 256 else f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, float, complex, Global)):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        if len(value) <= 8 and not isinstance(value, dict) and all(_is_number(part) for part in value):
            return f"[{', '.join(str(_shown(part)) for part in value)}]"
        return f"{type(value).__name__} of {len(value)}"
    return _kind(value)


def _kind(value: object) -> str:
    if isinstance(value, TensorLeaf):
        return "a tensor"
    if not isinstance(value, Inert):
        return type(value).__name__
    inside = _enum_value(value)
    return f"{value.class_name}({_shown(inside)})" if inside is not value else value.class_name
