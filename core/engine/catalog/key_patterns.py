"""Key patterns, with which users select tensors of a checkpoint.

=================  ====================================================================
 pattern            selects
=================  ====================================================================
 ``a.b``            that key, and every key below it (``a.b.weight``, ``a.b/shard_0_1``)
 ``*``, ``?``       any characters, dots too; any single character
 ``[0-31]``         the numbers 0 to 31, as ``ckpt inspect`` writes folded layers
 ``[0,2,4-6]``      these numbers; ``[0-30:2]``: every second number
 ``[abc]``          one of these characters; ``[!abc]``: any other character
=================  ====================================================================
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise, takewhile

from core.errors import UsageError
from core.values import dataclass

LIST_THEM = "list the keys with: ckpt inspect SRC --flat"
"""Hint for a pattern that matches nothing."""
MAX_LISTED = 8
"""Maximum number of keys that a message lists; the others are counted."""

_NUMBERS = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*")
_WILD = re.compile(r"\[(!?[^\[\]]+)\]|\*|\?")
_MAX_NUMBERS = 100_000
_NUMBER = re.compile(r"(?<![^.\s])(0|[1-9]\d{0,17})(?![^.\s/])")
"""A number that is a complete component of a key; more than 18 digits do not number anything."""


def find_shared_prefix(keys: Iterable[str]) -> str:
    """Return the components that all keys begin with, and the dot behind them; "" for none.

    At least one component of each key remains: ``app.model.`` for ``app.model.a`` and
    ``app.model.b.c``.
    """
    keys = list(keys)
    if not keys:
        return ""
    # What the first and the last in order share, all share.
    first, last = min(keys).split("."), max(keys).split(".")
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(first[:-1], last[:-1], strict=False))
    return "".join(f"{name}." for name, _ in shared)


def matching(keys: Iterable[str], pattern: str) -> list[str]:
    """Return the keys that ``pattern`` selects, in their order.

    A pattern that is itself a key selects that key and all keys below it, even if it contains
    special characters.

    Raises:
        UsageError: not a valid pattern, or a range of numbers is reversed or far too long.
    """
    keys = list(keys)
    # Literally first, because keys may contain brackets.
    below = (f"{pattern}.", f"{pattern}/", f"{pattern}:")
    exact = [key for key in keys if key == pattern or key.startswith(below)]
    if exact:
        return exact
    matches = matcher(pattern)
    return [key for key in keys if matches(key)]


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return a predicate that is true for the keys that ``pattern`` selects.

    Raises:
        UsageError: as for ``matching``.
    """
    # Translate the pattern to a regular expression. It captures each number of a ``[0-31]``, and
    # ``numbers`` holds the numbers that are allowed for each capture.
    parts = []
    numbers: list[frozenset[int]] = []
    start = 0
    for wild in _WILD.finditer(pattern):
        parts.append(re.escape(pattern[start : wild.start()]))
        start = wild.end()
        inside = wild[1]
        if wild[0] == "*":
            parts.append(".*")
        elif wild[0] == "?":
            parts.append(".")
        # A single digit selects the same as number or as character, and captures nothing.
        elif _NUMBERS.fullmatch(inside) and len(inside) > 1:
            numbers.append(_parse_numbers(inside, pattern))
            parts.append(r"(0|[1-9]\d{0,17})")
        else:
            negated = inside.startswith("!")
            chars = re.sub(r"([\\^\[\]])", r"\\\1", inside[1:] if negated else inside)
            parts.append(f"[{'^' if negated else ''}{chars}]")
    parts.append(re.escape(pattern[start:]))
    # Keys below the selected key are selected too.
    try:
        expression = re.compile("".join(parts) + r"(?:[./:].*)?", re.DOTALL)
    except re.error as err:
        raise UsageError(f"{pattern!r} is not a valid key pattern: {err}") from err

    def matches(key: str) -> bool:
        match = expression.fullmatch(key)
        if match is None:
            return False
        return all(
            int(text) in allowed for text, allowed in zip(match.groups(), numbers, strict=True)
        )

    return matches


def _parse_numbers(text: str, pattern: str) -> frozenset[int]:
    """Parse the numbers in the brackets of a pattern, such as ``0,2,4-6`` or ``0-30:2``.

    Raises:
        UsageError: a range is reversed, or there are too many numbers.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        values = range(int(first), int(last or first) + 1, max(int(step or 1), 1))
        if not values or len(values) + len(numbers) > _MAX_NUMBERS:
            raise UsageError(f"[{part}] in {pattern!r} is not a valid number range")
        numbers.update(values)
    return frozenset(numbers)


def some_of(keys: Sequence[str]) -> str:
    """Format one or more keys for a message: the first key, and the number of the others."""
    return keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"


def rename_hint(keys: Sequence[str]) -> str:
    """Return a hint with the ``--rename`` options that rename each of these keys."""
    options = [f"--rename {shlex.quote(f'^{re.escape(key)}$=NEW')}" for key in keys[:MAX_LISTED]]
    more = f" and {len(keys) - MAX_LISTED:,} more" if len(keys) > MAX_LISTED else ""
    return f"rename {'them' if len(keys) > 1 else 'it'} with {' '.join(options)}{more}"


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers in names by value: layer 2 before layer 10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers in the notation of ``matcher``: ``0-31``, ``0,2,5-7``, ``0-30:2``."""
    values = sorted(numbers)
    # Evenly spaced numbers are one range.
    if len(values) > 2:
        step = values[1] - values[0]
        if step > 1 and all(b - a == step for a, b in pairwise(values)):
            return f"{values[0]}-{values[-1]}:{step}"
    return ",".join(
        str(first) if first == last else f"{first}-{last}" for first, last in runs_of(values)
    )


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Return ascending numbers as runs ``[first, last]`` of consecutive ones."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def folded(lines: Iterable[str], *, end: str) -> list[str]:
    """Fold lines about keys that differ only in the numbers of layers and experts.

    Args:
        end: the text that ends the key, such as ``": "``; a line without it has no key.

    Returns:
        The lines, in order of first appearance.
    """
    parts = (line.partition(end) for line in lines)
    return fold_labels((key, mark + rest) if mark else ("", key) for key, mark, rest in parts)


def fold_labels(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Fold lines about keys that differ only in the numbers of layers and experts.

    ``layers.0.x (why)`` … become ``layers.[0-31].x (why)``. Brackets list exactly the numbers of
    the folded lines, so nothing is lost.

    Args:
        lines: (key, ending) of each line; "" for a line that begins with no key.

    Returns:
        The lines, in order of first appearance.
    """
    # Group the lines that are equal except for their numbers.
    groups: dict[tuple[str, ...], list[_Row]] = {}
    for key, rest in lines:
        parts = _NUMBER.split(key)
        groups.setdefault((*parts[::2], rest), []).append(_Row(tuple(parts[1::2])))
    return [
        _label(texts, row) + ending
        for (*texts, ending), rows in groups.items()
        for row in _fold_rows(rows)
    ]


def fold_keys(kinds: Mapping[str, Hashable]) -> list[tuple[str, list[str]]]:
    """Fold keys that differ only in the numbers of layers and experts.

    Args:
        kinds: key → what folded keys have in common, such as dtype and shape.

    Returns:
        (label, keys) in order of first appearance. A label lists exactly the numbers of its keys,
        like ``layers.[0-31].x``; that of a single key is the key.
    """
    groups: dict[tuple[Hashable, ...], list[_Row]] = {}
    for key, kind in kinds.items():
        parts = _NUMBER.split(key)
        row = _Row(tuple(parts[1::2]), (key,))
        groups.setdefault((kind, *parts[::2]), []).append(row)
    return [
        (_label(map(str, texts), row), list(row.keys))
        for (_, *texts), rows in groups.items()
        for row in _fold_rows(rows)
    ]


def split_numbers(key: str) -> list[str]:
    """Split a key at the numbers that are complete components, such as those of layers.

    Returns:
        Texts and, at odd positions, the numbers between them.
    """
    return _NUMBER.split(key)


@dataclass(frozen=True, slots=True)
class _Row:
    """The numbers of one or more keys, as they are shown, and the keys if they are wanted."""

    numbers: tuple[str, ...]
    keys: tuple[str, ...] = ()


def _label(texts: Iterable[str], row: _Row) -> str:
    """Join the texts between the numbers of a row with these numbers."""
    return "".join(part for pair in zip(texts, (*row.numbers, ""), strict=True) for part in pair)


def _fold_rows(rows: list[_Row]) -> list[_Row]:
    """Merge rows, from the last position to the first: experts fold before their layers."""
    for position in reversed(range(len(rows[0].numbers))):
        rows = _merge_rows(rows, position)
    return rows


def _merge_rows(rows: Iterable[_Row], position: int) -> list[_Row]:
    """Merge the rows that differ only at one position.

    Returns:
        The merged rows, with the range of all their numbers at that position.
    """
    alike: dict[tuple[str, ...], list[_Row]] = {}
    for row in rows:
        others = (*row.numbers[:position], *row.numbers[position + 1 :])
        alike.setdefault(others, []).append(row)
    merged = []
    for others, members in alike.items():
        texts = dict.fromkeys(row.numbers[position] for row in members)
        text = next(iter(texts)) if len(texts) == 1 else f"[{ranges(map(int, texts))}]"
        keys = tuple(key for row in members for key in row.keys)
        merged.append(_Row((*others[:position], text, *others[position:]), keys))
    return merged
