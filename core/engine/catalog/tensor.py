"""A tensor as a value: its dtype, its shape and, on demand, the arrays in files that hold it.

::

    tensor
      └── fragments: boxes that tile it ── at ──▶ stored array (a dense array that exists in a file)
                                                    └── extent: file, byte address, strides

A tensor has no name: a name is the place in a catalog where a tensor hangs. So renaming a tensor
copies nothing, and tied tensors, which share their bytes, are one object under several names.

Several fragments with the same box are replicas. A fragment and its array are aligned at their
*last* axis; where one has more axes than the other, the extra leading axes have extent 1. So a
layer of a stacked ``(L, rows, cols)`` array is a fragment of a ``(rows, cols)`` tensor with
``at == (layer, 0, 0)``, and vice versa.

The operations of this module (``narrow``, ``select``, ``concat``, ``stack`` …) are those of torch,
on metadata: they make a tensor of other tensors' fragments when these are asked for, and move no
data. Tensors of a target, whose arrays have no position yet, take part in all of them but
``select`` and ``stack`` along an inner axis, which reorder the axes of stored arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cache
from itertools import accumulate
from math import prod
from types import MethodType
from typing import Any, Generic, TypeAlias, TypeVar, cast

from core.arrays.box import Box, Shape, full_box
from core.arrays.dtypes import itemsize
from core.engine.catalog.stored import AnyArray, ArrayT, ArrayT_co, PlannedArray, with_axes
from core.values import dataclass

ResultT = TypeVar("ResultT")


def swapped(extents: tuple[int, ...]) -> tuple[int, ...]:
    """Swap the last two axes of a shape, an offset or strides."""
    return (*extents[:-2], extents[-1], extents[-2])


@dataclass(frozen=True, slots=True)
class Fragment(Generic[ArrayT_co]):
    """A box of a tensor and the array region that holds it.

    Args:
        box: region of the tensor, in elements.
        array: the array that holds the region; None in a source if the region is zero by definition
            (vocabulary padding) and stored in no file.
        at: index of the region's first element in ``array``, one number per axis of the array.

    Raises:
        ValueError: ``at`` does not have one number per axis.
    """

    box: Box
    array: ArrayT_co | None
    at: Shape

    def __post_init__(self) -> None:
        if self.array is not None and len(self.at) != len(self.array.shape):
            raise ValueError(
                f"the position {self.at} does not fit array {self.array.name} of shape "
                f"{self.array.shape}"
            )


TargetFragment: TypeAlias = Fragment[PlannedArray]
"""A fragment of a target's tensor."""
AnyFragment: TypeAlias = Fragment[AnyArray]
"""A fragment of a source's or of a target's tensor."""


def whole_fragment(array: ArrayT) -> Fragment[ArrayT]:
    """Build the fragment of a tensor that is exactly one array."""
    return Fragment(full_box(array.shape), array, (0,) * len(array.shape))


def _no_fragments() -> tuple[Any, ...]:
    """Return the fragments of a tensor whose data are in no file."""
    return ()


@dataclass(frozen=True, slots=True)
class Tensor(Generic[ArrayT_co]):
    """A tensor of a checkpoint.

    Two tensors are equal if their dtypes and shapes are, and both or neither are flexible. Tied
    tensors are the same object; ``replace(tensor)`` makes an equal one that is not tied to it.

    Args:
        dtype: canonical dtype name (``core.arrays.dtypes``).
        shape: global shape, in elements.
        tiling: the array that is exactly the tensor, or a function that returns the fragments that
            tile it; readers call ``fragments``, which answers for both. Fragments are created when
            they are asked for, so that a tensor of 10⁵ chunks does not need 10⁵ objects.
        flexible: of a target, the source's tensor may have another shape: elements that it lacks
            are zero (vocabulary padding, the documented ``allow_shape_mismatch``).
        attributes: what the checkpoint says about the tensor besides
            (``core.engine.catalog.attributes``); None if nothing.
    """

    dtype: str
    shape: Shape
    tiling: ArrayT_co | Callable[[], Sequence[Fragment[ArrayT_co]]] = field(
        default=_no_fragments, compare=False, repr=False
    )
    flexible: bool = False
    attributes: Mapping[str, object] | None = field(default=None, compare=False)

    def fragments(self) -> Sequence[Fragment[ArrayT_co]]:
        """Return the fragments that tile the tensor, replicas included, in a stable order."""
        tiling = self.tiling
        return tiling() if callable(tiling) else (whole_fragment(tiling),)

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Size of the tensor as one dense array, in bytes."""
        return prod(self.shape) * itemsize(self.dtype)

    def narrow(self, axis: int, start: int, extent: int) -> Tensor[ArrayT_co]:
        """Return the entries [start, start + extent) of an axis."""
        if start == 0 and extent == self.shape[axis]:
            return self

        def fragments() -> list[Fragment[ArrayT_co]]:
            parts = (
                clip_fragment(fragment, start=start, extent=extent, axis=axis)
                for fragment in self.fragments()
            )
            return [part for part in parts if part is not None]

        return Tensor(self.dtype, _with_extent(self.shape, axis, extent), fragments)

    def select(self, axis: int, index: int) -> Tensor[ArrayT_co]:
        """Return one entry of an axis, without that axis."""
        whole = self.narrow(axis, index, 1)

        def fragments() -> list[Fragment[ArrayT_co]]:
            return [_without_axis(fragment, axis) for fragment in whole.fragments()]

        return Tensor(self.dtype, _drop(self.shape, axis), fragments)

    def with_replicas(self, *others: Tensor[ArrayT_co]) -> Tensor[ArrayT_co]:
        """Return the tensor with the fragments of equal tensors as replicas of its own."""
        tensors = (self, *others)
        return replace(
            self,
            tiling=lambda: [fragment for tensor in tensors for fragment in tensor.fragments()],
        )

    def with_fragments(
        self, change: Callable[[Fragment[ArrayT_co]], Fragment[ArrayT]]
    ) -> Tensor[ArrayT]:
        """Return the tensor with every fragment changed by a function."""
        changed: Any = self
        return cast(
            "Tensor[ArrayT]",
            replace(changed, tiling=lambda: [change(fragment) for fragment in self.fragments()]),
        )

    def with_arrays(self, change: Callable[[ArrayT_co], ArrayT]) -> Tensor[ArrayT]:
        """Return the tensor with every array replaced by what a function makes of it."""

        def changed(fragment: Fragment[ArrayT_co]) -> Fragment[ArrayT]:
            array = fragment.array
            return Fragment(fragment.box, None if array is None else change(array), fragment.at)

        return self.with_fragments(changed)


AnyTensor: TypeAlias = Tensor[AnyArray]
"""A tensor of a source or of a target."""
TargetTensor: TypeAlias = Tensor[PlannedArray]
"""A tensor of a target."""


def without_fragments(tensor: AnyTensor) -> Tensor[Any]:
    """Return what a tensor is, without where it lies; the result can be sent to other processes."""
    return replace(tensor, tiling=_no_fragments)


def bind_argument(function: Callable[[Any], ResultT], argument: object) -> Callable[[], ResultT]:
    """Return a function that calls another one with its only argument.

    A catalog may have 10⁵ tensors, each with such a function. A bound method takes a third of the
    memory of ``functools.partial``.
    """
    return MethodType(function, argument)


def whole_tensor(array: ArrayT) -> Tensor[ArrayT]:
    """Build the tensor that is exactly one array."""
    return Tensor(array.dtype, array.shape, array)


def compute_whole(compute: Callable[[], ArrayT]) -> Callable[[], tuple[Fragment[ArrayT]]]:
    """Return the ``tiling`` of a tensor that is exactly one array.

    Args:
        compute: builds the array; it is called once, when the fragments are first asked for.
    """

    @cache
    def fragments() -> tuple[Fragment[ArrayT]]:
        return (whole_fragment(compute()),)

    return fragments


def tensors_of(arrays: Mapping[str, ArrayT]) -> dict[str, Tensor[ArrayT]]:
    """Build tensors that are one array each, by key; tensors of the same array are tied."""
    tensor_of: dict[int, Tensor[ArrayT]] = {}
    for array in arrays.values():
        if id(array) not in tensor_of:
            tensor_of[id(array)] = whole_tensor(array)
    return {key: tensor_of[id(array)] for key, array in arrays.items()}


def find_ties(tensors: Mapping[str, AnyTensor]) -> dict[str, str]:
    """Return key → first key of the same tensor, for the tensors that have an earlier key."""
    first_of: dict[int, str] = {}
    ties: dict[str, str] = {}
    for key, tensor in tensors.items():
        first = first_of.setdefault(id(tensor), key)
        if first != key:
            ties[key] = first
    return ties


def without_ties(tensors: Mapping[str, Tensor[ArrayT]]) -> dict[str, Tensor[ArrayT]]:
    """Return tensors of which each is one of its own; those that were tied have equal data."""
    ties = find_ties(tensors)
    return {key: replace(item) if key in ties else item for key, item in tensors.items()}


def concat(tensors: Sequence[Tensor[ArrayT]], axis: int = 0) -> Tensor[ArrayT]:
    """Return tensors one after the other along an axis.

    Args:
        tensors: at least one, of one dtype and, but for the axis, one shape.
    """
    if len(tensors) == 1:
        return tensors[0]
    starts = [0, *accumulate(tensor.shape[axis] for tensor in tensors)]

    def fragments() -> list[Fragment[ArrayT]]:
        return [
            replace(fragment, box=_moved(fragment.box, axis, start))
            for tensor, start in zip(tensors, starts, strict=False)
            for fragment in tensor.fragments()
        ]

    return Tensor(tensors[0].dtype, _with_extent(tensors[0].shape, axis, starts[-1]), fragments)


def stack(tensors: Sequence[Tensor[ArrayT]], axis: int = 0) -> Tensor[ArrayT]:
    """Return tensors as the entries of a new axis.

    Args:
        tensors: at least one, of one dtype and shape.
        axis: number of the new axis in the result; the last axis if the tensors have fewer.
    """
    shape = tensors[0].shape
    place = min(axis, len(shape))

    def fragments() -> list[Fragment[ArrayT]]:
        return [
            _with_axis(fragment, place, index)
            for index, tensor in enumerate(tensors)
            for fragment in tensor.fragments()
        ]

    return Tensor(tensors[0].dtype, _put(shape, place, len(tensors)), fragments)


def clip_fragment(
    fragment: Fragment[ArrayT], *, start: int, extent: int, axis: int = 0, to: int = 0
) -> Fragment[ArrayT] | None:
    """Clip a fragment to a range of an axis, and move the range to another position.

    Args:
        fragment: a fragment of a tensor.
        start, extent: the range, in elements.
        axis: the axis of the tensor.
        to: where the range begins in the other tensor.

    Returns:
        The part of the fragment in the range; None if it has none of it.
    """
    box = fragment.box
    first = max(start, box.offset[axis])
    stop = min(start + extent, box.end[axis])
    if stop <= first:
        return None
    # An array may have more axes than its fragment, which are aligned at the last one: a matrix in
    # a stack has one less. If the array has fewer axes, it has no such axis to move along.
    at = fragment.at
    array_axis = axis + len(at) - box.rank
    if array_axis >= 0:
        n_skipped = first - box.offset[axis]
        at = (*at[:array_axis], at[array_axis] + n_skipped, *at[array_axis + 1 :])
    offset = (*box.offset[:axis], first - start + to, *box.offset[axis + 1 :])
    shape = (*box.shape[:axis], stop - first, *box.shape[axis + 1 :])
    return Fragment(Box(offset, shape), fragment.array, at)


def _without_axis(fragment: Fragment[ArrayT], axis: int) -> Fragment[ArrayT]:
    """Return a fragment of extent 1 along an axis as one of the tensor without that axis."""
    array, at = fragment.array, fragment.at
    in_array = len(at) - fragment.box.rank + axis
    if array is not None and axis and in_array > 0:
        # Fragments and arrays are aligned at the last axis: bring the axis to the front.
        order = (in_array, *_drop(tuple(range(len(at))), in_array))
        array, at = _reordered(array, order), (at[in_array], *_drop(at, in_array))
    box = Box(_drop(fragment.box.offset, axis), _drop(fragment.box.shape, axis))
    return Fragment(box, array, at)


def _with_axis(fragment: Fragment[ArrayT], axis: int, index: int) -> Fragment[ArrayT]:
    """Return a fragment as a part of one entry of a new axis."""
    array, at = fragment.array, fragment.at
    n_before = len(at) - (fragment.box.rank - axis)
    if array is not None and axis and n_before > 0:
        order = (*range(n_before), None, *range(n_before, len(at)))
        array, at = _reordered(array, order), _put(at, n_before, 0)
    box = Box(_put(fragment.box.offset, axis, index), _put(fragment.box.shape, axis, 1))
    return Fragment(box, array, at)


def _reordered(array: ArrayT, order: Sequence[int | None]) -> ArrayT:
    stored: Any = array
    return cast("ArrayT", with_axes(stored, order))


def _moved(box: Box, axis: int, n: int) -> Box:
    return Box(_with_extent(box.offset, axis, box.offset[axis] + n), box.shape)


def _with_extent(numbers: Shape, axis: int, number: int) -> Shape:
    return (*numbers[:axis], number, *numbers[axis + 1 :])


def _drop(numbers: Shape, axis: int) -> Shape:
    return (*numbers[:axis], *numbers[axis + 1 :])


def _put(numbers: Shape, axis: int, number: int) -> Shape:
    return (*numbers[:axis], number, *numbers[axis:])


def held_boxes(
    shape: Shape, fragments: Iterable[Fragment[ArrayT]]
) -> Iterator[tuple[ArrayT, Box | None]]:
    """Yield every array of a tensor, with the box of the tensor that the array holds.

    The box is None for an array whose elements are not one box of the tensor. An array that two
    fragments place differently is yielded again, without a box.

    Args:
        shape: shape of the tensor, in elements.
        fragments: fragments of the tensor; an array may be in several of them.
    """
    box_of: dict[str, Box | None] = {}
    for fragment in fragments:
        array = fragment.array
        if array is None:
            continue
        box = (
            fragment.box if array.shape == fragment.box.shape else _held_box(shape, fragment, array)
        )
        if array.name not in box_of:
            box_of[array.name] = box
            yield array, box
        elif box_of[array.name] != box:
            yield array, None


def _held_box(shape: Shape, fragment: AnyFragment, array: AnyArray) -> Box | None:
    """Extend a fragment to its complete array, and return the box of the tensor that this is.

    Returns:
        None if the array reaches beyond the tensor.
    """
    # Bring the array to the axes of the tensor: add leading axes of extent 1, or drop some.
    extra = len(shape) - len(array.shape)
    extents = (1,) * extra + array.shape[max(-extra, 0) :]
    at = (0,) * extra + fragment.at[max(-extra, 0) :]
    offset = tuple(start - inside for start, inside in zip(fragment.box.offset, at, strict=True))
    fits = all(
        start >= 0 and start + n <= end
        for start, n, end in zip(offset, extents, shape, strict=True)
    )
    return Box(offset, extents) if fits else None
