"""Report files, which are replaced atomically so that nobody reads half of one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from core.errors import UsageError
from core.files.store import translate_os_errors

_OPENINGS = (
    b'{"schema": "ckpt.',
    b'{\n "$schema": ',
    b"<?xml ",
    b"::",
    "✓ ".encode(),
    "✗ ".encode(),
    b"! ",
)
"""First bytes of the reports and baselines that this program writes; colours are never written to a
file."""


def check_report_path(path: Path) -> None:
    """Raise unless a report can be written to the path.

    Called before the work to be reported begins.

    An older report may be replaced. Any other file may not, so that a slip of the shell's
    completion costs no checkpoint.

    Raises:
        UsageError: the path is a directory, its directory does not exist, or it is a file but not a
            report.
    """
    if path.is_dir():
        raise UsageError(
            "the report's path is a directory", file=str(path), hint="give the name of a file"
        )
    if not path.parent.is_dir():
        raise UsageError(
            "the report's directory does not exist", file=str(path.parent), hint="create it first"
        )
    with translate_os_errors(str(path), doing="read"):
        if path.is_file():
            with path.open("rb") as file:
                start = file.read(32)
            if start.strip() and not start.startswith(_OPENINGS):
                raise UsageError(
                    "the file exists and is not a report of ckpt",
                    file=str(path),
                    hint="give another name, or remove the file",
                )


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines to a file, which is replaced if it exists, or to a pipe or device.

    Raises:
        UsageError: ``check_report_path`` refuses the path.
        CapacityError: the disk is full.
        StorageError: the system refuses to write.
    """
    check_report_path(path)
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
    with translate_os_errors(str(path), doing="write"):
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            path.write_bytes(data)
            return
        target = Path(os.path.realpath(path))  # a symbolic link is kept; its target is replaced
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(data)
            os.replace(temporary, target)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
