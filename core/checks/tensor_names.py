"""Which tensors lie at some bytes of a file: so that a finding about a record or a buffer names what it is about.

A damaged record of a zip is ``data/28``, and a NaN lies at some element of a flat buffer; a user knows neither. Names
are those of the global tensors, optimizer states included, where the layout is understood (their values need not fit
each other: they may be what is damaged); else those that the files have.
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
    """Answers for one checkpoint; made from its catalogs when it is first asked.

    Args:
        stored: the catalog of its files, as far as they can be read; None if nothing can.
        store: its files.
        rules: the layout's table.
    """

    def __init__(self, stored: Catalog | None, store: LocalStore, rules: Rules) -> None:
        self._store = store
        self._spaces = [_Space(_places(catalog)) for catalog in _catalogs(stored, store, rules)]

    def at(self, file: str, start: int, stop: int) -> tuple[str, ...]:
        """Return the names of the tensors that have bytes in ``[start, stop)`` of a file, in the order of the file."""
        for space in self._spaces:
            names = space.names(file, start, stop)
            if names:
                return names
        if self._spaces:
            return ()
        # The metadata as a whole cannot be read, because of another file or of a small record; the file's own may do.
        with suppress(CheckpointingException):
            tree = parse(self._store, file)
            arrays = [*tree.arrays.items(), *tree.hidden.items()]
            return _Space((key, array) for key, array in arrays).names(file, start, stop)
        return ()


def _catalogs(stored: Catalog | None, store: LocalStore, rules: Rules) -> Iterator[Catalog]:
    """Yield the catalogs that have names, the best ones first."""
    if stored is None:
        return
    with suppress(CheckpointingException):
        if stored.is_rank_local:
            yield unshard(loaded(stored, store, load_object), rules=rules, optim="carry", store=None)
    yield stored


def _places(catalog: Catalog) -> Iterator[tuple[str, StoredArray]]:
    for key in (*catalog.tensors, *catalog.hidden):
        with suppress(CheckpointingException):
            for fragment in catalog.fragments(key):
                if fragment.array is not None:
                    yield key, fragment.array


class _Space:
    """The arrays of one catalog, by file and place."""

    def __init__(self, places: Iterator[tuple[str, StoredArray]]) -> None:
        self._rows: dict[str, list[tuple[int, int, str]]] = {}
        """File → (first byte, byte behind the last, key), sorted."""
        for key, array in places:
            start = array.extent.offset
            row = (start, start + max(n_stored_bytes(array), 1), key)
            self._rows.setdefault(array.extent.file, []).append(row)
        self._reach: dict[str, list[int]] = {}
        """File → how far the rows up to each reach."""
        for file, rows in self._rows.items():
            rows.sort()
            self._reach[file] = list(accumulate((row[1] for row in rows), max))

    def names(self, file: str, start: int, stop: int) -> tuple[str, ...]:
        rows, reach = self._rows.get(file, []), self._reach.get(file, [])
        names: list[str] = []
        for number in range(bisect_left(rows, (stop,)) - 1, -1, -1):
            if reach[number] <= start:
                break
            if rows[number][1] > start:
                names.append(rows[number][2])
        return tuple(dict.fromkeys(reversed(names)))
