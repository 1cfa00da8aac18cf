"""Key patterns: how users name some of the tensors of a checkpoint.

=================  ====================================================================
 written            means
=================  ====================================================================
 ``a.b``            that key, and every key below it (``a.b.weight``, ``a.b/shard_0_1``)
 ``*``, ``?``       any characters, dots too; any one character
 ``[0-31]``         the numbers 0 to 31, as ``ckpt inspect`` writes folded layers
 ``[0,2,4-6]``      some numbers; ``[0-30:2]``: every second one
 ``[abc]``          one of these characters; ``[!abc]``: none of them
=================  ====================================================================
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence

from core.errors import UsageError

LIST_THEM = "list the keys with: ckpt inspect SRC --flat"
"""The hint where a pattern matches nothing."""
MAX_LISTED = 8
"""Maximum number of keys that a message lists; of the others it gives the number."""

_NUMBERS = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*")
_WILD = re.compile(r"\[(!?[^\[\]]+)\]|\*|\?")
_MAX_NUMBERS = 100_000
_NUMBER = re.compile(r"(?<![^.\s])(0|[1-9]\d*)(?![^.\s/])")


def matching(keys: Iterable[str], pattern: str) -> list[str]:
    """Return the keys that ``pattern`` selects, in their order.

    A pattern that is itself a key selects that key and what is below it, whatever characters it
    has.

    Raises:
        UsageError: a number range is backwards or absurdly long.
    """
    keys = list(keys)
    below = (f"{pattern}.", f"{pattern}/", f"{pattern}:")
    exact = [key for key in keys if key == pattern or key.startswith(below)]
    if exact:
        return exact
    matches = matcher(pattern)
    return [key for key in keys if matches(key)]


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether ``pattern`` selects a key.

    Raises:
        UsageError: as for ``matching``.
    """
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
        elif _NUMBERS.fullmatch(inside) and (len(inside) > 1):
            numbers.append(_numbers_of(inside, pattern))
            parts.append(r"(0|[1-9]\d*)")
        else:
            negated = inside.startswith("!")
            chars = re.sub(r"([\\^\[\]])", r"\\\1", inside[1:] if negated else inside)
            parts.append(f"[{'^' if negated else ''}{chars}]")
    parts.append(re.escape(pattern[start:]))
    try:
        expression = re.compile("".join(parts) + r"(?:[./:].*)?", re.DOTALL)
    except re.error as err:
        raise UsageError(f"{pattern!r} is not a key pattern: {err}") from err

    def matches(key: str) -> bool:
        match = expression.fullmatch(key)
        if match is None:
            return False
        return all(
            int(text) in allowed for text, allowed in zip(match.groups(), numbers, strict=True)
        )

    return matches


def _numbers_of(text: str, pattern: str) -> frozenset[int]:
    """Return the numbers that a bracket of a pattern lists."""
    numbers: set[int] = set()
    for part in text.split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        values = range(int(first), int(last or first) + 1, max(int(step or 1), 1))
        if not values or len(values) + len(numbers) > _MAX_NUMBERS:
            raise UsageError(f"[{part}] in {pattern!r} is not a range of numbers")
        numbers.update(values)
    return frozenset(numbers)


def some_of(keys: Sequence[str]) -> str:
    """Return the first of at least one key as text, and how many more there are."""
    return keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"


def listed_keys(keys: Iterable[str]) -> str:
    """Return the first of some keys as text, and how many more there are."""
    all_keys = list(keys)
    more = f" and {len(all_keys) - MAX_LISTED:,} more" if len(all_keys) > MAX_LISTED else ""
    return ", ".join(all_keys[:MAX_LISTED]) + more


def rename_hint(keys: Sequence[str]) -> str:
    """Return the hint to give keys other names, with patterns for whole keys to type."""
    options = [f"--rename {shlex.quote(f'^{re.escape(key)}$=NEW')}" for key in keys[:MAX_LISTED]]
    more = f" and {len(keys) - MAX_LISTED:,} more" if len(keys) > MAX_LISTED else ""
    return f"rename {'them' if len(keys) > 1 else 'it'} with {' '.join(options)}{more}"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers in the notation that ``matcher`` reads: ``0-31``, ``0,2,5-7``, ``0-30:2``."""
    values = sorted(numbers)
    if len(values) > 2:
        step = values[1] - values[0]
        if step > 1 and values == list(range(values[0], values[-1] + 1, step)):
            return f"{values[0]}-{values[-1]}:{step}"
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def folded(lines: Iterable[str], *, end: str) -> list[str]:
    """Fold lines about keys that differ only in the numbers of layers and experts.

    ``layers.0.x (why)`` … become ``layers.[0-31].x (why)``. Brackets list every number that there
    was, so nothing is lost.

    Args:
        end: what ends the key, such as ``" ("``; a line without it has no key.

    Returns:
        The lines, in order of first appearance.
    """
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for line in lines:
        key, mark, rest = line.partition(end)
        parts = _NUMBER.split(key) if mark else [line]
        alike.setdefault((*parts[::2], mark + rest), []).append(parts[1::2])
    result: list[str] = []
    for (*texts, rest), rows in alike.items():
        for at in reversed(range(len(texts) - 1)):
            rows = _merged(rows, at)
        result += [
            "".join(part for pair in zip(texts, [*row, ""], strict=True) for part in pair) + rest
            for row in rows
        ]
    return result


def _merged(rows: Iterable[Sequence[str]], at: int) -> list[list[str]]:
    """Return the rows, merging those that differ only at one position.

    The merged row has all their numbers there.
    """
    numbers: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        numbers.setdefault((*row[:at], *row[at + 1 :]), []).append(row[at])
    return [
        [
            *rest[:at],
            texts[0] if len(set(texts)) == 1 else f"[{ranges(map(int, set(texts)))}]",
            *rest[at:],
        ]
        for rest, texts in numbers.items()
    ]
