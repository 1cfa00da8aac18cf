"""From rank-local names and shapes to global ones: the rank files of a Megatron checkpoint as one model.

The result is the *global per-layer form*, which ``core.layout_shard`` and ``core.layout_stack`` take. Keys are names
as rank files have them, without ``model.``; layers and experts are numbered over the whole model, shapes are those
of the whole tensors, and there is one fragment for every piece that a rank holds. What several ranks hold gives several
fragments with one box; the engine compares them::

    decoder.layers.3.input_layernorm.weight                          or self_attention.linear_qkv.layer_norm_weight,
                                                                     whichever the model's rank files have
    decoder.layers.3.mlp.router.weight
    decoder.layers.3.mlp.shared_experts.linear_fc1.weight            gated: all gate rows, then all up rows
    decoder.layers.3.mlp.experts.local_experts.17.linear_fc1.weight  always this form, whatever rank files say

attrs of the result (required ones first):

* ``family`` ("megatron") and ``args``: the training arguments; ``core.layout_args.facts_of`` says which ones matter;
* ``iteration``, ``checkpoint_version``, ``topology`` (of the source);
* ``common``: the other top-level entries, by name, ``args`` among them (``core.layout_state``);
* ``vocab_size``: rows of the true vocabulary, None where nothing says;
* ``expert_names``: how rank files name experts, and None without experts: ``sequential``
  (``experts.local_experts.3.linear_fc1.weight``), ``te_grouped`` (``experts.linear_fc1.weight3``) or ``grouped``
  (``experts.weight1``, of older Megatron: read, but written as ``sequential``). Absent: what the arguments say;
* ``is_down_proj_cut``: multi-latent attention's down projections are cut over TP (older local implementation); absent
  means that they are not;
* ``notes``: what the user should know; ``dropped``: ``entry (reason)`` of what is left out;
* ``order``: names of tensors and extra states in the order of the files; absent: as Megatron makes them;
* ``module_versions``, ``is_ordered``, ``top_level``: how the files' dicts look; absent: as Megatron makes them.

Objects: extra states per layer, and random states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from core.box import Shape
from core.catalog import Catalog, Coords, Fragment, StoredArray, StoredObject, TensorMeta
from core.errors import CorruptError, MissingShardError, UnknownTensorError, UnsupportedError
from core.inert import TensorLeaf, as_mapping, walk
from core.layout_args import Facts, facts_of
from core.layout_checks import check_complete, check_gate, check_qkv_rows, listed
from core.layout_cut import parts_of
from core.layout_rules import Rule, Rules
from core.layout_state import (
    OPTIMIZER,
    RNG,
    check_version,
    is_chunk,
    is_ordered,
    iteration_of,
    module_versions,
    refuse_or_drop_optimizer,
    rng_key,
    same,
    texts_of,
)
from core.layout_vocab import cut_vocab, vocab_rows
from core.placement import Piece, global_shape, replicated, split, trimmed


@dataclass(frozen=True, slots=True)
class _Held:
    """What one rank holds of a tensor."""

    tp_rank: int
    rank: str
    array: StoredArray


@dataclass(slots=True)
class _Tensor:
    """A global tensor under construction."""

    rule: Rule
    held: list[_Held] = field(default_factory=list)


@dataclass(slots=True)
class _Model:
    """All chunks of all ranks, merged by name."""

    tensors: dict[str, _Tensor] = field(default_factory=dict)
    extra_states: dict[str, tuple[str, object]] = field(default_factory=dict)
    order: dict[str, None] = field(default_factory=dict)
    versions: dict[str, object] = field(default_factory=dict)


def unshard_ranks(
    catalog: Catalog,
    *,
    rules: Rules,
    vocab_size: int | None,
    optim: str,
    keep_padded_vocab: bool,
    target_tp: int | None,
) -> Catalog:
    """The global form of a rank catalog; see ``core.layout.unshard``."""
    if catalog.attrs.get("is_single_rank"):
        raise UnsupportedError(
            "this is one rank of a checkpoint; the others are needed as well",
            hint="point at the directory that holds the rank directories",
        )
    ranks = _ranks_of(catalog)
    facts = facts_of(catalog.attrs.get("args"))
    notes: list[str] = []
    dropped: list[str] = []
    _handle_optimizer(catalog, ranks, optim=optim, dropped=dropped)
    model = _merged(catalog, ranks, facts, rules)
    check_complete(model.tensors, facts, rules)
    common, objects = _beside(ranks, facts, dropped)
    check_version(common)
    n_rows = _vocab_rows(facts, given=vocab_size, keep_padded=keep_padded_vocab, model=model, notes=notes)
    tp = facts.topology.tp
    shapes: dict[str, Shape] = {}
    for name, tensor in model.tensors.items():
        shape = _checked_shape(name, tensor, facts)
        if tensor.rule.kind == "vocab":
            shape = cut_vocab(shape, name, facts, n_rows=n_rows, target_tp=target_tp, notes=notes)
        shapes[name] = shape
    _check_shapes(model, facts)

    def fragments_of(key: str) -> Sequence[Fragment]:
        tensor = model.tensors.get(key)
        if tensor is None:
            return catalog.fragments(key)
        return tuple(_fragments(key, tensor, shapes[key], tp=tp, is_gated=facts.is_gated))

    objects |= {name: StoredObject(name, value=value) for name, (_, value) in model.extra_states.items()}
    inside = [leaf.key for part in (common, *(item.value for item in objects.values())) for leaf in _leaves(part)]
    root = as_mapping(next(iter(ranks.values()))[1]) or {}
    first_chunk = next((value for key, value in root.items() if is_chunk(key)), None)
    return replace(
        catalog,
        tensors={
            name: TensorMeta(name, tensor.held[0].array.dtype, shapes[name]) for name, tensor in model.tensors.items()
        },
        objects=objects,
        hidden={key: catalog.meta(key) for key in inside},
        fragments_of=fragments_of,
        skeleton=None,
        attrs={
            "family": "megatron",
            "args": catalog.attrs["args"],
            "iteration": iteration_of(common),
            "checkpoint_version": common.get("checkpoint_version"),
            "topology": facts.topology,
            "common": common,
            "vocab_size": n_rows,
            "notes": [*texts_of(catalog, "notes"), *notes],
            "dropped": dropped,
            "order": tuple(model.order),
            "module_versions": model.versions,
            "is_ordered": is_ordered(first_chunk),
            "top_level": tuple(dict.fromkeys("model" if is_chunk(key) else key for key in root)),
        },
    )


def _ranks_of(catalog: Catalog) -> Mapping[Coords, tuple[str, object]]:
    ranks = catalog.attrs.get("ranks")
    assert isinstance(ranks, Mapping), "a rank catalog lists its ranks"
    return ranks


def _leaves(value: object) -> Iterator[TensorLeaf]:
    return (leaf for leaf in walk(value) if isinstance(leaf, TensorLeaf))


def _handle_optimizer(
    catalog: Catalog, ranks: Mapping[Coords, tuple[str, object]], *, optim: str, dropped: list[str]
) -> None:
    kind = catalog.attrs.get("optimizer")
    if kind is None and any((as_mapping(root) or {}).get(OPTIMIZER) is not None for _, root in ranks.values()):
        kind = "in model_optim_rng.pt"
    if kind is not None:
        refuse_or_drop_optimizer(str(kind), optim=optim, dropped=dropped)


def _merged(catalog: Catalog, ranks: Mapping[Coords, tuple[str, object]], facts: Facts, rules: Rules) -> _Model:
    """All chunks under global names, in the order of the whole model."""
    topology = facts.topology
    split = facts.split(topology.pp, topology.vpp)
    model = _Model()
    for vp_rank in range(topology.vpp):
        for pp_rank in range(topology.pp):
            names: tuple[str, list[str]] | None = None
            for tp_rank in range(topology.tp):
                rank, root = ranks[topology.coords(tp_rank, pp_rank)]
                container = _chunk(root, vp_rank, vpp=topology.vpp, rank=rank)
                entries = as_mapping(container)
                if entries is None:
                    raise CorruptError(f"the model is a {type(container).__name__}, not a dict", rank=rank)
                local = [str(name) for name in entries]
                if names is None:
                    names = (rank, local)
                    _check_layers(local, split.counts[vp_rank][pp_rank], rules, rank=rank)
                else:
                    _check_names(local, names[1], rank=rank, other=names[0])
                first = split.offset(vp_rank, pp_rank)
                for name, leaf in entries.items():
                    _add(
                        model,
                        catalog,
                        str(name),
                        leaf,
                        first=first,
                        tp_rank=tp_rank,
                        rank=rank,
                        facts=facts,
                        rules=rules,
                    )
                for module, version in module_versions(container).items():
                    model.versions.setdefault(_global_name(module + ".", first, rules)[:-1], version)
    return model


def _chunk(root: object, vp_rank: int, *, vpp: int, rank: str) -> object:
    """One model chunk of a rank; an absent one of several is an empty stage."""
    entries = as_mapping(root) or {}
    name = "model" if vpp == 1 else f"model{vp_rank}"
    others = [str(key) for key in entries if is_chunk(key)]
    if name in entries:
        if (vpp == 1 and len(others) > 1) or (vpp > 1 and "model" in others):
            raise CorruptError(f"there are the model chunks {', '.join(others)}, but VPP is {vpp}", rank=rank)
        return entries[name]
    if vpp == 1 or not others:
        raise MissingShardError(
            f"there is no entry {name!r}" + (f", only {', '.join(others)}" if others else ""),
            rank=rank,
            hint="is virtual_pipeline_model_parallel_size in the arguments right?" if others else None,
        )
    return {}


def _add(
    model: _Model,
    catalog: Catalog,
    name: str,
    leaf: object,
    *,
    first: int,
    tp_rank: int,
    rank: str,
    facts: Facts,
    rules: Rules,
) -> None:
    """Puts one entry of a rank's state dict where it belongs."""
    whole = _global_name(name, first, rules)
    if not isinstance(leaf, TensorLeaf):
        rule = rules.rule_of(name + "." if as_mapping(leaf) else name)
        if rule.kind != "opaque":
            raise UnsupportedError(f"this entry is a {type(leaf).__name__}, not a tensor", key=name, rank=rank)
        known = model.extra_states.setdefault(whole, (rank, leaf))
        if not same(known[1], leaf) or any(_leaves(leaf)):
            raise UnsupportedError(
                f"the extra state is not the same in {known[0]} and {rank}, or holds tensors",
                key=whole,
                rank=rank,
                hint="states of delayed FP8 scaling are not resharded; save once without FP8",
            )
        model.order.setdefault(whole)
        return
    array = catalog.fragments(leaf.key)[0].array
    assert array is not None
    tensor = model.tensors.get(whole)
    rule = tensor.rule if tensor is not None else _rule_of(name, catalog, leaf.key, rules)
    if rule.tied is not None and facts.is_tied:
        tied = model.tensors.get(rule.tied)
        if tied is None:
            raise MissingShardError(f"{name} is a copy of it, but it is not there", key=rule.tied, rank=rank)
        tied.held.append(_Held(tp_rank, rank, array))
        return
    if tensor is None:
        tensor = model.tensors[whole] = _Tensor(rule)
        model.order.setdefault(whole)
    tensor.held.append(_Held(tp_rank, rank, array))


def _rule_of(name: str, catalog: Catalog, key: str, rules: Rules) -> Rule:
    """The rule of a tensor; an unknown one is reported with its shapes on all ranks."""
    try:
        return rules.rule_of(name)
    except UnknownTensorError:
        path = key.partition(":")[2]
        shapes = [meta.shape for other, meta in catalog.tensors.items() if other.partition(":")[2] == path]
        return rules.rule_of(name, shapes=shapes)


def _global_name(name: str, first: int, rules: Rules) -> str:
    """A rank-local name with its layer renumbered."""
    found = rules.layer_of(name)
    return name if found is None else rules.layer_name(found[0] + first, found[1])


def _check_layers(names: Sequence[str], count: int, rules: Rules, *, rank: str) -> None:
    """A chunk holds exactly the layers that its stage should."""
    layers = {found[0] for name in names if (found := rules.layer_of(name)) is not None}
    missing = sorted(set(range(count)) - layers)
    if missing:
        raise MissingShardError(f"layers {listed(missing)} of this stage's {count} are not there", rank=rank)
    extra = sorted(layers - set(range(count)))
    if extra:
        raise CorruptError(f"layers {listed(extra)} are beyond the {count} that this stage should hold", rank=rank)


def _check_names(names: Sequence[str], others: Sequence[str], *, rank: str, other: str) -> None:
    """Tensor parallel ranks of one stage hold the same names."""
    missing, extra = sorted(set(others) - set(names)), sorted(set(names) - set(others))
    if missing:
        raise MissingShardError(f"{listed(missing)} is in {other}, but not here", rank=rank)
    if extra:
        raise MissingShardError(f"{listed(extra)} is in {rank}, but not here", rank=other)


def _checked_shape(name: str, tensor: _Tensor, facts: Facts) -> Shape:
    """The global shape; every rank's must agree."""
    head = tensor.held[0]
    axis = tensor.rule.cut_axis
    for held in tensor.held:
        if held.array.shape != head.array.shape or held.array.dtype != head.array.dtype:
            raise CorruptError(
                f"{held.array.dtype} of shape {held.array.shape} here, {head.array.dtype} of shape "
                f"{head.array.shape} in {head.rank}",
                key=name,
                rank=held.rank,
            )
    if axis is not None and axis >= len(head.array.shape):
        raise CorruptError(f"the tensor has {len(head.array.shape)} axes, but its rule cuts axis {axis}", key=name)
    return global_shape(head.array.shape, axis, facts.topology.tp)


def _check_shapes(model: _Model, facts: Facts) -> None:
    """Compares the shapes with what the arguments say about gates and heads."""
    for name, tensor in model.tensors.items():
        shape = tensor.held[0].array.shape
        if tensor.rule.parts == "gated" and len(shape) == 2:
            partner = model.tensors.get(name.replace("linear_fc1", "linear_fc2"))
            if partner is not None and len(partner.held[0].array.shape) == 2:
                check_gate(name, shape[0], partner.held[0].array.shape[1], is_gated=facts.is_gated)
        if tensor.rule.unit == "heads" and name.endswith("linear_qkv.weight") and len(shape) == 2:
            check_qkv_rows(name, shape[0] * facts.topology.tp, facts)


def _vocab_rows(facts: Facts, *, given: int | None, keep_padded: bool, model: _Model, notes: list[str]) -> int | None:
    """Rows of the true vocabulary; None where nothing says."""
    stored = [
        tensor.held[0].array.shape[0] * facts.topology.tp
        for tensor in model.tensors.values()
        if tensor.rule.kind == "vocab" and tensor.held[0].array.shape
    ]
    return vocab_rows(facts, given=given, keep_padded=keep_padded, stored=stored, notes=notes)


def _fragments(key: str, tensor: _Tensor, shape: Shape, *, tp: int, is_gated: bool) -> Iterator[Fragment]:
    """One fragment for every piece that a rank holds."""
    axis = tensor.rule.cut_axis
    for held in tensor.held:
        if axis is None:
            pieces: list[Piece] = replicated(shape)
        else:
            padded = global_shape(held.array.shape, axis, tp)
            parts = parts_of(tensor.rule, padded[axis], is_gated=is_gated, key=key)
            pieces = split(padded, axis, parts=parts, rank=held.tp_rank, n=tp)
        for piece in pieces:
            kept = piece if axis is None else trimmed(piece, axis, shape[axis])
            if kept is not None:
                yield Fragment(key, kept.box, held.array, kept.at)


def _beside(
    ranks: Mapping[Coords, tuple[str, object]], facts: Facts, dropped: list[str]
) -> tuple[dict[object, object], dict[str, StoredObject]]:
    """(entries that all ranks share, random states) of the rank files."""
    topology = facts.topology
    head_dir, head_root = ranks[topology.coords(0, 0)]
    head = as_mapping(head_root) or {}
    roots = [(rank, as_mapping(root) or {}) for rank, root in ranks.values()]
    names = dict.fromkeys(name for _, root in roots for name in root)
    common: dict[object, object] = {}
    for name in names:
        if is_chunk(name) or name in (OPTIMIZER, RNG):
            continue
        if name == "args":
            common[name] = head.get(name)
            continue
        differing = next(
            (rank for rank, root in roots if name not in root or not same(root[name], head.get(name))), None
        )
        if name not in head or differing is not None or (len(roots) > 1 and any(_leaves(head[name]))):
            if name in ("iteration", "checkpoint_version"):
                raise CorruptError(f"{name} differs from that in {head_dir}", rank=differing)
            why = "holds tensors, one set a rank" if differing is None else "not the same on all ranks"
            dropped.append(f"{name} ({why})")
            continue
        common[name] = head[name]
    objects: dict[str, StoredObject] = {}
    for tp_rank, pp_rank in topology.ranks():
        coords = topology.coords(tp_rank, pp_rank)
        root = as_mapping(ranks[coords][1]) or {}
        if RNG in root:
            key = rng_key(tp_rank, pp_rank, tp=topology.tp, pp=topology.pp)
            objects[key] = StoredObject(key, value=[root[RNG]], coords=coords)
    return common, objects
