"""Announce to an object store what the next items will read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Box
from core.arrays.dtypes import itemsize
from core.arrays.gather import byte_span
from core.engine.catalog.decoded import is_decoded
from core.engine.plan.addresses import Source
from core.engine.plan.items import Comparison, Item, ItemNumber, Move
from core.files.store import ReadStore

if TYPE_CHECKING:
    from core.files.ranges import FileRange

_BATCH_BYTES = 32 << 20
_BATCH_ITEMS = 256
_LEAST_SHARE = 0.99
"""Share of a range that is read, from which on all of it is fetched."""


def announce(
    items: Iterable[tuple[ItemNumber, Item]],
    store: ReadStore,
    *,
    is_done: Callable[[ItemNumber], bool],
) -> Iterator[tuple[ItemNumber, Item]]:
    """Yield items; what a batch of them reads is announced while the one before it is copied.

    Args:
        is_done: whether an earlier run has copied an item.
    """
    batches = _batches(items, is_done)
    batch = next(batches, None)
    if batch is not None:
        store.expect_ranges(batch[1])
    while batch is not None:
        following = next(batches, None)
        if following is not None:
            store.expect_ranges(following[1])
        yield from batch[0]
        batch = following


def _batches(
    items: Iterable[tuple[ItemNumber, Item]], is_done: Callable[[ItemNumber], bool]
) -> Iterator[tuple[list[tuple[ItemNumber, Item]], list[FileRange]]]:
    """Yield items in batches, with the ranges that they read."""
    iterator = iter(items)
    while True:
        batch: list[tuple[ItemNumber, Item]] = []
        ranges: list[FileRange] = []
        n_bytes = 0
        for numbered in islice(iterator, _BATCH_ITEMS):
            batch.append(numbered)
            added = [] if is_done(numbered[0]) else ranges_of(numbered[1])
            ranges += added
            n_bytes += sum(stop - start for _, start, stop in added)
            if n_bytes >= _BATCH_BYTES:
                break
        if not batch:
            return
        yield batch, ranges


def ranges_of(item: Item) -> list[FileRange]:
    """Return the ranges of files that an item reads; those of scattered elements are left out."""
    if isinstance(item, Move):
        size = itemsize(item.dtypes[0])
        start, file = item.source.start, item.source.file
        return [] if file is None else [(file, start, start + item.n_elements * size)]
    if isinstance(item, Comparison):
        sources = [(item.box, source) for source in (item.primary, *item.copies)]
        return _ranges_of_bands(sources, item.bands, itemsize(item.dtype))
    links = {(link.source, link.box): link for link in item.links}
    sources = [(link.box, link.source) for link in links.values()]
    return _ranges_of_bands(sources, item.bands, itemsize(item.dtypes[0]))


def _ranges_of_bands(
    sources: Iterable[tuple[Box, Source]], bands: Iterable[Box], size: int
) -> list[FileRange]:
    """Return the ranges in which sources hold what they share with bands.

    Args:
        sources: each with the box that it starts at.
        size: bytes per element.
    """
    bands = list(bands)
    ranges: list[FileRange] = []
    decoded: list[FileRange] = []
    n_bytes = 0
    for box, source in sources:
        if source.file is None:
            continue
        for band in bands:
            common = box.intersect(band)
            if common is None:
                continue
            delta = [a - b for a, b in zip(common.offset, box.offset, strict=True)]
            start = source.at(delta)
            stop = start + byte_span(common.shape, size, source.strides)
            # Of an encoded array, all is read for any part of it.
            if is_decoded(source.file):
                decoded.append((source.file, start, stop))
                continue
            ranges.append((source.file, start, stop))
            n_bytes += prod(common.shape) * size

    # Parts of one array may fill each other's gaps; gaps that are left would be for nothing.
    ranges.sort()
    merged: list[FileRange] = []
    for file, start, stop in ranges:
        if merged and merged[-1][0] == file and start <= merged[-1][2]:
            merged[-1] = file, merged[-1][1], max(stop, merged[-1][2])
        else:
            merged.append((file, start, stop))
    n_spanned = sum(stop - start for _, start, stop in merged)
    return decoded + (merged if n_bytes >= _LEAST_SHARE * n_spanned else [])
