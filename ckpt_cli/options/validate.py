"""The options of ``ckpt validate``."""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.options.declaration import (
    CHECKS,
    MESSAGES,
    OUTPUT,
    argument,
    debug_flag,
    iteration_option,
    memory_option,
    missing_chunks_option,
    no_pager_flag,
    progress_option,
    rules_option,
    storage_option,
    threads_option,
)
from ckpt_cli.options.shared.values import one_of, whole_number
from core.values import dataclass

FORMATS = ("text", "json", "junit", "sarif", "github")
"""Report formats that ``--format`` accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateOptions:
    """Options of ``ckpt validate``."""

    paths: list[Path] | None = argument(
        "PATH…", "Checkpoint directories, files in them, or training roots. [.]", default=None
    )
    # What is checked, and which findings count.
    headers: bool = CHECKS.flag(
        "--headers", "Also read every container's headers: offsets, sizes, strides."
    )
    deep: bool = CHECKS.flag("--deep", "Also read every byte: checksums, digests, NaN, replicas.")
    strict: bool = CHECKS.flag("--strict", "Treat warnings as errors.")
    ignore: list[str] | None = CHECKS.option(
        "--ignore CODE[:GLOB]",
        "Ignore a code (CK101) or a group of codes (CK7); with GLOB, only in matching files or "
        "keys; repeatable.",
    )
    baseline: Path | None = CHECKS.option("--baseline FILE", "Ignore findings recorded in FILE.")
    write_baseline: Path | None = CHECKS.option(
        "--write-baseline FILE", "Record the findings in FILE for use with --baseline."
    )
    against: Path | None = CHECKS.option(
        "--against PATH",
        "Compare all tensors with another checkpoint or with a manifest's fingerprints.",
    )
    plan_for: str | None = CHECKS.option(
        "--plan-for tp=N,pp=N,…",
        "Check that the checkpoint can be resharded to these sizes "
        "(and, with format=FORMAT, written in that format).",
    )
    newest_valid: bool = CHECKS.flag(
        "--newest-valid", "Print only the path of the newest valid iteration in a training root."
    )
    missing_chunks: str | None = missing_chunks_option(CHECKS)
    iteration: int | None = iteration_option(CHECKS)
    all_iterations: bool = CHECKS.flag(
        "--all-iterations", "Check every iteration in a training root."
    )
    list_checks: bool = CHECKS.flag(
        "--list-checks", "List all codes and their meanings, then exit."
    )

    # Where the report goes, and in which format.
    format: str | None = OUTPUT.option(
        "--format FORMAT", f"Report format: {', '.join(FORMATS)}. [text]", parser=one_of(*FORMATS)
    )
    output: Path | None = OUTPUT.option(
        "-o, --output FILE", "Write the report to FILE; stdout then shows text."
    )
    report: list[Path] | None = OUTPUT.option(
        "--report FILE",
        "Also write a report in the format that FILE's suffix implies: "
        ".html (with pictures), .json, .xml (JUnit), .sarif, .txt; repeatable.",
    )
    json: bool = OUTPUT.flag("--json", "Same as --format json.")
    limit: int | None = OUTPUT.option(
        "--limit N",
        "Show at most N locations per code in text output; 0 for all. [8]",
        parser=whole_number(0),
    )

    rules: Path | None = rules_option()

    memory: int | None = memory_option()
    threads: int | None = threads_option()

    quiet: bool = MESSAGES.flag("-q, --quiet", "Print nothing for checkpoints without errors.")
    no_pager: bool = no_pager_flag()
    storage_option: list[str] | None = storage_option()
    progress: str | None = progress_option()
    debug: bool = debug_flag()
