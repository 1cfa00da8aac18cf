"""Install the script that lets a shell ask ``ckpt`` for completions, or print it.

The scripts, and the files that they belong to, are typer's: ``~/.bash_completions/ckpt.sh`` (and a
line in ``~/.bashrc``), ``~/.zfunc/_ckpt`` (and ``~/.zshrc``), ``~/.config/fish/completions``.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_cli.completion.shell import SHELLS, VARIABLE
from core.errors import UsageError

_ZSH_FIRST_TIME = """
# At the first tab, zsh only runs this file, so complete here.
[[ $zsh_eval_context[-1] == loadautofunc ]] && _ckpt_completion "$@"
"""
"""Lines that typer's script for zsh lacks: without them, the first TAB of a shell does nothing."""


def shell_script(shell: str | None = None) -> str:
    """Return the script for a shell, by default the one that runs this process.

    Raises:
        UsageError: the shell is none of ``SHELLS``.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    shell = shell or _current_shell("--show-completion")
    script = get_completion_script(prog_name="ckpt", complete_var=VARIABLE, shell=shell)
    return f"{script}\n{_ZSH_FIRST_TIME if shell == 'zsh' else ''}"


def install_script() -> tuple[str, Path]:
    """Install the script for the shell that runs this process.

    Returns:
        The shell, and the file of the script.

    Raises:
        UsageError: the shell is none of ``SHELLS``.
        OSError: a file of the shell cannot be written.
    """
    from typer.completion import install  # type: ignore[attr-defined]

    # typer also adds the lines that load the file to the shell's own start-up file.
    shell = _current_shell("--install-completion")
    _, path = install(shell=shell, prog_name="ckpt", complete_var=VARIABLE)
    path.write_text(shell_script(shell))
    return shell, path


def _current_shell(option: str) -> str:
    """Return the shell among this process's ancestors, else the user's own (``SHELL``).

    Raises:
        UsageError: neither is one of ``SHELLS``.
    """
    import shellingham  # type: ignore[import-untyped]  # typer needs it too

    try:
        running = shellingham.detect_shell()[0]
    except (shellingham.ShellDetectionFailure, OSError):
        running = ""
    for shell in (running, Path(os.environ.get("SHELL", "")).name):
        if shell in SHELLS:
            return str(shell)
    raise UsageError(
        f"{option} cannot identify the current shell as one of: {', '.join(SHELLS)}",
        hint=f"run the command from one of these shells: bash -c 'ckpt {option}'",
    )
