"""Every hostile checkpoint, and every command: a documented end, soon, in bounded memory, and
printable.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.hostile.cases import CASES, JSON_PLACES, MARKER, SOUND, THINGS, Make
from tests.support.covering import covering_cases
from tests.support.followed_hints import CommandEnd, follow_hints
from tests.support.refusals import check_agreement
from tests.support.shown_errors import is_one_error

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc")

MAX_GROWN_BYTES = 1 << 30
MAX_CPU_S = 30
"""Not how fast it is, but that it ends: a busy machine counts more."""

_COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "SRC"),
    "convert": ("convert", "SRC", "out", "--to", "torch"),
    "validate": ("validate", "SRC"),
    "validate --headers": ("validate", "SRC", "--headers", "--format", "json"),
    "validate --deep": ("validate", "SRC", "--deep"),
    "manifest": ("manifest", "SRC", "-o", "manifest.json"),
    "diff": ("diff", "SRC", "SRC", "--stat-only"),
    "inspect --report": ("inspect", "SRC", "--report", "report.html"),
    "validate --report": ("validate", "SRC", "--report", "report.html"),
}
_REFUSED = (1, 2, 3, 4, 5, 6, 7)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    cpu_s: float
    grown_bytes: int


class Server:
    """The process that runs the commands, see ``tests/hostile/server.py``."""

    def __init__(self, repo_dir: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(repo_dir), "PYTHONDONTWRITEBYTECODE": "1"}
        commands = json.dumps(list(_COMMANDS.values()))
        command = [sys.executable, str(repo_dir / "tests/hostile/server.py"), commands]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, arguments: list[str], folder: Path) -> Ended:
        """Runs one command line in a directory."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([arguments, str(folder)]) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """Ends it."""
        self._process.communicate()


@pytest.fixture(scope="module")
def server(repo_dir: Path) -> Iterator[Server]:
    running = Server(repo_dir)
    yield running
    running.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty directory, removed at once: there are terabytes in it, and names that pytest cannot
    remove.
    """
    path = tmp_path / "work"
    path.mkdir()
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


def _check(server: Server, make: Make, folder: Path, command: str) -> Ended:
    source = make(folder)
    before = set(os.listdir(folder))
    result = server.run(
        [str(source) if word == "SRC" else word for word in _COMMANDS[command]], folder
    )
    assert "Traceback" not in result.err
    assert result.code in (0, *_REFUSED), result.err
    assert result.cpu_s < MAX_CPU_S
    assert result.grown_bytes < MAX_GROWN_BYTES
    assert all(line.isprintable() for line in (result.out + result.err).split("\n"))
    assert MARKER not in os.listdir(folder)
    created = set(os.listdir(folder)) - before
    assert created <= {"out", "manifest.json", "report.html"}
    if result.code:
        assert created <= {"report.html"}  # of damage, or of findings
    if result.code > 1:
        # Below its page, inspect says all on one line.
        assert "\n  hint: " in result.err or command.startswith("inspect")
        assert is_one_error(re.sub(r"report: .*\n\Z", "", result.err))
    for name in created:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return result


@pytest.mark.each_value
@pytest.mark.parametrize("command", _COMMANDS)
@pytest.mark.parametrize("case", SOUND)
def test_what_hostile_ones_are_made_of_is_read(
    case: str, command: str, server: Server, folder: Path
) -> None:
    result = _check(server, SOUND[case], folder, command)
    assert result.code == 0, result.err + result.out


_LONG = {
    *(
        f"pickle as {place}: {nesting}"
        for place in ("metadata", "object")
        for nesting in ("deep lists", "deep lists behind a mark", "many objects", "many records")
    ),
    "pickle: many records",
    "pickle: deep lists behind a mark",
    "zip: a deflated pickle of lists",
    "metadata: 5000 chunks that overlap",
    "metadata: a stair of 1000 boxes",
    "pickle: many objects",
    "zip: a deflated pickle of 2 MB",
    "zip: 20000 records",
    "safetensors: many empty tensors",
    "zarr: 1500 directories deep",
    "zarr3: 1500 directories deep",
}
"""Of each of these there is a quicker one: a million marks, a deflated pickle, chunks that overlap,
many files of an index, directories of another format.
"""


def _axes(case: str) -> dict[str, str]:
    """Return where a case has what: pickles, JSON and things that are no files are products."""
    kind, _, rest = case.partition(": ")
    if kind in THINGS:
        return {"place": rest, "what": kind}
    if kind == "JSON":
        content_kind, place = next(
            (rest.removesuffix(f" in {place}"), place)
            for _, place in JSON_PLACES
            if rest.endswith(f" in {place}")
        )
        return {"place": f"JSON in {place}", "what": f"JSON: {content_kind}"}
    if kind.startswith("pickle"):
        return {"place": kind, "what": rest}
    return {"place": case, "what": case}


_RUNNING = [
    name for name in CASES if ": a call" in name or "runs code" in name or "unpickle" in name
]


def _covering(cases: Iterable[str], *, others: Container[str] = ()) -> list[ParameterSet]:
    """Return the cases of which few run without ``--long``, and none of ``others``."""
    return covering_cases(
        (
            pytest.param(name, marks=pytest.mark.long if name in _LONG or name in others else ())
            for name in cases
        ),
        _axes,
    )


@pytest.mark.parametrize("case", _covering(CASES, others=_RUNNING))
def test_a_hostile_checkpoint_ends_every_command_in_order(
    case: str, server: Server, folder: Path, request: pytest.FixtureRequest
) -> None:
    """Every case is validated and converted, which agree; which other command sees it goes
    round, without ``--long`` for every third.
    """

    def ended(command: str) -> Ended:
        (folder / command).mkdir()
        return _check(server, CASES[case], folder / command, command)

    commands = [name for name in _COMMANDS if name not in ("validate --headers", "convert")]
    if "terabyte" in case:  # it reads every byte, also of a terabyte of zeros
        commands.remove("manifest")
    is_found = ended("validate --headers").code == 1
    refusal = ended("convert")
    is_refused = refusal.code != 0
    if "--" in refusal.err:
        (folder / "followed").mkdir()
        _follow(server, CASES[case](folder / "followed"), folder / "followed")
    turn, number = divmod(list(CASES).index(case), 3)
    other = commands[(turn + number) % len(commands)]
    if number == 0 or request.config.getoption("--long"):
        is_found |= ended(other).code == 1 and other == "validate --deep"
    if is_refused and not is_found and "terabyte" not in case:
        is_found = ended("validate --deep").code == 1
    check_agreement(case, is_refused=is_refused, is_found=is_found)


def _follow(server: Server, source: Path, folder: Path) -> None:
    """Follow the hints of a refused conversion: none leads back, or to a crash."""
    numbers = count()

    def run(line: Sequence[str]) -> CommandEnd:
        ended = server.run([*line[:2], f"out{next(numbers)}", *line[3:]], folder)
        return CommandEnd(ended.code, ended.err)

    ends = [end for _, end in follow_hints(["convert", str(source), "", "--to", "torch"], run)]
    assert all(end.code in (0, *_REFUSED) for end in ends)


def test_the_hostile_cases_are_more_than_three_hundred() -> None:
    assert len(CASES) > 300
    assert set(CASES) >= _LONG


@pytest.mark.parametrize("case", _covering(_RUNNING))
def test_whoever_would_run_code_is_found_and_not_converted(
    case: str, server: Server, folder: Path
) -> None:
    for name in ("a", "b", "c"):
        (folder / name).mkdir()
    assert _check(server, CASES[case], folder / "a", "convert").code in (3, 4, 5)
    result = _check(server, CASES[case], folder / "b", "validate --headers")
    assert result.code == 1
    assert '"CK601"' in result.out
    shown = _check(server, CASES[case], folder / "c", "inspect")
    assert shown.code in (3, 4, 5) or "WARNING" in shown.out
