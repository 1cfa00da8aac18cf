"""How the bytes of an array are obtained where they do not lie in a file as plain elements.

Compressed chunks, streams of a codec, values inside a database's nodes, and tensors that are computed from others
(``core.quantize``) are *encoded*: ``Extent.encoding`` holds a value that knows how to make their dense bytes. The
engine reads such an array as if it were a file of its own (``core.decoded``), one *unit* at a time, so that memory
stays bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from core.catalog import StoredArray
    from core.store import ReadStore


class Encoding(Protocol):
    """A codec with its parameters: a frozen value that compares by what it holds.

    The dense bytes of an array (C order, little endian, ``StoredArray.n_bytes`` long) are cut into units of
    ``unit_bytes``; the last one may be shorter. A codec without random access has one unit, the whole array.

    An encoding that reads other files than the extent's lists them in an attribute ``files``, see ``files_read``; one
    that compares with a checksum has a true attribute ``has_checksum``, see ``has_checksum``.
    """

    @property
    def name(self) -> str:
        """The codec, for people: ``zstd``, ``blosc``, ``fp8 blocks``."""

    @property
    def unit_bytes(self) -> int:
        """Dense bytes of one unit; more than 0."""

    @property
    def working_bytes(self) -> int:
        """Most memory that decoding one unit takes, the unit itself left out."""

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes | memoryview:
        """The dense bytes of one unit; called from several threads.

        Args:
            store: the source's files.
            array: the encoded array; its extent names the file and, where that means something, the byte address.
            unit: number of the unit, from 0.

        Raises:
            CorruptError, TruncatedError, MissingShardError, UnsupportedError: names the file.
        """


def stored_bytes_of(encoding: Encoding) -> int | None:
    """Length of the encoded bytes in the extent's file, from its offset, for people.

    None where an encoding does not say it in a field ``stored_bytes``: values inside a node of a database, computed
    tensors.
    """
    found = getattr(encoding, "stored_bytes", None)
    return found if isinstance(found, int) else None


def files_read(encoding: Encoding | None) -> Sequence[str]:
    """The files that decoding reads, that of the extent left out."""
    found: Sequence[str] = getattr(encoding, "files", ())
    return found


def has_checksum(encoding: Encoding) -> bool:
    """Whether decoding compares all stored bytes, or all that they make, with a checksum."""
    return bool(getattr(encoding, "has_checksum", False))
