"""Any inert value as plain containers, and back.

``to_plain`` spells what only a pickle can say (records, names, tuples, sets, keys that are no strings) as dicts with
one leading ``$`` key, so that ``torch.load(weights_only=True)`` reads the result, and people can::

    Namespace(lr=0.1, kind=Kind.a)   {"$new": {"$global": ["argparse", "Namespace"]}, "args": [],
                                      "state": {"lr": 0.1, "kind": {"$global": ["mine", "Kind.a"]}}}
    (1, {2: b"x"})                   {"$tuple": [1, {"$dict": [[2, b"x"]]}]}

None, bool, int, float, str, bytes, tensor leaves, lists, and dicts whose keys are strings without a leading ``$``,
stand for themselves. Parts that are shared stay shared, so the result is never much larger than the value. Nothing
recurses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from core.errors import CheckpointingException, CorruptError, UnsupportedError
from core.pickle.inert import NO_STATE, Global, Inert, ObjectLeaf, Persistent, Size, TensorLeaf
from core.pickle.reduce import KeyGuard

_SAME = frozenset({type(None), bool, float, str, bytes, TensorLeaf})
_MAX_PLAIN_BITS = 2032  # what LONG1, the longest integer that weights_only reads, holds for sure
_HOW = {"reduce": "$call", "newobj": "$new", "newobj_ex": "$new_ex"}
_HOW_OF = {tag: how for how, tag in _HOW.items()}


def to_plain(value: object) -> object:
    """``value`` in plain containers.

    Raises:
        UnsupportedError: it contains itself.
        TypeError: it contains something that is no inert value.
    """
    return _rebuilt(
        value,
        _parts,
        _to_plain,
        error=UnsupportedError(
            "an object contains itself, so it can only be kept in a pickle, under its class",
            hint="leave it out with --exclude, or write a torch file without --weights-only",
        ),
    )


def from_plain(value: object) -> object:
    """The value of which ``to_plain`` made ``value``.

    Raises:
        CorruptError: not a result of ``to_plain``.
        UnsafeError: a dict key or set member that takes long to hash.
    """
    guard = KeyGuard()
    return _rebuilt(
        value,
        _plain_parts,
        lambda node, made: _from_plain(node, made, guard),
        error=CorruptError("an object contains itself"),
    )


_Made = Callable[[object], Any]


def _rebuilt(
    root: object,
    parts_of: Callable[[object], Iterable[object]],
    make: Callable[[object, _Made], object],
    *,
    error: CheckpointingException,
) -> object:
    """``make(root, made)``, where ``made(part)`` is what became of a part; every object is made once.

    Args:
        error: is raised if an object contains itself.
    """
    done: dict[int, tuple[object, object]] = {}
    begun: set[int] = set()
    stack: list[tuple[object, bool]] = [(root, False)]
    while stack:
        node, is_ready = stack.pop()
        if id(node) in done:
            continue
        if is_ready:
            done[id(node)] = (node, make(node, lambda part: done[id(part)][1]))
            begun.discard(id(node))
            continue
        parts = [part for part in parts_of(node) if id(part) not in done]
        if any(id(part) in begun for part in parts) or any(part is node for part in parts):
            raise error
        if parts:
            begun.add(id(node))
        stack.append((node, True))
        stack += [(part, False) for part in reversed(parts)]
    return done[id(root)][1]


def _parts(node: object) -> list[object]:
    """What is directly below an inert value."""
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


def _to_plain(node: Any, made: _Made) -> object:
    kind = type(node)
    if kind in _SAME:
        return node
    if kind is int:
        return node if node.bit_length() < _MAX_PLAIN_BITS else {"$int": f"{node:x}"}
    if kind is list:
        return [made(item) for item in node]
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in node):
            return {key: made(item) for key, item in node.items()}
        return {"$dict": [[made(key), made(item)] for key, item in node.items()]}
    if kind is tuple:
        return {"$tuple": [made(item) for item in node]}
    if kind is Size:
        return {"$size": list(node)}
    if kind is set or kind is frozenset:
        return {f"${kind.__name__}": [made(item) for item in sorted(node, key=_order)]}
    if kind is Global:
        return {"$global": [node.module, node.name]}
    if kind is Inert:
        return _inert_to_plain(node, made)
    if kind is complex:
        return {"$complex": [node.real, node.imag]}
    if kind is bytearray:
        return {"$bytearray": bytes(node)}
    if kind is Persistent:
        return {"$persistent": made(node.value)}
    if kind is ObjectLeaf:
        return {"$object": node.key}
    raise TypeError(f"a {kind.__name__} is no inert value")


def _inert_to_plain(node: Inert, made: _Made) -> dict[str, object]:
    plain: dict[str, object] = {_HOW[node.how]: made(node.fn), "args": [made(item) for item in node.args]}
    if node.kwargs is not None:
        plain["kwargs"] = [[key, made(item)] for key, item in node.kwargs.items()]
    if node.state is not NO_STATE:
        plain["state"] = made(node.state)
    if node.items:
        plain["items"] = [made(item) for item in node.items]
    if node.entries:
        plain["entries"] = [[made(key), made(item)] for key, item in node.entries]
    return plain


def _order(member: object, levels: int = 3) -> str:
    """A text by which members of a set are sorted, whatever their addresses are."""
    if isinstance(member, (tuple, frozenset)):
        texts = [_order(item, levels) for item in member]
        return f"{type(member).__name__}{sorted(texts) if isinstance(member, frozenset) else texts}"
    if isinstance(member, Inert):
        return f"{member.class_name}{[_order(item, levels - 1) for item in member.args[:8]] if levels else []}"
    return f"{type(member).__name__} {member!r}" if not isinstance(member, (list, dict, set)) else type(member).__name__


def _plain_parts(node: object) -> Iterable[object]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _from_plain(node: Any, made: _Made, guard: KeyGuard) -> object:
    kind = type(node)
    if kind is list:
        return [made(item) for item in node]
    if kind is not dict:
        if kind in _SAME or kind is int:
            return node
        raise CorruptError(f"a plain value holds a {kind.__name__}")
    tag = next(iter(node), "")
    if type(tag) is not str or not tag.startswith("$"):
        return {key: made(item) for key, item in node.items()}
    content = {key: made(item) for key, item in node.items()}
    value = content[tag]
    try:
        if tag in _HOW_OF:
            return _inert_from_plain(_HOW_OF[tag], value, content)
        (only,) = content.values()
        return _FROM_TAG[tag](only, guard)
    except (KeyError, ValueError, TypeError, AttributeError) as err:
        raise CorruptError(f"a plain value is malformed at {tag[:40]!r}") from err


def _inert_from_plain(how: str, fn: object, content: dict[str, Any]) -> Inert:
    record = Inert(how, fn, tuple(_listed(content["args"])))
    if "kwargs" in content:
        record.kwargs = {str(key): item for key, item in _pairs(content["kwargs"])}
    if "state" in content:
        record.state = content["state"]
    record.items = _listed(content.get("items", []))
    record.entries = _pairs(content.get("entries", []))
    return record


def _listed(value: object) -> list[object]:
    if type(value) is not list:
        raise ValueError("not a list")
    return value


def _pairs(value: object) -> list[tuple[object, object]]:
    pairs: Any = _listed(value)
    return [(key, item) for key, item in pairs]


def _dict(value: object, guard: KeyGuard) -> dict[object, object]:
    pairs = _pairs(value)
    for key, _ in pairs:
        guard.check(key)
    return dict(pairs)


def _set(value: object, guard: KeyGuard) -> set[object]:
    members = _listed(value)
    for member in members:
        guard.check(member)
    return set(members)


def _global(value: object, guard: KeyGuard) -> Global:
    module, name = _listed(value)
    if type(module) is not str or type(name) is not str:
        raise ValueError("not a name")
    return Global(module, name)


def _long(value: object, guard: KeyGuard) -> int:
    if type(value) is not str or len(value) > 2 * 4096 + 1:
        raise ValueError("not an integer")
    return int(value, 16)


def _complex(value: object, guard: KeyGuard) -> complex:
    real, imaginary = _listed(value)
    if type(real) is not float or type(imaginary) is not float:
        raise ValueError("not numbers")
    return complex(real, imaginary)


def _bytearray(value: object, guard: KeyGuard) -> bytearray:
    if type(value) is not bytes:
        raise ValueError("not bytes")
    return bytearray(value)


def _size(value: object, guard: KeyGuard) -> Size:
    extents = _listed(value)
    if any(type(extent) is not int for extent in extents):
        raise ValueError("not a size")
    return Size(extents)  # type: ignore[arg-type]


def _object(value: object, guard: KeyGuard) -> ObjectLeaf:
    if type(value) is not str:
        raise ValueError("not a key")
    return ObjectLeaf(value)


_FROM_TAG: dict[str, Callable[[Any, KeyGuard], object]] = {
    "$dict": _dict,
    "$tuple": lambda value, guard: tuple(_listed(value)),
    "$size": _size,
    "$set": _set,
    "$frozenset": lambda value, guard: frozenset(_set(value, guard)),
    "$global": _global,
    "$int": _long,
    "$complex": _complex,
    "$bytearray": _bytearray,
    "$persistent": lambda value, guard: Persistent(value),
    "$object": _object,
}
