"""Compute fingerprints from the elements of stored arrays during a scan or a copy.

A scan or a copy reads a checkpoint's bytes anyway, and feeds them here, array by array, in any
order and from any thread. A canonical tensor is stored in (parts of) canonical arrays; these may be
parts of stored arrays (``core.engine.catalog.stored.narrow_array``). A tensor that is in no array,
as it is computed from others, has to be read separately
(``core.publish.manifest.fingerprint_read``).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import field
from math import prod

from core.arrays.box import Box, Shape, boxes_of_flat_range, is_c_contiguous
from core.arrays.dtypes import itemsize
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.stored import PlannedArray, StoredArray
from core.engine.catalog.tensor import whole_tensor
from core.engine.fingerprint.definition import (
    LANES,
    Fingerprint,
    Form,
    add_lanes,
    form_of,
    format_lanes,
)
from core.engine.fingerprint.kernel import Products
from core.engine.fingerprint.sums import FormSum
from core.engine.plan.match import match
from core.engine.plan.positions import region_shape
from core.errors import CheckpointingException
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class _Region:
    """A part of a canonical tensor in a stored array.

    Shapes, boxes and offsets are in elements.

    Args:
        key: key of the tensor.
        first: index of the stored array's element at which the canonical array begins, in C order.
        shape: shape of the canonical array.
        inside: box of the region in the canonical array.
        offset: offset of the region in the tensor.
    """

    key: str
    first: int
    shape: Shape
    inside: Box
    offset: Shape


class Feeds:
    """Sums for the fingerprints of a catalog's tensors.

    Args:
        catalog: in canonical form.
        stored: the arrays that will be fed, with their positions in files.
        products: from ``core.engine.fingerprint.kernel.fastest_products``.
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
        stored_arrays = _StoredArrays(stored)
        for key in catalog.tensors:
            self._add_tensor(key, stored_arrays)

    def _add_tensor(self, key: str, stored_arrays: _StoredArrays) -> None:
        """Find the stored arrays that contain a tensor; skip a tensor that is not in such arrays.

        A skipped tensor gets no fingerprint here, not even from those of its parts that are stored.
        """
        tensor = self._catalog.tensors[key]
        size = itemsize(tensor.dtype)
        regions: list[tuple[str, _Region]] = []
        n_stored = 0
        try:
            form = form_of(tensor.shape, size)
            dense = whole_tensor(PlannedArray(key, tensor.dtype, tensor.shape))
            pieces = match(key, tensor, dense).pieces
        except CheckpointingException:  # reported when the tensor is read separately
            return
        # Trace every piece of the tensor to a region of a stored array.
        for box, fragment in pieces:
            array = fragment.array
            if array is None:  # zeros, which add nothing to the sums
                continue
            # Without a fed array, or if the array has too few axes, the tensor is read separately.
            position = stored_arrays.find(array)
            shape = region_shape(box, len(array.shape))
            if position is None or shape is None:
                return
            # The array may have fewer or more axes than the tensor: missing ones have size 1.
            extra = box.rank - len(array.shape)
            moved = tuple(a - b for a, b in zip(box.offset, fragment.box.offset, strict=True))
            moved = moved[extra:] if extra >= 0 else (0,) * -extra + moved
            inside = Box(tuple(a + b for a, b in zip(fragment.at, moved, strict=True)), shape)
            name, first = position
            regions.append((name, _Region(key, first, array.shape, inside, box.offset)))
            n_stored += box.n_elements
        # Register the tensor only now, when all of its pieces have been found.
        self._forms[key] = form
        self._stored[key] = n_stored
        self._fed[key] = 0
        self._lanes[key] = (0,) * LANES
        for name, region in regions:
            self._regions.setdefault(name, []).append(region)

    def sees(self, name: str) -> bool:
        """Return whether a stored array holds a part of a tensor."""
        return name in self._regions

    def feed(self, name: str, start: int, data: memoryview) -> None:
        """Add elements of a stored array, each exactly once; safe for threads.

        Args:
            name: name of the array.
            start: index of the first element in the array's C order.
            data: bytes of complete elements.
        """
        for region in self._regions.get(name, ()):
            tensor = self._catalog.tensors[region.key]
            size = itemsize(tensor.dtype)
            # Clip the elements to those in the canonical array.
            begin = max(start, region.first)
            end = min(start + len(data) // size, region.first + prod(region.shape))
            if end <= begin:
                continue
            # A run of the array is not a box in general, so sum up the boxes that it consists of.
            total = FormSum(self._forms[region.key], self._products)
            position = (begin - start) * size
            for run in boxes_of_flat_range(region.shape, begin - region.first, end - region.first):
                n = run.n_elements * size
                _add_region(total, tensor.shape, region, run, size, data[position : position + n])
                position += n
            # Sums are computed outside the lock, and added to the tensor's inside.
            with self._lock:
                self._lanes[region.key] = add_lanes((self._lanes[region.key], total.lanes))
                self._fed[region.key] += total.n_bytes // size

    def pass_over(self, name: str, start: int, n_elements: int) -> None:
        """Add elements of a stored array that are all zero."""
        # Zeros do not change the sums, so it is enough to count the elements.
        for region in self._regions.get(name, ()):
            begin = max(start, region.first)
            end = min(start + n_elements, region.first + prod(region.shape))
            if end <= begin:
                continue
            common = (
                run.intersect(region.inside)
                for run in boxes_of_flat_range(
                    region.shape, begin - region.first, end - region.first
                )
            )
            n = sum(box.n_elements for box in common if box is not None)
            with self._lock:
                self._fed[region.key] += n

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Return key → fingerprint for the tensors whose elements have all been fed."""
        return {
            key: Fingerprint(
                self._catalog.tensors[key].dtype,
                self._catalog.tensors[key].shape,
                format_lanes(self._lanes[key]),
            )
            for key, n_stored in self._stored.items()
            if self._fed[key] == n_stored
        }

    def state(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return key → (number of elements fed, their sums), for ``merge`` on another rank."""
        return {key: (n, self._lanes[key]) for key, n in self._fed.items() if n}

    def merge(self, state: Mapping[str, tuple[int, tuple[int, ...]]]) -> None:
        """Add the state of another rank, which got other elements."""
        for key, (n, lanes) in state.items():
            self._fed[key] += n
            self._lanes[key] = add_lanes((self._lanes[key], lanes))


@dataclass(frozen=True, slots=True)
class ArrayFeeds:
    """An observer of a scan that feeds the arrays to ``Feeds`` (a ``scan.observer.Observer``).

    Args:
        feeds: gets the elements.
        resources: resources that have to stay open during the scan.
    """

    feeds: Feeds
    resources: ExitStack = field(default_factory=ExitStack)

    def sees(self, array: StoredArray) -> bool:
        """Return whether a stored array holds a part of a tensor."""
        return self.feeds.sees(array.name)

    def feed(self, array: StoredArray, start: int, data: memoryview) -> None:
        """Add elements of an array; see ``Feeds.feed``."""
        self.feeds.feed(array.name, start, data)

    def state(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return the state of the feeds; see ``Feeds.state``."""
        return self.feeds.state()

    def merge(self, state: Mapping[str, tuple[int, tuple[int, ...]]]) -> None:
        """Add the state of another rank's feeds."""
        self.feeds.merge(state)

    def finish(self, array: StoredArray) -> None:
        """Do nothing: the end of an array is not that of a tensor."""


def _add_region(
    total: FormSum, shape: Shape, region: _Region, run: Box, size: int, data: memoryview
) -> None:
    """Add the elements of a box that belong to a region.

    Args:
        total: the sum of the tensor.
        shape: shape of the tensor, in elements.
        region: the region of the canonical array that belongs to the tensor.
        run: the box in the canonical array.
        size: bytes of an element.
        data: the elements of the box, in C order.
    """
    common = run.intersect(region.inside)
    if common is None:
        return
    # The array has elements outside the region, such as padding rows: select those inside.
    if common != run:
        import numpy as np

        inner = tuple(
            slice(a - o, b - o)
            for a, b, o in zip(common.offset, common.end, run.offset, strict=True)
        )
        elements = np.frombuffer(data, f"V{size}").reshape(run.shape)[inner]
        data = memoryview(np.ascontiguousarray(elements).view(np.uint8).reshape(-1))
    # Convert axes of the array to axes of the tensor, which may be more or fewer.
    moved = tuple(a - b for a, b in zip(common.offset, region.inside.offset, strict=True))
    extra = len(shape) - len(moved)
    if extra >= 0:
        moved, extents = (0,) * extra + moved, (1,) * extra + common.shape
    else:
        moved, extents = moved[-extra:], common.shape[-extra:]
    total.add_box(
        shape,
        Box(tuple(a + b for a, b in zip(region.offset, moved, strict=True)), extents),
        size,
        data,
    )


class _StoredArrays:
    """An index of stored arrays by name and position, to find the one that contains an array.

    Args:
        stored: the stored arrays.
    """

    def __init__(self, stored: Iterable[StoredArray]) -> None:
        self._arrays: dict[str, StoredArray] = {}
        self._late: dict[tuple[str, int], StoredArray] = {}
        runs: dict[str, list[tuple[int, StoredArray]]] = {}
        for array in stored:
            extent = array.extent
            self._arrays.setdefault(array.name, array)
            if extent.is_late:
                self._late.setdefault((extent.file, extent.offset), array)
            elif extent.encoding is None and is_dense_in_file(array) and array.n_bytes:
                runs.setdefault(extent.file, []).append((extent.offset, array))
        self._runs = {
            file: sorted(arrays, key=lambda item: item[0]) for file, arrays in runs.items()
        }

    def find(self, array: StoredArray) -> tuple[str, int] | None:
        """Find the stored array that contains a canonical array, or equals it.

        Returns:
            The stored array's name, and the index of the element at which ``array`` begins in it;
            None if there is no such stored array.
        """
        same = self._arrays.get(array.name)
        extent = array.extent
        form = (extent, array.shape, array.dtype)
        if same is not None and (same.extent, same.shape, same.dtype) == form:
            return array.name, 0
        # The bytes of an encoded array have no position before they are decoded. A late-bound array
        # is known only by the item that contains it.
        if extent.encoding is not None or extent.axes is not None:
            return None
        if extent.is_late:
            base = self._late.get((extent.file, extent.offset))
            if base is None or base.dtype != array.dtype or base.extent.part_of is not None:
                return None
            return base.name, extent.part_of[1] if extent.part_of is not None else 0
        return self._find_by_position(array) if is_dense_in_file(array) else None

    def _find_by_position(self, array: StoredArray) -> tuple[str, int] | None:
        """Find the stored array whose byte range in the file contains that of ``array``."""
        runs = self._runs.get(array.extent.file, [])
        number = bisect_right(runs, array.extent.offset, key=lambda item: item[0]) - 1
        if number < 0:
            return None
        # Try only the array that begins last before the position. Should arrays overlap, as tied
        # tensors of torch may, the tensor is possibly read separately.
        start, stored = runs[number]
        inside = array.extent.offset - start
        size = itemsize(array.dtype)
        if (
            itemsize(stored.dtype) != size
            or inside % size
            or inside + array.n_bytes > stored.n_bytes
        ):
            return None
        return stored.name, inside // size


def is_dense_in_file(array: StoredArray) -> bool:
    """Return whether an array's elements are contiguous in its file, in C order."""
    extent = array.extent
    return extent.strides is None or is_c_contiguous(array.shape, extent.strides)
