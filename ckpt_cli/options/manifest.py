"""The options of ``ckpt manifest``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ckpt_cli.options.shared.progress import ProgressForm
from ckpt_cli.options.shared.storage import StorageOptions
from ckpt_cli.options.transfer import (
    OUTPUT,
    TALK,
    Debug,
    Flag,
    Iteration,
    Json,
    Memory,
    MissingChunks,
    ReadingThreads,
    RulesFile,
)
from core.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestOptions:
    """Options of ``ckpt manifest``."""

    path: Annotated[
        Path,
        Argument(
            metavar="PATH", help="Checkpoint directory, one of its files, or a training root."
        ),
    ] = Path()
    fingerprints: Annotated[
        bool,
        Flag(
            "--fingerprints/--no-fingerprints",
            rich_help_panel=OUTPUT,
            help="Include tensor fingerprints. [yes]",
        ),
    ] = True
    output: Annotated[
        Path | None,
        Option(
            "-o",
            "--output",
            metavar="FILE",
            rich_help_panel=OUTPUT,
            help="Write the manifest to FILE instead of next to the data.",
        ),
    ] = None
    force: Annotated[
        bool, Flag("--force", "-f", rich_help_panel=OUTPUT, help="Replace an existing manifest.")
    ] = False
    iteration: Iteration = None
    missing_chunks: MissingChunks = None
    rules: RulesFile = None
    memory: Memory = None
    threads: ReadingThreads = None
    json: Json = False
    quiet: Annotated[
        bool, Flag("-q", "--quiet", rich_help_panel=TALK, help="Print only errors.")
    ] = False
    storage_option: StorageOptions = None
    progress: ProgressForm = None
    debug: Debug = False
