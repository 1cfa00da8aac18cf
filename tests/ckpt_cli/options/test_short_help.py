"""The help pages: their size, and that what they propose exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from ckpt_cli.app import app, main, parse_command
from ckpt_cli.commands.help import find_pages
from ckpt_cli.options.short_help import SHORT_HELP, documentation_of
from ckpt_cli.options.typer_command import Group

COMMANDS = [name for name in SHORT_HELP if name != "ckpt"]


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A terminal without colours, 80 columns wide."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return monkeypatch


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def words_of(command: str) -> list[str]:
    return [] if command == "ckpt" else [command]


def test_every_command_has_a_short_page() -> None:
    assert [command.name for command in app.registered_commands] == COMMANDS


@pytest.mark.parametrize("command", SHORT_HELP)
def test_a_short_page_fits_one_screen_and_ends_with_where_to_find_more(
    command: str, columns: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = page(capsys, *words_of(command), "--help").splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    name = "COMMAND" if command == "ckpt" else command
    assert lines[-2] == f"All options: ckpt {name} --help-all"
    assert lines[-1] == f"Documentation: {documentation_of(command)}"
    assert lines == page(capsys, *words_of(command), "-h").splitlines()


@pytest.mark.parametrize("command", SHORT_HELP)
def test_the_examples_can_be_pasted(
    command: str, columns: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page(capsys, *words_of(command), "--help")
    for _, example in SHORT_HELP[command].examples:
        assert f"\n  {example}\n" in text
        program, *words = shlex.split(example)
        assert program == "ckpt"
        assert callable(parse_command(words))
    assert 2 <= len(SHORT_HELP[command].examples) <= 4


@pytest.mark.each_value
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", [80, 120])
def test_the_full_page_has_every_option(
    command: str,
    width: int,
    columns: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    columns.setenv("COLUMNS", str(width))
    text = page(capsys, command, "--help-all")
    assert max(map(len, text.splitlines())) <= min(width, 100)
    group = get_command(app)
    assert isinstance(group, Group)
    shown = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE))
    options = [param for param in group.commands[command].params if hasattr(param, "is_flag")]
    for param in options:
        names = [name for name in param.opts if name.startswith("--")]
        assert param.hidden or names[0] in shown
    assert {"--help", "--help-all"} <= shown
    assert set(SHORT_HELP[command].options) <= shown


def test_convert_and_reshard_lead_with_what_they_need(
    columns: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def first_option(command: str) -> str:
        return page(capsys, command, "--help").partition("\nOptions:\n")[2].split()[0]

    assert (first_option("convert"), first_option("reshard")) == ("--to", "--tp-new")


def test_the_full_page_of_the_program_lists_the_exit_codes(
    columns: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "130 interrupted" in " ".join(page(capsys, "--help-all").split())


@pytest.mark.parametrize("words", [["convert"], ["launch"]])
def test_help_is_a_command_too(
    words: list[str], columns: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert page(capsys, "help", *words) == page(capsys, *words, "--help")


@pytest.mark.parametrize(
    ("environ", "is_coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_colours_are_for_terminals_and_change_no_word(
    option: str,
    environ: dict[str, str],
    is_coloured: bool,
    columns: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    columns.delenv("NO_COLOR", raising=False)
    plain = page(capsys, "convert", option)
    for name, value in environ.items():
        columns.setenv(name, value)
    text = page(capsys, "convert", option)
    assert ("\x1b[36m--to\x1b[0m FORMAT" in text) == is_coloured
    assert re.sub(r"\x1b\[\d+m", "", text) == plain


def test_the_documentation_is_the_projects_address_if_it_has_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    info = tmp_path / "ckpt_toolkit-9.0.dist-info"
    info.mkdir()
    text = "Metadata-Version: 2.1\nName: ckpt-toolkit\nProject-URL: Source, https://a.example\n"
    (info / "METADATA").write_text(f"{text}\nProject-URL: Documentation, https://c.example\n")
    assert documentation_of("convert") == "ckpt help guide/convert"
    assert documentation_of("ckpt") == "ckpt help"
    address = "Project-URL: Documentation, https://b.example/ckpt/\n"
    (info / "METADATA").write_text(f"{text}{address}\nAbout.\n")
    assert documentation_of("convert") == "https://b.example/ckpt/guide/convert/"


def test_every_guide_is_a_page_of_help() -> None:
    assert {item.guide for item in SHORT_HELP.values()} <= {"", *find_pages()}
