"""Layout rules as data: finding the rule of a parameter. ``core.megatron.rules.tables`` reads them.

Rules are ordered; the first whose pattern fits a name decides. There is no catch-all: a name
without a rule is an error that proposes one. ``megatron/rules/megatron.toml`` explains the fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

from core.arrays.box import Shape
from core.arrays.fast_value import value
from core.errors import UnknownTensorError, UnsupportedError
from core.megatron.rules.experts import Expert, ExpertForm, expert_form, expert_of
from core.megatron.rules.sizes import PartSize, ShapeSize

K = TypeVar("K")
T = TypeVar("T")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
NEEDS_AXIS = ("split", "vocab")
"""Kinds of rules that cut an axis."""


UNKNOWN_SOURCE = "--unknown replicate"
"""The source of the rule of tensors that no row fits, where the user says that they are
replicated.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row.

    Args:
        pattern: searched in the parameter's name.
        kind: ``replicate``, ``split``, ``vocab`` or ``opaque``.
        axis: the axis that ``split`` and ``vocab`` cut, else None.
        parts: ``whole``, ``gated`` or ``named``, which ``segments`` are then.
        segments: lists of the sizes of parts; the first that fits a tensor holds.
        names: what torch_dist puts behind the name for each part, which it stores as a tensor of
            its own; () for none.
        group: ``tp`` or ``etp``.
        unit: ``heads`` or None.
        divides: sizes that the number of shards must divide as well.
        extent: arguments whose sum is the extent of axis 0 (for each head, with ``unit``), or ().
        tied: name of the tensor that this one copies in models with shared embeddings, or None.
        later: what the parameter belongs to if it is not handled yet, else None.
        single: for tensors of one element: what those with more belong to, which are not handled;
            else None.
        source: where the rule was established.
        where: the row: its number and file.
    """

    pattern: re.Pattern[str]
    kind: str
    axis: int | None = None
    parts: str = "whole"
    segments: tuple[tuple[PartSize, ...], ...] = ()
    names: tuple[str, ...] = ()
    group: str = "tp"
    unit: str | None = None
    divides: tuple[str, ...] = ()
    extent: tuple[str, ...] = ()
    tied: str | None = None
    later: str | None = None
    single: str | None = None
    source: str = ""
    where: str = ""

    @property
    def cut_axis(self) -> int | None:
        """Axis that is cut, or None if every shard holds the complete tensor."""
        return self.axis if self.kind in NEEDS_AXIS else None

    def as_cut(self) -> Rule:
        """Return the rule of the same parameter where it is cut on axis 0 instead of replicated."""
        return replace(self, kind="split", axis=0)


@dataclass(frozen=True, slots=True)
class ModelKind:
    """The names that a kind of model gives its parts.

    Args:
        kind: for people: ``GPT``, ``BERT``, ``T5`` …
        stacks: beginnings of the names of its layers, that of the main stack first.
        embedding: the tensor of the input embedding.
        output: the tensor of the output layer, where it is a tensor of its own.
        head: the copy of the embedding that the last of several pipeline stages has where the two
            are shared.
        is_legacy: it has the names of ``megatron.legacy``, which only rank files have.
    """

    kind: str
    stacks: tuple[str, ...]
    embedding: str
    output: str
    head: str
    is_legacy: bool = False


GPT = ModelKind(
    "GPT",
    ("decoder.layers.",),
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "output_layer.weight",
)
"""The usual kind."""


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The facts about a model that the names of its tensors tell.

    Args:
        kind: what kind of model it is.
        n_seen: stack → highest number of a layer, plus one.
    """

    kind: ModelKind
    n_seen: Mapping[str, int]


@value(frozen=True, slots=True)
class Layer:
    """A name within one of a model's layers.

    Args:
        stack: beginning of the name before the number, such as ``decoder.layers.``.
        number: number of the layer, local or global.
        sub: the name within the layer.
    """

    stack: str
    number: int
    sub: str

    def __str__(self) -> str:
        return f"{self.stack}{self.number}.{self.sub}"


@dataclass(frozen=True, slots=True)
class Rules:
    """A layout's table.

    Args:
        rules: rows in order.
        stages: (pattern, ``first`` or ``last``) for parameters outside of layers.
        fused_names: (local, fused) beginnings of names within a layer.
        expert_forms: the ways to name experts.
        stacks: beginnings of the names of layers, in the order of a rank file.
        models: the kinds of models, GPT first.
        layer_order: beginnings of names within a layer, in the order of a rank file.
        buffers: patterns of tensors that are no parameters.
        sizes: sizes that shapes tell.
        unstacked: beginnings of names within layers that torch_dist never stacks.
        renamed: beginnings of names within layers that differ between newer rank files and
            torch_dist.
        inner: pattern of the beginning of names of a layer that is within another layer, or None.
        tells_numbers_apart: a rule fits some layers or experts and not others.
    """

    rules: tuple[Rule, ...]
    stages: tuple[tuple[re.Pattern[str], str], ...]
    fused_names: tuple[tuple[str, str], ...]
    expert_forms: tuple[ExpertForm, ...]
    stacks: tuple[str, ...]
    models: tuple[ModelKind, ...]
    layer_order: tuple[str, ...]
    buffers: tuple[re.Pattern[str], ...] = ()
    sizes: tuple[ShapeSize, ...] = ()
    unstacked: tuple[str, ...] = ()
    renamed: tuple[str, str] = ("", "")
    inner: re.Pattern[str] | None = None
    tells_numbers_apart: bool = True
    _fits: dict[str, Rule | None] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """What was looked up before, by name; the same for the others."""
    _experts: dict[str, Expert | None] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _forms: dict[tuple[str, str, str], ExpertForm] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _params: dict[str, bool] = field(init=False, repr=False, compare=False, default_factory=dict)

    def rule_of(
        self,
        name: str,
        *,
        shapes: Sequence[Shape] = (),
        hidden_size: int | None = None,
        tp: int | None = None,
    ) -> Rule:
        """Return the rule of a parameter.

        Args:
            name: local or global name, without ``model.``.
            shapes: shape of the parameter on every rank that has it, for the message.
            hidden_size: channels of the model, for the row that the message proposes.
            tp: how many shards these are, for the same.

        Raises:
            UnknownTensorError: no row fits; the hint proposes one.
            UnsupportedError: the row says that it is not handled yet.
        """
        rule = self._first_fit(name)
        if rule is None:
            extents = ", ".join(sorted({"×".join(map(str, shape)) or "scalar" for shape in shapes}))
            raise UnknownTensorError(
                "no layout rule fits this tensor"
                + (f" (shape on each of {len(shapes)} ranks: {extents})" if extents else ""),
                key=name,
                hint="write a file with this row, corrected if need be, for --rules (or use --unknown replicate, if "
                f"all ranks hold the same):\n{proposal(name, shapes, hidden_size=hidden_size, tp=tp)}",
            )
        if rule.later is not None:
            raise UnsupportedError(
                f"{rule.later} cannot be resharded yet",
                key=name,
                hint="torch_dist checkpoints of such models convert to dcp and torch, with the layout they have",
            )
        return rule

    def _first_fit(self, name: str) -> Rule | None:
        if name in self._fits:
            return self._fits[name]
        common = name if self.tells_numbers_apart else _NUMBER.sub("0", name)
        rule = self._fits.get(common)
        if rule is None:
            rule = next((rule for rule in self.rules if rule.pattern.search(common)), None)
        _forget_if_full(self._fits)
        self._fits[common] = self._fits[name] = rule
        return rule

    def parted_rule(self, name: str, part: str | None = None) -> Rule | None:
        """Return the rule of a parameter that torch_dist stores in parts, else None.

        With ``part``, the parameter must have a part of that name.
        """
        rule = self._first_fit(name)
        return None if rule is None or not rule.names or part not in (None, *rule.names) else rule

    @property
    def part_names(self) -> frozenset[str]:
        """Names that torch_dist gives the parts of parameters."""
        return _part_names(self.rules)

    @property
    def takes_unknown(self) -> bool:
        """True if the user gave a rule for parameters that no row fits."""
        return any(rule.source == UNKNOWN_SOURCE for rule in self.rules)

    def is_unknown(self, name: str) -> bool:
        """Return whether a parameter has a rule only because the user said ``--unknown
        replicate``.
        """
        rule = self._first_fit(name)
        return rule is not None and rule.source == UNKNOWN_SOURCE

    def stage_of(self, name: str) -> str | None:
        """Return ``first`` or ``last`` for a parameter or module outside of layers.

        None if no row says.
        """
        return next((stage for pattern, stage in self.stages if pattern.search(name)), None)

    def is_param(self, name: str) -> bool:
        """Return whether a tensor is a parameter, which an optimizer may train.

        Buffers and extra states are not.

        Raises:
            UnknownTensorError, UnsupportedError: as for ``rule_of``.
        """
        is_param = self._params.get(name)
        if is_param is None:
            expert = self.expert_of(name)
            common = name if expert is None else expert.numbered(expert.number or 0)
            is_buffer = any(pattern.search(common) for pattern in self.buffers)
            _forget_if_full(self._params)
            is_param = self._params[name] = self.rule_of(common).kind != "opaque" and not is_buffer
        return is_param

    def has_main_stack(self, name: str) -> bool:
        """Return whether a name is in a layer of the main stack of some kind of model.

        The layer may be numbered or stacked.
        """
        return name.startswith(self.main_stacks)

    @property
    def main_stacks(self) -> tuple[str, ...]:
        """Beginnings of names in the main stack of each kind of model."""
        return tuple(model.stacks[0] for model in self.models)

    def model_of(self, names: Iterable[str]) -> ModelNames:
        """Return the kind of model that has these tensors; the usual kind if they tell nothing."""
        n_seen: dict[str, int] = {}
        for name in names:
            layer = self.layer_of(name)
            if layer is not None:
                n_seen[layer.stack] = max(n_seen.get(layer.stack, 0), layer.number + 1)
        best = max(self.models, key=lambda model: _fit(model, n_seen))
        return ModelNames(best, n_seen)

    def layer_of(self, name: str) -> Layer | None:
        """Return the layer that a parameter belongs to, else None."""
        for stack in self.stacks:
            if name.startswith(stack):
                number, dot, sub = name[len(stack) :].partition(".")
                return (
                    Layer(stack, int(number), sub)
                    if dot and number.isascii() and number.isdigit()
                    else None
                )
        return None

    def stacked_of(self, name: str) -> tuple[str, str] | None:
        """Return (stack, name within the layer) of a key that stacks all layers, else None.

        Such a key is ``decoder.layers.mlp.…``.
        """
        for stack in self.stacks:
            sub = name.removeprefix(stack)
            if sub != name:
                return (stack, sub) if sub and not sub[0].isdigit() else None
        return None

    def expert_of(self, name: str) -> Expert | None:
        """Return the expert that a parameter or module belongs to, else None."""
        if "experts." not in name:
            return None
        if name not in self._experts:
            _forget_if_full(self._experts)
            self._experts[name] = expert_of(self.expert_forms, name)
        return self._experts[name]

    def is_packed_state(self, name: str) -> bool:
        """Return whether an extra state is that of all experts of a rank together."""
        expert = self.expert_of(name)
        if (
            expert is None or expert.number is not None or expert.names == "stacked"
        ):  # torch_dist's has one an expert
            return False
        return expert.rest.endswith("_extra_state")

    def expert_name(self, expert: Expert, *, names: str, number: int) -> str:
        """Return the name of an expert's parameter in another form.

        ``core.megatron.rules.experts`` lists the forms.
        """
        form = self._forms.get((expert.before, expert.rest, names))
        if form is None:
            form = expert_form(self.expert_forms, expert, names=names, number=number)
            _forget_if_full(self._forms)
            self._forms[expert.before, expert.rest, names] = form
        return form.named(expert, number)

    def fused(self, sub: str) -> str:
        """Return a name within a layer as torch_dist has it."""
        inner, rest = self._inner(sub)
        return inner + _exchanged(rest, self.fused_names)

    def local(self, sub: str) -> str:
        """Return a name within a layer as rank files of the local implementation have it."""
        inner, rest = self._inner(sub)
        return inner + _exchanged(rest, [(fused, local) for local, fused in self.fused_names])

    def in_torch_dist(self, sub: str) -> str:
        """Return a name within a layer with torch_dist's word for an inner layer.

        Newer rank files have another word.
        """
        return _exchanged(sub, [self.renamed])

    def in_rank_files(self, sub: str) -> str:
        """Return a name within a layer with newer rank files' word for an inner layer."""
        return _exchanged(sub, [self.renamed[::-1]])

    def position(self, sub: str) -> int:
        """Return the place of a name within a layer in a rank file.

        Names that the table does not know come last.
        """
        sub = self._inner(sub)[1]
        for place, start in enumerate(self.layer_order):
            if sub.startswith(start):
                return place
        return len(self.layer_order)

    def inner_number(self, sub: str) -> int:
        """Return the number of the layer within a layer that a name belongs to, else 0."""
        numbers = re.findall(r"\.(\d+)\.$", self._inner(sub)[0])
        return int(numbers[0]) if numbers else 0

    def _inner(self, sub: str) -> tuple[str, str]:
        """Split a name within a layer of a layer into (beginning up to that layer, rest).

        Other names give ("", name).
        """
        match = None if self.inner is None else self.inner.match(sub)
        return ("", sub) if match is None else (match[0], sub[match.end() :])


def _fit(model: ModelKind, stacks: Iterable[str]) -> tuple[int, int]:
    """Return a sort key for how well a kind of model fits the stacks of a checkpoint.

    The best kind has the most of them, and the fewest others.
    """
    return len({*model.stacks} & {*stacks}), -len({*model.stacks} - {*stacks})


_MAX_KNOWN = 1 << 17


def _forget_if_full(cache: dict[K, T]) -> None:
    """Empty a cache that is full, so that it stays bounded whatever names a file has."""
    if len(cache) >= _MAX_KNOWN:
        cache.clear()


@lru_cache(maxsize=8)
def _part_names(rules: tuple[Rule, ...]) -> frozenset[str]:
    return frozenset(name for rule in rules for name in rule.names)


def tells_numbers_apart(rule: Rule) -> bool:
    """Return whether a rule may fit one layer or expert and not another.

    Its pattern then has a digit outside of a word.
    """
    text = re.sub(r"\\.|(?<=[a-z_])(\[[^\]]*\]|[0-9]+)", "", rule.pattern.pattern)
    return re.search("[0-9]", text) is not None


def _exchanged(sub: str, pairs: Sequence[tuple[str, str]]) -> str:
    for old, new in pairs:
        if sub.startswith(old):
            return new + sub[len(old) :]
    return sub


def proposal(
    name: str, shapes: Sequence[Shape], *, hidden_size: int | None = None, tp: int | None = None
) -> str:
    """Return a row that might fit an unknown tensor, in TOML, with the reason for it.

    Shards of which one axis is the model's hidden size are cut on the other, as linear layers are;
    what has the hidden size on all its axes, although there are several shards, is not cut.
    """
    # Numbers of layers and experts become patterns.
    pattern = re.sub(r"\d+", r"\\d+", re.escape(name))
    row = ["[[rule]]", f"pattern = '^{pattern}$'"]
    shape = shapes[0] if shapes else ()

    # The hidden size is the axis that linear layers do not cut.
    other_axes = [axis for axis, extent in enumerate(shape) if extent != hidden_size]
    if len(set(shapes)) > 1:
        row += ['rule = "replicate"   # the ranks hold different shapes, which no rule describes']
    elif not shape:
        row += ['rule = "replicate"   # if every TP rank holds the same; else "split" with an axis']
    elif hidden_size is not None and not other_axes:
        why = "the hidden size on every axis" + (
            "" if tp in (None, 1) else f", on each of {tp} TP ranks"
        )
        row += [f'rule = "replicate"   # {why}']
    elif hidden_size is not None and len(shape) == 2 and len(other_axes) == 1:
        row += ['rule = "split"   # the other axis is the hidden size', f"axis = {other_axes[0]}"]
    elif len(shape) < 2:
        row += ['rule = "replicate"   # if every TP rank holds the same; else "split" with an axis']
    else:
        row += [
            'rule = "split"   # or "replicate", if every TP rank holds the same',
            f"axis = {int(shape[0] > shape[1])}",
        ]
    return "\n".join(row)
