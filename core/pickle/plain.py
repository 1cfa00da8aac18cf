"""Convert any inert value to plain containers, and back.

``to_plain`` writes what only a pickle can express (records, names, tuples, sets, keys that are not
strings) as dicts whose first key begins with ``$``. The result can be read by
``torch.load(weights_only=True)``, and by people::

    Namespace(lr=0.1, kind=Kind.a)   {"$new": {"$global": ["argparse", "Namespace"]}, "args": [],
                                      "state": {"lr": 0.1, "kind": {"$global": ["mine", "Kind.a"]}}}
    (1, {2: b"x"})                   {"$tuple": [1, {"$dict": [[2, b"x"]]}]}

None, bool, int, float, str, bytes, tensor leaves, lists, and dicts whose keys are strings without a
leading ``$`` remain as they are. Shared parts stay shared, so the result is never much larger than
the value. Nothing recurses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from core.errors import CheckpointingException, CorruptError, UnsupportedError
from core.pickle.inert import NO_STATE, Global, Inert, ObjectLeaf, Persistent, Size, TensorLeaf
from core.pickle.reduce import KeyGuard

_T = TypeVar("_T")

_SAME = frozenset({type(None), bool, float, str, bytes, TensorLeaf})
"""Types whose values remain as they are."""
_MAX_PLAIN_BITS = 2032
"""Integers of fewer bits fit in LONG1, the only opcode of long integers that weights_only reads."""
_MAX_HEX_DIGITS = 2 * 4096 + 1
"""Digits, with the sign, of the longest integer that is read back."""
_TAGS = {"reduce": "$call", "newobj": "$new", "newobj_ex": "$new_ex"}
"""``how`` of an inert object → its tag."""
_HOWS = {tag: how for how, tag in _TAGS.items()}


def to_plain(value: object) -> object:
    """Convert an inert value to plain containers.

    Raises:
        UnsupportedError: the value contains itself.
        TypeError: the value contains an object that is not inert.
    """
    return _convert(
        value,
        _parts,
        _to_plain,
        error=UnsupportedError(
            "an object contains itself, and only a pickle of its class can store such an object",
            hint="drop the object with --exclude, or write a torch file without --weights-only",
        ),
    )


def from_plain(value: object) -> object:
    """Convert the result of ``to_plain`` back to the inert value.

    Raises:
        CorruptError: ``value`` is not a result of ``to_plain``.
        UnsafeError: hashing a dict key or set member could take long.
    """
    guard = KeyGuard()
    return _convert(
        value,
        _plain_parts,
        lambda node, result_of: _from_plain(node, result_of, guard),
        error=CorruptError("an object contains itself"),
    )


_ResultOf = Callable[[object], Any]
"""Returns the result for a part of a node."""


def _convert(
    root: object,
    parts_of: Callable[[object], Iterable[object]],
    convert: Callable[[object, _ResultOf], object],
    *,
    error: CheckpointingException,
) -> object:
    """Convert a tree from its leaves to its root, each object once, without recursion.

    Args:
        parts_of: returns the parts of a node, which are converted before the node.
        convert: converts a node; its second argument returns the result for a part of the node.
        error: raised if an object contains itself.
    """
    # id → (the node, kept so that no other object gets its id; the result)
    done: dict[int, tuple[object, object]] = {}
    # Nodes that wait for their parts.
    open_ids: set[int] = set()
    stack: list[tuple[object, bool]] = [(root, False)]
    while stack:
        node, are_parts_done = stack.pop()
        if id(node) in done:
            continue
        # The second visit, after the parts: convert the node.
        if are_parts_done:
            done[id(node)] = (node, convert(node, lambda part: done[id(part)][1]))
            open_ids.discard(id(node))
            continue
        # The first visit: push the node again, below its parts. A part that waits already is a
        # container around the node.
        parts = [part for part in parts_of(node) if id(part) not in done]
        if any(id(part) in open_ids or part is node for part in parts):
            raise error
        if parts:
            open_ids.add(id(node))
        stack.append((node, True))
        stack += [(part, False) for part in reversed(parts)]
    return done[id(root)][1]


def _parts(node: object) -> list[object]:
    """Return the direct parts of an inert value."""
    if isinstance(node, dict):
        return [*node, *node.values()]
    if isinstance(node, (list, tuple, set, frozenset)):
        return list(node)
    if isinstance(node, Persistent):
        return [node.value]
    if not isinstance(node, Inert):
        return []
    parts = [node.fn, *node.args, *node.items, *(part for entry in node.entries for part in entry)]
    if node.state is not NO_STATE:
        parts.append(node.state)
    return parts + list((node.kwargs or {}).values())


def _to_plain(node: Any, result_of: _ResultOf) -> object:
    """Convert one node, after its parts, to a plain value.

    Raises:
        TypeError: the node is not an inert value.
    """
    kind = type(node)
    if kind in _SAME:
        return node
    convert = _TO_PLAIN.get(kind)
    if convert is None:
        raise TypeError(f"a {kind.__name__} is not an inert value")
    return convert(node, result_of)


def _dict_to_plain(node: dict[object, object], result_of: _ResultOf) -> object:
    """Convert a dict: to a dict if its keys allow that, else to a list of pairs."""
    if all(type(key) is str and not key.startswith("$") for key in node):
        return {key: result_of(item) for key, item in node.items()}
    return {"$dict": [[result_of(key), result_of(item)] for key, item in node.items()]}


def _set_to_plain(node: set[object] | frozenset[object], result_of: _ResultOf) -> object:
    """Convert a set, with its members in an order that is the same in every run."""
    return {f"${type(node).__name__}": [result_of(item) for item in sorted(node, key=_sort_key)]}


def _inert_to_plain(node: Inert, result_of: _ResultOf) -> dict[str, object]:
    """Convert a record: its function or class under the tag, then whatever else it has."""
    plain: dict[str, object] = {
        _TAGS[node.how]: result_of(node.fn),
        "args": [result_of(item) for item in node.args],
    }
    if node.kwargs is not None:
        plain["kwargs"] = [[key, result_of(item)] for key, item in node.kwargs.items()]
    if node.state is not NO_STATE:
        plain["state"] = result_of(node.state)
    if node.items:
        plain["items"] = [result_of(item) for item in node.items]
    if node.entries:
        plain["entries"] = [[result_of(key), result_of(item)] for key, item in node.entries]
    return plain


_TO_PLAIN: dict[type, Callable[[Any, _ResultOf], object]] = {
    int: lambda node, result_of: (
        node if node.bit_length() < _MAX_PLAIN_BITS else {"$int": f"{node:x}"}
    ),
    list: lambda node, result_of: [result_of(item) for item in node],
    dict: _dict_to_plain,
    tuple: lambda node, result_of: {"$tuple": [result_of(item) for item in node]},
    Size: lambda node, result_of: {"$size": list(node)},
    set: _set_to_plain,
    frozenset: _set_to_plain,
    Global: lambda node, result_of: {"$global": [node.module, node.name]},
    Inert: _inert_to_plain,
    complex: lambda node, result_of: {"$complex": [node.real, node.imag]},
    bytearray: lambda node, result_of: {"$bytearray": bytes(node)},
    Persistent: lambda node, result_of: {"$persistent": result_of(node.value)},
    ObjectLeaf: lambda node, result_of: {"$object": node.key},
}
"""Type of an inert value → the function that converts it."""


def _sort_key(member: object, levels: int = 3) -> str:
    """Return a text by which to sort the members of a set, independent of memory addresses."""
    if isinstance(member, (tuple, frozenset)):
        texts = [_sort_key(item, levels) for item in member]
        return f"{type(member).__name__}{sorted(texts) if isinstance(member, frozenset) else texts}"
    if isinstance(member, Inert):
        texts = [_sort_key(item, levels - 1) for item in member.args[:8]] if levels else []
        return f"{member.class_name}{texts}"
    if isinstance(member, (list, dict, set)):
        return type(member).__name__
    return f"{type(member).__name__} {member!r}"


def _plain_parts(node: object) -> Iterable[object]:
    """Return the direct parts of a plain value; the keys of its dicts are strings, not parts."""
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _from_plain(node: Any, result_of: _ResultOf, guard: KeyGuard) -> object:
    """Convert one plain node, after its parts, back to an inert value.

    Raises:
        CorruptError: a node of another type, or a malformed dict with a ``$`` key.
        UnsafeError: hashing a dict key or set member could take long.
    """
    kind = type(node)
    if kind in (*_SAME, int):
        return node
    if kind is list:
        return [result_of(item) for item in node]
    if kind is not dict:
        raise CorruptError(f"a plain value contains a {kind.__name__}, which is not allowed")
    # A dict whose first key begins with "$" represents another value; any other dict is a dict.
    content = {key: result_of(item) for key, item in node.items()}
    tag = next(iter(node), "")
    if type(tag) is not str or not tag.startswith("$"):
        return content
    try:
        if tag in _HOWS:
            record = Inert(_HOWS[tag], content[tag], tuple(_of_type(content["args"], list)))
            if "kwargs" in content:
                record.kwargs = {str(key): item for key, item in _pairs_of(content["kwargs"])}
            if "state" in content:
                record.state = content["state"]
            record.items = _of_type(content.get("items", []), list)
            record.entries = _pairs_of(content.get("entries", []))
            return record
        (argument,) = content.values()
        return _FROM_TAG[tag](argument, guard)
    except (KeyError, ValueError, TypeError, AttributeError) as err:
        raise CorruptError(f"malformed value under tag {tag[:40]!r}") from err


def _of_type(value: object, kind: type[_T]) -> _T:
    """Return a value that must be of exactly this type.

    Raises:
        ValueError: the value is of another type.
    """
    if type(value) is not kind:
        raise ValueError(f"not a {kind.__name__}")
    return value


def _pairs_of(value: object) -> list[tuple[object, object]]:
    """Convert a list of lists of two to tuples."""
    pairs: list[Any] = _of_type(value, list)
    return [(key, item) for key, item in pairs]


def _dict(value: object, guard: KeyGuard) -> dict[object, object]:
    """Build a dict from a list of pairs."""
    pairs = _pairs_of(value)
    for key, _ in pairs:
        guard.check(key)
    return dict(pairs)


def _set(value: object, guard: KeyGuard) -> set[object]:
    """Build a set from a list."""
    members = _of_type(value, list)
    for member in members:
        guard.check(member)
    return set(members)


def _global(value: object, guard: KeyGuard) -> Global:
    """Build a name from a list of module and name."""
    module, name = _of_type(value, list)
    return Global(_of_type(module, str), _of_type(name, str))


def _long(value: object, guard: KeyGuard) -> int:
    """Parse an integer from hexadecimal digits, of which a hostile file may have any number."""
    digits = _of_type(value, str)
    if len(digits) > _MAX_HEX_DIGITS:
        raise ValueError("too many digits")
    return int(digits, 16)


def _complex(value: object, guard: KeyGuard) -> complex:
    """Build a complex number from a list of real and imaginary part."""
    real, imaginary = _of_type(value, list)
    return complex(_of_type(real, float), _of_type(imaginary, float))


_FROM_TAG: dict[str, Callable[[Any, KeyGuard], object]] = {
    "$dict": _dict,
    "$tuple": lambda value, guard: tuple(_of_type(value, list)),
    "$size": lambda value, guard: Size(_of_type(extent, int) for extent in _of_type(value, list)),
    "$set": _set,
    "$frozenset": lambda value, guard: frozenset(_set(value, guard)),
    "$global": _global,
    "$int": _long,
    "$complex": _complex,
    "$bytearray": lambda value, guard: bytearray(_of_type(value, bytes)),
    "$persistent": lambda value, guard: Persistent(value),
    "$object": lambda value, guard: ObjectLeaf(_of_type(value, str)),
}
"""Tag → the function that builds the value from the tag's argument; a malformed one is an error."""
