"""Extra states: what modules keep beside their parameters, and what becomes of it when the layout changes.

The local implementation has none (``None``). Transformer Engine pickles its FP8 state into a uint8 tensor or a
``BytesIO``, of no bytes where FP8 is off. With delayed scaling it holds what was measured (``amax_history_fwd``,
``scale_fwd`` …), otherwise only the recipe. Nothing of it is cut over ranks, and no rule can cut it:

==================================================  ==================================================================
 a state that is                                     becomes
==================================================  ==================================================================
 ``None`` or of no bytes                             the same
 the same on all ranks that hold it                  the same, on all ranks of the destination that hold it
 not the same, or holds tensors                      ``None``, with a note: Transformer Engine makes it anew, and
                                                     measures again where the scaling is delayed
 of all grouped experts of a rank together           kept if EP does not change, otherwise ``None``, with a note
 of each expert, where files have them together      ``None`` for all together, with a note if it held something
==================================================  ==================================================================

``None`` is what Megatron's strict loading needs, and what every version of Transformer Engine takes for "nothing".

Source: Megatron-LM d98e8a64 ``core/extensions/transformer_engine.py`` ``_fp8_extra_state_is_persistent`` and
``TEGroupedLinear``; TransformerEngine 2.x ``module/base.py`` ``get_extra_state``, ``set_extra_state``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from core.catalog.catalog import Catalog, StoredObject
from core.catalog.facets import MegatronModel
from core.catalog.stored import StoredArray
from core.files.store import ReadStore
from core.megatron.extras.common_state import EXTRA_STATE, same
from core.megatron.model.facts import Facts
from core.megatron.model.topology import Topology
from core.megatron.rules.rules import Rules
from core.pickle.inert import TensorLeaf, walk

MAX_READ = 1 << 20
"""Most bytes of a state that are read to compare it or to tell its kind."""
_MEASURED = (b"amax_history_fwd", b"scale_fwd", b"scale_bwd")


def disagreement(values: Sequence[object], arrays: Sequence[StoredArray], store: ReadStore | None) -> str | None:
    """Why a state cannot be kept, in words for a note; None if all that hold it hold the same.

    Args:
        values: what ranks hold that is no tensor.
        arrays: what the others hold.
        store: the checkpoint's files, for states whose CRC no container states; None leaves those to the copying, which
            compares replicas.
    """
    if any(isinstance(leaf, TensorLeaf) for value in values for leaf in walk(value)):
        return "it holds tensors, which belong to one layout; Transformer Engine makes it anew"
    if not arrays and all(same(values[0], value) for value in values[1:]):
        return None
    if not values and _are_same(arrays, store):
        return None
    held = [*_bytes_in(values), *(data for array in arrays[:1] if (data := _read(array, store)) is not None)]
    if any(word in data for data in held for word in _MEASURED):
        return "delayed FP8 scaling, not the same on all ranks; Transformer Engine measures it anew"
    return "not the same on all ranks; Transformer Engine makes it anew"


def _are_same(arrays: Sequence[StoredArray], store: ReadStore | None) -> bool:
    first = arrays[0]
    if any((array.dtype, array.shape) != (first.dtype, first.shape) for array in arrays):
        return False
    crcs = {array.extent.crc for array in arrays}
    if first.n_bytes == 0 or (len(crcs) == 1 and None not in crcs):
        return True
    if None not in crcs:
        return False
    found = {_read(array, store) for array in arrays}
    return len(found) == 1 or None in found


def _read(array: StoredArray, store: ReadStore | None) -> bytes | None:
    """The bytes of a small dense array; None if they are not at hand."""
    extent = array.extent
    if store is None or extent.is_late or extent.encoding is not None:
        return None
    if len(array.shape) != 1 or extent.strides not in (None, (1,)) or array.n_bytes > MAX_READ:
        return None
    return store.read(extent.file, extent.offset, array.n_bytes)


def _bytes_in(values: Iterable[object]) -> list[bytes]:
    return [bytes(leaf) for value in values for leaf in walk(value) if isinstance(leaf, (bytes, bytearray))]


def for_experts(
    catalog: Catalog, topology: Topology, facts: Facts, rules: Rules, dropped: list[str], *, names: str | None
) -> Catalog:
    """The global form with the extra states of experts as the destination's rank files have them.

    Args:
        names: how the destination names experts; legacy grouped ones have no states.
        dropped: states that hold something and become ``None`` are noted here.
    """
    gone: dict[str, str | None] = {}
    for key in [*catalog.tensors, *catalog.objects]:
        if not key.endswith(EXTRA_STATE):
            continue
        expert = rules.expert_of(key)
        if expert is None:
            continue
        if names == "grouped":
            gone[key] = None
        elif expert.number is not None and names == "te_grouped":
            gone[key] = f"{expert.before}{expert.rest}"
        elif rules.is_packed_state(key) and topology.ep != facts.topology.ep and _holds(catalog, key):
            gone[key] = key
    if not gone:
        return catalog
    together = f"packed for the experts of EP {facts.topology.ep}"
    dropped += [
        f"{key} ({together if key == new else 'of one expert; files have those of all experts together'}; "
        "Transformer Engine makes it anew)"
        for key, new in gone.items()
        if _holds(catalog, key)
    ]
    empty = {new: StoredObject(new) for new in gone.values() if new is not None}
    model = catalog.facet(MegatronModel)
    if model is not None and model.order is not None:
        renamed = (gone.get(name, name) for name in model.order)
        order = tuple(dict.fromkeys(name for name in renamed if name is not None))
        catalog = catalog.with_facet(replace(model, order=order))
    return replace(
        catalog,
        tensors={key: meta for key, meta in catalog.tensors.items() if key not in gone},
        objects={**{key: item for key, item in catalog.objects.items() if key not in gone}, **empty},
    )


def _holds(catalog: Catalog, key: str) -> bool:
    """Whether a state holds something."""
    if key in catalog.tensors:
        return catalog.tensors[key].n_elements > 0
    value = catalog.objects[key].value
    return value is not None and (any(_bytes_in([value])) or not any(isinstance(one, bytes) for one in walk(value)))
