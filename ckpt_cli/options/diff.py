"""The options of ``ckpt diff``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

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
    RulesFile,
    threads_option,
)
from ckpt_cli.options.values import whole


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise BadParameter(f"{text!r} is not a number of at least 0")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """``ckpt diff``."""

    a: Annotated[Path, Argument(metavar="A", help="A checkpoint: a directory, a file or a training root.")]
    b: Annotated[Path, Argument(metavar="B", help="The other one; it may be of another format and layout.")]
    rtol: Annotated[
        float | None,
        Option(
            "--rtol",
            metavar="X",
            parser=_tolerance,
            rich_help_panel=CHECKS,
            help="Compare by value: equal where |A-B| <= ATOL + X·|B|, also across dtypes. [bit for bit]",
        ),
    ] = None
    atol: Annotated[
        float | None,
        Option("--atol", metavar="X", parser=_tolerance, rich_help_panel=CHECKS, help="The ATOL of --rtol. [0]"),
    ] = None
    nan_differs: Annotated[
        bool,
        Flag("--nan-differs", rich_help_panel=CHECKS, help="With --rtol or --atol: NaN does not equal NaN."),
    ] = False
    stat_only: Annotated[
        bool, Flag("--stat-only", rich_help_panel=CHECKS, help="Names, shapes, dtypes and entries; reads no tensor.")
    ] = False
    read: Annotated[
        bool, Flag("--read", rich_help_panel=CHECKS, help="Read the tensors although both manifests have fingerprints.")
    ] = False
    include: Annotated[
        list[str] | None,
        Option("--include", metavar="GLOB", rich_help_panel=CONTENT, help="Compare only these tensors; repeatable."),
    ] = None
    exclude: Annotated[
        list[str] | None,
        Option("--exclude", metavar="GLOB", rich_help_panel=CONTENT, help="Leave these tensors and entries out."),
    ] = None
    tensors_only: Annotated[
        bool, Flag("--tensors-only", rich_help_panel=CONTENT, help="No arguments, settings, counters, random states.")
    ] = False
    no_optim: NoOptim = False
    strip_prefix: Annotated[
        list[str] | None,
        Option(
            "--strip-prefix",
            metavar="TEXT",
            rich_help_panel=CONTENT,
            help="Take this off keys that begin with it, where that brings more keys together.",
        ),
    ] = None
    iteration: Annotated[
        int | None,
        Option(
            "--iteration",
            metavar="N",
            parser=whole(0),
            rich_help_panel=LAYOUT,
            help="Which iteration of A, a training root.",
        ),
    ] = None
    iteration_b: Annotated[
        int | None,
        Option("--iteration-b", metavar="N", parser=whole(0), rich_help_panel=LAYOUT, help="Which iteration of B."),
    ] = None
    missing_chunks: MissingChunks = None
    rules: RulesFile = None
    memory: Memory = None
    threads: Annotated[
        int | None,
        threads_option("Threads. [2]"),
    ] = None
    limit: Annotated[
        int | None,
        Option(
            "--limit",
            metavar="N",
            parser=whole(0),
            rich_help_panel=TALK,
            help="Show at most N lines of each list; 0 for all. [10]",
        ),
    ] = None
    flat: Annotated[bool, Flag("--flat", rich_help_panel=TALK, help="One line a tensor; layers are not folded.")] = (
        False
    )
    json: Json = False
    quiet: Annotated[bool, Flag("-q", "--quiet", rich_help_panel=TALK, help="Print the verdict only.")] = False
    debug: Debug = False
