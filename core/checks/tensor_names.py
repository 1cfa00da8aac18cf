"""Look up which tensors lie at given bytes of a file, so that findings can name them.

A damaged zip record is ``data/28``, and a NaN lies at some element of a flat buffer; a user knows
neither. Names are those of the global tensors, optimizer states included, if the layout is
understood; otherwise those in the files. Values of the tensors need not be consistent with each
other: they may be what is damaged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING

from core.catalog.stored import n_stored_bytes
from core.errors import CheckpointingException
from core.formats.torch.format import load_object
from core.formats.torch.tree import parse
from core.megatron.reshard.reshard import unshard
from core.opening.objects import loaded

if TYPE_CHECKING:
    from core.catalog.catalog import Catalog
    from core.catalog.stored import StoredArray
    from core.files.store import LocalStore
    from core.megatron.rules.rules import Rules


class TensorNames:
    """Index from byte ranges of files to tensor names, for one checkpoint.

    Args:
        stored: catalog of the readable files; None if nothing can be read.
        store: files of the checkpoint.
        rules: layout rules.
    """

    def __init__(self, stored: Catalog | None, store: LocalStore, rules: Rules) -> None:
        self._store = store
        self._indexes = [
            _ByteIndex(_arrays(catalog)) for catalog in _catalogs(stored, store, rules)
        ]

    def at(self, file: str, start: int, stop: int) -> tuple[str, ...]:
        """Return the names of the tensors in bytes ``[start, stop)`` of a file, in file order."""
        for index in self._indexes:
            names = index.names(file, start, stop)
            if names:
                return names
        if self._indexes:
            return ()
        # The metadata of the checkpoint cannot be read, because of another file or a small record; this file's may.
        with suppress(CheckpointingException):
            tree = parse(self._store, file)
            arrays = [*tree.arrays.items(), *tree.hidden.items()]
            return _ByteIndex((key, array) for key, array in arrays).names(file, start, stop)
        return ()


def _catalogs(stored: Catalog | None, store: LocalStore, rules: Rules) -> Iterator[Catalog]:
    """Yield the catalogs that have names, the one with the best names first."""
    if stored is None:
        return
    with suppress(CheckpointingException):
        if stored.is_rank_local:
            yield unshard(
                loaded(stored, store, load_object), rules=rules, optim="carry", store=None
            )
    yield stored


def _arrays(catalog: Catalog) -> Iterator[tuple[str, StoredArray]]:
    """Yield (tensor name, stored array) for every array of a catalog that can be read."""
    for key in (*catalog.tensors, *catalog.hidden):
        with suppress(CheckpointingException):
            for fragment in catalog.fragments(key):
                if fragment.array is not None:
                    yield key, fragment.array


class _ByteIndex:
    """The arrays of one catalog, sorted by file and position."""

    def __init__(self, places: Iterator[tuple[str, StoredArray]]) -> None:
        self._rows: dict[str, list[tuple[int, int, str]]] = {}
        """File → (first byte, end, tensor name), sorted."""
        for key, array in places:
            start = array.extent.offset
            row = (start, start + max(n_stored_bytes(array), 1), key)
            self._rows.setdefault(array.extent.file, []).append(row)
        self._reach: dict[str, list[int]] = {}
        """File → for each row, the greatest end among it and the rows before it."""
        for file, rows in self._rows.items():
            rows.sort()
            self._reach[file] = list(accumulate((row[1] for row in rows), max))

    def names(self, file: str, start: int, stop: int) -> tuple[str, ...]:
        """Return the names of the tensors in bytes ``[start, stop)`` of a file, in file order."""
        rows, reach = self._rows.get(file, []), self._reach.get(file, [])
        names: list[str] = []
        # Walk back from the last row that begins before stop, until no earlier row can reach start.
        for number in range(bisect_left(rows, (stop,)) - 1, -1, -1):
            if reach[number] <= start:
                break
            if rows[number][1] > start:
                names.append(rows[number][2])
        return tuple(dict.fromkeys(reversed(names)))
