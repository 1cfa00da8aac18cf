"""Remove entries of a catalog together with what only they use, and record them as not carried."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import Dropped, dropped_unlisted
from core.engine.catalog.facets import MegatronModel
from core.engine.catalog.mapping_attributes import attributes_of
from core.pickle.inert import TensorLeaf, walk
from core.pickle.nesting import REMOVED, map_leaves


def drop_entries(catalog: Catalog, reasons: Mapping[str, str]) -> Catalog:
    """Return a copy of a catalog without some entries, which are recorded as not carried.

    Args:
        reasons: key of a tensor or loaded object → why the destination does not hold it.
    """
    if not reasons:
        return catalog
    record = (Dropped((key,), reason) for key, reason in reasons.items())
    remaining = remove_entries(catalog, reasons.keys())
    return record_unlisted(replace(remaining, dropped=(*catalog.dropped, *record)), catalog)


def record_unlisted(catalog: Catalog, before: Catalog, reason: str = "") -> Catalog:
    """Record the tensors that a catalog no longer has as not carried, without listing them.

    For entries that the user excluded, and those that other records list.
    """
    remaining = catalog.tensors.keys() | catalog.hidden.keys()
    removed = {
        key: tensor
        for key, tensor in (*before.tensors.items(), *before.hidden.items())
        if key not in remaining
    }
    return replace(catalog, dropped=(*catalog.dropped, *dropped_unlisted(removed, reason)))


def record_replaced(catalog: Catalog, before: Catalog, keys: Iterable[str]) -> Catalog:
    """Record that tensors are those of another checkpoint, as the user requested."""
    replaced = {key: before.tensors[key] for key in keys}
    return replace(catalog, dropped=(*catalog.dropped, *dropped_unlisted(replaced, "replaced")))


def remove_entries(catalog: Catalog, keys: Collection[str]) -> Catalog:
    """Return a copy of a catalog without some entries, and the hidden tensors that only they use.

    Args:
        keys: keys of tensors and objects.
    """
    skeleton = catalog.skeleton
    if skeleton is not None:
        skeleton = map_leaves(skeleton, lambda entry: REMOVED if entry.key in keys else entry.leaf)
    remaining = replace(
        catalog,
        tensors={key: tensor for key, tensor in catalog.tensors.items() if key not in keys},
        objects={key: item for key, item in catalog.objects.items() if key not in keys},
        skeleton=skeleton,
    )
    return without_unused_tensors(remaining, catalog)


def without_unused_tensors(catalog: Catalog, before: Catalog) -> Catalog:
    """Return a copy of a catalog without the hidden tensors that something used only ``before``.

    A tensor to which nothing has referred before may be the optimizer's, and is kept.
    """
    unused = find_used_tensors(before) - find_used_tensors(catalog)
    hidden = {key: tensor for key, tensor in catalog.hidden.items() if key not in unused}
    return replace(catalog, hidden=hidden)


def find_used_tensors(catalog: Catalog) -> set[str]:
    """Return the keys of the hidden tensors that entries refer to."""
    model, optimizer = catalog.facet(MegatronModel), catalog.optimizer
    values = [
        catalog.common,
        None if model is None else model.rng_states,
        [] if optimizer is None else [optimizer.step, optimizer.entries],
        [attribute.value for attribute in attributes_of(catalog.skeleton)],
        *(item.value for item in catalog.objects.values()),
    ]
    keys = {leaf.key for leaf in walk(values) if isinstance(leaf, TensorLeaf)}
    return keys | {item.raw_key for item in catalog.objects.values() if item.raw_key is not None}
