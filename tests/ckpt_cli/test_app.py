from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_cli.app import app, main
from tests.support.shown_errors import is_one_error

HEAVY = ("torch", "numpy", "zarr", "tensorstore", "rich", "ml_dtypes", "pydantic")


def modules_after(*arguments: str) -> set[str]:
    """Names of the modules that a command line leaves imported, in a process of its own."""
    code = (
        "import sys, io\n"
        "from contextlib import redirect_stdout\n"
        "from ckpt_cli.app import main\n"
        "with redirect_stdout(io.StringIO()):\n"
        f"    code = main({list(arguments)!r})\n"
        "print('\\n'.join(sys.modules))\n"
        "sys.exit(code)\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "arguments", [("--help",), ("inspect", "--help"), ("convert", "--help-all"), ("--version",)]
)
def test_help_imports_nothing_heavy_and_no_command(arguments: tuple[str, ...]) -> None:
    modules = modules_after(*arguments)
    assert not modules.intersection(HEAVY)
    assert not modules.intersection(
        {
            "core.verbs.convert.run",
            "core.opening.open",
            "core.formats.torch",
            "ckpt_cli.commands.inspect",
            "ckpt_cli.completion",
        }
    )


def test_python_m_is_the_same_program() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_cli", "inspect", "--help"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("Usage: ckpt inspect [OPTIONS] [PATH]")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["inspect", "--no-such"], "no such option: --no-such"),
        (["inspect", "--limt", "3"], "did you mean --limit?"),
        (["reshard", "--tp-nwe", "2"], "did you mean --tp-new?"),
        (["inspect", "a", "--to", "hf"], "it is an option of ckpt convert, reshard"),
        (["frobnicate"], "no such command: frobnicate\n  hint: see ckpt --help"),
        ([""], "no such command: ''\n  hint: see ckpt --help"),
        (["inspct", "a"], "no such command: inspct\n  hint: did you mean inspect?"),
        (["help", "convrt"], "did you mean convert?"),
        (["ls", "a"], "no such command: ls\n  hint: use ckpt inspect PATH"),
        (["check", "a"], "use ckpt validate PATH"),
        (
            ["merge", "a", "b"],
            "error: no merge method was chosen\n  hint: choose one of: --average",
        ),
        (["inspect", "--limit", "x"], "'x' is not a whole number ≥ 0"),
        (["inspect", "--sort", "shape"], "'shape' is not one of: name, size"),
        (["convert", "a", "b", "c"], "unexpected extra argument"),
        (
            ["convert", "--memory", "lots", "--to", "dcp"],
            "invalid value for '--memory': 'lots' is not a valid size",
        ),
        (
            ["convert", "--tp-new", "0", "--to", "dcp"],
            "invalid value for '--tp-new': '0' is not a whole number ≥ 1",
        ),
        (
            ["validate", "a", "--memory", "10"],
            "'10' is a memory limit of only 10 bytes\n  hint: add a unit, such as 8GiB",
        ),
        (["convert", "a", "b"], "pass --to with one of: megatron, "),
        (
            ["convert", "a", "b", "--to"],
            "option '--to' requires an argument\n  hint: see ckpt convert --help",
        ),
        (["convert", "a", "b", "--to", "hf", "--rules", "no/such.toml"], "--rules: file not found"),
        (["convert", "a", "b", "-o", "c", "--to", "dcp"], "two destinations"),
        (["convert", "a", "--to", "dcp", "--rank", "0"], "--dry-run"),
        (["convert", "a", "--to", "dcp", "--rename", "x"], "is not OLD=NEW"),
        (["convert", "a", "--to", "dcp", "--dtype", "*.w="], "is neither DTYPE nor GLOB=DTYPE"),
        (["reshard", "a", "b"], "no target size"),
        (["reshard", "a", "b", "--tp", "2"], "no target size"),
        (["inspect", "no/such/path"], "no such file or directory"),
    ],
)
def test_mistakes_give_one_error_and_exit_code_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert is_one_error(err)
    assert text in err


def test_json_prints_the_error_as_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "no/such/path", "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "error": {
            "code": "usage",
            "message": "no such file or directory",
            "file": "no/such/path",
            "hint": "check the spelling of the path",
            "exit_code": 2,
        }
    }
    assert err.startswith("error: ")


@pytest.mark.parametrize("words", [["--json"], ["--format", "json"], ["--format=json"]])
def test_every_way_to_ask_for_json_gets_the_error_so(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "no/such/path", *words]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "usage"


def test_a_traceback_comes_only_with_debug(capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", "no/such/path"])
    assert "Traceback" not in capsys.readouterr().err
    main(["inspect", "no/such/path", "--debug"])
    assert "Traceback" in capsys.readouterr().err


def test_no_command_shows_the_help_and_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Commands:" in err


def test_a_path_alone_is_inspected(
    golden: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = golden / "torch_dcp/tp2_only"
    for folder in ("run", "diff"):
        (tmp_path / folder).symlink_to(case)
    monkeypatch.chdir(tmp_path)
    pages = []
    for words in (["run"], ["inspect", "run"]):
        assert main([*words, "--json"]) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1]
    # A path need not exist, and is never taken for a command; a command is never a path.
    assert main(["./rum"]) == 2
    assert "no such file or directory" in capsys.readouterr().err
    assert main(["diff"]) == 2
    assert "missing argument" in capsys.readouterr().err


def test_every_command_is_offered_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    listed = [
        line.split()[0]
        for line in page.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    ]
    assert listed == [command.name for command in app.registered_commands]
    for name in listed:
        assert main([name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"Usage: ckpt {name} ")
