"""Checks, the codes of their findings, and the findings themselves."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from core.values import dataclass

if TYPE_CHECKING:
    from core.verbs.checks.subject import Subject


class Level(IntEnum):
    """The amount of data that ``ckpt validate`` reads; each level includes those below."""

    METADATA = 1
    """File names, sizes and metadata; one file of each group with similar names and equal sizes."""
    HEADERS = 2
    """Every container is opened: directory, headers and the position of each array."""
    DEEP = 3
    """Every byte is read."""


class Severity(IntEnum):
    """The severity of a finding; a greater value is worse."""

    NOTE = 1
    """Worth knowing; nothing is wrong."""
    WARNING = 2
    """The checkpoint can be used, but is unusual; ``--strict`` counts the finding as an error."""
    ERROR = 3
    """The checkpoint is damaged, incomplete, contradicts itself or is dangerous."""

    @property
    def label(self) -> str:
        """Name of the severity in reports."""
        return self.name.lower()


HOSTILE = ("CK110", "CK601")
"""Codes of files that would run code or lead out of the checkpoint: nobody should fetch them again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of one check.

    Args:
        code: stable, ``CK`` and three digits (``core.verbs.checks``).
        severity: that of the code, unless the check overrides it.
        message: what is wrong, in one clause.
        file: path relative to the checkpoint.
        key: name of the affected tensor or object; the first of ``keys`` if there are several.
        keys: names of all affected tensors or objects, if more than one.
        rank: the affected rank or rank directory.
        span: byte range ``(start, stop)`` in ``file``.
        expected, found: the two values that disagree, as short texts with units.
        hint: what the user can do next; None if nothing is known.
    """

    code: str
    severity: Severity
    message: str
    file: str | None = None
    key: str | None = None
    rank: str | None = None
    span: tuple[int, int] | None = None
    expected: str | None = None
    found: str | None = None
    hint: str | None = None
    keys: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key: the worst finding first, what would run code before all, by code and place."""
        return (
            -self.severity,
            self.code not in HOSTILE,
            self.code,
            self.file or "",
            self.span or (0, 0),
            self.rank or "",
            self.key or "",
        )

    @property
    def fingerprint(self) -> str:
        """Identity of the finding across runs, for ``--baseline``.

        It consists of code, file, rank and key, so that a reworded message does not change it.
        """
        return "|".join((self.code, self.file or "", self.rank or "", self.key or ""))

    def as_dict(self) -> dict[str, object]:
        """Return the finding as a JSON object, without the fields that are None or empty."""
        fields: dict[str, object] = {
            "code": self.code,
            "severity": self.severity.label,
            "message": self.message,
        }
        for name in ("file", "key", "rank", "expected", "found", "hint"):
            value = getattr(self, name)
            if value is not None:
                fields[name] = value
        if self.keys:
            fields["keys"] = list(self.keys)
        if self.span is not None:
            fields["span"] = list(self.span)
        return fields


@dataclass(frozen=True, slots=True)
class Code:
    """A finding code and its meaning.

    Args:
        code: ``CK`` and three digits.
        severity: default severity of its findings.
        title: a few words, for tables.
        hint: default next step for the user.
        level: the lowest level that can find it.
    """

    code: str
    severity: Severity
    title: str
    hint: str
    level: Level = Level.METADATA

    def finding(
        self,
        message: str,
        *,
        file: str | None = None,
        key: str | None = None,
        rank: str | None = None,
        span: tuple[int, int] | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
        severity: Severity | None = None,
        keys: Sequence[str] = (),
    ) -> Finding:
        """Build a finding with this code; the arguments are the fields of ``Finding``.

        Args:
            key: name of a single tensor or object.
            keys: names of several tensors or objects; the first one becomes ``key``.
            hint, severity: override those of the code.
        """
        return Finding(
            code=self.code,
            severity=severity or self.severity,
            message=message,
            file=file,
            key=keys[0] if keys and key is None else key,
            rank=rank,
            span=span,
            expected=None if expected is None else str(expected),
            found=None if found is None else str(found),
            hint=hint or self.hint,
            keys=tuple(keys) if len(keys) > 1 else (),
        )

    def missing_file(
        self,
        message: str,
        file: str,
        *,
        key: str | None = None,
        rank: str | None = None,
        expected: str | None = None,
        hint: str | None = None,
    ) -> Finding:
        """Build a finding about a file that does not exist; ``expected`` is its name by default."""
        return self.finding(
            message,
            file=file,
            key=key,
            rank=rank,
            expected=expected or file,
            found="no such file",
            hint=hint,
        )


@cache
def codes() -> Mapping[str, Code]:
    """Read ``codes.toml``: the codes by name, in order."""
    table = tomllib.loads(Path(__file__).with_name("codes.toml").read_text("utf-8"))
    return {
        name: Code(
            name,
            Severity[row["severity"].upper()],
            row["title"],
            row["hint"],
            Level[row.get("level", "metadata").upper()],
        )
        for name, row in table.items()
    }


def get_code(name: str) -> Code:
    """Return the code with a name, such as CK101.

    Raises:
        KeyError: there is none.
    """
    return codes()[name]


@dataclass(frozen=True, slots=True)
class Check:
    """One check: a function that yields findings about a ``Subject``.

    Args:
        run: the function.
        level: the lowest level that runs it.
        formats: names of the formats that it applies to; () for all.
    """

    run: Callable[[Subject], Iterable[Finding]]
    level: Level = Level.METADATA
    formats: tuple[str, ...] = ()
