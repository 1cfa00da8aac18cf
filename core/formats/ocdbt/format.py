"""Orbax, the checkpoints of JAX: zarr arrays in an OCDBT database, with a few JSON files beside it.

On disk (one *item*)::

    state/
    ├── manifest.ocdbt        where the tree of keys begins (``core.formats.ocdbt.entries``)
    ├── d/…                   its data files
    ├── ocdbt.process_0/…     one database per process that saved; the merged tree points into them
    ├── _METADATA, _strings.json       the nesting, and leaves that are text (``core.formats.ocdbt.tree``)
    ├── _sharding, array_metadatas/    where the arrays lay on devices; not needed
    └── params.dense.kernel/  without OCDBT: an array in a directory of its own, no manifest

A checkpoint of ``CheckpointManager`` is a directory of several items (``10/state``, ``10/meta``) with a
``_CHECKPOINT_METADATA`` beside them. If one of them holds arrays, it is the checkpoint; if several do, each is an entry
of the root, under its name. An array's key is the name that Orbax stores it under: its path, dot-joined; with several
items the item's name comes first.

Values of arrays that are not compressed are moved as the bytes they are: those of chunks, in ``d/``. What lies in the
nodes of the tree (values up to 1 KiB) or is compressed is decoded chunk by chunk.

``Catalog.iteration`` is set where an integer scalar called ``step`` (or so) tells it; ``notes`` tell what is not read.

Versions: Orbax 0.12 with OCDBT and without, zarr 2 and zarr 3; older ones that write the same files.

Not supported: writing; values of the msgpack file ``checkpoint`` of old versions (the arrays are read, under flat
keys); items of other kinds, such as JSON; checkpoints that were not merged (``ocdbt.process_0`` without a manifest
beside it).

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
    """Whether the directory, or an item in it, holds an OCDBT manifest or Orbax's metadata."""
    if store.entry is not None:
        return False
    if any(map(store.exists, (MANIFEST, TREE, CHECKPOINT))) or _unmerged(store, ""):
        return True
    return any(store.exists(f"{item}/{MANIFEST}") for item in _USUAL_ITEMS)


def _unmerged(store: ReadStore, root: str) -> str | None:
    """The database of a process, where there is one, else None."""
    return next((name for name in store.folders(root.removesuffix("/")) if _PROCESS.fullmatch(name)), None)


def read(store: ReadStore) -> Catalog:
    """The catalog of an Orbax checkpoint, or of an OCDBT database of zarr arrays.

    Raises:
        MissingShardError: a chunk, a file or an array that ``_METADATA`` lists is absent.
        CorruptError, TruncatedError: something contradicts itself.
        UnsupportedError: something that is not handled.
        UnsafeError: a path leaves the checkpoint, or the database unfolds to far more than it holds.
    """
    roots, notes = _items(store)
    parts = {root.replace("/", ".") if len(roots) > 1 else "": _item(store, root, notes) for root in roots}
    arrays = {prefix + name: found for prefix, part in parts.items() for name, found in part.arrays.items()}
    objects = {prefix + name: value for prefix, part in parts.items() for name, value in part.objects.items()}

    @lru_cache(maxsize=64)
    def fragments_of(key: str) -> Sequence[Fragment]:
        return tuple(arrays[key].fragments(key))

    catalog = Catalog(
        format="orbax",
        version=None,
        tensors={key: TensorMeta(key, found.array.dtype, found.array.grid.shape) for key, found in arrays.items()},
        fragments_of=fragments_of,
        objects={key: StoredObject(key, value=value) for key, value in objects.items()},
        skeleton=_skeleton(store, parts),
    )
    iteration = _iteration(catalog, store, notes)
    catalog = replace(catalog, iteration=iteration, notes=tuple(notes))
    incomplete = {
        key: found.array.sharding is not None and not found.is_incomplete
        for key, found in arrays.items()
        if found.is_incomplete or found.array.sharding is not None
    }
    return catalog.with_facet(ZarrFacts(incomplete)) if incomplete else catalog


@dataclass(frozen=True, slots=True)
class _Item:
    """What one item holds.

    Args:
        arrays: by name.
        objects: values of the leaves that are no arrays, by name.
        paths: name → path in the tree; None where nothing tells the nesting.
    """

    arrays: dict[str, OrbaxArray]
    objects: dict[str, object]
    paths: dict[str, Path] | None


def _items(store: ReadStore) -> tuple[list[str], list[str]]:
    """Directories of the items that hold arrays, and notes about what is left out."""
    if store.exists(MANIFEST) or store.exists(TREE):
        return [""], []
    if _unmerged(store, ""):
        raise _not_merged(store, "")
    folders = store.folders()
    roots = [f"{name}/" for name in folders if any(store.exists(f"{name}/{file}") for file in (MANIFEST, TREE))]
    torn = next((name for name in folders if f"{name}/" not in roots and _unmerged(store, f"{name}/")), None)
    if torn is not None:
        raise _not_merged(store, f"{torn}/")
    if not roots:
        raise UnsupportedError(
            "no item of this checkpoint holds a tree of arrays",
            file=store.label,
            hint=f"items here: {', '.join(folders) or 'none'}",
        )
    others = [name for name in folders if f"{name}/" not in roots]
    return roots, [f"items that are no trees of arrays are not read: {', '.join(others)}"] if others else []


def _not_merged(store: ReadStore, root: str) -> MissingShardError:
    return MissingShardError(
        f"there is {root}{_unmerged(store, root)}, but no {root}{MANIFEST}: the save did not finish",
        file=root + MANIFEST,
        hint="use an older checkpoint",
    )


def _item(store: ReadStore, root: str, notes: list[str]) -> _Item:
    if not store.exists(root + MANIFEST) and _unmerged(store, root):
        raise _not_merged(store, root)
    arrays = arrays_in(store, root)
    if not store.exists(root + TREE):
        if store.exists(root + _AGGREGATE):
            notes.append(
                f"{root}{_AGGREGATE} (msgpack) is not read: the nesting, and values that stand in it, are lost"
            )
        return _Item(arrays, {}, None)
    leaves = leaves_of(store, root)
    objects: dict[str, object] = {}
    for name, leaf in leaves.items():
        if name in arrays:
            continue
        if leaf.is_array:
            raise MissingShardError(
                f"{TREE} lists it ({leaf.kind}), but no array of this name is stored",
                file=root + TREE,
                key=name,
                hint="copy the checkpoint again, with all its files",
            )
        objects[name] = leaf.value
    paths = {name: leaf.path for name, leaf in leaves.items()}
    return _Item(arrays, objects, paths | {name: (name,) for name in arrays if name not in paths})


def _skeleton(store: ReadStore, parts: Mapping[str, _Item]) -> object:
    """The nesting of all items, or None where one of them does not tell its own."""
    leaves: dict[Path, object] = {}
    for prefix, part in parts.items():
        if part.paths is None:
            return None
        for name, path in part.paths.items():
            at: Path = (prefix[:-1], *path) if prefix else path
            if not at or at in leaves:
                raise CorruptError(f"{TREE} gives the path {at!r:.200} to two entries", file=store.label)
            leaves[at] = ObjectLeaf(prefix + name) if name in part.objects else TensorLeaf(prefix + name)
    return nest_leaves(leaves)


def _iteration(catalog: Catalog, store: ReadStore, notes: list[str]) -> int | None:
    """What an integer scalar called ``step``, or so, says; None without one."""
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
            return number
    return None


FORMAT = Format(
    name="orbax",
    title="Orbax (OCDBT)",
    sniff=sniff,
    read=read,
    lay_out=None,
    aliases=("ocdbt",),
)
