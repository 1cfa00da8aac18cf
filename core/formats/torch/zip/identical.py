"""Find torch zips that are copies of each other, by the CRCs in their directories.

The directory of a zip has name, length, offset and CRC-32 of every record, the pickle among them,
so files with equal directories have equal content. Files that record no CRCs
(``torch.serialization.set_crc32_options(False)``) and those from before torch 1.6, which are not
zips, cannot be compared without reading their data, and are never in a result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from core.errors import CheckpointingException
from core.formats.torch.zip.container import read_archive

if TYPE_CHECKING:
    from core.files.store import ReadStore

_END_BYTES = 1024
"""Bytes at the end of a file that are compared first: the last entries of the directory."""


def identical_files(store: ReadStore, names: Iterable[str]) -> list[list[str]]:
    """Return groups of at least two files with equal content, each sorted.

    Args:
        names: files in the store; those that are not torch zips are skipped.
    """
    # Only files of the same size are read. The end of a file has CRCs of a few records, which
    # differ if the files do.
    sizes = {name: store.size(name) for name in names}
    n_of_size = Counter(sizes.values())
    spans = {
        name: (max(0, size - _END_BYTES), size)
        for name, size in sizes.items()
        if n_of_size[size] > 1
    }
    store.expect_ranges((name, start, stop) for name, (start, stop) in spans.items())
    alike: dict[tuple[int, bytes], list[str]] = {}
    for name, (start, stop) in spans.items():
        try:
            end = store.read(name, start, stop - start)
        except CheckpointingException:
            continue  # other checks report it
        alike.setdefault((stop, end), []).append(name)

    # Only then are complete directories read.
    groups: dict[tuple[object, ...], list[str]] = {}
    for candidates in alike.values():
        for name in candidates if len(candidates) > 1 else ():
            try:
                archive = read_archive(store, name)
            except CheckpointingException:
                continue
            records = archive.records
            if any(record.n_bytes and not record.crc for record in records.values()):
                continue
            identity = (archive.n_bytes, archive.root, *records.items())
            groups.setdefault(identity, []).append(name)
    return sorted(sorted(group) for group in groups.values() if len(group) > 1)
