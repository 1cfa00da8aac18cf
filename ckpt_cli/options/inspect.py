"""The options of ``ckpt inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ckpt_cli.options.shared.progress import progress_option
from ckpt_cli.options.shared.storage import storage_option
from ckpt_cli.options.shared.values import one_of, whole_number
from ckpt_cli.options.transfer import (
    Flag,
    iteration_option,
    memory_option,
    missing_chunks_option,
    report_option,
    threads_option,
)
from core.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """Options of ``ckpt inspect``."""

    path: Annotated[
        Path,
        Argument(
            metavar="PATH", help="Checkpoint directory, one of its files, or a training root."
        ),
    ] = Path()
    keys: Annotated[
        list[str] | None,
        Argument(
            metavar="KEY…",
            help="Entries to show: names, patterns such as 'decoder.layers.[0-3].*', parts of "
            "names, or values such as args.hidden_size.",
        ),
    ] = None
    iteration: Annotated[int | None, iteration_option("Options")] = None
    tree: Annotated[
        bool | None,
        Flag("--tree/--flat", help="Folded tree (layers.[0-31]), or one line per tensor. [tree]"),
    ] = None
    optim: Annotated[
        bool,
        Flag("--optim", help="Show the optimizer's tensors in the tree. [one line for all]"),
    ] = False
    sort: Annotated[
        str | None,
        Option(
            "--sort",
            metavar="name|size",
            parser=one_of("name", "size"),
            help="Sort order. [as stored]",
        ),
    ] = None
    values: Annotated[
        int,
        Option(
            "--values",
            metavar="N",
            parser=whole_number(0, 10_000),
            show_default=False,
            help="Show the first N values of each tensor that KEY selects.",
        ),
    ] = 0
    stats: Annotated[
        bool,
        Flag(
            "--stats",
            help="Read the model, or the tensors that KEY selects: min, max, mean, std, NaN, Inf, "
            "zeros, histogram.",
        ),
    ] = False
    sizes: Annotated[
        bool,
        Flag("--sizes", help="Show where the bytes are: a bar per module."),
    ] = False
    ranks: Annotated[
        bool,
        Flag(
            "--ranks",
            help="Show what each rank holds: pipeline stages × tensor ranks (× expert ranks).",
        ),
    ] = False
    map: Annotated[
        bool,
        Flag("--map", help="Draw the boxes of KEY's tensors, with rank and file."),
    ] = False
    report: Annotated[
        Path | None,
        report_option(
            "Also write the page with pictures, every tensor and its shards to FILE (.html)."
        ),
    ] = None
    limit: Annotated[
        int | None,
        Option(
            "--limit",
            metavar="N",
            parser=whole_number(0),
            help="Show at most N lines; 0 for all. [200 for a tree without pager, else all]",
        ),
    ] = None
    missing_chunks: Annotated[str | None, missing_chunks_option("Options")] = None
    all: Annotated[
        bool,
        Flag(
            "--all", help="Read every rank file (default: one per pipeline stage). Implied by KEY."
        ),
    ] = False
    memory: Annotated[int | None, memory_option("Memory limit.", None)] = None
    threads: Annotated[
        int | None, threads_option("Number of reading threads of --stats. [one per core]", None)
    ] = None
    storage_option: Annotated[list[str] | None, storage_option("Options")] = None
    progress: Annotated[
        str | None,
        progress_option(
            "Options", "Progress of --stats on stderr. [a bar on a terminal, else log]"
        ),
    ] = None
    json: Annotated[bool, Flag("--json", help="Print one JSON object.")] = False
    no_pager: Annotated[
        bool, Flag("--no-pager", help="Print a long page at once, not through a pager.")
    ] = False
    debug: Annotated[bool, Flag("--debug", help="Print a traceback on errors.")] = False
