"""Read tensors of the source box by box, for encodings that compute one tensor from others.

The input of a computation is checked like a tensor that is moved: its fragments are within their
arrays, cover the tensor and have one dtype, and replicas are compared when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any

from core.arrays.box import Box, Shape, c_strides, full_box
from core.arrays.coverage import first_hole
from core.arrays.dtypes import itemsize
from core.arrays.gather import StridedLayout, copy_box, dense_layout, is_dense, read_box
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.decoded import DecodedStore, decoding_bytes
from core.engine.catalog.stored import StoredArray
from core.engine.catalog.tensor import Fragment, Tensor
from core.errors import CorruptError, MissingShardError, ReplicaMismatchError
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

_RAW_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A global tensor whose boxes can be read.

    Args:
        key, dtype, shape: name, element type and shape of the stored tensor.
        fragments: distinct fragments that are not empty.
    """

    key: str
    dtype: str
    shape: Shape
    fragments: tuple[Fragment, ...]

    @property
    def file(self) -> str:
        """Name of a file with part of the tensor; empty if all of its elements are zero."""
        for fragment in self.fragments:
            if fragment.array is not None:
                return fragment.array.extent.file
        return ""

    @property
    def origin(self) -> str:
        """Name and place of the first array with part of the tensor.

        It tells apart what is computed from tensors that have the same name in different views of a
        catalog: a weight and the states of the optimizer.
        """
        for fragment in self.fragments:
            if fragment.array is not None:
                return f"{fragment.array.name}@{fragment.array.extent.offset}"
        return ""

    @property
    def arrays(self) -> tuple[StoredArray, ...]:
        """The arrays with the tensor."""
        arrays = (fragment.array for fragment in self.fragments)
        return tuple(array for array in arrays if array is not None)

    @property
    def working_bytes(self) -> int:
        """Maximum memory that reading a box needs in addition to the box."""
        return _RAW_BYTES + decoding_bytes(self.fragments)

    def read(self, store: ReadStore, box: Box) -> bytearray:
        """Return the elements of a box, dense, in C order.

        Raises:
            ReplicaMismatchError: two fragments hold different bytes.
            TruncatedError, MissingShardError, StorageError, CorruptError: the store cannot read a
                fragment.
        """
        size = itemsize(self.dtype)
        data = bytearray(box.n_elements * size)
        out = memoryview(data)
        unread = [box]
        for fragment in self.fragments:
            common = fragment.box.intersect(box)
            if common is None:
                continue
            # The first fragment with an element is read in place; later ones are compared with it.
            # ``fresh`` is the part of this fragment that no earlier one had.
            fresh = [part for old in unread if (part := old.intersect(common)) is not None]
            if fresh == [common]:
                self._fill(store, fragment, common, out, _within(common, box, size))
            else:
                replica = memoryview(bytearray(common.n_elements * size))
                self._fill(store, fragment, common, replica, dense_layout(common.shape, size))
                self._merge(fragment, common, replica, fresh, box, out)
            unread = [part for old in unread for part in old.subtract(common)]
        return data

    def _merge(
        self,
        fragment: Fragment,
        common: Box,
        replica: memoryview,
        fresh: list[Box],
        box: Box,
        out: memoryview,
    ) -> None:
        """Copy the new elements of a replica, and compare all others with those read before.

        Raises:
            ReplicaMismatchError: they differ.
        """
        # After the copy, the new elements are equal anyway: one comparison covers the rest.
        size = itemsize(self.dtype)
        for part in fresh:
            copy_box(
                replica,
                _within(part, common, size),
                out,
                _within(part, box, size),
                shape=part.shape,
                itemsize=size,
            )
        again = memoryview(bytearray(len(replica)))
        copy_box(
            out,
            _within(common, box, size),
            again,
            dense_layout(common.shape, size),
            shape=common.shape,
            itemsize=size,
        )
        if bytes(again) != bytes(replica):
            array = fragment.array
            raise ReplicaMismatchError(
                f"two replicas of the region at offset {common.offset} differ",
                file=None if array is None else array.extent.file,
                key=self.key,
                hint="the checkpoint is damaged, or the ranks had diverged when it was saved; "
                "use an older one",
            )

    def _fill(
        self, store: ReadStore, fragment: Fragment, box: Box, out: memoryview, to: StridedLayout
    ) -> None:
        """Read part of a fragment into ``out``.

        A fragment without an array is zero, as ``out`` is already.
        """
        if fragment.array is None:
            return
        # Find the array's position in its file, which some formats only know after opening it.
        array = fragment.array.locate(store)
        decoded_store = store if isinstance(store, DecodedStore) else DecodedStore(store)
        array = decoded_store.placed(array)
        extent = array.extent
        # Find the address of the box's first element, and the step of each axis in bytes.
        size = itemsize(array.dtype)
        steps = tuple(n * size for n in (extent.strides or c_strides(array.shape)))
        if any(step < 0 for step in steps):
            raise CorruptError(
                f"the array has negative strides: {extent.strides}", key=self.key, file=extent.file
            )
        # Array and box are aligned at the last axis; a missing array axis has extent 1 in the box.
        extra = len(steps) - box.rank
        strides = steps[extra:] if extra >= 0 else (0,) * -extra + steps
        start = extent.offset + _dot(fragment.at, steps)
        start += _dot(
            [a - b for a, b in zip(box.offset, fragment.box.offset, strict=True)], strides
        )
        # A contiguous box is read in place, any other through a buffer.
        if is_dense(box.shape, size, strides) and is_dense(box.shape, size, to.strides):
            decoded_store.read_into(
                extent.file, start, out[to.start : to.start + box.n_elements * size]
            )
            return
        read_box(
            lambda address, buffer: decoded_store.read_into(extent.file, address, buffer),
            StridedLayout(start, strides),
            out,
            to,
            shape=box.shape,
            itemsize=size,
            raw=memoryview(bytearray(_RAW_BYTES)),
        )


def join_arrays(*tensors: SourceTensor | None) -> tuple[StoredArray, ...]:
    """Return the arrays with any of some tensors; None stands for a tensor that is not there."""
    return tuple(array for tensor in tensors if tensor is not None for array in tensor.arrays)


def source_of(catalog: Catalog, key: str) -> SourceTensor:
    """Check the fragments of a tensor of the catalog and return it for reading: ``checked``."""
    return checked(key, catalog.tensor(key))


def checked(
    key: str, tensor: Tensor, *, part: tuple[Box, Iterable[Fragment]] | None = None
) -> SourceTensor:
    """Check the fragments of a tensor and return it for reading.

    Args:
        key: name of the tensor, for errors.
        part: the box that will be read, and the fragments that overlap it; None for all of the
            tensor.

    Raises:
        CorruptError: a fragment exceeds the tensor or its array, or the arrays differ in dtype.
        MissingShardError: the fragments do not cover what will be read.
    """
    # The same fragment of the same array is no second replica to compare.
    region, candidates = part or (full_box(tensor.shape), tensor.fragments())
    distinct = {
        (fragment.box, fragment.array, fragment.at): fragment
        for fragment in candidates
        if not fragment.box.is_empty
    }
    fragments = tuple(distinct.values())
    dtypes = {fragment.array.dtype for fragment in fragments if fragment.array is not None}
    if len(dtypes) > 1:
        raise CorruptError(
            f"the tensor is stored partly as {' and partly as '.join(sorted(dtypes))}", key=key
        )
    for fragment in fragments:
        _check_bounds(key, fragment, tensor.shape)
    hole = first_hole(region, [fragment.box for fragment in fragments])
    if hole is not None:
        raise MissingShardError(
            f"no shard covers the region at offset {hole.offset} with shape {hole.shape}",
            key=key,
            hint="a shard is missing or incomplete; copy the checkpoint again, or use an older one",
        )
    return SourceTensor(key, dtypes.pop() if dtypes else tensor.dtype, tensor.shape, fragments)


def _check_bounds(key: str, fragment: Fragment, shape: Shape) -> None:
    """Raise CorruptError unless a fragment is within its tensor and its array."""
    box, array = fragment.box, fragment.array
    fits = box.rank == len(shape) and all(stop <= n for stop, n in zip(box.end, shape, strict=True))
    if fits and array is not None:
        extra = len(array.shape) - box.rank
        region = (1,) * extra + box.shape if extra >= 0 else box.shape[-extra:]
        fits = prod(box.shape[: max(-extra, 0)]) == 1 and all(
            start >= 0 and start + n <= extent
            for start, n, extent in zip(fragment.at, region, array.shape, strict=True)
        )
    if not fits:
        file = None if array is None else array.extent.file
        raise CorruptError(
            f"the shard at offset {box.offset} with shape {box.shape} does not fit in the tensor "
            f"(shape {shape}) or in its array",
            key=key,
            file=file,
        )


def _within(box: Box, outer: Box, size: int) -> StridedLayout:
    """Return the layout of a box in the dense bytes of an outer box."""
    steps = dense_layout(outer.shape, size).strides
    return StridedLayout(
        _dot([a - b for a, b in zip(box.offset, outer.offset, strict=True)], steps), steps
    )


def _dot(index: Any, strides: Shape) -> int:
    """Return the offset of an index, in bytes."""
    return sum(i * step for i, step in zip(index, strides, strict=True))
