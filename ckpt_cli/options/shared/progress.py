"""The form in which progress is shown: that of ``--progress``, or of the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

FORMS = ("auto", "bar", "log", "none")
"""How progress is shown; ``auto`` is a bar on a terminal, else a log of jobs that take long."""
_NAME = "--progress"
_VARIABLE = "CKPT_PROGRESS"


def progress_form(
    form: str | None, *, is_quiet: bool, environ: Mapping[str, str] = os.environ
) -> str:
    """Return the form to show.

    Args:
        form: the form that the command requests; it wins.
        is_quiet: ``--quiet`` is given.
        environ: ``CKPT_PROGRESS`` is the default of commands that request nothing.
    """
    if form is not None:
        return form
    default = environ.get(_VARIABLE, "")
    return "none" if is_quiet else default if default in FORMS else "auto"


def requested_form(command: Sequence[str]) -> str | None:
    """Return the form that the words of a command request; None if they request none.

    The command need not be valid: its parser reports a wrong form later.
    """
    form = None
    for word, value in zip(command, [*command[1:], ""], strict=True):
        if word == _NAME:
            form = value
        elif word.startswith(f"{_NAME}="):
            form = word.partition("=")[2]
    return form if form in FORMS else None


def with_form(command: Sequence[str], form: str | None) -> list[str]:
    """Return a command that shows progress in ``form``, unless it requests another one itself."""
    if form is None or requested_form(command) is not None:
        return list(command)
    return [command[0], _NAME, form, *command[1:]]


def is_quiet(command: Sequence[str]) -> bool:
    """Return True if the words of a command contain ``--quiet`` or ``-q``."""
    return "--quiet" in command or "-q" in command
