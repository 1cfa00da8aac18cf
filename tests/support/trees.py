"""State dicts compared as whole trees: what differs, by path, and whether a summary tells it.

A tree is what ``torch.load`` returns. Nothing here imports the project.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which a result differs from its source.

    Args:
        path: of the source's entry, dot-joined; "" for the root.
        kind: ``missing``, ``added``, ``moved`` (it stands at the root, under its path), ``wrapped``
            (the root stands in a dict), ``key`` (the key is of another type), ``type``, ``grad``,
            ``value``, ``attributes``, ``order``, ``alias`` (tensors share bytes on one side only)
            or ``shared`` (the same of containers).
        text: what differs.
    """

    path: str
    kind: str
    text: str = ""


def differences(source: Any, result: Any) -> list[Difference]:
    """Return what differs between two trees: types, keys and their order, values bit for bit,
    aliases.
    """
    comparison = _Comparison(result)
    listed = list(comparison.root(source, result))
    return [
        *listed,
        *_sharing(comparison.tensors, "alias", _first_byte),
        *_sharing(comparison.containers, "shared", id),
    ]


_GENERAL = {
    "moved": "nested tensors are stored under dotted names",
    "wrapped": "the root is not a dict",
    "order": "nested tensors are stored under dotted names",
}
"""Kind → what a note says that is about all such entries and need not name them."""


_SUBJECTS = {
    "key": "non-string keys are converted to strings",
    "alias": "tied tensors",
    "shared": "become separate copies",
    "grad": "requires_grad",
}
"""Kind → what a note says that names the first entries of the kind, and then how many more there
are.
"""


def is_told(difference: Difference, texts: Iterable[str]) -> bool:
    """Return whether notes and dropped lines of a summary tell a difference.

    They name its path or one above it, or they are about all entries of its kind, or about more
    than they name.
    """
    parts = difference.path.split(".")
    names = (
        ["the root", "value"]
        if not difference.path
        else [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    )
    general = _GENERAL.get(difference.kind)
    subject = _SUBJECTS.get(difference.kind, f"{difference.text.split(' ')[0]} becomes")
    return any(
        (general is not None and general in text)
        or any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w)", text) for name in names)
        or (re.search(r" and [\d,]+ more$", text) and subject in text)
        for text in texts
    )


class _Comparison:
    """One run of ``differences``; the result's root is where flattened tensors stand.

    Attributes:
        tensors, containers: path of each pair, what is there in the source, and in the result.
    """

    def __init__(self, root: Any) -> None:
        self._root: Mapping[Any, Any] = root if isinstance(root, Mapping) else {}
        self._seen: set[tuple[int, int]] = set()
        self._moved: set[str] = set()
        self.tensors: list[tuple[str, Any, Any]] = []
        self.containers: list[tuple[str, Any, Any]] = []

    def root(self, first: Any, other: Any) -> Iterator[Difference]:
        if not isinstance(first, Mapping) and isinstance(other, dict) and "value" in other:
            yield Difference("", "wrapped")
            yield from self._pair(first, other["value"], ("value",))
            return
        yield from self._pair(first, other, ())
        if isinstance(other, Mapping):
            keys = {str(key) for key in first} if isinstance(first, Mapping) else set()
            for key in other:
                if str(key) not in keys | self._moved:
                    yield Difference(str(key), "added")

    def _pair(self, first: Any, other: Any, path: Path) -> Iterator[Difference]:
        name = ".".join(map(str, path))
        if isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor):
            self.tensors.append((name, first, other))
        elif isinstance(first, (Mapping, list, set)) and first:
            self.containers.append((name, first, other))
        if isinstance(first, (Mapping, list, tuple)):
            if (id(first), id(other)) in self._seen:
                return
            self._seen.add((id(first), id(other)))
        if type(first) is not type(other):
            yield Difference(name, "type", f"{type(first).__name__} is {type(other).__name__}")
        if isinstance(first, torch.Tensor):
            yield from _tensor_differences(name, first, other)
        elif isinstance(first, Mapping):
            yield from self._mappings(first, other if isinstance(other, Mapping) else {}, path)
            yield from self._attributes(first, getattr(other, "__dict__", {}), path)
        elif isinstance(first, (list, tuple)):
            yield from self._sequences(
                first, other if isinstance(other, (list, tuple)) else (), path
            )
        elif not _equal(first, other):
            yield Difference(name, "value", f"{first!r:.60} is {other!r:.60}")

    def _mappings(
        self, first: Mapping[Any, Any], other: Mapping[Any, Any], path: Path
    ) -> Iterator[Difference]:
        own = {_typed(key): key for key in other}
        order = []
        for key, item in first.items():
            match = own.pop(_typed(key), _ABSENT)
            if match is _ABSENT and not isinstance(key, str):
                match = own.pop(_typed(str(key)), _ABSENT)
                if match is not _ABSENT:
                    yield Difference(
                        ".".join(map(str, (*path, key))), "key", f"{type(key).__name__} is str"
                    )
            if match is _ABSENT:
                yield from self._elsewhere(item, (*path, key))
            else:
                order.append(match)
                yield from self._pair(item, other[match], (*path, key))
        if path:
            yield from (
                Difference(".".join(map(str, (*path, key))), "added") for key in own.values()
            )
        if [key for key in other if any(key is match for match in order)] != order:
            yield Difference(".".join(map(str, path)), "order")

    def _attributes(
        self, first: Mapping[Any, Any], attributes: Mapping[str, Any], path: Path
    ) -> Iterator[Difference]:
        """Those of a mapping, which may hold tensors."""
        for attribute, value in getattr(first, "__dict__", {}).items():
            at = (*path, attribute)
            if attribute in attributes:
                yield from self._pair(value, attributes[attribute], at)
            else:
                yield Difference(".".join(map(str, at)), "attributes", type(value).__name__)

    def _sequences(self, first: Any, other: Any, path: Path) -> Iterator[Difference]:
        for index, item in enumerate(first):
            at = (*path, index)
            is_placeholder = index < len(other) and other[index] is None
            if index >= len(other) or (
                is_placeholder and isinstance(item, (torch.Tensor, Mapping, list, tuple))
            ):
                yield from self._elsewhere(item, at)
            else:
                yield from self._pair(item, other[index], at)
        if len(other) > len(first):
            yield Difference(
                ".".join(map(str, path)), "added", f"{len(other) - len(first)} elements"
            )

    def _elsewhere(self, item: Any, path: Path) -> Iterator[Difference]:
        """What is not in its place: it stands at the root under its path, or is gone."""
        name = ".".join(map(str, path))
        if isinstance(item, torch.Tensor) and name in self._root:
            self._moved.add(name)
            yield Difference(name, "moved")
            yield from self._pair(item, self._root[name], path)
        elif isinstance(item, Mapping) and item:
            yield from self._attributes(item, {}, path)
            for key, below in item.items():
                yield from self._elsewhere(below, (*path, key))
        elif isinstance(item, (list, tuple)) and any(
            isinstance(part, (torch.Tensor, Mapping)) for part in item
        ):
            for index, below in enumerate(item):
                yield from self._elsewhere(below, (*path, index))
        else:
            yield Difference(name, "missing", type(item).__name__)


_ABSENT: Any = object()


def _typed(key: Any) -> Any:
    """A key by which 1, 1.0 and True are told apart, and numpy's scalars from Python's."""
    return type(key).__name__, key


def _tensor_differences(name: str, first: torch.Tensor, other: Any) -> Iterator[Difference]:
    if not isinstance(other, torch.Tensor):
        return
    if (first.dtype, first.shape) != (other.dtype, other.shape) or _bits(first) != _bits(other):
        yield Difference(
            name, "value", f"{first.dtype} {first.shape} is {other.dtype} {other.shape}"
        )
    if first.requires_grad != other.requires_grad:
        yield Difference(name, "grad", "requires_grad")


def _bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().contiguous()
    return b"" if not dense.numel() else dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def _equal(first: Any, other: Any) -> bool:
    if isinstance(first, np.ndarray):
        if not isinstance(other, np.ndarray) or (first.dtype, first.shape) != (
            other.dtype,
            other.shape,
        ):
            return False
        return (
            first.tolist() == other.tolist()
            if first.dtype.hasobject
            else first.tobytes() == other.tobytes()
        )
    if isinstance(first, float) and first != first:
        return isinstance(other, float) and other != other
    if (
        type(first) is type(other)
        and not isinstance(first, type)
        and getattr(first, "__dict__", None)
    ):
        return not differences(vars(first), vars(other))
    return bool(first == other)


def _sharing(pairs: list[tuple[str, Any, Any]], kind: str, identity: Any) -> Iterator[Difference]:
    """What is one on one side, and two on the other."""
    first_of: tuple[dict[Any, str], dict[Any, str]] = ({}, {})
    for name, *sides in pairs:
        groups = [
            first.setdefault(identity(side), name)
            for first, side in zip(first_of, sides, strict=True)
        ]
        if groups[0] != groups[1]:
            yield Difference(name, kind, f"with {groups[0]} is with {groups[1]}")


def _first_byte(tensor: torch.Tensor) -> Any:
    """The address of a tensor's bytes; one of its own for an empty tensor, which shares none."""
    return tensor.data_ptr() if tensor.numel() else object()
