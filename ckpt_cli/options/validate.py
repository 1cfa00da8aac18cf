"""The options of ``ckpt validate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ckpt_cli.options.shared.progress import ProgressForm
from ckpt_cli.options.shared.storage import StorageOptions
from ckpt_cli.options.shared.values import one_of, whole_number
from ckpt_cli.options.transfer import (
    CHECKS,
    OUTPUT,
    TALK,
    CheckedIteration,
    CheckedMissingChunks,
    Debug,
    Flag,
    Memory,
    NoPager,
    ReadingThreads,
    RulesFile,
)
from core.files.remote_path import location_of
from core.values import dataclass

FORMATS = ("text", "json", "junit", "sarif", "github")
"""Report formats that ``--format`` accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateOptions:
    """Options of ``ckpt validate``."""

    paths: Annotated[
        list[Path] | None,
        Argument(
            metavar="PATH…",
            parser=location_of,
            help="Checkpoint directories, files in them, or training roots. [.]",
        ),
    ] = None
    # What is checked, and which findings count.
    headers: Annotated[
        bool,
        Flag(
            "--headers",
            rich_help_panel=CHECKS,
            help="Also read every container's headers: offsets, sizes, strides.",
        ),
    ] = False
    deep: Annotated[
        bool,
        Flag(
            "--deep",
            rich_help_panel=CHECKS,
            help="Also read every byte: checksums, digests, NaN, replicas.",
        ),
    ] = False
    strict: Annotated[
        bool, Flag("--strict", rich_help_panel=CHECKS, help="Treat warnings as errors.")
    ] = False
    ignore: Annotated[
        list[str] | None,
        Option(
            "--ignore",
            metavar="CODE[:GLOB]",
            rich_help_panel=CHECKS,
            help="Ignore a code (CK101), a group (CK7), or either in matching files or keys only; "
            "repeatable.",
        ),
    ] = None
    baseline: Annotated[
        Path | None,
        Option(
            "--baseline",
            metavar="FILE",
            rich_help_panel=CHECKS,
            help="Ignore findings recorded in FILE.",
        ),
    ] = None
    write_baseline: Annotated[
        Path | None,
        Option(
            "--write-baseline",
            metavar="FILE",
            rich_help_panel=CHECKS,
            help="Record the findings in FILE, for --baseline.",
        ),
    ] = None
    against: Annotated[
        Path | None,
        Option(
            "--against",
            metavar="PATH",
            rich_help_panel=CHECKS,
            help="Compare all tensors with another checkpoint or with a manifest's fingerprints.",
        ),
    ] = None
    plan_for: Annotated[
        str | None,
        Option(
            "--plan-for",
            metavar="tp=N,pp=N,…",
            rich_help_panel=CHECKS,
            help="Check that the checkpoint can be resharded to these sizes "
            "(and, with format=FORMAT, written in that format).",
        ),
    ] = None
    newest_valid: Annotated[
        bool,
        Flag(
            "--newest-valid",
            rich_help_panel=CHECKS,
            help="Print only the path of the newest valid iteration in a training root.",
        ),
    ] = False
    missing_chunks: CheckedMissingChunks = None
    iteration: CheckedIteration = None
    all_iterations: Annotated[
        bool,
        Flag(
            "--all-iterations",
            rich_help_panel=CHECKS,
            help="Check every iteration in a training root.",
        ),
    ] = False
    list_checks: Annotated[
        bool,
        Flag(
            "--list-checks",
            rich_help_panel=CHECKS,
            help="List all codes and their meaning, and exit.",
        ),
    ] = False

    # Where the report goes, and in which format.
    format: Annotated[
        str | None,
        Option(
            "--format",
            metavar="FORMAT",
            parser=one_of(*FORMATS),
            rich_help_panel=OUTPUT,
            help=f"Report format: {', '.join(FORMATS)}. [text]",
        ),
    ] = None
    output: Annotated[
        Path | None,
        Option(
            "-o",
            "--output",
            metavar="FILE",
            rich_help_panel=OUTPUT,
            help="Write the report to FILE; stdout then shows text.",
        ),
    ] = None
    report: Annotated[
        list[Path] | None,
        Option(
            "--report",
            metavar="FILE",
            parser=Path,
            rich_help_panel=OUTPUT,
            help="Write another report, in the format of FILE's suffix: "
            ".html (with pictures), .json, .xml (JUnit), .sarif, .txt; repeatable.",
        ),
    ] = None
    json: Annotated[bool, Flag("--json", rich_help_panel=OUTPUT, help="Same as --format json.")] = (
        False
    )
    limit: Annotated[
        int | None,
        Option(
            "--limit",
            metavar="N",
            parser=whole_number(0),
            rich_help_panel=OUTPUT,
            help="Show at most N locations per code in text; 0 for all. [8]",
        ),
    ] = None

    rules: RulesFile = None

    memory: Memory = None
    threads: ReadingThreads = None

    quiet: Annotated[
        bool,
        Flag(
            "-q",
            "--quiet",
            rich_help_panel=TALK,
            help="Print nothing for checkpoints without errors.",
        ),
    ] = False
    no_pager: NoPager = False
    storage_option: StorageOptions = None
    progress: ProgressForm = None
    debug: Debug = False
