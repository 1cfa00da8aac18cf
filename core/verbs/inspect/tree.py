"""Build the tree of a checkpoint's tensors, with repeated layers folded into one node.

Siblings whose names are numbers (``0`` … ``31``) or end with one (``weight0`` … ``weight7``) are
folded if everything below them has equal names, dtypes and shapes, in any order: where a file ends
in the middle of a layer, its tensors may come in another order. A chain of containers with one
entry each becomes one node (``decoder.layers.[0-3]``). A sibling with another name but equal
content (``exp_avg_sq`` next to ``exp_avg``) refers to it instead of repeating it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field, replace

from core.arrays.box import Shape
from core.engine.catalog.key_patterns import ranges
from core.engine.catalog.tensor import Tensor
from core.pickle.noted import gc_paused
from core.values import dataclass

MAX_DEPTH = 48
"""Maximum number of components; longer keys keep the rest in one, which bounds the recursion."""

_NUMBERED = re.compile(r"(.*?)(0|[1-9]\d{0,8})")
MIN_SUFFIXED = 4
"""Fewer equal siblings with a common stem, such as w1, w2, w3, usually differ in their meaning."""
_MIN_REPEATED = 3
"""Minimum number of tensors below a node that refers to an equal sibling."""


@dataclass(frozen=True, slots=True)
class Node:
    """One line of the tree.

    Args:
        label: name, or dot-joined names, relative to the parent; folded numbers are in brackets.
        n_alike: number of equal subtrees that the node represents, below one instance of its
            parent.
        n_tensors, n_elements, n_bytes: totals of all ``n_alike`` subtrees, below one instance of
            the parent.
        dtype, shape: dtype and shape of the tensor, if the node is one; otherwise None.
        children: the nodes below one instance of the node.
        same_as: label of an earlier sibling with equal content; None if there is none, or if the
            node is too small.
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
    """A name in the tree before folding, with the names below it."""

    below: dict[str, _NameBranch] = field(default_factory=dict)
    meta: Tensor | None = None


def components(key: str) -> list[str]:
    r"""Split a key at its dots, except those written ``\\.``, into at most ``MAX_DEPTH`` parts."""
    if "\\" not in key:
        return key.split(".", MAX_DEPTH - 1)
    return re.split(r"(?<!\\)\.", key, maxsplit=MAX_DEPTH - 1)


@gc_paused()
def build_tree(
    tensors: Mapping[str, Tensor],
    *,
    split: Callable[[str], list[str]] = components,
    folds_roots: bool = False,
) -> tuple[Node, ...]:
    """Build the folded tree of some tensors.

    Args:
        split: returns the names on a key's path.
        folds_roots: equal nodes of the first level are folded regardless of their names (rank
            directories).

    Returns:
        The nodes of the first level, in order of first appearance.
    """
    root = _NameBranch()
    for key, tensor in tensors.items():
        branch = root
        for name in split(key):
            child = branch.below.get(name)
            if child is None:
                child = branch.below[name] = _NameBranch()
            branch = child
        branch.meta = tensor
    return _TreeFolder().children_of(root, folds_any=folds_roots)


class _TreeFolder:
    """Builds nodes from the bottom up.

    Every distinct content gets a number and one node, so that equal subtrees cost nothing.
    """

    def __init__(self) -> None:
        self._number_of: dict[object, int] = {}
        self._nodes: list[Node] = []

    def children_of(self, branch: _NameBranch, *, folds_any: bool = False) -> tuple[Node, ...]:
        """Build the nodes below a branch."""
        return self._named_all(self._folded_groups(branch, folds_any=folds_any), is_root=folds_any)

    def _named_all(
        self, groups: list[tuple[str, int, int]], *, is_root: bool = False
    ) -> tuple[Node, ...]:
        """Build the nodes of folded groups, with references to equal siblings.

        Args:
            groups: (label, number of names, number of the content) of each.
        """
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
        """Return (label, number of names, number of the content) of the groups below a branch."""
        # Group the names that may be folded: equal stems before a number, with equal content.
        names = list(branch.below)
        alike: dict[tuple[str, int], list[int]] = {}
        for position, (name, below) in enumerate(branch.below.items()):
            stem = "" if folds_any else _stem(name)
            alike.setdefault((stem, self._content(below)), []).append(position)
        # Label each group, or its members separately if they are too few.
        groups: list[tuple[int, str, int, int]] = []
        for (stem, content), positions in alike.items():
            if len(positions) == 1 or (stem and len(positions) < MIN_SUFFIXED):
                groups += [(position, names[position], 1, content) for position in positions]
                continue
            members = [names[position] for position in positions]
            if folds_any:
                label = ", ".join(members if len(members) <= 3 else (members[0], "…", members[-1]))
            else:
                label = f"{stem}[{ranges(int(name[len(stem) :]) for name in members)}]"
            groups.append((positions[0], label, len(positions), content))
        return [(label, n, content) for _, label, n, content in sorted(groups)]

    def _content(self, branch: _NameBranch) -> int:
        """Return the number of a branch's content; ``_nodes`` holds its node, without a label."""
        tensor = branch.meta
        signature: object
        if branch.below or tensor is None:
            groups = self._folded_groups(branch)
            # The order of the first branch with this content is the one that is shown.
            signature = (
                None if tensor is None else (tensor.dtype, tensor.shape),
                tuple(sorted(groups)),
            )
        else:
            groups = []
            signature = (tensor.dtype, tensor.shape)
        number = self._number_of.setdefault(signature, len(self._nodes))
        if number == len(self._nodes):
            # A name can be a tensor and a container of others at once.
            children = self._named_all(groups)
            parts: list[Node | Tensor] = [*children, *([] if tensor is None else [tensor])]
            self._nodes.append(
                Node(
                    label="",
                    n_alike=1,
                    n_tensors=sum(child.n_tensors for child in children) + (tensor is not None),
                    n_elements=sum(part.n_elements for part in parts),
                    n_bytes=sum(part.n_bytes for part in parts),
                    dtype=tensor.dtype if tensor else None,
                    shape=tensor.shape if tensor else None,
                    children=children,
                )
            )
        return number


def number_in(name: str) -> tuple[str, int | None]:
    """Split a name into its stem and the number at its end: ``weight7`` is ``("weight", 7)``.

    Returns:
        The complete name and None, if it does not end with a number as Python writes it.
    """
    # Most names end with a letter, for which the pattern would be slow.
    match = _NUMBERED.fullmatch(name) if name[-1:].isdigit() else None
    return (match[1], int(match[2])) if match else (name, None)


def _stem(name: str) -> str:
    """Return the part of a name before its number; a name without number has a stem of its own."""
    stem, number = number_in(name)
    return f"{name}." if number is None else stem


def _named(node: Node, label: str, n_alike: int, *, is_root: bool = False) -> Node:
    """Return ``n_alike`` copies of a node as one with a label, joined with an only child.

    Args:
        is_root: keep the node separate from its child (rank directories).
    """
    content, n_nodes = node, n_alike
    if not is_root and node.dtype is None and len(node.children) == 1:
        (content,) = node.children
        label = f"{label}.{content.label}"
        n_nodes *= content.n_alike
    # Built directly: dataclasses.replace takes several times as long, which 10⁵ names feel.
    return Node(
        label,
        n_nodes,
        node.n_tensors * n_alike,
        node.n_elements * n_alike,
        node.n_bytes * n_alike,
        content.dtype,
        content.shape,
        content.children,
        node.same_as,
    )
