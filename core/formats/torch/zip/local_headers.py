"""Read the records of a torch zip whose directory is lost or damaged, by their local headers.

The directory is at the end of a zip, so a file that was cut has none. But every record has a header
of its own, and torch writes the pickle first, whose references to storages state their lengths::

    local header · name · extra field · data · descriptor (CRC-32, the length twice)

Headers that torch writes have no lengths; the descriptor after the data proves them. Reading ends
at the first record that is incomplete, or is not where the one before it ends.

Source: as ``torch.zip.container``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from core.formats.torch.zip.container import (
    DEFLATED,
    HAS_DESCRIPTOR,
    LOCAL,
    LOCAL_SIGNATURE,
    STORED,
    U32,
    Record,
)

if TYPE_CHECKING:
    from core.files.store import ReadStore

_DESCRIPTORS = (struct.Struct("<4sIII"), struct.Struct("<4sIQQ"))
"""Signature, CRC-32, stored and inflated length; in wide form after records of 4 GiB and more."""
_DESCRIPTOR_MARK = b"PK\x07\x08"
_WINDOW_BYTES = 1 << 20
_MAX_SEARCHED_BYTES = 1 << 30
"""Maximum length of a record of unknown length, such as the pickle."""
_MAX_MARKS = 1000
"""Maximum number of places that look like a descriptor in such a record."""


def read_local_headers(
    store: ReadStore,
    file: str,
    *,
    start: int,
    stop: int,
    length_of: Callable[[str], int | None],
) -> Iterator[tuple[str, Record]]:
    """Yield (name below the root, record) of the complete records, in the order of the file.

    Args:
        start, stop: the bytes of the file that are, or were, the zip.
        length_of: called with a record's name when it comes up; returns its length in bytes, or
            None if it is unknown.
    """
    at = start
    while at + LOCAL.size <= stop:
        mark, _, flags, method, _, _, crc, stored, size, n_name, n_extra = LOCAL.unpack(
            store.read(file, at, LOCAL.size)
        )
        data = at + LOCAL.size + n_name + n_extra
        if mark != LOCAL_SIGNATURE or method not in (STORED, DEFLATED) or data > stop:
            return
        raw_name = store.read(file, at + LOCAL.size, n_name)
        name = raw_name.decode("utf-8", "replace").partition("/")[2]
        # Other programs state the lengths in the header.
        if not flags & HAS_DESCRIPTOR:
            if U32 in (stored, size) or data + stored > stop:
                return
            at = data + stored
        else:
            descriptor = _find_descriptor(store, file, data, stop, length_of(name))
            if descriptor is None:
                return
            crc, stored, size, at = descriptor
        is_packed = method == DEFLATED
        yield name, Record(data, size if is_packed else stored, crc, stored if is_packed else None)


def _find_descriptor(
    store: ReadStore, file: str, data: int, stop: int, n_bytes: int | None
) -> tuple[int, int, int, int] | None:
    """Return CRC-32, stored and inflated length, and the end of the descriptor after some data.

    Args:
        data: address of the data.
        stop: end of the zip.
        n_bytes: length of the data, if it is known.

    Returns:
        None if the file has no descriptor with the length of the data before it.
    """
    at = data if n_bytes is None else data + n_bytes
    last = min(stop, data + _MAX_SEARCHED_BYTES if n_bytes is None else at + 1)
    longest = _DESCRIPTORS[-1].size
    n_marks = 0
    while at < last:
        # Windows overlap, so that a descriptor at the end of one is complete in the next.
        window = store.read(file, at, min(min(_WINDOW_BYTES, last - at) + longest, stop - at))
        position = window.find(_DESCRIPTOR_MARK)
        while 0 <= position < min(_WINDOW_BYTES, last - at) and n_marks < _MAX_MARKS:
            for form in _DESCRIPTORS:
                if position + form.size > len(window):
                    continue
                _, crc, stored, size = form.unpack_from(window, position)
                end = at + position + form.size
                if stored == at + position - data and _begins_record(store, file, end, stop):
                    return crc, stored, size, end
            n_marks += 1
            position = window.find(_DESCRIPTOR_MARK, position + 1)
        at += _WINDOW_BYTES
    return None


def _begins_record(store: ReadStore, file: str, at: int, stop: int) -> bool:
    """Return whether a header or the directory begins at an address, or the file ends there."""
    return stop - at < len(LOCAL_SIGNATURE) or store.read(file, at, 2) == LOCAL_SIGNATURE[:2]
