"""The CRCs that torch zips state of their records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from core.errors import Report, raising
from core.formats.torch_zip import LOCAL_SIGNATURE, read_archive
from core.stated import Stated

if TYPE_CHECKING:
    from core.store import ReadStore


def is_zip(store: ReadStore, file: str, start: int, n_bytes: int) -> bool:
    """Whether a file holds a zip at a byte."""
    return n_bytes >= len(LOCAL_SIGNATURE) and store.read(file, start, len(LOCAL_SIGNATURE)) == LOCAL_SIGNATURE


def stated_in_zip(
    store: ReadStore, file: str, *, start: int = 0, n_bytes: int | None = None, report: Report = raising
) -> Iterator[Stated]:
    """The CRCs of the records that lie in the file as they are; 0 stands for none.

    The CRC of a deflated record is that of other bytes than the file holds: who inflates it compares.

    Args:
        start, n_bytes: where the zip lies; None for all the rest of the file.
        report: told of what is wrong with single records.

    Raises:
        CheckpointingException: as for ``core.formats.torch_zip.read_archive``.
    """
    archive = read_archive(store, file, start=start, n_bytes=n_bytes, report=report)
    for name, record in archive.records.items():
        if record.crc and record.packed_bytes is None:
            yield Stated(*record.span, record.crc, f"record {name}")
