"""Write the global per-layer form as Megatron-FSDP's ``--ckpt-format fsdp_dtensor``.

A PyTorch DCP in a training root. ``core.megatron.placement.fsdp_dtensor`` shows the names, and
reads them::

    model.module.decoder.layers.0.mlp.linear_fc1.weight_w       gate rows: the fp32 master weights
    model.module.decoder.layers.0.self_attention.linear_qkv.weight
    optimizer.state.module.module.module.decoder.layers.0.mlp.linear_fc1.weight_w.exp_avg
    optimizer.param_to_group_meta.module.module.module.decoder.….linear_fc1.weight.lr   an object
    opt_param_scheduler.max_lr, args, iteration …                                       objects

The weights of trained parameters are written as their masters, which Megatron-FSDP loads; without
an optimizer they keep their dtype, and the loader casts them. Experts are numbered over the whole
model. The TP size decides only the padding rows of the vocabulary. The EP size is recorded in the
arguments alone: Megatron-FSDP never gives experts param groups of their own.

Versions: as for reading; GPT models of the local implementation and of Transformer Engine, with
    SequentialMLP and TEGroupedMLP, and the distributed optimizer with Adam.
Source: as for reading; megatron-core 0.16.1 loads the results on gloo and trains on with equal
    losses (scripts/framework-tests). Transformer Engine's modules, TEGroupedMLP among them, were
    not run: they need a GPU.

Not supported, refused by name: models other than GPT, hybrid and heterogeneous models, multi-token
prediction, multi-latent attention, towers, adapters, GroupedMLP, optimizers other than Adam (with
which megatron-core's distributed optimizer does not start), those of fp32 runs with gated layers
(``handle_swiglu_in_state_dict`` fails without the wrapper of bf16 runs), and numbers of steps as
tensors.

Not carried: random states, extra states, and entries of the optimizer such as ``grad_scaler``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from core.arrays.box import Box, full_box
from core.catalog.catalog import (
    Catalog,
    Fragment,
    StoredObject,
    TargetCatalog,
    TargetFragment,
    TensorMeta,
    clip_fragment,
)
from core.catalog.facets import FsdpDtensorFacts, MegatronModel
from core.catalog.optimizer_keys import MASTER, param_of, state_key, state_of, trained
from core.catalog.stored import PlannedArray
from core.errors import UnsupportedError
from core.megatron.extras.common_state import CONTENT, EXTRA_STATE, OPTIMIZER, RERUN, RNG
from core.megatron.extras.random_states import WITHOUT
from core.megatron.model.args import facts_of, fields_of, replaced
from core.megatron.model.checks import with_gate
from core.megatron.model.cut import Cut, check_target, cuts_of
from core.megatron.model.facts import ModelFacts
from core.megatron.model.new_args import update_args
from core.megatron.model.pipeline import Pipeline
from core.megatron.model.topology import Topology
from core.megatron.model.vocabulary import rows_of
from core.megatron.optimizer.groups import EXPERT
from core.megatron.optimizer.reshard_target import ReshardTarget
from core.megatron.optimizer.target_groups import target_groups
from core.megatron.rules.experts import OPTION as EXPERTS
from core.megatron.rules.rules import GPT, Rules
from core.pickle.inert import ObjectLeaf, TensorLeaf, walk

FORMAT = "fsdp_dtensor"
_ADAM = ("exp_avg", "exp_avg_sq")
_DROP_OPTIMIZER = "drop the optimizer with --no-optim"
_UNSPLIT = "use --tp-new 1"


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor of the destination: a whole one of the global form, or the half of one.

    Args:
        path: keys of the containers around it, and its own; joined by dots they are its key.
        key: global key of the tensor from which it is taken.
        start: its first row there.
        n_rows: its number of rows in the source; None for all.
        shape: its shape in the destination.
    """

    path: tuple[str, ...]
    key: str
    start: int
    n_rows: int | None
    shape: tuple[int, ...]


def to_fsdp_dtensor(
    catalog: Catalog, topology: Topology, *, rules: Rules, vocab_size: int | None = None
) -> Catalog:
    """Return the source of an ``fsdp_dtensor`` checkpoint: its keys, objects and containers.

    The vocabulary has the source's rows; ``FsdpDtensorFacts`` names those of the destination, to
    which ``with_padding`` brings the target.

    Args:
        catalog: the global per-layer form, its objects loaded.
        topology: sizes of the run that is to load the checkpoint.
        rules: the layout's rules.
        vocab_size: rows of the vocabulary without padding; None takes the number that ``unshard``
            found.

    Raises:
        UnsupportedError: Megatron-FSDP has no such model or optimizer, or a size does not divide.
        CorruptError: shapes and arguments contradict each other.
    """
    # Megatron-FSDP has no pipeline stages: layers are numbered over the whole model.
    topology = replace(topology, pp=1, vpp=1, pipeline=None)
    facts = facts_of(catalog.args, names=rules.model_of(catalog.tensors))
    facts = with_gate(facts, {key: meta.shape for key, meta in catalog.tensors.items()})
    check_target(topology, facts)
    _check_model(catalog, facts)
    cuts = cuts_of(catalog, topology, facts, rules, n_rows=rows_of(catalog, vocab_size))

    # Name the tensors and the settings of the optimizer, and then the entries beside them.
    names = _FsdpNames(catalog, facts, rules)
    tensors = _stored_tensors(catalog, cuts, names)
    padded = next(
        (cut.shape[0] for key, cut in cuts.items() if rules.rule_of(param_of(key)).kind == "vocab"),
        None,
    )
    values: dict[tuple[str, ...], object] = {
        ("args",): _arguments(catalog, topology, facts, padded=padded)
    }
    omitted = ("args", OPTIMIZER, RERUN, CONTENT)
    common = {n: value for n, value in (catalog.common or {}).items() if n not in omitted}
    values |= _paths_of(common, ())
    if catalog.optimizer is not None:
        values |= _group_settings(catalog, topology, facts, rules, cuts=cuts, names=names)

    # Nest everything as the state dict that Megatron saves.
    skeleton: dict[object, object] = {}
    leaves: dict[tuple[str, ...], object] = {
        path: ObjectLeaf(".".join(path)) for path in values
    } | {stored.path: TensorLeaf(".".join(stored.path)) for stored in tensors}
    for path, leaf in leaves.items():
        node = skeleton
        for part in path[:-1]:
            node = node.setdefault(part, {})  # type: ignore[assignment]  # containers are dicts
        node[path[-1]] = leaf
    hidden = [leaf.key for leaf in walk(list(values.values())) if isinstance(leaf, TensorLeaf)]
    objects = {
        ".".join(path): StoredObject(".".join(path), value=value) for path, value in values.items()
    }
    result = _with_tensors(catalog, tensors)
    return replace(
        result,
        objects=objects,
        hidden={key: catalog.meta(key) for key in hidden},
        skeleton=skeleton,
        args=objects["args"].value,
        common=None,
        optimizer=None,
        dropped=(*catalog.dropped, *_dropped(catalog)),
        facets={
            Topology: topology,
            FsdpDtensorFacts: FsdpDtensorFacts(
                {".".join(stored.path): stored.shape for stored in tensors}
            ),
        },
    )


def with_padding(target: TargetCatalog) -> TargetCatalog:
    """Return the target with the padding rows of the vocabulary, which are zero.

    Args:
        target: made from the result of ``to_fsdp_dtensor``.
    """
    facts = target.facet(FsdpDtensorFacts)
    assert facts is not None, "the target is an fsdp_dtensor checkpoint"
    padded = {
        key: replace(meta, shape=facts.shapes[key])
        for key, meta in target.tensors.items()
        if facts.shapes[key] != meta.shape
    }
    zeros: dict[str, Sequence[Box]] = {}
    for key, meta in padded.items():
        rows, rest = target.tensors[key].shape[0], meta.shape[1:]
        offset = (rows, *(0 for _ in rest))
        zeros[key] = [Box(offset, (meta.shape[0] - rows, *rest))]

    def fragments_of(key: str) -> Sequence[TargetFragment]:
        meta = padded.get(key)
        if meta is None:
            return target.fragments(key)
        array = PlannedArray(key, meta.dtype, meta.shape)
        return (Fragment(key, full_box(meta.shape), array, (0,) * len(meta.shape)),)

    return replace(
        target, tensors={**target.tensors, **padded}, fragments_of=fragments_of, zeros=zeros
    )


def _check_model(catalog: Catalog, facts: ModelFacts) -> None:
    """Raise unless it is known how Megatron-FSDP stores a model and its optimizer.

    Raises:
        UnsupportedError: it is not.
    """
    model = catalog.facet(MegatronModel) or MegatronModel()
    refused = {
        f"a {facts.kind.kind} model": facts.kind is not GPT,
        "a hybrid model": facts.pattern is not None,
        "a model whose layers differ in kind": facts.blocks is not None
        or bool(facts.linear_layers),
        "a model with multi-token prediction": facts.n_predictions > 0,
        "a model with multi-latent attention": facts.is_mla,
        "a model with towers": model.wrapper is not None,
        "an adapter": any(".adapter." in key for key in catalog.tensors),
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise UnsupportedError(
                f"writing {name} as {FORMAT} is not supported",
                hint="write --to torch_dist or --to megatron",
            )
    if (model.expert_names or facts.expert_names) == "grouped":
        raise UnsupportedError(
            f"Megatron-FSDP's {FORMAT} has no form for GroupedMLP experts",
            hint=f"add {EXPERTS} sequential",
        )

    # The optimizer: Megatron's loader asks for the moments of Adam.
    optimizer = catalog.optimizer
    if optimizer is None:
        return
    states = {state[0] for key in catalog.tensors if (state := state_of(key)) is not None}
    if strange := sorted(states - {MASTER, *_ADAM}):
        raise UnsupportedError(
            f"the optimizer's state {strange[0]!r} cannot be written as {FORMAT}: Megatron-FSDP "
            "trains with Adam only",
            hint=_DROP_OPTIMIZER,
        )
    fields = fields_of(catalog.args)
    is_half_precision = bool(fields.get("bf16") or fields.get("fp16"))
    if facts.is_gated and fields.get("swiglu", True) is not False and not is_half_precision:
        raise UnsupportedError(
            f"an fp32 run with --swiglu cannot go on from {FORMAT}: without --bf16 or --fp16 "
            "Megatron-FSDP does not find the gated layers that it divides",
            hint=f"{_DROP_OPTIMIZER}, and start with --bf16",
        )
    if isinstance(optimizer.step, TensorLeaf):
        raise UnsupportedError(
            "the number of steps is a tensor, as torch's Adam counts them; writing it as "
            f"{FORMAT} is not supported",
            hint=_DROP_OPTIMIZER,
        )


class _FsdpNames:
    """A finder of the parameters' names in Megatron-FSDP's state dicts."""

    def __init__(self, catalog: Catalog, facts: ModelFacts, rules: Rules) -> None:
        model = catalog.facet(MegatronModel) or MegatronModel()
        fields = fields_of(catalog.args)
        self._rules = rules
        self._expert_names = model.expert_names or facts.expert_names or "sequential"
        # Only --swiglu divides gated layers; a configuration without that argument means it, too.
        self._splits = facts.is_gated and fields.get("swiglu", True) is not False
        # One module around the model: the wrapper of bf16 and fp16 runs.
        is_wrapped = bool(fields.get("bf16") or fields.get("fp16"))
        self._prefix = "module.module.module." if is_wrapped else "module.module."

    def halves(self, name: str) -> tuple[str, ...]:
        """Return the suffixes of the halves in which a parameter is stored; ("",) for a whole."""
        is_split = self._splits and self._rules.rule_of(name).parts == "gated"
        return ("_w", "_v") if is_split else ("",)

    def in_model(self, name: str) -> str:
        """Return the name of a parameter below ``model``."""
        return f"module.{self._of_module(name)}"

    def in_optimizer(self, name: str) -> str:
        """Return the name of a parameter below ``optimizer.state``."""
        return f"{self._prefix}{self._of_module(name)}"

    def _of_module(self, name: str) -> str:
        """Return the name of a parameter in the bare model."""
        expert = self._rules.expert_of(name)
        if expert is None or expert.number is None:
            return name
        return self._rules.expert_name(expert, names=self._expert_names, number=expert.number)


def _stored_tensors(
    catalog: Catalog, cuts: Mapping[str, Cut], names: _FsdpNames
) -> list[_StoredTensor]:
    """Return the tensors of the destination.

    Raises:
        UnsupportedError: the parts of a parameter are not kept together at this TP size.
    """
    stored = []
    for key, cut in cuts.items():
        state, name = state_of(key), param_of(key)
        if name.endswith(EXTRA_STATE) or (state is not None and state[0] == MASTER):
            continue
        halves = names.halves(name)
        if cut.n > 1 and len(cut.parts) > 1 and len(halves) == 1:
            raise UnsupportedError(
                f"each of {cut.n} TP ranks has a piece of every part of this parameter, which "
                f"{FORMAT} stores one after the other; writing it so is not supported",
                key=key,
                hint=_UNSPLIT,
            )
        master = state_key(MASTER, name)
        source = master if state is None and master in catalog.tensors else key
        is_half = len(halves) > 1
        n_rows = cut.shape[0] // 2 if is_half else 0
        for number, half in enumerate(halves):
            if state is None:
                path: tuple[str, ...] = ("model", names.in_model(name) + half)
            else:
                path = (OPTIMIZER, "state", names.in_optimizer(name) + half, state[0])
            stored.append(
                _StoredTensor(
                    path,
                    source,
                    start=number * n_rows,
                    n_rows=n_rows if is_half else None,
                    shape=(n_rows, *cut.shape[1:]) if is_half else cut.shape,
                )
            )
    return stored


def _with_tensors(catalog: Catalog, tensors: Sequence[_StoredTensor]) -> Catalog:
    """Return a catalog with the tensors of the destination, of the source's extent."""
    by_key = {".".join(stored.path): stored for stored in tensors}
    metas: dict[str, TensorMeta] = {}
    for key, stored in by_key.items():
        meta = catalog.tensors[stored.key]
        shape = meta.shape if stored.n_rows is None else stored.shape
        metas[key] = replace(meta, key=key, shape=shape)

    def fragments_of(key: str) -> Sequence[Fragment]:
        stored = by_key.get(key)
        if stored is None:
            return catalog.fragments(key)
        pieces = [replace(piece, key=key) for piece in catalog.fragments(stored.key)]
        if stored.n_rows is None:
            return pieces

        # Of every piece, the rows that lie in the half.
        halves = (
            clip_fragment(piece, key, start=stored.start, extent=stored.n_rows) for piece in pieces
        )
        return [half for half in halves if half is not None]

    return replace(catalog, tensors=metas, fragments_of=fragments_of)


def _group_settings(
    catalog: Catalog,
    topology: Topology,
    facts: ModelFacts,
    rules: Rules,
    *,
    cuts: Mapping[str, Cut],
    names: _FsdpNames,
) -> dict[tuple[str, ...], object]:
    """Return every setting of every trained parameter, by its path in the state dict.

    Raises:
        CorruptError, UnsupportedError: as for ``target_groups``.
    """
    optimizer = catalog.optimizer
    assert optimizer is not None, "the checkpoint has an optimizer"
    # Megatron-FSDP's own parameters do not tell whether they are parallel over experts, so it has
    # them in the groups of the dense ones and is_expert_parallel is False, whatever EP is.
    target = ReshardTarget(
        catalog=catalog,
        optimizer=optimizer,
        topology=replace(topology, ep=1, etp=topology.tp),
        facts=facts,
        rules=rules,
        cuts=cuts,
    )
    groups = target_groups(target, trained(catalog.tensors))
    step = {} if optimizer.step is None else {"step": optimizer.step}
    has_experts = any(EXPERT in settings for settings in groups.settings)
    unsplit = {EXPERT: False} if has_experts else {}
    return {
        (OPTIMIZER, "param_to_group_meta", names.in_optimizer(name), setting): value
        for name, number in groups.group_of.items()
        for setting, value in {**step, **groups.settings[number], **unsplit}.items()
    }


def _arguments(
    catalog: Catalog, topology: Topology, facts: ModelFacts, *, padded: int | None
) -> object:
    """Return the training arguments of a run with Megatron-FSDP at the destination's sizes."""
    stack = facts.kind.stacks[0]
    args = update_args(
        catalog.args,
        topology=topology,
        pipeline=Pipeline(),
        counts=[facts.stages(1, 1).count(stack, 0, 0)],
        padded_vocab_size=padded,
    )
    changes = {"ckpt_format": FORMAT, "use_dist_ckpt": True, "use_distributed_optimizer": True}
    return replaced(args, changes, added={"use_megatron_fsdp": True})


def _paths_of(
    entries: Mapping[object, object], path: tuple[str, ...]
) -> dict[tuple[str, ...], object]:
    """Return the values in nested dicts by path, as PyTorch flattens a state dict."""
    values: dict[tuple[str, ...], object] = {}
    for name, value in entries.items():
        inner = (*path, str(name))
        if isinstance(value, dict) and value:
            values |= _paths_of(value, inner)
        else:
            values[inner] = value
    return values


def _dropped(catalog: Catalog) -> list[str]:
    """Return the entries that an fsdp_dtensor checkpoint does not have, with the reasons."""
    model = catalog.facet(MegatronModel) or MegatronModel()
    dropped = []
    if model.rng_states or any(key.partition("/")[0] == RNG for key in catalog.objects):
        dropped.append(f"{RNG} ({WITHOUT})")
    if RERUN in (catalog.common or {}):
        dropped.append(f"{RERUN} (belongs to the ranks that saved it; Megatron starts without it)")
    dropped += [
        f"{key} (Megatron-FSDP stores no extra states)"
        for key, item in catalog.objects.items()
        if key.endswith(EXTRA_STATE) and item.value is not None
    ]
    dropped += [
        f"{key} (Megatron-FSDP stores no extra states)"
        for key, meta in catalog.tensors.items()
        if key.endswith(EXTRA_STATE) and meta.n_elements
    ]
    if catalog.optimizer is not None:
        dropped += [
            f"optimizer.{name} ({FORMAT} has no place for it)" for name in catalog.optimizer.entries
        ]
    return dropped
