"""``ckpt validate --plan-for``: whether a checkpoint can be loaded at, or resharded to, other parallel sizes.

Nothing is estimated: the job is prepared as ``ckpt reshard`` and ``ckpt convert`` prepare theirs, up to the point where
bytes would move, so that what fits here fits there.
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
class Request:
    """What is asked.

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
    """The request that ``tp=4,pp=2,format=torch_dist`` is.

    Raises:
        UsageError: it is none.
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
