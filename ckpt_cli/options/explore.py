"""The options of ``ckpt explore``."""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.options.declaration import (
    OPTIONS,
    argument,
    debug_flag,
    iteration_option,
    memory_option,
    missing_chunks_option,
    storage_option,
    threads_option,
)
from core.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreOptions:
    """Options of ``ckpt explore``."""

    path: Path = argument(
        "PATH", "Checkpoint directory, one of its files, or a training root.", default=Path()
    )
    iteration: int | None = iteration_option(OPTIONS)
    missing_chunks: str | None = missing_chunks_option(OPTIONS)
    memory: int | None = memory_option(OPTIONS)
    threads: int | None = threads_option(panel=OPTIONS)
    storage_option: list[str] | None = storage_option(OPTIONS)
    debug: bool = debug_flag(OPTIONS)
