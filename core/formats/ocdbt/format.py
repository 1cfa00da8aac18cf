"""Orbax, the checkpoints of JAX: zarr arrays in an OCDBT database, and a few JSON files.

On disk (one *item*)::

    state/
    ├── manifest.ocdbt        location of the tree of keys (``core.formats.ocdbt.entries``)
    ├── d/…                   its data files
    ├── ocdbt.process_0/…     one database per process that saved; the merged tree refers to them
    ├── _METADATA, _strings.json       nesting, and values of strings (``core.formats.ocdbt.tree``)
    ├── _sharding                      devices of the arrays; of use for typed random keys alone
    ├── array_metadatas/process_0      which arrays are typed random keys
    ├── commit_success.txt             the save has finished (0.12.3 and newer)
    └── params.dense.kernel/  without OCDBT: a directory per array, no manifest

A checkpoint of ``CheckpointManager`` is a directory of several items (``10/state``, ``10/meta``)
with a ``_CHECKPOINT_METADATA``. If only one item contains arrays, it is the checkpoint; if several
do, each is an entry of the root, under its name. The key of an array is its path, joined by dots,
which is Orbax's own name for it; with several items the item's name comes first.

Chunks in ``d/`` that are not compressed are copied byte for byte. Values in the nodes of the tree
(up to 1 KiB) and compressed chunks are decoded chunk by chunk.

Attributes (``core.engine.catalog.attributes``): the custom metadata of the checkpoint are those of
the root, those of the tree and the metrics those of their files. A typed random key is an array of
uint32 whose attributes name the kind of key.

``Catalog.iteration`` is set from an integer scalar with a name such as ``step``, else from the
custom metadata of ``_CHECKPOINT_METADATA`` that this project writes; ``notes`` list what is not
read. What is written is described in ``core.formats.ocdbt.write``.

Versions: Orbax 0.12 with and without OCDBT, zarr 2 and zarr 3; older ones that write the same
    files.

Not supported: values in the msgpack file ``checkpoint`` of old versions (the arrays are
read, under flat keys); items of other kinds, such as JSON; checkpoints that were not merged
(``ocdbt.process_0`` without a manifest next to it); on writing, objects that are not plain values,
    which are listed as not carried, and dtypes that zarr lacks.

Source: checkpoints written by orbax-checkpoint 0.12.8 with tensorstore 0.1.86.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from core.arrays.dtypes import dtype_of
from core.engine.catalog.attributes import ROOT, Attributes, with_attributes
from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.dropped import Dropped
from core.engine.catalog.facets import ZarrFacts
from core.engine.catalog.tensor import Fragment, Tensor, bind_argument
from core.errors import CheckpointingException, CorruptError, MissingShardError, UnsupportedError
from core.formats.format import Format, imported_on_call
from core.formats.missing_entries import report_missing
from core.formats.ocdbt.entries import MANIFEST
from core.formats.ocdbt.tree import (
    CHECKPOINT,
    CUSTOM,
    ITERATION,
    TREE,
    leaves_of,
    read_attributes,
    read_key_kinds,
    read_tree,
)
from core.pickle.fields import int_or_none
from core.pickle.inert import ObjectLeaf, TensorLeaf
from core.pickle.nesting import Path, nest_leaves
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.formats.ocdbt.database import OrbaxArray

_AGGREGATE = "checkpoint"
_PROCESS = re.compile(r"ocdbt\.process_\w+")
_USUAL_ITEMS = ("default", "state", "params")
_ITERATIONS = ("step", "iteration", "global_step", "train_state.step", "state.step")
_MAX_ITERATION = 1 << 48


def sniff(store: ReadStore) -> bool:
    """Return whether the directory or an item in it has an OCDBT manifest or Orbax's metadata."""
    if store.entry is not None:
        return False
    if any(map(store.exists, (MANIFEST, TREE, CHECKPOINT))) or _unmerged_database(store, ""):
        return True
    return any(store.exists(f"{item}/{MANIFEST}") for item in _USUAL_ITEMS)


def _unmerged_database(store: ReadStore, root: str) -> str | None:
    """Return the first directory with the database of a single process, or None."""
    return next(
        (name for name in store.folders(root.removesuffix("/")) if _PROCESS.fullmatch(name)), None
    )


def read(store: ReadStore) -> Catalog:
    """Read the catalog of an Orbax checkpoint, or of an OCDBT database of zarr arrays.

    Raises:
        MissingShardError: a chunk, a file or an array that ``_METADATA`` lists is missing.
        CorruptError, TruncatedError: the files contradict each other.
        UnsupportedError: an item or array is stored in a way that is not supported.
        UnsafeError: a path leads outside the checkpoint, or the database inflates too much.
    """
    # Read each item. If there are several, their names become the first part of keys.
    roots, notes = _find_items(store)
    parts: dict[str, OrbaxItem] = {}
    arrays: dict[str, OrbaxArray] = {}
    objects: dict[str, StoredObject] = {}
    dropped: list[Dropped] = []
    attributes = read_attributes(store)
    for root in roots:
        prefix = root.replace("/", ".") if len(roots) > 1 else ""
        part = parts[prefix] = _read_item(store, root)
        attributes |= {prefix + name: values for name, values in part.attributes.items()}
        arrays |= {prefix + name: array for name, array in part.arrays.items()}
        for name, value in part.objects.items():
            objects[prefix + name] = StoredObject(prefix + name, value=value)
        notes += part.notes
        dropped += part.dropped

    # Building the fragments of an array may read the indexes of its shards.
    @lru_cache(maxsize=64)
    def read_fragments(key: str) -> Sequence[Fragment]:
        return tuple(arrays[key].fragments(key))

    catalog = Catalog(
        format="orbax",
        version=None,
        tensors={
            key: Tensor(
                array.array.dtype, array.array.grid.shape, bind_argument(read_fragments, key)
            )
            for key, array in arrays.items()
        },
        objects=objects,
        skeleton=_skeleton(store, parts),
    )
    recorded = _recorded_iteration(attributes.get(ROOT, {}))
    if recorded is not None:
        attributes[ROOT] = {
            name: value for name, value in attributes[ROOT].items() if name != ITERATION
        }
    catalog = with_attributes(catalog, attributes)
    iteration, iteration_notes = _iteration(catalog, store, recorded)
    catalog = replace(
        catalog, iteration=iteration, notes=(*notes, *iteration_notes), dropped=tuple(dropped)
    )

    # Record the arrays that may lack chunks; True if only the indexes of their shards show it.
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
        notes: messages to the user about files that are not read.
        attributes: name of an array, or of the tree's file → its attributes.
        dropped: the record of what is read but not kept.
    """

    arrays: dict[str, OrbaxArray]
    objects: dict[str, object]
    paths: dict[str, Path] | None
    notes: tuple[str, ...] = ()
    attributes: Mapping[str, Attributes] = field(default_factory=dict)
    dropped: tuple[Dropped, ...] = ()


def _find_items(store: ReadStore) -> tuple[list[str], list[str]]:
    """Return the directories of the items with arrays, and notes on the other items.

    Raises:
        MissingShardError: an item was not merged.
        UnsupportedError: no item has arrays.
    """

    def has_arrays(root: str) -> bool:
        return store.exists(root + MANIFEST) or store.exists(root + TREE)

    # The directory is an item itself, or contains items.
    if has_arrays(""):
        return [""], []
    _refuse_unmerged(store, "")
    folders = store.folders()
    roots = [f"{name}/" for name in folders if has_arrays(f"{name}/")]
    other_items = [name for name in folders if f"{name}/" not in roots]
    for name in other_items:
        _refuse_unmerged(store, f"{name}/")
    if not roots:
        raise UnsupportedError(
            "no item of this checkpoint is a tree of arrays",
            file=store.label,
            hint=f"check how the checkpoint was saved; its items are {', '.join(folders)}"
            if folders
            else "check that this is the right directory; it has no items",
        )
    note = (
        f"these items were not read, because they are not trees of arrays: {', '.join(other_items)}"
    )
    return roots, [note] if other_items else []


def _refuse_unmerged(store: ReadStore, root: str) -> None:
    """Raise MissingShardError if an item has databases of single processes but no merged one."""
    if store.exists(root + MANIFEST):
        return
    database = _unmerged_database(store, root)
    if database is not None:
        raise MissingShardError(
            f"{root}{database} exists, but {root}{MANIFEST} is missing, so the save did not finish",
            file=root + MANIFEST,
            hint="use an older checkpoint",
        )


def _read_item(store: ReadStore, root: str) -> OrbaxItem:
    """Read the arrays and objects of one item.

    Raises:
        MissingShardError: the item was not merged, or an array that ``_METADATA`` lists is missing.
        CheckpointingException: its files cannot be read, see ``arrays_in`` and ``leaves_of``.
    """
    from core.formats.ocdbt.database import arrays_in

    _refuse_unmerged(store, root)
    arrays = arrays_in(store, root)
    # Old versions of Orbax store nesting and other values in a msgpack file.
    if not store.exists(root + TREE):
        has_aggregate = store.exists(root + _AGGREGATE)
        note = (
            f"{root}{_AGGREGATE} (msgpack) was not read, so the nesting and values in it are lost"
        )
        return OrbaxItem(arrays, {}, None, (note,) if has_aggregate else ())

    # Every leaf is an array or has a value; arrays that the tree does not list are at the root.
    tree = read_tree(store, root)
    leaves = leaves_of(store, root, tree)
    objects: dict[str, object] = {}
    for name, leaf in leaves.items():
        if name in arrays:
            continue
        if leaf.is_array:
            report_missing(
                MissingShardError(
                    f"{TREE} lists the entry ({leaf.kind}), but its array is missing",
                    file=root + TREE,
                    key=name,
                    hint="copy the checkpoint again, with all its files",
                )
            )
            continue
        objects[name] = leaf.value
    paths = {name: leaf.path for name, leaf in leaves.items() if name in arrays or name in objects}
    paths |= {name: (name,) for name in arrays if name not in paths}
    # Only arrays of 32-bit words can be typed keys; other checkpoints save the reading.
    may_have_keys = any(array.array.dtype == "uint32" for array in arrays.values())
    attributes, dropped = read_key_kinds(store, root) if may_have_keys else ({}, ())
    if tree.get(CUSTOM) is not None:
        attributes[TREE] = {CUSTOM: tree[CUSTOM]}
    return OrbaxItem(arrays, objects, paths, attributes=attributes, dropped=dropped)


def _skeleton(store: ReadStore, parts: Mapping[str, OrbaxItem]) -> object:
    """Build the nesting of all items; None if the nesting of an item is not stored.

    Raises:
        CorruptError: two entries have the same path, or a path is empty.
    """
    leaves: dict[Path, object] = {}
    for prefix, part in parts.items():
        if part.paths is None:
            return None
        for name, path in part.paths.items():
            full_path: Path = (prefix[:-1], *path) if prefix else path
            if not full_path or full_path in leaves:
                raise CorruptError(
                    f"{TREE} assigns the path {full_path!r:.200} to two entries", file=store.label
                )
            leaves[full_path] = (
                ObjectLeaf(prefix + name) if name in part.objects else TensorLeaf(prefix + name)
            )
    return nest_leaves(leaves)


def _recorded_iteration(custom: Attributes) -> int | None:
    """Return the iteration in custom metadata that this project writes; None without."""
    iteration = int_or_none(custom.get(ITERATION))
    return iteration if iteration is not None and iteration >= 0 else None


def _iteration(
    catalog: Catalog, store: ReadStore, recorded: int | None
) -> tuple[int | None, list[str]]:
    """Return the value of an integer scalar such as ``step``, and notes on unreadable ones.

    Args:
        recorded: the iteration to return if there is no such scalar.
    """
    notes: list[str] = []
    for key in _ITERATIONS:
        tensor = catalog.tensors.get(key)
        if (
            tensor is None
            or tensor.shape != ()
            or dtype_of(tensor.dtype).kind not in ("int", "uint")
        ):
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
        number = int.from_bytes(data, "little", signed=dtype_of(tensor.dtype).kind == "int")
        if 0 <= number < _MAX_ITERATION:
            return number, notes
    return recorded, notes


FORMAT = Format(
    name="orbax",
    title="Orbax (OCDBT)",
    sniff=sniff,
    read=read,
    lay_out=imported_on_call("ocdbt.write", "lay_out"),
    load_call=imported_on_call("load_calls", "orbax_restore"),
    has_text_keys=True,
    keeps_attributes=True,
    aliases=("ocdbt",),
    splits_files=True,
    adapt=imported_on_call("ocdbt.write", "storable"),
)
