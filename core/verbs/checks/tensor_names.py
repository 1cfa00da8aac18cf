"""Look up the tensors stored at given bytes of a file, so that findings can name them.

Users do not know a damaged zip record as ``data/28``, nor a NaN as an element of a flat buffer. The
names are those of the global tensors, including optimizer states, if the layout can be determined;
otherwise those in the files. The layout is derived without the values of the tensors, which may be
the damaged part.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING

from core.engine.catalog.stored import n_stored_bytes
from core.errors import CheckpointingException
from core.formats.torch.tree import parse
from core.megatron.reshard.unshard import unshard
from core.opening.objects import loaded

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog
    from core.engine.catalog.stored import StoredArray
    from core.files.source_store import SourceStore
    from core.megatron.rules.rules import Rules


class TensorNames:
    """Index from byte ranges of files to tensor names, for one checkpoint.

    Args:
        stored: catalog of the readable files; None if nothing can be read.
        store: files of the checkpoint.
        rules: layout rules.
    """

    def __init__(self, stored: Catalog | None, store: SourceStore, rules: Rules) -> None:
        self._store = store
        # The catalog with the best names comes first; ``at`` takes the first match.
        catalogs = [] if stored is None else [stored]
        if stored is not None and stored.is_rank_local:
            with suppress(CheckpointingException):
                with_objects = loaded(stored, store)
                catalogs.insert(0, unshard(with_objects, rules=rules, optim="carry", store=None))
        self._indexes = [_ByteIndex(_readable_arrays(catalog)) for catalog in catalogs]

    def at(self, file: str, start: int, stop: int) -> tuple[str, ...]:
        """Return the names of the tensors in bytes ``[start, stop)`` of a file, in file order."""
        for index in self._indexes:
            names = index.names(file, start, stop)
            if names:
                return names
        if self._indexes:
            return ()
        # The metadata of the checkpoint cannot be read, perhaps because of another file or a small
        # record; the pickle of this file may still be readable.
        with suppress(CheckpointingException):
            tree = parse(self._store, file)
            arrays = (*tree.arrays.items(), *tree.hidden.items())
            return _ByteIndex(arrays).names(file, start, stop)
        return ()


def _readable_arrays(catalog: Catalog) -> Iterator[tuple[str, StoredArray]]:
    """Yield (tensor name, stored array) for every array of a catalog that can be read."""
    for key, tensor in catalog.all_tensors():
        with suppress(CheckpointingException):
            for fragment in tensor.fragments():
                if fragment.array is not None:
                    yield key, fragment.array


class _ByteIndex:
    """The arrays of one catalog, sorted by file and position."""

    def __init__(self, places: Iterable[tuple[str, StoredArray]]) -> None:
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
        # Arrays may overlap (shared storages), so the end of the nearest row is not enough: walk
        # back from the last row that begins before stop, until no earlier row can reach start.
        for number in range(bisect_left(rows, (stop,)) - 1, -1, -1):
            if reach[number] <= start:
                break
            if rows[number][1] > start:
                names.append(rows[number][2])
        return tuple(dict.fromkeys(reversed(names)))
