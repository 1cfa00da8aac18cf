"""Find what is known about a message that ckpt or other software printed.

A message is recognised by words: each pattern of an entry is a set of words and of pairs of
neighbours, weighed by how few patterns have them. Names, shapes and paths in a pasted line are
further words, which do no harm. A few words from memory are enough if a pattern has all of them.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from core.values import dataclass

_LEAST_SHARE = 0.7
"""Least share of a pattern's weight that a text must have, to be taken for its message."""
_LEAST_OF_BEST = 0.5
"""Least weight of a further match, in parts of that of the best one."""
_MOST_LINES = 2_000
"""Last lines of a log in which messages are looked for."""
_FEW_WORDS = range(2, 7)
"""Numbers of words that are taken for a message from memory, not for a pasted one."""
_WORD = re.compile(r"[^\W\d_]{2,}|\[0\]")
"""A word, or the shape of an empty tensor."""
_MUST_HAVE = re.compile(r"`[^`]+`")
"""The part of a pattern without which a text is another message."""

Feature = str | tuple[str, str]
"""A word, or two that follow each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """An entry of ``messages.toml``: a message and what is known about it.

    Args:
        name: a few words with hyphens, by which ``ckpt explain`` finds the entry as well.
        title: the message as it is printed, ``…`` in place of what varies.
        printed_by: the software that prints it.
        patterns: what recognises it, as text.
        example: a line that was printed.
        meaning: what it says, in other words.
        causes: how it comes about.
        steps: what to do.
        commands: the commands for that; PATH, SRC and DST stand for the user's own.
        codes: codes of ``ckpt validate`` for the same thing.
        topics: pages of ``ckpt help`` about it.
        reported: public issues, as ``OWNER/NAME#NUMBER``.
    """

    name: str
    title: str
    printed_by: str
    patterns: tuple[str, ...]
    example: str
    meaning: str
    causes: tuple[str, ...]
    steps: tuple[str, ...]
    commands: tuple[str, ...]
    codes: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    reported: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeCause:
    """An entry of ``causes.toml``: how findings of some codes come about.

    Args:
        codes: the codes.
        text: how they come about.
        commands: the commands that tell more, or mend it.
    """

    codes: tuple[str, ...]
    text: str
    commands: tuple[str, ...]


@cache
def read_messages() -> Mapping[str, Message]:
    """Return the entries of ``messages.toml`` by name."""
    entries = [Message(**_as_tuples(row)) for row in _read_rows("messages.toml")]
    return {entry.name: entry for entry in entries}


@cache
def read_causes() -> Mapping[str, CodeCause]:
    """Return the entries of ``causes.toml`` by code."""
    causes = [CodeCause(**_as_tuples(row)) for row in _read_rows("causes.toml")]
    return {code: cause for cause in causes for code in cause.codes}


def match_messages(text: str, *, printed_by: str | None = None) -> list[Message]:
    """Return the entries whose message is in a text, the likeliest first.

    Each line of the text is tried, and each two that follow each other: logs wrap messages.

    Args:
        printed_by: the software that printed the text, of whose messages it is one word by word.
    """
    # The error stands at the end of a log, whose lines repeat.
    lines = [line for line in text.splitlines() if line.strip()]
    lines = list(dict.fromkeys(lines[-_MOST_LINES:]))
    texts = [frozenset(_list_features(part)) for part in (*lines, *map(" ".join, pairwise(lines)))]
    best: dict[str, tuple[float, float]] = {}
    for entry in read_messages().values():
        if printed_by not in (None, entry.printed_by):
            continue
        scores = [
            _score(pattern, present, is_verbatim=printed_by is not None)
            for pattern in entry.patterns
            for present in texts
        ]
        best[entry.name] = max(scores, default=(0, 0))
    least = max(_LEAST_OF_BEST * max(best.values(), default=(0, 0))[0], 1e-9)
    names = sorted((name for name in best if best[name][0] >= least), key=lambda name: best[name])
    return [read_messages()[name] for name in reversed(names)]


def _score(pattern: str, present: frozenset[Feature], *, is_verbatim: bool) -> tuple[float, float]:
    """Return how much of a pattern a text has: the weight, and its share; zeros for no match.

    Args:
        present: the features of the text.
        is_verbatim: the text is not a few words from memory.
    """
    wanted, must_have, total = _analyze(pattern)
    is_short = not is_verbatim and len(present) <= 2 * _FEW_WORDS.stop
    if not (must_have <= present or is_short):
        return (0, 0)
    weight_of = _weigh_features()
    weight = sum(weight_of[feature] for feature in wanted & present)
    share = weight / total
    is_pasted = share >= _LEAST_SHARE and must_have <= present
    words = {feature for feature in present if isinstance(feature, str)} if is_short else set()
    is_from_memory = is_short and len(words) in _FEW_WORDS and words <= wanted
    return (weight, share) if is_pasted or is_from_memory else (0, 0)


@cache
def _analyze(pattern: str) -> tuple[frozenset[Feature], frozenset[Feature], float]:
    """Return the features of a pattern, the words that a text must have, and the total weight.

    The rarest word of the pattern is one of those.
    """
    weight_of = _weigh_features()
    wanted = frozenset(_list_features(pattern))
    rarest = max(_list_words(pattern), key=lambda word: weight_of[word])
    named = (word for part in _MUST_HAVE.findall(pattern) for word in _list_words(part))
    return wanted, frozenset((rarest, *named)), sum(weight_of[feature] for feature in wanted)


def _list_features(text: str) -> Iterator[Feature]:
    """Yield the words of a text, and the pairs of neighbours on the same side of each ``…``."""
    for part in text.split("…"):
        words = _list_words(part)
        yield from words
        yield from pairwise(words)


def _list_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without the ``s`` of plurals."""
    words = _WORD.findall(text.lower())
    return [word if len(word) < 4 else word.rstrip("s") for word in words]


@cache
def _weigh_features() -> Mapping[Feature, float]:
    """Return the weight of every feature of the patterns: the rarer, the heavier."""
    patterns = [pattern for entry in read_messages().values() for pattern in entry.patterns]
    counts = Counter(
        feature for pattern in patterns for feature in frozenset(_list_features(pattern))
    )
    return {feature: math.log(1 + len(patterns) / n) for feature, n in counts.items()}


def _read_rows(name: str) -> list[dict[str, object]]:
    """Return the tables ``[[entry]]`` of a file of this package."""
    rows: list[dict[str, object]] = tomllib.loads(
        Path(__file__).with_name(name).read_text(encoding="utf-8")
    )["entry"]
    return rows


def _as_tuples(row: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a table, lists as tuples, texts on one line."""
    return {
        name: tuple(value) if isinstance(value, list) else " ".join(str(value).split())
        for name, value in row.items()
    }
