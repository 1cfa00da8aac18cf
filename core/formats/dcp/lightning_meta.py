"""``meta.pt`` beside a DCP checkpoint: the entries that Lightning does not give to DCP.

On disk (Lightning's Trainer and Fabric with sharded checkpoints)::

    step.ckpt/
    ├── .metadata  __0_0.distcp …    DCP: "state_dict" (or "model"), "optimizer_0" …
    └── meta.pt                      torch.save: epoch, hyper_parameters, loops, callbacks, lr_schedulers …

Lightning reads both into one dict, and so does its tool that makes one file of them. Here they are
one catalog too: the entries of ``meta.pt`` are entries like all others, and
``DcpFacts.meta_entries`` names those of its root. Written as DCP they go into a ``meta.pt`` again.

A ``meta.pt`` that is not a torch file, whose root is not a dict by name, or that has an entry which
DCP has too, is not Lightning's: it is ignored, with a note, and listed in ``DcpFacts.unread``.

Source: Lightning 2.6.6 ``fabric/utilities/load.py`` (``_load_distributed_checkpoint``) and
``pytorch/strategies/model_parallel.py``; a directory that it wrote, pinned in tests/golden
(``lightning``).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import TYPE_CHECKING

from core.catalog.catalog import AnyCatalog, Catalog, TargetCatalog, metas_of
from core.formats.dcp.facets import DcpFacts
from core.formats.torch import format as torch_file
from core.formats.torch.tree import parse, stream_kind
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, walk
from core.pickle.nesting import entries

if TYPE_CHECKING:
    from core.catalog.file_image import FileImage
    from core.files.store import ReadStore

META = "meta.pt"


def with_meta(catalog: Catalog, store: ReadStore) -> Catalog:
    """Return a catalog of DCP with the entries of the ``meta.pt`` beside it.

    Raises:
        CorruptError, TruncatedError: the file is damaged.
        UnsafeError: the file is a hostile pickle.
    """
    if not store.exists(META):
        return catalog
    if stream_kind(store, META, 0, store.size(META)) not in ("zip", "legacy"):
        return _with_meta_ignored(catalog, "is not a file of torch.save")
    tree = parse(store, META)
    root = as_mapping(tree.value)
    # Both roots must be dicts by name, without common entries.
    flat: dict[object, object] = {key: TensorLeaf(key) for key in catalog.tensors}
    flat |= {key: ObjectLeaf(key) for key in catalog.objects}
    skeleton = as_mapping(flat if catalog.skeleton is None else catalog.skeleton)
    names = [] if root is None else [name for name in root if isinstance(name, str)]
    if root is None or skeleton is None or len(names) < len(root):
        return _with_meta_ignored(catalog, "is not a dict of entries by name")
    own = {*catalog.tensors, *catalog.objects, *catalog.hidden}
    duplicates = {*skeleton} & {*root} | own & {*tree.arrays, *tree.objects, *tree.hidden}
    if duplicates:
        return _with_meta_ignored(
            catalog, f"has an entry {min(map(str, duplicates))!r} that is also in the checkpoint"
        )
    # The catalog gets all entries of the file.
    joined = catalog.with_hidden({**tree.arrays, **tree.hidden})
    joined = replace(
        joined,
        tensors={**catalog.tensors, **metas_of(tree.arrays)},
        hidden={**catalog.hidden, **metas_of(tree.hidden)},
        objects={**catalog.objects, **tree.objects},
        skeleton={**skeleton, **root},
        aliases=tree.aliases,
        unsupported=tree.unsupported,
    ).noted(tree.notes)
    return joined.with_facet(replace(_facts(catalog), meta_entries=tuple(names)))


def _facts(catalog: AnyCatalog) -> DcpFacts:
    return catalog.facet(DcpFacts) or DcpFacts()


def _with_meta_ignored(catalog: Catalog, reason: str) -> Catalog:
    """Return a catalog whose note says why ``meta.pt`` was not read."""
    facts = replace(_facts(catalog), unread=(META,))
    return catalog.noted([f"{META} {reason}, so it was not read"]).with_facet(facts)


def _meta_entries(catalog: AnyCatalog) -> dict[object, object]:
    """Return the root's entries that belong into ``meta.pt``, by name."""
    names = _facts(catalog).meta_entries
    root = as_mapping(catalog.skeleton) or {}
    return {name: node for name, node in root.items() if name in names}


def meta_keys(catalog: AnyCatalog) -> Set[str]:
    """Return the keys of a catalog's tensors and objects that belong into ``meta.pt``."""
    return {entry.key for entry in entries(_meta_entries(catalog))}


def split_meta(target: TargetCatalog) -> tuple[TargetCatalog, FileImage | None]:
    """Split a catalog into the part that DCP holds and the image of ``meta.pt``.

    None if that has no entries.

    Raises:
        UnsupportedError: a tensor of ``meta.pt`` is of an unsupported kind, or in several pieces.
    """
    meta_entries = _meta_entries(target)
    if not meta_entries:
        return target, None
    keys = meta_keys(target)
    meta_target = replace(
        target,
        tensors={key: meta for key, meta in target.tensors.items() if key in keys},
        objects={key: item for key, item in target.objects.items() if key in keys},
        skeleton=meta_entries,
    )
    meta_leaves = {
        leaf.key
        for item in meta_target.objects.values()
        for leaf in walk(item.value)
        if isinstance(leaf, TensorLeaf)
    }
    rest = replace(
        target,
        tensors={key: meta for key, meta in target.tensors.items() if key not in keys},
        objects={key: item for key, item in target.objects.items() if key not in keys},
        hidden={key: meta for key, meta in target.hidden.items() if key not in meta_leaves},
        skeleton={
            name: node
            for name, node in (as_mapping(target.skeleton) or {}).items()
            if name not in meta_entries
        },
    )
    (image,) = torch_file.lay_out(meta_target)
    return rest, replace(image, path=META)
