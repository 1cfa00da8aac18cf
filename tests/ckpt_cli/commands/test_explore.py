"""``ckpt explore``: where it refuses to run, and what it does not import."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from ckpt_cli.app import main, parse_command
from ckpt_cli.commands.explore import require_terminal
from ckpt_cli.options.explore import ExploreOptions
from core.errors import UsageError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_it_points_at_inspect(
    golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = golden / "hf/llama/safetensors_single"
    assert main(["explore", str(path), "--iteration", "3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ckpt explore needs a terminal, but std")
    assert f"hint: print the checkpoint instead: ckpt inspect {path} --iteration 3" in err


@pytest.mark.parametrize("number", range(3))
def test_each_stream_has_to_be_a_terminal(number: int) -> None:
    streams = [Terminal(), Terminal(), Terminal()]
    options = ExploreOptions(path=Path("run"))
    require_terminal(options, tuple(streams), {"TERM": "xterm"})
    name = ("stdin", "stdout", "stderr")[number]
    streams[number] = io.StringIO()  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=f"but {name} is not a terminal"):
        require_terminal(options, tuple(streams), {"TERM": "xterm"})


@pytest.mark.parametrize("environ", [{}, {"TERM": "dumb"}])
def test_a_dumb_terminal_is_refused(environ: dict[str, str]) -> None:
    options = ExploreOptions(path=Path("a b"))
    with pytest.raises(UsageError, match="with cursor movement") as caught:
        require_terminal(options, (Terminal(), Terminal(), Terminal()), environ)
    assert caught.value.hint == "print the checkpoint instead: ckpt inspect 'a b'"


def test_the_command_imports_textual_only_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("ckpt_cli.explore")]:
        monkeypatch.delitem(sys.modules, name)
    assert callable(parse_command(["explore", "run"]))
    assert not any(name.startswith("ckpt_cli.explore") for name in sys.modules)
