"""Checks before a model's layout is changed: it is complete, and its shapes fit its arguments."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod

from core.arrays.box import Shape
from core.engine.catalog.tensor import Tensor
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    UnsupportedError,
    list_some,
    raising,
)
from core.megatron.model.facts import PREDICTION_STACK, ModelFacts
from core.megatron.model.hybrid import SYMBOLS
from core.megatron.rules.rules import GPT, Layer, Rule, Rules, format_table

_FC1 = ("linear_fc1.weight", "dense_h_to_4h.weight")
_QKV = tuple(
    f"{name}.{kind}" for name in ("linear_qkv", "query_key_value") for kind in ("weight", "bias")
)
TOWERS = ("vision_model.", "vision_projection.")
"""Beginnings of names of Megatron's layers beside a text model, whose sizes are other ones."""
GPT_LAYERS = GPT.stacks[0].rstrip(".")
"""End of the prefix of Megatron's layers in a tower."""
ADAPTER = ".adapter."
"""Part of the names of adapter parameters."""


def check_complete(
    tensors: Mapping[str, Tensor], facts: ModelFacts, rules: Rules, *, report: Report = raising
) -> None:
    """Raise unless a model is complete.

    It must have its embeddings, its output layer unless tied, all layers, all experts of these, and
    the same parameters in all layers of one kind. Layers of towers are compared with one another. A
    checkpoint of adapters alone is not checked.

    Args:
        tensors: all tensors by global name; those of a rank's share may stand for them.
        report: receives the problems (rules ``layout.tensor``, ``.layers``, ``.experts``,
            ``.shapes``); by default, raises them.

    Raises:
        MissingShardError: a tensor, layer or expert is missing; the error names it.
        CorruptError: the checkpoint has more layers or experts than the arguments specify, a layer
            of another kind than the pattern says, or a tower's layer of another shape.
    """
    from core.engine.catalog.sister_layers import find_deviations

    present = set(tensors)
    if all(ADAPTER in name for name in present):
        return  # a checkpoint of adapters does not contain the model that they adapt
    for name in (facts.kind.embedding, *(() if facts.is_tied else (facts.kind.output,))):
        if name not in present:
            report(
                MissingShardError(
                    "the tensor is not in the checkpoint", key=name, rule="layout.tensor"
                )
            )

    # Only some layers may have extra states, tensors of quantization, and those without a rule.
    subs: dict[str, dict[int, set[str]]] = {stack: {} for stack in rules.stacks}
    for name in present:
        layer, rule = rules.layer_of(name), rules.rule_of(name)
        is_optional = rule.kind == "opaque" or rule.single is not None or rules.is_unknown(name)
        if layer is not None and not is_optional:
            subs[layer.stack].setdefault(layer.number, set()).add(layer.sub)
    for stack, subs_of in subs.items():
        _check_stack(stack, subs_of, facts, rules, report)

    # No argument gives the number of a tower's layers. Those that are Megatron's are all alike.
    in_towers = {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(rules.towers) and rules.rule_of(name).kind != "opaque"
    }
    for deviation in find_deviations(
        in_towers, {}, is_quantized=False, is_uniform=lambda prefix: prefix.endswith(GPT_LAYERS)
    ):
        error = MissingShardError if deviation.is_lack else CorruptError
        broken = "layout.layers" if deviation.is_layer else "layout.tensor"
        broken = broken if deviation.is_lack else "layout.shapes"
        report(error(deviation.message, key=deviation.key, rule=broken))


def _check_stack(
    stack: str, subs_of: Mapping[int, set[str]], facts: ModelFacts, rules: Rules, report: Report
) -> None:
    """Report missing and surplus layers of a stack, and parameters that some layers lack.

    Args:
        subs_of: layer → names of the required tensors in it.
    """
    # Layers must be numbered from 0 to the number in the arguments.
    n_layers = facts.stacks.get(stack, 0)
    missing = sorted(set(range(n_layers)) - set(subs_of) - facts.empty_layers(stack))
    if missing:
        problem = f"layers {list_some(missing)} of {n_layers} are not in the checkpoint"
        report(MissingShardError(problem, key=stack.rstrip("."), rule="layout.layers"))
    extra = sorted(set(subs_of) - set(range(n_layers)))
    if extra:
        problem = (
            f"the checkpoint contains layers {list_some(extra)}, but the model has only {n_layers} "
            "layers"
        )
        report(CorruptError(problem, key=stack.rstrip("."), rule="layout.layers"))

    # Layers of one kind must have the same parameters, and all of their experts.
    subs_of_kind: dict[object, set[str]] = {}
    kinds: dict[int, object] = {}
    for layer, subs in sorted(subs_of.items()):
        if layer >= n_layers:
            continue
        try:
            kinds[layer] = _kind_of(stack, layer, subs, facts)
        except CheckpointingException as err:
            report(err.breaking("layout.layers"))
    for layer, kind in kinds.items():
        subs_of_kind.setdefault(kind, set()).update(subs_of[layer])
    for layer, kind in kinds.items():
        subs = subs_of[layer]
        experts = {expert.number for expert in map(rules.expert_of, subs) if expert is not None}
        numbers = {number for number in experts if number is not None}
        # No argument says that a multi-token prediction has no experts where the last layer does.
        is_dense_prediction = stack == PREDICTION_STACK and any(
            "mlp.linear_fc1." in sub for sub in subs
        )
        if facts.pattern is not None or not is_dense_prediction:
            _check_experts(stack, layer, numbers, facts, report)

        # Tensors of an expert that is missing altogether have been reported.
        for absent in sorted(subs_of_kind[kind] - subs):
            expert = rules.expert_of(absent)
            if expert is None or expert.number in numbers:
                problem = "the tensor is missing, but other layers have it"
                report(
                    MissingShardError(
                        problem, key=str(Layer(stack, layer, absent)), rule="layout.tensor"
                    )
                )


def _kind_of(stack: str, layer: int, subs: Iterable[str], facts: ModelFacts) -> object:
    """Return the kind of a layer, by the arguments or else by its parameters.

    Raises:
        CorruptError: the pattern of a hybrid model specifies another kind.
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
                f"according to the pattern {facts.pattern.layers}, layer {layer} should be of kind "
                f"{kind}, but it has no tensor {SYMBOLS[kind]}*",
                key=str(Layer(stack, layer, min(subs))),
            )
    return kind


def _check_experts(
    stack: str, layer: int, numbers: set[int], facts: ModelFacts, report: Report
) -> None:
    """Report missing and surplus experts of a layer.

    Args:
        numbers: the experts of which the layer has a parameter.
    """
    expected = set(range(facts.n_experts or 0)) if facts.has_experts(stack, layer) else set()
    name = str(Layer(stack, layer, "mlp.experts"))
    missing, extra = sorted(expected - numbers), sorted(numbers - expected)
    if missing:
        problem = f"experts {list_some(missing)} of {len(expected)} are not in the checkpoint"
        report(MissingShardError(problem, key=name, rule="layout.experts"))
    if extra:
        problem = (
            f"the checkpoint contains experts {list_some(extra)}, but the arguments (num_experts, "
            f"moe_layer_freq) specify {len(expected)} experts for this layer"
        )
        report(CorruptError(problem, key=name, rule="layout.experts"))


def check_shapes(
    shapes: Mapping[str, Shape],
    rule_of: Mapping[str, Rule],
    facts: ModelFacts,
    *,
    n_joined: Callable[[str], int] = lambda group: 1,
    report: Report = raising,
) -> None:
    """Compare the global shapes of a model with its rules, its arguments and one another.

    Args:
        shapes: global name → shape, padding rows included.
        rule_of: global name → rule.
        n_joined: group of a rule → number of shards that were joined to each tensor; 1 for tensors
            that were stored complete.
        report: receives the problems (rule ``layout.shapes``); by default, raises the first one.

    Raises:
        CorruptError: a shape contradicts its rule, the arguments or another shape.
        UnsupportedError: a rule is for tensors of one element, but the tensor has more.
    """
    # Shapes that follow from the arguments come first: of two tensors that contradict each other,
    # they tell which one is wrong.
    # A bias follows its weight.
    wrong: set[str] = set()
    names = sorted(shapes, key=lambda name: name.endswith("bias"))
    for check in (_check_by_args, _check_by_neighbours):
        for name in names:
            if name in wrong or name.removesuffix("bias") + "weight" in wrong:
                continue
            shape = shapes[name]
            rule = rule_of[name]
            try:
                check(name, shape, rule, facts, shapes)
            except CheckpointingException as err:
                wrong.add(name)
                axis, n = rule.cut_axis, n_joined(rule.group)
                if axis is not None and axis < len(shape) and n > 1 and err.hint is None:
                    # One rank's tensor may be the complete one.
                    whole = (*shape[:axis], shape[axis] // n, *shape[axis + 1 :])
                    with suppress(CheckpointingException):
                        check(name, whole, rule, facts, shapes)
                        err.hint = (
                            f"if each of the {n} {rule.group.upper()} ranks has the complete "
                            "tensor, use --rules FILE with a file that contains:\n"
                            + format_table("rule", [name], 'rule = "replicate"')
                        )
                report(err.breaking("layout.shapes"))


def _check_by_args(
    name: str, shape: Shape, rule: Rule, facts: ModelFacts, shapes: Mapping[str, Shape]
) -> None:
    """Raise unless a shape fits the rule and the arguments.

    Raises:
        CorruptError, UnsupportedError: as for ``check_shapes``.
    """
    axis = rule.cut_axis
    if axis is not None and axis >= len(shape):
        raise CorruptError(
            f"the tensor has shape {shape}, but its rule splits it along axis {axis}", key=name
        )
    if rule.single is not None and prod(shape) != 1:
        raise UnsupportedError(f"{rule.single} cannot be resharded (shape {shape})", key=name)
    if rule.unit == "heads" and name.endswith(_QKV):
        check_qkv_rows(name, shape[0], facts)
    sizes = sizes_for(name, facts) if rule.shape else {}
    for axis, (size, extent) in enumerate(zip(rule.shape, shape, strict=False)):
        expected = None if size is None else size.value(sizes)
        if size is not None and expected not in (None, extent):
            lines = ("rows", "columns")[axis] if axis < 2 else f"elements on axis {axis}"
            raise CorruptError(
                f"according to the arguments, the tensor should have {expected} {lines} "
                f"({size.text}), but it has {extent}",
                key=name,
            )


def _check_by_neighbours(
    name: str, shape: Shape, rule: Rule, facts: ModelFacts, shapes: Mapping[str, Shape]
) -> None:
    """Raise unless a shape fits the other tensors of its layer.

    The rows of an MLP's first linear follow from the columns of the second, those of a bias from
    its weight.

    Raises:
        CorruptError: the shapes contradict each other.
    """
    partner = shapes.get(_fc2_of(name), ())
    if rule.parts == "gated" and name.endswith(_FC1) and len(partner) == len(shape) == 2:
        check_gate(name, shape[0], partner[1], is_gated=facts.is_gated)
    weight = shapes.get(name.removesuffix("bias") + "weight", ())
    if name.endswith(".bias") and weight and rule.cut_axis == 0 and shape[0] != weight[0]:
        raise CorruptError(
            f"the bias has {shape[0]} elements, but its weight has {weight[0]} rows", key=name
        )


def _fc2_of(name: str) -> str:
    """Return the name of an MLP's second linear layer, given the name of the first."""
    return name.replace("linear_fc1", "linear_fc2").replace("dense_h_to_4h", "dense_4h_to_h")


def sizes_for(name: str, facts: ModelFacts) -> Mapping[str, int]:
    """Return the sizes that a rule's ``shape`` may name, for one tensor.

    These are the arguments, and sizes that follow from several of them.
    """
    derived = {"num_query_groups": facts.n_groups_of(name)}
    sizes = facts.sizes
    if facts.blocks is not None:  # each layer of a heterogeneous model has its own MLP
        sizes = {size: value for size, value in sizes.items() if size != "ffn_hidden_size"}
    return ChainMap(derived, dict(sizes))


def with_gate(facts: ModelFacts, shapes: Mapping[str, Shape]) -> ModelFacts:
    """Return the facts with ``is_gated`` set if a shape shows it.

    An MLP has a gate if its fc1 has twice as many rows as fc2 has columns; a plain MLP never has
    such shapes. The arguments name only some of the gated activations (``--swiglu``).

    Args:
        shapes: global shapes by global name.
    """
    if facts.is_gated:
        return facts
    for name, shape in shapes.items():
        if name.endswith(_FC1) and len(shape) == 2 and not name.startswith(TOWERS):
            partner = shapes.get(_fc2_of(name), ())
            if len(partner) == 2 and shape[0] == 2 * partner[1]:
                return replace(facts, is_gated=True)
    return facts


def gate_notes(from_args: ModelFacts, from_shapes: ModelFacts) -> list[str]:
    """Return the note that MLPs are gated by their shapes only; [] if the arguments agree."""
    if from_args.is_gated == from_shapes.is_gated:
        return []
    return ["the shapes of fc1 and fc2 show gated MLPs, but the training arguments lack swiglu"]


def check_gate(name: str, rows: int, columns: int, *, is_gated: bool) -> None:
    """Raise unless the rows of fc1 fit the columns of fc2.

    Raises:
        CorruptError: fc1 does not have as many rows as fc2 has columns, or twice as many in a gated
            MLP.
    """
    if rows != columns * (1 + is_gated):
        kind = "a gated" if is_gated else "a plain"
        raise CorruptError(
            f"this is {kind} MLP according to the arguments and the other layers, so fc1 should "
            "have "
            f"{columns * (1 + is_gated)} rows for {columns} columns of fc2, but it has {rows}",
            key=name,
            hint="check swiglu in the arguments",
        )


def check_qkv_rows(name: str, rows: int, facts: ModelFacts) -> None:
    """Raise unless the rows of the fused QKV weight fit the heads of the arguments.

    Raises:
        CorruptError: the number of rows does not follow from heads and groups, with or without an
            output gate.
    """
    if facts.head_dim is None:
        return

    # An output gate has as many rows as the queries.
    n_groups = facts.n_groups_of(name)
    plain = (facts.n_heads + 2 * n_groups) * facts.head_dim
    gated = (2 * facts.n_heads + 2 * n_groups) * facts.head_dim
    if rows not in (plain, gated):
        raise CorruptError(
            f"{facts.n_heads} heads and {n_groups} groups of {facts.head_dim} channels need "
            f"{plain} rows, but the tensor has {rows}",
            key=name,
        )
