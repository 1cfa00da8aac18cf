"""The published results of the benches: ``results.json``, one row for each thing that was measured.

    {"runs": {"2026-11-21 scripts/bench --size 4": "2 cores, …"},      when and how → the machine
     "cases": {"conversions": [{"name": …, "result": 0.92, "unit": "× copy", "range": [0.8, 1.1],
                                "memory_mb": [47, 47], "run": …}]}}    by the name of the bench

``scripts/bench NAME --record`` replaces the rows that it measured. ``scripts/make_reference`` makes
the tables of docs/explanation/numbers.md, the figures of README.md and the picture of them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.benchmarks.measure import Case

RESULTS_PATH = Path(__file__).with_name("results.json")
NO_FSYNC = ", no fsync"
"""End of the names of rows without fsync on both sides."""


def record_cases(cases: Sequence[Case], path: Path = RESULTS_PATH) -> None:
    """Replace the rows of the same names, or add them, and drop the runs that no row is of."""
    results = json.loads(path.read_text("utf-8"))
    bench = sys.argv[0].rpartition(" ")[2]
    run = f"{time.strftime('%Y-%m-%d')} {shlex.join(list_recorded_arguments())}"
    cores, python = len(os.sched_getaffinity(0)), platform.python_version()
    results["runs"][run] = f"{cores} cores, Python {python}, torch {version('torch')}"
    rows = {row["name"]: row for row in results["cases"].get(bench, ())}
    names = {case.name for case in cases}
    rows |= {
        case.name: {**case.as_row(), "run": run}
        for case in cases
        if case.unit != "MB" or case.name.removesuffix(": memory") not in names - {case.name}
    }  # a row has its own memory as a field
    results["cases"][bench] = list(rows.values())
    used = {row["run"] for bench_rows in results["cases"].values() for row in bench_rows}
    results["runs"] = {name: text for name, text in results["runs"].items() if name in used}
    path.write_text(format_results(results), "utf-8")


def list_recorded_arguments() -> list[str]:
    """Return the command line without what says where to work and where to write."""
    words = [*sys.argv[0].split()]
    is_value = False
    for word in sys.argv[1:]:
        is_left_out = is_value or word.split("=")[0] in ("--record", "--json", "--scratch")
        words += [] if is_left_out else [word]
        is_value = word in ("--json", "--scratch")
    return words


def format_results(results: dict[str, Any]) -> str:
    """Return the text of the file, with a line for each row, so that a change reads as one."""
    lines = ['{"runs": {']
    lines.append(",\n".join(f"  {_dump(k)}: {_dump(v)}" for k, v in results["runs"].items()))
    lines.append(' },\n "cases": {')
    benches = [
        f"  {_dump(bench)}: [\n" + ",\n".join(f"   {_dump(row)}" for row in rows) + "\n  ]"
        for bench, rows in results["cases"].items()
    ]
    return "\n".join([*lines, ",\n".join(benches), " }\n}"]) + "\n"


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def read_rows(bench: str, pattern: str = "") -> list[dict[str, Any]]:
    """Return the rows of a bench whose names match."""
    rows = json.loads(RESULTS_PATH.read_text("utf-8"))["cases"][bench]
    return [row for row in rows if re.search(pattern, row["name"])]


def read_row(bench: str, name: str) -> dict[str, Any]:
    """Return the row of a name."""
    (row,) = read_rows(bench, f"^{re.escape(name)}$")
    return row


def list_table_rows(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a table; what was measured without fsync too is one row."""
    by_name = {row["name"]: row for row in rows}
    table = []
    for name, row in by_name.items():
        unsynced = by_name.get(name + NO_FSYNC)
        if name.endswith(NO_FSYNC) and name.removesuffix(NO_FSYNC) in by_name:
            continue
        low, high = row.get("memory_mb", (0, 0))
        memory = "" if not high else f"{low} MB" if low == high else f"{low}–{high} MB"
        table.append([name, format_result(row), unsynced and format_result(unsynced), memory])
    columns = list(zip(("work", "result", "without fsync", "memory"), *table, strict=True))
    columns = [column for column in columns if any(column[1:])]
    head, *body = ([cell or "" for cell in line] for line in zip(*columns, strict=True))
    return head, body


def format_result(row: dict[str, Any]) -> str:
    """Return a result with its unit, and the range of single ratios."""
    text = f"{row['result']:.3g} {row['unit']}"
    if "range" in row:
        text += " ({:.2f}–{:.2f})".format(*row["range"])
    return text


def list_runs(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield when, how and where rows were measured, once for each run."""
    machines = json.loads(RESULTS_PATH.read_text("utf-8"))["runs"]
    for run in dict.fromkeys(row["run"] for row in rows):
        date, _, command = run.partition(" ")
        yield f"`{command}`, {date}: {machines[run]}."
