"""What must be true of a model before its layout is changed: it is complete, and its shapes fit its
arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from core.arrays.box import Shape
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    UnsupportedError,
    raising,
)
from core.megatron.model.facts import PREDICTION_STACK, ModelFacts
from core.megatron.model.hybrid import SYMBOLS
from core.megatron.model.topology import Topology
from core.megatron.rules.rules import Layer, Rule, Rules

_FC1, _FC2 = "linear_fc1.weight", "linear_fc2.weight"
_SHOWN = 6
ADAPTER = ".adapter."
"""Part of the names of parameters that adapt others."""


def check_complete(
    names: Iterable[str], facts: ModelFacts, rules: Rules, *, report: Report = raising
) -> None:
    """Raise unless a model is complete.

    It must have its embeddings, all its layers, all their experts, and the same parameters in
    layers of one kind.

    Args:
        report: takes the problems (rules ``layout.tensor``, ``.layers``, ``.experts``); raises
            them, if none is given.

    Raises:
        MissingShardError: something is missing; the error names it.
        CorruptError: the checkpoint has more layers or experts than the arguments say.
    """
    present = set(names)
    if all(ADAPTER in name for name in present):
        return  # adapters alone, without the model that they adapt
    for name in (facts.kind.embedding, *(() if facts.is_tied else (facts.kind.output,))):
        if name not in present:
            report(
                MissingShardError(
                    "the tensor is not in the checkpoint", key=name, rule="layout.tensor"
                )
            )
    subs: dict[str, dict[int, set[str]]] = {stack: {} for stack in rules.stacks}
    for name in present:
        layer = rules.layer_of(name)
        if layer is not None and not _is_optional(name, rules):
            subs[layer.stack].setdefault(layer.number, set()).add(layer.sub)
    for stack, subs_of in subs.items():
        _check_stack(stack, subs_of, facts, rules, report)


def check_predictions(facts: ModelFacts, topology: Topology) -> None:
    """Raise for rank files with multi-token prediction that Megatron cannot keep properly.

    Raises:
        UnsupportedError: multi-token prediction, shared embeddings and several pipeline stages: the
            last stage has an output layer of its own, which is neither used nor trained, and
            megatron-core 0.16.1 fails to save it as torch_dist.
    """
    if facts.n_predictions and facts.is_tied and topology.pp > 1:
        raise UnsupportedError(
            f"multi-token prediction with shared embeddings in {topology.pp} pipeline stages cannot be resharded: "
            "Megatron then keeps an output layer that it neither uses nor trains",
            hint="one pipeline stage works, and torch_dist with any number",
        )


def _check_stack(
    stack: str, subs_of: Mapping[int, set[str]], facts: ModelFacts, rules: Rules, report: Report
) -> None:
    """Report missing and surplus layers of a stack, and parameters that some layers lack.

    Args:
        subs_of: layer → what is in it, but for what is optional.
    """
    # Every layer of the stack must be there, and none beyond.
    n_layers = facts.stacks.get(stack, 0)
    missing = sorted(set(range(n_layers)) - set(subs_of))
    if missing:
        problem = f"layers {listed(missing)} of {n_layers} are not in the checkpoint"
        report(MissingShardError(problem, key=stack.rstrip("."), rule="layout.layers"))
    extra = sorted(set(subs_of) - set(range(n_layers)))
    if extra:
        problem = f"there are layers {listed(extra)}, but the model has {n_layers}"
        report(CorruptError(problem, key=stack.rstrip("."), rule="layout.layers"))

    # Layers of one kind must have the same parameters, and all of their experts.
    subs_of_kind: dict[object, set[str]] = {}
    kinds: dict[int, object] = {}
    for layer, subs in sorted(subs_of.items()):
        if layer >= n_layers:
            continue
        try:
            kinds[layer] = _kind(stack, layer, subs, facts)
        except CheckpointingException as err:
            report(err.breaking("layout.layers"))
    for layer, kind in kinds.items():
        subs_of_kind.setdefault(kind, set()).update(subs_of[layer])
    for layer, kind in kinds.items():
        subs = subs_of[layer]
        _check_experts(stack, layer, subs, facts, rules, report=report)
        numbers = _experts_in(subs, rules)
        for absent in sorted(subs_of_kind[kind] - subs):
            expert = rules.expert_of(absent)
            if expert is None or expert.number in numbers:
                problem = "other layers have this tensor"
                report(
                    MissingShardError(
                        problem, key=str(Layer(stack, layer, absent)), rule="layout.tensor"
                    )
                )


def _kind(stack: str, layer: int, subs: Iterable[str], facts: ModelFacts) -> object:
    """Return the kind of a layer, by the arguments, else by its parameters.

    Raises:
        CorruptError: the pattern of a hybrid model says another kind.
    """
    kind = facts.kind_of(stack, layer)
    if kind is None:
        return next(
            (start for start in SYMBOLS.values() if any(sub.startswith(start) for sub in subs)),
            None,
        )
    if stack != PREDICTION_STACK and facts.pattern is not None and isinstance(kind, str):
        if not any(sub.startswith(SYMBOLS[kind]) for sub in subs):
            raise CorruptError(
                f"the pattern {facts.pattern.layers} says that layer {layer} is of the kind {kind}, but it has no "
                f"{SYMBOLS[kind]}*",
                key=str(Layer(stack, layer, min(subs))),
            )
    return kind


def _is_optional(name: str, rules: Rules) -> bool:
    """Return whether some layers may have a tensor and others not.

    Those are extra states, tensors of quantization, and tensors without a rule of their own.
    """
    rule = rules.rule_of(name)
    return rule.kind == "opaque" or rule.single is not None or rules.is_unknown(name)


def _check_experts(
    stack: str, layer: int, subs: Iterable[str], facts: ModelFacts, rules: Rules, *, report: Report
) -> None:
    """Report experts that a layer lacks, and experts beyond those of the arguments."""
    numbers = _experts_in(subs, rules)
    wanted = set(range(facts.n_experts or 0)) if facts.has_experts(stack, layer) else set()
    name = str(Layer(stack, layer, "mlp.experts"))
    if wanted - numbers:
        problem = (
            f"experts {listed(sorted(wanted - numbers))} of {len(wanted)} are not in the checkpoint"
        )
        report(MissingShardError(problem, key=name, rule="layout.experts"))
    if numbers - wanted:
        problem = (
            f"there are experts {listed(sorted(numbers - wanted))}, "
            f"but the arguments give this layer {len(wanted)}"
        )
        report(
            CorruptError(
                f"{problem} (num_experts, moe_layer_freq)", key=name, rule="layout.experts"
            )
        )


def _experts_in(subs: Iterable[str], rules: Rules) -> set[int]:
    """Return the experts of which a layer has a parameter."""
    experts = (rules.expert_of(sub) for sub in subs)
    return {expert.number for expert in experts if expert is not None and expert.number is not None}


def fc2_of(name: str) -> str:
    """Return the name of the second linear of an MLP, given the name of the first."""
    return name.replace("linear_fc1", "linear_fc2").replace("dense_h_to_4h", "dense_4h_to_h")


def check_shape(
    name: str, shape: Shape, partner: Shape | None, rule: Rule, facts: ModelFacts
) -> None:
    """Raise unless a tensor's global shape fits its rule and the arguments.

    Args:
        partner: the shape of the fc2 of the same MLP, or None.

    Raises:
        CorruptError: shape and arguments contradict each other.
        UnsupportedError: the rule is for tensors of one element, and there are more.
    """
    if rule.single is not None and prod(shape) != 1:
        raise UnsupportedError(f"{rule.single} cannot be resharded (shape {shape})", key=name)
    if len(shape) != 2:
        return
    if rule.parts == "gated" and name.endswith(_FC1) and partner is not None and len(partner) == 2:
        check_gate(name, shape[0], partner[1], is_gated=facts.is_gated)
    if rule.unit == "heads" and name.endswith(("linear_qkv.weight", "query_key_value.weight")):
        check_qkv_rows(name, shape[0], facts)
    wanted = extent_of(rule, facts)
    if wanted is not None and shape[0] != wanted:
        each = f" for each of {facts.n_heads} heads" if rule.unit == "heads" else ""
        raise CorruptError(
            f"the arguments say {wanted} rows ({' + '.join(rule.extent)}{each}), but there are {shape[0]}",
            key=name,
        )


def extent_of(rule: Rule, facts: ModelFacts) -> int | None:
    """Return the extent of axis 0 that the arguments give, or None where they do not say."""
    if not rule.extent or not all(name in facts.sizes for name in rule.extent):
        return None
    return sum(facts.sizes[name] for name in rule.extent) * (
        facts.n_heads if rule.unit == "heads" else 1
    )


def with_gate(facts: ModelFacts, shapes: Mapping[str, Shape]) -> ModelFacts:
    """Return the facts with ``is_gated`` set if a shape shows it.

    An fc1 with twice the rows of fc2's columns has a gate.

    The arguments name only some of the gated activations (``--swiglu``); a plain MLP never has such
    shapes.

    Args:
        shapes: global shapes by global name.
    """
    if facts.is_gated:
        return facts
    for name, shape in shapes.items():
        if name.endswith(_FC1) and len(shape) == 2:
            partner = shapes.get(name.removesuffix(_FC1) + _FC2, ())
            if len(partner) == 2 and shape[0] == 2 * partner[1]:
                return replace(facts, is_gated=True)
    return facts


def gate_notes(from_args: ModelFacts, from_shapes: ModelFacts) -> list[str]:
    """Return the note that shapes say that MLPs are gated where the arguments do not; []
    otherwise.
    """
    if from_args.is_gated == from_shapes.is_gated:
        return []
    return ["MLPs are gated, as the shapes of fc1 and fc2 say; the arguments (swiglu) do not"]


def check_gate(name: str, rows: int, columns: int, *, is_gated: bool) -> None:
    """Raise unless the rows of fc1 fit the columns of fc2.

    Raises:
        CorruptError: the rows are not the columns, or twice as many in a gated MLP.
    """
    if rows != columns * (1 + is_gated):
        kind = "a gated" if is_gated else "a plain"
        raise CorruptError(
            f"this is {kind} MLP by the arguments and the other layers, so fc1 should have "
            f"{columns * (1 + is_gated)} rows for {columns} columns of fc2, but it has {rows}",
            key=name,
            hint="is swiglu in the arguments right?",
        )


def check_qkv_rows(name: str, rows: int, facts: ModelFacts) -> None:
    """Raise unless the rows of the fused QKV weight fit the heads of the arguments.

    Raises:
        CorruptError: the rows are not those of the heads and groups, with or without an output
            gate.
    """
    if facts.head_dim is None:
        return
    plain = (facts.n_heads + 2 * facts.n_groups) * facts.head_dim
    gated = (2 * facts.n_heads + 2 * facts.n_groups) * facts.head_dim
    if rows not in (plain, gated):
        raise CorruptError(
            f"{facts.n_heads} heads and {facts.n_groups} groups of {facts.head_dim} channels make {plain} rows, "
            f"but there are {rows}",
            key=name,
        )


def listed(items: Sequence[object]) -> str:
    """Return the first few items as text for a message."""
    text = ", ".join(map(str, items[:_SHOWN]))
    return text + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")
