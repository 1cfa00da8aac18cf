"""Findings: the results of checks."""

from __future__ import annotations

from enum import IntEnum

from core.values import dataclass


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
