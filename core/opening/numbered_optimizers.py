"""Optimizers that number their parameters: give them names, in an order that the user vouches for.

Their keys, and those of schedulers, become integers again where a format has made text of them.

On disk, as ``torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})``,
Lightning (``optimizer_states.0``) and DCP store them::

    optimizer.state.0.exp_avg       →   optimizer.state.embed.weight.exp_avg
    optimizer.param_groups.0.params →   ["embed.weight", …] instead of [0, …]

The order (``--param-order``) is one of

- ``model``: that of the model's own state dict in the checkpoint, which is the order in which
  ``model.parameters()`` numbered them, divided among the groups;
- a file: a name for each number, one per line, or a JSON list. A JSON object has such a list for
  each optimizer, by its key (``optimizer_states.0``).

Nothing is taken on trust. Every state must have the shape of its parameter, ``model`` must allow
one division only, and fp32 master weights next to the moments must round to the weights.

Not supported: optimizers whose states do not show the shapes of their parameters (8-bit, Shampoo),
and those of Megatron and DeepSpeed, which have readers of their own.

Source: torch 2.13 ``torch/optim/optimizer.py`` (``state_dict``); files of Lightning 2.6.6,
pinned in tests/golden (``lightning.tar.xz``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.changes.rename import rename_entries
from core.errors import NoEffectError, list_some
from core.formats.torch.tree import keys_of
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, make_counter, rebuild
from core.pickle.nesting import LeafEntry, Path, containers, entries, join_path, map_leaves

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.formats.trainer.proven_names import NumberedOptimizer, ParameterOrder

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
_LONGEST_NUMBER = 20
_MILESTONES = "milestones"
_MULTI_STEP = {_MILESTONES, "gamma", "base_lrs", "last_epoch"}
"""The entries by which the state dict of ``torch.optim.lr_scheduler.MultiStepLR`` is recognised."""


def with_parameter_names(
    catalog: Catalog, store: ReadStore, order: ParameterOrder | None
) -> Catalog:
    """Replace the numbers of parameters in a catalog's optimizers by names, with a note on each.

    Args:
        catalog: its objects are loaded.
        store: its files; samples of master weights are read.
        order: the names; None for the order of the model in the catalog.

    Raises:
        UsageError: no optimizer numbers its parameters, or the order does not fit one.
        UnsupportedError: states do not show the shapes of their parameters.
    """
    from core.formats.trainer.proven_names import (
        check_masters,
        check_named_optimizers,
        models_of,
        names_of_file,
        names_of_model,
    )

    optimizers = list(_numbered_optimizers(catalog))
    if not optimizers:
        reason = "the checkpoint has no optimizer that identifies parameters by number"
        raise NoEffectError(("param_order",), reason)
    if order is not None:
        check_named_optimizers(order, optimizers)
    models = models_of(catalog, optimizers)
    notes = []
    for optimizer in optimizers:
        groups = (
            names_of_model(optimizer, catalog, models)
            if order is None
            else names_of_file(optimizer, order, catalog, models)
        )
        n_masters = check_masters(optimizer, groups, catalog, store, models)
        source = "the model's state dict" if order is None else order.label
        proof = f", and {n_masters} master weights round to the weights" if n_masters else ""
        notes.append(
            f"{optimizer.key} identifies parameters by number; ckpt named them in the order of "
            f"{source} (all shapes match{proof})"
        )
        catalog = _renamed(catalog, optimizer, groups)
    return catalog.noted(notes)


def keys_of_numbered(catalog: Catalog) -> list[str]:
    """Return the keys of the optimizers that number their parameters.

    Args:
        catalog: its objects are loaded.
    """
    return [optimizer.key for optimizer in _numbered_optimizers(catalog)]


def with_integer_keys(catalog: Catalog) -> Catalog:
    """Make keys that were integers integers again, in a catalog whose keys are all text.

    The numbers in the groups of an optimizer (``params``) prove what the keys of its states were;
    the other entries of a ``MultiStepLR`` prove that its milestones are a ``Counter`` of epochs. A
    note lists the other dicts whose keys are numbers as text, of which nothing proves it. Names of
    entries do not change.

    Of the state dicts of torch 2.13 (optimizers, schedulers, GradScaler, AveragedModel) no others
    have keys that are not text, nor have those in the files of accelerate 1.15, Lightning 2.6.6 and
    transformers' Trainer in tests/golden.

    Args:
        catalog: its objects are loaded.
    """
    if catalog.skeleton is None:
        return catalog
    skeleton = catalog.skeleton
    proven = set()
    for optimizer in _numbered_optimizers(catalog, may_have_others=True):
        stored = as_mapping(optimizer.stored) or {}
        states = as_mapping(stored[_STATE]) or {}
        numbered = {_as_number(key): state for key, state in states.items()}
        node = rebuild(optimizer.stored, {**stored, _STATE: rebuild(stored[_STATE], numbered)})
        skeleton = _replaced(skeleton, optimizer.path, node)
        proven.add((*optimizer.path, _STATE))
    for path, node in containers(catalog.skeleton, once=True):
        scheduler = as_mapping(node) or {}
        if not scheduler.keys() >= _MULTI_STEP:
            continue
        counts = as_mapping(scheduler[_MILESTONES]) or {}
        milestones = {_as_number(key): count for key, count in counts.items()}
        if milestones and all(isinstance(key, int) for key in milestones):
            # Where every number is a tensor, the counts are, which a Counter does not take.
            values = [_value_at(count, catalog) for count in milestones.values()]
            is_counter = all(type(value) is int for value in values)
            restored = make_counter(milestones) if is_counter else milestones
            skeleton = _replaced(skeleton, (*path, _MILESTONES), restored)
            proven.add((*path, _MILESTONES))
    unproven = [
        join_path(path) or "the root"
        for path, node in containers(catalog.skeleton, once=True)
        if path not in proven
        and (keys := as_mapping(node))
        and all(isinstance(key, str) and key != _as_number(key) for key in keys)
    ]
    catalog = replace(catalog, skeleton=skeleton)
    if not unproven:
        return catalog
    note = "remain strings, although they may have been integers when saved"
    return catalog.noted([f"numeric keys in {list_some(unproven)} {note}"])


def _as_number(key: object) -> object:
    """Return a key as the integer of which it is the text, written as Python would; else as is."""
    if not isinstance(key, str) or len(key) > _LONGEST_NUMBER or not key.isascii():
        return key
    if key.removeprefix("-").isdecimal():
        number = int(key)
        return number if str(number) == key else key
    return key


def _numbered_optimizers(
    catalog: Catalog, *, may_have_others: bool = False
) -> Iterator[NumberedOptimizer]:
    """Yield the state dicts of optimizers in a catalog whose groups list numbers.

    Args:
        catalog: its objects are loaded.
        may_have_others: also those with states that belong to no parameter, such as a counter of
            steps that all share.
    """
    for path, node in containers({} if catalog.skeleton is None else catalog.skeleton):
        mapping = as_mapping(node)
        if mapping is None or not {_STATE, _GROUPS} <= mapping.keys():
            continue
        # DCP stores the groups as one object; a torch file stores them in place.
        groups = _value_at(mapping[_GROUPS], catalog)
        states = as_mapping(mapping[_STATE])
        if not isinstance(groups, list) or states is None:
            continue
        full_groups: list[object] = []
        for group in groups:
            settings = as_mapping(group)
            if settings is not None and _PARAMS in settings:
                params = _value_at(settings[_PARAMS], catalog)
                group = rebuild(group, {**settings, _PARAMS: params})
            full_groups.append(group)
        by_number = {_as_number(key): state for key, state in states.items()}
        value = {**mapping, _STATE: by_number, _GROUPS: full_groups}
        from core.formats.trainer.optimizer import is_state_dict, numbers_of

        if not is_state_dict(value):
            continue
        flat = [number for group in numbers_of(value) for number in group]
        is_numbered = bool(flat) and all(type(number) is int for number in flat)
        others = by_number.keys() - {*flat}
        if may_have_others:
            others = {key for key in others if isinstance(key, int)}
        if is_numbered and len({*flat}) == len(flat) and not others:
            from core.formats.trainer.proven_names import NumberedOptimizer

            yield NumberedOptimizer(path, node, value)


def _value_at(leaf: object, catalog: Catalog) -> object:
    """Return the value of an object that the skeleton refers to, or the value itself."""
    return catalog.objects[leaf.key].value if isinstance(leaf, ObjectLeaf) else leaf


def _renamed(
    catalog: Catalog, optimizer: NumberedOptimizer, groups: tuple[tuple[str, ...], ...]
) -> Catalog:
    """Return a catalog whose optimizer has names in place of numbers."""
    from core.formats.trainer.optimizer import with_names

    new_value = as_mapping(with_names(optimizer.value, groups)) or {}
    stored = as_mapping(optimizer.stored) or {}
    objects = dict(catalog.objects)

    # Put the groups back where they were: into one object, into objects, or in place.
    new_groups = new_value[_GROUPS]
    assert isinstance(new_groups, list)
    stored_groups = stored[_GROUPS]
    if isinstance(stored_groups, ObjectLeaf):
        objects[stored_groups.key] = replace(objects[stored_groups.key], value=new_groups)
        new_groups_node: object = stored_groups
    else:
        assert isinstance(stored_groups, list)
        nodes: list[object] = []
        for index, (stored_group, names) in enumerate(zip(stored_groups, groups, strict=True)):
            settings = as_mapping(stored_group) or {}
            params = settings[_PARAMS]
            key = (
                params.key
                if isinstance(params, ObjectLeaf)
                else join_path((*optimizer.path, _GROUPS, index, _PARAMS))
            )
            if key in objects:
                objects[key] = replace(objects[key], value=list(names))
            kept: object = params if isinstance(params, ObjectLeaf) else list(names)
            nodes.append(rebuild(stored_group, {**settings, _PARAMS: kept}))
        new_groups_node = nodes
    states = rebuild(stored[_STATE], as_mapping(new_value[_STATE]) or {})
    node = rebuild(optimizer.stored, {**stored, _STATE: states, _GROUPS: new_groups_node})

    # Give the entries the keys of their new places; both trees have their leaves in one order.
    old_keys = [entry.key for entry in entries(optimizer.stored, optimizer.path)]
    leaves = list(entries(node, optimizer.path))
    taken = {*catalog.tensors, *catalog.objects, *catalog.hidden} - {*old_keys}
    keys = keys_of(leaves, reserved=taken)
    new_of = {key: key for key in (*catalog.tensors, *catalog.objects)}
    new_of |= {old: new for old, (new, _) in zip(old_keys, keys, strict=True) if old in new_of}
    remaining = iter(keys)

    def with_key(entry: LeafEntry) -> object:
        key, plain_key = next(remaining)
        if isinstance(entry.leaf, (TensorLeaf, ObjectLeaf)):
            return replace(entry.leaf, key=key)
        return entry.leaf if key == plain_key else ObjectLeaf(key)

    new_node = map_leaves(node, with_key, optimizer.path)
    skeleton = _replaced(catalog.skeleton, optimizer.path, new_node)
    changed = replace(catalog, objects=objects, skeleton=None)
    return replace(rename_entries(changed, new_of), skeleton=skeleton)


def _replaced(node: object, path: Path, value: object) -> object:
    """Return a skeleton with another value at a path."""
    if not path:
        return value
    name, below = path[0], path[1:]
    mapping = as_mapping(node)
    if mapping is not None:
        return rebuild(node, {**mapping, name: _replaced(mapping[name], below, value)})
    assert isinstance(node, (list, tuple)) and isinstance(name, int)
    items = list(node)
    items[name] = _replaced(items[name], below, value)
    return items if isinstance(node, list) else tuple(items)
