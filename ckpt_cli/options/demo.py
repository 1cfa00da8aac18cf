"""The options of ``ckpt demo``."""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.options.declaration import OPTIONS, argument, debug_flag
from core.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of ``ckpt demo``."""

    dir: Path = argument(
        "DIR", "Directory to create; if it exists, it must be empty.", default=Path("playground")
    )
    debug: bool = debug_flag(OPTIONS)
