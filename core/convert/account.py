"""Account for the tensors of a source: each is written, or the record says why it is not.

Many steps lead from an opened source to the tensors that are written: they select, rename, join,
cut and compute, and a mistake in any of them could forget a tensor. So the arrays that opening the
source has found are compared with those that the written tensors are made of, whatever their
names and shapes have become (``core.catalog.stored.find_inputs``). An array that is in none of them
must be that of an entry in the record (``core.catalog.dropped``).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence

from core.catalog.catalog import AnyCatalog, Catalog
from core.catalog.dropped import Dropped
from core.catalog.stored import StoredArray, find_inputs, n_stored_bytes
from core.catalog.tensor import Tensor


def check_account(
    opened: Catalog, source: Catalog, target: AnyCatalog, record: Sequence[Dropped]
) -> None:
    """Raise if a tensor is neither written nor recorded as left out.

    A tensor of which a part is written is accounted for: the rest is padding.

    Args:
        opened: the source as it was opened; of a merge, the first one (``core.merge`` matches the
            tensors of the others with its own).
        source: the source under the target's keys.
        target: what is written.
        record: the entries that are not.

    Raises:
        RuntimeError: a step of the conversion has lost a tensor. No checkpoint may cause that.
    """
    lost = _find_unaccounted(opened, source, target, record)
    if lost:
        raise RuntimeError(
            f"{len(lost):,} tensors of the source would be neither written nor listed as not "
            f"carried, such as {lost[0]}; nothing was written"
        )


def _find_unaccounted(
    opened: Catalog, source: Catalog, target: AnyCatalog, record: Sequence[Dropped]
) -> list[str]:
    """Return the keys of the tensors that are neither written nor recorded as left out."""
    written = [source.meta(key) for key, _ in target.all_tensors()]
    recorded = [tensor for entries in record for tensor in entries.tensors]
    # Most tensors only change their name, and are recognized without their fragments. Those of one
    # that is left out may be unreadable.
    unchanged = {id(tensor.tiling) for tensor in (*written, *recorded)}
    names = {
        name.partition(" ")[0]
        for entries in record
        if not entries.tensors
        for name in entries.names
    }
    missing = {
        key: tensor
        for key, tensor in opened.tensors.items()
        if id(tensor.tiling) not in unchanged
        # The record has the names of a rank's entries without the rank.
        and not _is_named(key.partition(":")[2] if opened.is_rank_local else key, names)
    }
    if not missing:
        return []

    # Find the others by the places of their arrays.
    opened_tilings = {id(tensor.tiling) for tensor in opened.tensors.values()}
    parts = [tensor for tensor in recorded if id(tensor.tiling) not in opened_tilings]
    places: dict[str, set[int]] = {}
    for array in _arrays_of([*written, *parts]):
        for stored in find_inputs(array):
            places.setdefault(stored.extent.file, set()).add(stored.extent.offset)
    offsets = {file: sorted(starts) for file, starts in places.items()}

    def is_lost(array: StoredArray) -> bool:
        extent = array.extent
        if extent.file in names:
            return False
        # A part of an array begins inside of it.
        starts = offsets.get(extent.file, [])
        n_bytes = 1 if extent.is_late else max(1, n_stored_bytes(array))
        number = bisect_left(starts, extent.offset)
        return number == len(starts) or starts[number] >= extent.offset + n_bytes

    lost = []
    for key, tensor in missing.items():
        arrays = list(_arrays_of([tensor])) if tensor.n_elements else []
        if arrays and all(map(is_lost, arrays)):
            lost.append(key)
    return lost


def _arrays_of(tensors: Iterable[Tensor]) -> Iterator[StoredArray]:
    """Yield the arrays of tensors."""
    for tensor in tensors:
        for fragment in tensor.fragments():
            if fragment.array is not None:
                yield fragment.array


def _is_named(key: str, names: Collection[str]) -> bool:
    """Return whether a name is that of an entry, or of a container that it is in."""
    return key in names or any(key[: match.start()] in names for match in re.finditer(r"[./]", key))
