"""Checks, and the codes of their findings."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from core.values import dataclass
from core.verbs.checks.finding import Finding, Severity
from core.verbs.checks.level import Level

if TYPE_CHECKING:
    from core.verbs.checks.subject import Subject


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
