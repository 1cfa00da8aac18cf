"""The names of a checkpoint as a tree whose levels are built when they are shown.

::

    decoder.layers        a chain of modules with one member each is one entry
    ├── 0                 a module: everything below the name
    │   └── mlp.linear_fc1.weight      a tensor
    └── …
    w0 … w199             a range: of too many siblings, some hundred each

``build_names`` links 10⁵ names once; ``Entry.children`` makes one level, as it is shown. The values
have no ``repr`` of their own, because textual's workers and messages would call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from core.arrays.box import Shape
from core.catalog.catalog import TensorMeta
from core.inspect.tree import MAX_DEPTH
from core.pickle.reader import gc_paused

MOST_SIBLINGS = 200
"""Most entries of a level; more are divided into ranges."""

Kind = Literal["module", "tensor", "object", "range"]


@dataclass(slots=True, repr=False)
class NamedBranch:
    """A component of a name, with what is below it.

    Args:
        name: the component; "" for the root.
        below: branches by component.
        key: the tensor or object of this name; None if it is only a module.
        meta: metadata of the tensor.
        n_tensors, n_bytes: totals of the tensors at and below this name.
    """

    name: str
    below: dict[str, NamedBranch] = field(default_factory=dict)
    key: str | None = None
    meta: TensorMeta | None = None
    n_tensors: int = 0
    n_bytes: int = 0

    def tensors(self) -> Iterator[TensorMeta]:
        """Yield the tensors at and below this name, as stored."""
        if self.meta is not None:
            yield self.meta
        for branch in self.below.values():
            yield from branch.tensors()


@dataclass(frozen=True, slots=True, repr=False)
class Entry:
    """A line of the tree.

    Args:
        kind: what it is.
        label: the text that is shown, not escaped.
        path: components of the name, from the root.
        branches: the branch; several for a range.
        is_object: it is an object, or holds objects, not tensors.
    """

    kind: Kind
    label: str
    path: tuple[str, ...]
    branches: tuple[NamedBranch, ...]
    is_object: bool = False

    @property
    def branch(self) -> NamedBranch:
        """The only branch, or the first of a range."""
        return self.branches[0]

    @property
    def key(self) -> str | None:
        """Key of the tensor or object; None for a module or a range."""
        return self.branch.key if self.kind in ("tensor", "object") else None

    @property
    def n_tensors(self) -> int:
        """Number of tensors."""
        return sum(branch.n_tensors for branch in self.branches)

    @property
    def n_bytes(self) -> int:
        """Size of all tensors, each counted once, in bytes."""
        return sum(branch.n_bytes for branch in self.branches)

    @property
    def has_children(self) -> bool:
        """Whether there are entries below."""
        return self.kind == "range" or bool(self.branch.below)

    def tensors(self) -> Iterator[TensorMeta]:
        """Yield the tensors of the entry, as stored."""
        for branch in self.branches:
            yield from branch.tensors()

    def children(self) -> list[Entry]:
        """Return the entries of the next level: at most ``MOST_SIBLINGS``."""
        siblings = self.branches if self.kind == "range" else tuple(self.branch.below.values())
        return entries_of(siblings, self.path, is_object=self.is_object)

    def covers(self, path: tuple[str, ...]) -> bool:
        """Return whether a name is this entry's, or below it."""
        n = len(self.path)
        if path[:n] != self.path:
            return False
        return self.kind != "range" or any(branch.name == path[n] for branch in self.branches)


def entries_of(
    branches: tuple[NamedBranch, ...], path: tuple[str, ...], *, is_object: bool
) -> list[Entry]:
    """Return the entries of some siblings, in ranges if they are too many.

    Args:
        path: components of their parent's name.
        is_object: they are objects and values in them, not tensors.
    """
    if len(branches) <= MOST_SIBLINGS:
        return [_entry_of(branch, path, is_object=is_object) for branch in branches]
    # Ranges of equal length, as long as needed for no more than MOST_SIBLINGS of them.
    length = MOST_SIBLINGS
    while length * MOST_SIBLINGS < len(branches):
        length *= MOST_SIBLINGS
    return [
        Entry("range", f"{part[0].name} … {part[-1].name}", path, part, is_object)
        for part in (branches[at : at + length] for at in range(0, len(branches), length))
    ]


def _entry_of(branch: NamedBranch, path: tuple[str, ...], *, is_object: bool) -> Entry:
    """Return the entry of a branch, joined with its only descendants."""
    path = (*path, branch.name)
    label = branch.name
    while branch.key is None and len(branch.below) == 1 and not _is_rank(branch, path):
        (branch,) = branch.below.values()
        path = (*path, branch.name)
        label += f".{branch.name}"
    kind: Kind = "module" if branch.key is None else "object" if is_object else "tensor"
    return Entry(kind, label, path, (branch,), is_object)


def _is_rank(branch: NamedBranch, path: tuple[str, ...]) -> bool:
    """Return whether a branch is a rank directory, which ends with a colon in keys."""
    if len(path) != 1:
        return False
    while branch.key is None:
        branch = next(iter(branch.below.values()))
    return branch.key.startswith(f"{path[0]}:")


@gc_paused()
def build_names(tensors: Iterable[TensorMeta], *, split: Callable[[str], list[str]]) -> NamedBranch:
    """Link the names of tensors to a tree, and add their sizes up.

    Args:
        split: returns the components of a key.
    """
    root = NamedBranch("")
    linker = _Linker(root, split)
    sizes: dict[tuple[str, Shape], int] = {}
    for meta in tensors:
        # Most tensors are like an earlier one, whose size need not be computed again.
        kind = (meta.dtype, meta.shape)
        n_bytes = sizes.get(kind)
        if n_bytes is None:
            n_bytes = sizes[kind] = meta.n_bytes
        key = meta.key
        parent, name = linker.parent_of(key)
        branch = parent.below.get(name)
        if branch is None:
            parent.below[name] = NamedBranch(name, {}, key, meta, 1, n_bytes)
        else:  # also a module
            branch.key, branch.meta, branch.n_tensors, branch.n_bytes = key, meta, 1, n_bytes
    _add_up(root)
    return root


def build_object_names(keys: Iterable[str], *, split: Callable[[str], list[str]]) -> NamedBranch:
    """Link the names of objects to a tree."""
    root = NamedBranch("")
    linker = _Linker(root, split)
    for key in keys:
        parent, name = linker.parent_of(key)
        parent.below.setdefault(name, NamedBranch(name)).key = key
    return root


class _Linker:
    """Finds and makes the branches above keys, each of which is looked up by its full name."""

    def __init__(self, root: NamedBranch, split: Callable[[str], list[str]]) -> None:
        self._root = root
        self._split = split
        self._branches: dict[str, NamedBranch] = {}

    def parent_of(self, key: str) -> tuple[NamedBranch, str]:
        """Return the branch above a key, and the key's last component."""
        # Splitting a key costs more than all the rest, and most keys are only cut at their dots.
        if "\\" not in key and ":" not in key and key.count(".") < MAX_DEPTH - 1:
            prefix, dot, name = key.rpartition(".")
            return (self._branch_at(prefix) if dot else self._root), name
        *path, last = self._split(key)
        parent = self._root
        for component in path:
            branch = parent.below.get(component)
            if branch is None:
                branch = parent.below[component] = NamedBranch(component)
            parent = branch
        return parent, last

    def _branch_at(self, prefix: str) -> NamedBranch:
        """Return the branch of a name that is cut at its dots."""
        branch = self._branches.get(prefix)
        if branch is None:
            above, dot, name = prefix.rpartition(".")
            parent = self._branch_at(above) if dot else self._root
            branch = parent.below.get(name)
            if branch is None:
                branch = parent.below[name] = NamedBranch(name)
            self._branches[prefix] = branch
        return branch


def _add_up(branch: NamedBranch) -> None:
    """Add the totals of what is below to those of a branch; names have few components."""
    for below in branch.below.values():
        if below.below:
            _add_up(below)
        branch.n_tensors += below.n_tensors
        branch.n_bytes += below.n_bytes
