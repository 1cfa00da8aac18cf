"""Add up the bytes of a checkpoint by module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from core.engine.catalog.key_patterns import ranges
from core.engine.catalog.optimizer_keys import MOMENTS
from core.pickle.noted import gc_paused
from core.values import dataclass
from core.verbs.inspect.optimizer_states import is_state
from core.verbs.inspect.summary import bare_key
from core.verbs.inspect.tree import MIN_SUFFIXED, components, number_in

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog


@dataclass(frozen=True, slots=True)
class SizeNode:
    """The bytes of a module, an optimizer state, or one tensor.

    Args:
        name: one component of the dotted name; ``""`` for the root.
        n_bytes: bytes of all tensors below, each counted once.
        n_tensors: number of tensors below.
        children: the modules and tensors inside, as stored.
    """

    name: str
    n_bytes: int
    n_tensors: int
    children: tuple[SizeNode, ...] = ()


@dataclass(slots=True)
class _SizeBranch:
    """A node whose sums are not known yet."""

    n_bytes: int = 0
    n_tensors: int = 0
    below: dict[str, _SizeBranch] = field(default_factory=dict)


@gc_paused()
def sizes_of(catalog: Catalog) -> tuple[SizeNode, SizeNode]:
    """Add up the tensors of a catalog by module: those of the model, and of the optimizer.

    What belongs to neither (random states) is in the first tree. Rank directories are left out:
    in a rank catalog, the tensors that have one name on several ranks are one node, with the bytes
    of all of them. A tied tensor has no bytes of its own. The states of numbered parameters come
    below the state.

    Returns:
        The roots of the model and of the optimizer; without tensors, a root of 0 bytes.
    """
    model, optimizer = _SizeBranch(), _SizeBranch()
    ties = catalog.ties
    for key, tensor in catalog.tensors.items():
        if key in ties:
            continue
        name = bare_key(key, catalog)
        branch = optimizer if is_state(name) else model
        n_bytes = tensor.n_bytes
        parts = components(name)
        # Numbered parameters come below their state: state.0.exp_avg is part of state.exp_avg.
        if parts[-1] in MOMENTS and parts[-2:-1] != [] and parts[-2].isdigit():
            parts[-2:] = parts[:-3:-1]
        for part in ("", *parts):
            # The empty part is the root.
            branch = branch.below.setdefault(part, _SizeBranch()) if part else branch
            branch.n_bytes += n_bytes
            branch.n_tensors += 1
    return _size_node("", model), _size_node("", optimizer)


def _size_node(name: str, branch: _SizeBranch) -> SizeNode:
    """Build the node of a branch; the names of ``components`` bound the recursion."""
    if not branch.below:
        return SizeNode(name, branch.n_bytes, branch.n_tensors)
    children = tuple(_size_node(part, below) for part, below in branch.below.items())
    return SizeNode(name, branch.n_bytes, branch.n_tensors, children)


def fold_sizes(node: SizeNode) -> SizeNode:
    """Fold what is repeated inside a node, such as layers and experts, and join chains of names.

    Siblings whose names differ only in the number at their end, and that contain the same, become
    one node, called ``[0-31]`` or ``weight[0-7]``. A module with a single child is joined to it:
    ``decoder.layers.[0-31]``.
    """
    return _join_chains(_fold_below(node))


def _fold_below(node: SizeNode) -> SizeNode:
    """Fold the siblings on all levels below a node."""
    return replace(node, children=_fold_siblings([_fold_below(child) for child in node.children]))


def _join_chains(node: SizeNode) -> SizeNode:
    """Join the modules that have a single child to it, except for the root."""
    children = tuple(_join_chains(child) for child in node.children)
    if len(children) == 1 and node.name and children[0].n_bytes == node.n_bytes:
        return replace(children[0], name=f"{node.name}.{children[0].name}")
    return replace(node, children=children)


def _fold_siblings(siblings: Sequence[SizeNode]) -> tuple[SizeNode, ...]:
    """Merge the siblings that differ only in the number at the end of their names."""
    groups: dict[object, list[SizeNode]] = {}
    for node in siblings:
        stem, number = number_in(node.name)
        groups.setdefault((stem, number is None, _content(node)), []).append(node)
    # A few numbered names, such as w1, w2, w3, usually differ in their meaning.
    folded: list[SizeNode] = []
    for members in groups.values():
        stem, _ = number_in(members[0].name)
        is_few = len(members) == 1 or (stem and len(members) < MIN_SUFFIXED)
        folded += members if is_few else [_merged(members, stem)]
    return tuple(folded)


def _content(node: SizeNode) -> object:
    """Return what siblings must have in common to be folded, whatever the order of children."""
    return node.n_bytes, frozenset((child.name, _content(child)) for child in node.children)


def _merged(members: Sequence[SizeNode], stem: str) -> SizeNode:
    """Return equal siblings as one node, named by their common stem and all their numbers."""
    numbers = ranges(number for node in members if (number := number_in(node.name)[1]) is not None)
    return replace(_times(members[0], len(members)), name=f"{stem}[{numbers}]")


def _times(node: SizeNode, count: int) -> SizeNode:
    """Return a node with the sums of ``count`` nodes that are equal to it."""
    return SizeNode(
        node.name,
        node.n_bytes * count,
        node.n_tensors * count,
        tuple(_times(child, count) for child in node.children),
    )
