"""Groups of findings whose places differ only in numbers.

The place of a group contains ranges: ``__[0-7]_0.distcp``, ``decoder.layers.[0-31].weight``. They
contain exactly the numbers of the findings: findings in all files of two ranks except one do not
become "all files of both ranks".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial

from core.engine.catalog.key_patterns import ranges
from core.values import dataclass
from core.verbs.checks.check import Finding

_NUMBER = re.compile(r"(?<!\d)(\d{1,9})(?!\d)")
"""A number of at most nine digits; longer ones are rather hashes or time stamps than indices."""
_MARK = "\0"
"""Separates file, rank and key; escaped if one of them contains it."""


@dataclass(frozen=True, slots=True)
class FindingGroup:
    """Similar findings of one code.

    Args:
        findings: at least one.
        file, rank, key: their common place, with the numbers that vary in brackets.
    """

    findings: tuple[Finding, ...]
    file: str | None
    rank: str | None
    key: str | None

    @property
    def first(self) -> Finding:
        """The finding that is shown for the group."""
        return self.findings[0]

    @property
    def place(self) -> str:
        """The place as text, ``FILE · KEY · rank R · bytes 0–8``; "" for the whole checkpoint."""
        span = self.first.span if len(self.findings) == 1 else None
        parts = [self.file, self.key]
        if self.rank is not None:
            parts.append(self.rank if self.rank.startswith("mp_rank") else f"rank {self.rank}")
        if span is not None:
            parts.append(f"bytes {span[0]:,}–{span[1]:,}")
        return " · ".join(part for part in parts if part is not None)

    @property
    def other_keys(self) -> tuple[str, ...]:
        """The keys of findings about several tensors, without the first key of each finding."""
        return tuple(dict.fromkeys(key for finding in self.findings for key in finding.keys[1:]))

    @property
    def message(self) -> str:
        """The message with the expected and found values; one example of them if they vary."""
        texts = {message_of(finding) for finding in self.findings}
        return f"{'' if len(texts) == 1 else 'for example: '}{message_of(self.first)}"


def message_of(finding: Finding) -> str:
    """Return a finding's message with the expected and found values, if it has them."""
    pairs = (("expected", finding.expected), ("found", finding.found))
    values = [f"{name} {value}" for name, value in pairs if value is not None]
    return f"{finding.message} ({', '.join(values)})" if values else finding.message


def group_similar(findings: Iterable[Finding], *, path: str) -> list[FindingGroup]:
    """Group the findings that differ only in numbers, in the order of first appearance.

    Args:
        path: path of the checkpoint; a finding whose file is this path concerns no file in
            particular.
    """
    groups: dict[tuple[object, ...], list[tuple[list[str], Finding]]] = {}
    # Cached, as 10⁵ findings have a few messages.
    without_numbers = cache(partial(_NUMBER.sub, "#"))
    for finding in findings:
        # One text for the place, cut into its numbers and the texts around them. The sign before
        # each name distinguishes a name that is missing ("-") from an empty one ("+").
        names = (None if finding.file == path else finding.file, finding.rank, finding.key)
        place = _MARK.join(
            "-" if name is None else "+" + name.replace(_MARK, "\\x00") for name in names
        )
        parts = _NUMBER.split(place)
        texts, numbers = parts[::2], parts[1::2]
        kind = (finding.severity, finding.code, finding.hint, without_numbers(finding.message))
        groups.setdefault((*kind, *texts), []).append((numbers, finding))
    return [group for key, rows in groups.items() for group in _fold(list(map(str, key[4:])), rows)]


def _fold(texts: Sequence[str], rows: list[tuple[list[str], Finding]]) -> Iterator[FindingGroup]:
    """Join findings whose places have the same texts, and yield the groups.

    The numbers are joined one after the other, from the last to the first.

    Args:
        texts: the texts around the numbers of the places.
        rows: (numbers of the place, finding) of each finding.
    """
    merged = [(numbers, [finding]) for numbers, finding in rows]
    for i in reversed(range(len(texts) - 1)):
        # Rows whose other numbers are equal become one row, with their i-th numbers joined.
        by_others: dict[tuple[str, ...], list[tuple[str, list[Finding]]]] = {}
        for numbers, findings in merged:
            by_others.setdefault((*numbers[:i], *numbers[i + 1 :]), []).append(
                (numbers[i], findings)
            )
        # No two rows differ in this number alone.
        if len(by_others) == len(merged):
            continue
        merged = [
            (
                [*kept[:i], _join_numbers([number for number, _ in members]), *kept[i:]],
                [finding for _, findings in members for finding in findings],
            )
            for kept, members in by_others.items()
        ]
    # Put the numbers back between the texts, and cut the place into file, rank and key.
    for numbers, findings in merged:
        place = "".join(part for pair in zip(texts, [*numbers, ""], strict=True) for part in pair)
        names = [name[1:] if name.startswith("+") else None for name in place.split(_MARK)]
        yield FindingGroup(tuple(findings), *names)


def _join_numbers(numbers: Sequence[str]) -> str:
    """Return several numbers as one text, ``[0-7]``, or ``[00-07]`` if they have leading zeros."""
    distinct = set(numbers)
    if len(distinct) == 1:
        return numbers[0]
    # 1 and 01 are different names, which a range cannot express.
    if len(set(map(int, distinct))) < len(distinct):
        return f"[{','.join(sorted(distinct))}]"
    # Leading zeros survive in a range only if all numbers have the same width. The step of a range
    # (after ":") has none.
    text = ranges(map(int, distinct))
    width = len(numbers[0])
    if any(number.startswith("0") and len(number) > 1 for number in distinct):
        if any(len(number) != width for number in distinct):
            return f"[{','.join(sorted(distinct))}]"
        text = re.sub(r"(?<!:)\b\d+", lambda match: match[0].zfill(width), text)
    return f"[{text}]"
