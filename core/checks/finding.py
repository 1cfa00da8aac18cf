"""A finding: what a check has to say about a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """How bad it is; greater is worse."""

    NOTE = 1
    """Worth knowing; nothing is wrong."""
    WARNING = 2
    """The checkpoint can be used, but something is odd; ``--strict`` counts it as an error."""
    ERROR = 3
    """The checkpoint is damaged, incomplete, contradicts itself or is dangerous."""

    @property
    def label(self) -> str:
        """As reports write it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of one check.

    Args:
        code: stable, ``CK`` and three digits (``core.checks``).
        severity: usually the code's.
        message: one sentence: what is wrong.
        file: relative to the checkpoint.
        key: the tensor or object concerned; the first of ``keys``, where there are several.
        keys: all that are concerned, if they are more than one.
        rank: the rank or rank directory concerned.
        span: byte range ``(start, stop)`` in ``file``.
        expected, found: the two values that disagree, as short texts with their units.
        hint: what the user can do next; None takes the code's.
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
        """Sorts the worst first, then by code and place."""
        return (-self.severity, self.code, self.file or "", self.span or (0, 0), self.rank or "", self.key or "")

    @property
    def fingerprint(self) -> str:
        """What makes it the same finding in another run (``--baseline``): its code and place, not its wording."""
        return "|".join((self.code, self.file or "", self.rank or "", self.key or ""))

    def as_dict(self) -> dict[str, object]:
        """As a JSON object; absent parts are left out."""
        made: dict[str, object] = {"code": self.code, "severity": self.severity.label, "message": self.message}
        for name in ("file", "key", "rank", "expected", "found", "hint"):
            value = getattr(self, name)
            if value is not None:
                made[name] = value
        if self.keys:
            made["keys"] = list(self.keys)
        if self.span is not None:
            made["span"] = list(self.span)
        return made
