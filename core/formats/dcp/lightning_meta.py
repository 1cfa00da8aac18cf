"""``meta.pt`` of a DCP checkpoint: the entries that Lightning saves outside of DCP.

On disk (Lightning's Trainer and Fabric with sharded checkpoints)::

    step.ckpt/
    ├── .metadata  __0_0.distcp …    DCP: "state_dict" (or "model"), "optimizer_0" …
    └── meta.pt                      torch.save: epoch, hyper_parameters, loops, callbacks,
                                     lr_schedulers …

Lightning reads both into one dict, and so does its tool that consolidates them into one file. Here
they are one catalog too: the entries of ``meta.pt`` are entries like all others, and
``DcpFacts.meta_entries`` lists its top-level names. DCP output writes them to a ``meta.pt`` again.

A ``meta.pt`` was not written by Lightning if it is not a torch file, if its root is not a dict with
string keys, or if DCP has one of its entries too. It is ignored then, with a note, and listed in
``DcpFacts.unread``.

Source: Lightning 2.6.6 ``fabric/utilities/load.py`` (``_load_distributed_checkpoint``) and
``pytorch/strategies/model_parallel.py``; a directory that it wrote, pinned in tests/golden
(``lightning``).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from core.engine.catalog.catalog import AnyCatalog, Catalog, TargetCatalog
from core.engine.catalog.facets import DcpFacts
from core.engine.catalog.tensor import tensors_of
from core.formats.torch.tree import parse, stream_kind
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, walk
from core.pickle.nesting import entries

if TYPE_CHECKING:
    from core.engine.catalog.file_image import FileImage
    from core.files.store import ReadStore

META = "meta.pt"

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def with_meta(catalog: Catalog, store: ReadStore) -> Catalog:
    """Add the entries of ``meta.pt``, if there is one, to the catalog of a DCP checkpoint.

    Raises:
        CorruptError, TruncatedError: the file is damaged.
        UnsafeError: the file is a hostile pickle.
    """
    if not store.exists(META):
        return catalog
    if stream_kind(store, META, 0, store.size(META)) not in ("zip", "legacy"):
        return _with_meta_ignored(catalog, "was not written by torch.save")
    tree = parse(store, META)
    root = as_mapping(tree.value)

    # Both roots must be dicts with string keys. A checkpoint without nesting is a flat dict.
    flat: dict[object, object] = {key: TensorLeaf(key) for key in catalog.tensors}
    flat |= {key: ObjectLeaf(key) for key in catalog.objects}
    skeleton = as_mapping(flat if catalog.skeleton is None else catalog.skeleton)
    if root is None or skeleton is None or not all(isinstance(name, str) for name in root):
        return _with_meta_ignored(catalog, "is not a dict with string keys")

    # Lightning divides the entries between the two files, so none is in both.
    dcp_keys = {*catalog.tensors, *catalog.objects, *catalog.hidden}
    duplicates = {*skeleton} & {*root} | dcp_keys & {*tree.arrays, *tree.objects, *tree.hidden}
    if duplicates:
        return _with_meta_ignored(
            catalog, f"has an entry {min(map(str, duplicates))!r} that is also in the checkpoint"
        )

    joined = catalog.with_hidden({**tree.arrays, **tree.hidden})
    joined = replace(
        joined,
        tensors={**catalog.tensors, **tensors_of(tree.arrays)},
        hidden={**catalog.hidden, **tensors_of(tree.hidden)},
        objects={**catalog.objects, **tree.objects},
        skeleton={**skeleton, **root},
        dropped=(*catalog.dropped, *tree.dropped),
    ).noted(tree.notes)
    meta_entries = tuple(str(name) for name in root)
    return joined.with_facet(replace(_facts(catalog), meta_entries=meta_entries))


def _facts(catalog: AnyCatalog) -> DcpFacts:
    """Return the facet of a catalog; an empty one if it was not read from DCP."""
    return catalog.facet(DcpFacts) or DcpFacts()


def _with_meta_ignored(catalog: Catalog, reason: str) -> Catalog:
    """Add the note that explains why ``meta.pt`` was not read."""
    facts = replace(_facts(catalog), unread=(META,))
    return catalog.noted([f"{META} {reason}, so it was not read"]).with_facet(facts)


def meta_keys(catalog: AnyCatalog) -> Set[str]:
    """Return the keys of a catalog's tensors and objects that belong in ``meta.pt``."""
    return {entry.key for entry in entries(_divide_root(catalog)[0])}


def split_meta(target: TargetCatalog) -> tuple[TargetCatalog, FileImage | None]:
    """Split a catalog into the part for DCP and the file layout of ``meta.pt``.

    The layout is None if no entry belongs in ``meta.pt``.

    Raises:
        UnsupportedError: a tensor of ``meta.pt`` is of an unsupported kind, or in several chunks.
    """
    from core.formats.torch import format as torch_file

    meta_root, dcp_root = _divide_root(target)
    if not meta_root:
        return target, None
    keys = meta_keys(target)
    meta_tensors, dcp_tensors = _divide(target.tensors, keys)
    meta_objects, dcp_objects = _divide(target.objects, keys)
    meta_target = replace(target, tensors=meta_tensors, objects=meta_objects, skeleton=meta_root)
    (image,) = torch_file.lay_out(meta_target)

    # Tensors inside the objects of meta.pt are written there, so DCP does not need them.
    meta_leaves = {
        leaf.key
        for item in meta_objects.values()
        for leaf in walk(item.value)
        if isinstance(leaf, TensorLeaf)
    }
    _, dcp_hidden = _divide(target.hidden, meta_leaves)
    dcp_target = replace(
        target, tensors=dcp_tensors, objects=dcp_objects, hidden=dcp_hidden, skeleton=dcp_root
    )
    return dcp_target, replace(image, path=META)


def _divide_root(catalog: AnyCatalog) -> tuple[dict[object, object], dict[object, object]]:
    """Return the top-level entries of ``meta.pt`` and those of DCP, by name."""
    return _divide(as_mapping(catalog.skeleton) or {}, {*_facts(catalog).meta_entries})


def _divide(
    items: Mapping[_Key, _Value], keys: Set[_Key]
) -> tuple[dict[_Key, _Value], dict[_Key, _Value]]:
    """Divide a mapping into the items with one of the keys and the other items."""
    matching = {key: value for key, value in items.items() if key in keys}
    return matching, {key: value for key, value in items.items() if key not in keys}
