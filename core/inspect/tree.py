"""The tree of a checkpoint's tensors, with repeated layers folded into one.

Siblings whose names are numbers (``0`` … ``31``, or ``weight0`` … ``weight7``) fold if everything below them has equal
names, dtypes and shapes. A chain of containers with one entry each becomes one node (``decoder.layers.[0-3]``).
A sibling with another name but equal content (``exp_avg_sq`` beside ``exp_avg``) says so instead of repeating it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from core.arrays.box import Shape
from core.catalog.catalog import TensorMeta
from core.catalog.key_patterns import ranges
from core.pickle.reader import gc_paused

MAX_DEPTH = 48
"""Keys with more components keep the rest in one name; bounds the recursion whatever a file says."""

_NUMBERED = re.compile(r"(.*?)(0|[1-9]\d{0,8})")
_MIN_SUFFIXED = 4  # fewer equal siblings such as w1, w2, w3 are different things
_MIN_REPEATED = 3  # tensors below a node that is worth saying "as its sibling" of


@dataclass(frozen=True, slots=True)
class Node:
    """One line of the tree.

    Args:
        label: name, or dot-joined names, relative to the parent; numbers that were folded stand in brackets.
        n_alike: how many equal subtrees the node stands for, below one instance of its parent.
        n_tensors, n_elements, n_bytes: of all ``n_alike`` subtrees together, below one instance of the parent.
        dtype, shape: of the tensor, where the node is one; else None.
        children: what is below one instance of the node.
        same_as: label of an earlier sibling with equal content; None if there is none or it is small.
    """

    label: str
    n_alike: int
    n_tensors: int
    n_elements: int
    n_bytes: int
    dtype: str | None = None
    shape: Shape | None = None
    children: tuple[Node, ...] = ()
    same_as: str | None = None


@dataclass(slots=True)
class _Branch:
    """A name under construction."""

    below: dict[str, _Branch] = field(default_factory=dict)
    meta: TensorMeta | None = None


def components(key: str) -> list[str]:
    """The parts of a key between dots; a dot written ``\\.`` does not separate. At most ``MAX_DEPTH`` parts."""
    if "\\" not in key:
        return key.split(".", MAX_DEPTH - 1)
    return re.split(r"(?<!\\)\.", key, maxsplit=MAX_DEPTH - 1)


@gc_paused()
def tree_of(
    tensors: Iterable[TensorMeta], *, split: Callable[[str], list[str]] = components, folds_roots: bool = False
) -> tuple[Node, ...]:
    """The folded tree of some tensors.

    Args:
        split: key → the names on its path.
        folds_roots: equal nodes of the first level fold whatever their names are (rank directories).

    Returns:
        The nodes of the first level, in order of first appearance.
    """
    root = _Branch()
    for meta in tensors:
        branch = root
        for name in split(meta.key):
            found = branch.below.get(name)
            if found is None:
                found = branch.below[name] = _Branch()
            branch = found
        branch.meta = meta
    return _Folder().children_of(root, folds_any=folds_roots)


class _Folder:
    """Makes nodes bottom-up. Every distinct content gets a number and one node, so that equal subtrees cost nothing."""

    def __init__(self) -> None:
        self._number_of: dict[object, int] = {}
        self._nodes: list[Node] = []

    def children_of(self, branch: _Branch, *, folds_any: bool = False) -> tuple[Node, ...]:
        """The nodes below ``branch``."""
        return self._named_all(self._shown(branch, folds_any=folds_any), is_root=folds_any)

    def _named_all(self, shown: list[tuple[str, int, int]], *, is_root: bool = False) -> tuple[Node, ...]:
        """The nodes of what ``_shown`` found, told apart from their equals."""
        first: dict[tuple[int, int], str] = {}
        nodes = []
        for label, n, content in shown:
            node = _named(self._nodes[content], label, n, is_root=is_root)
            earlier = first.setdefault((n, content), node.label)
            if earlier != node.label and node.n_tensors >= _MIN_REPEATED:
                node = replace(node, same_as=earlier)
            nodes.append(node)
        return tuple(nodes)

    def _shown(self, branch: _Branch, *, folds_any: bool = False) -> list[tuple[str, int, int]]:
        """(label, number of names, content) of what is below ``branch``, in order of first appearance."""
        names = list(branch.below)
        alike: dict[tuple[str, int], list[int]] = {}
        for place, (name, below) in enumerate(branch.below.items()):
            found = _NUMBERED.fullmatch(name) if name[-1:].isdigit() else None  # most names end in a letter
            stem = "" if folds_any else found[1] if found else f"{name}."
            alike.setdefault((stem, self._content(below)), []).append(place)
        shown: list[tuple[int, str, int, int]] = []
        for (stem, content), places in alike.items():
            if len(places) == 1 or (stem and len(places) < _MIN_SUFFIXED):
                shown += [(place, names[place], 1, content) for place in places]
            elif folds_any:
                shown.append((places[0], _listed([names[place] for place in places]), len(places), content))
            else:
                numbers = ranges(int(names[place][len(stem) :]) for place in places)
                shown.append((places[0], f"{stem}[{numbers}]", len(places), content))
        return [(label, n, content) for _, label, n, content in sorted(shown)]

    def _content(self, branch: _Branch) -> int:
        """The number of a branch's content; its node, without a label, is in ``_nodes``."""
        shown = self._shown(branch) if branch.below else []
        meta = branch.meta
        signature = (None if meta is None else (meta.dtype, meta.shape), tuple(shown))
        number = self._number_of.setdefault(signature, len(self._nodes))
        if number == len(self._nodes):
            children = self._named_all(shown)
            self._nodes.append(
                Node(
                    label="",
                    n_alike=1,
                    n_tensors=sum(child.n_tensors for child in children) + (meta is not None),
                    n_elements=sum(child.n_elements for child in children) + (meta.n_elements if meta else 0),
                    n_bytes=sum(child.n_bytes for child in children) + (meta.n_bytes if meta else 0),
                    dtype=meta.dtype if meta else None,
                    shape=meta.shape if meta else None,
                    children=children,
                )
            )
        return number


def _named(node: Node, label: str, n_alike: int, *, is_root: bool = False) -> Node:
    """The node under its label, ``n_alike`` times, joined with its only child where it has one."""
    named = replace(
        node,
        label=label,
        n_alike=n_alike,
        n_tensors=node.n_tensors * n_alike,
        n_elements=node.n_elements * n_alike,
        n_bytes=node.n_bytes * n_alike,
    )
    if is_root or named.dtype is not None or len(named.children) != 1:
        return named
    (child,) = named.children
    return replace(
        named,
        label=f"{label}.{child.label}",
        n_alike=n_alike * child.n_alike,
        dtype=child.dtype,
        shape=child.shape,
        children=child.children,
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 3 else (names[0], "…", names[-1]))
