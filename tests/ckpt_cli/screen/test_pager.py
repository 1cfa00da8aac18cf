from __future__ import annotations

import io
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_cli.screen.pager import pager_of, print_page


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        ({"CKPT_PAGER": "sh -c x", "PAGER": "cat"}, "sh -c x"),
        ({"PAGER": "sort -r"}, "sort -r"),
        ({"PAGER": "LC_ALL=C sort"}, "LC_ALL=C sort"),
        ({"CKPT_PAGER": "", "PAGER": "sort"}, None),
        ({"PAGER": "cat"}, None),
        ({"PAGER": "no-such-pager -x"}, None),
        ({"PAGER": "sort '"}, None),
        ({"PAGER": "sort", "TERM": "dumb"}, None),
    ],
)
def test_the_pager_is_the_users(environ: dict[str, str], command: str | None) -> None:
    assert pager_of(Terminal(), {"TERM": "xterm", **environ}) == command


def test_the_default_is_less_if_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pager_of(Terminal(), {"TERM": "xterm"}) is None
    (tmp_path / "less").write_text("#!/bin/sh\n")
    (tmp_path / "less").chmod(0o755)
    assert pager_of(Terminal(), {"TERM": "xterm"}) == "less"


def test_pipes_and_files_have_no_pager() -> None:
    assert pager_of(io.StringIO(), {"TERM": "xterm", "PAGER": "sort"}) is None


@pytest.fixture
def screen_of_ten_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "10")
    monkeypatch.setenv("COLUMNS", "20")


@pytest.fixture
def pager(tmp_path: Path) -> str:
    """A pager that writes the page, after $LESS, to the file ``page``."""
    return f'(echo "$LESS"; cat) > {shlex.quote(str(tmp_path / "page"))}'


@pytest.mark.usefixtures("screen_of_ten_lines")
@pytest.mark.parametrize(
    ("lines", "is_paged"),
    [
        (["\x1b[1mline\x1b[0m"] * 9, False),
        (["\x1b[1mline\x1b[0m"] * 10, True),
        (["x" * 20] * 9, False),
        (["x" * 21] * 5, True),
        ([], False),
    ],
)
def test_only_a_page_longer_than_the_terminal_is_paged(
    lines: list[str],
    is_paged: bool,
    pager: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LESS", raising=False)
    print_page(iter(lines), pager)
    text = "".join(f"{line}\n" for line in lines)
    assert capsys.readouterr().out == ("" if is_paged else text)
    assert (tmp_path / "page").exists() == is_paged
    if is_paged:
        assert (tmp_path / "page").read_text() == f"FRX\n{text}"


@pytest.mark.usefixtures("screen_of_ten_lines")
def test_options_of_the_users_less_stay(
    pager: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LESS", "-S")
    print_page(["line"] * 50, pager)
    assert (tmp_path / "page").read_text().startswith("-S\n")


@pytest.mark.usefixtures("screen_of_ten_lines")
def test_a_pager_that_is_left_early_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    print_page(["a long line " * 10] * 100_000, "true")
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("screen_of_ten_lines")
def test_without_a_pager_that_starts_the_page_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_page(["line"] * 50, "exec 2> /dev/null; no-such-pager")
    assert capsys.readouterr().out == "line\n" * 50


@pytest.mark.usefixtures("screen_of_ten_lines")
def test_an_interrupt_is_for_the_pager() -> None:
    handler = signal.getsignal(signal.SIGINT)
    # The pager sends it to its parent, as a terminal sends it to both.
    print_page(["line"] * 50, "cat > /dev/null; kill -INT $PPID")
    assert signal.getsignal(signal.SIGINT) is handler


def test_long_pages_of_commands_go_through_the_pager(
    in_terminal: Callable[..., tuple[int, str]], golden: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page"
    command = ["inspect", str(golden / "torch_dcp/fsdp2_dp4"), "--optim"]
    pager = f"cat > {shlex.quote(str(page))}"
    code, out = in_terminal(command, CKPT_PAGER=pager)
    assert (code, out) == (0, "")
    assert "exp_avg_sq" in page.read_text()
    assert "\x1b[" in page.read_text()
    page.unlink()
    for direct in (["--no-pager"], ["--json"]):
        code, out = in_terminal([*command, *direct], CKPT_PAGER=pager)
        assert code == 0
        assert "exp_avg_sq" in out
        assert not page.exists()


@pytest.fixture
def in_terminal() -> Callable[..., tuple[int, str]]:
    """Runs ``ckpt`` in a terminal of 24 × 80; returns the exit code and what the terminal shows."""
    import pty
    import subprocess

    def run(arguments: list[str], **environ: str) -> tuple[int, str]:
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "ckpt_cli", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "LINES": "24", "COLUMNS": "80", **environ},
        )
        os.close(slave)
        chunks = []
        try:
            while chunk := os.read(master, 1 << 16):
                chunks.append(chunk)
        except OSError:  # Linux reports the end of a terminal as EIO
            pass
        os.close(master)
        return process.wait(), b"".join(chunks).decode()

    return run
