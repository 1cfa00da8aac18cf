"""A report in a file: written aside and moved there, so that nobody reads half of one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from core.errors import UsageError
from core.files.store import translate_os_errors

_OPENINGS = (b'{"schema": "ckpt.', b'{\n "$schema": ', b"<?xml ", b"::", "✓ ".encode(), "✗ ".encode(), b"! ")
"""How the reports and baselines begin that this program writes; colours are never written to a file."""


def check_place(path: Path) -> None:
    """Refuses what cannot be written, before the work that is to be reported begins.

    An older report is replaced. Any other file is not, so that a slip of the shell's completion costs no checkpoint.

    Raises:
        UsageError: the path is a directory, or its directory does not exist, or there is a file that is no report.
    """
    if path.is_dir():
        raise UsageError("this is a directory, and no file to write", file=str(path), hint="give the name of a file")
    if not path.parent.is_dir():
        raise UsageError("there is no such directory to write to", file=str(path.parent), hint="make it first")
    with translate_os_errors(str(path), doing="read"):
        if path.is_file():
            with path.open("rb") as file:
                start = file.read(32)
            if start.strip() and not start.startswith(_OPENINGS):
                raise UsageError(
                    "this file is no report of ckpt, and is not replaced",
                    file=str(path),
                    hint="give another name, or remove it",
                )


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes a text file; one that is there is replaced, a pipe or device is written to.

    Raises:
        UsageError: as for ``check_place``.
        CapacityError, StorageError: the system refuses.
    """
    check_place(path)
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
    with translate_os_errors(str(path), doing="write"):
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            path.write_bytes(data)
            return
        target = Path(os.path.realpath(path))  # a link stays one
        aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            aside.write_bytes(data)
            os.replace(aside, target)
        finally:
            with suppress(FileNotFoundError):
                aside.unlink()
