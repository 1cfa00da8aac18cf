"""Extra states: what modules keep besides their parameters, and what becomes of it when the layout
changes.

The local implementation has none (``None``). Transformer Engine pickles its FP8 state into a uint8
tensor or a ``BytesIO``, of no bytes where FP8 is off. With delayed scaling it holds what was
measured (``amax_history_fwd``, ``scale_fwd`` …), otherwise only the recipe. Nothing of it is cut
over ranks, and no rule can cut it:

==================================================
==================================================================
 a state that is                                     becomes
==================================================
==================================================================
 ``None`` or of no bytes                             the same
 the same on all ranks that hold it                  the same, on all ranks of the destination that hold it
 not the same, or holds tensors                      ``None``, with a note: Transformer Engine makes it anew, and
                                                     measures again where the scaling is delayed
 of all grouped experts of a rank together           kept if EP does not change, otherwise ``None``, with a note
 of each expert, where files have them together      ``None`` for all together, with a note if it held something
==================================================
==================================================================

``None`` is what Megatron's strict loading needs, and what every version of Transformer Engine takes
for "nothing".

Source: Megatron-LM d98e8a64 ``core/extensions/transformer_engine.py``
``_fp8_extra_state_is_persistent`` and ``TEGroupedLinear``; TransformerEngine 2.x ``module/base.py``
``get_extra_state``, ``set_extra_state``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from core.catalog.catalog import Catalog, StoredObject
from core.catalog.facets import MegatronModel
from core.catalog.stored import StoredArray
from core.files.store import ReadStore
from core.megatron.extras.common_state import EXTRA_STATE, same
from core.megatron.model.facts import ModelFacts
from core.megatron.model.topology import Topology
from core.megatron.rules.rules import Rules
from core.pickle.inert import TensorLeaf, walk

MAX_READ = 1 << 20
"""Size of the largest state, in bytes, that is read to compare it or to tell its kind."""
_MEASURED = (b"amax_history_fwd", b"scale_fwd", b"scale_bwd")


def disagreement(
    values: Sequence[object], arrays: Sequence[StoredArray], store: ReadStore | None
) -> str | None:
    """Return why a state cannot be kept, in words for a note; None if all ranks that hold it hold
    the same.

    Args:
        values: states of ranks that are not a tensor.
        arrays: states of the other ranks.
        store: the checkpoint's files, to compare states without a stored CRC; None leaves those to
            the copying, which compares replicas.
    """
    if any(isinstance(leaf, TensorLeaf) for value in values for leaf in walk(value)):
        return "it holds tensors, which belong to one layout; Transformer Engine makes it anew"
    if not arrays and all(same(values[0], value) for value in values[1:]):
        return None
    if not values and _are_same(arrays, store):
        return None

    # Say why: states of delayed scaling hold measurements, whose keys are in the pickle.
    contents = [
        *_bytes_in(values),
        *(data for array in arrays[:1] if (data := _read(array, store)) is not None),
    ]
    if any(word in data for data in contents for word in _MEASURED):
        return "delayed FP8 scaling, not the same on all ranks; Transformer Engine measures it anew"
    return "not the same on all ranks; Transformer Engine makes it anew"


def _are_same(arrays: Sequence[StoredArray], store: ReadStore | None) -> bool:
    """Return whether arrays hold the same bytes; True where that can be neither shown nor
    refuted.
    """
    first = arrays[0]
    if any((array.dtype, array.shape) != (first.dtype, first.shape) for array in arrays):
        return False
    crcs = {array.extent.crc for array in arrays}
    if first.n_bytes == 0 or (len(crcs) == 1 and None not in crcs):
        return True
    if None not in crcs:
        return False
    contents = {_read(array, store) for array in arrays}
    return len(contents) == 1 or None in contents


def _read(array: StoredArray, store: ReadStore | None) -> bytes | None:
    """Read a small dense array; None if its bytes cannot be had cheaply."""
    extent = array.extent
    if store is None or extent.is_late or extent.encoding is not None:
        return None
    if len(array.shape) != 1 or extent.strides not in (None, (1,)) or array.n_bytes > MAX_READ:
        return None
    return store.read(extent.file, extent.offset, array.n_bytes)


def _bytes_in(values: Iterable[object]) -> list[bytes]:
    return [
        bytes(leaf)
        for value in values
        for leaf in walk(value)
        if isinstance(leaf, (bytes, bytearray))
    ]


def adapt_expert_states(
    catalog: Catalog,
    topology: Topology,
    facts: ModelFacts,
    rules: Rules,
    *,
    expert_names: str | None,
) -> Catalog:
    """Return the global form with the extra states of experts as the destination's rank files have
    them.

    States that hold something and become ``None`` are added to the catalog's ``dropped``.

    Args:
        topology: sizes of the destination.
        facts: facts about the source.
        expert_names: how the destination names experts; legacy grouped ones have no states.
    """
    new_keys = _new_state_keys(catalog, topology, facts, rules, expert_names=expert_names)
    if not new_keys:
        return catalog

    # A state under its own key was packed for the experts of a rank; any other is that of one expert.
    packed = f"packed for the experts of EP {facts.topology.ep}"
    single = "of one expert; files have those of all experts together"
    dropped = [
        f"{key} ({packed if key == new else single}; Transformer Engine makes it anew)"
        for key, new in new_keys.items()
        if _holds_something(catalog, key)
    ]

    # Each removed state is replaced by an empty one, at the same place in the order of the files.
    model = catalog.facet(MegatronModel)
    if model is not None and model.order is not None:
        names = (new_keys.get(name, name) for name in model.order)
        order = tuple(dict.fromkeys(name for name in names if name is not None))
        catalog = catalog.with_facet(replace(model, order=order))
    empty_states = {new: StoredObject(new) for new in new_keys.values() if new is not None}
    objects = {key: item for key, item in catalog.objects.items() if key not in new_keys}
    return replace(
        catalog,
        tensors={key: meta for key, meta in catalog.tensors.items() if key not in new_keys},
        objects={**objects, **empty_states},
        dropped=(*catalog.dropped, *dropped),
    )


def _new_state_keys(
    catalog: Catalog,
    topology: Topology,
    facts: ModelFacts,
    rules: Rules,
    *,
    expert_names: str | None,
) -> Mapping[str, str | None]:
    """Return the key of every experts' state that cannot be kept → the key of the empty state in
    its place.

    None stands for no state at all.
    """
    new_keys: dict[str, str | None] = {}
    for key in [*catalog.tensors, *catalog.objects]:
        expert = rules.expert_of(key) if key.endswith(EXTRA_STATE) else None
        if expert is None:
            continue
        if expert_names == "grouped":
            new_keys[key] = None
        elif expert.number is not None and expert_names == "te_grouped":
            new_keys[key] = f"{expert.before}{expert.rest}"
        elif (
            rules.is_packed_state(key)
            and topology.ep != facts.topology.ep
            and _holds_something(catalog, key)
        ):
            new_keys[key] = key
    return new_keys


def _holds_something(catalog: Catalog, key: str) -> bool:
    if key in catalog.tensors:
        return catalog.tensors[key].n_elements > 0
    value = catalog.objects[key].value
    has_bytes = any(isinstance(leaf, bytes) for leaf in walk(value))
    return value is not None and (any(_bytes_in([value])) or not has_bytes)
