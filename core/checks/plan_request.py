"""Parse the request of ``ckpt validate --plan-for tp=4,pp=2,format=torch_dist``.

``core.checks.planned`` answers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from core.convert.job import DEFAULT_MEMORY_BYTES
from core.errors import CheckpointingException, UsageError

SIZES = ("tp", "pp", "vpp", "ep", "etp")
_EXAMPLE = "for example --plan-for tp=4,pp=2,format=torch_dist"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The parallel sizes and the format that a checkpoint should be loaded at or written in.

    Args:
        sizes: requested parallel sizes; others stay as in the source.
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
        UsageError: a part is not NAME=VALUE, or a name or value is unknown or given twice.
    """
    sizes: dict[str, int] = {}
    to = None
    for part in text.split(","):
        name, equals, value = (word.strip().lower() for word in part.partition("="))
        if not equals or name in sizes or (name == "format" and to is not None):
            raise UsageError(
                f"--plan-for: {part!r} is not NAME=VALUE, or repeats a name", hint=_EXAMPLE
            )
        if name == "format":
            to = _require_format(value)
        elif name in SIZES and value.isascii() and value.isdigit() and 1 <= int(value[:10]) < 2**31:
            sizes[name] = int(value[:10])
        else:
            allowed = ", ".join((*SIZES, "format"))
            problem = (
                f"invalid size {value!r}"
                if name in SIZES
                else f"unknown name {name!r}, expected one of: {allowed}"
            )
            raise UsageError(f"--plan-for: {problem}", hint=_EXAMPLE)
    return PlanRequest(sizes, to, rules, memory_bytes)


def _require_format(name: str) -> str:
    """Return the name of a format; raise UsageError if no format is called so."""
    from core.formats.registry import format_called

    try:
        format_called(name)
    except CheckpointingException as err:
        raise UsageError(f"--plan-for: {err.message}", hint=err.hint) from err
    return name
