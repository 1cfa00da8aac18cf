"""The published results of the benches: ``results.json``, one row for each thing that was measured.

    {"runs": {"2026-11-21 scripts/bench --size 4": "2 cores, …"},      when and how → the machine
     "cases": {"conversions": [{"name": …, "result": 0.92, "unit": "× copy", "range": [0.8, 1.1],
                                "memory_mb": [47, 47], "run": …}]}}    by the name of the bench

A row without ``result`` has a range of several measurements; ``memory_mb`` is a range as well.
``scripts/bench NAME --record`` replaces the rows that it measured; only ``api --async`` has none.
``scripts/make_reference`` makes the tables of docs/explanation/numbers.md, the figures of README.md
and the picture of them.
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
_COLUMN = re.compile(f"({NO_FSYNC}|, with start-up|, kernel alone|, [0-9]+ threads?: .+)$")
"""End of a name that becomes a column of the table: the rest of the name is the row."""


def record_cases(cases: Sequence[Case], path: Path = RESULTS_PATH, *, machine: str = "") -> None:
    """Replace the rows of the same names, or add them, and drop the runs that no row is of."""
    results = json.loads(path.read_text("utf-8"))
    bench = sys.argv[0].rpartition(" ")[2]
    run = f"{time.strftime('%Y-%m-%d')} {shlex.join(list_recorded_arguments())}"
    cores, python = len(os.sched_getaffinity(0)), platform.python_version()
    results["runs"][run] = f"{machine}{cores} cores, Python {python}, torch {version('torch')}"
    rows = {row["name"]: row for row in results["cases"].get(bench, ())}
    rows |= {case.name: {**case.as_row(), "run": run} for case in cases}
    for case in cases:
        work = case.name.removesuffix(": memory")
        if case.unit == "MB" and work != case.name and work in rows:
            rows[work]["memory_mb"] = [round(case.result)] * 2
            del rows[case.name]
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
    """Return head and rows of a table; ends of names such as ``NO_FSYNC`` are columns."""
    lines: dict[str, dict[str, str]] = {}
    heads = {"work": None}
    for row in rows:
        end = _COLUMN.search(row["name"])
        column = end[0].removeprefix(", ") if end else "result"
        name = row["name"][: end.start()] if end else row["name"]
        heads[column] = None
        line = lines.setdefault(name, {"work": name})
        line[column] = format_result(row)
        if "memory_mb" in row:
            line["memory"] = f"{format_range(row['memory_mb'], '.0f')} MB"
    if any("memory" in line for line in lines.values()):
        heads["memory"] = None
    return [*heads], [[line.get(head, "") for head in heads] for line in lines.values()]


def format_result(row: dict[str, Any]) -> str:
    """Return a result with its unit, and the range of single measurements."""
    if "result" not in row:
        return f"{format_range(row['range'], 'g')} {row['unit']}"
    text = f"{row['result']:.3g} {row['unit']}"
    return f"{text} ({format_range(row['range'], '.2f')})" if "range" in row else text


def format_range(bounds: Sequence[float], form: str) -> str:
    """Return two bounds, or the number that both are."""
    return "–".join(dict.fromkeys(f"{bound:{form}}" for bound in bounds))


def list_runs(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield when, how and where rows were measured, once for each run."""
    machines = json.loads(RESULTS_PATH.read_text("utf-8"))["runs"]
    for run in dict.fromkeys(row["run"] for row in rows):
        date, _, command = run.partition(" ")
        yield f"`{command}`, {date}: {machines[run]}."
