"""Report files, which are replaced atomically so that no reader gets half a report."""

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
    b"<!doctype html>\n<!-- report of ckpt",
    b"::",
    "✓ ".encode(),
    "✗ ".encode(),
    b"! ",
)
"""First bytes of the reports and baselines that ckpt writes, which files get without colours."""


def check_report_path(path: Path) -> None:
    """Raise unless a report can be written to the path; called before the work begins.

    An older report may be replaced, any other file may not: a slip of the shell's completion must
    not overwrite a file of a checkpoint.

    Raises:
        UsageError: the path is a directory, its directory does not exist, or it is a file but not a
            report.
        StorageError: the file cannot be read.
    """
    if path.is_dir():
        raise UsageError(
            "the report path is a directory", file=str(path), hint="pass the path of a file"
        )
    if not path.parent.is_dir():
        raise UsageError(
            "the report's directory does not exist",
            file=str(path.parent),
            hint="create the directory first",
        )
    with translate_os_errors(str(path), doing="read"):
        if path.is_file():
            with path.open("rb") as file:
                start = file.read(max(map(len, _OPENINGS)))
            # An empty file may be replaced, such as one created by mktemp.
            if start.strip() and not start.startswith(_OPENINGS):
                raise UsageError(
                    "the file already exists and is not a ckpt report",
                    file=str(path),
                    hint="choose a different name, or remove the file",
                )


def write_output(path: Path, lines: Iterable[str]) -> None:
    """Write lines to a file, which is replaced if it exists, or to a pipe or device.

    Raises:
        UsageError: ``check_report_path`` refuses the path.
        CapacityError: the disk is full.
        StorageError: permission denied, or an I/O error.
    """
    check_report_path(path)
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
    with translate_os_errors(str(path), doing="write"):
        # A pipe or a device, such as /dev/stdout, cannot be replaced.
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            path.write_bytes(data)
            return
        # A symbolic link is kept; its target is replaced.
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(data)
            os.replace(temporary, target)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
