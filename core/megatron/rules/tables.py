"""Read layout rules: those of the project and those of users.

``megatron/rules/megatron.toml`` has the project's rules and explains the fields.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from core.errors import UsageError
from core.files.store import translate_os_errors
from core.megatron.rules.experts import ExpertForm
from core.megatron.rules.rules import (
    GPT,
    NEEDS_AXIS,
    UNKNOWN_SOURCE,
    ModelKind,
    Rule,
    Rules,
    Wrapper,
    tells_numbers_apart,
)
from core.megatron.rules.sizes import PartSize, ShapeSize, parsed_size
from core.values import dataclass

KINDS = ("replicate", "split", "vocab", "opaque")
STAGES = ("first", "last")
_OWN = "megatron.toml"
_LISTS = ("divides", "names")
_TEXTS = ("tied", "later", "single", "source")
_RULE_FIELDS = {"pattern", "rule", "axis", "parts", "shape", "group", "unit", *_LISTS, *_TEXTS}
_SIZE_FIELDS = {"name", "pattern", "axis", "args", "source"}
_SIZE = 'a positive number, an argument, or sums and products of them, such as "heads * channels"'
"""What a size may be, for messages."""


def load_rules(extra: Path | None = None, *, unknown: str = "refuse") -> Rules:
    """Load the rules of ``megatron/rules/megatron.toml``, with a user's rules before them.

    Args:
        extra: the user's file, or None.
        unknown: ``refuse`` tensors without a rule, or ``replicate`` them: every rank holds the
            complete tensor, and the ranks of the source must hold equal ones.

    Raises:
        UsageError: the user's file is not TOML, or a rule in it is invalid.
        MissingShardError: the file does not exist.
        StorageError: the file cannot be read.
    """
    return _load_own_rules(unknown) if extra is None else _load_all_rules(extra, unknown)


@lru_cache
def _load_own_rules(unknown: str) -> Rules:
    """Load the project's rules.

    They are cached, because planning several jobs requests them repeatedly.
    """
    return _load_all_rules(None, unknown)


def _load_all_rules(extra: Path | None, unknown: str) -> Rules:
    """Load the project's rules, with those of a user before them."""
    table = tomllib.loads(Path(__file__).with_name(_OWN).read_text(encoding="utf-8"))

    # Put the user's rules first, so that they win, and the rule for all other tensors last.
    rows = _parse_rows(table, label=_OWN)
    if extra is not None:
        rows = _parse_rows(_read_user_table(extra), label=str(extra)).before(rows)
    rules = rows.rules
    if unknown == "replicate":
        rules = (
            *rules,
            Rule(re.compile(""), "replicate", source=UNKNOWN_SOURCE, where=UNKNOWN_SOURCE),
        )
    return Rules(
        rules=rules,
        stages=rows.stages,
        fused_names=tuple((row["local"], row["fused"]) for row in table["name"]),
        expert_forms=tuple(
            ExpertForm(row["names"], re.compile(row["pattern"]), row.get("name"), row.get("rest"))
            for row in table["experts"]
        ),
        stacks=tuple(table["stacks"]),
        models=(
            GPT,
            *(ModelKind(**{**row, "stacks": tuple(row["stacks"])}) for row in table["model"]),
        ),
        layer_order=tuple(table["order"]["layer"]),
        wrappers=tuple(Wrapper(row["text"], tuple(row["towers"])) for row in table["wrapper"]),
        buffers=rows.buffers,
        sizes=rows.sizes,
        unstacked=tuple(table["unstacked"]),
        renamed=(str(table["renamed"][0]), str(table["renamed"][1])),
        torch_dist_names=tuple((str(a), str(b)) for a, b in table["torch_dist_names"]),
        inner=re.compile(table["inner"]),
        tells_numbers_apart=any(map(tells_numbers_apart, rules)),
    )


def _read_user_table(path: Path) -> Mapping[str, object]:
    """Read a user's file of rules.

    Raises:
        UsageError: the file is not TOML, or has unknown tables.
        MissingShardError: the file does not exist.
        StorageError: the file cannot be read.
    """
    label = str(path)
    with translate_os_errors(label, doing="read"):
        data = path.read_bytes()
    try:
        table = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
        raise UsageError(f"the file is not valid TOML: {err}", file=label) from err

    # A misspelled table would be ignored silently.
    unknown = sorted(set(table) - {"rule", "stage", "buffer", "size"})
    if unknown:
        hint = "use only the tables [[rule]], [[stage]], [[buffer]] and [[size]]"
        raise UsageError(f"unknown tables: {', '.join(unknown)}", file=label, hint=hint)
    return table


@dataclass(frozen=True, slots=True)
class _Rows:
    """The tables of a file that users may write as well."""

    rules: tuple[Rule, ...]
    stages: tuple[tuple[re.Pattern[str], str], ...]
    buffers: tuple[re.Pattern[str], ...]
    sizes: tuple[ShapeSize, ...]

    def before(self, other: _Rows) -> _Rows:
        """Return these tables followed by others, over which they take precedence."""
        return _Rows(
            self.rules + other.rules,
            self.stages + other.stages,
            self.buffers + other.buffers,
            self.sizes + other.sizes,
        )


def _parse_rows(table: Mapping[str, object], *, label: str) -> _Rows:
    """Parse the tables that users may write.

    Args:
        label: file of the table, for messages.

    Raises:
        UsageError: a table is invalid.
    """
    is_users = label != _OWN
    rules = [
        replace(_parse_rule(row, where=f"[[rule]] {n}", label=label), is_users=is_users)
        for n, row in _numbered(table, "rule", label)
    ]

    stages: list[tuple[re.Pattern[str], str]] = []
    for n, row in _numbered(table, "stage", label):
        if row.get("stage") not in STAGES or set(row) - {"pattern", "stage"}:
            raise UsageError(
                f"[[stage]] {n} must have only a pattern and a stage ({' or '.join(STAGES)})",
                file=label,
            )
        pattern = _compile_pattern(row, where=f"[[stage]] {n}", label=label)
        stages.append((pattern, str(row["stage"])))

    buffers: list[re.Pattern[str]] = []
    for n, row in _numbered(table, "buffer", label):
        if set(row) - {"pattern", "source"}:
            raise UsageError(f"[[buffer]] {n} may have only a pattern and a source", file=label)
        buffers.append(_compile_pattern(row, where=f"[[buffer]] {n}", label=label))

    return _Rows(
        rules=tuple(rules),
        stages=tuple(stages),
        buffers=tuple(buffers),
        sizes=tuple(_parse_sizes(table, label=label)),
    )


def _parse_sizes(table: Mapping[str, object], *, label: str) -> Iterator[ShapeSize]:
    """Parse the tables ``[[size]]``.

    Raises:
        UsageError: a table is invalid.
    """
    for n, row in _numbered(table, "size", label):
        where, name, axis = f"[[size]] {n}", row.get("name"), row.get("axis", 0)
        if not isinstance(name, str) or not name.isidentifier() or set(row) - _SIZE_FIELDS:
            raise UsageError(
                f"{where} needs a name (an identifier), and may have only the fields "
                f"{', '.join(sorted(_SIZE_FIELDS))}",
                file=label,
            )
        if not isinstance(axis, int) or not _is_axis(axis):
            raise UsageError(f"{where} needs an axis from 0 to 7", file=label)

        # Without ``args`` the size is known only from shapes.
        args = parsed_size(row["args"]) if "args" in row else None
        if "args" in row and args is None:
            raise UsageError(
                f"{where} has args = {row['args']!r}, but args must be a size ({_SIZE})", file=label
            )
        yield ShapeSize(name, _compile_pattern(row, where=where, label=label), axis, args)


def _numbered(
    table: Mapping[str, object], name: str, label: str
) -> list[tuple[int, Mapping[str, object]]]:
    """Return the tables of a list, numbered from 1 as in messages."""
    rows = table.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(
            f"{name} must be a list of tables", file=label, hint=f"begin each table with [[{name}]]"
        )
    return list(enumerate(rows, start=1))


def _is_axis(value: object) -> bool:
    """Return True for a number that can be an axis; no parameter has as many as eight."""
    return isinstance(value, int) and 0 <= value < 8


class _RowError(ValueError):
    """A problem with a rule, without the rule's number and file."""


def _parse_rule(row: Mapping[str, object], *, where: str, label: str) -> Rule:
    """Parse a table ``[[rule]]``.

    Args:
        where: the rule, for messages.
        label: file of the rule, for messages.

    Raises:
        UsageError: a field is unknown or invalid.
    """
    # Problems are raised without the place of the rule, which is added here.
    try:
        unknown = sorted(set(row) - _RULE_FIELDS)
        if unknown:
            raise _RowError(f"has unknown fields: {', '.join(unknown)}")
        kind = row.get("rule")
        if kind not in KINDS:
            raise _RowError(f"has rule = {kind!r}, but rule must be one of {', '.join(KINDS)}")
        if kind in NEEDS_AXIS and not _is_axis(row.get("axis")):
            raise _RowError("needs an axis from 0 to 7")
        segments = _parse_segments(row, str(kind))
        items = row.get("shape", [])
        if not isinstance(items, list) or any(
            item != "" and not parsed_size(item) for item in items
        ):
            raise _RowError(
                f"has shape = {items!r}, but shape must be a list with one entry per axis: a size "
                f'({_SIZE}) or ""'
            )
        shape = tuple(map(parsed_size, items))
        _check_choice(row, "group", ("tp", "etp"))
        _check_choice(row, "unit", (None, "heads"))
        lists = {name: _parse_names(row, name) for name in _LISTS}
        names = lists["names"]
        if names and all(len(names) != len(parts) for parts in segments):
            raise _RowError("must have as many names as parts")
        texts = {name: _parse_text(row, name) for name in _TEXTS}
    except _RowError as err:
        raise UsageError(f"{where} {err}", file=label) from None

    # Rules that cut nothing may have an axis of any type; it is ignored.
    axis = row.get("axis")
    return Rule(
        pattern=_compile_pattern(row, where=where, label=label),
        kind=str(kind),
        axis=axis if isinstance(axis, int) else None,
        parts="named" if segments else str(row.get("parts", "whole")),
        segments=segments,
        names=names,
        group=str(row.get("group", "tp")),
        unit=None if row.get("unit") is None else str(row["unit"]),
        divides=lists["divides"],
        shape=shape,
        tied=texts["tied"],
        later=texts["later"],
        single=texts["single"],
        source=texts["source"] or "",
        where=f"{label} {where}",
    )


def _parse_segments(row: Mapping[str, object], kind: str) -> tuple[tuple[PartSize, ...], ...]:
    """Parse the field ``parts``, a list of sizes or such lists; () for ``whole`` and ``gated``."""
    parts = row.get("parts")
    if parts in (None, "whole", "gated"):
        return ()

    # One list of sizes is short for a list with one alternative. Other values become an empty list,
    # which is invalid.
    lists = parts if isinstance(parts, list) and parts else [[]]
    if not all(isinstance(items, list) for items in lists):
        lists = [lists]
    segments: list[tuple[PartSize, ...]] = []
    for items in lists:
        sizes = [size for item in items if (size := parsed_size(item)) is not None]
        if not items or len(sizes) < len(items):
            raise _RowError(
                f"has parts = {parts!r}, but parts must be whole, gated, a list of sizes, or a "
                f"list of such lists (a size is {_SIZE})"
            )
        segments.append(tuple(sizes))
    if kind != "split" and not row.get("shape"):
        raise _RowError('has parts, but parts need either rule = "split" or a shape')
    return tuple(segments)


def _check_choice(row: Mapping[str, object], name: str, allowed: tuple[str | None, ...]) -> None:
    """Raise unless a field is absent or has one of the allowed values."""
    if name in row and row[name] not in allowed:
        raise _RowError(
            f"has {name} = {row[name]!r}, but {name} must be {' or '.join(filter(None, allowed))}"
        )


def _parse_names(row: Mapping[str, object], name: str) -> tuple[str, ...]:
    """Return a field that is a list of names; () if it is absent."""
    value = row.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _RowError(f"has a {name} field that is not a list of strings")
    return tuple(value)


def _parse_text(row: Mapping[str, object], name: str) -> str | None:
    """Return a field that is text; None if it is absent."""
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise _RowError(f"has a {name} field that is not a string")
    return value


def _compile_pattern(row: Mapping[str, object], *, where: str, label: str) -> re.Pattern[str]:
    """Compile the field ``pattern``.

    Raises:
        UsageError: the field is missing or not a regular expression.
    """
    text = row.get("pattern")
    if not isinstance(text, str) or not text:
        raise UsageError(f"{where} has no pattern", file=label)
    try:
        return re.compile(text)
    except re.error as err:
        raise UsageError(
            f"{where}: {text!r} is not a valid regular expression: {err}", file=label
        ) from err
