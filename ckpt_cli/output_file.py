"""A report in a file: written aside and moved there, so that nobody reads half of one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from core.errors import UsageError
from core.store import translated


def check_place(path: Path) -> None:
    """Refuses what cannot be written, before the work that is to be reported begins.

    Raises:
        UsageError: the path is a directory, or its directory does not exist.
    """
    if path.is_dir():
        raise UsageError("this is a directory, and no file to write", file=str(path), hint="give the name of a file")
    if not path.parent.is_dir():
        raise UsageError("there is no such directory to write to", file=str(path.parent), hint="make it first")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes a text file; one that is there is replaced, a pipe or device is written to.

    Raises:
        UsageError: as for ``check_place``.
        CapacityError, StorageError: the system refuses.
    """
    check_place(path)
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
    with translated(str(path), doing="write"):
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
