"""Registry of all checks and their codes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import ModuleType

from core.checks.check import Check, Code
from core.checks.level import Level

_MODULES = (
    *(
        "containers.files",
        "metadata.tracker",
        "containers.torch_zips",
        "containers.safetensors_headers",
        "containers.zarr_chunks",
        "containers.dcp_files",
        "containers.rank_files",
        "metadata.index",
    ),
    "metadata.hf_model",
    *("metadata.unsafe", "content.other_files"),
    *("containers.extents", "content.unwritten"),
    *(
        "metadata.geometry",
        "containers.items",
        "metadata.layout",
        "metadata.named_states",
        "metadata.optimizer",
        "metadata.common_state",
        "metadata.rank_numbers",
        "metadata.copied_files",
    ),
    *("content.crcs", "content.values", "content.replicas"),
    *("content.manifests", "content.store_checksums"),
    *("content.integrity_json", "content.fingerprints"),
    "metadata.above",
    "planned",
    "opening",
)
"""Modules of this package, in the order in which their checks run.

Later checks skip what an earlier finding covers, so causes (files) come before consequences, and
``opening`` is last.
"""


@cache
def codes() -> dict[str, Code]:
    """Return all codes by name, sorted."""
    by_name = {code.code: code for module in _modules() for code in module.CODES}
    return dict(sorted(by_name.items()))


def checks(level: Level, format: str | None) -> Iterator[Check]:
    """Yield the checks of a level for a format (None: unknown), in the order in which they run."""
    for module in _modules():
        for check in module.CHECKS:
            if check.level <= level and (not check.formats or format in check.formats):
                yield check


def _modules() -> Iterator[ModuleType]:
    for name in _MODULES:
        yield import_module(f"core.checks.{name}")
