from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = {
    "bash": ".bash_completions/ckpt.sh",
    "zsh": ".zfunc/_ckpt",
    "fish": ".config/fish/completions/ckpt.fish",
}


def run(option: str, shell: str, home: Path) -> subprocess.CompletedProcess[str]:
    # Detection finds the shell that runs the tests, if any; the child of a shell finds that shell.
    program = f"cd {ROOT} && {sys.executable} -m ckpt_cli {option}; true"
    return subprocess.run(
        [shell, "-c", program],
        env=os.environ | {"HOME": str(home), "SHELL": "/bin/none"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("shell", FILES)
def test_the_script_that_is_shown_is_installed(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    shown = run("--show-completion", shell, tmp_path)
    assert f"complete_{shell}" in shown.stdout and shown.stderr == ""
    assert not list(tmp_path.rglob("*ckpt*"))
    done = run("--install-completion", shell, tmp_path)
    assert done.stdout.startswith(f"completion for {shell} installed in ") and done.stderr == ""
    assert (tmp_path / FILES[shell]).read_text() == shown.stdout


def test_another_shell_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import shellingham  # type: ignore[import-untyped]

    from ckpt_cli.app import main

    monkeypatch.setattr(shellingham, "detect_shell", lambda: ("tcsh", "/bin/tcsh"))
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert main(["--show-completion"]) == 2
    assert "bash, zsh, fish" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    script = run("--show-completion", "bash", tmp_path).stdout
    program = tmp_path / "ckpt"
    program.write_text(f"#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m ckpt_cli\n")
    program.chmod(0o755)
    (tmp_path / "script.sh").write_text(
        f"{script}\nCOMP_WORDS=(ckpt convert --to = za) COMP_CWORD=4\n"
        f'_ckpt_completion {program}\nprintf "%s\\n" "${{COMPREPLY[@]}}"\n'
    )
    done = subprocess.run(
        ["bash", str(tmp_path / "script.sh")], capture_output=True, text=True, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["zarr", "zarr3"], "")
