"""The options of ``ckpt manifest``."""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.options.declaration import (
    CONTENT,
    MESSAGES,
    OUTPUT,
    argument,
    debug_flag,
    iteration_option,
    json_flag,
    memory_option,
    missing_chunks_option,
    progress_option,
    rules_option,
    storage_option,
    threads_option,
)
from core.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestOptions:
    """Options of ``ckpt manifest``."""

    path: Path = argument(
        "PATH", "Checkpoint directory, one of its files, or a training root.", default=Path()
    )
    fingerprints: bool = OUTPUT.flag(
        "--fingerprints/--no-fingerprints", "Include tensor fingerprints. [yes]", default=True
    )
    output: Path | None = OUTPUT.option(
        "-o, --output FILE", "Write the manifest to FILE instead of next to the data."
    )
    force: bool = OUTPUT.flag("-f, --force", "Replace an existing manifest.")
    iteration: int | None = iteration_option(OUTPUT)
    missing_chunks: str | None = missing_chunks_option(CONTENT)
    rules: Path | None = rules_option()
    memory: int | None = memory_option()
    threads: int | None = threads_option()
    json: bool = json_flag()
    quiet: bool = MESSAGES.flag("-q, --quiet", "Print only errors.")
    storage_option: list[str] | None = storage_option()
    progress: str | None = progress_option()
    debug: bool = debug_flag()
