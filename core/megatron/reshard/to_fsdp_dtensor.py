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
which megatron-core's distributed optimizer does not start), those of fp32 runs (which
Megatron-FSDP saves, but ``load_state_dict`` of its adapter counts on the wrapper of bf16 runs), and
numbers of steps as tensors.

Not carried: random states, extra states, and entries of the optimizer such as ``grad_scaler``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from core.arrays.box import Shape
from core.engine.catalog.catalog import Catalog, StoredObject, TargetCatalog
from core.engine.catalog.dropped import Dropped, dropped_each, dropped_unlisted
from core.engine.catalog.facets import FsdpDtensorFacts, MegatronModel
from core.engine.catalog.optimizer_keys import MASTER, param_of, split_state_key, state_key, trained
from core.engine.catalog.stored import PlannedArray
from core.engine.catalog.tensor import Tensor, whole_tensor
from core.errors import UnsupportedError
from core.megatron.extras.common_state import CONTENT, EXTRA_STATE, OF_RANKS, OPTIMIZER, RERUN, RNG
from core.megatron.extras.random_states import WITHOUT
from core.megatron.model.args import fields_of, parse_facts, replaced
from core.megatron.model.checks import with_gate
from core.megatron.model.cut import Cut, check_parallel_sizes, cuts_of
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
    facts = parse_facts(catalog.args, names=rules.model_of(catalog.tensors))
    facts = with_gate(facts, {key: tensor.shape for key, tensor in catalog.tensors.items()})
    check_parallel_sizes(topology, facts)
    _check_model(catalog, facts)
    cuts = cuts_of(catalog, topology, facts, rules, n_rows=rows_of(catalog, vocab_size))

    # Name the tensors and the settings of the optimizer, and then the entries beside them.
    names = _FsdpNames(catalog, facts, rules)
    tensors = _fsdp_tensors(catalog, cuts, names)
    padded = next(
        (
            cut.shape[0]
            for key, cut in cuts.items()
            if rules.is_vocabulary(param_of(key), cut.shape)
        ),
        None,
    )
    args = update_args(
        catalog.args,
        topology=topology,
        pipeline=Pipeline(),
        counts=[facts.stages(1, 1).count(facts.kind.stacks[0], 0, 0)],
        padded_vocab_size=padded,
    )
    changes = {"ckpt_format": FORMAT, "use_dist_ckpt": True, "use_distributed_optimizer": True}
    args = replaced(args, changes, added={"use_megatron_fsdp": True})
    values: dict[tuple[str, ...], object] = {("args",): args}
    omitted = ("args", OPTIMIZER, RERUN, CONTENT)
    common = {n: value for n, value in (catalog.common or {}).items() if n not in omitted}
    values |= _paths_of(common, ())
    if catalog.optimizer is not None:
        values |= _group_settings(catalog, topology, facts, rules, cuts=cuts, names=names)

    # Nest everything as the state dict that Megatron saves.
    skeleton: dict[object, object] = {}
    leaves: dict[tuple[str, ...], object] = {
        path: ObjectLeaf(".".join(path)) for path in values
    } | {path: TensorLeaf(".".join(path)) for path in tensors}
    for path, leaf in leaves.items():
        node = skeleton
        for part in path[:-1]:
            node = node.setdefault(part, {})  # type: ignore[assignment]  # containers are dicts
        node[path[-1]] = leaf
    hidden = [leaf.key for leaf in walk(list(values.values())) if isinstance(leaf, TensorLeaf)]
    objects = {
        ".".join(path): StoredObject(".".join(path), value=value) for path, value in values.items()
    }
    return replace(
        catalog,
        tensors={".".join(path): tensor for path, (tensor, _) in tensors.items()},
        objects=objects,
        hidden={key: catalog.tensor(key) for key in hidden},
        skeleton=skeleton,
        args=args,
        common=None,
        optimizer=None,
        dropped=(*catalog.dropped, *_dropped(catalog)),
        facets={
            Topology: topology,
            FsdpDtensorFacts: FsdpDtensorFacts(
                {".".join(path): shape for path, (_, shape) in tensors.items()}
            ),
        },
    )


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


def _dropped(catalog: Catalog) -> list[Dropped]:
    """Return the entries that an fsdp_dtensor checkpoint does not have, with the reasons."""
    model = catalog.facet(MegatronModel) or MegatronModel()
    dropped: list[Dropped] = []
    if model.rng_states or any(key.partition("/")[0] == RNG for key in catalog.objects):
        dropped.append(Dropped((RNG,), WITHOUT))
    if RERUN in (catalog.common or {}):
        dropped.append(Dropped((RERUN,), OF_RANKS))
    filled = [key for key, item in catalog.objects.items() if item.value is not None]
    filled += [key for key, tensor in catalog.tensors.items() if tensor.n_elements]
    states = [key for key in filled if key.endswith(EXTRA_STATE)]
    dropped += dropped_each(states, "Megatron-FSDP does not store extra states", catalog.tensors)
    copies = {
        key: tensor
        for key, tensor in catalog.tensors.items()
        if state_key(MASTER, key) in catalog.tensors
    }
    dropped += dropped_unlisted(copies, "rounded copies of the master weights, which are written")
    if catalog.optimizer is not None:
        names = (f"optimizer.{name}" for name in catalog.optimizer.entries)
        dropped += dropped_each(names, f"{FORMAT} cannot store it")
    return dropped


def _fsdp_tensors(
    catalog: Catalog, cuts: Mapping[str, Cut], names: _FsdpNames
) -> dict[tuple[str, ...], tuple[Tensor, Shape]]:
    """Return the tensors of the destination, and their shapes there, which may have padding.

    Returns:
        By path: the keys of the containers around a tensor, and its own.

    Raises:
        UnsupportedError: the parts of a parameter are not kept together at this TP size.
    """
    stored: dict[tuple[str, ...], tuple[Tensor, Shape]] = {}
    for key, cut in cuts.items():
        state, name = split_state_key(key), param_of(key)
        if name.endswith(EXTRA_STATE) or (state is not None and state[0] == MASTER):
            continue
        halves = names.halves(name)
        if cut.n > 1 and len(cut.parts) > 1 and len(halves) == 1:
            raise UnsupportedError(
                f"writing this parameter as {FORMAT} is not supported with TP {cut.n}, because "
                f"each rank has a piece of every part, but {FORMAT} stores the parts one after "
                "another",
                key=key,
                hint="use --tp-new 1",
            )
        master = state_key(MASTER, name)
        tensor = catalog.tensors[master if state is None and master in catalog.tensors else key]
        for number, half in enumerate(halves):
            if state is None:
                path: tuple[str, ...] = ("model", names.in_model(name) + half)
            else:
                path = (OPTIMIZER, "state", names.in_optimizer(name) + half, state[0])
            if len(halves) > 1:
                n_rows = cut.shape[0] // 2
                rows = tensor.narrow(0, number * n_rows, n_rows)
                stored[path] = (rows, (n_rows, *cut.shape[1:]))
            else:
                stored[path] = (tensor, cut.shape)
    return stored


def with_padding(target: TargetCatalog) -> TargetCatalog:
    """Return the target with the padding rows of the vocabulary, which are zero.

    Args:
        target: made from the result of ``to_fsdp_dtensor``.
    """
    facts = target.facet(FsdpDtensorFacts)
    assert facts is not None, "the target is an fsdp_dtensor checkpoint"
    tensors = dict(target.tensors)
    for key, tensor in target.tensors.items():
        shape = facts.shapes[key]
        if shape != tensor.shape:
            padded = whole_tensor(PlannedArray(key, tensor.dtype, shape))
            tensors[key] = replace(tensor, shape=shape, tiling=padded.tiling, flexible=True)
    return replace(target, tensors=tensors)


class _FsdpNames:
    """A finder of the parameters' names in Megatron-FSDP's state dicts."""

    def __init__(self, catalog: Catalog, facts: ModelFacts, rules: Rules) -> None:
        model = catalog.facet(MegatronModel) or MegatronModel()
        fields = fields_of(catalog.args)
        self._rules = rules
        self._expert_names = model.expert_names or facts.expert_names or "sequential"
        # Only --swiglu divides gated layers; a configuration without that argument means it, too.
        self._splits = facts.is_gated and fields.get("swiglu", True) is not False

    def halves(self, name: str) -> tuple[str, ...]:
        """Return the suffixes of the halves in which a parameter is stored; ("",) for a whole."""
        is_split = self._splits and self._rules.rule_of(name).parts == "gated"
        return ("_w", "_v") if is_split else ("",)

    def in_model(self, name: str) -> str:
        """Return the name of a parameter below ``model``."""
        expert = self._rules.expert_of(name)
        if expert is not None and expert.number is not None:
            name = self._rules.expert_name(expert, names=self._expert_names, number=expert.number)
        return f"module.{name}"

    def in_optimizer(self, name: str) -> str:
        """Return the name of a parameter below ``optimizer.state``."""
        return f"module.module.{self.in_model(name)}"


def _check_model(catalog: Catalog, facts: ModelFacts) -> None:
    """Raise unless it is known how Megatron-FSDP stores a model and its optimizer.

    Raises:
        UnsupportedError: it is not.
    """
    model = catalog.facet(MegatronModel) or MegatronModel()
    refused = {
        f"a {facts.kind.kind} model": facts.kind is not GPT,
        "a hybrid model": facts.pattern is not None,
        "a model with different kinds of layers": facts.blocks is not None
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
                hint="use --to torch_dist or --to megatron",
            )
    if (model.expert_names or facts.expert_names) == "grouped":
        raise UnsupportedError(
            f"Megatron-FSDP's {FORMAT} does not support GroupedMLP experts",
            hint=f"add {EXPERTS} sequential",
        )

    # The optimizer: Megatron's loader asks for the moments of Adam.
    optimizer = catalog.optimizer
    if optimizer is None:
        return
    states = {state[0] for key in catalog.tensors if (state := split_state_key(key)) is not None}
    if strange := sorted(states - {MASTER, *_ADAM}):
        raise UnsupportedError(
            f"the optimizer state {strange[0]!r} cannot be written as {FORMAT}, because "
            "Megatron-FSDP supports only Adam",
            hint=_DROP_OPTIMIZER,
        )
    fields = fields_of(catalog.args)
    if not (fields.get("bf16") or fields.get("fp16")):
        raise UnsupportedError(
            f"an fp32 run cannot continue from {FORMAT}, because without --bf16 or --fp16, "
            "Megatron-FSDP can save such checkpoints but cannot load them",
            hint=f"{_DROP_OPTIMIZER}, and start with --bf16",
        )
    if isinstance(optimizer.step, TensorLeaf):
        raise UnsupportedError(
            "the optimizer's step count is a tensor, as in torch's Adam; writing it as "
            f"{FORMAT} is not supported",
            hint=_DROP_OPTIMIZER,
        )
