"""Recognition of streams by their first bytes: one of torch's formats, a pickle, or neither.

A tar file written by torch 0.1 has the members ``storages``, ``tensors`` and ``pickle``; any other
tar file is not torch's.

Source: torch 2.13 ``torch/serialization.py`` (``_is_zipfile``, ``legacy_load``); POSIX.1-1988 for
    tar's headers.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.files.store import ReadStore

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""The endings of the names of torch files."""
PICKLED_NAME = re.compile(r"\.(pkl|pickle|joblib|npy|npz|pt|pth|ckpt)(\.\w+)?$")
"""The ending of the name of a file that may be a pickle, maybe compressed."""
MAGIC = re.compile(
    rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"
    rb"|L119547037146038801333356L\n\.",
    re.DOTALL,
)
"""The magic number at the start of a stream from before torch 1.6, in protocols 0 to 5."""
_TAR_MEMBERS = frozenset((b"storages", b"tensors", b"pickle"))
_TAR_BLOCK_BYTES = 512
_MAX_MEMBERS = 8
"""Maximum number of headers that are read; torch wrote four members."""


def stream_kind(store: ReadStore, file: str, start: int, n_bytes: int) -> str | None:
    """Return the kind of a stream: ``zip``, ``legacy`` (torch before 1.6), ``tar``, ``pickle``.

    None if the bytes look like none of these. Pickles are recognised in protocols 2 to 5 only,
    because those of protocols 0 and 1 have no signature.

    Args:
        start, n_bytes: the bytes of the file that are the stream.
    """
    head = store.read(file, start, min(n_bytes, _TAR_BLOCK_BYTES))
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    if MAGIC.match(head):
        return "legacy"
    if head[257:262] == b"ustar":
        return "tar" if tar_members(store, file, start, n_bytes).keys() >= _TAR_MEMBERS else None
    if len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return "pickle"
    return None


def has_pickled_name(name: str) -> bool:
    """Return whether a file is named like a pickle, maybe compressed, but not like a torch file."""
    return PICKLED_NAME.search(name) is not None and not name.endswith((".pt", ".pth", ".ckpt"))


def tar_members(
    store: ReadStore, file: str, start: int, n_bytes: int
) -> dict[bytes, tuple[int, int]]:
    """Return name → (address of the first byte, length in bytes) of a tar file's first members."""
    members: dict[bytes, tuple[int, int]] = {}
    at, stop = start, start + n_bytes
    for _ in range(_MAX_MEMBERS):
        if at + _TAR_BLOCK_BYTES > stop:
            break
        # A header contains the name, and the size in octal digits; anything else ends the list.
        header = store.read(file, at, _TAR_BLOCK_BYTES)
        name, size = header[:100].rstrip(b"\0"), header[124:136].strip(b"\0 ")
        if header[257:262] != b"ustar" or not size.isdigit() or set(size) & set(b"89"):
            break
        at += _TAR_BLOCK_BYTES
        members[name.removeprefix(b"./")] = at, min(int(size, 8), stop - at)
        # The next header begins at the next block.
        at += -(-int(size, 8) // _TAR_BLOCK_BYTES) * _TAR_BLOCK_BYTES
    return members
