"""Read the CRC-32s that torch zips record: zips that are files, or items of DCP files.

A checkpoint directory of another format may contain a DCP checkpoint in a subdirectory
(torchtitan's parts, Lightning's, accelerate's ``pytorch_model_fsdp_0``); its data files have items
too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING

from core.engine.scan.windows import StatedCrc
from core.errors import CheckpointingException, CorruptError, Report, raising
from core.files.source_store import SourceStore, open_store
from core.formats.dcp.reading.stored_metadata import metadata_of
from core.formats.torch.other_pickles import damaged_member, is_torch_zip
from core.formats.torch.zip.container import LOCAL_SIGNATURE, read_archive

if TYPE_CHECKING:
    from core.files.store import ReadStore

_WITH_ITEMS = ("dcp", "torch_dist")
_ITEMS_SUFFIX = ".distcp"
"""Suffix of files that consist of items; such a file is not a zip, although it begins as one."""


class StatedCrcReader:
    """A reader of the CRCs that files record (``core.engine.scan.run.StatedIn``).

    Args:
        store: the checkpoint.
        format: name of the checkpoint's format; None if unknown.
    """

    def __init__(self, store: SourceStore, format: str | None) -> None:
        self._store = store
        self._items = _read_item_positions(store) if format in _WITH_ITEMS else {}
        self._items_below = cache(self._items_in)

    def __call__(self, file: str, n_bytes: int, *, report: Report) -> Iterator[StatedCrc]:
        """Yield the CRCs that a file records.

        Args:
            file: name of the file.
            n_bytes: size of the file.
            report: called with errors in single items or records.

        Raises:
            CheckpointingException: the file is a damaged zip, or cannot be read.
        """
        # Try items first: the first item of a DCP file may be a zip, which the file itself is not.
        items = self._items_of(file)
        if items is not None:
            yield from self._read_items(file, n_bytes, items, report)
        elif not is_zip(self._store, file, 0, n_bytes):
            return
        elif file.endswith((".pt", ".pth")) or is_torch_zip(self._store, file, n_bytes):
            yield from read_stated_crcs(self._store, file, report=report)
        else:
            # The members of another program's zip are mostly deflated: inflate and check them here.
            damage = damaged_member(self._store, file, n_bytes)
            if damage is not None:
                report(CorruptError(damage, file=file))

    def _items_of(self, file: str) -> Iterable[tuple[int, int]] | None:
        """Return (offset, length) of a file's items, or None if it does not consist of items."""
        items = self._items.get(file)
        if items is None and file.endswith(_ITEMS_SUFFIX):
            folder, _, name = file.rpartition("/")
            items = self._items_below(folder).get(name, ()) if folder else ()
        return items

    def _read_items(
        self, file: str, n_bytes: int, items: Iterable[tuple[int, int]], report: Report
    ) -> Iterator[StatedCrc]:
        """Yield the CRCs that the items of a file record; report damaged items."""
        for start, length in items:
            try:
                # Other checks report items beyond the end. Items of objects may be bare pickles.
                if start + length <= n_bytes and is_zip(self._store, file, start, length):
                    yield from read_stated_crcs(
                        self._store, file, start=start, n_bytes=length, report=report
                    )
            except CheckpointingException as err:
                err.span = err.span or (start, start + length)
                report(err)

    def _items_in(self, folder: str) -> Mapping[str, Iterable[tuple[int, int]]]:
        """Return file → items for a subdirectory that is a separate DCP checkpoint."""
        with closing(open_store(self._store.root / folder)) as store:
            return _read_item_positions(store)


def _read_item_positions(store: ReadStore) -> Mapping[str, Iterable[tuple[int, int]]]:
    """Return file → (offset, length) of its items; {} if the metadata cannot be read."""
    try:
        metadata = metadata_of(store)
    except CheckpointingException:
        return {}
    positions: dict[str, list[tuple[int, int]]] = {name: [] for name in metadata.files}
    for file, offset, n_bytes in zip(
        metadata.file_index, metadata.item_offset, metadata.item_bytes, strict=True
    ):
        positions[metadata.files[file]].append((offset, n_bytes))
    for item in metadata.objects.values():
        positions.setdefault(item.file, []).append((item.offset, item.n_bytes))
    return {name: sorted(set(items)) for name, items in positions.items()}


def is_zip(store: ReadStore, file: str, start: int, n_bytes: int) -> bool:
    """Return whether a zip begins at byte ``start`` of a file."""
    return (
        n_bytes >= len(LOCAL_SIGNATURE)
        and store.read(file, start, len(LOCAL_SIGNATURE)) == LOCAL_SIGNATURE
    )


def read_stated_crcs(
    store: ReadStore,
    file: str,
    *,
    start: int = 0,
    n_bytes: int | None = None,
    report: Report = raising,
) -> Iterator[StatedCrc]:
    """Yield the CRCs of the uncompressed records of a zip.

    Args:
        start, n_bytes: position of the zip in the file; None for everything from ``start`` on.
        report: called with errors in single records.

    Raises:
        CheckpointingException: the zip is damaged, or cannot be read.
    """
    archive = read_archive(store, file, start=start, n_bytes=n_bytes, report=report)
    for name, record in archive.records.items():
        # A CRC of 0 was not computed. That of a deflated record covers the inflated bytes, so the
        # reader that inflates them compares it.
        if record.crc and record.packed_bytes is None:
            yield StatedCrc(*record.span, record.crc, f"record {name}")
