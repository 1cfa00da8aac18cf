"""The optimizer of checkpoints that store global tensors: which tensor is which state of which
parameter.

::

    optimizer.state.fp32_param.decoder.layers.mlp.linear_fc2.weight      FP32 and Float16 optimizers: shaped, cut and
    optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight         stacked as the parameter
    optimizer.state.param.decoder.layers.mlp.linear_fc2.weight           fully_reshardable: ``param`` is the master
    chained_1.optimizer.state.exp_avg.…                                  of chained optimizers, in older checkpoints
    optimizer.distributed.dp_group_idx_0.gbuf_idx_0.….exp_avg            flat buckets, see
    ``core.megatron.optimizer.sharded.buckets``

``fully_sharded_model_space`` (megatron-core up to 0.14) has the first form in zarr. In torch_dist
its tensors are *reformulated*: a parameter of shape (4, 64, 96), cut into (4, 1, 2) shards of (1,
64, 48), is stored with the shape (4, 1, 2, 3072), each shard as a row of its elements in C order;
the true shape is in ``.metadata``, under ``mcore_data[key]["nd_reformulated_orig_global_shape"]``.
``read_states`` gives such tensors their true shape back.

Not supported, refused by name: the model-space states of legacy grouped experts, which are
transposed.

Source: megatron-core 0.12.1 ``dist_checkpointing/strategies/resharding.py``,
``transformer/moe/experts.py``; 0.16.1 and Megatron-LM d98e8a64
``core/optimizer/distrib_optimizer.py``; pinned in tests/golden (``mcore*``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

from core.arrays.box import Box, Shape, c_strides
from core.arrays.sharding import ShardPiece
from core.catalog.catalog import Catalog, Fragment, TensorMeta
from core.catalog.facets import TorchDistFacts
from core.catalog.optimizer_keys import MASTER, STEP, Optimizer, param_of, state_key
from core.changes.select import is_optimizer_key
from core.errors import CorruptError, UnsupportedError
from core.files.store import ReadStore
from core.megatron.model.facts import ModelFacts
from core.megatron.optimizer.entries import MODEL_SPACE, read_entries
from core.megatron.optimizer.flat.boxes import FlatRun, fragments_of_run
from core.megatron.optimizer.form import TITLES, optim_format_of
from core.megatron.optimizer.sharded.buckets import has_buckets, read_buckets
from core.megatron.placement.origins import Origin, OriginFragments, meta_of, origins_of
from core.megatron.rules.rules import Rules
from core.pickle.inert import TensorLeaf, walk

_STATE = re.compile(
    r"(?:chained_\d+\.)?optimizer\.state\.(?P<state>[^.]+)\.(?P<param>.+)", re.DOTALL
)
_TRUE_SHAPE = "nd_reformulated_orig_global_shape"
_BY_PARAMETER = ("per_parameter", "fully_reshardable", "fully_sharded_model_space")


@dataclass(frozen=True, slots=True)
class GlobalStates:
    """The optimizer of a checkpoint of global tensors, in the global per-layer form.

    Args:
        tensors: states of the optimizer, by ``core.catalog.optimizer_keys.state_key``.
        fragments_of: their fragments.
        optimizer: what is not a tensor.
        hidden: the tensors in its entries, ``STEP`` among them; ``fragments_of`` answers for them
            too.
        notes, dropped: for the catalog's fields of these names.
    """

    tensors: Mapping[str, TensorMeta]
    fragments_of: Callable[[str], Sequence[Fragment]]
    optimizer: Optimizer
    hidden: Mapping[str, TensorMeta] = field(default_factory=dict)
    notes: Sequence[str] = ()
    dropped: Sequence[str] = ()


def read_states(
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
        catalog: global tensors, its objects loaded.
        model: the global per-layer form of its weights.
        entry: ``optimizer`` of the common state, or the object of that name.
        facts: facts about the run that saved.
        prefix: prefix of Megatron's names in the model's keys; the optimizer's may have it as well.
        store: the checkpoint's files, to compare masters with weights; None leaves that out.

    Raises:
        UnsupportedError: the optimizer is of a kind that is not read, or its states cannot be
            assigned.
        CorruptError: shapes or entries contradict each other.
    """
    is_flattened = any(
        isinstance(fact, dict) and _TRUE_SHAPE in fact for fact in _facts_of(catalog).values()
    )
    form = optim_format_of(catalog.tensors, catalog.objects, has_flattened=is_flattened)
    if has_buckets(catalog):
        buckets = read_buckets(catalog, model, facts, rules, store=store)
        return GlobalStates(
            buckets.tensors,
            buckets.fragments_of,
            buckets.optimizer,
            hidden=buckets.hidden,
            notes=buckets.notes,
        )
    if form not in _BY_PARAMETER or entry is None:
        problem = (
            "without an entry that describes it" if form in _BY_PARAMETER else f"in the form {form}"
        )
        raise UnsupportedError(
            f"the optimizer's state {problem} ({TITLES[form or 'other']}) cannot be brought into another layout",
            hint="leave it out with --no-optim; the weights are exact, and training starts with a fresh optimizer",
        )
    return _read_by_parameter(catalog, model, entry, facts, rules, prefix=prefix)


def with_states(model: Catalog, states: GlobalStates) -> Catalog:
    """Return the global per-layer form with its optimizer."""
    of_model = model.fragments_of

    def fragments_of(key: str) -> Sequence[Fragment]:
        return (
            states.fragments_of(key)
            if key in states.tensors or key in states.hidden
            else of_model(key)
        )

    return replace(
        model,
        tensors={**model.tensors, **states.tensors},
        hidden={**model.hidden, **states.hidden},
        fragments_of=fragments_of,
        optimizer=states.optimizer,
        notes=(*model.notes, *states.notes),
        dropped=(*model.dropped, *states.dropped),
    )


def _read_by_parameter(
    catalog: Catalog, model: Catalog, entry: object, facts: ModelFacts, rules: Rules, *, prefix: str
) -> GlobalStates:
    """Read an optimizer whose tensors are states of single parameters, or stacks of such."""
    leaves = {leaf.key for leaf in walk(entry) if isinstance(leaf, TensorLeaf)}
    stored = _states(key for key in catalog.tensors if key not in leaves or _STATE.fullmatch(key))
    read = read_entries(entry, states=stored)
    if read.sharding == MODEL_SPACE and facts.expert_names == "grouped":
        raise UnsupportedError(
            f"the optimizer's states of grouped experts (GroupedMLP) are transposed in {MODEL_SPACE}, which is not "
            "handled",
            hint="leave the optimizer out with --no-optim",
        )

    # Find every state under the global per-layer names, like the weights.
    catalog = in_true_shapes(catalog, [key for keys in stored.values() for key in keys])
    origins: dict[str, Origin] = {}
    for state, keys in stored.items():
        names = {key: name.removeprefix(prefix) for key, name in keys.items()}
        of_state = origins_of(catalog, names, facts, rules)
        origins |= {state_key(state, name): origin for name, origin in of_state.items()}
    metas = {
        key: _meta(key, meta_of(catalog, key, origin), model) for key, origin in origins.items()
    }

    # The number of steps may be a tensor, with copies of equal content.
    hidden = {
        leaf.key: catalog.meta(leaf.key)
        for leaf in walk(read.optimizer.entries)
        if isinstance(leaf, TensorLeaf)
    }
    if read.steps:
        hidden[STEP] = replace(catalog.meta(read.steps[0]), key=STEP)
    of_states = OriginFragments(catalog, origins, metas).fragments_of

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key == STEP:
            return [
                replace(piece, key=STEP) for step in read.steps for piece in catalog.fragments(step)
            ]
        return of_states(key)

    return GlobalStates(metas, fragments_of, read.optimizer, hidden, dropped=read.dropped)


def _states(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return state → key → parameter, of all keys that belong to an optimizer; masters first."""
    keys_of: dict[str, dict[str, str]] = {MASTER: {}}
    for key in filter(is_optimizer_key, keys):
        match = _STATE.fullmatch(key)
        if match is None:
            raise UnsupportedError(
                "the tensor is not a state of a parameter",
                key=key,
                hint="leave it out with --exclude, or --no-optim",
            )
        state = MASTER if match["state"] == "param" else match["state"]
        keys_of.setdefault(state, {})[key] = match["param"]
    return {state: keys for state, keys in keys_of.items() if keys}


def _meta(key: str, stored: TensorMeta, model: Catalog) -> TensorMeta:
    """Return a state with its parameter's shape, which may leave out padding rows.

    Raises:
        CorruptError: the model has no such parameter, or it has another shape.
    """
    param = model.tensors.get(param_of(key))
    if param is None:
        raise CorruptError(
            "the optimizer has a state of a parameter that the model does not have", key=key
        )
    same = stored.shape[1:] == param.shape[1:] and len(stored.shape) == len(param.shape)
    if not same or stored.shape[:1] < param.shape[:1]:
        raise CorruptError(
            f"a state of shape {stored.shape}, but the parameter's is {param.shape}",
            key=key,
            hint="states of another shape than the parameter's are not resharded; leave them out with --no-optim",
        )
    return replace(stored, key=key, shape=param.shape)


def _facts_of(catalog: Catalog) -> Mapping[str, object]:
    """Return what ``.metadata`` says about single tensors (megatron-core up to 0.15), by key."""
    facts = catalog.facet(TorchDistFacts)
    return {} if facts is None or facts.mcore_data is None else facts.mcore_data


def in_true_shapes(catalog: Catalog, keys: Iterable[str]) -> Catalog:
    """Return the catalog with the true shapes of reformulated tensors.

    megatron-core up to 0.15 stored them so.

    Args:
        keys: tensors to look at.

    Raises:
        CorruptError: a true shape is none, or not that of the stored tensor.
    """
    facts = _facts_of(catalog)

    # .metadata knows the true shapes; plain tensors have none there.
    shapes: dict[str, Shape] = {}
    for key in keys:
        fact = facts.get(key)
        if isinstance(fact, dict) and _TRUE_SHAPE in fact:
            shapes[key] = _true_shape(catalog.tensors[key], fact[_TRUE_SHAPE])
    if not shapes:
        return catalog

    def fragments_of(key: str) -> Sequence[Fragment]:
        shape = shapes.get(key)
        fragments = catalog.fragments(key)
        if shape is None:
            return fragments
        return [
            part
            for piece in fragments
            for part in _unflattened(piece, catalog.tensors[key].shape, shape)
        ]

    metas = {
        key: replace(meta, shape=shapes.get(key, meta.shape))
        for key, meta in catalog.tensors.items()
    }
    return replace(catalog, tensors=metas, fragments_of=fragments_of)


def _true_shape(meta: TensorMeta, value: object) -> Shape:
    """Return the shape that a reformulated tensor had."""
    is_shape = isinstance(value, tuple) and all(type(n) is int and n >= 0 for n in value)
    shape: Shape = tuple(value) if is_shape and isinstance(value, tuple) else ()
    parts = meta.shape[:-1]
    fits = len(shape) == len(parts) > 0 and all(
        n > 0 and extent % n == 0 for extent, n in zip(shape, parts, strict=True)
    )
    if not fits or prod(shape) != prod(meta.shape):
        raise CorruptError(
            f"the tensor of shape {meta.shape} cannot have been one of shape {value!r}, as mcore_data states",
            key=meta.key,
        )
    return shape


def _unflattened(piece: Fragment, stored: Shape, shape: Shape) -> Iterator[Fragment]:
    """Yield the fragments of the true tensor that a fragment of the reformulated one holds.

    Args:
        stored: shape of the reformulated tensor.
        shape: true shape.
    """
    shard = tuple(extent // n for extent, n in zip(shape, stored[:-1], strict=True))
    array = piece.array
    assert array is not None and len(array.shape) == len(stored), (
        "stored chunks have the tensor's axes"
    )
    strides = c_strides(array.shape)
    start, n = piece.box.offset[-1], piece.box.shape[-1]
    for steps in product(*map(range, piece.box.shape[:-1])):
        number = tuple(first + step for first, step in zip(piece.box.offset, steps, strict=False))
        at = sum(
            (i + step) * stride
            for i, step, stride in zip(piece.at, (*steps, 0), strides, strict=True)
        )
        box = Box(tuple(i * extent for i, extent in zip(number, shard, strict=True)), shard)
        shard_piece = ShardPiece(box, (0,) * len(shard))
        yield from fragments_of_run(
            piece.key, FlatRun(start, n, array, at), [shard_piece], shape=shard
        )
