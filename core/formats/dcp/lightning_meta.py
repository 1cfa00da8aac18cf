"""``meta.pt`` beside a DCP checkpoint: the entries that Lightning does not give to DCP.

On disk (Lightning's Trainer and Fabric with sharded checkpoints)::

    step.ckpt/
    ├── .metadata  __0_0.distcp …    DCP: "state_dict" (or "model"), "optimizer_0" …
    └── meta.pt                      torch.save: epoch, hyper_parameters, loops, callbacks, lr_schedulers …

Lightning reads both into one dict, and so does its tool that makes one file of them. Here they are one catalog too:
what ``meta.pt`` holds are entries like all others, and ``DcpFacts.meta_entries`` names those of its root. Written as
DCP they go into a ``meta.pt`` again.

A ``meta.pt`` that is no file of torch, whose root is no dict by name, or that has an entry which DCP has too, is not
Lightning's: it is left alone, with a note, and listed in ``DcpFacts.unread``.

Source: Lightning 2.6.6 ``fabric/utilities/load.py`` (``_load_distributed_checkpoint``) and
``pytorch/strategies/model_parallel.py``; a directory that it wrote, pinned in tests/golden (``lightning``).
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
        UnsafeError: it is a hostile pickle.
    """
    if not store.exists(META):
        return catalog
    if stream_kind(store, META, 0, store.size(META)) not in ("zip", "legacy"):
        return _left_alone(catalog, "is no file of torch.save")
    tree = parse(store, META)
    root = as_mapping(tree.value)
    flat: dict[object, object] = {key: TensorLeaf(key) for key in catalog.tensors}
    flat |= {key: ObjectLeaf(key) for key in catalog.objects}
    above = as_mapping(flat if catalog.skeleton is None else catalog.skeleton)
    names = [] if root is None else [name for name in root if isinstance(name, str)]
    if root is None or above is None or len(names) < len(root):
        return _left_alone(catalog, "holds no dict of entries by name")
    own = {*catalog.tensors, *catalog.objects, *catalog.hidden}
    both = {*above} & {*root} | own & {*tree.arrays, *tree.objects, *tree.hidden}
    if both:
        return _left_alone(catalog, f"has an entry {min(map(str, both))!r}, which the checkpoint has as well")
    joined = catalog.with_hidden({**tree.arrays, **tree.hidden})
    joined = replace(
        joined,
        tensors={**catalog.tensors, **metas_of(tree.arrays)},
        hidden={**catalog.hidden, **metas_of(tree.hidden)},
        objects={**catalog.objects, **tree.objects},
        skeleton={**above, **root},
        aliases=tree.aliases,
        unsupported=tree.unsupported,
    ).noted(tree.notes)
    return joined.with_facet(replace(_facts(catalog), meta_entries=tuple(names)))


def _facts(catalog: AnyCatalog) -> DcpFacts:
    return catalog.facet(DcpFacts) or DcpFacts()


def _left_alone(catalog: Catalog, why: str) -> Catalog:
    facts = replace(_facts(catalog), unread=(META,))
    return catalog.noted([f"{META} {why}, so it was not read"]).with_facet(facts)


def _meta_part(catalog: AnyCatalog) -> dict[object, object]:
    """Return the entries of the root that belong into ``meta.pt``, by name."""
    names = _facts(catalog).meta_entries
    root = as_mapping(catalog.skeleton) or {}
    return {name: node for name, node in root.items() if name in names}


def meta_keys(catalog: AnyCatalog) -> Set[str]:
    """Return the keys of a catalog's tensors and objects that belong into ``meta.pt``."""
    return {entry.key for entry in entries(_meta_part(catalog))}


def parted(target: TargetCatalog) -> tuple[TargetCatalog, FileImage | None]:
    """Part a catalog into what DCP holds and the image of ``meta.pt``; None if nothing belongs there.

    Raises:
        UnsupportedError: a tensor of a kind that is not handled, or in several pieces, belongs there.
    """
    part = _meta_part(target)
    if not part:
        return target, None
    keys = meta_keys(target)
    beside = replace(
        target,
        tensors={key: meta for key, meta in target.tensors.items() if key in keys},
        objects={key: item for key, item in target.objects.items() if key in keys},
        skeleton=part,
    )
    inside = {leaf.key for item in beside.objects.values() for leaf in walk(item.value) if isinstance(leaf, TensorLeaf)}
    rest = replace(
        target,
        tensors={key: meta for key, meta in target.tensors.items() if key not in keys},
        objects={key: item for key, item in target.objects.items() if key not in keys},
        hidden={key: meta for key, meta in target.hidden.items() if key not in inside},
        skeleton={name: node for name, node in (as_mapping(target.skeleton) or {}).items() if name not in part},
    )
    (image,) = torch_file.lay_out(beside)
    return rest, replace(image, path=META)
