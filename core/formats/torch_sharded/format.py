"""Files of ``torch.save`` of each rank with DTensors or ShardedTensors: together one checkpoint.

On disk, for example::

    model_world_size_4_rank_0.pt    state dict of rank 0: {name: DTensor or ShardedTensor}
    optim_world_size_4_rank_0.pt    optimizer state of rank 0
    extra_state_world_size_4_rank_0.pt
                                    random states, scheduler: no distributed tensors
    … the same of ranks 1, 2 and 3
    fsdp_config.json huggingface/   not read

A trainer that calls ``torch.save(model.state_dict(), …)`` on every rank leaves such files: with
FSDP1's sharded and local state dicts, FSDP2, tensor parallelism, HSDP, and combinations of them.
Every distributed tensor records where its part belongs (``rank_file``), so any names will do that
differ in the number of the rank only (``names``).

The catalog has the global tensors, whose fragments lie in the files of the ranks; ``merge`` tells
what becomes of everything else. Keys are paths in the ranks' trees, as in a single torch file.
Where a directory has several families of files, their keys begin with the family's name:
``model.…``, ``optim.…``. A path to one file stands for its family, without that name. Where files
of ranks are missing, the rest can be inspected, and converted if every element is there (replicas
of HSDP).

Facet: ``TorchShardedFacts``.

Versions: torch 2.2 and later. Read only: DCP replaces such files.

Not supported, refused by name: see ``local_part``; files of several saves in one directory.

Source: files written by torch 2.13 with gloo, pinned in tests/golden/dtensor.tar.xz; names as
verl, accelerate and others choose them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import TorchShardedFacts
from core.engine.catalog.tensor import tensors_of
from core.errors import CorruptError, UnsupportedError, list_some
from core.formats.format import Format, no_folders
from core.formats.torch_sharded.names import (
    FileFamily,
    families_of,
    names_distributed,
    refuse_several_saves,
)
from core.pickle.fields import int_or_none
from core.pickle.inert import as_mapping

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.formats.torch_sharded.merge import MergedFiles
    from core.formats.torch_sharded.rank_file import TensorFile

_MOST_FAMILIES = 8
"""Maximum number of families of files whose first file is looked into."""


def sniff(store: ReadStore) -> bool:
    """Return whether the file, or a numbered file of the directory, has a distributed tensor."""
    if store.entry is not None:
        return store.exists(store.entry) and names_distributed(store, store.entry)
    families = families_of(store.files())
    return any(_is_sharded(store, family) for family in families[:_MOST_FAMILIES])


def _is_sharded(store: ReadStore, family: FileFamily) -> bool:
    """Return whether the first file of a family has a distributed tensor."""
    return names_distributed(store, next(iter(family.files)))


def read(store: ReadStore) -> Catalog:
    """Read the catalog of a directory, or of one file and the other ranks' files next to it.

    Raises:
        CorruptError, TruncatedError: a file is damaged, or files contradict each other.
        UnsupportedError: files of several saves are in the directory.
        UnsafeError: a pickle is hostile.
    """
    from core.formats.torch_sharded.merge import merge_files
    from core.formats.torch_sharded.rank_file import read_tensor_file

    families = _families(store)
    store.expect_headers(name for family in families for name in family.files)
    contents = [
        (family, [read_tensor_file(store, name, number) for name, number in family.files.items()])
        for family in families
    ]
    contents = [(family, _by_rank(files)) for family, files in contents]
    merged = [
        merge_files(files, label=family.label or None if len(families) > 1 else None)
        for family, files in contents
    ]
    ranks = _ranks(contents)
    missing = {
        family.file_of(rank): rank
        for family, files in contents
        for rank in ranks
        if rank not in {file.rank for file in files}
    }
    catalog = _catalog(merged)
    root = as_mapping(catalog.skeleton) or {}
    # The iteration is an object that a leaf of the skeleton stands for.
    key = getattr(root.get("iteration"), "key", None)
    item = catalog.objects.get(key) if isinstance(key, str) else None
    iteration = None if item is None else int_or_none(item.value)
    n_files = sum(len(files) for _, files in contents)
    notes = list(catalog.notes)
    if n_files == 1 and missing:
        notes.append(
            f"this is the file of rank {contents[0][1][0].rank}; the "
            f"file{'s' if len(missing) > 1 else ''} of {len(missing)} other "
            f"rank{'s are' if len(missing) > 1 else ' is'} missing"
        )
    elif missing:
        names = list(missing)
        listed = list_some(names, 4)
        verb = "is" if len(names) == 1 else "are"
        notes.append(f"{listed} {verb} missing; the job had {len(ranks)} ranks")
    if store.entry is not None and n_files > 1:
        notes.append(f"ckpt read this file together with the other ranks' files, {n_files} in all")
    facts = TorchShardedFacts(tuple(ranks), missing)
    return replace(catalog, iteration=iteration, notes=tuple(notes)).with_facet(facts)


def _families(store: ReadStore) -> list[FileFamily]:
    """Return the families of files to read.

    Raises:
        UnsupportedError: files of several saves are in the directory, or none has distributed
            tensors.
    """
    families = families_of(store.files())
    if store.entry is not None:
        # A file whose name has no number stands for itself.
        own = [family for family in families if store.entry in family.files]
        return own or [FileFamily(store.entry, {store.entry: 0}, has_rank_word=False)]
    sharded = [family for family in families if _is_sharded(store, family)]
    refuse_several_saves(sharded, folder=store.label)
    if not sharded:
        raise UnsupportedError("no file contains distributed tensors", file=store.label)
    # Files without distributed tensors belong to them if they are of the same ranks.
    numbers = {number for family in sharded for number in family.files.values()}
    others = [
        family
        for family in families
        if family not in sharded
        and (family.has_rank_word or numbers == set(family.files.values()))
        and numbers >= set(family.files.values())
    ]
    return sorted((*sharded, *others), key=lambda family: (family in others, family.pattern))


def _by_rank(files: Sequence[TensorFile]) -> list[TensorFile]:
    """Return files in the order of their ranks.

    Raises:
        CorruptError: two files are of one rank.
    """
    ordered = sorted(files, key=lambda file: file.rank)
    for before, file in pairwise(ordered):
        if before.rank == file.rank:
            raise CorruptError(
                f"this file and {before.file} are both from rank {file.rank}",
                file=file.file,
                rank=str(file.rank),
                hint="files from two saves may be mixed; pass any file of the save you want",
            )
    return ordered


def _ranks(contents: Sequence[tuple[FileFamily, Sequence[TensorFile]]]) -> list[int]:
    """Return the ranks of the job, according to names and content of the files."""
    ranks: set[int] = set()
    for family, files in contents:
        ranks |= {file.rank for file in files}
        ranks = ranks.union(*(file.ranks for file in files))
        ranks |= set(range(min(family.world_size or 0, 1 << 20)))
    return sorted(ranks)


def _catalog(merged: Sequence[MergedFiles]) -> Catalog:
    """Build the catalog of one or more families of files."""
    tensors = {key: tensor for family in merged for key, tensor in family.tensors.items()}
    hidden = {key: array for family in merged for key, array in family.hidden.items()}
    skeleton: object = merged[0].skeleton
    if len(merged) > 1:
        skeleton = {
            name: item
            for family in merged
            for name, item in (as_mapping(family.skeleton) or {}).items()
        }

    return Catalog(
        format="torch_sharded",
        version=None,
        tensors=tensors,
        objects={key: item for family in merged for key, item in family.objects.items()},
        hidden=tensors_of(hidden),
        skeleton=skeleton,
        notes=tuple(note for family in merged for note in family.notes),
        dropped=tuple(entry for family in merged for entry in family.dropped),
    )


FORMAT = Format(
    name="torch_sharded",
    title="per-rank torch files (FSDP, DTensor)",
    sniff=sniff,
    read=read,
    lay_out=None,
    own_folders=no_folders,
)
