"""Reading the optimizer of checkpoints of global tensors.

::

    optimizer.state.fp32_param.decoder.layers.mlp.linear_fc2.weight   FP32, Float16: shaped, cut and
    optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight      stacked as the parameter
    optimizer.state.param.decoder.layers.mlp.linear_fc2.weight        fully_reshardable: ``param``
                                                                      is the master weights
    chained_1.optimizer.state.exp_avg.…                               chained, in older checkpoints
    optimizer.distributed.dp_group_idx_0.gbuf_idx_0.….exp_avg         flat buckets (``buckets``)

In zarr, ``fully_sharded_model_space`` (megatron-core up to 0.14) has the first form. In torch_dist,
its tensors are *reformulated*: a parameter of shape (4, 64, 96), cut into (4, 1, 2) shards of (1,
64, 48), is stored with the shape (4, 1, 2, 3072), each shard as a row of its elements in C order;
the true shape is in ``.metadata``, under ``mcore_data[key]["nd_reformulated_orig_global_shape"]``.
``read_optimizer`` restores the true shapes.

Not supported: the model-space states of legacy grouped experts, which are transposed; Muon whose
matrices are distributed by layers, chained with a distributed optimizer in either form.

Source: megatron-core 0.12.1 ``dist_checkpointing/strategies/resharding.py``,
``transformer/moe/experts.py``; 0.16.1 and Megatron-LM d98e8a64
``core/optimizer/distrib_optimizer.py``; pinned in tests/golden (``mcore*``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod

from core.arrays.box import Box, Shape, c_strides
from core.arrays.sharding import ShardPiece
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import dropped_unlisted
from core.engine.catalog.facets import TorchDistFacts
from core.engine.catalog.flat_runs import FlatRun, fragments_of_run
from core.engine.catalog.optimizer_keys import MASTER, STEP, is_optimizer_key, param_of, state_key
from core.engine.catalog.tensor import Fragment, Tensor
from core.errors import CorruptError, UnsupportedError
from core.files.store import ReadStore
from core.megatron.model.facts import ModelFacts
from core.megatron.optimizer.entries import MODEL_SPACE, muon_chain_error, parse_entries
from core.megatron.optimizer.form import TITLES, optim_format_of
from core.megatron.optimizer.sharded.buckets import GlobalStates, has_buckets, read_buckets
from core.megatron.placement.origins import (
    Origin,
    meta_of,
    origins_of,
    place_tensors,
    record_padding,
)
from core.megatron.rules.rules import Rules
from core.pickle.fields import describe_value
from core.pickle.inert import TensorLeaf, walk

_STATE = re.compile(
    r"(?:chained_\d+\.)?optimizer\.state\.(?P<state>[^.]+)\.(?P<param>.+)", re.DOTALL
)
_TRUE_SHAPE = "nd_reformulated_orig_global_shape"
_BY_PARAMETER = ("per_parameter", "fully_reshardable", "fully_sharded_model_space")


def read_optimizer(
    catalog: Catalog,
    model: Catalog,
    entry: object,
    facts: ModelFacts,
    rules: Rules,
    *,
    prefix: str = "",
    store: ReadStore | None = None,
) -> GlobalStates:
    """Read the optimizer of a catalog that has one.

    Args:
        catalog: a catalog of global tensors with loaded objects.
        model: the global per-layer form of the catalog's weights.
        entry: entry ``optimizer`` of the common state, or the object of that name.
        facts: facts about the run that saved.
        prefix: prefix of Megatron's names in the model's keys; the optimizer's may have it as well.
        store: the checkpoint's files, to compare master weights with weights; None to skip that.

    Raises:
        UnsupportedError: the optimizer's form cannot be resharded, or states cannot be assigned to
            parameters.
        MissingShardError: a rank's buffers are missing.
        CorruptError: shapes or entries contradict each other.
    """
    # Flat buckets have a reader of their own.
    is_flattened = any(
        isinstance(fact, dict) and _TRUE_SHAPE in fact for fact in _facts_of(catalog).values()
    )
    form = optim_format_of(catalog.tensors, catalog.objects, has_flattened=is_flattened)
    if has_buckets(catalog):
        # Matrices of Muon have states of their own, and only the others are in buckets.
        if any(
            match and match["state"] == "momentum_buffer"
            for match in map(_STATE.fullmatch, catalog.tensors)
        ):
            raise muon_chain_error("float16, distributed")
        return read_buckets(catalog, model, facts, rules, store=store)

    # The other forms need the entry with the settings.
    if form not in _BY_PARAMETER or entry is None:
        title = TITLES[form or "other"]
        raise UnsupportedError(
            f"ckpt cannot reshard the optimizer state ({title}), because no entry describes it"
            if form in _BY_PARAMETER
            else f"ckpt cannot reshard optimizer states in the form {form} ({title})",
            hint="drop the optimizer with --no-optim; the weights are carried over exactly, but "
            "training continues with a fresh optimizer",
        )
    return _read_by_parameter(catalog, model, entry, facts, rules, prefix=prefix)


def with_states(model: Catalog, states: GlobalStates) -> Catalog:
    """Add an optimizer to the global per-layer form of a model."""
    return replace(
        model,
        tensors={**model.tensors, **states.tensors},
        hidden={**model.hidden, **states.hidden},
        optimizer=states.optimizer,
        notes=(*model.notes, *states.notes),
        dropped=(*model.dropped, *states.dropped),
    )


def _read_by_parameter(
    catalog: Catalog, model: Catalog, entry: object, facts: ModelFacts, rules: Rules, *, prefix: str
) -> GlobalStates:
    """Read an optimizer whose tensors are states of single parameters, or stacks of these."""
    # Tensors in the entry, such as the number of steps, are not states.
    leaves = _leaf_keys(entry)
    keys_of: dict[str, dict[str, str]] = {MASTER: {}}  # state → key → parameter
    for key in filter(is_optimizer_key, catalog.tensors):
        match = _STATE.fullmatch(key)
        if match is None and key in leaves:
            continue
        if match is None:
            raise UnsupportedError(
                "the tensor is not an optimizer state of any parameter",
                key=key,
                hint="drop the tensor with --exclude, or the optimizer with --no-optim",
            )
        state = MASTER if match["state"] == "param" else match["state"]
        keys_of.setdefault(state, {})[key] = match["param"]
    stored = {state: keys for state, keys in keys_of.items() if keys}
    read = parse_entries(entry, states=stored)
    if read.sharding == MODEL_SPACE and facts.expert_names == "grouped":
        raise UnsupportedError(
            f"optimizer states of grouped experts (GroupedMLP) are not supported in {MODEL_SPACE}, "
            "because they are transposed relative to the weights",
            hint="drop the optimizer with --no-optim",
        )

    # Give every state its global per-layer name, like the weights.
    catalog = in_true_shapes(catalog, [key for keys in stored.values() for key in keys])
    origins: dict[str, Origin] = {}
    for state, keys in stored.items():
        names = {key: name.removeprefix(prefix) for key, name in keys.items()}
        of_state = origins_of(catalog, names, facts, rules)
        origins |= {state_key(state, name): origin for name, origin in of_state.items()}
    metas = {
        key: _with_parameter_shape(key, meta_of(catalog, key, origin), model)
        for key, origin in origins.items()
    }

    # The number of steps may be a tensor, with copies of equal content.
    hidden = {key: catalog.tensor(key) for key in _leaf_keys(read.optimizer.entries)}
    read_keys = {*hidden, *read.steps, *(key for keys in stored.values() for key in keys)}
    unread = {key: catalog.tensor(key) for key in leaves if key not in read_keys}
    if read.steps:
        first, *others = map(catalog.tensor, read.steps)
        hidden[STEP] = first.with_replicas(*others)
    return GlobalStates(
        place_tensors(catalog, origins, metas),
        read.optimizer,
        hidden,
        dropped=(
            *read.dropped,
            *dropped_unlisted(unread, "step counts that the param groups also contain"),
            *record_padding(catalog, origins, metas),
        ),
    )


def _leaf_keys(tree: object) -> list[str]:
    """Return the keys of the tensors in an inert tree, in order."""
    return [leaf.key for leaf in walk(tree) if isinstance(leaf, TensorLeaf)]


def _with_parameter_shape(key: str, stored: Tensor, model: Catalog) -> Tensor:
    """Return a state's tensor with its parameter's shape, which may have fewer padding rows.

    Raises:
        CorruptError: the model does not have the parameter, or has it in another shape.
    """
    param = model.tensors.get(param_of(key))
    if param is None:
        raise CorruptError(
            "the optimizer has state for a parameter that the model does not have", key=key
        )
    same = stored.shape[1:] == param.shape[1:] and len(stored.shape) == len(param.shape)
    if not same or stored.shape[:1] < param.shape[:1]:
        raise CorruptError(
            f"the state's shape {stored.shape} does not match its parameter's shape {param.shape}",
            key=key,
            hint="drop the optimizer with --no-optim; ckpt cannot reshard states whose shapes "
            "differ from their parameters' shapes",
        )
    return replace(stored, shape=param.shape)


def _facts_of(catalog: Catalog) -> Mapping[str, object]:
    """Return the ``mcore_data`` of ``.metadata`` by key (megatron-core up to 0.15)."""
    facts = catalog.facet(TorchDistFacts)
    return {} if facts is None or facts.mcore_data is None else facts.mcore_data


def in_true_shapes(catalog: Catalog, keys: Iterable[str]) -> Catalog:
    """Return the catalog with the true shapes of reformulated tensors (megatron-core up to 0.15).

    Args:
        keys: keys of tensors that may be reformulated.

    Raises:
        CorruptError: a recorded true shape is not a shape, or not that of the stored tensor.
    """
    facts = _facts_of(catalog)

    # .metadata records the true shapes of reformulated tensors only.
    shapes: dict[str, Shape] = {}
    for key in keys:
        fact = facts.get(key)
        if isinstance(fact, dict) and _TRUE_SHAPE in fact:
            shapes[key] = _true_shape(key, catalog.tensors[key], fact[_TRUE_SHAPE])
    if not shapes:
        return catalog

    tensors = {
        key: _in_true_shape(tensor, shapes[key]) if key in shapes else tensor
        for key, tensor in catalog.tensors.items()
    }
    return replace(catalog, tensors=tensors)


def _in_true_shape(tensor: Tensor, shape: Shape) -> Tensor:
    """Return a reformulated tensor in its true shape."""

    def fragments() -> list[Fragment]:
        return [
            part
            for fragment in tensor.fragments()
            for part in _unflatten(fragment, tensor.shape, shape)
        ]

    return replace(tensor, shape=shape, tiling=fragments)


def _true_shape(key: str, tensor: Tensor, value: object) -> Shape:
    """Return the recorded true shape of a reformulated tensor, after checking it."""
    is_shape = isinstance(value, tuple) and all(type(n) is int and n >= 0 for n in value)
    shape: Shape = tuple(value) if is_shape and isinstance(value, tuple) else ()

    # All axes but the last are numbers of shards, which divide the true shape.
    parts = tensor.shape[:-1]
    fits = len(shape) == len(parts) > 0 and all(
        n > 0 and extent % n == 0 for extent, n in zip(shape, parts, strict=True)
    )
    if not fits or prod(shape) != prod(tensor.shape):
        raise CorruptError(
            f"the tensor's shape {tensor.shape} is inconsistent with the original shape "
            f"{describe_value(value)} recorded in mcore_data",
            key=key,
        )
    return shape


def _unflatten(fragment: Fragment, stored: Shape, shape: Shape) -> Iterator[Fragment]:
    """Yield the fragments of the true tensor in a fragment of the reformulated tensor.

    Args:
        stored: shape of the reformulated tensor.
        shape: true shape.
    """
    shard_shape = tuple(extent // n for extent, n in zip(shape, stored[:-1], strict=True))
    array, box = fragment.array, fragment.box
    assert array is not None and len(array.shape) == len(stored), (
        "stored chunks have the tensor's axes"
    )
    strides = c_strides(array.shape)

    # Each row of the fragment is a run of one flattened shard.
    start, n = box.offset[-1], box.shape[-1]
    for steps in product(*map(range, box.shape[:-1])):
        number = tuple(first + step for first, step in zip(box.offset, steps, strict=False))
        at = sum(
            (i + step) * stride
            for i, step, stride in zip(fragment.at, (*steps, 0), strides, strict=True)
        )
        offset = tuple(i * extent for i, extent in zip(number, shard_shape, strict=True))
        shard = ShardPiece(Box(offset, shard_shape), (0,) * len(shard_shape))
        yield from fragments_of_run(FlatRun(start, n, array, at), [shard], shape=shard_shape)
