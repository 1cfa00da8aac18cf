"""Functions over nested dicts and lists; every other value, tuples included, is a leaf.

These are the documented names of ``megatron.core.dist_checkpointing.dict_utils``. A *path* (called
``prefix`` or ``key`` in the signatures) is the tuple of dict keys and list indices that leads to a
value.

Source: megatron-core 0.12.1 and 0.16.1. Unlike both, ``diff`` reports lists of unequal types or
lengths with their paths.
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
    x: dict[Any, Any] | list[Any],
    predicate: Callable[[Any], bool],
    return_lists_as_dicts: bool = False,
) -> tuple[Tree, Tree]:
    """Split a tree into the leaves that match and those that do not, both in the same nesting.

    A container appears in the first tree if a leaf in it matches, and in the second if a leaf in it
    does not match or it is empty. An empty container is passed to the predicate, like a leaf, only
    if it is an element of a list.

    Args:
        x: the tree; not changed.
        predicate: returns True for a matching leaf.
        return_lists_as_dicts: return a list as a dict from original index to value, which keeps the
            positions.

    Returns:
        The matching leaves, and all others.

    Raises:
        ValueError: ``x`` is neither a dict nor a list.
    """
    if not isinstance(x, dict | list):
        raise ValueError(f"expected a dict or a list, got {type(x).__name__}")
    is_dict = isinstance(x, dict)
    matching: dict[Any, Any] = {}
    remaining: dict[Any, Any] = {}
    for key, value in x.items() if is_dict else enumerate(x):  # type: ignore[union-attr]
        # Megatron-Core treats an empty container as a leaf in a list, but not in a dict.
        if isinstance(value, dict | list) and (value or is_dict):
            inner_matching, inner_remaining = extract_matching_values(
                value, predicate, return_lists_as_dicts
            )
            if inner_matching:
                matching[key] = inner_matching
            # Keep an empty container, because it is part of the state.
            if inner_remaining or not value:
                remaining[key] = inner_remaining
        else:
            (matching if predicate(value) else remaining)[key] = value
    if is_dict or return_lists_as_dicts:
        return matching, remaining
    return list(matching.values()), list(remaining.values())


def diff(x1: Any, x2: Any, prefix: Path = ()) -> tuple[list[Any], list[Any], list[Any]]:
    """Compare two trees; tuples and numpy arrays are compared element by element, like lists.

    Objects with a ``replica_id`` (sharded tensors and the like) are compared by their ``data``, and
    two ``MCoreTensorAwareStateDict`` by their attributes, which begin the paths.

    Args:
        x1, x2: the trees.
        prefix: path of both trees, prepended to every path in the result.

    Returns:
        Paths only in ``x1``, paths only in ``x2``, and mismatches. A mismatch is a tuple (path,
        type in ``x1``, type in ``x2``). For two tensors of one shape, the number of unequal
        elements, the shape and the unequal indices follow; for other pairs of tensors, both shapes
        follow.
    """
    # Containers of different types are compared as leaves, so that their path is reported.
    if isinstance(x1, dict) and isinstance(x2, dict):
        return _diff_items(x1, x2, prefix)
    if _is_sequence(x1) and _is_sequence(x2) and type(x1) is type(x2):
        return _diff_items(dict(enumerate(x1)), dict(enumerate(x2)), prefix)
    if hasattr(x1, "replica_id") and type(x1) is type(x2):
        return diff(x1.data, x2.data, (*prefix, type(x1)))
    if hasattr(x1, "pop_tensors") and type(x1) is type(x2):
        return _diff_items(vars(x1), vars(x2), prefix)
    return [], [], _diff_leaves(x1, x2, prefix)


def _is_sequence(x: Any) -> bool:
    """Return whether a value is compared element by element.

    A 0-d array is a leaf, because it cannot be iterated.
    """
    return isinstance(x, list | tuple) or (isinstance(x, np.ndarray) and x.ndim > 0)


def _diff_items(
    x1: dict[Any, Any], x2: dict[Any, Any], prefix: Path
) -> tuple[list[Any], list[Any], list[Any]]:
    """Compare two containers, given as dicts by key or index; the result is that of ``diff``."""
    only_left = [(*prefix, key) for key in x1 if key not in x2]
    only_right = [(*prefix, key) for key in x2 if key not in x1]
    mismatches: list[Any] = []
    # Append the paths further down, in the order of x1, to those of this level.
    for key, value in x1.items():
        if key in x2:
            lefts, rights, inner_mismatches = diff(value, x2[key], (*prefix, key))
            only_left += lefts
            only_right += rights
            mismatches += inner_mismatches
    return only_left, only_right, mismatches


def _diff_leaves(x1: Any, x2: Any, prefix: Path) -> list[Any]:
    """Return the mismatch of two leaves in a list; [] if they are equal."""
    kinds = (prefix, type(x1), type(x2))
    if not (isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor)):
        # Values that cannot be compared count as unequal.
        try:
            is_unequal = bool(x1 != x2)
        except (RuntimeError, TypeError, ValueError):
            is_unequal = True
        return [kinds] if is_unequal else []
    try:
        unequal = (x1 != x2) if x1.device == x2.device else (x1.cpu() != x2.cpu())
        if not bool(unequal.any()):
            return []
        return [(*kinds, unequal.sum(), unequal.shape, unequal.nonzero().tolist())]
    except (RuntimeError, TypeError, ValueError):
        # Shapes do not broadcast, or torch has no comparison for the dtypes.
        return [(*kinds, x1.shape, x2.shape)]


def inspect_types(x: Any, prefix: Path = (), indent: int = 4) -> None:
    """Print a tree to standard output, one line per key or index.

    The line of a leaf shows its type and the beginning of its value.

    Args:
        x: the tree or leaf.
        prefix: path of ``x``; its length is the depth at which the lines begin.
        indent: spaces per level.
    """
    sys.stdout.write("".join(_type_lines(x, len(prefix) * indent, indent)))


def _type_lines(x: Any, depth: int, indent: int) -> Iterator[str]:
    """Yield the text of a tree: a leaf's description, or a line per item, ``depth`` spaces in."""
    if not isinstance(x, dict | list):
        yield f"{_describe_leaf(x)}\n"
        return
    yield "\n"
    mark, items = (">", x.items()) if isinstance(x, dict) else ("-", enumerate(x))
    for key, value in items:
        yield f"{' ' * depth}{mark} {key}: "
        yield from _type_lines(value, depth + indent, indent)


def _describe_leaf(x: Any) -> str:
    """Return the type of a leaf and the beginning of its value; of a tensor, the shape."""
    if isinstance(x, torch.Tensor):
        return f"Tensor of shape {x.shape}"
    try:
        text = str(x)
    except Exception:  # a user's __str__ may raise anything
        text = "<no string repr>"
    return (
        f"[{type(x)}]: {text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + '... (truncated)'}"
    )


def nested_values(x: dict[Any, Any] | list[Any]) -> Iterator[Any]:
    """Yield the leaves of a tree, in its order."""
    for value in x.values() if isinstance(x, dict) else x:
        if isinstance(value, dict | list):
            yield from nested_values(value)
        else:
            yield value


def nested_items_iter(x: dict[Any, Any] | list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (container, key or index, leaf) for every leaf of a tree, in its order.

    The caller may assign to ``container[key]``.
    """
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(value, dict | list):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


def dict_map(f: Callable[[Any], Any], d: dict[Any, Any]) -> None:
    """Replace every leaf by ``f(leaf)``, in place."""
    for container, key, value in nested_items_iter(d):
        container[key] = f(value)


def dict_map_with_key(f: Callable[[Any, Any], Any], d: dict[Any, Any]) -> None:
    """Replace every leaf by ``f(key, leaf)``, in place; the key is the innermost one."""
    for container, key, value in nested_items_iter(d):
        container[key] = f(key, value)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace every leaf by ``f(leaf)``, in place, and return the tree.

    Return ``f(x)`` if ``x`` is itself a leaf. ``f`` may return containers; it is not applied to
    their leaves.
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
    """Return a new tree of plain dicts and lists, with ``f(leaf)`` for every leaf of ``x``."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def merge(x1: Tree, x2: Tree, key: Path = ()) -> Tree:
    """Add everything in ``x2`` to ``x1``, in place, and return ``x1``.

    Dicts are united key by key; lists of one length are merged element by element.

    Args:
        x1, x2: the trees, which have no path to a leaf in common.
        key: path of both trees, for error messages.

    Raises:
        ValueError: a path has a leaf in both trees or different kinds of containers, or lists
            differ in length.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for name, value in x2.items():
            x1[name] = merge(x1[name], value, key=(*key, name)) if name in x1 else value
        return x1
    if isinstance(x1, list) and isinstance(x2, list):
        # It is unknown which elements of lists of unequal lengths belong together.
        if len(x1) != len(x2):
            raise ValueError(f"cannot merge lists of {len(x1)} and {len(x2)} elements at {key}")
        x1[:] = [
            merge(v1, v2, key=(*key, index))
            for index, (v1, v2) in enumerate(zip(x1, x2, strict=True))
        ]
        return x1
    raise ValueError(f"cannot merge {x1!r} and {x2!r} at {key}: expected two dicts or two lists")


def map_reduce(
    xs: Iterable[Any],
    key_fn: Callable[[Any], Any] = lambda x: x,
    value_fn: Callable[[Any], Any] = lambda x: x,
    reduce_fn: Callable[[list[Any]], Any] = lambda x: x,
) -> dict[Any, Any]:
    """Group ``value_fn(x)`` by ``key_fn(x)`` and return ``reduce_fn`` of each group's list.

    The keys of the result are in the order of their first appearance.
    """
    groups: dict[Any, list[Any]] = {}
    for x in xs:
        groups.setdefault(key_fn(x), []).append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}
