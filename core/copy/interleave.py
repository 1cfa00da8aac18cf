"""Weaving: one row band of many sources into many destinations.

For every band a *recipe* says where each destination's run of it lies in the scratch buffer and how each source's bytes
get there:

* a source whose part of the band is consecutive is read with one vectored read straight into the places where its rows
  belong (no copy in memory at all), or, where rows are short, into a second buffer and copied by numpy;
* any other source (transposed, expanded, interleaved with foreign data) is gathered by ``read_box``.

Then every destination's run is consecutive in the scratch buffer and goes out in one write. Bands of one shape in a
regular weave share the recipe; only addresses move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Protocol

from core.arrays.box import Box, Shape
from core.arrays.coverage import BoxIndex
from core.arrays.dtypes import itemsize
from core.arrays.gather import StridedLayout, byte_span, copy_box, dense_layout, inner_run, list_addresses, read_box
from core.plan.addresses import RecordCrc
from core.plan.items import Link, Weave

if TYPE_CHECKING:
    from core.files.store import ReadStore

MIN_VECTOR_BYTES = 16 << 10
"""Rows shorter than this are cheaper to copy in memory than to name to the kernel (1 KiB rows: 8 × the time)."""


class Out(Protocol):
    """Takes the finished parts of bands."""

    def put(self, array: int, index: int, data: memoryview) -> None:
        """Writes source-typed elements at a flat element index of an array."""

    def put_piece(self, array: int, index: int, data: memoryview) -> None:
        """As ``put``, for pieces that do not follow each other."""

    def check(self, record: RecordCrc, address: int, data: Iterable[memoryview], n_bytes: int) -> None:
        """Takes source bytes, read from a byte address, whose array's CRC is stated."""


@dataclass(slots=True)
class _Part:
    """What a link contributes to a band.

    Args:
        link: the link.
        shape: of the common box.
        address: byte address of its first element in the source.
        index: flat element index of its first element in the destination.
        scratch: where it lies in the scratch buffer.
    """

    link: Link
    shape: Shape
    address: int
    index: int
    scratch: StridedLayout = field(default_factory=lambda: StridedLayout(0, ()))


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of a destination: scratch bytes [start, start + n_bytes) go to ``index`` on."""

    array: int
    index: int
    strides: Shape
    start: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class _Vector:
    """A consecutive run of a source that is read into many places."""

    file: str
    address: int
    strides: Shape
    buffers: list[memoryview]
    n_bytes: int
    record: RecordCrc | None


@dataclass(frozen=True, slots=True)
class _Block:
    """A consecutive run of a source that is read as a whole and then copied to its places."""

    file: str
    address: int
    strides: Shape
    n_bytes: int
    parts: list[_Part]
    record: RecordCrc | None


@dataclass(slots=True)
class _Recipe:
    band: Box
    vectors: list[_Vector] = field(default_factory=list)
    blocks: list[_Block] = field(default_factory=list)
    gathered: list[_Part] = field(default_factory=list)
    read_bytes: int = 0
    runs: list[_Run] = field(default_factory=list)
    loose: list[_Part] = field(default_factory=list)


class Weaver:
    """Weaves with two buffers of one thread.

    Args:
        store: the source.
        scratch, raw: buffers, each at least as long as a band.
    """

    def __init__(self, store: ReadStore, scratch: memoryview, raw: memoryview) -> None:
        self._store = store
        self._scratch = scratch
        self._raw = raw

    def weave(self, item: Weave, out: Out, *, is_stopped: Callable[[], bool]) -> int:
        """Does one item, or part of it if it gets stopped; returns the bytes read."""
        size = itemsize(item.dtypes[0])
        index = BoxIndex([link.box for link in item.links]) if len(item.links) > 8 else None
        recipe: _Recipe | None = None
        n_read = 0
        for band in item.bands:
            if is_stopped():
                break
            if recipe is None or not item.is_regular or recipe.band.shape != band.shape:
                recipe = self._recipe(_meeting(item.links, index, band), band, size)
            delta = [a - b for a, b in zip(band.offset, recipe.band.offset, strict=True)]
            self._read(recipe, delta, size, out)
            self._write(recipe, delta, size, out)
            n_read += recipe.read_bytes
        return n_read

    def _recipe(self, found: Iterable[tuple[Link, Box]], band: Box, size: int) -> _Recipe:
        parts = []
        for link, common in found:
            delta = [a - b for a, b in zip(common.offset, link.box.offset, strict=True)]
            parts.append(_Part(link, common.shape, link.source.at(delta), link.destination.at(delta)))
        recipe = _Recipe(band)
        recipe.read_bytes = sum(prod(part.shape) * size for part in parts if part.link.source.file is not None)
        self._place(recipe, parts, size)
        self._route(recipe, parts, size)
        return recipe

    def _place(self, recipe: _Recipe, parts: list[_Part], size: int) -> None:
        """Gives every part its place in the scratch buffer: runs of destinations as they will lie in the file."""
        free = 0
        of_array: dict[int, list[_Part]] = {}
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
                        part.scratch = StridedLayout(free + (part.index - first.index) * size, strides)
                    strides = first.link.destination.strides
                    recipe.runs.append(_Run(array, first.index, strides, free, n_elements * size))
                    free += n_elements * size
                else:
                    for part in cluster:
                        part.scratch = dense_layout(part.shape, size, free)
                        free += prod(part.shape) * size
                    recipe.loose += cluster

    def _route(self, recipe: _Recipe, parts: list[_Part], size: int) -> None:
        """Decides how the bytes of every part get to its place."""
        alike: dict[tuple[str | None, Shape, RecordCrc | None], list[_Part]] = {}
        for part in parts:
            source = part.link.source
            alike.setdefault((source.file, source.strides, source.record), []).append(part)
        for (file, strides, record), group in alike.items():
            if file is None:
                recipe.gathered += group
                continue
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

    def _buffers(self, cluster: list[_Part], size: int) -> list[memoryview] | None:
        """Scratch slices in the order of the source's bytes, or None if they are too short."""
        pieces: list[tuple[int, int, int]] = []
        for part in cluster:
            source = StridedLayout(part.address, part.link.source.strides)
            n_axes, length = inner_run(part.shape, size, source, part.scratch)
            if length < MIN_VECTOR_BYTES:
                return None
            pieces += [(a, b, length) for a, b in list_addresses(part.shape[:n_axes], source, part.scratch)]
        pieces.sort()
        buffers = []
        _, at, length = pieces[0]
        for _, start, n in pieces[1:]:
            if start == at + length:
                length += n
            else:
                buffers.append(self._scratch[at : at + length])
                at, length = start, n
        buffers.append(self._scratch[at : at + length])
        return buffers

    def _read(self, recipe: _Recipe, delta: Sequence[int], size: int, out: Out) -> None:
        for vector in recipe.vectors:
            address = vector.address + _dot(delta, vector.strides)
            self._store.read_vector(vector.file, address, vector.buffers, vector.n_bytes)
            if vector.record is not None:
                out.check(vector.record, address, vector.buffers, vector.n_bytes)
        for block in recipe.blocks:
            address = block.address + _dot(delta, block.strides)
            raw = self._raw[: block.n_bytes]
            self._store.read_into(block.file, address, raw)
            if block.record is not None:
                out.check(block.record, address, (raw,), block.n_bytes)
            for part in block.parts:
                source = StridedLayout(part.address - block.address, part.link.source.strides)
                copy_box(raw, source, self._scratch, part.scratch, shape=part.shape, itemsize=size)
        for part in recipe.gathered:
            self._gather(part, delta, size)

    def _gather(self, part: _Part, delta: Sequence[int], size: int) -> None:
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

    def _write(self, recipe: _Recipe, delta: Sequence[int], size: int, out: Out) -> None:
        for run in recipe.runs:
            out.put(run.array, run.index + _dot(delta, run.strides), self._scratch[run.start : run.start + run.n_bytes])
        for part in recipe.loose:
            destination = part.link.destination
            index = part.index + _dot(delta, destination.strides)
            target = StridedLayout(index, destination.strides)
            n_axes, n_elements = inner_run(part.shape, 1, target)
            at = part.scratch.start
            for (start,) in list_addresses(part.shape[:n_axes], target):
                out.put_piece(destination.array, start, self._scratch[at : at + n_elements * size])
                at += n_elements * size


def _meeting(links: Sequence[Link], index: BoxIndex | None, band: Box) -> Iterator[tuple[Link, Box]]:
    if index is not None:
        for number, common in index.meeting(band):
            yield links[number], common
        return
    for link in links:
        common_box = link.box.intersect(band)
        if common_box is not None:
            yield link, common_box


def _clusters(group: list[_Part], extent_of: Callable[[_Part], tuple[int, int]]) -> Iterator[tuple[list[_Part], int]]:
    """Parts whose address ranges overlap or touch, in order, and the length of their common range."""
    cluster: list[_Part] = []
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
