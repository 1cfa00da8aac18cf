"""Recognise text instead of a weights file: a Git LFS pointer, or a server's page or message.

A clone without Git LFS leaves pointers, and a download without permission leaves the server's
response, under the name of the requested file. No binary format begins like a text.

Source: Git LFS specification 1.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

HEAD_BYTES = 64
"""Number of bytes at the beginning of a file that are sufficient to recognise a text."""
_POINTER = b"version https://git-lfs"
_MARKUP = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype|!--|html|head|\?xml|error)", re.IGNORECASE)
_JSON = re.compile(rb"\s*(\{\s*\"|\[\s*[\[{\"])")
_TEXT = re.compile(rb"[\t\n\r\x20-\x7e]{4,}")


@dataclass(frozen=True, slots=True)
class Substitute:
    """Text that was found instead of a weights file.

    Args:
        title: description of the text, a noun with its article, for a message.
        hint: how to get the real file.
        is_download: the text certainly comes from a download or a clone; other text may be
            intended by the user.
    """

    title: str
    hint: str
    is_download: bool = True


def substitute_of(head: bytes) -> Substitute | None:
    """Recognise a text from the first ``HEAD_BYTES`` of a file; return None for other files."""
    again = "download the file again; a private or gated model needs a login first (hf auth login)"
    if head.startswith(_POINTER):
        return Substitute(
            "the file is a Git LFS pointer instead of the weights",
            "fetch the file itself with git lfs pull",
        )
    if _MARKUP.match(head):
        return Substitute(
            "the file is a web page or a server's error message (HTML or XML) instead of the "
            "weights",
            again,
        )
    # A user may have passed a JSON or text file on purpose: these are not certainly downloads.
    if _JSON.match(head):
        return Substitute(
            "the file is JSON text, such as a server's error message, instead of weights",
            again,
            is_download=False,
        )
    if _TEXT.fullmatch(head):
        start = head[:32].decode("ascii").strip()
        return Substitute(
            f"the file is text that begins with {start!r}, not a weights file",
            again,
            is_download=False,
        )
    return None


def substitute_in(store: ReadStore, file: str) -> Substitute | None:
    """Recognise a file of a store that is a text instead of weights; return None for other files.

    Raises:
        MissingShardError, StorageError: the file cannot be read.
    """
    return substitute_of(store.read(file, 0, min(store.size(file), HEAD_BYTES)))
