"""scripts/yardstick: record what ckpt does with every golden checkpoint, and compare two records.

    scripts/yardstick record before.json.xz      on the old commit
    scripts/yardstick record after.json.xz       on the new one
    scripts/yardstick compare before.json.xz after.json.xz

A *case* is a command line: every checkpoint of tests/golden is inspected, validated, converted to
every format and, where it has a parallel layout, resharded; some of each format also with options
of content. Recorded are the exit code, what is on stdout and stderr (as text and as JSON), and size
and SHA-256 of every file written. So a change that is meant to alter nothing is shown to alter
nothing: the bytes of a result say more of its plan than any form in which a plan is held. It is run
by hand; the tests keep what each output must be.

What differs between two runs of the same program is masked: times, rates, free space, the folder.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import io
import json
import lzma
import os
import re
import shlex
import shutil
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path

from ckpt_cli.app import main as ckpt
from core.formats.registry import formats
from core.progress import Phase

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"
DST = "DST"
CONTENT_OPTIONS = (
    ("--no-optim", "--dtype", "bf16"),
    ("--dtype", "fp32"),
    ("--include", "*weight*"),
    ("--exclude", "*norm*"),
    ("--rename", "weight=w"),
    ("--add-prefix", "model."),
    ("--stack-layers",),
    ("--metadata-only",),
    ("--max-shard-size", "20KB"),
)
"""Options of content, each tried on a few checkpoints of each format."""
N_WITH_OPTIONS = 4
"""Number of checkpoints of each format that are tried with every one of ``CONTENT_OPTIONS``."""
RESHARDED = ("megatron", "torch_dist", "zarr")
"""Formats whose checkpoints have a parallel layout."""
SIZES = (
    ("--tp-new", "1"),
    ("--tp-new", "2"),
    ("--tp-new", "1", "--pp-new", "2"),
    ("--ep-new", "2"),
)
MASKS = (
    (
        re.compile(r'"(seconds|expected_seconds|read_rate|write_rate|free_bytes)": [^,}]+'),
        r'"\1": 0',
    ),
    (re.compile(r'"(created|modified|created_at|started)": "[^"]*"'), r'"\1": ""'),
    (re.compile(r"\b\d+(\.\d+)? (s|ms|min)\b"), "N s"),
    (re.compile(r"\b\d+(\.\d+)? [KMGT]?i?B/s\b"), "N B/s"),
)
"""What differs between two runs, and what is written in its place."""

Outcome = dict[str, object]
"""Exit code, stdout, stderr and written files of a case."""


def main() -> int:
    """Parse the command line and run it; exit with 1 if the records differ."""
    parser = argparse.ArgumentParser(description="Record what ckpt does, and compare records.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    record_parser = verbs.add_parser("record", help="run all cases and write what they did")
    record_parser.add_argument("file", type=Path, help="the record to write (.json.xz)")
    record_parser.add_argument("--only", metavar="GLOB", default="*", help="only these sources")
    compare_parser = verbs.add_parser("compare", help="compare two records")
    compare_parser.add_argument("old", type=Path)
    compare_parser.add_argument("new", type=Path)
    compare_parser.add_argument("--lines", type=int, default=12, help="lines shown of a difference")
    args = parser.parse_args()
    if args.verb == "record":
        return _record(args.file, only=args.only)
    return _compare(args.old, args.new, n_lines=args.lines)


def _record(path: Path, *, only: str) -> int:
    """Run all cases of the sources that a glob matches, and write their outcomes."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="yardstick-") as folder:
        for archive in sorted(GOLDEN.glob("*.tar.xz")):
            with tarfile.open(archive) as file:
                file.extractall(Path(folder, archive.name.removesuffix(".tar.xz")), filter="data")
        os.chdir(folder)
        sources = [source for source in _list_sources() if fnmatch(source[0], only)]
        outcomes: dict[str, Outcome] = {}
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
            for part in pool.map(_run_source, sources):
                outcomes |= part
    with lzma.open(path, "wt", encoding="utf-8", preset=1) as file:
        json.dump(outcomes, file, indent=0, sort_keys=True)
    codes = Counter(outcome["exit"] for outcome in outcomes.values())
    counts = ", ".join(f"{n:,} × exit {code}" for code, n in sorted(codes.items(), key=str))
    print(f"{len(outcomes):,} cases of {len(sources)} sources: {counts}")
    print(f"{time.monotonic() - begun:.0f} s")
    return 0


def _list_sources() -> list[tuple[str, str, bool]]:
    """List path, format and whether options are tried on it, of every checkpoint below."""
    text = _run("inspect", ".", "--json")["stdout"]
    listed = json.loads(str(text))["checkpoints"]
    n_of_format: Counter[str] = Counter()
    sources = []
    for row in sorted(listed, key=lambda row: str(row["path"])):
        n_of_format[row["format"]] += 1
        is_tried = n_of_format[row["format"]] <= N_WITH_OPTIONS
        sources.append((os.path.relpath(row["path"]), str(row["format"]), is_tried))
    return sources


def _run_source(source: tuple[str, str, bool]) -> dict[str, Outcome]:
    """Run all cases of a source, and return their outcomes by command line."""
    folder = Path(tempfile.mkdtemp(prefix="yardstick-", dir="."))
    outcomes = {}
    for arguments in _list_cases(*source):
        dst = folder / DST
        words = [str(dst) if word == DST else word for word in arguments]
        outcome = _run(*words)
        outcome["files"] = _hash_files(folder)
        text = json.dumps(outcome).replace(str(folder) + "/", "")
        outcomes[shlex.join(arguments)] = json.loads(text)
        shutil.rmtree(folder)
        folder.mkdir()
    folder.rmdir()
    return outcomes


def _list_cases(path: str, format_name: str, has_options: bool) -> Iterator[Sequence[str]]:
    """Yield the command lines of a source."""
    for verb in ("inspect", "validate"):
        yield (verb, path)
        yield (verb, path, "--json")
    yield ("validate", path, "--deep", "--json")
    targets = [format.name for format in formats() if format.lay_out is not None] + ["hf"]
    for target in targets:
        yield ("convert", path, DST, "--to", target, "--json")
    yield ("convert", path, DST, "--to", "dcp")
    if format_name in RESHARDED:
        for sizes in SIZES:
            yield ("reshard", path, DST, *sizes, "--json")
        yield ("reshard", path, DST, *SIZES[1])
        yield ("reshard", path, DST, *SIZES[1], "--explain", "--json")
        yield ("convert", path, DST, "--to", "megatron", *SIZES[2], "--json")
    if has_options:
        for options in CONTENT_OPTIONS:
            for target in ("dcp", "torch", "safetensors"):
                yield ("convert", path, DST, "--to", target, *options, "--json")
        yield ("diff", path, path, "--json")
        yield ("manifest", path, "-o", DST, "--json")


def _run(*arguments: str) -> Outcome:
    """Run a command line in this process, and return its outcome, masked."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = ckpt([*arguments])
    return {"exit": code, "stdout": _mask(out.getvalue()), "stderr": _mask(err.getvalue())}


def _mask(text: str) -> str:
    """Replace what differs between two runs."""
    text = text.replace(os.getcwd() + "/", "").replace(os.getcwd(), ".")
    for pattern, replacement in MASKS:
        text = pattern.sub(replacement, text)
    return text


def _hash_files(folder: Path) -> dict[str, str]:
    """Return size and SHA-256 of every file below a folder, by path."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            hashes[str(path.relative_to(folder))] = (
                f"{len(data)} {hashlib.sha256(data).hexdigest()[:20]}"
            )
    return hashes


def _compare(old_path: Path, new_path: Path, *, n_lines: int) -> int:
    """Print the cases whose outcomes differ; return 1 if there are any."""
    old, new = (json.loads(lzma.open(path).read()) for path in (old_path, new_path))
    n_different = 0
    for case in sorted(old.keys() | new.keys()):
        before, after = old.get(case), new.get(case)
        if before == after or (before and after and _as_lines(before) == _as_lines(after)):
            continue
        n_different += 1
        print(f"ckpt {case}")
        if before is None or after is None:
            print(f"  only in {new_path if before is None else old_path}")
            continue
        texts = [_as_lines(outcome) for outcome in (before, after)]
        lines = list(difflib.unified_diff(*texts, lineterm="", n=0))[2:]
        for line in lines[:n_lines]:
            print(f"  {line[:240]}")
        if len(lines) > n_lines:
            print(f"  … {len(lines) - n_lines:,} more lines")
    print(f"{len(old.keys() & new.keys()):,} cases in both, {n_different:,} differ")
    return 1 if n_different else 0


_PROGRESS = re.compile(rf"(?:{'|'.join(Phase)})(?:: .*)?$")


def _as_lines(outcome: Outcome) -> list[str]:
    """Return an outcome as lines of text; JSON on stdout has a line per value.

    Lines of progress are left out: how many there are depends on how busy the machine is.
    """
    stdout = str(outcome["stdout"])
    with suppress(ValueError):
        stdout = json.dumps(json.loads(stdout), indent=0, sort_keys=True)
    files = outcome["files"]
    assert isinstance(files, dict)
    return [
        f"exit {outcome['exit']}",
        *stdout.splitlines(),
        *(line for line in str(outcome["stderr"]).splitlines() if not _PROGRESS.match(line)),
        *(f"{name}: {value}" for name, value in files.items()),
    ]


if __name__ == "__main__":
    sys.exit(main())
