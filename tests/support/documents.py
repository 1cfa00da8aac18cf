"""The commands that README.md and docs/ show: read out of the pages, run, and compared with what
the pages show.

A page's ```console blocks are one session: their ``$`` lines run one after the other in a directory
that holds what ``ckpt demo`` writes (the checkpoints that the page names). What stands below a
command is its output; a line ``…`` stands for any lines. A command shown without output has only
its exit code compared, which is 0 unless the next command is ``$ echo $?``. Times and rates are not
compared.

``python -m tests.support.documents --write [PAGE …]`` runs the pages and writes the real output
into them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ckpt_cli.commands.demo import unpack_playground

ROOT = Path(__file__).resolve().parents[2]
HOME = "/home/me/playground"
"""Stands in the pages for the directory that their commands run in."""
TIMES = re.compile(
    r"(?:less than a second|about \d+ s \(.*\)|free space +\d[\d.,]* \w+"
    r"|\d[\d.,]* m?s\b(?:, \d[\d.,]* \w+/s| \(\d[\d.,]* \w+/s\))?)"
)
"""A time, with the rate that follows unless the time is short; the free space of a plan."""
GAP = "…"


@dataclass(frozen=True)
class Step:
    """A command of a page.

    Args:
        command: what stands behind ``$``.
        shown: the lines below it.
        line: index of the command's line in the page.
    """

    command: str
    shown: tuple[str, ...]
    line: int


def pages() -> list[Path]:
    """Return README.md and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fences(text: str, language: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (index of the first line, lines) of the fenced blocks of a language."""
    lines = text.splitlines()
    begin: int | None = None
    for i, line in enumerate(lines):
        if begin is None and line.startswith("```"):
            begin, is_wanted = i + 1, line == f"```{language}"
        elif begin is not None and line == "```":
            if is_wanted:
                yield begin, lines[begin:i]
            begin = None


def steps_of(text: str) -> list[Step]:
    """Return the commands of a page: those of its console blocks, then those that are the last
    column of a table.
    """
    steps = []
    for begin, lines in fences(text, "console"):
        starts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
        for i, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
            steps.append(Step(lines[i][2:], tuple(lines[i + 1 : stop]), begin + i))
    for i, line in enumerate(text.splitlines()):
        if match := re.fullmatch(r"\|.*\| `(ckpt [^`]+)` \|", line):
            steps.append(Step(match[1], (), i))
    return steps


def make_checkpoints(folder: Path, text: str) -> None:
    """Write the part of the playground that the commands of a page name into a directory."""
    commands = " ".join(step.command for step in steps_of(text))
    is_named: dict[str, bool] = {}

    def is_wanted(file: str) -> bool:
        name = "/".join(file.split("/")[:2])
        if name not in is_named:
            pattern = rf"(?<![\w/]){re.escape(name)}(?![\w-])"
            is_named[name] = re.search(pattern, commands) is not None
        return is_named[name]

    unpack_playground(folder, is_wanted=is_wanted)


def run_steps(steps: Sequence[Step], folder: Path) -> Iterator[tuple[Step, int, list[str]]]:
    """Run commands in a directory; yield each with its exit code and its output, stderr included.

    Commands of ``ckpt`` run in this process; what a shell must understand, and ``ckpt launch``, in
    one of its own.
    """
    bin_dir = folder / ".bin"
    bin_dir.mkdir()
    (bin_dir / "ckpt").write_text(
        f'#!/bin/bash\nPYTHONPATH={ROOT} exec {sys.executable} -m ckpt_cli "$@"\n'
    )
    (bin_dir / "ckpt").chmod(0o755)
    code = 0
    for step in steps:
        if re.match(r"ckpt (?!launch)[^$|;&<>]*$", step.command):
            code, output = _run_here(shlex.split(step.command, comments=True)[1:], folder)
        else:
            done = subprocess.run(
                ["bash", "-c", f"(exit {code})\n{step.command}"],
                cwd=folder,
                env={**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            code, output = done.returncode, done.stdout
        yield step, code, output.replace(str(folder), HOME).splitlines()


def _run_here(arguments: list[str], folder: Path) -> tuple[int, str]:
    from ckpt_cli.app import main

    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        code = main(arguments)
    stream.flush()
    return code, stream.buffer.getvalue().decode()  # type: ignore[attr-defined]


def is_shown(shown: Sequence[str], output: Sequence[str]) -> bool:
    """Return whether what a page shows is the output, times and ``…`` apart."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == GAP else _line_pattern(line) for line in shown
    )
    return re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in output)) is not None


def _line_pattern(line: str) -> str:
    parts = TIMES.split(line.rstrip())
    return TIMES.pattern.join(re.escape(part) for part in parts) + r"\n"


def problems_of(text: str, folder: Path) -> list[str]:
    """Run a page; return what is not as it says, as text."""
    problems = []
    make_checkpoints(folder, text)
    steps = steps_of(text)
    shows_code = {step.line for step, after in pairwise(steps) if after.command == "echo $?"}
    for step, code, output in run_steps(steps, folder):
        if code != 0 and step.line not in shows_code:
            problems.append(
                f"line {step.line + 1}: $ {step.command}: exit code {code}\n" + "\n".join(output)
            )
        elif step.shown and not is_shown(step.shown, output):
            problems.append(
                f"line {step.line + 1}: $ {step.command}: other output:\n" + "\n".join(output)
            )
    return problems


def with_real_output(text: str, folder: Path) -> str:
    """Return a page with the real output below each command that shows some.

    An output that ends with ``…`` keeps its length; where that stands elsewhere, the page has to be
    put right by hand.
    """
    lines = text.splitlines()
    make_checkpoints(folder, text)
    results = list(run_steps(steps_of(text), folder))
    for step, _, output in reversed(results):
        if step.shown and not is_shown(step.shown, output):
            gaps = [i for i, line in enumerate(step.shown) if line.strip() == GAP]
            if gaps and gaps != [len(step.shown) - 1]:
                sys.stderr.write(
                    "\n    ".join([f"line {step.line + 1}: other output:", *output, ""])
                )
            else:
                new = [*output[: gaps[0]], GAP] if gaps else output
                lines[step.line + 1 : step.line + 1 + len(step.shown)] = [
                    line.rstrip() for line in new
                ]
    return "\n".join(lines) + "\n"


def _main(arguments: list[str]) -> None:
    if arguments[:1] != ["--write"]:
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        for i, page in enumerate([Path(name) for name in arguments[1:]] or pages()):
            folder = Path(temporary, str(i))
            folder.mkdir()
            page.write_text(with_real_output(page.read_text("utf-8"), folder), "utf-8")


if __name__ == "__main__":
    _main(sys.argv[1:])
