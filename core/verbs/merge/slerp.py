"""Spherical interpolation of two tensors, as an encoding.

For a tensor x of the first checkpoint and y of the second, and the position t from 0 to 1::

    c = (x · y) / (|x| |y|)          over all elements of the tensor, in float64
    θ = arccos(c)
    a = sin((1 − t) θ) / sin θ,      b = sin(t θ) / sin θ
    result = a·x + b·y               in float32 (float64 if a tensor is float64), a and b rounded
                                     to it, each product and the sum rounded

Where |c| > 0.9995, or a tensor is zero, the angle says nothing: a = 1 − t, b = t. The products
x · y, x · x and y · y are sums of float64 products, of 2²⁰ elements at a time, added in order. The
result is rounded once more when it is written in the dtype of the destination.

Every tensor has its own angle, as in mergekit's ``slerp``. The sums need a pass of their own, so
both tensors are read twice.

Source: K. Shoemake, Animating rotation with quaternion curves, SIGGRAPH 1985.
"""

from __future__ import annotations

import math
import threading
from dataclasses import field
from math import prod
from typing import TYPE_CHECKING, Any

from core.arrays.box import boxes_of_flat_range
from core.arrays.dtypes import itemsize, numpy_dtype
from core.engine.quantize.source import SourceTensor, join_arrays
from core.values import dataclass
from core.verbs.merge.combined import (
    UNIT_ELEMENTS,
    boxes_of_unit,
    n_in_unit,
    read_numbers,
    reading_bytes,
)

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore

PARALLEL = 0.9995
"""Cosine beyond which the angle is too small to divide by its sine."""


class _Factors:
    """The factors of the two tensors, once a thread has computed them."""

    __slots__ = ("lock", "value")

    def __init__(self) -> None:
        self.value: tuple[float, float] | None = None
        self.lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Slerp:
    """The encoding of a tensor that is interpolated between two.

    Args:
        tensors: the two tensors.
        position: 0 for the first one, 1 for the second.
        dtype: ``float32`` or ``float64``: the type of the result.
    """

    tensors: tuple[SourceTensor, SourceTensor]
    position: float
    dtype: str
    _known: _Factors = field(default_factory=_Factors, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Name of the encoding, for users."""
        return "spherical interpolation"

    @property
    def unit_bytes(self) -> int:
        """Size of a unit of decoded bytes."""
        return UNIT_ELEMENTS * itemsize(self.dtype)

    @property
    def inputs(self) -> tuple[StoredArray, ...]:
        """The arrays from which the tensor is computed."""
        return join_arrays(*self.tensors)

    @property
    def working_bytes(self) -> int:
        """Maximum memory that decoding a unit needs in addition to its result."""
        # Both tensors and one product, in float64.
        return 24 * UNIT_ELEMENTS + reading_bytes(self.tensors, "float64")

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> memoryview:
        """Return the decoded bytes of a unit; the first call reads all of both tensors.

        Raises:
            ReplicaMismatchError, TruncatedError, MissingShardError, StorageError, CorruptError: a
                tensor cannot be read.
        """
        import numpy as np

        number = np.dtype(self.dtype).type
        factors = self._factors(store)
        out: Any = np.empty(n_in_unit(array, unit), numpy_dtype(self.dtype))
        for box, part in boxes_of_unit(array, unit):
            with np.errstate(all="ignore"):
                x, y = (
                    read_numbers(store, tensor, box, self.dtype) * number(factor)
                    for tensor, factor in zip(self.tensors, factors, strict=True)
                )
                np.add(x, y, out=out[part])
        return memoryview(out.view(np.uint8)).cast("B")

    def _factors(self, store: ReadStore) -> tuple[float, float]:
        """Return the factors of the two tensors."""
        # Several threads ask for them at the same time; only one of them should read the tensors.
        with self._known.lock:
            if self._known.value is None:
                self._known.value = factors_at(self.position, *self._products(store))
            return self._known.value

    def _products(self, store: ReadStore) -> tuple[float, float, float]:
        """Return x · y, x · x and y · y over all elements."""
        import numpy as np

        shape = self.tensors[0].shape
        totals = [0.0, 0.0, 0.0]
        n_elements = prod(shape)
        for start in range(0, n_elements, UNIT_ELEMENTS):
            stop = min(start + UNIT_ELEMENTS, n_elements)
            for box in boxes_of_flat_range(shape, start, stop):
                x, y = (read_numbers(store, tensor, box, "float64") for tensor in self.tensors)
                # numpy adds pairwise, in an order that does not depend on the machine; a dot
                # product of its linear algebra would.
                with np.errstate(all="ignore"):
                    for n, (a, b) in enumerate(((x, y), (x, x), (y, y))):
                        totals[n] += float(np.add.reduce(a * b))
        return totals[0], totals[1], totals[2]


def factors_at(position: float, xy: float, xx: float, yy: float) -> tuple[float, float]:
    """Return the factors of the two tensors.

    Args:
        position: 0 for the first tensor, 1 for the second.
        xy, xx, yy: products of the tensors with each other and with themselves.
    """
    norms = math.sqrt(xx) * math.sqrt(yy)
    cosine = xy / norms if norms else 1.0
    # A tensor with NaN or infinity has no angle either.
    if not abs(cosine) <= PARALLEL:
        return 1 - position, position
    angle = math.acos(cosine)
    sine = math.sin(angle)
    return math.sin((1 - position) * angle) / sine, math.sin(position * angle) / sine
