"""Orbax, the checkpoints of JAX: zarr arrays in an OCDBT database, with a few JSON files beside it.

On disk (one *item*)::

    state/
    ├── manifest.ocdbt        where the tree of keys begins (``core.formats.ocdbt.entries``)
    ├── d/…                   its data files
    ├── ocdbt.process_0/…     one database per process that saved; the merged tree points into them
    ├── _METADATA, _strings.json       the nesting, and leaves that are text (``core.formats.ocdbt.tree``)
    ├── _sharding, array_metadatas/    where the arrays lay on devices; not needed
    └── params.dense.kernel/  without OCDBT: an array in a directory of its own, no manifest

A checkpoint of ``CheckpointManager`` is a directory of several items (``10/state``, ``10/meta``)
with a ``_CHECKPOINT_METADATA`` beside them. If one of them holds arrays, it is the checkpoint; if
several do, each is an entry of the root, under its name. An array's key is the name that Orbax
stores it under: its path, dot-joined; with several items the item's name comes first.

Values of arrays that are not compressed are moved as the bytes they are: those of chunks, in
``d/``. What lies in the nodes of the tree (values up to 1 KiB) or is compressed is decoded chunk by
chunk.

``Catalog.iteration`` is set where an integer scalar called ``step`` (or so) tells it; ``notes``
tell what is not read.

Versions: Orbax 0.12 with OCDBT and without, zarr 2 and zarr 3; older ones that write the same
    files.

Not supported: writing; values of the msgpack file ``checkpoint`` of old versions (the arrays are
read, under flat keys); items of other kinds, such as JSON; checkpoints that were not merged
(``ocdbt.process_0`` without a manifest beside it).

Source: checkpoints written by orbax-checkpoint 0.12.8 with tensorstore 0.1.86.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from core.arrays.dtypes import dtype_of
from core.catalog.catalog import Catalog, Fragment, StoredObject, TensorMeta
from core.errors import CheckpointingException, CorruptError, MissingShardError, UnsupportedError
from core.formats.format import Format
from core.formats.ocdbt.arrays import OrbaxArray, arrays_in
from core.formats.ocdbt.entries import MANIFEST
from core.formats.ocdbt.tree import TREE, leaves_of
from core.formats.zarr.facets import ZarrFacts
from core.pickle.inert import ObjectLeaf, TensorLeaf
from core.pickle.nesting import Path, nest_leaves

if TYPE_CHECKING:
    from core.files.store import ReadStore

CHECKPOINT = "_CHECKPOINT_METADATA"
_AGGREGATE = "checkpoint"
_PROCESS = re.compile(r"ocdbt\.process_\w+")
_USUAL_ITEMS = ("default", "state", "params")
_ITERATIONS = ("step", "iteration", "global_step", "train_state.step", "state.step")
_MAX_ITERATION = 1 << 48


def sniff(store: ReadStore) -> bool:
    """Return whether the directory, or an item in it, holds an OCDBT manifest or Orbax's
    metadata.
    """
    if store.entry is not None:
        return False
    if any(map(store.exists, (MANIFEST, TREE, CHECKPOINT))) or _unmerged_database(store, ""):
        return True
    return any(store.exists(f"{item}/{MANIFEST}") for item in _USUAL_ITEMS)


def _unmerged_database(store: ReadStore, root: str) -> str | None:
    """Return the database of a single process, if there is one, else None."""
    return next(
        (name for name in store.folders(root.removesuffix("/")) if _PROCESS.fullmatch(name)), None
    )


def read(store: ReadStore) -> Catalog:
    """Read the catalog of an Orbax checkpoint, or of an OCDBT database of zarr arrays.

    Raises:
        MissingShardError: a chunk, a file or an array that ``_METADATA`` lists is missing.
        CorruptError, TruncatedError: the files contradict each other.
        UnsupportedError: an item or array is stored in a way that is not supported.
        UnsafeError: a path leads outside the checkpoint, or the database unfolds to far more than
            it holds.
    """
    # Each item has arrays, objects and a nesting; with several, its name comes first.
    roots, notes = _find_items(store)
    parts = {
        root.replace("/", ".") if len(roots) > 1 else "": _read_item(store, root) for root in roots
    }
    arrays = {
        prefix + name: array
        for prefix, part in parts.items()
        for name, array in part.arrays.items()
    }
    objects = {
        prefix + name: value
        for prefix, part in parts.items()
        for name, value in part.objects.items()
    }

    @lru_cache(maxsize=64)
    def fragments_of(key: str) -> Sequence[Fragment]:
        return tuple(arrays[key].fragments(key))

    # Join them to one catalog.
    catalog = Catalog(
        format="orbax",
        version=None,
        tensors={
            key: TensorMeta(key, array.array.dtype, array.array.grid.shape)
            for key, array in arrays.items()
        },
        fragments_of=fragments_of,
        objects={key: StoredObject(key, value=value) for key, value in objects.items()},
        skeleton=_skeleton(store, parts),
    )
    iteration, iteration_notes = _iteration(catalog, store)
    notes += [note for part in parts.values() for note in part.notes] + iteration_notes
    catalog = replace(catalog, iteration=iteration, notes=tuple(notes))
    # Arrays that may lack chunks.
    incomplete = {
        key: array.array.sharding is not None and not array.is_incomplete
        for key, array in arrays.items()
        if array.is_incomplete or array.array.sharding is not None
    }
    return catalog.with_facet(ZarrFacts(incomplete)) if incomplete else catalog


@dataclass(frozen=True, slots=True)
class OrbaxItem:
    """The content of one item.

    Args:
        arrays: arrays by name.
        objects: values of the other leaves, by name.
        paths: name → path in the tree; None if the nesting is not stored.
        notes: what the user should know.
    """

    arrays: dict[str, OrbaxArray]
    objects: dict[str, object]
    paths: dict[str, Path] | None
    notes: tuple[str, ...] = ()


def _find_items(store: ReadStore) -> tuple[list[str], list[str]]:
    """Return the directories of the items that hold arrays, and notes on the others."""
    if store.exists(MANIFEST) or store.exists(TREE):
        return [""], []
    if _unmerged_database(store, ""):
        raise _not_merged_error(store, "")
    folders = store.folders()
    roots = [
        f"{name}/"
        for name in folders
        if any(store.exists(f"{name}/{file}") for file in (MANIFEST, TREE))
    ]
    unmerged = next(
        (
            name
            for name in folders
            if f"{name}/" not in roots and _unmerged_database(store, f"{name}/")
        ),
        None,
    )
    if unmerged is not None:
        raise _not_merged_error(store, f"{unmerged}/")
    if not roots:
        raise UnsupportedError(
            "no item of this checkpoint is a tree of arrays",
            file=store.label,
            hint=f"items: {', '.join(folders) or 'none'}",
        )
    other_items = [name for name in folders if f"{name}/" not in roots]
    return roots, [
        f"items that are not trees of arrays are not read: {', '.join(other_items)}"
    ] if other_items else []


def _not_merged_error(store: ReadStore, root: str) -> MissingShardError:
    return MissingShardError(
        f"{root}{_unmerged_database(store, root)} exists, but {root}{MANIFEST} is missing: the save did not finish",
        file=root + MANIFEST,
        hint="use an older checkpoint",
    )


def _read_item(store: ReadStore, root: str) -> OrbaxItem:
    """Read the arrays and objects of one item."""
    if not store.exists(root + MANIFEST) and _unmerged_database(store, root):
        raise _not_merged_error(store, root)
    arrays = arrays_in(store, root)
    if not store.exists(root + TREE):
        note = f"{root}{_AGGREGATE} (msgpack) is not read, so the nesting and the values in it are lost"
        return OrbaxItem(arrays, {}, None, (note,) if store.exists(root + _AGGREGATE) else ())
    leaves = leaves_of(store, root)
    objects: dict[str, object] = {}
    for name, leaf in leaves.items():
        if name in arrays:
            continue
        if leaf.is_array:
            raise MissingShardError(
                f"{TREE} lists it ({leaf.kind}), but its array is missing",
                file=root + TREE,
                key=name,
                hint="copy the checkpoint again, with all its files",
            )
        objects[name] = leaf.value
    paths = {name: leaf.path for name, leaf in leaves.items()}
    return OrbaxItem(
        arrays, objects, paths | {name: (name,) for name in arrays if name not in paths}
    )


def _skeleton(store: ReadStore, parts: Mapping[str, OrbaxItem]) -> object:
    """Return the nesting of all items, or None if an item has none."""
    leaves: dict[Path, object] = {}
    for prefix, part in parts.items():
        if part.paths is None:
            return None
        for name, path in part.paths.items():
            full_path: Path = (prefix[:-1], *path) if prefix else path
            if not full_path or full_path in leaves:
                raise CorruptError(
                    f"{TREE} has the path {full_path!r:.200} for two entries", file=store.label
                )
            leaves[full_path] = (
                ObjectLeaf(prefix + name) if name in part.objects else TensorLeaf(prefix + name)
            )
    return nest_leaves(leaves)


def _iteration(catalog: Catalog, store: ReadStore) -> tuple[int | None, list[str]]:
    """Return the value of an integer scalar called ``step`` or similar, or None.

    And notes on unreadable ones.
    """
    notes: list[str] = []
    for key in _ITERATIONS:
        meta = catalog.tensors.get(key)
        if meta is None or meta.shape != () or dtype_of(meta.dtype).kind not in ("int", "uint"):
            continue
        try:
            array = catalog.fragments(key)[0].array
            assert array is not None
            extent = array.extent
            if extent.encoding is None:
                data = store.read(extent.file, extent.offset, array.n_bytes)
            else:
                data = bytes(extent.encoding.decode(store, array, 0))
        except CheckpointingException as err:
            notes.append(f"{key} could not be read: {err.sentence}")
            continue
        number = int.from_bytes(data, "little", signed=dtype_of(meta.dtype).kind == "int")
        if 0 <= number < _MAX_ITERATION:
            return number, notes
    return None, notes


FORMAT = Format(
    name="orbax",
    title="Orbax (OCDBT)",
    sniff=sniff,
    read=read,
    lay_out=None,
    aliases=("ocdbt",),
)
