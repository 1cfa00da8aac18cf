"""The error for a path that does not exist: a misspelt one, or a model on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path
from shlex import quote

from core.errors import UsageError, most_similar
from core.files.url import hub_download

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""The form of a model's name on the Hugging Face Hub: owner/model."""
_MOST_NAMES = 10_000
"""Maximum number of names of a directory that are compared with a misspelt one."""


SAVE_STREAM = "save the stream to a file first, and pass the file"
"""Hint for standard input, a pipe or a device in place of a file."""


def absent(path: Path, *, what: str = "no such file or directory") -> UsageError:
    """Return the error for a path that does not exist, with the most similar one that does."""
    if str(path) == "-":
        return UsageError("standard input cannot be read", file="-", hint=SAVE_STREAM)
    hint = None if os.path.lexists(path) else _similar_path(path)
    if hint is None and _HUB_ID.fullmatch(str(path)) and not path.parent.exists():
        command = hub_download(str(path))
        hint = f"if this is a model on the Hugging Face Hub, download it first: {command}"
    return UsageError(what, file=str(path), hint=hint or "check the spelling of the path")


def _similar_path(path: Path) -> str | None:
    """Return the hint that names a path with a similar spelling; None if there is none."""
    # The first part that does not exist is the misspelt one; the rest is kept where it fits.
    missing = path
    while missing.parent != missing and not os.path.lexists(missing.parent):
        missing = missing.parent
    try:
        with os.scandir(missing.parent) as entries:
            names = [entry.name for entry in islice(entries, _MOST_NAMES)]
    except OSError:
        return None
    names = [name for name in names if name.startswith(".") == missing.name.startswith(".")]
    similar = most_similar(missing.name, sorted(names))
    if similar is None:
        return None
    near, rest = missing.parent / similar, path.relative_to(missing)
    return f"did you mean {quote(str(near / rest if os.path.lexists(near / rest) else near))}?"
