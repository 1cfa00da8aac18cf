"""Measuring: whole commands against `cp -r` plus fsync, warm and in turn.

This module imports nothing large: the peak RSS that the kernel reports for a child counts what it
held before its exec, which is what this process holds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from scripts.benchmarks.results import record_cases

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Run:
    """One command that ran: seconds of wall and of CPU, peak RSS of the largest of its processes in
    bytes.
    """

    wall_s: float
    cpu_s: float
    rss_bytes: int
    stdout: str


@dataclass(slots=True)
class Case:
    """A row of the table.

    Args:
        name: what was done.
        reach, aim: bounds for ``ratio`` (or for ``value``); None where there is none.
        ours, copies: the runs, in turn, and the seconds of what they are compared with.
        value: the number that is judged where it is no ratio to a copy; ``unit`` says of what.
        values: numbers in place of the ratios to a copy.
        is_lower_better: whether ``reach`` is an upper bound.
    """

    name: str
    reach: float | None = None
    aim: float | None = None
    ours: list[Run] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    value: float | None = None
    unit: str = "× copy"
    is_lower_better: bool = True
    values: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return self.values or [
            run.wall_s / copy for run, copy in zip(self.ours, self.copies, strict=False)
        ]

    @property
    def result(self) -> float:
        return statistics.median(self.ratios) if self.value is None else self.value

    @property
    def rss_bytes(self) -> int | None:
        return max((run.rss_bytes for run in self.ours), default=None)

    @property
    def is_met(self) -> bool | None:
        if self.reach is None:
            return None
        return self.result <= self.reach if self.is_lower_better else self.result >= self.reach

    def as_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "result": round(self.result, 4),
            "unit": self.unit,
            "reach": self.reach,
            "aim": self.aim,
            "is_met": self.is_met,
            "ratios": [round(ratio, 4) for ratio in self.ratios],
            "ours_s": [round(run.wall_s, 4) for run in self.ours],
            "ours_cpu_s": [round(run.cpu_s, 4) for run in self.ours],
            "copy_s": [round(copy, 4) for copy in self.copies],
            "peak_rss_bytes": self.rss_bytes,
        }

    def as_row(self) -> dict[str, object]:
        """Return what is published of the row: ``results.json``."""
        row: dict[str, object] = {
            "name": self.name,
            "result": float(f"{self.result:.3g}"),
            "unit": self.unit,
        }
        if self.value is None and len(self.ratios) > 1:
            row["range"] = [round(min(self.ratios), 2), round(max(self.ratios), 2)]
        if self.rss_bytes is not None and self.unit != "MB":
            row["memory_mb"] = [round(self.rss_bytes / 1e6)] * 2
        return row


class CommandError(Exception):
    """A measured command failed; the text holds its output."""


def run(command: Sequence[str | Path]) -> Run:
    """Runs a command to its end.

    Raises:
        CommandError: it ended with another code than 0.
    """
    texts = [str(part) for part in command]
    read_fd, write_fd = os.pipe()
    began = time.perf_counter()
    pid = os.posix_spawnp(
        texts[0],
        texts,
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, write_fd, 1), (os.POSIX_SPAWN_DUP2, write_fd, 2)],
    )
    os.close(write_fd)
    with open(read_fd, "rb") as pipe:
        output = pipe.read().decode("utf-8", "replace")
    _, status, usage = os.wait4(pid, 0)
    wall_s = time.perf_counter() - began
    if (code := os.waitstatus_to_exitcode(status)) != 0:
        raise CommandError(f"{' '.join(texts)}: exit code {code}\n{output[-4000:]}")
    return Run(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, output)


def ckpt(*arguments: str | Path) -> list[str | Path]:
    """The command line of our command."""
    return [sys.executable, "-m", "ckpt_cli", *arguments]


def files_of(path: Path) -> list[Path]:
    return (
        [path] if path.is_file() else sorted(found for found in path.rglob("*") if found.is_file())
    )


def copy(src: Path, dst: Path, *, fsync: bool) -> float:
    """``cp -r``, then fsync of every copied file; wall seconds."""
    began = time.perf_counter()
    subprocess.run(["cp", "-r", src, dst], check=True)
    if fsync:
        for path in files_of(dst):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    return time.perf_counter() - began


def remove(path: Path) -> None:
    """Removes a file or a directory, with what our command keeps beside a file."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}.ckpt-manifest.json").unlink(missing_ok=True)


def warm(path: Path) -> None:
    """Reads a checkpoint into the page cache and lets earlier writes reach the disk."""
    os.sync()
    buffer = bytearray(4 * MIB)
    for found in files_of(path):
        with found.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def in_turn(
    case: Case,
    src: Path,
    scratch_dir: Path,
    command: Callable[[Path], Sequence[str | Path]],
    *,
    n_runs: int,
    fsync: bool,
) -> Case:
    """Fills ``case`` with ``n_runs`` copies and as many runs of ``command(destination)``, in turn;
    which goes first alternates.
    """
    copied, written = scratch_dir / "copied", scratch_dir / "written"
    for i in range(n_runs):
        for is_ours in (i % 2 == 1, i % 2 == 0):
            warm(src)
            if is_ours:
                case.ours.append(run(command(written)))
                remove(written)
            else:
                case.copies.append(copy(src, copied, fsync=fsync))
                remove(copied)
    return case


class Page:
    """The rows that one bench has measured, and what failed.

    Args:
        options: with ``only``, ``scratch`` and ``json``, as ``page_parser`` has them.
        scratch_dir: where it works; removed at the end.
    """

    def __init__(self, options: argparse.Namespace, scratch_dir: Path) -> None:
        self.options = options
        self.scratch_dir = scratch_dir
        self.cases: list[Case] = []
        self.failures: list[str] = []
        self.skipped: dict[str, str] = {}
        """Rows that are not measured → the reason."""

    def wants(self, name: str) -> bool:
        """Whether the rows of a name are to be measured."""
        return self.options.only is None or re.search(self.options.only, name) is not None

    def add(self, *cases: Case) -> None:
        """Takes rows, and shows them."""
        self.cases += cases
        print("\n".join(table(cases).splitlines()[2:]), file=sys.stderr, flush=True)

    @contextmanager
    def tolerant(self, name: str) -> Iterator[None]:
        """Around the work for some rows: a command that fails is reported at the end and ends
        nothing else.
        """
        try:
            yield
        except CommandError as err:
            self.failures.append(f"{name}: {err}")
            print(f"{name}: FAILED\n{err}", file=sys.stderr, flush=True)


def page_parser(prog: str, description: str | None, *, runs: int) -> argparse.ArgumentParser:
    """A parser with the options that all benches have."""
    parser = argparse.ArgumentParser(
        prog=f"scripts/{prog}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--runs", type=int, default=runs, metavar="N", help=f"runs of each command [{runs}]"
    )
    parser.add_argument("--only", metavar="REGEX", help="measure only the rows whose names match")
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="where to work [the system's temporary directory]",
    )
    add_result_options(parser)
    return parser


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the results go."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here as well")
    parser.add_argument(
        "--record",
        action="store_true",
        help="publish the rows: write them to scripts/benchmarks/results.json; afterwards run "
        "scripts/make_reference",
    )


def run_page(options: argparse.Namespace, measure: Callable[[Page], None]) -> int:
    """Measures, prints the table and writes the JSON; the exit code is 1 if a command failed.

    Args:
        measure: fills a page.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    page = Page(options, Path(tempfile.mkdtemp(prefix="bench-", dir=options.scratch)))
    try:
        measure(page)
    finally:
        shutil.rmtree(page.scratch_dir, ignore_errors=True)
        if page.cases:
            print(table(page.cases))
    facts = {
        "python": platform.python_version(),
        "n_cpus": len(os.sched_getaffinity(0)),
        "failures": page.failures,
        "skipped": page.skipped,
    }
    write_results(page.cases, options, facts)
    return 1 if page.failures else 0


def write_results(
    cases: Sequence[Case],
    options: argparse.Namespace,
    facts: Mapping[str, object],
    *,
    machine: str = "",
) -> None:
    """Write the rows where the options say (``add_result_options``).

    Args:
        facts: what the file of ``--json`` has beside the rows.
        machine: begins the text of the machine in the published results.
    """
    if options.json:
        result = {**facts, "cases": [case.as_dict() for case in cases]}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.record and facts.get("failures"):
        sys.exit("a command failed, so nothing is recorded")
    if options.record:
        record_cases(cases, machine=machine)


def table(cases: Sequence[Case]) -> str:
    """The cases as aligned text."""
    rows = [("work", "result", "spread", "reach", "aim", "met", "ours", "CPU", "other", "peak RSS")]
    for case in cases:
        ratios = case.ratios if case.value is None else []
        rss = case.rss_bytes
        rows.append(
            (
                case.name,
                f"{case.result:.3g} {case.unit}",
                f"{min(ratios):.2f}–{max(ratios):.2f}" if ratios else "",
                ""
                if case.reach is None
                else f"{'≤' if case.is_lower_better else '≥'} {case.reach:g}",
                "" if case.aim is None else f"{case.aim:g}",
                {None: "", True: "yes", False: "NO"}[case.is_met],
                f"{statistics.median(run.wall_s for run in case.ours):.2f} s" if case.ours else "",
                f"{statistics.median(run.cpu_s for run in case.ours):.2f} s" if case.ours else "",
                f"{statistics.median(case.copies):.2f} s" if case.copies else "",
                "" if rss is None else f"{rss / 1e6:.0f} MB",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
