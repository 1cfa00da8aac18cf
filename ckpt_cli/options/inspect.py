"""The options of ``ckpt inspect``."""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.options.declaration import (
    OPTIONS,
    argument,
    debug_flag,
    iteration_option,
    json_flag,
    memory_option,
    missing_chunks_option,
    no_pager_flag,
    progress_option,
    report_option,
    storage_option,
    threads_option,
)
from ckpt_cli.options.shared.values import one_of, whole_number
from core.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """Options of ``ckpt inspect``."""

    path: Path = argument(
        "PATH", "Checkpoint directory, one of its files, or a training root.", default=Path()
    )
    keys: list[str] | None = argument(
        "KEY…",
        "Entries to show: names, patterns such as 'decoder.layers.[0-3].*', parts of "
        "names, or values such as args.hidden_size.",
        default=None,
    )
    iteration: int | None = iteration_option(OPTIONS)
    tree: bool | None = OPTIONS.flag(
        "--tree/--flat",
        "Folded tree (layers.[0-31]) or one line per tensor. [tree]",
        default=None,
    )
    optim: bool = OPTIONS.flag(
        "--optim", "Show the optimizer's tensors in the tree. [one line for all]"
    )
    sort: str | None = OPTIONS.option(
        "--sort name|size", "Sort order. [as stored]", parser=one_of("name", "size")
    )
    values: int = OPTIONS.option(
        "--values N",
        "Show the first N values of each tensor that KEY selects.",
        default=0,
        parser=whole_number(0, 10_000),
    )
    stats: bool = OPTIONS.flag(
        "--stats",
        "Read the model, or the tensors that KEY selects, and show min, max, mean, std, NaN, Inf, "
        "zeros and a histogram.",
    )
    sizes: bool = OPTIONS.flag("--sizes", "Show where the bytes are, with one bar per module.")
    ranks: bool = OPTIONS.flag(
        "--ranks", "Show what each rank holds: pipeline stages × tensor ranks (× expert ranks)."
    )
    map: bool = OPTIONS.flag("--map", "Draw the shards of KEY's tensors, with rank and file.")
    report: Path | None = report_option(
        "Also write a report with pictures, all tensors and their shards to FILE (.html)."
    )
    limit: int | None = OPTIONS.option(
        "--limit N",
        "Show at most N lines; 0 for all. [200 for a tree without a pager, else all]",
        parser=whole_number(0),
    )
    missing_chunks: str | None = missing_chunks_option(OPTIONS)
    all: bool = OPTIONS.flag(
        "--all", "Read every rank file (default: one per pipeline stage). Implied by KEY."
    )
    memory: int | None = memory_option(OPTIONS)
    threads: int | None = threads_option(
        "Number of reader threads for --stats. [one per core]", OPTIONS
    )
    storage_option: list[str] | None = storage_option(OPTIONS)
    progress: str | None = progress_option(
        OPTIONS, "How to show the progress of --stats on stderr. [a bar on a terminal, else log]"
    )
    json: bool = json_flag(OPTIONS)
    no_pager: bool = no_pager_flag(OPTIONS)
    debug: bool = debug_flag(OPTIONS)
