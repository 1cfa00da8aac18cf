"""The options of ``ckpt diff``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ckpt_cli.options.shared.progress import ProgressForm
from ckpt_cli.options.shared.storage import StorageOptions
from ckpt_cli.options.shared.values import whole_number
from ckpt_cli.options.transfer import (
    CHECKS,
    CONTENT,
    LAYOUT,
    TALK,
    Debug,
    Flag,
    Json,
    Memory,
    MissingChunks,
    NoOptim,
    NoPager,
    RulesFile,
    report_option,
    threads_option,
)
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
        raise UsageError(f"{text!r} is not a number of at least 0")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """Options of ``ckpt diff``."""

    a: Annotated[
        Path,
        Argument(metavar="A", help="First checkpoint: a directory, a file or a training root."),
    ]
    b: Annotated[
        Path, Argument(metavar="B", help="Second checkpoint; its format and layout may differ.")
    ]
    # How tensors are compared; without a tolerance, bit for bit.
    rtol: Annotated[
        float | None,
        Option(
            "--rtol",
            metavar="X",
            parser=_tolerance,
            rich_help_panel=CHECKS,
            help="Compare by value: equal if |A-B| <= ATOL + X·|B|, also across dtypes. "
            "[bit for bit]",
        ),
    ] = None
    atol: Annotated[
        float | None,
        Option(
            "--atol",
            metavar="X",
            parser=_tolerance,
            rich_help_panel=CHECKS,
            help="ATOL in the formula of --rtol. [0]",
        ),
    ] = None
    nan_differs: Annotated[
        bool,
        Flag(
            "--nan-differs",
            rich_help_panel=CHECKS,
            help="With --rtol or --atol: NaN is not equal to NaN.",
        ),
    ] = False
    stat_only: Annotated[
        bool,
        Flag(
            "--stat-only",
            rich_help_panel=CHECKS,
            help="Compare names, shapes, dtypes and entries; read no tensor.",
        ),
    ] = False
    read: Annotated[
        bool,
        Flag(
            "--read",
            rich_help_panel=CHECKS,
            help="Read the tensors even if both manifests have fingerprints.",
        ),
    ] = False
    # What is compared.
    include: Annotated[
        list[str] | None,
        Option(
            "--include",
            metavar="GLOB",
            rich_help_panel=CONTENT,
            help="Compare only tensors that match; repeatable.",
        ),
    ] = None
    exclude: Annotated[
        list[str] | None,
        Option(
            "--exclude",
            metavar="GLOB",
            rich_help_panel=CONTENT,
            help="Skip tensors and entries that match; repeatable.",
        ),
    ] = None
    tensors_only: Annotated[
        bool,
        Flag(
            "--tensors-only",
            rich_help_panel=CONTENT,
            help="Skip arguments, settings, counters and random states.",
        ),
    ] = False
    no_optim: NoOptim = False
    strip_prefix: Annotated[
        list[str] | None,
        Option(
            "--strip-prefix",
            metavar="TEXT",
            rich_help_panel=CONTENT,
            help="Remove this prefix from keys if more of them then match; repeatable.",
        ),
    ] = None
    # How the checkpoints are read.
    iteration: Annotated[
        int | None,
        Option(
            "--iteration",
            metavar="N",
            parser=whole_number(0),
            rich_help_panel=LAYOUT,
            help="Iteration to read, if A is a training root.",
        ),
    ] = None
    iteration_b: Annotated[
        int | None,
        Option(
            "--iteration-b",
            metavar="N",
            parser=whole_number(0),
            rich_help_panel=LAYOUT,
            help="Iteration to read, if B is a training root.",
        ),
    ] = None
    missing_chunks: MissingChunks = None
    rules: RulesFile = None
    memory: Memory = None
    threads: Annotated[
        int | None,
        threads_option("Number of threads. [2]"),
    ] = None
    # What is printed.
    report: Annotated[
        Path | None,
        report_option("Also write a heat map and the worst tensors to FILE (.html).", TALK),
    ] = None
    map: Annotated[
        bool,
        Flag(
            "--map",
            rich_help_panel=TALK,
            help="Draw layers × modules: where the checkpoints differ, and how much.",
        ),
    ] = False
    limit: Annotated[
        int | None,
        Option(
            "--limit",
            metavar="N",
            parser=whole_number(0),
            rich_help_panel=TALK,
            help="Show at most N lines of each list; 0 for all. [10]",
        ),
    ] = None
    flat: Annotated[
        bool,
        Flag("--flat", rich_help_panel=TALK, help="One line per tensor, without folding layers."),
    ] = False
    json: Json = False
    quiet: Annotated[
        bool, Flag("-q", "--quiet", rich_help_panel=TALK, help="Print only the verdict.")
    ] = False
    no_pager: NoPager = False
    storage_option: StorageOptions = None
    progress: ProgressForm = None
    debug: Debug = False
