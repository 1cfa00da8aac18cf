"""Find the layout rule of a parameter; ``core.megatron.rules.tables`` reads the rules.

Rules are ordered; the first whose pattern matches a name decides. There is no catch-all: a name
without a rule is an error that proposes one. ``megatron/rules/megatron.toml`` explains the fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from core.arrays.box import Shape
from core.errors import UnknownTensorError, UnsupportedError
from core.megatron.rules.experts import Expert, ExpertForm, expert_form, find_expert
from core.megatron.rules.sizes import PartSize, ShapeSize
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.tensor import Tensor

K = TypeVar("K")
T = TypeVar("T")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
NEEDS_AXIS = ("split", "vocab")
"""Kinds of rules that cut an axis."""
UNKNOWN_SOURCE = "--unknown replicate"
"""Source of the rule for all other tensors, which the user has declared replicated."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A layout rule: how the parameters with matching names are cut over ranks.

    Args:
        pattern: searched in the parameter's name.
        kind: ``replicate``, ``split``, ``vocab`` or ``opaque``.
        axis: the axis that ``split`` and ``vocab`` cut, else None.
        parts: ``whole``, ``gated``, or ``named`` for the parts in ``segments``.
        segments: alternative lists of the parts' sizes; the first that fits a tensor applies.
        names: suffixes that torch_dist gives the parts, which it stores as separate tensors; () if
            it does not.
        group: ``tp`` or ``etp``.
        unit: ``heads`` or None.
        divides: sizes that the number of shards must divide as well.
        shape: the extents of the axes by the arguments; None for an axis that they do not give, ()
            for a tensor of which they give none. A replicated tensor with a size and an ``axis`` is
            cut if a rank has only its share.
        tied: name of the tensor that this one copies in models with tied embeddings, or None.
        later: feature to which the parameter belongs, if it is not supported yet; else None.
        single: for tensors of one element: the feature to which tensors with more elements belong,
            which is not supported; else None.
        source: where the rule was established.
        where: number and file of the rule, for messages.
        is_users: the rule is from a user's file, so it is taken at its word.
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
    shape: tuple[PartSize | None, ...] = ()
    tied: str | None = None
    later: str | None = None
    single: str | None = None
    source: str = ""
    where: str = ""
    is_users: bool = False

    @property
    def cut_axis(self) -> int | None:
        """Axis that is cut, or None if every shard holds the complete tensor."""
        return self.axis if self.kind in NEEDS_AXIS else None

    @property
    def may_be_cut(self) -> bool:
        """True for a replicated parameter of which some models hold only a share on each rank."""
        return self.kind == "replicate" and self.axis is not None and bool(self.shape)

    def as_cut(self) -> Rule:
        """Return the rule with the parameter cut on its axis instead of replicated."""
        return replace(self, kind="split")

    def for_shape(self, shape: Shape) -> Rule:
        """Return the rule of a parameter with a shape, global or that of one rank.

        An output layer of one row, or its bias of one element, is the value head of a critic or a
        reward model: no rank has a part of a vocabulary, but the complete row.
        """
        is_of_output = self.tied is not None or len(shape) == 1
        if self.kind == "vocab" and is_of_output and shape[:1] == (1,):
            return replace(self, kind="replicate", axis=None, tied=None)
        return self


@dataclass(frozen=True, slots=True)
class ModelKind:
    """The names of the main tensors of a kind of model.

    Args:
        kind: name for people: ``GPT``, ``BERT``, ``T5`` …
        stacks: beginnings of the layers' names, that of the main stack first.
        embedding: the tensor of the input embedding.
        output: the tensor of the output layer, if it is a tensor of its own.
        head: the copy of a tied embedding in the last of several pipeline stages.
        is_legacy: the names are those of ``megatron.legacy``, which exist only in rank files.
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
"""The default kind."""


def has_value_head(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a GPT model's output layer has one row, as a critic or reward model has it."""
    return GPT.output in tensors and tensors[GPT.output].shape[:1] == (1,)


@dataclass(frozen=True, slots=True)
class Wrapper:
    """The names of a model that consists of a GPT model and of towers for images or sound.

    Args:
        text: beginning of the names of the GPT model's tensors.
        towers: beginnings of the names of all others, which have the same form everywhere.
    """

    text: str
    towers: tuple[str, ...]

    def wrapped(self, name: str) -> str:
        """Return the name in the complete model of a tensor of its GPT model or of a tower."""
        return name if name.startswith(self.towers) else self.text + name

    def wrapped_module(self, module: str) -> str:
        """Return the name in the complete model of a module; "" is the complete model."""
        return self.wrapped(f"{module}.").removesuffix(".") if module else ""


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The facts about a model that the names of its tensors show.

    Args:
        kind: kind of model.
        n_seen: stack → highest layer number in the names, plus one.
    """

    kind: ModelKind
    n_seen: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Layer:
    """A name in one of a model's layers.

    Args:
        stack: the part before the number, such as ``decoder.layers.``.
        number: number of the layer, local or global.
        sub: the name within the layer.
    """

    stack: str
    number: int
    sub: str

    def __str__(self) -> str:
        return f"{self.stack}{self.number}.{self.sub}"


LLAVA_LAYERS, LLAVA_PROJECTION = "vision_model.decoder.layers.", "vision_projection."
"""Beginnings of the names of Megatron-LM's LLaVA: of the layers of its tower, which torch_dist
stacks and rank files do not, and of its projection, which no other model has."""


def tower_layer_of(name: str) -> Layer | None:
    """Return the layer of LLaVA's tower to which a parameter belongs; None if it is stacked."""
    number, dot, sub = name.removeprefix(LLAVA_LAYERS).partition(".")
    is_numbered = name.startswith(LLAVA_LAYERS) and dot and number.isascii() and number.isdigit()
    return Layer(LLAVA_LAYERS, int(number), sub) if is_numbered else None


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a layout.

    Args:
        rules: rules in order of precedence.
        stages: (pattern, ``first`` or ``last``) for parameters outside of layers.
        fused_names: (local, fused) beginnings of names within a layer.
        expert_forms: the forms of experts' names.
        stacks: beginnings of the names of layers, in the order of a rank file.
        models: the kinds of models, GPT first.
        wrappers: the models that have a GPT model as a part, the longest ``text`` first.
        layer_order: beginnings of names within a layer, in the order of a rank file.
        buffers: patterns of tensors that are not parameters.
        sizes: sizes that are read from shapes.
        unstacked: beginnings of names within layers that torch_dist never stacks.
        renamed: a beginning of names within layers, in newer rank files and in torch_dist.
        torch_dist_names: (beginning of names within layers in newer rank files, in torch_dist).
        inner: pattern of the beginning of names in a layer inside another layer, or None.
        tells_numbers_apart: a rule matches some layers or experts and not others.
    """

    rules: tuple[Rule, ...]
    stages: tuple[tuple[re.Pattern[str], str], ...]
    fused_names: tuple[tuple[str, str], ...]
    expert_forms: tuple[ExpertForm, ...]
    stacks: tuple[str, ...]
    models: tuple[ModelKind, ...]
    layer_order: tuple[str, ...]
    wrappers: tuple[Wrapper, ...] = ()
    buffers: tuple[re.Pattern[str], ...] = ()
    sizes: tuple[ShapeSize, ...] = ()
    unstacked: tuple[str, ...] = ()
    renamed: tuple[str, str] = ("", "")
    torch_dist_names: tuple[tuple[str, str], ...] = ()
    inner: re.Pattern[str] | None = None
    tells_numbers_apart: bool = True
    _fits: dict[str, Rule | None] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """Cache of the rules by name; the other caches are of the same kind."""
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
            hidden_size: hidden size of the model, for the rule that the hint proposes.
            tp: number of shards of the parameter, for the same.

        Raises:
            UnknownTensorError: no rule matches; the hint proposes one.
            UnsupportedError: the rule marks the parameter as not supported yet.
        """
        rule = self.find_rule(name)

        # Propose a rule that the user can complete, with the evidence for it.
        if rule is None:
            extents = ", ".join(sorted({"×".join(map(str, shape)) or "scalar" for shape in shapes}))
            raise UnknownTensorError(
                "no layout rule matches this tensor"
                + (f" (shape on each of {len(shapes)} ranks: {extents})" if extents else ""),
                key=name,
                hint="save this rule in a file, correct it if necessary, and pass the file with "
                "--rules (or use --unknown replicate if all ranks have the same tensor):\n"
                + proposal(name, shapes, hidden_size=hidden_size, tp=tp),
            )
        if rule.later is not None:
            raise UnsupportedError(
                f"{rule.later} cannot be resharded yet",
                key=name,
                hint="convert a torch_dist checkpoint of the model to dcp or torch, which keep its "
                "layout",
            )
        return rule

    def is_vocabulary(self, name: str, shape: Shape) -> bool:
        """Return whether a parameter of a shape has a row for each token.

        Raises:
            UnknownTensorError, UnsupportedError: as for ``rule_of``.
        """
        return self.rule_of(name).for_shape(shape).kind == "vocab"

    def find_rule(self, name: str) -> Rule | None:
        """Return the first rule whose pattern matches a parameter's name, or None."""
        if name in self._fits:
            return self._fits[name]

        # Names that differ only in numbers share a search, unless a rule distinguishes numbers.
        common = name if self.tells_numbers_apart else _NUMBER.sub("0", name)
        rule = self._fits.get(common)
        if rule is None:
            rule = next((rule for rule in self.rules if rule.pattern.search(common)), None)
        _forget_if_full(self._fits)
        self._fits[common] = self._fits[name] = rule
        return rule

    def parted_rule(self, name: str, part: str | None = None) -> Rule | None:
        """Return the rule of a parameter that torch_dist stores in parts, else None.

        Args:
            part: name of a part that the parameter must have; None for any.
        """
        rule = self.find_rule(name)
        return None if rule is None or not rule.names or part not in (None, *rule.names) else rule

    @property
    def part_names(self) -> frozenset[str]:
        """Names that torch_dist gives the parts of parameters."""
        return _part_names(self.rules)

    @property
    def takes_unknown(self) -> bool:
        """True if the user declared all parameters without a rule replicated."""
        return any(rule.source == UNKNOWN_SOURCE for rule in self.rules)

    def is_unknown(self, name: str) -> bool:
        """Return True if a parameter has a rule only because of ``--unknown replicate``."""
        rule = self.find_rule(name)
        return rule is not None and rule.source == UNKNOWN_SOURCE

    def wrapper_in(self, prefix: str | None) -> Wrapper | None:
        """Return the wrapper whose GPT model's names have a prefix that ends in this way."""
        return next((item for item in self.wrappers if (prefix or "").endswith(item.text)), None)

    def stage_of(self, name: str) -> str | None:
        """Return ``first`` or ``last`` for a name outside of layers; None without such a rule."""
        return next((stage for pattern, stage in self.stages if pattern.search(name)), None)

    def is_param(self, name: str) -> bool:
        """Return whether a tensor is a parameter, which an optimizer may train.

        Buffers and extra states are not.

        Raises:
            UnknownTensorError: no rule matches.
            UnsupportedError: the rule marks the tensor as not supported yet.
        """
        is_param = self._params.get(name)
        if is_param is None:
            # Rules are written for the common form of experts' names.
            expert = self.expert_of(name)
            common = name if expert is None else expert.numbered(expert.number or 0)
            is_buffer = any(pattern.search(common) for pattern in self.buffers)
            _forget_if_full(self._params)
            is_param = self._params[name] = self.rule_of(common).kind != "opaque" and not is_buffer
        return is_param

    def has_main_stack(self, name: str) -> bool:
        """Return whether a name is in the main stack of some kind of model.

        Its layer may be numbered or stacked.
        """
        return name.startswith(self.main_stacks)

    @property
    def towers(self) -> tuple[str, ...]:
        """Beginnings of the names of towers beside a GPT model."""
        return tuple(tower for wrapper in self.wrappers for tower in wrapper.towers)

    @property
    def main_stacks(self) -> tuple[str, ...]:
        """Beginnings of names in the main stack of each kind of model."""
        return tuple(model.stacks[0] for model in self.models)

    def model_of(self, names: Iterable[str]) -> ModelNames:
        """Return the kind of model that has these tensors; GPT if no name is in a layer."""
        n_seen: dict[str, int] = {}
        for name in names:
            layer = self.layer_of(name)
            if layer is not None:
                n_seen[layer.stack] = max(n_seen.get(layer.stack, 0), layer.number + 1)

        # The best kind has the most of the stacks in these names, and the fewest others.
        def fit(model: ModelKind) -> tuple[int, int]:
            return len({*model.stacks} & {*n_seen}), -len({*model.stacks} - {*n_seen})

        return ModelNames(max(self.models, key=fit), n_seen)

    def layer_of(self, name: str) -> Layer | None:
        """Return the layer to which a parameter belongs, else None."""
        for stack in self.stacks:
            if name.startswith(stack):
                # A key for all layers has no number here.
                number, dot, sub = name[len(stack) :].partition(".")
                is_numbered = dot and number.isascii() and number.isdigit()
                return Layer(stack, int(number), sub) if is_numbered else None
        return None

    def stacked_of(self, name: str) -> tuple[str, str] | None:
        """Return (stack, name within the layer) of a key for all layers, else None.

        Such a key is ``decoder.layers.mlp.…``, without a number.
        """
        for stack in self.stacks:
            sub = name.removeprefix(stack)
            if sub != name:
                return (stack, sub) if sub and not sub[0].isdigit() else None
        return None

    def expert_of(self, name: str) -> Expert | None:
        """Return the expert to which a parameter or module belongs, else None."""
        if "experts." not in name:
            return None
        if name not in self._experts:
            _forget_if_full(self._experts)
            self._experts[name] = find_expert(self.expert_forms, name)
        return self._experts[name]

    def is_packed_state(self, name: str) -> bool:
        """Return whether an extra state is that of all experts of a rank together."""
        expert = self.expert_of(name)
        if expert is None or expert.number is not None:
            return False

        # torch_dist's stacked form has one state per expert.
        return expert.names != "stacked" and expert.rest.endswith("_extra_state")

    def expert_name(self, expert: Expert, *, names: str, number: int) -> str:
        """Return the name of an expert's parameter in another form.

        Args:
            names: the form (``core.megatron.rules.experts``).
            number: number of the expert in the name.

        Raises:
            UnsupportedError: the form has no name for the parameter.
        """
        # The form does not depend on the expert's number.
        form = self._forms.get((expert.before, expert.rest, names))
        if form is None:
            form = expert_form(self.expert_forms, expert, names=names, number=number)
            _forget_if_full(self._forms)
            self._forms[expert.before, expert.rest, names] = form
        return form.named(expert, number)

    def fused(self, sub: str, *, own: Sequence[tuple[str, str]] = ()) -> str:
        """Return a name within a layer with norms fused, as in torch_dist.

        Args:
            own: (local, fused) beginnings of names of this layer alone.
        """
        inner, rest = self._inner(sub)
        return inner + _exchanged(rest, (*own, *self.fused_names))

    def local(self, sub: str) -> str:
        """Return a name within a layer as in rank files of the local implementation."""
        inner, rest = self._inner(sub)
        return inner + _exchanged(rest, [(fused, local) for local, fused in self.fused_names])

    def in_torch_dist(self, sub: str, *, has_own_inner_name: bool) -> str:
        """Return a name within a layer as in torch_dist.

        Args:
            has_own_inner_name: torch_dist has a word of its own for an inner layer.
        """
        sub = _exchanged(sub, [self.renamed]) if has_own_inner_name else sub
        inner, rest = self._inner(sub)
        return inner + _exchanged(rest, self.torch_dist_names)

    def in_rank_files(self, sub: str) -> str:
        """Return a name within a layer with newer rank files' word for an inner layer."""
        return _exchanged(sub, [self.renamed[::-1]])

    def position(self, sub: str) -> int:
        """Return the index of a name within a layer in the order of a rank file.

        Names that ``layer_order`` does not list come last.
        """
        sub = self._inner(sub)[1]
        for index, start in enumerate(self.layer_order):
            if sub.startswith(start):
                return index
        return len(self.layer_order)

    def inner_number(self, sub: str) -> int:
        """Return the number of the inner layer to which a name within a layer belongs, else 0."""
        numbers = re.findall(r"\.(\d+)\.$", self._inner(sub)[0])
        return int(numbers[0]) if numbers else 0

    def _inner(self, sub: str) -> tuple[str, str]:
        """Split a name within a layer into (beginning with the inner layer or "", rest)."""
        match = None if self.inner is None else self.inner.match(sub)
        return ("", sub) if match is None else (match[0], sub[match.end() :])


_MAX_CACHED = 1 << 17


def _forget_if_full(cache: dict[K, T]) -> None:
    """Empty a cache that is full, so that it stays bounded whatever names a file has."""
    if len(cache) >= _MAX_CACHED:
        cache.clear()


@lru_cache(maxsize=8)
def _part_names(rules: tuple[Rule, ...]) -> frozenset[str]:
    return frozenset(name for rule in rules for name in rule.names)


def tells_numbers_apart(rule: Rule) -> bool:
    """Return whether a rule may match one layer or expert and not another.

    Its pattern then has a digit outside of a word.
    """
    # Remove escapes (``\d``), and digits and classes at the end of a word (``linear_fc[12]``).
    text = re.sub(r"\\.|(?<=[a-z_])(\[[^\]]*\]|[0-9]+)", "", rule.pattern.pattern)
    return re.search("[0-9]", text) is not None


def _exchanged(sub: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Replace the beginning of a name, if it is the first of some pair, by the second."""
    for old, new in pairs:
        if sub.startswith(old):
            return new + sub[len(old) :]
    return sub


def format_table(kind: str, names: Iterable[str], *lines: str) -> str:
    """Return a table of a rules file for tensors, in layers and experts of any number.

    Args:
        kind: ``rule`` or ``stage``.
        lines: the lines after the pattern.
    """
    patterns = dict.fromkeys(
        r"\.".join(r"\d+" if part.isdecimal() else re.escape(part) for part in name.split("."))
        for name in names
    )
    pattern = f"^{next(iter(patterns))}$" if len(patterns) == 1 else f"^({'|'.join(patterns)})$"
    # Literal strings need no second backslash, but cannot hold every character.
    is_literal = pattern.isprintable() and "'" not in pattern
    text = f"'{pattern}'" if is_literal else json.dumps(pattern, ensure_ascii=False)
    return "\n".join((f"[[{kind}]]", f"pattern = {text}", *lines))


def format_cut(rule: Rule) -> tuple[str, ...]:
    """Return the lines of a table ``[[rule]]`` that cuts tensors as a rule does."""
    lines = [f'rule = "{rule.kind}"', f"axis = {rule.axis}"]
    if rule.segments:
        parts = [[size.text for size in sizes] for sizes in rule.segments]
        lines.append(f"parts = {json.dumps(parts)}")
    elif rule.parts != "whole":
        lines.append(f'parts = "{rule.parts}"')
    if rule.unit is not None:
        lines.append(f'unit = "{rule.unit}"')
    if rule.group != "tp":
        lines.append(f'group = "{rule.group}"')
    return tuple(lines)


def proposal(
    name: str, shapes: Sequence[Shape], *, hidden_size: int | None = None, tp: int | None = None
) -> str:
    """Propose a rule for an unknown tensor, in TOML, with the reason for it in a comment.

    A matrix with the hidden size on one axis is probably cut on the other, like linear layers. A
    tensor that has the hidden size on all axes of a shard is not cut.

    Args:
        shapes: shape of the tensor on every rank that has it.
        tp: number of shards.
    """
    shape = shapes[0] if shapes else ()

    # Linear layers are not cut on the axis of the hidden size.
    undecided = (
        'rule = "replicate"   # if all TP ranks have the same values; else "split" and an axis'
    )
    other_axes = [axis for axis, extent in enumerate(shape) if extent != hidden_size]
    if len(set(shapes)) > 1:
        rule = [
            'rule = "replicate"   # the ranks have different shapes, which no rule can describe'
        ]
    elif shape and hidden_size is not None and not other_axes:
        shards = "" if tp in (None, 1) else f", on each of {tp} TP ranks"
        rule = [f'rule = "replicate"   # every axis has the hidden size{shards}']
    elif len(shape) < 2:
        rule = [undecided]
    elif hidden_size is not None and len(shape) == 2 and len(other_axes) == 1:
        rule = ['rule = "split"   # the other axis has the hidden size', f"axis = {other_axes[0]}"]
    else:
        rule = [
            'rule = "split"   # or "replicate", if all TP ranks have the same values',
            f"axis = {int(shape[0] > shape[1])}",
        ]
    return format_table("rule", [name], *rule)
