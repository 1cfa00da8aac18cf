"""Give a directory that Lightning's Trainer saved the names that the Trainer reads from one file.

With sharded state dicts (FSDPStrategy, ModelParallelStrategy), Lightning saves the model and each
optimizer under other names than in a file::

    a directory                             one file (``.ckpt``)
    model or state_dict                  →  state_dict
    optimizer_0, optimizer_1, …          →  optimizer_states: a list
    epoch, loops, callbacks, … (meta.pt) →  the same

The states of an optimizer keep the names of their parameters in place of numbers. FSDPStrategy and
ModelParallelStrategy read both. The other strategies assign states by position, so each group lists
its parameters in the order of the model, as in the files of FSDPStrategy; a directory has those of
an FSDP unit together if FSDP has flattened them (``use_orig_params=False``).

Not supported: directories of Fabric, whose files have the names that the script gave; the way back.
FSDPStrategy itself (2.6.6) cannot load an optimizer without any state from a file.

Source: Lightning 2.6.6 ``pytorch/strategies/{fsdp,model_parallel,strategy}.py``,
``pytorch/utilities/consolidate_checkpoint.py`` (``_format_checkpoint``); directories and files that
it wrote, pinned in tests/golden (``lightning``, ``lightning.tar.xz``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.facets import DcpFacts
from core.engine.catalog.optimizer_keys import LIGHTNING_VERSION
from core.engine.changes.rename import rename_entries
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, rebuild
from core.pickle.nesting import LeafEntry, ListIndex, map_leaves

_MODEL, _STATE_DICT = "model", "state_dict"
_OPTIMIZER, _OPTIMIZERS = "optimizer_", "optimizer_states"
_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
_GROUPS_KEY = re.compile(rf"{_OPTIMIZERS}\.\d+\.{_GROUPS}(?:\.\d+\.{_PARAMS})?")
"""The groups as one object (DCP before torch 2.4), or the parameters of one group."""


def as_trainer_file(catalog: Catalog) -> Catalog:
    """Rename a model and its optimizers as Lightning's Trainer reads them from one file.

    Any other catalog is returned as it is, and so are entries whose new place is taken, and
    optimizers of which one is missing.

    Args:
        catalog: the entries of a directory, after the user's changes.

    Returns:
        The catalog, with a note that lists the entries that have other names, and one if the
        parameters of a group have another order.
    """
    facts, root = catalog.facet(DcpFacts), as_mapping(catalog.skeleton)
    if (
        facts is None
        or root is None
        or LIGHTNING_VERSION not in {*facts.meta_entries} & root.keys()
    ):
        return catalog

    # Old name → new path, of the model and of the optimizers, in the order of their numbers.
    path_of: dict[object, tuple[object, ...]] = {}
    if as_mapping(root.get(_MODEL)) is not None and _STATE_DICT not in root:
        path_of[_MODEL] = (_STATE_DICT,)
    optimizers = [f"{_OPTIMIZER}{number}" for number in range(len(root))]
    optimizers = [name for name in optimizers if as_mapping(root.get(name)) is not None]
    is_complete = optimizers == [f"{_OPTIMIZER}{number}" for number in range(len(optimizers))]
    if is_complete and _OPTIMIZERS not in root:
        path_of |= {name: (_OPTIMIZERS, ListIndex(i)) for i, name in enumerate(optimizers)}
    if not path_of:
        return catalog

    # Rename the entries by the first part of their keys.
    new_prefix = {old: ".".join(map(str, path)) for old, path in path_of.items()}

    def new_key(key: str) -> str:
        first, dot, rest = key.partition(".")
        return f"{new_prefix.get(first, first)}{dot}{rest}"

    def with_key(entry: LeafEntry) -> object:
        leaf = entry.leaf
        if isinstance(leaf, (TensorLeaf, ObjectLeaf)):
            return replace(leaf, key=new_key(leaf.key))
        return leaf

    new_of = {key: new_key(key) for key in (*catalog.tensors, *catalog.objects)}
    renamed = rename_entries(replace(catalog, skeleton=None), new_of)

    # Build the root again, with a list of the optimizers.
    new_root: dict[object, object] = {}
    states: list[object] = []
    objects = dict(renamed.objects)
    for name, value in root.items():
        path = path_of.get(name, (name,))
        if len(path) == 1:
            new_root[path[0]] = map_leaves(value, with_key, (name,))
    for name in (name for name in optimizers if name in path_of):
        state = as_mapping(map_leaves(root[name], with_key, (name,))) or {}
        if _GROUPS in state and _STATE not in state:
            # DCP does not store empty states, but an optimizer's load_state_dict asks for them.
            key = f"{new_prefix[name]}.{_STATE}"
            objects[key] = StoredObject(key, value={})
            state = {_STATE: ObjectLeaf(key), **state}
        states.append(state)
    if states:
        new_root[_OPTIMIZERS] = states

    # List the parameters in the order of the model's state dict, which is that of its modules.
    names = as_mapping(new_root.get(_STATE_DICT)) or {}
    number_of = {name: number for number, name in enumerate(names)}
    ordered = {
        key: replace(item, value=_in_order(item.value, number_of))
        for key, item in objects.items()
        if _GROUPS_KEY.fullmatch(key) is not None
    }
    listed = ", ".join(f"{old} became {new}" for old, new in new_prefix.items())
    note = "entries were renamed to the names that Lightning's Trainer expects in a single file"
    notes = [f"{note}: {listed}"]
    if any(item.value != objects[key].value for key, item in ordered.items()):
        notes.append(
            "the optimizer's parameter groups now list their parameters in the model's order, "
            "because without FSDP, Lightning assigns states by position"
        )
    skeleton = rebuild(catalog.skeleton, new_root)
    return replace(renamed, objects={**objects, **ordered}, skeleton=skeleton).noted(notes)


def _in_order(value: object, number_of: Mapping[object, int]) -> object:
    """Return parameter groups, or the parameters of one, in the order of the model.

    Parameters stay as they are if the model lacks one of them.
    """
    if not isinstance(value, list):
        return value
    groups = [as_mapping(item) for item in value]
    if value and all(group is not None for group in groups):
        return [
            rebuild(item, {**group, _PARAMS: _in_order(group.get(_PARAMS), number_of)})
            for item, group in zip(value, groups, strict=True)
            if group is not None
        ]
    if not all(isinstance(name, str) and name in number_of for name in value):
        return value
    return sorted(value, key=lambda name: number_of[name])
