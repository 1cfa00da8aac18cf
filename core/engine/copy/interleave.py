"""Copy the bands of a box from many sources to many destinations, interleaving their elements.

For every band a *recipe* defines the position of each destination's run in the scratch buffer, and
how each source's bytes get there:

* a source whose part of the band is consecutive is read with one vectored read straight into the
  positions where its rows belong (no copy in memory at all), or, where rows are short, into a
  second buffer from which numpy copies them;
* any other source (transposed, expanded, interleaved with foreign data) is gathered by
  ``read_box``.

Then every destination's run is consecutive in the scratch buffer and goes out in one write. Bands
of one shape in a regular item share the recipe; only addresses move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from math import prod
from typing import TYPE_CHECKING, Protocol

from core.arrays.box import Box, Shape
from core.arrays.coverage import BoxIndex
from core.arrays.dtypes import itemsize
from core.arrays.gather import (
    StridedLayout,
    byte_span,
    copy_box,
    dense_layout,
    inner_run,
    list_addresses,
    read_box,
)
from core.engine.plan.addresses import RecordCrc
from core.engine.plan.items import Interleave, Link
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

MIN_VECTOR_BYTES = 16 << 10
"""Minimum bytes of a row for a vectored read.

Shorter rows are cheaper to copy in memory than to name to the kernel (1 KiB rows: 8 × the time).
"""


class BandTarget(Protocol):
    """A receiver of the finished parts of bands."""

    def put(self, array: int, index: int, data: memoryview) -> None:
        """Write elements of the source's type at a flat element index of an array."""

    def put_piece(self, array: int, index: int, data: memoryview) -> None:
        """Write elements like ``put``, for fragments that do not follow each other."""

    def check(
        self, record: RecordCrc, address: int, data: Iterable[memoryview], n_bytes: int
    ) -> None:
        """Add source bytes, read from a byte address, to the CRC of their array."""


@dataclass(slots=True)
class _BandPart:
    """The elements that a link contributes to a band.

    Args:
        link: connects the source and the destination of the elements.
        shape: shape of the common box of link and band.
        address: byte address of the first element in the source.
        index: flat element index of the first element in the destination.
        scratch: position in the scratch buffer.
    """

    link: Link
    shape: Shape
    address: int
    index: int
    scratch: StridedLayout = field(default_factory=lambda: StridedLayout(0, ()))


@dataclass(frozen=True, slots=True)
class _TargetRun:
    """A run of a destination: scratch bytes [start, start + n_bytes) go to index ``index`` on."""

    array: int
    index: int
    strides: Shape
    start: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class _Vector:
    """A consecutive run of a source that one vectored read puts into many buffers."""

    file: str
    address: int
    strides: Shape
    buffers: list[memoryview]
    n_bytes: int
    record: RecordCrc | None


@dataclass(frozen=True, slots=True)
class _Block:
    """A consecutive run of a source that is read into one buffer and then copied part by part."""

    file: str
    address: int
    strides: Shape
    n_bytes: int
    parts: list[_BandPart]
    record: RecordCrc | None


@dataclass(slots=True)
class _Recipe:
    """The reads and writes of one band.

    Args:
        band: the band that the recipe was computed for.
        vectors, blocks: runs of sources to be read.
        gathered: parts whose elements are not consecutive in their source.
        read_bytes: bytes read from sources.
        runs: runs of destinations to be written.
        loose: parts whose elements are not consecutive in their destination.
    """

    band: Box
    vectors: list[_Vector] = field(default_factory=list)
    blocks: list[_Block] = field(default_factory=list)
    gathered: list[_BandPart] = field(default_factory=list)
    read_bytes: int = 0
    runs: list[_TargetRun] = field(default_factory=list)
    loose: list[_BandPart] = field(default_factory=list)


class Interleaver:
    """The interleaved copies of one thread, with its two buffers.

    Args:
        store: the source files.
        scratch, raw: buffers, each at least as long as a band.
    """

    def __init__(self, store: ReadStore, scratch: memoryview, raw: memoryview) -> None:
        self._store = store
        self._scratch = scratch
        self._raw = raw

    def interleave(
        self, item: Interleave, out: BandTarget, *, is_stopped: Callable[[], bool]
    ) -> int:
        """Copy one item, or part of it if the copy is stopped; return the bytes read."""
        size = itemsize(item.dtypes[0])
        index = BoxIndex([link.box for link in item.links]) if len(item.links) > 8 else None
        recipe: _Recipe | None = None
        n_read = 0
        for band in item.bands:
            if is_stopped():
                break
            # Bands of one shape in a regular item share a recipe.
            if recipe is None or not item.is_regular or recipe.band.shape != band.shape:
                recipe = self._make_recipe(_overlaps(item.links, index, band), band, size)
            # The recipe has the addresses of its own band; this one lies ``delta`` further on.
            delta = [a - b for a, b in zip(band.offset, recipe.band.offset, strict=True)]
            self._read(recipe, delta, size, out)
            self._write(recipe, delta, size, out)
            n_read += recipe.read_bytes
        return n_read

    def _make_recipe(self, overlaps: Iterable[tuple[Link, Box]], band: Box, size: int) -> _Recipe:
        """Build the recipe of a band, from the links that meet it and their common boxes."""
        parts = []
        for link, common in overlaps:
            delta = [a - b for a, b in zip(common.offset, link.box.offset, strict=True)]
            parts.append(
                _BandPart(link, common.shape, link.source.at(delta), link.destination.at(delta))
            )
        recipe = _Recipe(band)
        recipe.read_bytes = sum(
            prod(part.shape) * size for part in parts if part.link.source.file is not None
        )
        self._place_in_scratch(recipe, parts, size)
        self._plan_reads(recipe, parts, size)
        return recipe

    def _place_in_scratch(self, recipe: _Recipe, parts: list[_BandPart], size: int) -> None:
        """Give every part a position in the scratch buffer, in the destination's order.

        Parts that together fill a run of a destination are written by one write; the others are
        ``loose``, and are packed densely.
        """
        free = 0  # first free byte of the scratch buffer
        of_array: dict[int, list[_BandPart]] = {}
        for part in parts:
            of_array.setdefault(part.link.destination.array, []).append(part)
        for array, group in of_array.items():
            group.sort(key=lambda part: part.index)
            for cluster, n_span in _clusters(
                group, lambda p: (p.index, byte_span(p.shape, 1, p.link.destination.strides))
            ):
                n_elements = sum(prod(part.shape) for part in cluster)
                first = cluster[0]
                if n_elements == n_span:
                    for part in cluster:
                        strides = tuple(step * size for step in part.link.destination.strides)
                        part.scratch = StridedLayout(
                            free + (part.index - first.index) * size, strides
                        )
                    strides = first.link.destination.strides
                    recipe.runs.append(
                        _TargetRun(array, first.index, strides, free, n_elements * size)
                    )
                    free += n_elements * size
                else:
                    for part in cluster:
                        part.scratch = dense_layout(part.shape, size, free)
                        free += prod(part.shape) * size
                    recipe.loose += cluster

    def _plan_reads(self, recipe: _Recipe, parts: list[_BandPart], size: int) -> None:
        """Choose the read that brings each part's bytes to its position in the scratch buffer."""
        of_source: dict[tuple[str | None, Shape, RecordCrc | None], list[_BandPart]] = {}
        for part in parts:
            source = part.link.source
            of_source.setdefault((source.file, source.strides, source.record), []).append(part)
        for (file, strides, record), group in of_source.items():
            if file is None:
                recipe.gathered += group
                continue
            # A cluster without gaps and overlaps is a consecutive run of the file.
            group.sort(key=lambda part: part.address)
            for cluster, n_span in _clusters(
                group, lambda p: (p.address, byte_span(p.shape, size, p.link.source.strides))
            ):
                if sum(prod(part.shape) for part in cluster) * size != n_span:
                    recipe.gathered += cluster
                    continue
                address = cluster[0].address
                buffers = self._buffers(cluster, size)
                if buffers is not None:
                    recipe.vectors.append(_Vector(file, address, strides, buffers, n_span, record))
                else:
                    recipe.blocks.append(_Block(file, address, strides, n_span, cluster, record))

    def _buffers(self, cluster: list[_BandPart], size: int) -> list[memoryview] | None:
        """List the scratch slices for a vectored read; None if the rows are too short."""
        runs: list[tuple[int, int, int]] = []
        for part in cluster:
            source = StridedLayout(part.address, part.link.source.strides)
            n_axes, length = inner_run(part.shape, size, source, part.scratch)
            if length < MIN_VECTOR_BYTES:
                return None
            runs += [
                (a, b, length) for a, b in list_addresses(part.shape[:n_axes], source, part.scratch)
            ]
        # In the order of the source's bytes, runs that follow each other in scratch become one.
        runs.sort()
        buffers = []
        _, start, length = runs[0]
        for _, next_start, n in runs[1:]:
            if next_start == start + length:
                length += n
            else:
                buffers.append(self._scratch[start : start + length])
                start, length = next_start, n
        buffers.append(self._scratch[start : start + length])
        return buffers

    def _read(self, recipe: _Recipe, delta: Sequence[int], size: int, out: BandTarget) -> None:
        """Read a band into the scratch buffer; ``delta`` is its offset from the recipe's band."""
        # Long rows go straight to their positions in the scratch buffer.
        for vector in recipe.vectors:
            address = vector.address + _dot(delta, vector.strides)
            self._store.read_vector(vector.file, address, vector.buffers, vector.n_bytes)
            if vector.record is not None:
                out.check(vector.record, address, vector.buffers, vector.n_bytes)
        # Short rows are read in one block and then copied to their positions.
        for block in recipe.blocks:
            address = block.address + _dot(delta, block.strides)
            raw = self._raw[: block.n_bytes]
            self._store.read_into(block.file, address, raw)
            if block.record is not None:
                out.check(block.record, address, (raw,), block.n_bytes)
            for part in block.parts:
                source = StridedLayout(part.address - block.address, part.link.source.strides)
                copy_box(raw, source, self._scratch, part.scratch, shape=part.shape, itemsize=size)
        # All others are gathered element run by element run.
        for part in recipe.gathered:
            self._gather(part, delta, size)

    def _gather(self, part: _BandPart, delta: Sequence[int], size: int) -> None:
        """Gather a part whose elements are not consecutive; without a file, fill in zeros."""
        source = part.link.source
        file = source.file
        if file is None:
            n_axes, length = inner_run(part.shape, size, part.scratch)
            zeros = bytes(length)
            for (start,) in list_addresses(part.shape[:n_axes], part.scratch):
                self._scratch[start : start + length] = zeros
            return
        read_box(
            lambda address, buffer: self._store.read_into(file, address, buffer),
            StridedLayout(part.address + _dot(delta, source.strides), source.strides),
            self._scratch,
            part.scratch,
            shape=part.shape,
            itemsize=size,
            raw=self._raw,
        )

    def _write(self, recipe: _Recipe, delta: Sequence[int], size: int, out: BandTarget) -> None:
        """Write a band from the scratch buffer; ``delta`` is its offset from the recipe's band."""
        for run in recipe.runs:
            out.put(
                run.array,
                run.index + _dot(delta, run.strides),
                self._scratch[run.start : run.start + run.n_bytes],
            )
        for part in recipe.loose:
            destination = part.link.destination
            index = part.index + _dot(delta, destination.strides)
            target = StridedLayout(index, destination.strides)
            n_axes, n_elements = inner_run(part.shape, 1, target)
            scratch_start = part.scratch.start
            for (start,) in list_addresses(part.shape[:n_axes], target):
                piece = self._scratch[scratch_start : scratch_start + n_elements * size]
                out.put_piece(destination.array, start, piece)
                scratch_start += n_elements * size


def _overlaps(
    links: Sequence[Link], index: BoxIndex | None, band: Box
) -> Iterator[tuple[Link, Box]]:
    """Yield the links that meet a band, with the common boxes; ``index`` is for long lists."""
    if index is not None:
        for number, common in index.meeting(band):
            yield links[number], common
        return
    for link in links:
        common_box = link.box.intersect(band)
        if common_box is not None:
            yield link, common_box


def _clusters(
    group: list[_BandPart], extent_of: Callable[[_BandPart], tuple[int, int]]
) -> Iterator[tuple[list[_BandPart], int]]:
    """Yield groups of parts whose ranges overlap or touch, with the length of their range.

    Args:
        group: parts in the order of their ranges.
        extent_of: gives the start and the length of a part's range.
    """
    cluster: list[_BandPart] = []
    start = stop = 0
    for part in group:
        first, length = extent_of(part)
        if cluster and first > stop:
            yield cluster, stop - start
            cluster = []
        if not cluster:
            start = stop = first
        cluster.append(part)
        stop = max(stop, first + length)
    if cluster:
        yield cluster, stop - start


def _dot(index: Sequence[int], strides: Shape) -> int:
    return sum(i * step for i, step in zip(index, strides, strict=True))
