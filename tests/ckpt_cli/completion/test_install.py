from __future__ import annotations

import fcntl
import os
import select
import shutil
import subprocess
import sys
import termios
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
    assert done.stdout.startswith(f"installed {shell} completion in ") and done.stderr == ""
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


@pytest.mark.slow
@pytest.mark.parametrize("shell", FILES)
def test_the_first_tab_of_a_new_shell_completes(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    home, bin_dir = tmp_path / "home", tmp_path / "bin"
    home.mkdir()
    bin_dir.mkdir()
    assert run("--install-completion", shell, home).returncode == 0
    # Completes as ckpt does, and shows what the shell made of the line when it is run.
    program = bin_dir / "ckpt"
    program.write_text(
        '#!/bin/sh\n[ -n "$_CKPT_COMPLETE" ] || { echo "<$*>"; exit; }\n'
        f'cd {ROOT} && exec {sys.executable} -m ckpt_cli "$@"\n'
    )
    program.chmod(0o755)
    environ = {"HOME": str(home), "PATH": f"{bin_dir}:{os.environ['PATH']}", "TERM": "xterm"}
    terminal, end = os.openpty()
    process = subprocess.Popen(
        [shell, "-i"],
        cwd=tmp_path,
        env=environ | {"CKPT_COMPLETION_TIMEOUT": "60"},
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(end)
    shown = b""

    def read_until(awaited: bytes) -> None:
        nonlocal shown
        while awaited not in shown:
            assert select.select([terminal], [], [], 120)[0], shown
            shown += os.read(terminal, 1 << 16)
        # The shell sets up its terminal around a prompt; keys that come earlier would be lost.
        while select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 1 << 16)

    try:
        read_until(b"\x1b[?2004h")  # a line may be pasted now: the prompt
        os.write(terminal, b"ckpt convert --dtype bf1\t")
        read_until(b"bf16")
        os.write(terminal, b"\r")
        read_until(b"<convert --dtype bf16>")
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
