"""Bring entries that are not tensors from one format to another: load them, check them, nest them.

Policy (docs/facts/safety.md 1: inspect warns, validate detects, convert rejects): an object that
refers to something *dangerous* is never carried over. One that refers to unknown classes is carried
only into torch's files (including Megatron's rank files and ``common.pt``), where it remains an
inert pickle or is set aside; for every other target the user has to pass ``drop_unknown``.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.facets import HuggingFaceModel, MegatronModel
from core.engine.catalog.key_patterns import matcher
from core.engine.catalog.optimizer_keys import split_state_key
from core.engine.catalog.stored import StoredArray
from core.engine.catalog.tensor import without_ties
from core.errors import UnsafeError, UnsupportedError
from core.files.store import ReadStore
from core.opening.open import Checkpoint
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, walk
from core.pickle.nesting import REMOVED, LeafEntry, entries, join_path, map_leaves
from core.pickle.noted import noting_uses

if TYPE_CHECKING:
    from core.opening.pickled_places import PickledPlace
    from core.pickle.uses import Use

KEEP_OBJECTS = (
    "the tensors are inside objects; write a torch file (--to torch), which keeps objects, or save "
    "the tensors in a plain dict with the program that wrote them"
)
"""The hint where all tensors of a source are in objects that a destination does not store."""


def loaded(catalog: Catalog, store: ReadStore) -> Catalog:
    """Load every raw object of a catalog; the tensors inside become hidden tensors.

    Args:
        store: the files of the catalog.

    Returns:
        A catalog whose objects have no ``raw_key``.

    Raises:
        CorruptError, UnsafeError, UnsupportedError: a stream cannot be parsed.
    """
    raw = [item for item in catalog.objects.values() if item.raw_key is not None]
    if not raw:
        return catalog
    from core.formats.torch.tree import load_object
    from core.opening.object_streams import expect_streams

    expect_streams(store, catalog, (item.raw_key for item in raw))
    objects = dict(catalog.objects)
    arrays: dict[str, StoredArray] = {}
    for item in raw:
        assert item.raw_key is not None
        # The stream itself was listed as a hidden tensor of bytes; it is dropped below.
        stream = catalog.fragments(item.raw_key)[0].array
        assert stream is not None
        value, inside = load_object(store, stream, key=item.key)
        arrays |= inside
        objects[item.key] = replace(item, value=value, raw_key=None)
    streams = {item.raw_key for item in raw}
    hidden = {key: tensor for key, tensor in catalog.hidden.items() if key not in streams}
    return replace(catalog, objects=objects, hidden=hidden).with_hidden(arrays)


def load_attributes(catalog: Catalog, store: ReadStore) -> Catalog:
    """Turn the entries that hold attributes into attributes; load no other object.

    Args:
        store: the files of the catalog.

    Raises:
        CorruptError, UnsafeError, UnsupportedError: the stream of such an entry cannot be parsed.
    """
    from core.engine.catalog.attributes import ENTRIES, turn_into_attributes

    objects = {
        key: item for key, item in catalog.objects.items() if key.partition(".")[0] in ENTRIES
    }
    part = loaded(replace(catalog, objects=objects), store)
    return turn_into_attributes(replace(part, objects={**catalog.objects, **part.objects}))


DROP_ENTRY = "drop the entry with"
"""Beginning of the remedy for an entry that would run code; ``--exclude KEY`` follows."""


def with_objects_loaded(
    source: Checkpoint, *, exclude: Sequence[str] = (), remedy: str = DROP_ENTRY
) -> Checkpoint:
    """Load the value of every object that is stored in a stream of its own.

    Entries that hold attributes become attributes.

    Args:
        source: the opened source.
        exclude: globs of entries that are dropped later.
        remedy: beginning of the hint that ends with ``--exclude KEY``.

    Raises:
        CheckpointingException: a stream is damaged.
        UnsafeError: a pickle refers to something dangerous that none of the objects contains.
    """
    from core.engine.catalog.attributes import turn_into_attributes

    with noting_uses() as uses:
        source = replace(source, catalog=loaded(source.catalog, source.store))
    refuse_hidden(source.uses | uses, source.store, source.catalog, exclude=exclude, remedy=remedy)
    return replace(source, catalog=turn_into_attributes(source.catalog))


def refuse_in_ranks(
    catalog: Catalog,
    *,
    exclude: Sequence[str] = (),
    carried: Collection[str],
    remedy: str = DROP_ENTRY,
) -> None:
    """Raise if an object of any rank refers to something dangerous.

    The global form has the entries of one rank, so nobody else would notice those of the others.

    Args:
        catalog: a source with loaded objects; nothing is done unless it is rank-local.
        exclude: globs of entries that are dropped.
        carried: keys of the objects in the global form, which ``--exclude`` can drop.
        remedy: as for ``apply_object_policy``.

    Raises:
        UnsafeError: an object does; the error has its key without the rank.
    """
    from core.opening.code_in_pickles import HINT

    if not catalog.is_rank_local:
        return
    bare = {key: key.partition(":")[2] for key in catalog.objects}
    objects = {
        key: replace(item, key=bare[key])
        for key, item in catalog.objects.items()
        if not _are_excluded([bare[key]], exclude)
    }
    try:
        apply_object_policy(
            replace(catalog, objects=objects),
            keeps_unknown=True,
            drop_unknown=False,
            remedy=remedy,
        )
    except UnsafeError as err:
        if err.key not in carried:
            err.hint = HINT
        raise


def refuse_hidden(
    uses: Collection[Use],
    store: ReadStore,
    catalog: Catalog,
    *,
    exclude: Sequence[str] = (),
    remedy: str = DROP_ENTRY,
) -> None:
    """Raise if a pickle refers to something dangerous in a place that the catalog does not hold.

    Such a place is an attribute of a tensor, the key of a mapping or the state of a container; or
    the pickle drops the value. The output may lack it, but other readers of the source would run
    it.

    Args:
        uses: calls and references in the pickles (``core.pickle.noted.noting_uses``).
        store: the files of the catalog.
        catalog: the catalog that was read from the pickles, with its objects ``loaded``.
        exclude: patterns of entries that the output omits, with everything inside.
        remedy: as for ``apply_object_policy``.

    Raises:
        UnsafeError: a pickle refers to something dangerous. The error has the name, the file and
            the entry, and how to exclude it.
    """
    if not uses:
        return
    from core.formats.torch.nested_names import uses_in, with_nested
    from core.pickle.names import dangerous_uses

    dangerous = dangerous_uses(with_nested(uses))
    if not dangerous:
        return
    # ``apply_object_policy`` reports the visible ones, so only the others are searched for.
    visible = uses_in([[item.value for item in catalog.objects.values()], catalog.common])
    hidden = {use.name for use in dangerous - visible}
    if not hidden:
        return

    from core.opening.pickled_places import MOST_PLACES, find_places

    # Find the places in the pickles, without those whose entries are all excluded.
    places = find_places(hidden, store, catalog)
    keyed = [(place, place.entries_at(catalog)) for place in places]
    remaining = [(place, keys) for place, keys in keyed if not _are_excluded(keys, exclude)]
    dropped = hidden - {place.name for place in places}
    is_listed = len(places) < MOST_PLACES  # else there may be more places after the last one

    # Report the first place, or the names that have none because the pickle drops them.
    if remaining or not is_listed:
        raise _unsafe_place(
            remaining or [(place, []) for place in places], is_listed=is_listed, remedy=remedy
        )
    if dropped:
        raise UnsafeError(
            f"a pickle calls {min(map(str, dropped))}, which would run code when loaded, and "
            "discards the result",
            file=store.label,
            hint="do not load this checkpoint with any other program, and find out who wrote it",
        )


def _are_excluded(keys: Sequence[str], exclude: Sequence[str]) -> bool:
    """Return whether there are keys, and each matches one of the patterns ``exclude``."""
    matchers = [matcher(pattern) for pattern in exclude]
    return bool(keys) and all(any(matches(key) for matches in matchers) for key in keys)


def _unsafe_place(
    places: Sequence[tuple[PickledPlace, Sequence[str]]], *, is_listed: bool, remedy: str
) -> UnsafeError:
    """Build the error about the first of several places that refer to something dangerous.

    Args:
        places: each place, with the keys of the entries that it belongs to.
        is_listed: these are all the places.
        remedy: as for ``apply_object_policy``.
    """
    place, keys = places[0]
    message = f"{place.path or 'the root'} refers to {place.name}, which would run code when loaded"
    n_more = len(places) - 1
    if n_more:
        message += (
            "; so does one other entry"
            if n_more == 1 and is_listed
            else f"; so do {n_more}{'' if is_listed else ' or more'} other entries"
        )
    options = " ".join(
        f"--exclude {shlex.quote(key)}"
        for key in dict.fromkeys(entry_keys[0] for _, entry_keys in places if entry_keys)
    )
    action = f"{remedy} {options}" if options else "save the checkpoint again without it"
    return UnsafeError(
        message,
        file=place.file,
        key=keys[0] if keys else None,
        hint=f"{action}, and find out who wrote this checkpoint",
    )


def apply_object_policy(
    catalog: Catalog, *, keeps_unknown: bool, drop_unknown: bool, remedy: str = DROP_ENTRY
) -> Catalog:
    """Apply the policy of the module's docstring to a catalog with ``loaded`` objects.

    Args:
        keeps_unknown: the target can store unknown classes.
        drop_unknown: drop objects of unknown classes instead of refusing them.
        remedy: beginning of the hint about a dangerous entry, which ends with ``--exclude KEY``.

    Raises:
        UnsafeError: an object refers to something dangerous.
        UnsupportedError: an object refers to an unknown class and may be neither kept nor dropped.
    """
    from core.formats.torch.nested_names import uses_in
    from core.pickle.names import dangerous_uses, judge

    # Refuse dangerous objects, whatever the target.
    common = StoredObject("common state", value=catalog.common)
    uses_of = [(item, uses_in(item.value)) for item in (common, *catalog.objects.values())]
    for item, uses in uses_of:
        dangerous = sorted(str(use.name) for use in dangerous_uses(uses))
        if dangerous:
            raise UnsafeError(
                f"the object refers to {dangerous[0]}, which would run code when loaded",
                key=item.key,
                hint=(
                    "save the checkpoint again without it"
                    if item is common
                    else f"{remedy} --exclude {shlex.quote(item.key)}"
                )
                + ", and find out who wrote this checkpoint",
            )
    if keeps_unknown:
        return catalog
    from core.engine.catalog.removal import drop_entries

    # Drop or refuse objects of unknown classes. The common state is kept: it is not one object, so
    # it cannot be dropped.
    dropped: dict[str, str] = {}
    for item, uses in uses_of:
        unknown = sorted(str(use.name) for use in uses if judge(use) == "unknown")
        if not unknown or item is common:
            continue
        if not drop_unknown:
            # Without the object there would be nothing to write.
            is_all = not catalog.tensors and has_tensors([item])
            raise UnsupportedError(
                f"the object is an instance of the unknown class {unknown[0]}, but this format can "
                "store only known classes",
                key=item.key,
                hint=KEEP_OBJECTS if is_all else "drop such objects with --drop-unknown",
            )
        dropped[item.key] = f"unknown class {unknown[0]}"
    return drop_entries(catalog, dropped)


def has_tensors(objects: Iterable[StoredObject]) -> bool:
    """Return whether there are tensors inside some objects, which are loaded."""
    return any(isinstance(node, TensorLeaf) for item in objects for node in walk(item.value))


def inlined(catalog: Catalog) -> Catalog:
    """Put the objects' values into the skeleton of a catalog, as in a ``.pt`` file.

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
    """Return the catalog as one nested state dict, with its common state among the entries.

    * A global Megatron catalog (``core.megatron.reshard.unshard.unshard``) gets the form of its
      rank files, ``{"model": {…}, …}``, so that its tensors' keys begin with ``model.``. Its
      optimizer gets the form of ``core.megatron.optimizer.entries``; the states keep their keys,
      ``optimizer.state.exp_avg.<name>``.
    * A torch_dist catalog keeps its keys at the top level; the entries of the common state are
      added.
    * A catalog whose root is a list or a single value gets a dict around it, with the one entry
      ``value``, unless ``keeps_root``.
    * Any other catalog stays as it is.

    Except in the last case, every tensor becomes visible under its path, also those inside objects.
    """
    catalog = _without_rank_states(catalog)
    common = catalog.common
    if common is None:
        return catalog if keeps_root else with_mapping_root(catalog)
    form = catalog.facet(MegatronModel)
    if form is not None:
        return _keyed_by_path(catalog, {**common, **_entries_of_ranks(catalog, form)})
    root: dict[object, object] = dict(common)
    root |= {key: TensorLeaf(key) for key in catalog.tensors}
    root |= {key: item.value for key, item in catalog.objects.items()}
    return _keyed_by_path(catalog, root)


def _entries_of_ranks(catalog: Catalog, form: MegatronModel) -> dict[object, object]:
    """Nest tensors and objects of a global Megatron catalog as its rank files do.

    Returns:
        The entries ``model``, ``optimizer`` if there is one, and the objects outside the model.
    """
    from core.megatron.extras.common_state import OPTIMIZER
    from core.megatron.optimizer.entries import build_object_entry

    # The model's entries are in the order of the rank files. Other objects stay at the root.
    leaves: dict[str, object] = {key: item.value for key, item in catalog.objects.items()}
    leaves |= {key: TensorLeaf(key) for key in catalog.tensors}
    names = dict.fromkeys((*(form.order or ()), *catalog.tensors))
    model: dict[object, object] = {
        name: leaves[name] for name in names if name in leaves and split_state_key(name) is None
    }
    root: dict[object, object] = {
        key: item.value for key, item in catalog.objects.items() if key not in model
    }
    root["model"] = model

    # The states are in the optimizer's entry.
    if catalog.optimizer is not None:
        states: dict[object, dict[object, object]] = {}
        for key in catalog.tensors:
            if (state := split_state_key(key)) is not None:
                states.setdefault(state[0], {})[state[1]] = TensorLeaf(key)
        root[OPTIMIZER] = {**build_object_entry(catalog.optimizer), "state": states}
    return root


def with_mapping_root(catalog: Catalog) -> Catalog:
    """Make the root of a catalog a mapping; any other root becomes its entry ``value``."""
    if catalog.skeleton is None or as_mapping(catalog.skeleton) is not None:
        return catalog
    return _keyed_by_path(catalog, {"value": inlined(catalog).skeleton})


def _without_rank_states(catalog: Catalog) -> Catalog:
    """Drop the random states of single ranks, which only rank files store."""
    model = catalog.facet(MegatronModel)
    if model is None or not model.rng_states:
        return catalog
    from core.engine.catalog.removal import without_unused_tensors

    return without_unused_tensors(catalog.with_facet(replace(model, rng_states={})), catalog)


def with_common(catalog: Catalog) -> Catalog:
    """Convert a catalog to torch_dist's form: all entries except tensors are in the common state.

    A catalog that already has a common state is returned unchanged.
    """

    if catalog.common is not None:
        return catalog
    if catalog.skeleton is None:
        common: object = {key: item.value for key, item in catalog.objects.items()}
    else:

        def common_value(entry: LeafEntry) -> object:
            if isinstance(entry.leaf, ObjectLeaf):
                return catalog.objects[entry.leaf.key].value
            return REMOVED if isinstance(entry.leaf, TensorLeaf) else entry.leaf

        common = map_leaves(catalog.skeleton, common_value)
    return replace(catalog, objects={}, skeleton=None, common=as_mapping(common) or {})


def with_common_as_objects(catalog: Catalog) -> Catalog:
    """Turn the entries of a catalog's common state into objects; tensors inside stay there."""
    from core.megatron.extras.common_state import OPTIMIZER
    from core.megatron.optimizer.entries import build_object_entry

    catalog = _without_rank_states(catalog)
    common = catalog.common
    if common is None:
        return catalog
    objects = {str(name): StoredObject(str(name), value=value) for name, value in common.items()}
    if catalog.optimizer is not None:
        objects[OPTIMIZER] = StoredObject(OPTIMIZER, value=build_object_entry(catalog.optimizer))
    return replace(
        catalog.without_facets(MegatronModel, HuggingFaceModel),
        objects={**catalog.objects, **objects},
        skeleton=None,
        common=None,
        optimizer=None,
    )


def _keyed_by_path(catalog: Catalog, skeleton: object) -> Catalog:
    """Give a catalog another skeleton, and key every tensor by its path in it."""

    old_key_of: dict[str, str] = {}

    def rekeyed(entry: LeafEntry) -> object:
        if not isinstance(entry.leaf, TensorLeaf):
            return entry.leaf
        key = join_path(entry.path)
        old_key_of[key] = entry.leaf.key
        return replace(entry.leaf, key=key)

    keyed = map_leaves(skeleton, rekeyed)

    # Tensors that the skeleton contains are visible now, even if they were hidden before.
    visible = set(old_key_of.values())
    return replace(
        catalog.without_facets(MegatronModel, HuggingFaceModel),
        tensors=without_ties({new: catalog.tensor(old) for new, old in old_key_of.items()}),
        hidden={key: tensor for key, tensor in catalog.hidden.items() if key not in visible},
        objects={
            entry.key: StoredObject(entry.key, value=entry.leaf)
            for entry in entries(keyed)
            if not isinstance(entry.leaf, TensorLeaf)
        },
        skeleton=keyed,
        common=None,
        optimizer=None,
    )
