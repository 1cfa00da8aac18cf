"""All the CRC-32s that the files of a checkpoint state: those in torch zips, whole files or items of DCP files.

A DCP checkpoint may lie in a folder of its own inside the directory (torchtitan's parts, Lightning's, accelerate's
``pytorch_model_fsdp_0``); its data files have items like any other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING

from core.errors import CheckpointingException, CorruptError, Report, raising
from core.files.store import LocalStore
from core.formats.dcp import format as dcp
from core.formats.torch.other_pickles import damaged_member, is_checkpoint_file, is_torch_zip
from core.formats.torch.zip.container import LOCAL_SIGNATURE, read_archive
from core.scan.windows import StatedCrc

if TYPE_CHECKING:
    from core.files.store import ReadStore

_WITH_ITEMS = ("dcp", "torch_dist")
_ITEMS_SUFFIX = ".distcp"
"""Of files that hold items one after the other, and are no zip as a whole."""


class StatedSums:
    """Finds the CRCs that files state, see ``core.scan.run.StatedIn``.

    Args:
        store: the checkpoint.
        format: name of its format; None if it is not known.
    """

    def __init__(self, store: LocalStore, format: str | None) -> None:
        self._store = store
        self._items = _items(store) if format in _WITH_ITEMS else {}
        self._items_below = cache(self._items_in)

    def __call__(self, file: str, n_bytes: int, *, report: Report) -> Iterator[StatedCrc]:
        """The CRCs in a file.

        Raises:
            CheckpointingException: the file, which is one zip, is broken.
        """
        items = self._items.get(file)
        if items is None and file.endswith(_ITEMS_SUFFIX):
            folder, _, name = file.rpartition("/")
            items = self._items_below(folder).get(name, ()) if folder else ()
        if items is None:
            if not is_zip(self._store, file, 0, n_bytes):
                return
            if not is_checkpoint_file(file) and not is_torch_zip(self._store, file, n_bytes):
                damage = damaged_member(self._store, file, n_bytes)
                if damage is not None:
                    report(CorruptError(damage, file=file))
            else:
                yield from stated_in_zip(self._store, file, report=report)
            return
        for start, length in items:
            try:
                if start + length <= n_bytes and is_zip(self._store, file, start, length):
                    yield from stated_in_zip(self._store, file, start=start, n_bytes=length, report=report)
            except CheckpointingException as err:
                err.span = err.span or (start, start + length)
                report(err)

    def _items_in(self, folder: str) -> Mapping[str, Iterable[tuple[int, int]]]:
        with closing(LocalStore(self._store.root / folder)) as store:
            return _items(store)


def _items(store: ReadStore) -> Mapping[str, Iterable[tuple[int, int]]]:
    """File → (offset, length) of the items in it; nothing if the metadata cannot be read."""
    try:
        metadata = dcp.metadata_of(store)
    except CheckpointingException:
        return {}
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in metadata.files}
    for file, offset, n_bytes in zip(metadata.file_index, metadata.item_offset, metadata.item_bytes, strict=True):
        found[metadata.files[file]].append((offset, n_bytes))
    for item in metadata.objects.values():
        found.setdefault(item.file, []).append((item.offset, item.n_bytes))
    return {name: sorted(set(items)) for name, items in found.items()}


def is_zip(store: ReadStore, file: str, start: int, n_bytes: int) -> bool:
    """Whether a file holds a zip at a byte."""
    return n_bytes >= len(LOCAL_SIGNATURE) and store.read(file, start, len(LOCAL_SIGNATURE)) == LOCAL_SIGNATURE


def stated_in_zip(
    store: ReadStore, file: str, *, start: int = 0, n_bytes: int | None = None, report: Report = raising
) -> Iterator[StatedCrc]:
    """The CRCs of the records that lie in the file as they are; 0 stands for none.

    The CRC of a deflated record is that of other bytes than the file holds: who inflates it compares.

    Args:
        start, n_bytes: where the zip lies; None for all the rest of the file.
        report: told of what is wrong with single records.

    Raises:
        CheckpointingException: as for ``core.formats.torch.zip.container.read_archive``.
    """
    archive = read_archive(store, file, start=start, n_bytes=n_bytes, report=report)
    for name, record in archive.records.items():
        if record.crc and record.packed_bytes is None:
            yield StatedCrc(*record.span, record.crc, f"record {name}")
