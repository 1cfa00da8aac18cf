"""The names of a checkpoint as a tree whose levels are built when they are shown.

::

    decoder.layers        a chain of modules with one member each is one entry
    ├── 0                 a module: everything below the name
    │   └── mlp.linear_fc1.weight      a tensor
    └── …
    w0 … w199             a range: of too many siblings, some hundred each

A level is made of the keys below it when it is needed, so 10⁵ names are shown soon. The values have
no ``repr`` of their own, because textual's workers and messages would call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from typing import Literal

from core.arrays.box import Shape
from core.engine.catalog.tensor import Tensor
from core.pickle.noted import gc_paused
from core.values import dataclass
from core.verbs.inspect.tree import MAX_DEPTH

MOST_SIBLINGS = 200
"""Most entries of a level; more are divided into ranges."""

Kind = Literal["module", "tensor", "object", "range"]


_Row = tuple[str, Tensor, int]
"""A tensor that is not in a branch of its own yet: its key, metadata, and size in bytes."""


@dataclass(slots=True, repr=False)
class NamedBranch:
    """A component of a name, with what is below it.

    Args:
        name: the component; "" for the root.
        key: the tensor or object of this name; None if it is only a module.
        meta: metadata of the tensor.
        n_tensors, n_bytes: totals of the tensors at and below this name.
    """

    name: str
    key: str | None = None
    meta: Tensor | None = None
    n_tensors: int = 0
    n_bytes: int = 0
    # The tensors below become branches when the level is needed: their keys are cut at ``_start``.
    _below: dict[str, NamedBranch] = field(default_factory=dict)
    _rows: list[_Row] = field(default_factory=list)
    _start: int = 0

    @property
    def below(self) -> dict[str, NamedBranch]:
        """Branches of the next level, by component."""
        if self._rows:
            # Another thread sees either the rows or what became of them.
            self._below = self._next_level(self._rows)
            self._rows = []
        return self._below

    @property
    def has_below(self) -> bool:
        """True if there is a next level."""
        return bool(self._rows or self._below)

    @property
    def first_key(self) -> str:
        """Key of this name or, if it is only a module, of the first tensor or object below."""
        branch = self
        while branch.key is None:
            if branch._rows:
                return branch._rows[0][0]
            branch = next(iter(branch.below.values()))
        return branch.key

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors at and below this name, as stored."""
        if self.meta is not None:
            yield self.meta
        rows = self._rows
        if rows:
            for _, tensor, _ in rows:
                yield tensor
            return
        for branch in self._below.values():
            yield from branch.tensors()

    def _next_level(self, rows: list[_Row]) -> dict[str, NamedBranch]:
        """Return the branches of some tensors, by the component at ``_start`` of their keys."""
        # A single component that all have in common needs no pass over them.
        shared = _shared_component(rows, self._start)
        if shared is not None:
            own_bytes = 0 if self.meta is None else self.meta.n_bytes
            branch = NamedBranch(
                shared,
                n_tensors=len(rows),
                n_bytes=self.n_bytes - own_bytes,
                _rows=rows,
                _start=self._start + len(shared) + 1,
            )
            return {shared: branch}
        below: dict[str, NamedBranch] = {}
        for row in rows:
            key, tensor, n_bytes = row
            end = key.find(".", self._start)
            name = key[self._start : end] if end >= 0 else key[self._start :]
            child = below.get(name)
            if child is None:
                start = self._start + len(name) + 1
                child = below[name] = NamedBranch(name, _start=start)
            child.n_tensors += 1
            child.n_bytes += n_bytes
            if end < 0:
                child.key, child.meta = key, tensor
            else:
                child._rows.append(row)
        return below


def _shared_component(rows: list[_Row], start: int) -> str | None:
    """Return the component at ``start`` if all keys have the same one, and more behind it."""
    first = rows[0][0]
    end = first.find(".", start) + 1
    if not end or not rows[-1][0].startswith(first[:end]):
        return None
    # What the least and the greatest key begin with, all begin with.
    least, greatest = min(rows)[0], max(rows)[0]
    if least.startswith(first[:end]) and greatest.startswith(first[:end]):
        return first[start : end - 1]
    return None


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
        """True if there are entries of a next level."""
        return self.kind == "range" or self.branch.has_below

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the entry, as stored."""
        for branch in self.branches:
            yield from branch.tensors()

    def children(self) -> list[Entry]:
        """Return the entries of the next level: at most ``MOST_SIBLINGS``."""
        siblings = self.branches if self.kind == "range" else tuple(self.branch.below.values())
        return group_entries(siblings, self.path, is_object=self.is_object)

    def covers(self, path: tuple[str, ...]) -> bool:
        """Return whether a name is this entry's, or below it."""
        n = len(self.path)
        if path[:n] != self.path:
            return False
        return self.kind != "range" or any(branch.name == path[n] for branch in self.branches)


def group_entries(
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
    return branch.first_key.startswith(f"{path[0]}:")


@gc_paused()
def build_names(tensors: Mapping[str, Tensor], *, split: Callable[[str], list[str]]) -> NamedBranch:
    """Return the root of a tree of tensors.

    Args:
        split: returns the components of a key.
    """
    root = NamedBranch("")
    rows: list[_Row] = []
    others: list[_Row] = []
    sizes: dict[tuple[str, Shape], int] = {}
    for key, tensor in tensors.items():
        # Most tensors are like an earlier one, whose size need not be computed again.
        kind = (tensor.dtype, tensor.shape)
        n_bytes = sizes.get(kind)
        if n_bytes is None:
            n_bytes = sizes[kind] = tensor.n_bytes
        # Most keys are only cut at their dots, level by level.
        is_plain = "\\" not in key and ":" not in key and key.count(".") < MAX_DEPTH - 1
        (rows if is_plain else others).append((key, tensor, n_bytes))
        root.n_tensors += 1
        root.n_bytes += n_bytes
    root._rows = rows
    for key, tensor, n_bytes in others:
        branch = root
        for branch in _branches_to(root, split(key)):
            branch.n_tensors += 1
            branch.n_bytes += n_bytes
        branch.key, branch.meta = key, tensor
    return root


def build_object_names(keys: Iterable[str], *, split: Callable[[str], list[str]]) -> NamedBranch:
    """Return the root of a tree of objects."""
    root = NamedBranch("")
    for key in keys:
        *_, branch = _branches_to(root, split(key))
        branch.key = key
    return root


def _branches_to(root: NamedBranch, path: Iterable[str]) -> Iterator[NamedBranch]:
    """Yield the branches of a path below the root, and make those that are missing."""
    branch = root
    for name in path:
        below = branch.below
        if name not in below:
            below[name] = NamedBranch(name)
        branch = below[name]
        yield branch
