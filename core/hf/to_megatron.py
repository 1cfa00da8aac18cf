"""From Hugging Face's names to the global Megatron form, as ``core.megatron.reshard.reshard.unshard`` makes it.

Fused tensors are fragments that point into the arrays of their parts; nothing is read or copied. Every tensor of the
source is used: a name that no row of the family's table explains is an error, and so is a tensor that is not there.

The result has the fields and facets of ``core.megatron.reshard.from_ranks``: one rank, ``checkpoint_version`` 3.0, true
vocabulary rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from core.arrays.box import Shape
from core.catalog.catalog import Catalog, Fragment, StoredObject, TensorMeta
from core.catalog.facets import MegatronModel
from core.catalog.files_beside import carried_of
from core.changes.select import is_optimizer_key
from core.errors import CorruptError, MissingShardError, UnknownTensorError, UnsupportedError, UsageError
from core.hf import fuse
from core.hf.config import CONFIG, arguments_of
from core.hf.name_tables import Family, Pair, family_of, pairs_of
from core.hf.traits import model_of
from core.megatron.model.topology import Topology
from core.pickle.inert import make_namespace
from core.quantize.schemes import check_numbers, quantized_weights

_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
_ITERATION = 1
"""Megatron does not load a checkpoint of iteration 0."""
_EXPERTS_BY_IMPL = {"transformer_engine": "te_grouped", "local": "sequential"}
_FUSED_NORM = "layer_norm_weight"
_LINEAR = re.compile(r"(^|\.)(linear_\w+|output_layer|eh_proj)\.weight$")


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor of the global form.

    Args:
        meta: it.
        used: keys of the source that it is made of.
        fragments: makes its fragments.
    """

    meta: TensorMeta
    used: tuple[str, ...]
    fragments: Callable[[], list[Fragment]]


def to_megatron(
    catalog: Catalog,
    config: Mapping[str, object],
    *,
    transformer_impl: str | None = None,
    make_vocab_size_divisible_by: int = 128,
) -> Catalog:
    """The global Megatron form of a model with Hugging Face's names; see the module's docstring.

    Args:
        catalog: flat keys, such as ``model.layers.0.self_attn.q_proj.weight``.
        config: the parsed ``config.json``.
        transformer_impl: whose names the parameters get, ``local`` or ``transformer_engine``; None means ``local``
            but where Megatron can only build the model with the other (latent attention).
        make_vocab_size_divisible_by: padded vocabularies are multiples of this, times TP.

    Raises:
        UnsupportedError: a family that is not mapped, quantized weights, or something that Megatron has no arguments
            for.
        MissingShardError: a tensor is absent.
        UnknownTensorError: a tensor is left over.
        CorruptError: shapes, dtypes and configuration contradict each other.
        UsageError: an option is none of its values.
    """
    if transformer_impl not in (None, *_EXPERTS_BY_IMPL):
        raise UsageError(f"transformer_impl is {transformer_impl!r}, neither 'local' nor 'transformer_engine'")
    family = family_of(config.get("model_type"))
    _refuse_quantized(catalog, config)
    notes, dropped = [*catalog.notes], [*catalog.dropped]
    ignored = {key for key in catalog.tensors if any(pattern.search(key) for pattern in family.ignored)}
    if ignored:
        notes.append(f"{min(ignored)} and others like it ({len(ignored)}) are left out: they follow from {CONFIG}")
    extra_layers = _extra_layers(catalog, config)
    n_mtp = len(extra_layers) if "mtp" in family.allows else 0
    if "mtp" in family.allows and (config.get("num_nextn_predict_layers") or 0) != len(extra_layers):
        notes.append(
            f"{CONFIG} says {config.get('num_nextn_predict_layers') or 0} multi-token prediction layers, "
            f"and there are tensors of {len(extra_layers)}, which count"
        )
    fields = arguments_of(
        config,
        family,
        dtype=_dtype_of(catalog, family),
        transformer_impl=transformer_impl,
        divisible_by=make_vocab_size_divisible_by,
        iteration=_ITERATION,
        n_mtp=n_mtp,
    )
    n_rows = fields["vocab_size"]
    assert isinstance(n_rows, int)
    model = model_of(fields, n_rows=n_rows, n_tensors=len(catalog.tensors))
    made = _all_made(catalog, pairs_of(family, model), notes)
    used = {key for one in made.values() for key in one.used} | ignored
    _refuse_leftover([key for key in catalog.tensors if key not in used], family)
    objects, order = _extra_states(made, is_local=model.is_local)
    dropped += [f"{key} (Megatron has no place for it)" for key in catalog.objects]
    beside = [path for path in (*carried_of(catalog), *catalog.documents) if path != CONFIG]
    if beside:
        dropped.append(f"files beside the weights: {', '.join(beside)}")
    args = make_namespace(fields)

    def fragments_of(key: str) -> Sequence[Fragment]:
        one = made.get(key)
        return catalog.fragments(key) if one is None else tuple(one.fragments())

    facts = MegatronModel(
        vocab_size=n_rows,
        expert_names=_EXPERTS_BY_IMPL["local" if model.is_local else "transformer_engine"],
        order=tuple(order),
    )
    return Catalog(
        format=catalog.format,
        version=None,
        tensors={name: one.meta for name, one in made.items()},
        fragments_of=fragments_of,
        objects=objects,
        bind=catalog.bind,
        iteration=_ITERATION,
        args=args,
        common={"args": args, "checkpoint_version": 3.0, "iteration": _ITERATION},
        notes=tuple(notes),
        dropped=tuple(dropped),
        facets={MegatronModel: facts, Topology: Topology()},
    )


def _refuse_quantized(catalog: Catalog, config: Mapping[str, object]) -> None:
    """Raise if a weight is quantized: Megatron would take the stored numbers for weights.

    Raises:
        UnsupportedError: names the scheme.
    """
    for weight in quantized_weights(catalog.tensors, config):
        raise UnsupportedError(
            f"the weights are quantized ({weight.scheme.name}), and Megatron has no place for their scales",
            key=weight.key,
            hint="apply the scales with --dequantize bf16"
            if weight.scheme.dequantize is not None
            else "dequantize the model with the library that quantized it, save it, and convert that",
        )
    for key in catalog.tensors:
        if key.endswith(("_scale_inv", ".weight_scale", ".input_scale")):
            raise UnsupportedError(
                "a scale of a quantized weight, for which Megatron has no place",
                key=key,
                hint="apply the scales with --dequantize bf16; leave those of activations out with --exclude",
            )


def _extra_layers(catalog: Catalog, config: Mapping[str, object]) -> set[int]:
    """Layers beyond those that the configuration counts: DeepSeek's multi-token prediction."""
    n_layers = config.get("num_hidden_layers")
    if type(n_layers) is not int:
        return set()
    found = {int(match[1]) for key in catalog.tensors if (match := _LAYER.match(key)) is not None}
    return {layer for layer in found if layer >= n_layers}


def _dtype_of(catalog: Catalog, family: Family) -> str:
    key = family.first[0].hf[0]
    if key not in catalog.tensors:
        raise MissingShardError("the tensor is not in the checkpoint", key=key)
    return catalog.tensors[key].dtype


def _all_made(catalog: Catalog, pairs: Iterable[Pair], notes: list[str]) -> dict[str, _Made]:
    found: dict[str, _Made] = {}
    copies: list[str] = []
    for pair in pairs:
        made, beside = _made(catalog, pair)
        found[pair.names[0]] = made
        copies += beside
    if copies:
        notes.append(f"{', '.join(copies[:3])}{' …' if copies[3:] else ''}: copies of what is there already, compared")
    return found


def _made(catalog: Catalog, pair: Pair) -> tuple[_Made, list[str]]:
    """(a tensor of the global form, the copies of it that are there)."""
    name = pair.names[0]
    beside = [key for key in (*pair.copies, *pair.twins) if key in catalog.tensors]
    if pair.stack is not None and pair.stack[0] in catalog.tensors:
        key, index, extent = pair.stack
        _check_shape(catalog, key, (extent, *pair.shape))
        check_numbers(catalog.tensors[key])
        meta = TensorMeta(name, catalog.tensors[key].dtype, pair.shape)
        return _Made(meta, (key,), lambda: list(fuse.one_of_stack(name, catalog.fragments(key), index))), []
    keys = [_present(catalog, part.names, pair) for part in pair.parts]
    for key, part in zip(keys, pair.parts, strict=True):
        _check_shape(catalog, key, part.shape)
    dtypes = {catalog.tensors[key].dtype: key for key in reversed((*keys, *beside))}
    if len(dtypes) > 1:
        (other, other_key), (one, key) = list(dtypes.items())[-2:]
        raise CorruptError(f"{key} is {one} and {other_key} is {other}, but Megatron has one tensor of them", key=name)
    for key in (*keys, *beside):
        check_numbers(catalog.tensors[key])
    for key in beside:
        _check_shape(catalog, key, pair.shape)
    strips = fuse.by_groups([part.shape[0] for part in pair.parts], pair.n_groups)

    def fragments() -> list[Fragment]:
        pieces = fuse.fused(name, strips, [catalog.fragments(key) for key in keys])
        return pieces + [replace(piece, key=name) for key in beside for piece in catalog.fragments(key)]

    return _Made(TensorMeta(name, next(iter(dtypes)), pair.shape), (*keys, *beside), fragments), beside


def _present(catalog: Catalog, names: Sequence[str], pair: Pair) -> str:
    for key in names:
        if key in catalog.tensors:
            return key
    hint = None if pair.stack is None else f"nor is {pair.stack[0]}, which would hold it for all experts"
    raise MissingShardError("the tensor is not in the checkpoint", key=names[0], hint=hint)


def _check_shape(catalog: Catalog, key: str, shape: Shape) -> None:
    found = catalog.tensors[key].shape
    if found != shape:
        raise CorruptError(
            f"shape {found}, but {CONFIG} makes it {shape} (elements)",
            key=key,
            hint="is this the configuration of these weights?",
        )


def _refuse_leftover(left: Sequence[str], family: Family) -> None:
    if not left:
        return
    if is_optimizer_key(left[0]):
        raise UnsupportedError(
            f"optimizer state under Hugging Face's names is not mapped ({len(left)} tensors)",
            key=left[0],
            hint="leave it out with --no-optim",
        )
    more = f", nor {len(left) - 1} others" if len(left) > 1 else ""
    raise UnknownTensorError(
        f"no row of the {family.model_type} table explains this tensor{more}",
        key=left[0],
        hint="leave it out with --exclude if the model does not need it",
    )


def _extra_states(made: Mapping[str, _Made], *, is_local: bool) -> tuple[dict[str, StoredObject], tuple[str, ...]]:
    """(empty extra states of linear modules, names of tensors and extra states in the order of a rank file).

    Modules of the local implementation save None; Transformer Engine's save something, and load without it.
    """
    objects: dict[str, StoredObject] = {}
    order: dict[str, None] = {}
    for name in made:
        module, _, last = name.rpartition(".")
        if last == _FUSED_NORM:
            continue  # its module has it, before the weight
        if f"{module}.{_FUSED_NORM}" in made:
            order[f"{module}.{_FUSED_NORM}"] = None
        order[name] = None
        if is_local and _LINEAR.search(name):
            bias = name.removesuffix("weight") + "bias"
            if bias in made:
                order[bias] = None
            state = name.removesuffix("weight") + "_extra_state"
            objects[state] = StoredObject(state)
            order[state] = None
    if is_local:
        state = "output_layer._extra_state"  # there even where its weight is the embedding's
        objects.setdefault(state, StoredObject(state))
        order[state] = None
    return objects, tuple(order)
