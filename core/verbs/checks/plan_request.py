"""Parse the request of ``ckpt validate --plan-for tp=4,pp=2,format=torch_dist``.

``core.verbs.checks.planned`` answers it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from core.errors import CheckpointingException, UsageError, did_you_mean
from core.values import dataclass
from core.verbs.convert.job import DEFAULT_MEMORY_BYTES

SIZES = ("tp", "pp", "vpp", "ep", "etp")
_DIGITS = re.compile("[0-9]+")
_EXAMPLE = "for example --plan-for tp=4,pp=2,format=torch_dist"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The parallel sizes and the format to load or write a checkpoint with.

    Args:
        sizes: requested parallel sizes by name (``SIZES``); others stay as in the source.
        to: format to write; None for the source's, or rank files if the source has no layout.
        rules: TOML file with additional layout rules.
        memory_bytes: memory limit of the job.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    to: str | None = None
    rules: Path | None = None
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    def __str__(self) -> str:
        words = [f"{name}={size}" for name, size in self.sizes.items()]
        return ",".join([*words, *([f"format={self.to}"] if self.to else [])])


def parse_plan_request(
    text: str, *, rules: Path | None = None, memory_bytes: int = DEFAULT_MEMORY_BYTES
) -> PlanRequest:
    """Parse ``tp=4,pp=2,format=torch_dist``.

    Raises:
        UsageError: a part is not NAME=VALUE, a name or a format is unknown, a name is repeated, or
            a size is not a positive integer.
    """
    from core.formats.registry import format_called

    sizes: dict[str, int] = {}
    to = None
    for part in text.split(","):
        name, equals, value = (word.strip().lower() for word in part.partition("="))
        if not equals or name in sizes or (name == "format" and to is not None):
            raise UsageError(
                f"--plan-for: {part!r} is not NAME=VALUE or repeats a name", hint=_EXAMPLE
            )
        if name == "format":
            # Resolve the name here, so that a misspelt format is a usage error and not a finding.
            try:
                format_called(value)
            except CheckpointingException as err:
                raise UsageError(f"--plan-for: {err.message}", hint=err.hint) from err
            to = value
        elif name not in SIZES:
            allowed = ", ".join((*SIZES, "format"))
            raise UsageError(
                f"--plan-for: unknown name {name!r} (expected one of: {allowed})",
                hint=did_you_mean(name, (*SIZES, "format")) or _EXAMPLE,
            )
        # Python refuses to convert very long digit strings; no size has more than ten digits.
        elif _DIGITS.fullmatch(value) and len(value) <= 10 and 1 <= int(value) < 2**31:
            sizes[name] = int(value)
        else:
            raise UsageError(f"--plan-for: invalid size {value!r}", hint=_EXAMPLE)
    return PlanRequest(sizes, to, rules, memory_bytes)
