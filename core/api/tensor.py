"""One tensor of an opened checkpoint, whose bytes are read when they are wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from mmap import mmap
from operator import index as as_index
from typing import TYPE_CHECKING, Any, SupportsIndex

from core.api.arguments import naming_arguments
from core.arrays.box import Box, Shape
from core.arrays.dtypes import DTYPES, itemsize, numpy_dtype
from core.engine.catalog.catalog import Catalog
from core.engine.plan.box_reader import TensorReader
from core.errors import UnsupportedError, explain_missing_extra
from core.verbs.inspect.preview import BoxLocation, places_of

if TYPE_CHECKING:
    from types import EllipsisType

    import numpy as np
    import torch
    from numpy.typing import DTypeLike

    Index = SupportsIndex | slice | EllipsisType

_SCRATCH_BYTES = 4 << 20
"""Size of the buffer for elements that are scattered in their file."""


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor of a checkpoint, or a slice of one, that has not been read.

    ``tensor[0:8, :]`` is another lazy tensor. ``numpy()``, ``torch()`` and
    ``numpy.asarray(tensor)`` read the elements of the slice, and nothing else, from whichever files
    and ranks hold them.

    Args:
        key: name of the tensor in the checkpoint.
        catalog: metadata of the checkpoint.
        open_reader: returns access to the tensor; raises after the checkpoint is closed.
        box: the elements of the stored tensor that this one has.
        dropped: axes of the box, of length 1, that this tensor lacks, because an integer chose
            their element.
    """

    key: str
    catalog: Catalog
    open_reader: Callable[[], TensorReader]
    box: Box
    dropped: frozenset[int] = frozenset()

    @property
    def shape(self) -> Shape:
        """The shape, in elements."""
        return tuple(n for axis, n in enumerate(self.box.shape) if axis not in self.dropped)

    @property
    def dtype(self) -> str:
        """The name of the element type, as PyTorch has it: ``bfloat16``."""
        return self.catalog.tensor(self.key).dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of these elements."""
        return self.size * itemsize(self.dtype)

    @cached_property
    def places(self) -> tuple[BoxLocation, ...]:
        """The stored boxes that overlap this tensor, with file and rank; replicas separately."""
        return tuple(
            place
            for place in places_of(self.catalog, self.key)
            if place.box.intersect(self.box) is not None or self.box.n_elements == 0
        )

    def __repr__(self) -> str:
        return f"<LazyTensor {self.key} {self.dtype} {list(self.shape)}>"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> LazyTensor:
        """Return a part of the tensor, without reading it.

        Args:
            index: integers, slices without a step and at most one ``...``, as numpy has them.

        Raises:
            IndexError: an integer is out of range, or there are more indices than axes.
            UnsupportedError: a slice has a step, or an index is of another kind.
        """
        items = list(index) if isinstance(index, tuple) else [index]
        axes = [axis for axis in range(self.box.rank) if axis not in self.dropped]
        n_ellipses = sum(item is ... for item in items)
        if len(items) - n_ellipses > len(axes) or n_ellipses > 1:
            raise IndexError(f"{len(items)} indices for the {len(axes)} axes of {self.key}")
        # Spell out the axes that an ellipsis, or a short index, leaves as they are.
        position = next((n for n, item in enumerate(items) if item is ...), len(items))
        n_whole = len(axes) - (len(items) - n_ellipses)
        items[position : position + n_ellipses] = [slice(None)] * n_whole

        offset, shape, dropped = list(self.box.offset), list(self.box.shape), set(self.dropped)
        for axis, item in zip(axes, items, strict=True):
            if isinstance(item, slice):
                start, stop, step = item.indices(shape[axis])
                if step != 1:
                    raise UnsupportedError(
                        f"slices with a step ({step}) are not supported",
                        key=self.key,
                        hint="read the slice without the step, then index the array",
                    )
                offset[axis] += start
                shape[axis] = max(0, stop - start)
                continue
            try:
                number = as_index(item)  # type: ignore[arg-type]
            except TypeError as err:
                raise UnsupportedError(
                    f"a lazy tensor cannot be indexed with {type(item).__name__}",
                    key=self.key,
                    hint="use integers and slices, or read the tensor first: numpy() or torch()",
                ) from err
            if not -shape[axis] <= number < shape[axis]:
                raise IndexError(f"index {number} is out of range for axis {axis} of {self.key}")
            offset[axis] += number % shape[axis]
            shape[axis] = 1
            dropped.add(axis)
        box = Box(tuple(offset), tuple(shape))
        return LazyTensor(self.key, self.catalog, self.open_reader, box, frozenset(dropped))

    def tobytes(self) -> bytes:
        """Read the elements as little-endian bytes in C order.

        Raises:
            CheckpointingException: the elements are missing or damaged, or cannot be read; the
                error names the file.
            UsageError: the checkpoint is closed.
        """
        data = bytearray(self.nbytes)
        self._read(memoryview(data))
        return bytes(data)

    def numpy(self, dtype: DTypeLike = None) -> np.ndarray[Any, Any]:
        """Read the elements into a new numpy array; ``bfloat16`` and float8 have ml_dtypes' types.

        Args:
            dtype: convert the elements to this type, such as ``"float32"`` for programs that plot
                and do not know ml_dtypes; None keeps the type.

        Raises:
            UnsupportedError: numpy has no such element type.
            CheckpointingException: as for ``tobytes``.
        """
        import numpy as np

        if DTYPES[self.dtype].numpy is None:
            raise UnsupportedError(
                f"NumPy does not support {self.dtype}", key=self.key, hint="read it with torch()"
            )
        stored = numpy_dtype(self.dtype)
        data: np.ndarray[Any, Any] = np.empty(
            self.nbytes, np.uint8
        )  # not filled with zeros first: half the time
        self._read(data.data)
        array: np.ndarray[Any, Any] = data.view(stored).reshape(self.shape)
        return array if dtype is None else array.astype(dtype, copy=False)

    def torch(self) -> torch.Tensor:
        """Read the elements into a new tensor of PyTorch, on the CPU.

        Raises:
            CheckpointingException: as for ``tobytes``.
        """
        with explain_missing_extra("torch()"):
            import torch

        data = torch.empty(self.nbytes, dtype=torch.uint8)
        self._read(data.numpy().data)
        return data.view(getattr(torch, self.dtype)).reshape(self.shape)

    @naming_arguments()
    def _read(self, buffer: memoryview) -> None:
        """Fill a buffer of ``nbytes`` bytes with the elements."""
        reader = self.open_reader()
        if not len(buffer):
            return
        # Anonymous memory costs nothing until it is touched, and most reads do not need it.
        scratch = mmap(-1, min(len(buffer), _SCRATCH_BYTES))
        reader.read(self.box, buffer, memoryview(scratch))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Read the elements for ``numpy.asarray``.

        Raises:
            ValueError: ``copy`` is False; the elements are in files.
        """
        if copy is False:
            raise ValueError("a lazy tensor is read from files, so its array is always a copy")
        return self.numpy(dtype)
