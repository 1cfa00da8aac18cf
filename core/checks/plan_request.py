"""What ``ckpt validate --plan-for tp=4,pp=2,format=torch_dist`` asks for; ``core.checks.planned`` answers it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from core.convert.job import DEFAULT_MEMORY_BYTES
from core.errors import CheckpointingException, UsageError

SIZES = ("tp", "pp", "vpp", "ep", "etp")
_EXAMPLE = "for example --plan-for tp=4,pp=2,format=torch_dist"


@dataclass(frozen=True, slots=True)
class Request:
    """The parallel sizes and the format that a checkpoint is to be loaded at or written in.

    Args:
        sizes: parallel sizes; those that are not named stay the source's.
        to: the format to write; None for that of the source, or rank files where it has no layout.
        rules: a TOML file with additional layout rules.
        memory_bytes: as for ``core.convert.job.Job``.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    to: str | None = None
    rules: Path | None = None
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    def __str__(self) -> str:
        words = [f"{name}={size}" for name, size in self.sizes.items()]
        return ",".join([*words, *([f"format={self.to}"] if self.to else [])])


def request_of(text: str, *, rules: Path | None = None, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> Request:
    """Parse ``tp=4,pp=2,format=torch_dist``.

    Raises:
        UsageError: a part is not NAME=VALUE, or names no size and no format.
    """
    sizes: dict[str, int] = {}
    to = None
    for part in text.split(","):
        name, equals, value = (word.strip().lower() for word in part.partition("="))
        if not equals or name in sizes or (name == "format" and to is not None):
            raise UsageError(f"--plan-for: {part!r} is not NAME=VALUE, each name once", hint=_EXAMPLE)
        if name == "format":
            to = _known_format(value)
        elif name in SIZES and value.isascii() and value.isdigit() and 1 <= int(value[:10]) < 2**31:
            sizes[name] = int(value[:10])
        else:
            what = f"{value!r} is no size" if name in SIZES else f"{name!r} is none of: {', '.join((*SIZES, 'format'))}"
            raise UsageError(f"--plan-for: {what}", hint=_EXAMPLE)
    return Request(sizes, to, rules, memory_bytes)


def _known_format(name: str) -> str:
    from core.formats.registry import format_called

    try:
        format_called(name)
    except CheckpointingException as err:
        raise UsageError(f"--plan-for: {err.message}", hint=err.hint) from err
    return name
