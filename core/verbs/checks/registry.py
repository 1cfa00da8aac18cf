"""Registry of all checks."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from core.values import dataclass
from core.verbs.checks.check import Check, Level

HF_FORMATS = ("safetensors", "torch_bin")
"""Formats of directories that Hugging Face's libraries load."""


@dataclass(frozen=True, slots=True)
class CheckModule:
    """A module of checks before it is imported.

    Args:
        name: module of this package that has ``CHECKS``.
        level: the lowest level that runs one of its checks.
        formats: names of the formats that its checks apply to; () for all.
    """

    name: str
    level: Level = Level.METADATA
    formats: tuple[str, ...] = ()

    def load(self) -> ModuleType:
        """Import the module."""
        return import_module(f"core.verbs.checks.{self.name}")


MODULES = (
    CheckModule("containers.files"),
    CheckModule("metadata.tracker"),
    CheckModule("containers.torch_zips"),
    CheckModule("containers.safetensors_headers"),
    CheckModule("containers.zarr_chunks", formats=("zarr", "zarr3", "orbax")),
    CheckModule("containers.dcp_files", formats=("dcp", "torch_dist")),
    CheckModule(
        "containers.rank_files",
        formats=("megatron", "deepspeed", "deepspeed_universal", "torch_sharded"),
    ),
    CheckModule("metadata.index", formats=HF_FORMATS),
    CheckModule("metadata.hf_model", formats=HF_FORMATS),
    CheckModule("metadata.unsafe"),
    CheckModule("content.other_files", level=Level.DEEP),
    CheckModule("containers.extents"),
    CheckModule("content.unwritten"),
    CheckModule("metadata.geometry"),
    CheckModule("containers.items"),
    CheckModule("metadata.layout"),
    CheckModule("metadata.named_states"),
    CheckModule("metadata.optimizer", formats=("deepspeed", "megatron", "torch_dist", "zarr")),
    CheckModule("metadata.common_state"),
    CheckModule("metadata.rank_numbers", level=Level.HEADERS, formats=("megatron",)),
    CheckModule("metadata.copied_files", level=Level.HEADERS, formats=("megatron", "deepspeed")),
    CheckModule("content.crcs", level=Level.DEEP),
    CheckModule("content.values", level=Level.DEEP),
    CheckModule("content.replicas", level=Level.DEEP),
    CheckModule("content.manifests"),
    CheckModule("content.store_checksums"),
    CheckModule("content.integrity_json"),
    CheckModule("content.fingerprints"),
    CheckModule("metadata.above", formats=("deepspeed", "deepspeed_universal")),
    CheckModule("planned"),
    CheckModule("opening"),
)
"""The modules of checks, in the order in which these run.

Later checks skip what an earlier finding covers, so causes (files) come before consequences, and
``opening`` is last.
"""


def checks(level: Level, format: str | None) -> Iterator[Check]:
    """Yield the checks of a level for a format (None: unknown), in the order in which they run."""
    for row in MODULES:
        if row.level > level or (row.formats and format not in row.formats):
            continue
        for check in row.load().CHECKS:
            if check.level <= level and (not check.formats or format in check.formats):
                yield check
