"""From the elements of stored arrays, as they pass by, to the fingerprints of the canonical tensors that they hold.

Whoever has a checkpoint's bytes in his hands anyway (a scan, a copy) feeds them here, array by array, in any order and
from any thread. A canonical tensor lies in (parts of) arrays; a canonical array may itself be a part of a stored one
(``core.catalog.stored.part_of``). Tensors whose arrays are none of the stored ones, such as those computed from others,
are left to whoever reads them through the engine (``core.manifest.fingerprint_read``).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod

from core.arrays.box import Box, Shape, boxes_of_flat_range, is_c_contiguous
from core.arrays.dtypes import itemsize
from core.catalog.catalog import Catalog
from core.catalog.stored import StoredArray
from core.errors import CheckpointingException
from core.fingerprint.definition import LANES, Fingerprint, Form, add_lanes, form_of, format_lanes
from core.fingerprint.kernel import Products
from core.fingerprint.sums import FormSum
from core.opening.target import dense_target
from core.plan.match import match
from core.plan.positions import region_shape


@dataclass(frozen=True, slots=True)
class _Region:
    """A part of a canonical tensor in a stored array.

    Args:
        key: the tensor.
        first: the stored array's element at which the canonical array begins.
        shape: of the canonical array.
        inside: the region in the canonical array.
        offset: where the region begins in the tensor.
    """

    key: str
    first: int
    shape: Shape
    inside: Box
    offset: Shape


class Feeds:
    """Adds up the fingerprints of the tensors of a catalog.

    Args:
        catalog: in canonical form.
        stored: the arrays that will be fed, as they lie in their files.
        products: from ``core.fingerprint.kernel.fastest_products``.

    Attributes:
        left: keys of tensors that cannot be computed from what is fed.
    """

    def __init__(self, catalog: Catalog, stored: Iterable[StoredArray], products: Products) -> None:
        self._catalog = catalog
        self._products = products
        self._forms: dict[str, Form] = {}
        self._regions: dict[str, list[_Region]] = {}
        self._stored: dict[str, int] = {}
        self._fed: dict[str, int] = {}
        self._lanes: dict[str, tuple[int, ...]] = {}
        self._lock = threading.Lock()
        self.left: list[str] = []
        homes = _Homes(stored)
        target = dense_target(catalog.tensors.values())
        for key in catalog.tensors:
            self._add(key, homes, target)

    def _add(self, key: str, homes: _Homes, target: Catalog) -> None:
        """Finds out where a tensor lies."""
        meta = self._catalog.tensors[key]
        size = itemsize(meta.dtype)
        found: list[tuple[str, _Region]] = []
        n_stored = 0
        try:
            form = form_of(meta.shape, size)
            pieces = match(self._catalog, target, key).pieces
        except CheckpointingException:  # told by whoever reads it again
            self.left.append(key)
            return
        for box, fragment in pieces:
            array = fragment.array
            if array is None:
                continue
            home = homes.of(array)
            shape = region_shape(box, len(array.shape))
            if home is None or shape is None:
                self.left.append(key)
                return
            extra = box.rank - len(array.shape)
            moved = tuple(a - b for a, b in zip(box.offset, fragment.box.offset, strict=True))
            moved = moved[extra:] if extra >= 0 else (0,) * -extra + moved
            inside = Box(tuple(a + b for a, b in zip(fragment.at, moved, strict=True)), shape)
            found.append((home[0], _Region(key, home[1], array.shape, inside, box.offset)))
            n_stored += box.n_elements
        self._forms[key] = form
        self._stored[key] = n_stored
        self._fed[key] = 0
        self._lanes[key] = (0,) * LANES
        for name, region in found:
            self._regions.setdefault(name, []).append(region)

    def sees(self, name: str) -> bool:
        """Whether anything of a stored array is needed."""
        return name in self._regions

    def feed(self, name: str, start: int, data: memoryview) -> None:
        """Takes elements of a stored array, each exactly once; safe for threads.

        Args:
            name: of the array.
            start: index of the first element in its C order.
            data: the elements, whole ones.
        """
        for region in self._regions.get(name, ()):
            meta = self._catalog.tensors[region.key]
            size = itemsize(meta.dtype)
            begin = max(start, region.first)
            end = min(start + len(data) // size, region.first + prod(region.shape))
            if end <= begin:
                continue
            made = FormSum(self._forms[region.key], self._products)
            at = (begin - start) * size
            for run in boxes_of_flat_range(region.shape, begin - region.first, end - region.first):
                n = run.n_elements * size
                _add_part(made, meta.shape, region, run, size, data[at : at + n])
                at += n
            with self._lock:
                self._lanes[region.key] = add_lanes((self._lanes[region.key], made.lanes))
                self._fed[region.key] += made.n_bytes // size

    def pass_over(self, name: str, start: int, n_elements: int) -> None:
        """Takes elements of a stored array that are all zero."""
        for region in self._regions.get(name, ()):
            begin, end = max(start, region.first), min(start + n_elements, region.first + prod(region.shape))
            if end <= begin:
                continue
            common = (
                run.intersect(region.inside)
                for run in boxes_of_flat_range(region.shape, begin - region.first, end - region.first)
            )
            n = sum(box.n_elements for box in common if box is not None)
            with self._lock:
                self._fed[region.key] += n

    def found(self) -> dict[str, Fingerprint]:
        """The fingerprints of the tensors all of whose elements have been fed; ``left`` and the others are missing."""
        return {
            key: Fingerprint(
                self._catalog.tensors[key].dtype, self._catalog.tensors[key].shape, format_lanes(self._lanes[key])
            )
            for key, n_stored in self._stored.items()
            if self._fed[key] == n_stored
        }

    def state(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """What has been fed: by key, how many elements and their contribution; for ``merge`` on another rank."""
        return {key: (n, self._lanes[key]) for key, n in self._fed.items() if n}

    def merge(self, state: Mapping[str, tuple[int, tuple[int, ...]]]) -> None:
        """Takes what was fed elsewhere of other elements."""
        for key, (n, lanes) in state.items():
            self._fed[key] += n
            self._lanes[key] = add_lanes((self._lanes[key], lanes))


@dataclass(frozen=True, slots=True)
class ArrayFeeds:
    """Hands the arrays that a scan sees on; see ``core.scan.observer.Observer``.

    Args:
        feeds: what gets them.
        held: what is held open while it does.
    """

    feeds: Feeds
    held: ExitStack = field(default_factory=ExitStack)

    def sees(self, array: StoredArray) -> bool:
        """See ``core.scan.observer.Observer``."""
        return self.feeds.sees(array.name)

    def feed(self, array: StoredArray, start: int, data: memoryview) -> None:
        """See ``core.scan.observer.Observer``."""
        self.feeds.feed(array.name, start, data)

    def state(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """See ``core.scan.observer.Observer``."""
        return self.feeds.state()

    def merge(self, state: Mapping[str, tuple[int, tuple[int, ...]]]) -> None:
        """See ``core.scan.observer.Observer``."""
        self.feeds.merge(state)

    def finish(self, array: StoredArray) -> None:
        """See ``core.scan.observer.Observer``; an array's end means nothing to a tensor."""


def _add_part(made: FormSum, shape: Shape, region: _Region, run: Box, size: int, data: memoryview) -> None:
    """Adds what a region has of a box of its canonical array.

    Args:
        shape: of the tensor.
        run: in the canonical array.
        data: its elements in C order.
    """
    common = run.intersect(region.inside)
    if common is None:
        return
    if common != run:
        import numpy as np

        inner = tuple(slice(a - o, b - o) for a, b, o in zip(common.offset, common.end, run.offset, strict=True))
        elements = np.frombuffer(data, f"V{size}").reshape(run.shape)[inner]
        data = memoryview(np.ascontiguousarray(elements).view(np.uint8).reshape(-1))
    moved = tuple(a - b for a, b in zip(common.offset, region.inside.offset, strict=True))
    extra = len(shape) - len(moved)
    if extra >= 0:
        moved, extents = (0,) * extra + moved, (1,) * extra + common.shape
    else:
        moved, extents = moved[-extra:], common.shape[-extra:]
    made.add_box(shape, Box(tuple(a + b for a, b in zip(region.offset, moved, strict=True)), extents), size, data)


class _Homes:
    """Finds the stored arrays that canonical arrays are, or are parts of.

    Args:
        stored: the stored arrays.
    """

    def __init__(self, stored: Iterable[StoredArray]) -> None:
        self._arrays: dict[str, StoredArray] = {}
        self._late: dict[tuple[str, int], StoredArray] = {}
        runs: dict[str, list[tuple[int, StoredArray]]] = {}
        for array in stored:
            extent = array.extent
            if extent is None:
                continue
            self._arrays.setdefault(array.name, array)
            if extent.is_late:
                self._late.setdefault((extent.file, extent.offset), array)
            elif extent.encoding is None and is_dense_in_file(array) and array.n_bytes:
                runs.setdefault(extent.file, []).append((extent.offset, array))
        self._runs = {file: sorted(found, key=lambda item: item[0]) for file, found in runs.items()}

    def of(self, array: StoredArray) -> tuple[str, int] | None:
        """(name of the stored array, its element at which ``array`` begins), or None if it is a part of none."""
        known = self._arrays.get(array.name)
        extent = array.extent
        if known is not None and known.extent == extent and known.shape == array.shape and known.dtype == array.dtype:
            return array.name, 0
        if extent is None or extent.encoding is not None:
            return None
        if extent.is_late:
            base = self._late.get((extent.file, extent.offset))
            if base is None or base.dtype != array.dtype or base.extent is None or base.extent.part_of is not None:
                return None
            return base.name, extent.part_of[1] if extent.part_of is not None else 0
        return self._run_of(array) if is_dense_in_file(array) else None

    def _run_of(self, array: StoredArray) -> tuple[str, int] | None:
        assert array.extent is not None
        runs = self._runs.get(array.extent.file, [])
        number = bisect_right(runs, array.extent.offset, key=lambda item: item[0]) - 1
        if number < 0:
            return None
        start, home = runs[number]
        inside = array.extent.offset - start
        size = itemsize(array.dtype)
        if itemsize(home.dtype) != size or inside % size or inside + array.n_bytes > home.n_bytes:
            return None
        return home.name, inside // size


def is_dense_in_file(array: StoredArray) -> bool:
    """Whether an array's elements follow each other in its file, in C order."""
    extent = array.extent
    return extent is not None and (extent.strides is None or is_c_contiguous(array.shape, extent.strides))
