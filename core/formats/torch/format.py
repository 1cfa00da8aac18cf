"""``torch.save`` files: reading one into an inert tree and stored arrays, and planning one.

A file is a torch zip (package ``zip`` beside this module): a pickle and one record per storage; or,
from before torch 1.6, a stream of both (``legacy``). Reading it runs nothing: the pickle becomes an
inert tree (``core.pickle.reader``) with a ``TensorLeaf`` in place of each tensor (``tensors``),
whose bytes stay in the file. Records that another program deflated, and those from a big-endian
machine, are decoded (``zip.records``).

A catalog of this format: every tensor that is reached through mappings and lists has its path,
dot-joined, as key; where two paths join to one key, dots inside names are written ``\\.``. The
skeleton is the complete unpickled root; it contains the values that are not tensors, and they are
listed in ``objects`` too. Pickled modules are read as their state dicts (``object_tensors``).
Tensors inside other objects are ``hidden``.

Tensors that have the same bytes are tied (``Catalog.ties``). Tensors in ``refused``
are not plain dense ones: they are objects of the skeleton and cannot be written. ``iteration`` and
``args`` are the root's; in a Lightning file's Trainer, ``global_step`` is the iteration.
Facet: ``TorchFileFacts``.

On disk: one file with any name. In a directory, only ``checkpoint.pt`` is read, which is also the
name that is written.

Versions: all but the tar files of torch 0.1; written as torch 2.13 does. Objects that torch refuses
by default (``weights_only``) are written below a reserved key, see ``torch.weights_only``, and put
back on reading; with ``WriteOptions.weights_only`` false they stay in their places.

Not supported, refused by name: the tar files of torch 0.1, TorchScript, bare pickles.

Source: torch 2.13 ``torch/serialization.py``; files written by it, pinned in tests/golden
    (``hf/llama/torch_single``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import AnyCatalog, TargetCatalog, catalog_of_arrays
from core.engine.catalog.facets import TorchFileFacts
from core.engine.catalog.file_image import FileImage
from core.engine.catalog.optimizer_keys import LIGHTNING_VERSION
from core.errors import Report, UnsupportedError, raising
from core.formats.format import Format, imported_on_call, no_folders
from core.formats.torch.stream import SUFFIXES
from core.formats.torch.tree import TorchTree as TorchTree
from core.formats.torch.tree import load_object as load_object
from core.formats.torch.tree import parse as parse
from core.formats.torch.tree import stream_kind
from core.formats.torch.weights_only import refusal_notes
from core.pickle.fields import int_or_none
from core.pickle.inert import ObjectLeaf, Persistent, TensorLeaf, as_mapping, attributes, walk
from core.pickle.nesting import ENDLESS, endless_error, map_leaves
from core.pickle.noted import gc_paused

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog
    from core.files.store import ReadStore
    from core.pickle.nesting import LeafEntry

FILE_NAME = "checkpoint.pt"
PREFIX = "archive"
_SHARD = re.compile(r"-(\d{5,})-of-(\d{5,})\.(?:bin|pt|pth)$")
"""The name of a file of sharded weights, such as ``pytorch_model-00001-of-00002.bin``."""


def sniff(store: ReadStore) -> bool:
    """Return whether the file, or ``checkpoint.pt`` in the directory, is in one of torch's formats.

    Old formats count, supported or not, so that ``read`` can name them. Other files in a directory
    are ignored: the user has to pass the file itself.
    """
    name = _checkpoint_file(store)
    if name is None or store.size(name) < 4:
        return False
    # A bare pickle may be any program's, so the name has to agree.
    kind = stream_kind(store, name, 0, store.size(name))
    return kind in ("zip", "legacy", "tar") or (kind == "pickle" and name.endswith(SUFFIXES))


def _checkpoint_file(store: ReadStore) -> str | None:
    """Return the name of the file that is the checkpoint, or None."""
    if store.entry is not None:
        return store.entry if store.exists(store.entry) else None
    return FILE_NAME if store.exists(FILE_NAME) else None


def read(store: ReadStore) -> Catalog:
    """Read the catalog of a single file, or of a directory that holds ``checkpoint.pt``.

    Raises:
        CorruptError, TruncatedError: the file is damaged.
        UnsupportedError: there is no such file, or it is of another kind.
        UnsafeError: a hostile pickle.
    """
    name = _checkpoint_file(store)
    if name is None:
        raise UnsupportedError(
            f"the directory does not contain {FILE_NAME}",
            file=store.label,
            hint="pass the checkpoint file itself",
        )
    catalog = read_file_catalog(store, name)
    # A shard is read, but the user may have wanted all of them.
    shard = _SHARD.search(name)
    if shard is None or int(shard[2]) < 2:
        return catalog
    return catalog.noted(
        [f"this is file {int(shard[1])} of {int(shard[2])}; pass the directory to read all of them"]
    )


def salvage(store: ReadStore, report: Report) -> Catalog:
    """Read the tensors of a file whose records are complete, though its zip was cut or is damaged.

    Args:
        report: receives the error of the zip.

    Raises:
        CheckpointingException: there is no such file, or its pickle cannot be read.
    """
    name = _checkpoint_file(store)
    return read(store) if name is None else read_file_catalog(store, name, report=report)


def read_file_catalog(store: ReadStore, name: str, *, report: Report = raising) -> Catalog:
    """Read the catalog of one file of a store; raises the errors of ``read``.

    Args:
        report: as for ``parse``.
    """
    tree = parse(store, name, report=report)
    root = as_mapping(tree.value) or {}
    step = "global_step" if LIGHTNING_VERSION in root else "iteration"
    args = root.get("args")
    return replace(
        catalog_of_tree(tree, format="torch"),
        iteration=int_or_none(root.get(step)),
        args=args if attributes(args) is not None else None,
    ).with_facet(TorchFileFacts(is_set_aside=tree.is_set_aside, shared=tree.shared))


def catalog_of_tree(tree: TorchTree, *, format: str) -> Catalog:
    """Return the catalog of a parsed ``torch.save`` stream.

    Args:
        format: name of the format whose file contains the stream.
    """
    catalog = catalog_of_arrays(
        format=format,
        version=tree.version,
        arrays=tree.arrays,
        objects=tree.objects,
        hidden=tree.hidden,
        skeleton=tree.value,
    )
    return replace(catalog, notes=tree.notes, dropped=tree.dropped)


def lay_out(target: TargetCatalog) -> Sequence[FileImage]:
    """Lay out one file, ``checkpoint.pt``.

    Args:
        target: every tensor is one array. Its skeleton is saved; without one, a dict of all tensors
            and objects by key. Tied tensors share a storage. Objects keep their classes if
            ``WriteOptions.weights_only`` is false.

    Raises:
        UnsupportedError: a tensor is of a kind that is not supported or is split into several
            arrays, an object has not been read, or cannot be written.
    """
    from core.formats.torch.weights_only import set_aside
    from core.formats.torch.zip.tree_layout import plan_tree

    refuse_unsupported(target)

    def value_of(entry: LeafEntry) -> object:
        if not isinstance(entry.leaf, ObjectLeaf):
            return entry.leaf
        item = target.objects[entry.leaf.key]
        if item.raw_key is not None:
            raise UnsupportedError(
                "the object was not loaded, so it cannot be written to this file",
                key=item.key,
                hint="drop it with --exclude",
            )
        return item.value

    # Put every object in its place in the skeleton, or in a flat dict.
    with gc_paused():
        root: object
        if target.skeleton is None:
            tensors = {key: TensorLeaf(key) for key in target.tensors}
            root = {**tensors, **{key: item.value for key, item in target.objects.items()}}
        else:
            root = map_leaves(target.skeleton, value_of)
        if target.write.weights_only:
            root = set_aside(root)
    return (plan_tree(root, target.whole_array, prefix=PREFIX).image(FILE_NAME),)


def refuse_unsupported(catalog: AnyCatalog) -> None:
    """Raise if a tensor or object of the catalog cannot be copied.

    Raises:
        UnsupportedError: a tensor is of a kind that is not supported, a container contains itself,
            or an object contains a bare storage; names the first one.
    """
    for key, kind in catalog.refused.items():
        if kind == ENDLESS:
            raise endless_error(key)
        raise UnsupportedError(
            f"ckpt cannot copy a {kind}",
            key=key,
            hint="drop it with --exclude, or save a plain tensor instead",
        )
    for item in catalog.objects.values():
        if any(isinstance(node, Persistent) for node in walk(item.value)):
            raise UnsupportedError(
                "the object contains a bare torch storage, which ckpt cannot copy",
                key=item.key,
                hint="drop it with --exclude",
            )


FORMAT = Format(
    name="torch",
    title="torch.save file",
    sniff=sniff,
    read=read,
    salvage=salvage,
    lay_out=lay_out,
    load_call=imported_on_call("load_calls", "torch_load"),
    is_single_file=True,
    keeps_nesting=True,
    has_live_objects=True,
    notes_of=refusal_notes,
    own_folders=no_folders,
)
