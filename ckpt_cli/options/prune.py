"""The options of ``ckpt prune``."""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.options.declaration import (
    CHECKS,
    CONTENT,
    MESSAGES,
    OUTPUT,
    argument,
    debug_flag,
    json_flag,
    memory_option,
    progress_option,
    storage_option,
    threads_option,
)
from ckpt_cli.options.shared.values import whole_number
from core.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneOptions:
    """Options of ``ckpt prune``."""

    root: Path = argument("ROOT", "Directory or URL that contains the iterations.")
    keep_last: int | None = CONTENT.option(
        "--keep-last N", "Keep the newest N valid iterations.", parser=whole_number(1)
    )
    keep_every: int | None = CONTENT.option(
        "--keep-every N", "Also keep iterations divisible by N.", parser=whole_number(1)
    )
    deep: bool = CHECKS.flag(
        "--deep", "Read every byte of an iteration before treating it as valid."
    )
    trust_metadata: bool = CHECKS.flag(
        "--trust-metadata",
        "Remove iterations even if the newest valid iteration's data was not read.",
    )
    dry_run: bool = OUTPUT.flag(
        "-n, --dry-run", "Show what would be removed without removing anything."
    )
    yes: bool = OUTPUT.flag(
        "-y, --yes", "Do not ask for confirmation; required without a terminal and with --json."
    )
    memory: int | None = memory_option()
    threads: int | None = threads_option()
    json: bool = json_flag()
    quiet: bool = MESSAGES.flag("-q, --quiet", "Print only errors.")
    storage_option: list[str] | None = storage_option()
    progress: str | None = progress_option()
    debug: bool = debug_flag()
