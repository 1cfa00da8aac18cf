"""Attributes: what a checkpoint says about its tensors and containers besides their values.

::

    safetensors   {"__metadata__": {"ss_network_dim": "4"}, …}       the file
                  model.safetensors.index.json: {"metadata": {…}}    the index
    zarr          "attributes", "dimension_names"                    arrays and groups
    Orbax         custom_metadata, metrics                           the step and the tree
                  ext_metadata: {"random_key_impl": "threefry2x32"}  arrays

The catalog has one form for all of them: ``Tensor.attributes`` and ``Catalog.attributes``,
whose values are JSON. A format with ``Format.keeps_attributes`` has a place for them in its files.
Every other format that stores objects gets two entries at the root of the state dict:

* ``__metadata__``: the attributes of the root,
* ``__attributes__``: path of a tensor or container → its attributes.

A conversion takes these entries for attributes from the start, so that those of a tensor follow it
to its new name, whatever the format of the source, and leave with it. They become entries again
where the destination has no other place. What can be neither is listed as not carried
(``find_lost_attributes``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.dropped import Dropped
from core.engine.catalog.key_patterns import matcher
from core.pickle.inert import ObjectLeaf
from core.pickle.nesting import REMOVED, LeafEntry, map_leaves

if TYPE_CHECKING:
    from core.engine.catalog.catalog import AnyCatalog

ROOT = ""
"""The path of the root in ``Catalog.attributes``."""
DIMENSIONS = "_ARRAY_DIMENSIONS"
"""The attribute with the names of a tensor's axes, as xarray calls it in zarr 2."""
BY_PATH = "ckpt.attributes"
"""The member of a format's own metadata that holds attributes without a place of their own."""
ROOT_ENTRY = "__metadata__"
PATHS_ENTRY = "__attributes__"
ENTRIES = (ROOT_ENTRY, PATHS_ENTRY)

Attributes = Mapping[str, object]
AttributesByPath = Mapping[str, Attributes]


def collect_attributes(catalog: AnyCatalog) -> dict[str, Attributes]:
    """Return the attributes of all containers and tensors that have any, by path or key."""
    by_path = {path: values for path, values in catalog.attributes.items() if values}
    by_path |= {
        key: tensor.attributes for key, tensor in catalog.tensors.items() if tensor.attributes
    }
    return by_path


def with_attributes(catalog: Catalog, by_path: AttributesByPath) -> Catalog:
    """Return a copy of a catalog with attributes in addition to those that it has.

    Args:
        by_path: key of a tensor or path of a container → its attributes.
    """
    if not by_path:
        return catalog
    of_tensors = {path: values for path, values in by_path.items() if path in catalog.tensors}
    tensors = {
        key: replace(tensor, attributes={**(tensor.attributes or {}), **of_tensors[key]})
        if key in of_tensors
        else tensor
        for key, tensor in catalog.tensors.items()
    }
    containers = dict(catalog.attributes)
    for path, values in by_path.items():
        if path not in of_tensors:
            containers[path] = {**containers.get(path, {}), **values}
    return replace(catalog, tensors=tensors, attributes=containers)


def without_any_attributes(catalog: Catalog) -> Catalog:
    """Return a copy of a catalog without attributes."""
    tensors = {
        key: replace(tensor, attributes=None) if tensor.attributes else tensor
        for key, tensor in catalog.tensors.items()
    }
    return replace(catalog, tensors=tensors, attributes={})


def without_stale_attributes(catalog: Catalog, source: Catalog) -> Catalog:
    """Return a copy of a catalog without the attributes of tensors whose shape has changed.

    Names of axes and scales of a tensor do not hold for a stack of several, or for a part of it.

    Args:
        catalog: made from ``source`` by renaming, stacking and the like.
    """
    shapes = {
        id(tensor.attributes): tensor.shape
        for tensor in source.tensors.values()
        if tensor.attributes
    }
    stale = {
        key: replace(tensor, attributes=None)
        for key, tensor in catalog.tensors.items()
        if tensor.attributes and shapes.get(id(tensor.attributes), tensor.shape) != tensor.shape
    }
    return replace(catalog, tensors={**catalog.tensors, **stale}) if stale else catalog


def list_attribute_keys(catalog: AnyCatalog) -> list[str]:
    """List the keys of all attributes as entries, and of what holds them, for globs.

    For a tensor ``w`` with a ``scale``: ``__attributes__``, ``__attributes__.w`` and
    ``__attributes__.w.scale``.
    """
    keys: dict[str, None] = {}
    for path, values in collect_attributes(catalog).items():
        entry = _entry_key(path)
        keys |= dict.fromkeys((entry.partition(".")[0], entry))
        keys |= dict.fromkeys(f"{entry}.{name}" for name in values)
    return list(keys)


def drop_matching_attributes(catalog: Catalog, globs: Sequence[str]) -> Catalog:
    """Return a copy of a catalog without the attributes that globs name by the keys of entries.

    Args:
        globs: such as ``__metadata__``, ``__metadata__.ss_*`` and ``*.scale``.
    """
    matchers = [matcher(glob) for glob in globs]
    by_path = collect_attributes(catalog) if matchers else {}
    kept: dict[str, Attributes] = {}
    for path, values in by_path.items():
        key = _entry_key(path)
        owners = (key,) if path == ROOT else (PATHS_ENTRY, key)
        if not any(matches(owner) for matches in matchers for owner in owners):
            kept[path] = {
                name: value
                for name, value in values.items()
                if not any(matches(f"{key}.{name}") for matches in matchers)
            }
    if kept == by_path:
        return catalog
    return with_attributes(without_any_attributes(catalog), kept)


def _entry_key(path: str) -> str:
    """Return the key of the entry that holds the attributes of a path."""
    return ROOT_ENTRY if path == ROOT else f"{PATHS_ENTRY}.{path}"


def find_lost_attributes(source: AnyCatalog, catalog: AnyCatalog) -> dict[str, Attributes]:
    """Return those attributes of a source that a catalog made from it does not have, by path.

    They are compared by value. Equal ones at another path are those of a renamed tensor; each of
    them stands for one path of the source.
    """
    by_path, after = collect_attributes(source), collect_attributes(catalog)
    moved = Counter(
        json.dumps(values, default=dict)
        for path, values in after.items()
        if by_path.get(path) != values
    )
    lost = {}
    for path, values in by_path.items():
        if after.get(path) == values:
            continue
        text = json.dumps(values, default=dict)
        if moved[text]:
            moved[text] -= 1
        else:
            lost[path] = values
    return lost


def build_entry_values(catalog: AnyCatalog) -> dict[str, dict[str, object]]:
    """Return the attributes of a catalog as entries of a state dict, by name; {} without any."""
    by_path = collect_attributes(catalog)
    root = by_path.pop(ROOT, {})
    values = ((ROOT_ENTRY, root), (PATHS_ENTRY, by_path))
    return {name: _copy_json(value) for name, value in values if value}


def turn_into_entries(catalog: Catalog) -> Catalog:
    """Turn the attributes of a catalog into entries at the root of its state dict.

    Attributes that cannot be entries, as there is no dict at the root or a tensor has the name of
    the entry, are listed as dropped.
    """
    values = build_entry_values(catalog)
    if not values:
        return catalog
    catalog = without_any_attributes(catalog)
    is_flat = catalog.skeleton is None
    for name, value in values.items():
        taken = name in catalog.tensors or name in catalog.hidden or name in catalog.objects
        if taken or not (is_flat or isinstance(catalog.skeleton, dict)):
            dropped = Dropped((name,), "attributes, which the state dict cannot store")
            catalog = replace(catalog, dropped=(*catalog.dropped, dropped))
            continue
        objects = {**catalog.objects, name: StoredObject(name, value=value)}
        skeleton = catalog.skeleton
        if isinstance(skeleton, dict):
            skeleton = {**skeleton, name: ObjectLeaf(name)}
        catalog = replace(catalog, objects=objects, skeleton=skeleton)
    return catalog


def turn_into_attributes(catalog: Catalog) -> Catalog:
    """Turn the entries of ``turn_into_entries`` into attributes.

    Entries that it could not have written, and could not write again, stay what they are: somebody
    else's.
    """
    by_path: dict[str, Attributes] = {}
    names = []
    for name in ENTRIES:
        value = _find_entry(catalog, name)
        if not isinstance(value, dict) or not value or not _is_json(value):
            continue
        if name == PATHS_ENTRY and not all(
            path != ROOT and isinstance(item, dict) and item for path, item in value.items()
        ):
            continue
        names.append(name)
        by_path |= value if name == PATHS_ENTRY else {ROOT: value}
    if not names:
        return catalog
    return with_attributes(_remove_entries(catalog, names), by_path)


def _find_entry(catalog: Catalog, name: str) -> object:
    """Return the value of an entry at the root, or None.

    Megatron's own common state is not searched, nor a root that is no plain dict.
    """
    if catalog.common is not None and catalog.args is None and name in catalog.common:
        return catalog.common[name]
    if catalog.skeleton is None:
        item = catalog.objects.get(name)
        return None if item is None else item.value
    if not isinstance(catalog.skeleton, dict) or name not in catalog.skeleton:
        return None

    def load_leaf(entry: LeafEntry) -> object:
        leaf = entry.leaf
        return catalog.objects[leaf.key].value if isinstance(leaf, ObjectLeaf) else leaf

    return map_leaves(catalog.skeleton[name], load_leaf, (name,))


def _remove_entries(catalog: Catalog, names: Collection[str]) -> Catalog:
    """Return a copy of a catalog without entries at the root, which hold no tensors."""
    removed = set(names)

    def change(entry: LeafEntry) -> object:
        if entry.path and entry.path[0] in names:
            removed.add(entry.key)
            return REMOVED
        return entry.leaf

    skeleton, common = catalog.skeleton, catalog.common
    if skeleton is not None:
        skeleton = map_leaves(skeleton, change)
    if common is not None:
        common = {name: value for name, value in common.items() if name not in removed}
    objects = {key: item for key, item in catalog.objects.items() if key not in removed}
    return replace(catalog, objects=objects, skeleton=skeleton, common=common)


def is_axis_names(value: object, rank: int) -> bool:
    """Return whether an attribute can be the names of that many axes."""
    return (
        isinstance(value, list)
        and len(value) == rank
        and all(name is None or isinstance(name, str) for name in value)
    )


def _copy_json(values: Mapping[str, object]) -> dict[str, object]:
    """Return JSON as dicts and lists of its own, so that no two entries share one."""
    copy: dict[str, object] = json.loads(json.dumps(values, default=dict))
    return copy


def _is_json(value: object) -> bool:
    """Return whether a value consists of what JSON has."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or type(value) in (str, int, float, bool)


def parse_by_path(value: object) -> AttributesByPath | None:
    """Return the attributes by path that ``BY_PATH`` holds; None if the value is something else."""
    if not isinstance(value, dict) or not all(isinstance(item, dict) for item in value.values()):
        return None
    return cast("AttributesByPath", value)
