"""The checks of ``ckpt validate``: a table of functions with stable codes.

A check is one function from a ``Subject`` to findings. It lives in a module of this package, whose ``CODES`` and
``CHECKS`` are collected here. Checks collect: they go on after a finding, and never raise for what a file holds.

Codes are stable: a code never changes its meaning, and one that is given up is not used again.

======  ==============================================================================
CK1xx   files and containers: missing, extra, truncated, broken zips, headers, chunks
CK2xx   metadata: chunks that do not tile their tensor, dtypes and shapes that disagree
CK3xx   layout: ranks, replicas, layers, tied copies, padded rows
CK4xx   optimizer
CK5xx   common state, tracker, indexes
CK6xx   safety: what a pickle names, names that lead outside
CK7xx   content, with ``--deep``: CRCs, NaN, constant tensors, replicas
CK8xx   manifests, integrity.json, fingerprints
CK9xx   what was asked beside: ``--plan-for``
======  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from core.finding import Finding, Severity

if TYPE_CHECKING:
    from core.checks.subject import Subject


class Level(IntEnum):
    """How much is read."""

    METADATA = 1
    """File names, sizes and metadata; one file of those that look alike."""
    HEADERS = 2
    """Every container is opened: its directory, its headers, where each array lies."""
    DEEP = 3
    """Every byte, once."""


@dataclass(frozen=True, slots=True)
class Code:
    """What a code means.

    Args:
        code: ``CK`` and three digits.
        severity: of its findings.
        title: a few words, for tables.
        hint: what to do about it.
        level: from which level on it can be found.
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
        """A finding of this code; ``keys`` are all its keys where it has no single one."""
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


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Args:
        run: the function.
        level: from which level on it runs.
        formats: names of the formats it is for; () for all.
    """

    run: Callable[[Subject], Iterable[Finding]]
    level: Level = Level.METADATA
    formats: tuple[str, ...] = ()


_MODULES = (
    *("files", "tracker", "torch_zips", "safetensors_headers", "zarr_chunks", "dcp_files", "rank_files", "index"),
    "hf_model",
    *("unsafe", "other_files"),
    "extents",
    *("geometry", "items", "layout", "named_states", "optimizer", "common_state", "rank_numbers"),
    *("crcs", "values", "replicas"),
    *("manifests", "integrity_json", "fingerprints"),
    "above",
    "planned",
    "opening",
)
"""Modules of this package, in the order in which their checks run; ``opening`` is last."""


@cache
def codes() -> dict[str, Code]:
    """Every code, in order."""
    found = {code.code: code for module in _modules() for code in module.CODES}
    return dict(sorted(found.items()))


def checks(level: Level, format: str | None) -> Iterator[Check]:
    """The checks of a level for a format (None: not known), in the order in which they run."""
    for module in _modules():
        for check in module.CHECKS:
            if check.level <= level and (not check.formats or format in check.formats):
                yield check


def _modules() -> Iterator[ModuleType]:
    for name in _MODULES:
        yield import_module(f"core.checks.{name}")
