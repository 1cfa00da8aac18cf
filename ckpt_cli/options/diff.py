"""The options of ``ckpt diff``."""

from __future__ import annotations

import math
from pathlib import Path

from ckpt_cli.options.declaration import (
    CHECKS,
    CONTENT,
    LAYOUT,
    MESSAGES,
    argument,
    debug_flag,
    json_flag,
    memory_option,
    missing_chunks_option,
    no_optim_flag,
    no_pager_flag,
    progress_option,
    report_option,
    rules_option,
    storage_option,
    threads_option,
)
from ckpt_cli.options.shared.values import whole_number
from core.errors import UsageError
from core.values import dataclass


def _tolerance(text: str) -> float:
    """Parse a tolerance, a finite number of at least 0.

    Raises:
        UsageError: the text is not such a number.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"{text!r} is not a number ≥ 0")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """Options of ``ckpt diff``."""

    a: Path = argument("A", "First checkpoint: a directory, a file or a training root.")
    b: Path = argument("B", "Second checkpoint; its format and layout may differ.")
    # How tensors are compared; without a tolerance, bit for bit.
    rtol: float | None = CHECKS.option(
        "--rtol X",
        "Compare by value: equal if |A-B| <= ATOL + X·|B|, also across dtypes. [bit for bit]",
        parser=_tolerance,
    )
    atol: float | None = CHECKS.option(
        "--atol X", "ATOL in the --rtol formula. [0]", parser=_tolerance
    )
    nan_differs: bool = CHECKS.flag(
        "--nan-differs", "With --rtol or --atol: treat NaN as different from NaN."
    )
    stat_only: bool = CHECKS.flag(
        "--stat-only", "Compare names, shapes, dtypes and entries without reading tensors."
    )
    read: bool = CHECKS.flag("--read", "Read the tensors even if both manifests have fingerprints.")
    # What is compared.
    include: list[str] | None = CONTENT.option(
        "--include GLOB", "Compare only tensors that match; repeatable."
    )
    exclude: list[str] | None = CONTENT.option(
        "--exclude GLOB", "Skip tensors and entries that match; repeatable."
    )
    tensors_only: bool = CONTENT.flag(
        "--tensors-only", "Skip arguments, settings, counters and RNG states."
    )
    no_optim: bool = no_optim_flag()
    strip_prefix: list[str] | None = CONTENT.option(
        "--strip-prefix TEXT",
        "Remove this prefix from keys if more keys match without it; repeatable.",
    )
    # How the checkpoints are read.
    iteration: int | None = LAYOUT.option(
        "--iteration N", "Iteration to read, if A is a training root.", parser=whole_number(0)
    )
    iteration_b: int | None = LAYOUT.option(
        "--iteration-b N", "Iteration to read, if B is a training root.", parser=whole_number(0)
    )
    missing_chunks: str | None = missing_chunks_option(CONTENT)
    rules: Path | None = rules_option()
    memory: int | None = memory_option()
    threads: int | None = threads_option("Number of threads. [2]")
    # What is printed.
    report: Path | None = report_option(
        "Also write a heat map and the worst tensors to FILE (.html).", MESSAGES
    )
    map: bool = MESSAGES.flag(
        "--map", "Draw a map of layers × modules: where the checkpoints differ, and by how much."
    )
    limit: int | None = MESSAGES.option(
        "--limit N", "Show at most N lines of each list; 0 for all. [10]", parser=whole_number(0)
    )
    flat: bool = MESSAGES.flag("--flat", "Print one line per tensor, without folding layers.")
    json: bool = json_flag()
    quiet: bool = MESSAGES.flag("-q, --quiet", "Print only the verdict.")
    no_pager: bool = no_pager_flag()
    storage_option: list[str] | None = storage_option()
    progress: str | None = progress_option()
    debug: bool = debug_flag()
