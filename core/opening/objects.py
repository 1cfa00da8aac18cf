"""Non-tensor entries on their way from one format to another: loading, vetting, nesting.

Policy (docs/facts/safety.md 1: inspect warns, validate detects, convert rejects): an object that names something
*dangerous* is never carried. One that names classes nobody knows is carried only into torch's files (those of
Megatron's ranks and its ``common.pt`` among them), where it stays the inert pickle that it was or is set aside; for
every other target the user must say ``drop_unknown``.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from core.catalog.catalog import Catalog, Fragment, StoredObject
from core.catalog.facets import HuggingFaceModel, MegatronModel
from core.catalog.key_patterns import matcher
from core.catalog.optimizer_keys import state_of
from core.catalog.stored import StoredArray
from core.errors import UnsafeError, UnsupportedError
from core.files.store import ReadStore
from core.formats.torch.nested_names import uses_in, with_nested
from core.megatron.extras.common_state import OPTIMIZER
from core.megatron.optimizer.entries import object_entry
from core.opening.pickled_places import MOST_PLACES, places_of
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, walk
from core.pickle.names import dangerous_uses
from core.pickle.nesting import REMOVED, LeafEntry, entries, join_path, map_leaves
from core.pickle.reader import judge
from core.pickle.uses import Use


class Loader(Protocol):
    """Parses one object's own stream, see ``core.formats.torch.format.load_object``."""

    def __call__(self, store: ReadStore, array: StoredArray, *, key: str) -> tuple[object, Mapping[str, StoredArray]]:
        """(inert value, arrays of the tensors inside it)."""


def loaded(catalog: Catalog, store: ReadStore, load: Loader) -> Catalog:
    """The catalog with every raw object read: its value inline, its tensors hidden, no ``raw_key`` left.

    Args:
        store: where the objects lie.
        load: parses one object's stream.
    """
    raw = [item for item in catalog.objects.values() if item.raw_key is not None]
    if not raw:
        return catalog
    objects = dict(catalog.objects)
    arrays: dict[str, StoredArray] = {}
    for item in raw:
        assert item.raw_key is not None
        stream = catalog.fragments(item.raw_key)[0].array
        assert stream is not None
        value, inside = load(store, stream, key=item.key)
        arrays |= inside
        objects[item.key] = replace(item, value=value, raw_key=None)
    streams = {item.raw_key for item in raw}
    hidden = {key: meta for key, meta in catalog.hidden.items() if key not in streams}
    return replace(catalog, objects=objects, hidden=hidden).with_hidden(arrays)


def refuse_hidden(uses: Iterable[Use], store: ReadStore, catalog: Catalog, *, exclude: Sequence[str] = ()) -> None:
    """Raise if a pickle does something dangerous that none of the objects holds.

    Such a name is an attribute of a tensor, the key of a mapping or the state of a container, or the pickle itself
    drops it again: what is written may not have it, but other readers would run it.

    Args:
        uses: what the pickles do with names (``core.pickle.reader.noting_uses``).
        store: where the pickles lie.
        catalog: what was read from them, its objects ``loaded``.
        exclude: patterns of entries that are left out, and with them what belongs to these entries.

    Raises:
        UnsafeError: names it, the file and the entry, and how to leave that out.
    """
    dangerous = dangerous_uses(with_nested(uses))
    if not dangerous:
        return
    shown = uses_in([[item.value for item in catalog.objects.values()], catalog.common])
    hidden = {use.name for use in dangerous - shown}
    if not hidden:
        return
    is_excluded = [matcher(pattern) for pattern in exclude]
    places = places_of(hidden, store, catalog)
    open_places = []
    for place in places:
        keys = place.entries_at(catalog)
        if not keys or not all(any(matches(key) for matches in is_excluded) for key in keys):
            open_places.append((place, keys))
    dropped = hidden - {place.name for place in places}
    is_listed = len(places) < MOST_PLACES  # else there may be places behind the last of them
    if not open_places and not dropped and is_listed:
        return
    if not open_places and is_listed:
        raise UnsafeError(
            f"a pickle calls {min(map(str, dropped))}, which would run code when it is loaded, and drops the result",
            file=store.label,
            hint="do not load this checkpoint with anything else, and find out who wrote it",
        )
    open_places = open_places or [(place, []) for place in places]
    place, keys = open_places[0]
    others = len(open_places) - 1
    left_out = " ".join(
        f"--exclude {shlex.quote(key)}" for key in dict.fromkeys(below[0] for _, below in open_places if below)
    )
    raise UnsafeError(
        f"{place.path or 'the root'} names {place.name}, which would run code when it is loaded"
        + (f"; {others}{'' if is_listed else ' or more'} other places name such things, too" if others else ""),
        file=place.file,
        key=keys[0] if keys else None,
        hint=(f"leave the entry out with {left_out}, " if left_out else "save the checkpoint again without it, ")
        + "and find out who wrote this checkpoint",
    )


@dataclass(frozen=True, slots=True)
class Vetted:
    """A catalog without the objects that must not be carried.

    Args:
        catalog: the remaining entries.
        dropped: ``key (reason)`` of every object that was left out.
    """

    catalog: Catalog
    dropped: tuple[str, ...]


def vetted(catalog: Catalog, *, keeps_unknown: bool, drop_unknown: bool) -> Vetted:
    """Applies the policy of the module's docstring; every object must have been ``loaded``.

    Args:
        keeps_unknown: the target can hold classes that nobody knows.
        drop_unknown: leave such objects out instead of refusing.

    Raises:
        UnsafeError: an object names something dangerous.
        UnsupportedError: an object names an unknown class and may be neither kept nor dropped.
    """
    dropped: dict[str, str] = {}
    common = StoredObject("common state", value=catalog.common)
    uses_of = [(item, uses_in(item.value)) for item in (common, *catalog.objects.values())]
    for item, uses in uses_of:
        dangerous = sorted(str(use.name) for use in dangerous_uses(uses))
        if dangerous:
            raise UnsafeError(
                f"the object names {dangerous[0]}, which would run code when it is loaded",
                key=item.key,
                hint=f"leave it out with --exclude {shlex.quote(item.key)}, and find out who wrote this checkpoint",
            )
    for item, uses in uses_of:
        unknown = sorted(str(use.name) for use in uses if judge(use) == "unknown")
        if unknown and not keeps_unknown and item is not common:
            if not drop_unknown:
                raise UnsupportedError(
                    f"the object is of the unknown class {unknown[0]}, which this format cannot hold",
                    key=item.key,
                    hint="leave such objects out with --drop-unknown",
                )
            dropped[item.key] = f"unknown class {unknown[0]}"
    if not dropped:
        return Vetted(catalog, ())
    skeleton = catalog.skeleton
    if skeleton is not None:
        skeleton = map_leaves(skeleton, lambda entry: REMOVED if entry.key in dropped else entry.leaf)
    gone = {leaf.key for key in dropped for leaf in walk(catalog.objects[key].value) if isinstance(leaf, TensorLeaf)}
    kept = replace(
        catalog,
        objects={key: item for key, item in catalog.objects.items() if key not in dropped},
        hidden={key: meta for key, meta in catalog.hidden.items() if key not in gone},
        skeleton=skeleton,
    )
    return Vetted(kept, tuple(f"{key} ({reason})" for key, reason in dropped.items()))


def inlined(catalog: Catalog) -> Catalog:
    """The catalog with a skeleton that holds every object's value in place, as a ``.pt`` file needs it.

    A flat catalog gets a flat skeleton: one entry per tensor and object, under its key.
    """

    def value_of(entry: LeafEntry) -> object:
        if isinstance(entry.leaf, ObjectLeaf):
            return catalog.objects[entry.leaf.key].value
        return entry.leaf

    if catalog.skeleton is not None:
        return replace(catalog, skeleton=map_leaves(catalog.skeleton, value_of))
    flat: dict[object, object] = {key: TensorLeaf(key) for key in catalog.tensors}
    flat.update({key: item.value for key, item in catalog.objects.items()})
    return replace(catalog, skeleton=flat)


def state_dict(catalog: Catalog, *, keeps_root: bool = False) -> Catalog:
    """The catalog as one nested state dict, its common state among the entries.

    * A global Megatron catalog (``core.megatron.reshard.reshard.unshard``) becomes what its rank files hold,
      ``{"model": {…}, …}``, so that its tensors' keys begin with ``model.``. Its optimizer is in the form of
      ``core.megatron.optimizer.entries``; the states keep their keys, ``optimizer.state.exp_avg.<name>``.
    * A torch_dist catalog keeps its keys at the top level; the entries of the common state join them.
    * A catalog whose root is a list or a single value gets a dict around it, with the one entry ``value``, unless
      ``keeps_root``.
    * Any other catalog stays as it is.

    Every tensor becomes visible, also those inside objects, under its path.
    """
    catalog = _without_rank_states(catalog)
    common = catalog.common
    if common is None:
        return catalog if keeps_root else with_mapping_root(catalog)
    top: dict[object, object] = dict(common)
    form = catalog.facet(MegatronModel)
    if form is not None:
        model: dict[object, object] = {}
        for name in dict.fromkeys((*(form.order or ()), *catalog.tensors)):
            if state_of(name) is not None:
                continue
            if name in catalog.tensors:
                model[name] = TensorLeaf(name)
            elif name in catalog.objects:
                model[name] = catalog.objects[name].value
        top |= {key: item.value for key, item in catalog.objects.items() if key not in model}
        top["model"] = model
        top.update(_optimizer(catalog))
    else:
        top |= {key: TensorLeaf(key) for key in catalog.tensors}
        top |= {key: item.value for key, item in catalog.objects.items()}
    return _keyed_by_path(catalog, top)


def with_mapping_root(catalog: Catalog) -> Catalog:
    """Return the catalog with a dict around a root that is not a mapping, with the one entry ``value``."""
    if catalog.skeleton is None or as_mapping(catalog.skeleton) is not None:
        return catalog
    return _keyed_by_path(catalog, {"value": inlined(catalog).skeleton})


def _without_rank_states(catalog: Catalog) -> Catalog:
    """The catalog without the random states of single ranks that only rank files have a place for."""
    model = catalog.facet(MegatronModel)
    if model is None or not model.rng_states:
        return catalog
    out = {leaf.key for leaf in walk(model.rng_states) if isinstance(leaf, TensorLeaf)}
    values = [catalog.common, *(item.value for item in catalog.objects.values())]
    out -= {leaf.key for leaf in walk(values) if isinstance(leaf, TensorLeaf)}
    hidden = {key: meta for key, meta in catalog.hidden.items() if key not in out}
    return replace(catalog, hidden=hidden).with_facet(replace(model, rng_states={}))


def _optimizer(catalog: Catalog) -> dict[str, object]:
    """The entry ``optimizer`` of a global Megatron catalog that has one, its states in it."""
    if catalog.optimizer is None:
        return {}
    states: dict[object, dict[object, object]] = {}
    for key in catalog.tensors:
        state = state_of(key)
        if state is not None:
            states.setdefault(state[0], {})[state[1]] = TensorLeaf(key)
    return {OPTIMIZER: {**object_entry(catalog.optimizer), "state": states}}


def with_common(catalog: Catalog) -> Catalog:
    """The catalog as torch_dist has it: tensors at the top level, every other entry in the common state.

    A catalog that has a common state already stays as it is.
    """
    if catalog.common is not None:
        return catalog
    if catalog.skeleton is None:
        common: object = {key: item.value for key, item in catalog.objects.items()}
    else:

        def beside(entry: LeafEntry) -> object:
            if isinstance(entry.leaf, ObjectLeaf):
                return catalog.objects[entry.leaf.key].value
            return REMOVED if isinstance(entry.leaf, TensorLeaf) else entry.leaf

        common = map_leaves(catalog.skeleton, beside)
    return replace(catalog, objects={}, skeleton=None, common=as_mapping(common) or {})


def with_objects(catalog: Catalog) -> Catalog:
    """The catalog with every entry of its common state as an object; tensors inside objects stay inside."""
    catalog = _without_rank_states(catalog)
    common = catalog.common
    if common is None:
        return catalog
    objects = {str(name): StoredObject(str(name), value=value) for name, value in common.items()}
    if catalog.optimizer is not None:
        objects[OPTIMIZER] = StoredObject(OPTIMIZER, value=object_entry(catalog.optimizer))
    return replace(
        catalog.without_facets(MegatronModel, HuggingFaceModel),
        objects={**catalog.objects, **objects},
        skeleton=None,
        common=None,
        optimizer=None,
    )


def _keyed_by_path(catalog: Catalog, skeleton: object) -> Catalog:
    """The catalog with ``skeleton``, in which every tensor's key is its path."""
    old_of: dict[str, str] = {}

    def change(entry: LeafEntry) -> object:
        if not isinstance(entry.leaf, TensorLeaf):
            return entry.leaf
        key = join_path(entry.path)
        old_of[key] = entry.leaf.key
        return replace(entry.leaf, key=key)

    made = map_leaves(skeleton, change)

    def fragments_of(key: str) -> tuple[Fragment, ...]:
        old = old_of.get(key)
        if old is None:
            return tuple(catalog.fragments(key))
        return tuple(replace(fragment, key=key) for fragment in catalog.fragments(old))

    shown = set(old_of.values())
    return replace(
        catalog.without_facets(MegatronModel, HuggingFaceModel),
        tensors={new: replace(catalog.meta(old), key=new) for new, old in old_of.items()},
        hidden={key: meta for key, meta in catalog.hidden.items() if key not in shown},
        objects={
            entry.key: StoredObject(entry.key, value=entry.leaf)
            for entry in entries(made)
            if not isinstance(entry.leaf, TensorLeaf)
        },
        fragments_of=fragments_of,
        skeleton=made,
        common=None,
        optimizer=None,
        aliases={},
    )
