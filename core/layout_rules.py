"""Layout rules as data: reading ``layouts/*.toml``, and finding the rule of a parameter.

A file holds ordered ``[[rule]]`` rows; the first whose pattern fits a name decides. There is no catch-all: a name
without a rule is an error that proposes one. ``layouts/megatron.toml`` explains the fields.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from core.box import Shape
from core.errors import UnknownTensorError, UnsupportedError, UsageError
from core.layout_experts import Expert, ExpertForm, expert_name, expert_of
from core.layout_sizes import PartSize, ShapeSize, parsed_size
from core.store import translated

T = TypeVar("T")
KINDS = ("replicate", "split", "vocab", "opaque")
STAGES = ("first", "last")
_RULE_FIELDS = {
    *("pattern", "rule", "axis", "parts", "names", "group", "unit", "divides", "extent", "tied", "later", "single"),
    "source",
}
_SIZE_FIELDS = {"name", "pattern", "axis", "args", "source"}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_NEEDS_AXIS = ("split", "vocab")


@dataclass(frozen=True, slots=True)
class Rule:
    """One row.

    Args:
        pattern: searched in the parameter's name.
        kind: ``replicate``, ``split``, ``vocab`` or ``opaque``.
        axis: the axis that ``split`` and ``vocab`` cut, else None.
        parts: ``whole``, ``gated`` or ``named``, which ``segments`` are then.
        segments: lists of the sizes of parts; the first that fits a tensor holds.
        names: what torch_dist puts behind the name for each part, which it stores as a tensor of its own; () for none.
        group: ``tp`` or ``etp``.
        unit: ``heads`` or None.
        divides: sizes that the number of shards must divide as well.
        extent: arguments whose sum is the extent of axis 0 (for each head, with ``unit``), or ().
        tied: name of the tensor that this one copies in models with shared embeddings, or None.
        later: what the parameter belongs to if it is not handled yet, else None.
        single: for tensors of one element: what those with more belong to, which are not handled; else None.
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
        """The axis that is cut, or None for what every shard holds whole."""
        return self.axis if self.kind in _NEEDS_AXIS else None

    def as_cut(self) -> Rule:
        """The rule of the same parameter where it is cut on axis 0 instead of replicated."""
        return replace(self, kind="split", axis=0)


@dataclass(frozen=True, slots=True)
class ModelKind:
    """How a kind of model calls its parts.

    Args:
        kind: for people: ``GPT``, ``BERT``, ``T5`` …
        stacks: what stands before the numbers of its layers, that of the main stack first.
        embedding: the tensor of the input embedding.
        output: that of the output layer, where it is a tensor of its own.
        head: the copy of the embedding that the last of several pipeline stages has where the two are shared.
        is_legacy: it has the names of ``megatron.legacy``, which only rank files have.
    """

    kind: str
    stacks: tuple[str, ...]
    embedding: str
    output: str
    head: str
    is_legacy: bool = False


GPT = ModelKind(
    "GPT", ("decoder.layers.",), "embedding.word_embeddings.weight", "output_layer.weight", "output_layer.weight"
)
"""The usual kind."""


@dataclass(frozen=True, slots=True)
class ModelNames:
    """What the names of a model's tensors tell about it.

    Args:
        kind: what kind of model it is.
        n_seen: stack → highest number of a layer, plus one.
    """

    kind: ModelKind
    n_seen: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Layer:
    """A name within one of a model's layers.

    Args:
        stack: what stands before the number, such as ``decoder.layers.``.
        number: of the layer, local or global.
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
        stacks: what stands before the numbers of layers, in the order of a rank file.
        models: the kinds of models, GPT first.
        layer_order: beginnings of names within a layer, in the order of a rank file.
        buffers: patterns of tensors that are no parameters.
        sizes: sizes that shapes tell.
        unstacked: beginnings of names within layers that torch_dist never stacks.
        renamed: beginnings of names within layers that differ between newer rank files and torch_dist.
        inner: what stands before names of a layer that is within another layer, or None.
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
    _fits: dict[str, Rule | None] = field(init=False, repr=False, compare=False, default_factory=dict)
    """What was looked up before, by name; the same for ``_experts``."""
    _experts: dict[str, Expert | None] = field(init=False, repr=False, compare=False, default_factory=dict)

    def rule_of(self, name: str, *, shapes: Sequence[Shape] = ()) -> Rule:
        """The rule of a parameter.

        Args:
            name: local or global name, without ``model.``.
            shapes: its shape on every rank that has it, for the message.

        Raises:
            UnknownTensorError: no row fits; the hint proposes one.
            UnsupportedError: the row says that it is not handled yet.
        """
        rule = self._first_fit(name)
        if rule is None:
            seen = ", ".join(sorted({"×".join(map(str, shape)) or "scalar" for shape in shapes}))
            raise UnknownTensorError(
                "no layout rule fits this tensor"
                + (f" (shape on each of {len(shapes)} ranks: {seen})" if seen else ""),
                key=name,
                hint=f"write a file with this row, corrected if need be, for --rules:\n{proposal(name, shapes)}",
            )
        if rule.later is not None:
            raise UnsupportedError(
                f"{rule.later} cannot be resharded yet",
                key=name,
                hint="torch_dist checkpoints of such models convert to dcp and torch, with the layout they have",
            )
        return rule

    def _first_fit(self, name: str) -> Rule | None:
        if not self.tells_numbers_apart:
            name = _NUMBER.sub("0", name)
        if name not in self._fits:
            _forget_if_full(self._fits)
            self._fits[name] = next((rule for rule in self.rules if rule.pattern.search(name)), None)
        return self._fits[name]

    def parted_rule(self, name: str, part: str | None = None) -> Rule | None:
        """The rule of a parameter that torch_dist stores in parts (of which ``part`` is one), else None."""
        rule = self._first_fit(name)
        return None if rule is None or not rule.names or part not in (None, *rule.names) else rule

    @property
    def part_names(self) -> frozenset[str]:
        """What torch_dist calls the parts of parameters."""
        return _part_names(self.rules)

    def stage_of(self, name: str) -> str | None:
        """``first`` or ``last`` for a parameter or module outside of layers; None if no row says."""
        return next((stage for pattern, stage in self.stages if pattern.search(name)), None)

    def is_param(self, name: str) -> bool:
        """Whether a tensor is a parameter, which an optimizer may train: no buffer and no extra state.

        Raises:
            UnknownTensorError, UnsupportedError: as for ``rule_of``.
        """
        expert = self.expert_of(name)
        common = name if expert is None else expert.numbered(expert.number or 0)
        return self.rule_of(common).kind != "opaque" and not any(pattern.search(common) for pattern in self.buffers)

    def has_main_stack(self, name: str) -> bool:
        """Whether a name belongs to a layer that some kind of model cannot be without, whether numbered or stacked."""
        return any(name.startswith(model.stacks[0]) for model in self.models)

    def model_of(self, names: Iterable[str]) -> ModelNames:
        """What kind of model has these tensors; the usual kind if they tell nothing."""
        n_seen: dict[str, int] = {}
        for name in names:
            layer = self.layer_of(name)
            if layer is not None:
                n_seen[layer.stack] = max(n_seen.get(layer.stack, 0), layer.number + 1)
        best = max(self.models, key=lambda model: _fit(model, n_seen))
        return ModelNames(best, n_seen)

    def layer_of(self, name: str) -> Layer | None:
        """The layer that a parameter belongs to, else None."""
        for stack in self.stacks:
            if name.startswith(stack):
                number, dot, sub = name[len(stack) :].partition(".")
                return Layer(stack, int(number), sub) if dot and number.isascii() and number.isdigit() else None
        return None

    def stacked_of(self, name: str) -> tuple[str, str] | None:
        """(stack, name within the layer) of a key that stacks all layers (``decoder.layers.mlp.…``), else None."""
        for stack in self.stacks:
            sub = name.removeprefix(stack)
            if sub != name:
                return (stack, sub) if sub and not sub[0].isdigit() else None
        return None

    def expert_of(self, name: str) -> Expert | None:
        """The expert that a parameter or module belongs to, else None."""
        if "experts." not in name:
            return None
        if name not in self._experts:
            _forget_if_full(self._experts)
            self._experts[name] = expert_of(self.expert_forms, name)
        return self._experts[name]

    def is_packed_state(self, name: str) -> bool:
        """Whether a global name is that of an extra state that all experts of a rank have together."""
        expert = self.expert_of(name)
        if expert is None or expert.number is not None or expert.names == "stacked":  # torch_dist's has one an expert
            return False
        return expert.rest.endswith("_extra_state")

    def expert_name(self, expert: Expert, *, names: str, number: int) -> str:
        """The name of an expert's parameter in another form; see ``core.layout_experts``."""
        return expert_name(self.expert_forms, expert, names=names, number=number)

    def fused(self, sub: str) -> str:
        """A name within a layer as torch_dist has it."""
        inner, rest = self._inner(sub)
        return inner + _exchanged(rest, self.fused_names)

    def local(self, sub: str) -> str:
        """A name within a layer as rank files of the local implementation have it."""
        inner, rest = self._inner(sub)
        return inner + _exchanged(rest, [(fused, local) for local, fused in self.fused_names])

    def in_torch_dist(self, sub: str) -> str:
        """A name within a layer with torch_dist's word for a layer within it, which newer rank files call otherwise."""
        return _exchanged(sub, [self.renamed])

    def in_rank_files(self, sub: str) -> str:
        """A name within a layer with that word as newer rank files have it."""
        return _exchanged(sub, [self.renamed[::-1]])

    def position(self, sub: str) -> int:
        """Where a name within a layer stands in a rank file; names that the table does not know come last."""
        sub = self._inner(sub)[1]
        for place, start in enumerate(self.layer_order):
            if sub.startswith(start):
                return place
        return len(self.layer_order)

    def inner_number(self, sub: str) -> int:
        """The number of the layer within a layer that a name belongs to, else 0."""
        numbers = re.findall(r"\.(\d+)\.$", self._inner(sub)[0])
        return int(numbers[0]) if numbers else 0

    def _inner(self, sub: str) -> tuple[str, str]:
        """(what stands before the name within a layer of a layer, that name); ("", sub) for other names."""
        found = None if self.inner is None else self.inner.match(sub)
        return ("", sub) if found is None else (found[0], sub[found.end() :])


def _fit(model: ModelKind, seen: Iterable[str]) -> tuple[int, int]:
    """How well a kind of model fits the stacks that were seen: it has them, and it has few others."""
    return len({*model.stacks} & {*seen}), -len({*model.stacks} - {*seen})


_MAX_KNOWN = 1 << 17


def _forget_if_full(known: dict[str, T]) -> None:
    """Bounds what is remembered, whatever names a file has."""
    if len(known) >= _MAX_KNOWN:
        known.clear()


@lru_cache(maxsize=8)
def _part_names(rules: tuple[Rule, ...]) -> frozenset[str]:
    return frozenset(name for rule in rules for name in rule.names)


def _tells_numbers_apart(rule: Rule) -> bool:
    """Whether a rule may fit one layer or expert and not another: a digit is in its pattern, and not in a word."""
    text = re.sub(r"\\.|(?<=[a-z_])(\[[^\]]*\]|[0-9]+)", "", rule.pattern.pattern)
    return re.search("[0-9]", text) is not None


def _exchanged(sub: str, pairs: Sequence[tuple[str, str]]) -> str:
    for old, new in pairs:
        if sub.startswith(old):
            return new + sub[len(old) :]
    return sub


def proposal(name: str, shapes: Sequence[Shape]) -> str:
    """A row that might fit an unknown tensor, in TOML."""
    pattern = re.sub(r"\d+", r"\\d+", re.escape(name))
    shape = shapes[0] if shapes else ()
    row = ["[[rule]]", f"pattern = '^{pattern}$'"]
    if len(shape) < 2 or len(set(shapes)) > 1:
        row += ['rule = "replicate"   # if every TP rank holds the same; else "split" with an axis']
    else:
        row += [
            'rule = "split"   # or "replicate", if every TP rank holds the same',
            f"axis = {int(shape[0] > shape[1])}",
        ]
    return "\n".join(row)


def load_rules(extra: Path | None = None, *, family: str = "megatron") -> Rules:
    """The table of a family, with a user's rows before it.

    Raises:
        UsageError: the user's file is not TOML, or a row in it makes no sense; names the file and the row.
        MissingShardError, StorageError: it cannot be read.
    """
    label = f"layouts/{family}.toml"
    table = tomllib.loads(files("core").joinpath("layouts", f"{family}.toml").read_text(encoding="utf-8"))
    rules, stages = _rows(table, label=label)
    buffers = _buffers(table, label=label)
    sizes = _sizes(table, label=label)
    if extra is not None:
        label = str(extra)
        with translated(label, doing="read"):
            data = extra.read_bytes()
        try:
            added = tomllib.loads(data.decode("utf-8"))
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
            raise UsageError(f"the rules are not TOML: {err}", file=label) from err
        unknown = sorted(set(added) - {"rule", "stage", "buffer", "size"})
        if unknown:
            hint = "use [[rule]], [[stage]], [[buffer]] and [[size]]"
            raise UsageError(f"unknown tables: {', '.join(unknown)}", file=label, hint=hint)
        more_rules, more_stages = _rows(added, label=label)
        buffers = _buffers(added, label=label) + buffers
        rules, stages = more_rules + rules, more_stages + stages
        sizes = _sizes(added, label=label) + sizes
    return Rules(
        rules=tuple(rules),
        stages=tuple(stages),
        fused_names=tuple((row["local"], row["fused"]) for row in table["name"]),
        expert_forms=tuple(
            ExpertForm(row["names"], re.compile(row["pattern"]), row.get("name"), row.get("rest"))
            for row in table["experts"]
        ),
        stacks=tuple(table["stacks"]),
        models=(GPT, *(ModelKind(**{**row, "stacks": tuple(row["stacks"])}) for row in table["model"])),
        layer_order=tuple(table["order"]["layer"]),
        buffers=tuple(buffers),
        sizes=tuple(sizes),
        unstacked=tuple(table["unstacked"]),
        renamed=(str(table["renamed"][0]), str(table["renamed"][1])),
        inner=re.compile(table["inner"]),
        tells_numbers_apart=any(map(_tells_numbers_apart, rules)),
    )


def _rows(table: Mapping[str, object], *, label: str) -> tuple[list[Rule], list[tuple[re.Pattern[str], str]]]:
    rules = [_rule(row, where=f"[[rule]] {n}", label=label) for n, row in _numbered(table, "rule", label)]
    stages = []
    for n, row in _numbered(table, "stage", label):
        if row.get("stage") not in STAGES or set(row) - {"pattern", "stage"}:
            raise UsageError(f"[[stage]] {n} needs a pattern and a stage, {' or '.join(STAGES)}", file=label)
        stages.append((_pattern(row, where=f"[[stage]] {n}", label=label), str(row["stage"])))
    return rules, stages


def _buffers(table: Mapping[str, object], *, label: str) -> list[re.Pattern[str]]:
    found = []
    for n, row in _numbered(table, "buffer", label):
        if set(row) - {"pattern", "source"}:
            raise UsageError(f"[[buffer]] {n} has only a pattern and a source", file=label)
        found.append(_pattern(row, where=f"[[buffer]] {n}", label=label))
    return found


def _sizes(table: Mapping[str, object], *, label: str) -> list[ShapeSize]:
    sizes = []
    for n, row in _numbered(table, "size", label):
        where, name, axis = f"[[size]] {n}", row.get("name"), row.get("axis", 0)
        if not isinstance(name, str) or not name.isidentifier() or set(row) - _SIZE_FIELDS:
            raise UsageError(f"{where} needs a name, a pattern and an axis", file=label)
        if not isinstance(axis, int) or not 0 <= axis < 8:
            raise UsageError(f"{where} needs an axis, a small number from 0", file=label)
        args = parsed_size(row["args"]) if "args" in row else None
        if "args" in row and args is None:
            raise UsageError(f"{where} has args {row['args']!r}, which is no size", file=label)
        sizes.append(ShapeSize(name, _pattern(row, where=where, label=label), axis, args))
    return sizes


def _numbered(table: Mapping[str, object], name: str, label: str) -> list[tuple[int, Mapping[str, object]]]:
    rows = table.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{name} is not a list of tables", file=label, hint=f"write [[{name}]]")
    return list(enumerate(rows, start=1))


def _rule(row: Mapping[str, object], *, where: str, label: str) -> Rule:
    def refuse(what: str) -> UsageError:
        return UsageError(f"{where} {what}", file=label)

    unknown = sorted(set(row) - _RULE_FIELDS)
    if unknown:
        raise refuse(f"has unknown fields: {', '.join(unknown)}")
    kind, axis = row.get("rule"), row.get("axis")
    if kind not in KINDS:
        raise refuse(f"has rule {kind!r}; it is one of {', '.join(KINDS)}")
    if kind in _NEEDS_AXIS and not (isinstance(axis, int) and 0 <= axis < 8):
        raise refuse("needs an axis, a small number from 0")
    segments = _segments(row.get("parts"))
    if segments is None:
        raise refuse(
            f"has parts {row['parts']!r}; it is whole, gated, or a list of sizes: numbers, arguments, sums and "
            'products of them ("heads * channels"), or of such lists'
        )
    if segments and kind != "split" and not row.get("extent"):
        raise refuse("has parts, but its rule is not split (nor does it have an extent)")
    for name, allowed in (("group", ("tp", "etp")), ("unit", (None, "heads"))):
        if name in row and row[name] not in allowed:
            raise refuse(f"has {name} {row[name]!r}; it is one of {', '.join(filter(None, allowed))}")
    lists: dict[str, tuple[str, ...]] = {}
    for name in ("extent", "divides", "names"):
        value = row.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise refuse(f"has {name} that is no list of names")
        lists[name] = tuple(value)
    names = lists["names"]
    if names and all(len(names) != len(parts) for parts in segments):
        raise refuse("has names that are not one for each of its parts")
    text = {name: row.get(name) for name in ("tied", "later", "single", "source")}
    if any(value is not None and not isinstance(value, str) for value in text.values()):
        raise refuse(f"has a field of {', '.join(text)} that is not text")
    return Rule(
        pattern=_pattern(row, where=where, label=label),
        kind=str(kind),
        axis=axis if isinstance(axis, int) else None,
        parts="named" if segments else str(row.get("parts", "whole")),
        segments=segments,
        names=names,
        group=str(row.get("group", "tp")),
        unit=None if row.get("unit") is None else str(row["unit"]),
        divides=lists["divides"],
        extent=lists["extent"],
        tied=None if text["tied"] is None else str(text["tied"]),
        later=None if text["later"] is None else str(text["later"]),
        single=None if text["single"] is None else str(text["single"]),
        source=str(text["source"] or ""),
        where=f"{label} {where}",
    )


def _segments(parts: object) -> tuple[tuple[PartSize, ...], ...] | None:
    """The lists of sizes that ``parts`` gives; () for ``whole`` and ``gated``, None for what makes no sense."""
    if parts in (None, "whole", "gated"):
        return ()
    if not isinstance(parts, list) or not parts:
        return None
    lists = parts if all(isinstance(item, list) for item in parts) else [parts]
    found = [tuple(parsed_size(item) for item in items) for items in lists]
    sizes = tuple(tuple(item for item in items if item is not None) for items in found)
    return sizes if all(sizes) and sizes == tuple(found) else None


def _pattern(row: Mapping[str, object], *, where: str, label: str) -> re.Pattern[str]:
    text = row.get("pattern")
    if not isinstance(text, str) or not text:
        raise UsageError(f"{where} has no pattern", file=label)
    try:
        return re.compile(text)
    except re.error as err:
        raise UsageError(f"{where}: {text!r} is not a regular expression: {err}", file=label) from err
