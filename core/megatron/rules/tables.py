"""Reading the tables of layout rules, ``megatron/rules/*.toml`` and those of users; ``megatron.toml`` explains them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from core.errors import UsageError
from core.files.store import translate_os_errors
from core.megatron.rules.experts import ExpertForm
from core.megatron.rules.rules import GPT, NEEDS_AXIS, UNKNOWN_SOURCE, ModelKind, Rule, Rules, tells_numbers_apart
from core.megatron.rules.sizes import PartSize, ShapeSize, parsed_size

KINDS = ("replicate", "split", "vocab", "opaque")
STAGES = ("first", "last")
_RULE_FIELDS = {
    *("pattern", "rule", "axis", "parts", "names", "group", "unit", "divides", "extent", "tied", "later", "single"),
    "source",
}
_SIZE_FIELDS = {"name", "pattern", "axis", "args", "source"}


def load_rules(extra: Path | None = None, *, unknown: str = "refuse") -> Rules:
    """The table of ``megatron/rules/megatron.toml``, with a user's rows before it.

    Args:
        unknown: ``refuse`` tensors without a rule, or ``replicate`` them: every rank holds the whole tensor, and what
            the ranks of the source hold must be equal.

    Raises:
        UsageError: the user's file is not TOML, or a row in it makes no sense; names the file and the row.
        MissingShardError, StorageError: it cannot be read.
    """
    return _own_rules(unknown) if extra is None else _all_rules(extra, unknown)


@lru_cache
def _own_rules(unknown: str) -> Rules:
    """Return the project's rules, parsed once: planning one job after the other asks for them again and again."""
    return _all_rules(None, unknown)


def _all_rules(extra: Path | None, unknown: str) -> Rules:
    label = "megatron.toml"
    table = tomllib.loads(files("core.megatron.rules").joinpath(label).read_text(encoding="utf-8"))
    rules, stages = _rows(table, label=label)
    buffers = _buffers(table, label=label)
    sizes = _sizes(table, label=label)
    if extra is not None:
        label = str(extra)
        with translate_os_errors(label, doing="read"):
            data = extra.read_bytes()
        try:
            added = tomllib.loads(data.decode("utf-8"))
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
            raise UsageError(f"the rules are not TOML: {err}", file=label) from err
        strange = sorted(set(added) - {"rule", "stage", "buffer", "size"})
        if strange:
            hint = "use [[rule]], [[stage]], [[buffer]] and [[size]]"
            raise UsageError(f"unknown tables: {', '.join(strange)}", file=label, hint=hint)
        more_rules, more_stages = _rows(added, label=label)
        buffers = _buffers(added, label=label) + buffers
        rules, stages = more_rules + rules, more_stages + stages
        sizes = _sizes(added, label=label) + sizes
    if unknown == "replicate":
        rules.append(Rule(re.compile(""), "replicate", source=UNKNOWN_SOURCE, where=UNKNOWN_SOURCE))
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
        tells_numbers_apart=any(map(tells_numbers_apart, rules)),
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
    if kind in NEEDS_AXIS and not (isinstance(axis, int) and 0 <= axis < 8):
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
