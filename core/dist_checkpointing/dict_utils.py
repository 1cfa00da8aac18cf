"""Walks over nested dicts and lists; every other value, tuples included, is a leaf.

The documented names of ``megatron.core.dist_checkpointing.dict_utils``. A *path* (called ``prefix`` or ``key`` in the
signatures) is the tuple of dict keys and list indices that leads to a value.

Source: megatron-core 0.12.1 and 0.16.1; the two differ from it in that lists of unequal types or lengths are reported
by ``diff`` with their paths.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

Path = tuple[Any, ...]
Tree = Any
"""A dict or a list, nested; a leaf where a function says that it takes one."""

_MAX_SHOWN = 30


def extract_matching_values(
    x: dict[Any, Any] | list[Any], predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[Tree, Tree]:
    """The leaves that match and those that do not, as two trees of the same nesting.

    A container stays in the first tree if something in it matched, in the second if something did not or if it was
    empty. An empty container within a list is itself shown to the predicate.

    Args:
        x: the tree; not changed.
        predicate: says whether a leaf matches.
        return_lists_as_dicts: lists become dicts from the original index to the value, so that the places are not lost.

    Raises:
        ValueError: ``x`` is neither a dict nor a list.
    """
    if not isinstance(x, dict | list):
        raise ValueError(f"expected a dict or a list, got {type(x).__name__}")
    is_dict = isinstance(x, dict)
    matching: dict[Any, Any] = {}
    others: dict[Any, Any] = {}
    for key, value in x.items() if is_dict else enumerate(x):  # type: ignore[union-attr]
        if isinstance(value, dict | list) and (value or is_dict):
            inner, rest = extract_matching_values(value, predicate, return_lists_as_dicts)
            if inner:
                matching[key] = inner
            if rest or not value:
                others[key] = rest
        else:
            (matching if predicate(value) else others)[key] = value
    if is_dict or return_lists_as_dicts:
        return matching, others
    return list(matching.values()), list(others.values())


def diff(x1: Any, x2: Any, prefix: Path = ()) -> tuple[list[Any], list[Any], list[Any]]:
    """What differs between two trees; tuples and numpy arrays are walked like lists.

    Objects with a ``replica_id`` (sharded tensors and the like) are compared by their ``data``.

    Args:
        x1, x2: the trees.
        prefix: path of both, put before every path that is reported.

    Returns:
        Paths only in ``x1``, paths only in ``x2``, and mismatches: tuples (path, type in ``x1``, type in ``x2``), for
        tensors of one shape followed by the number of unequal elements, the shape and the unequal indices, for others
        by both shapes.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        left = [(*prefix, key) for key in x1 if key not in x2]
        right = [(*prefix, key) for key in x2 if key not in x1]
        return _diff_of_items(((key, x1[key], x2[key]) for key in x1 if key in x2), prefix, (left, right, []))
    if _is_row(x1) and _is_row(x2) and type(x1) is type(x2):
        left = [(*prefix, index) for index in range(len(x2), len(x1))]
        right = [(*prefix, index) for index in range(len(x1), len(x2))]
        pairs = enumerate(zip(x1, x2, strict=False))
        return _diff_of_items(((index, v1, v2) for index, (v1, v2) in pairs), prefix, (left, right, []))
    if isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor):
        return [], [], _diff_of_tensors(x1, x2, prefix)
    if hasattr(x1, "replica_id") and type(x1) is type(x2):
        return diff(x1.data, x2.data, (*prefix, type(x1)))
    return [], [], [(prefix, type(x1), type(x2))] if _is_unequal(x1, x2) else []


def _is_row(x: Any) -> bool:
    """Whether a value has elements to be walked: an array without axes has none."""
    return isinstance(x, list | tuple) or (isinstance(x, np.ndarray) and x.ndim > 0)


def _diff_of_items(
    items: Iterable[tuple[Any, Any, Any]], prefix: Path, found: tuple[list[Any], list[Any], list[Any]]
) -> tuple[list[Any], list[Any], list[Any]]:
    for key, v1, v2 in items:
        for whole, part in zip(found, diff(v1, v2, (*prefix, key)), strict=True):
            whole.extend(part)
    return found


def _diff_of_tensors(x1: torch.Tensor, x2: torch.Tensor, prefix: Path) -> list[Any]:
    kinds = (prefix, type(x1), type(x2))
    try:
        unequal = (x1 != x2) if x1.device == x2.device else (x1.cpu() != x2.cpu())
        if not bool(unequal.any()):
            return []
        return [(*kinds, unequal.sum(), unequal.shape, unequal.nonzero().tolist())]
    except (RuntimeError, TypeError, ValueError):  # shapes that do not broadcast, dtypes without a comparison
        return [(*kinds, x1.shape, x2.shape)]


def _is_unequal(x1: Any, x2: Any) -> bool:
    try:
        return bool(x1 != x2)
    except (RuntimeError, TypeError, ValueError):
        return True


def inspect_types(x: Any, prefix: Path = (), indent: int = 4) -> None:
    """Writes a tree to the standard output: one line for each key or index, with the type and the value of a leaf.

    Args:
        x: the tree or leaf.
        prefix: path of ``x``; its length is the depth that lines begin at.
        indent: spaces for each level.
    """
    sys.stdout.write("".join(_type_lines(x, len(prefix) * indent, indent)))


def _type_lines(x: Any, depth: int, indent: int) -> Iterator[str]:
    if not isinstance(x, dict | list):
        yield f"{_described(x)}\n"
        return
    yield "\n"
    mark, items = (">", x.items()) if isinstance(x, dict) else ("-", enumerate(x))
    for key, value in items:
        yield f"{' ' * depth}{mark} {key}: "
        yield from _type_lines(value, depth + indent, indent)


def _described(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"Tensor of shape {x.shape}"
    try:
        text = str(x)
    except Exception:  # whatever somebody's __str__ raises
        text = "<no string repr>"
    return f"[{type(x)}]: {text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + '... (truncated)'}"


def nested_values(x: dict[Any, Any] | list[Any]) -> Iterator[Any]:
    """The leaves of a tree, in its order."""
    for value in x.values() if isinstance(x, dict) else x:
        if isinstance(value, dict | list):
            yield from nested_values(value)
        else:
            yield value


def nested_items_iter(x: dict[Any, Any] | list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """(container, key or index, leaf) for the leaves of a tree, in its order; the container may be assigned to."""
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(value, dict | list):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


def dict_map(f: Callable[[Any], Any], d: dict[Any, Any]) -> None:
    """Replaces every leaf by ``f(leaf)``, in place."""
    for container, key, value in nested_items_iter(d):
        container[key] = f(value)


def dict_map_with_key(f: Callable[[Any, Any], Any], d: dict[Any, Any]) -> None:
    """Replaces every leaf by ``f(key, leaf)``, in place; the key is the innermost one."""
    for container, key, value in nested_items_iter(d):
        container[key] = f(key, value)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """``x`` with every leaf replaced by ``f(leaf)``, its containers the same objects; ``f(x)`` for a leaf.

    What ``f`` returns is not walked, so it may be a container.
    """
    if isinstance(x, dict):
        for key, value in x.items():
            x[key] = dict_list_map_inplace(f, value)
    elif isinstance(x, list):
        x[:] = [dict_list_map_inplace(f, value) for value in x]
    else:
        return f(x)
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """A new tree of plain dicts and lists, with ``f(leaf)`` for every leaf of ``x``."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def merge(x1: Tree, x2: Tree, key: Path = ()) -> Tree:
    """``x1``, to which everything of ``x2`` was added in place: new keys of dicts; lists element by element.

    Args:
        x1, x2: the trees, which have no leaf in common.
        key: path of both, for errors.

    Raises:
        ValueError: a path has a leaf in both or different kinds of containers, or lists differ in length.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for name, value in x2.items():
            x1[name] = merge(x1[name], value, key=(*key, name)) if name in x1 else value
        return x1
    if isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise ValueError(f"lists of {len(x1)} and {len(x2)} elements cannot be merged, at {key}")
        x1[:] = [merge(v1, v2, key=(*key, index)) for index, (v1, v2) in enumerate(zip(x1, x2, strict=True))]
        return x1
    raise ValueError(f"values {x1!r} and {x2!r} are no two dicts or two lists, so they cannot be merged, at {key}")


def map_reduce(
    xs: Iterable[Any],
    key_fn: Callable[[Any], Any] = lambda x: x,
    value_fn: Callable[[Any], Any] = lambda x: x,
    reduce_fn: Callable[[list[Any]], Any] = lambda x: x,
) -> dict[Any, Any]:
    """``reduce_fn`` of the lists of ``value_fn(x)`` by ``key_fn(x)``, keys in the order in which they first appear."""
    groups: dict[Any, list[Any]] = {}
    for x in xs:
        groups.setdefault(key_fn(x), []).append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}
