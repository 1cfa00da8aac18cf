"""What lies where a file of weights should: a Git LFS pointer, a page or a message of a server, or other text.

A clone without Git LFS leaves pointers, and a download without permission the server's answer, under the name of the
file that was wanted. None of the binary formats begins as a text does.

Source: Git LFS specification 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.files.store import ReadStore

HEAD_BYTES = 64
"""So many bytes at the begin of a file tell."""
_POINTER = b"version https://git-lfs"
_MARKUP = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype|!--|html|head|\?xml|error)", re.IGNORECASE)
_JSON = re.compile(rb"\s*(\{\s*\"|\[\s*[\[{\"])")
_TEXT = re.compile(rb"[\t\n\r\x20-\x7e]{4,}")


@dataclass(frozen=True, slots=True)
class Substitute:
    """What a file is instead of weights.

    Args:
        title: a noun with its article, for a message.
        hint: how to get the file itself.
        is_download: it is certainly what a download or a clone left; other text may be what was meant to be there.
    """

    title: str
    hint: str
    is_download: bool = True


def substitute_of(head: bytes) -> Substitute | None:
    """Return what the first ``HEAD_BYTES`` bytes of a file tell that it is; None if they are no text."""
    again = "download the file again; a private or gated model needs a login first (hf auth login)"
    if head.startswith(_POINTER):
        return Substitute("a Git LFS pointer, not the file itself", "fetch the file itself: git lfs pull")
    if _MARKUP.match(head):
        return Substitute("a web page or a server's error message (HTML or XML), not the file itself", again)
    if _JSON.match(head):
        return Substitute("JSON text, such as a server's error message, not the file itself", again, is_download=False)
    if _TEXT.fullmatch(head):
        start = head[:32].decode("ascii").strip()
        return Substitute(f"a text file that begins {start!r}, not a file of weights", again, is_download=False)
    return None


def substitute_in(store: ReadStore, file: str) -> Substitute | None:
    """Return what a file of a store is instead of weights; None if it does not begin as a text.

    Raises:
        MissingShardError, StorageError: the file cannot be read.
    """
    return substitute_of(store.read(file, 0, min(store.size(file), HEAD_BYTES)))
