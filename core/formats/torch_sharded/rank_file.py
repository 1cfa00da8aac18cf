"""The content of one rank's file: its tree, and the tensors in it by key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from core.catalog.dropped import Dropped
from core.errors import CheckpointingException, CorruptError, UnsupportedError
from core.formats.torch.tree import keys_of, parse
from core.formats.torch_sharded.distributed import (
    holds_distributed,
    is_distributed,
    parse_distributed,
)
from core.formats.torch_sharded.local_part import LocalPart
from core.pickle.inert import ObjectLeaf, TensorLeaf
from core.pickle.nesting import LeafEntry, Path, entries, map_leaves
from core.values import dataclass

if TYPE_CHECKING:
    from core.catalog.stored import StoredArray
    from core.files.store import ReadStore


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The tensors and values in the file of one rank, under the keys of the checkpoint.

    Args:
        file: name of the file.
        number: number of the rank in the file's name.
        rank: number of the rank according to the tensors, else that in the name.
        ranks: the ranks of the job that the tensors name.
        skeleton: the tree, with a ``TensorLeaf`` for every tensor and distributed tensor, and an
            ``ObjectLeaf`` for everything else.
        parts: distributed tensors.
        tensors: plain tensors.
        values: everything else.
        hidden: tensors inside the values, by the keys of their leaves.
        unsupported: key → kind, for values that are tensors which cannot be read.
        paths: key → path in the tree.
        notes, dropped: as in the catalog.
    """

    file: str
    number: int
    rank: int
    ranks: frozenset[int]
    skeleton: object
    parts: Mapping[str, LocalPart]
    tensors: Mapping[str, StoredArray]
    values: Mapping[str, object]
    hidden: Mapping[str, StoredArray]
    unsupported: Mapping[str, str]
    paths: Mapping[str, Path]
    notes: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()


def read_tensor_file(store: ReadStore, file: str, number: int) -> TensorFile:
    """Read one rank's file; metadata only.

    Args:
        number: number of the rank in the file's name.

    Raises:
        CorruptError, TruncatedError: the file is damaged, or a distributed tensor contradicts
            itself.
        UnsupportedError: the file is of another kind.
        UnsafeError: the pickle is hostile.
    """
    # The prefix makes the names of arrays unique; keys go without it.
    prefix = f"{file}:"
    tree = parse(store, file, prefix=prefix)
    arrays = {**tree.arrays, **tree.hidden}
    parts: dict[str, LocalPart] = {}
    values: dict[str, object] = {}
    tensors: dict[str, StoredArray] = {}
    unsupported = {
        key.removeprefix(prefix): item.refused
        for key, item in tree.objects.items()
        if item.refused is not None
    }
    paths: dict[str, Path] = {}

    def leaf_of(entry: LeafEntry) -> object:
        key = entry.key.removeprefix(prefix)
        full_key = prefix + key
        paths[key] = entry.path
        if isinstance(entry.leaf, TensorLeaf):
            tensors[key] = tree.arrays[full_key]
            return replace(entry.leaf, key=key)
        value = tree.objects[full_key].value
        if is_distributed(value):
            try:
                part = parse_distributed(value, arrays)
                parts[key] = part
                unsupported.pop(key, None)
                return TensorLeaf(key, part.wrapper, part.requires_grad)
            except UnsupportedError as err:
                unsupported[key] = err.message
            except CheckpointingException as err:
                err.file, err.key = err.file or file, err.key or key
                raise
        elif key not in unsupported and holds_distributed(value):
            unsupported[key] = "value that holds distributed tensors"
        values[key] = value
        return ObjectLeaf(key)

    skeleton = map_leaves(tree.value, leaf_of)
    ranks = {part.rank for part in parts.values() if part.rank is not None}
    if len(ranks) > 1:
        raise CorruptError(f"the file's tensors are of several ranks: {sorted(ranks)}", file=file)
    return TensorFile(
        file=file,
        number=number,
        rank=ranks.pop() if ranks else number,
        ranks=frozenset().union(*(part.ranks for part in parts.values())),
        skeleton=skeleton,
        parts=parts,
        tensors=tensors,
        values=values,
        hidden=tree.hidden,
        unsupported=unsupported,
        paths=paths,
        notes=tree.notes,
        dropped=tree.dropped,
    )


def relocated(file: TensorFile, skeleton: object) -> TensorFile:
    """Return a file whose entries have the keys of their paths in another skeleton.

    Args:
        skeleton: has the leaves of the file's own, in other places.
    """
    leaf_entries = list(entries(skeleton))
    keys = [key for key, _ in keys_of(leaf_entries)]
    new_of = {entry.key: key for entry, key in zip(leaf_entries, keys, strict=True)}

    def renamed(entry: LeafEntry) -> object:
        assert isinstance(entry.leaf, (TensorLeaf, ObjectLeaf))
        return replace(entry.leaf, key=new_of[entry.leaf.key])

    return replace(
        file,
        skeleton=map_leaves(skeleton, renamed),
        parts={new_of[key]: part for key, part in file.parts.items()},
        tensors={new_of[key]: array for key, array in file.tensors.items()},
        values={new_of[key]: value for key, value in file.values.items()},
        unsupported={new_of[key]: kind for key, kind in file.unsupported.items()},
        paths=dict(zip(keys, (entry.path for entry in leaf_entries), strict=True)),
    )
