"""The options of ``ckpt prune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ckpt_cli.options.shared.progress import ProgressForm
from ckpt_cli.options.shared.storage import StorageOptions
from ckpt_cli.options.shared.values import whole_number
from ckpt_cli.options.transfer import (
    CHECKS,
    CONTENT,
    OUTPUT,
    TALK,
    Debug,
    Flag,
    Json,
    Memory,
    ReadingThreads,
)
from core.files.remote_path import location_of
from core.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneOptions:
    """Options of ``ckpt prune``."""

    root: Annotated[
        Path,
        Argument(
            metavar="ROOT",
            parser=location_of,
            help="Directory or URL that contains the iterations.",
        ),
    ]
    keep_last: Annotated[
        int | None,
        Option(
            "--keep-last",
            metavar="N",
            parser=whole_number(1),
            rich_help_panel=CONTENT,
            help="Keep the newest N valid iterations.",
        ),
    ] = None
    keep_every: Annotated[
        int | None,
        Option(
            "--keep-every",
            metavar="N",
            parser=whole_number(1),
            rich_help_panel=CONTENT,
            help="Keep iterations divisible by N, too.",
        ),
    ] = None
    deep: Annotated[
        bool,
        Flag(
            "--deep",
            rich_help_panel=CHECKS,
            help="Read every byte of an iteration before it counts as valid.",
        ),
    ] = False
    trust_metadata: Annotated[
        bool,
        Flag(
            "--trust-metadata",
            rich_help_panel=CHECKS,
            help="Remove iterations though the data of the one that stays were not read.",
        ),
    ] = False
    dry_run: Annotated[
        bool,
        Flag(
            "--dry-run",
            "-n",
            rich_help_panel=OUTPUT,
            help="Show what would be removed; remove nothing.",
        ),
    ] = False
    yes: Annotated[
        bool,
        Flag(
            "--yes",
            "-y",
            rich_help_panel=OUTPUT,
            help="Do not ask; needed where there is no terminal to ask on, and with --json.",
        ),
    ] = False
    memory: Memory = None
    threads: ReadingThreads = None
    json: Json = False
    quiet: Annotated[
        bool, Flag("-q", "--quiet", rich_help_panel=TALK, help="Print only errors.")
    ] = False
    storage_option: StorageOptions = None
    progress: ProgressForm = None
    debug: Debug = False
