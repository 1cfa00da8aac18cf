"""Findings that differ in numbers of their place only, as one: ``__[0-7]_0.distcp``, ``decoder.layers.[0-31].weight``.

Nothing is lost: brackets hold exactly the numbers that there were, so findings at all files of two ranks but one do
not fold into "all files of both ranks".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from core.catalog.key_patterns import ranges
from core.checks.finding import Finding

_NUMBER = re.compile(r"(?<!\d)(\d{1,9})(?!\d)")
_MARK = "\0"
"""Stands between file, rank and key; where it is in one of them, it is spelled out."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Some findings of one code.

    Args:
        findings: at least one.
        file, rank, key: where, with the numbers that vary in brackets.
    """

    findings: tuple[Finding, ...]
    file: str | None
    rank: str | None
    key: str | None

    @property
    def first(self) -> Finding:
        """The one that is shown where they differ."""
        return self.findings[0]

    @property
    def where(self) -> str:
        """``FILE · KEY · rank R · bytes 0–8``; "" if it is the whole checkpoint."""
        span = self.first.span if len(self.findings) == 1 else None
        parts = [
            self.file,
            self.key,
            None if self.rank is None else self.rank if self.rank.startswith("mp_rank") else f"rank {self.rank}",
            None if span is None else f"bytes {span[0]:,}–{span[1]:,}",
        ]
        return " · ".join(part for part in parts if part is not None)

    @property
    def others(self) -> tuple[str, ...]:
        """The keys of findings about several, but for the first of each."""
        return tuple(dict.fromkeys(key for finding in self.findings for key in finding.keys[1:]))

    @property
    def what(self) -> str:
        """The message with what was expected and found; of the first finding, if they are not the same in all."""
        texts = {sentence(finding) for finding in self.findings}
        return f"{'' if len(texts) == 1 else 'such as: '}{sentence(self.first)}"


def sentence(finding: Finding) -> str:
    """The message, and the two values that disagree where the message does not name them itself."""
    pairs = (("expected", finding.expected), ("found", finding.found))
    values = [f"{name} {value}" for name, value in pairs if value is not None]
    return f"{finding.message} ({', '.join(values)})" if values else finding.message


def alike(findings: Iterable[Finding], *, path: str) -> list[Alike]:
    """The findings, folded; in order of first appearance.

    Args:
        path: of the checkpoint; a finding at it is one at no file in particular.
    """
    groups: dict[tuple[object, ...], list[tuple[list[str], Finding]]] = {}
    without_numbers = cache(partial(_NUMBER.sub, "#"))  # 10⁵ findings have a few messages
    for finding in findings:
        texts, numbers = _split(finding if finding.file != path else replace(finding, file=None))
        marks = (finding.severity, finding.code, finding.hint, without_numbers(finding.message))
        groups.setdefault((*marks, *texts), []).append((numbers, finding))
    return [one for key, rows in groups.items() for one in _folded(list(map(str, key[4:])), rows)]


def _split(finding: Finding) -> tuple[list[str], list[str]]:
    """The texts around the numbers of a finding's place, and the numbers."""
    place = _MARK.join(
        "-" if name is None else "+" + name.replace(_MARK, "\\x00")
        for name in (finding.file, finding.rank, finding.key)
    )
    parts = _NUMBER.split(place)
    return parts[::2], parts[1::2]


def _folded(texts: Sequence[str], rows: list[tuple[list[str], Finding]]) -> Iterator[Alike]:
    """Rows that have the same texts, with as many numbers joined as can be."""
    merged = [(numbers, [finding]) for numbers, finding in rows]
    for at in reversed(range(len(texts) - 1)):
        alike: dict[tuple[str, ...], list[tuple[str, list[Finding]]]] = {}
        for numbers, found in merged:
            alike.setdefault((*numbers[:at], *numbers[at + 1 :]), []).append((numbers[at], found))
        if len(alike) == len(merged):
            continue  # no two differ in this number alone
        merged = [
            (
                [*others[:at], _joined([number for number, _ in values]), *others[at:]],
                _all(found for _, found in values),
            )
            for others, values in alike.items()
        ]
    for numbers, found in merged:
        place = "".join(part for pair in zip(texts, [*numbers, ""], strict=True) for part in pair)
        names = [name[1:] if name.startswith("+") else None for name in place.split(_MARK)]
        yield Alike(tuple(found), *names)


def _all(lists: Iterable[list[Finding]]) -> list[Finding]:
    return [finding for one in lists for finding in one]


def _joined(numbers: Sequence[str]) -> str:
    """Some numbers as one text; leading zeros stay."""
    distinct = set(numbers)
    if len(distinct) == 1:
        return numbers[0]
    if len(set(map(int, distinct))) < len(distinct):  # 1 and 01 are different names
        return f"[{','.join(sorted(distinct))}]"
    text = ranges(map(int, distinct))
    width = len(numbers[0])
    if any(number.startswith("0") and len(number) > 1 for number in distinct):
        if any(len(number) != width for number in distinct):
            return f"[{','.join(sorted(distinct))}]"
        text = re.sub(r"(?<!:)\b\d+", lambda found: found[0].zfill(width), text)
    return f"[{text}]"
