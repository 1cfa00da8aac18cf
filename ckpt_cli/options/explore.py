"""The options of ``ckpt explore``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from ckpt_cli.options.shared.storage import storage_option
from ckpt_cli.options.transfer import (
    Flag,
    iteration_option,
    memory_option,
    missing_chunks_option,
    threads_option,
)
from core.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreOptions:
    """Options of ``ckpt explore``."""

    path: Annotated[
        Path,
        Argument(
            metavar="PATH", help="Checkpoint directory, one of its files, or a training root."
        ),
    ] = Path()
    iteration: Annotated[int | None, iteration_option("Options")] = None
    missing_chunks: Annotated[str | None, missing_chunks_option("Options")] = None
    memory: Annotated[int | None, memory_option("Memory limit.", None)] = None
    threads: Annotated[
        int | None, threads_option("Number of reading threads. [one per core]", None)
    ] = None
    storage_option: Annotated[list[str] | None, storage_option("Options")] = None
    debug: Annotated[bool, Flag("--debug", help="Print a traceback on errors.")] = False
