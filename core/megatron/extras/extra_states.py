"""Extra states: module state other than parameters, and its treatment when the layout changes.

The local implementation has none (``None``). Transformer Engine pickles its FP8 state into a uint8
tensor or a ``BytesIO``, which is empty if FP8 is off. With delayed scaling it contains measurements
(``amax_history_fwd``, ``scale_fwd`` …), otherwise only the recipe. It is not cut over ranks, and no
rule can cut it:

``None`` or empty
    Kept.
equal on all ranks that have the state
    Kept, on all ranks of the destination that have the module.
different on ranks, or with tensors
    ``None``, with a note: Transformer Engine creates the state again, and repeats the measurements
    of delayed scaling.
one state for all grouped experts of a rank
    Kept if EP does not change, otherwise ``None``, with a note.
one state per expert, where the destination's files have one for all
    ``None`` for all experts, with a note if the state was not empty.

``None`` is what Megatron's strict loading needs, and what every version of Transformer Engine
accepts as an empty state.

Source for this treatment: Megatron-LM d98e8a64 ``core/extensions/transformer_engine.py``
``_fp8_extra_state_is_persistent`` and ``TEGroupedLinear``; TransformerEngine 2.x ``module/base.py``
``get_extra_state``, ``set_extra_state``.

Megatron asks a torch_dist checkpoint for the extra state of every module that has one, and by
default fails where it is absent (``Missing key in checkpoint state_dict``); states that it did not
ask for are ignored (``--dist-ckpt-strictness assume_ok_unexpected``). Which modules have one
depends on the versions of megatron-core and Transformer Engine: linear modules always, norms and
attention cores in some. All are named here, and stored as ``None``, which every version accepts as
an empty state.

Rank files are loaded by ``load_state_dict``, which until megatron-core 0.13 fails on a state that
is missing or not expected; later versions then load again without strictness. They get the states
of linear modules and of norms (which have one since Transformer Engine 1.13), but none of attention
cores, which Transformer Engine loads without theirs. Before 1.13, only megatron-core 0.14 and later
load the norms' states.

Source for the states that are asked for: megatron-core 0.16.1
``extensions/transformer_engine.py``, ``transformer/utils.py``
``make_sharded_tensors_for_checkpoint``, ``dist_checkpointing/validation.py``; Megatron-LM
``training/checkpointing.py`` ``load_checkpoint`` of core 0.12.1, ``load_model_state_dict`` of core
0.14.0; TransformerEngine 1.13 and 2.x ``pytorch/ops/op.py`` and ``pytorch/module/base.py``
``set_extra_state``, ``remove_extra_states_check`` of ``DotProductAttention``;
NVIDIA/Megatron-LM#6270 (``decoder.layers.pre_mlp_layernorm._extra_state`` absent).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.dropped import dropped_each
from core.engine.catalog.facets import MegatronModel
from core.engine.catalog.stored import StoredArray
from core.files.store import ReadStore
from core.megatron.extras.common_state import EXTRA_STATE
from core.megatron.model.checks import ADAPTER
from core.megatron.model.facts import ModelFacts
from core.megatron.model.topology import Topology
from core.megatron.rules.rules import Rules
from core.pickle.equality import are_same
from core.pickle.inert import TensorLeaf, walk

MAX_READ = 1 << 20
"""Size of the largest state, in bytes, that is read to compare it or to find its kind."""
_MEASURED = (b"amax_history_fwd", b"scale_fwd", b"scale_bwd")
_ENGINE_MODULE = re.compile(
    r"(?P<module>(?:.*\.)?"
    # Heterogeneous models have linear modules in the place of an attention or MLP.
    r"(?:linear_\w+|eh_proj|in_proj|out_proj|\w*norm|self_attention|mlp))\.weight\d*"
)
_ATTENTION_STATE = re.compile(rf"(.*\.)?core_attention\.{EXTRA_STATE}")
_NORM_STATE = re.compile(rf"(.*\.)?\w*norm\.{EXTRA_STATE}")
_MAMBA_NORM_STATE = re.compile(rf"(.*\.)?(?:mamba_)?mixer\.norm\.{EXTRA_STATE}")
_PROJECTION = re.compile(r"(?P<attention>(?:.*\.)?(?:self|cross)_attention)\.linear_proj\.weight")


def disagreement(
    values: Sequence[object], arrays: Sequence[StoredArray], store: ReadStore | None
) -> str | None:
    """Return the reason why a state cannot be kept, for a note; None if it can.

    It can be kept if all ranks that have it have the same one.

    Args:
        values: states of ranks where the state is not a tensor.
        arrays: states of the other ranks.
        store: the checkpoint's files, to compare states without a stored CRC; None leaves the
            comparison to copying, which compares replicas.
    """
    if any(isinstance(leaf, TensorLeaf) for value in values for leaf in walk(value)):
        return "it contains tensors that belong to one layout; Transformer Engine recreates it"
    if not arrays and all(are_same(values[0], value) for value in values[1:]):
        return None
    if not values and _are_same(arrays, store):
        return None

    # Find the kind of state: with delayed scaling, the pickle contains the names of measurements.
    contents = _bytes_in(values)
    if arrays:
        contents.append(_read(arrays[0], store) or b"")
    if any(word in data for data in contents for word in _MEASURED):
        return (
            "delayed FP8 scaling, not the same on all ranks; Transformer Engine repeats the "
            "measurements"
        )
    return "not the same on all ranks; Transformer Engine recreates it"


def _are_same(arrays: Sequence[StoredArray], store: ReadStore | None) -> bool:
    """Return whether arrays hold the same bytes; True if unknown, as copying compares them too."""
    first = arrays[0]
    if any((array.dtype, array.shape) != (first.dtype, first.shape) for array in arrays):
        return False

    # Compare CRCs where all arrays have one, and small contents where some have none.
    crcs = {array.extent.crc for array in arrays}
    if first.n_bytes == 0 or (len(crcs) == 1 and None not in crcs):
        return True
    if None not in crcs:
        return False
    contents = {_read(array, store) for array in arrays}
    return len(contents) == 1 or None in contents


def _read(array: StoredArray, store: ReadStore | None) -> bytes | None:
    """Read a small dense array; None if it is large, encoded, or has no file position yet."""
    extent = array.extent
    if store is None or extent.is_late or extent.encoding is not None:
        return None
    if len(array.shape) != 1 or extent.strides not in (None, (1,)) or array.n_bytes > MAX_READ:
        return None
    return store.read(extent.file, extent.offset, array.n_bytes)


def _bytes_in(values: Iterable[object]) -> list[bytes]:
    """Return all bytes objects in inert trees, such as the contents of a ``BytesIO``."""
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
    """Return the global form with experts' extra states in the form of the destination's files.

    Non-empty states that become ``None`` are added to the catalog's ``dropped``.

    Args:
        topology: sizes of the destination.
        facts: facts about the source.
        expert_names: form of the experts' names in the destination
            (``core.megatron.rules.experts``); legacy grouped experts have no states.
    """
    new_keys = _new_state_keys(catalog, topology, facts, rules, expert_names=expert_names)
    if not new_keys:
        return catalog

    # A state that keeps its key was packed for the experts of a rank, any other is of one expert.
    packed = f"packed for the experts of EP {facts.topology.ep}"
    single = "belongs to one expert, but files have one state for all experts"
    dropped = [
        record
        for key, new in new_keys.items()
        if _is_filled(catalog, key)
        for record in dropped_each(
            (key,),
            f"{packed if key == new else single}; Transformer Engine recreates it",
            catalog.tensors,
        )
    ]

    # Replace each removed state by an empty one, at the same place in the order of the files.
    model = catalog.facet(MegatronModel)
    if model is not None and model.order is not None:
        names = filter(None, (new_keys.get(name, name) for name in model.order))
        catalog = catalog.with_facet(replace(model, order=tuple(dict.fromkeys(names))))
    empty_states = {new: StoredObject(new) for new in filter(None, new_keys.values())}
    objects = {key: item for key, item in catalog.objects.items() if key not in new_keys}
    return replace(
        catalog,
        tensors={key: tensor for key, tensor in catalog.tensors.items() if key not in new_keys},
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
    """Return key of an expert's state that cannot be kept → key of the empty state replacing it.

    The new key is None if no state replaces it.
    """
    new_keys: dict[str, str | None] = {}
    for key in [*catalog.tensors, *catalog.objects]:
        expert = rules.expert_of(key) if key.endswith(EXTRA_STATE) else None
        if expert is None:
            continue

        # GroupedMLP has no states; Transformer Engine's grouped linears have one for all experts,
        # packed for the experts of the rank.
        if expert_names == "grouped":
            new_keys[key] = None
        elif expert.number is not None and expert_names == "te_grouped":
            new_keys[key] = f"{expert.before}{expert.rest}"
        elif topology.ep != facts.topology.ep and rules.is_packed_state(key):
            if _is_filled(catalog, key):
                new_keys[key] = key
    return new_keys


def _is_filled(catalog: Catalog, key: str) -> bool:
    """Return whether an extra state, a tensor or an object, is neither None nor empty."""
    if key in catalog.tensors:
        return catalog.tensors[key].n_elements > 0
    value = catalog.objects[key].value
    has_bytes = any(isinstance(leaf, bytes) for leaf in walk(value))
    return value is not None and (any(_bytes_in([value])) or not has_bytes)


def requested_states(names: Iterable[str]) -> Iterator[str]:
    """Yield the names of the extra states of a model's modules, some of them more than once.

    Args:
        names: global names of the model's tensors under Transformer Engine's module names.
    """
    for name in names:
        # Adapters are those of Megatron-Bridge, whose loader does without their states.
        if ADAPTER in name:
            continue
        match = _ENGINE_MODULE.fullmatch(name)
        if match is not None:
            yield f"{match['module']}.{EXTRA_STATE}"
        match = _PROJECTION.fullmatch(name)
        if match is not None:
            yield f"{match['attention']}.core_attention.{EXTRA_STATE}"


def states_of_rank_files(names: Iterable[str]) -> Iterator[str]:
    """Yield the names of the extra states that rank files have, some of them more than once.

    Args:
        names: global names of the model's tensors under Transformer Engine's module names.
    """
    for state in requested_states(names):
        # The norm of a Mamba mixer is not Transformer Engine's, and has no state.
        if not (_ATTENTION_STATE.fullmatch(state) or _MAMBA_NORM_STATE.fullmatch(state)):
            yield state


def without_unexpected_states(catalog: Catalog, *, is_local: bool) -> Catalog:
    """Return the global per-layer form without empty states that loading rank files fails on.

    Args:
        is_local: the model is of the local implementation, whose norms have no states.
    """
    unexpected = (_ATTENTION_STATE, _NORM_STATE if is_local else _MAMBA_NORM_STATE)
    objects = {
        key: item
        for key, item in catalog.objects.items()
        if item.value is not None
        or item.raw_key is not None
        or not any(pattern.fullmatch(key) for pattern in unexpected)
    }
    return catalog if len(objects) == len(catalog.objects) else replace(catalog, objects=objects)


_FUSED_NORM = ("layer_norm_weight", "layer_norm_bias")
_LINEAR = re.compile(
    r"(^|\.)(linear_\w+|output_layer|eh_proj|(in|out)_proj|self_attention|mlp)\.weight$"
)


def list_extra_states(
    names: Collection[str], *, is_local: bool, has_value_head: bool
) -> tuple[dict[str, StoredObject], tuple[str, ...]]:
    """Return the extra states of modules, which are empty, and the order of entries in a rank file.

    Those of the local implementation are those of its linear modules. A value head has none.
    """
    objects: dict[str, StoredObject] = {}
    order: dict[str, None] = {}
    for name in names:
        module, _, last = name.rpartition(".")
        if last in _FUSED_NORM:
            continue  # added below, before the weight of its module
        order |= {norm: None for each in _FUSED_NORM if (norm := f"{module}.{each}") in names}
        order[name] = None
        if has_value_head and module == "output_layer":
            states = []  # a module of torch's own
        elif is_local:
            states = [f"{module}.{EXTRA_STATE}"] if _LINEAR.search(name) else []
        else:
            states = list(states_of_rank_files([name]))
        for state in states:
            # torch writes a module's extra state after all of its parameters: the bias moves up.
            bias = name.removesuffix("weight") + "bias"
            if bias in names:
                order[bias] = None
            objects[state] = StoredObject(state)
            order[state] = None
    if is_local and not has_value_head:
        state = f"output_layer.{EXTRA_STATE}"  # exists even if the weight is the embedding's
        objects.setdefault(state, StoredObject(state))
        order[state] = None
    return objects, tuple(order)
