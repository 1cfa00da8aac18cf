"""Build the tree of a checkpoint's tensors, with repeated layers folded into one.

Siblings whose names are numbers (``0`` … ``31``, or ``weight0`` … ``weight7``) fold if everything
below them has equal names, dtypes and shapes. A chain of containers with one entry each becomes one
node (``decoder.layers.[0-3]``). A sibling with another name but equal content (``exp_avg_sq``
beside ``exp_avg``) refers to it instead of repeating it.
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
"""Keys with more components keep the rest in one name, which bounds the recursion."""

_NUMBERED = re.compile(r"(.*?)(0|[1-9]\d{0,8})")
_MIN_SUFFIXED = 4  # fewer equal siblings such as w1, w2, w3 are different things
_MIN_REPEATED = 3  # tensors below a node that is worth a reference to an equal sibling


@dataclass(frozen=True, slots=True)
class Node:
    """One line of the tree.

    Args:
        label: name, or dot-joined names, relative to the parent; folded numbers are in brackets.
        n_alike: how many equal subtrees the node stands for, below one instance of its parent.
        n_tensors, n_elements, n_bytes: totals of all ``n_alike`` subtrees, below one instance of
            the parent.
        dtype, shape: dtype and shape of the tensor, where the node is one; else None.
        children: the nodes below one instance of the node.
        same_as: label of an earlier sibling with equal content; None if there is none or it is
            small.
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
class _NameBranch:
    """A name of the tree under construction, with the names below it."""

    below: dict[str, _NameBranch] = field(default_factory=dict)
    meta: TensorMeta | None = None


def components(key: str) -> list[str]:
    r"""Return the parts of a key between dots, at most ``MAX_DEPTH``.

    A dot written ``\\.`` does not separate parts.
    """
    if "\\" not in key:
        return key.split(".", MAX_DEPTH - 1)
    return re.split(r"(?<!\\)\.", key, maxsplit=MAX_DEPTH - 1)


@gc_paused()
def tree_of(
    tensors: Iterable[TensorMeta],
    *,
    split: Callable[[str], list[str]] = components,
    folds_roots: bool = False,
) -> tuple[Node, ...]:
    """Return the folded tree of some tensors.

    Args:
        split: returns the names on a key's path.
        folds_roots: equal nodes of the first level fold whatever their names are (rank
        directories).

    Returns:
        The nodes of the first level, in order of first appearance.
    """
    root = _NameBranch()
    for meta in tensors:
        branch = root
        for name in split(meta.key):
            child = branch.below.get(name)
            if child is None:
                child = branch.below[name] = _NameBranch()
            branch = child
        branch.meta = meta
    return _TreeFolder().children_of(root, folds_any=folds_roots)


class _TreeFolder:
    """Makes nodes from the bottom up.

    Every distinct content gets a number and one node, so that equal subtrees cost nothing.
    """

    def __init__(self) -> None:
        self._number_of: dict[object, int] = {}
        self._nodes: list[Node] = []

    def children_of(self, branch: _NameBranch, *, folds_any: bool = False) -> tuple[Node, ...]:
        """Return the nodes below ``branch``."""
        return self._named_all(self._folded_groups(branch, folds_any=folds_any), is_root=folds_any)

    def _named_all(
        self, groups: list[tuple[str, int, int]], *, is_root: bool = False
    ) -> tuple[Node, ...]:
        """Return the nodes of folded groups, with references to equal siblings."""
        first: dict[tuple[int, int], str] = {}
        nodes = []
        for label, n, content in groups:
            node = _named(self._nodes[content], label, n, is_root=is_root)
            earlier = first.setdefault((n, content), node.label)
            if earlier != node.label and node.n_tensors >= _MIN_REPEATED:
                node = replace(node, same_as=earlier)
            nodes.append(node)
        return tuple(nodes)

    def _folded_groups(
        self, branch: _NameBranch, *, folds_any: bool = False
    ) -> list[tuple[str, int, int]]:
        """Return (label, number of names, content) of what is below ``branch``, in order."""
        # Group the names that may fold: equal stems before a number, with equal content.
        names = list(branch.below)
        alike: dict[tuple[str, int], list[int]] = {}
        for position, (name, below) in enumerate(branch.below.items()):
            match = (
                _NUMBERED.fullmatch(name) if name[-1:].isdigit() else None
            )  # most names end in a letter
            stem = "" if folds_any else match[1] if match else f"{name}."
            alike.setdefault((stem, self._content(below)), []).append(position)
        # Label each group, or its members separately where they are too few.
        groups: list[tuple[int, str, int, int]] = []
        for (stem, content), positions in alike.items():
            if len(positions) == 1 or (stem and len(positions) < _MIN_SUFFIXED):
                groups += [(position, names[position], 1, content) for position in positions]
                continue
            if folds_any:
                label = _listed([names[position] for position in positions])
            else:
                label = (
                    f"{stem}[{ranges(int(names[position][len(stem) :]) for position in positions)}]"
                )
            groups.append((positions[0], label, len(positions), content))
        return [(label, n, content) for _, label, n, content in sorted(groups)]

    def _content(self, branch: _NameBranch) -> int:
        """Return the number of a branch's content; its node, without a label, is in ``_nodes``."""
        groups = self._folded_groups(branch) if branch.below else []
        meta = branch.meta
        signature = (None if meta is None else (meta.dtype, meta.shape), tuple(groups))
        number = self._number_of.setdefault(signature, len(self._nodes))
        if number == len(self._nodes):
            children = self._named_all(groups)
            self._nodes.append(
                Node(
                    label="",
                    n_alike=1,
                    n_tensors=sum(child.n_tensors for child in children) + (meta is not None),
                    n_elements=sum(child.n_elements for child in children)
                    + (meta.n_elements if meta else 0),
                    n_bytes=sum(child.n_bytes for child in children)
                    + (meta.n_bytes if meta else 0),
                    dtype=meta.dtype if meta else None,
                    shape=meta.shape if meta else None,
                    children=children,
                )
            )
        return number


def _named(node: Node, label: str, n_alike: int, *, is_root: bool = False) -> Node:
    """Return the node under its label, ``n_alike`` times, joined with an only child."""
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
    """Return the names as text, shortened if there are more than three."""
    return ", ".join(names if len(names) <= 3 else (names[0], "…", names[-1]))
