"""The options of ``ckpt validate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ckpt_cli.options.transfer import (
    CHECKS,
    OUTPUT,
    TALK,
    CheckedIteration,
    CheckedMissingChunks,
    Debug,
    Flag,
    Memory,
    ReadingThreads,
    RulesFile,
)
from ckpt_cli.options.values import one_of, whole

FORMATS = ("text", "json", "junit", "sarif", "github")
"""What a report can be written as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateOptions:
    """``ckpt validate``."""

    paths: Annotated[
        list[Path] | None,
        Argument(metavar="PATH…", parser=Path, help="Checkpoint directories, files of them, or training roots. [.]"),
    ] = None
    headers: Annotated[
        bool, Flag("--headers", rich_help_panel=CHECKS, help="Open every container: headers, offsets, sizes, strides.")
    ] = False
    deep: Annotated[
        bool, Flag("--deep", rich_help_panel=CHECKS, help="Read every byte once: CRCs, digests, NaN, replicas.")
    ] = False
    strict: Annotated[bool, Flag("--strict", rich_help_panel=CHECKS, help="Warnings count as errors.")] = False
    ignore: Annotated[
        list[str] | None,
        Option(
            "--ignore",
            metavar="CODE[:GLOB]",
            rich_help_panel=CHECKS,
            help="Leave out a code (CK101), all that begin so (CK7), or either in some files or keys; repeatable.",
        ),
    ] = None
    baseline: Annotated[
        Path | None,
        Option("--baseline", metavar="FILE", rich_help_panel=CHECKS, help="Findings that are known count no more."),
    ] = None
    write_baseline: Annotated[
        Path | None,
        Option("--write-baseline", metavar="FILE", rich_help_panel=CHECKS, help="Write what is found as a baseline."),
    ] = None
    against: Annotated[
        Path | None,
        Option(
            "--against",
            metavar="PATH",
            rich_help_panel=CHECKS,
            help="Whether all tensors are those of a manifest with fingerprints, or of another checkpoint.",
        ),
    ] = None
    plan_for: Annotated[
        str | None,
        Option(
            "--plan-for",
            metavar="tp=N,pp=N,…",
            rich_help_panel=CHECKS,
            help="Whether it can be resharded so, and written as format=FORMAT if that is given.",
        ),
    ] = None
    newest_valid: Annotated[
        bool,
        Flag(
            "--newest-valid",
            rich_help_panel=CHECKS,
            help="Print only the path of the newest iteration of a training root that is whole.",
        ),
    ] = False
    missing_chunks: CheckedMissingChunks = None
    iteration: CheckedIteration = None
    all_iterations: Annotated[
        bool, Flag("--all-iterations", rich_help_panel=CHECKS, help="Every iteration of a training root.")
    ] = False
    list_checks: Annotated[
        bool, Flag("--list-checks", rich_help_panel=CHECKS, help="Print all codes and what they mean, and exit.")
    ] = False

    format: Annotated[
        str | None,
        Option(
            "--format",
            metavar="FORMAT",
            parser=one_of(*FORMATS),
            rich_help_panel=OUTPUT,
            help=f"{', '.join(FORMATS)}. [text]",
        ),
    ] = None
    output: Annotated[
        Path | None,
        Option(
            "-o",
            "--output",
            metavar="FILE",
            rich_help_panel=OUTPUT,
            help="Write the report there; stdout then shows text.",
        ),
    ] = None
    report: Annotated[
        list[Path] | None,
        Option(
            "--report",
            metavar="FILE",
            parser=Path,
            rich_help_panel=OUTPUT,
            help="Write another report, as FILE's suffix says: .json, .xml (JUnit), .sarif, .txt; repeatable.",
        ),
    ] = None
    json: Annotated[bool, Flag("--json", rich_help_panel=OUTPUT, help="The same as --format json.")] = False
    limit: Annotated[
        int | None,
        Option(
            "--limit",
            metavar="N",
            parser=whole(0),
            rich_help_panel=OUTPUT,
            help="Show at most N places of a code as text; 0 for all. [8]",
        ),
    ] = None

    rules: RulesFile = None

    memory: Memory = None
    threads: ReadingThreads = None

    quiet: Annotated[
        bool, Flag("-q", "--quiet", rich_help_panel=TALK, help="Print nothing of checkpoints without errors.")
    ] = False
    debug: Debug = False
