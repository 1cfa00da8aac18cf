"""The table of all checks and their codes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import ModuleType

from core.checks.check import Check, Code
from core.checks.level import Level

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
