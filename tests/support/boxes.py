"""Small in-memory checkpoints for the engine's tests: tensors cut into arrays in any way, filled
with unique values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from core.arrays.box import Box, c_strides, full_box
from core.arrays.dtypes import itemsize
from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.file_image import FileImage, PlacedArray
from core.engine.catalog.stored import ArrayT, Extent, PlannedArray, StoredArray
from core.engine.catalog.tensor import Fragment, Tensor
from core.files.store import MemoryStore
from tests.support.fragments import with_fragments

DTYPE = "int32"


def values(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of unique numbers, a function of key and index."""
    base = sum(ord(c) * 31**i for i, c in enumerate(key)) % 997 * 1_000_003
    return (np.arange(prod(shape), dtype=np.int64) + base).astype(np.int32).reshape(shape)


@dataclass
class Cut:
    """How a tensor is stored: arrays of some shape, each with the boxes it holds and where.

    Args:
        parts: (array name, array shape, [(box, at), …]).
    """

    parts: Sequence[tuple[str, tuple[int, ...], Sequence[tuple[Box, tuple[int, ...]]]]]

    def arrays(self) -> Iterable[PlannedArray]:
        """The arrays, without places."""
        return [PlannedArray(name, DTYPE, shape) for name, shape, _ in self.parts]


def pieces(
    key: str, shape: tuple[int, ...], axis: int, n: int, *, segments: int = 1, copies: int = 1
) -> Cut:
    """Shards along an axis; with segments, shard r holds the r-th n-th of each segment, one after
    the other.
    """
    parts = []
    step = shape[axis] // (n * segments)
    for copy in range(copies):
        for r in range(n):
            boxes = []
            for s in range(segments):
                offset = [0] * len(shape)
                extent = list(shape)
                at = [0] * len(shape)
                offset[axis] = s * (shape[axis] // segments) + r * step
                extent[axis] = step
                at[axis] = s * step
                boxes.append((Box(tuple(offset), tuple(extent)), tuple(at)))
            array_shape = (*shape[:axis], step * segments, *shape[axis + 1 :])
            parts.append((f"{key}/{copy}/{r}", array_shape, boxes))
    return Cut(parts)


def one(key: str, shape: tuple[int, ...]) -> Cut:
    """The tensor as one array."""
    return Cut([(f"{key}/all", shape, [(full_box(shape), (0,) * len(shape))])])


def region(at: Sequence[int], box: Box, rank: int) -> tuple[slice, ...]:
    """The slices of an array region that holds a box; aligned at the last axis."""
    shape = (1,) * max(0, rank - box.rank) + box.shape[max(0, box.rank - rank) :]
    return tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))


@dataclass
class Model:
    """Tensors and how they are stored on one side."""

    tensors: dict[str, tuple[int, ...]]
    cuts: dict[str, Cut]
    store: MemoryStore = field(default_factory=MemoryStore)

    def source(
        self,
        *,
        order: str = "C",
        gap: int = 13,
        data: Mapping[str, np.ndarray] | None = None,
        dtype: str = DTYPE,
        files: int = 2,
    ) -> Catalog:
        """Writes the arrays into files, at odd offsets, and returns their catalog.

        Args:
            order: ``C``, or ``F`` for transposed arrays with strides.
            data: the tensors; None fills them with ``values``.
        """
        content: dict[str, np.ndarray] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for key, cut in self.cuts.items():
            tensor = data[key] if data is not None else values(key, self.tensors[key])
            for name, shape, boxes in cut.parts:
                array = content.setdefault(name, np.zeros(shape, tensor.dtype))
                shapes[name] = shape
                for box, at in boxes:
                    where = region(at, box, len(shape))
                    array[where] = tensor[tuple(map(slice, box.offset, box.end))].reshape(
                        array[where].shape
                    )
        arrays: dict[str, StoredArray] = {}
        buffers = [bytearray() for _ in range(files)]
        for number, (name, array) in enumerate(content.items()):
            buffer = buffers[number % files]
            buffer += bytes(gap)
            strides = None
            if order == "F":
                strides = tuple(reversed(c_strides(tuple(reversed(array.shape)))))
            extent = Extent(f"source{number % files}", len(buffer), strides)
            buffer += array.tobytes(order="F" if order == "F" else "C")
            arrays[name] = StoredArray(name, dtype, shapes[name], extent)
        for number, buffer in enumerate(buffers):
            self.store.contents[f"source{number}"] = buffer
        return self.catalog(arrays, dtype=dtype)

    def target(self, *, dtype: str = DTYPE, gap: int = 7) -> tuple[TargetCatalog, list[FileImage]]:
        """The target catalog, and one file image per two arrays."""
        arrays = {
            name: PlannedArray(name, dtype, shape)
            for cut in self.cuts.values()
            for name, shape, _ in cut.parts
        }
        images = []
        names = list(arrays)
        for number in range(0, len(names), 2):
            placed = []
            end = gap
            for name in names[number : number + 2]:
                placed.append(PlacedArray(end, arrays[name]))
                end += arrays[name].n_bytes + gap
            images.append(FileImage(f"out{number // 2}", end, placed))
        return self.catalog(arrays, dtype=dtype), images

    def catalog(self, arrays: Mapping[str, ArrayT], *, dtype: str = DTYPE) -> Catalog[ArrayT]:
        """The catalog of given arrays."""

        def fragments_of(key: str) -> list[Fragment[ArrayT]]:
            return [
                Fragment(box, arrays[name], at)
                for name, _, boxes in self.cuts[key].parts
                for box, at in boxes
            ]

        tensors = {key: Tensor(dtype, shape) for key, shape in self.tensors.items()}
        return Catalog("fake", None, with_fragments(tensors, fragments_of))


def written(stage: MemoryStore, images: Sequence[FileImage]) -> dict[str, np.ndarray]:
    """Every array of a finished stage, as unsigned integers."""
    arrays = {}
    for image in images:
        for placed in image.arrays:
            array = placed.array
            data = stage.read(image.path, placed.offset, array.n_bytes)
            arrays[array.name] = np.frombuffer(data, dtype=f"u{itemsize(array.dtype)}").reshape(
                array.shape
            )
    return arrays


def expected(model: Model, data: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """Every array that a target model should hold."""
    arrays: dict[str, np.ndarray] = {}
    for key, cut in model.cuts.items():
        tensor = data[key] if data is not None else values(key, model.tensors[key])
        for name, shape, boxes in cut.parts:
            array = arrays.setdefault(name, np.zeros(shape, tensor.dtype))
            for box, at in boxes:
                where = region(at, box, len(shape))
                array[where] = tensor[tuple(map(slice, box.offset, box.end))].reshape(
                    array[where].shape
                )
    return {name: array.view(f"u{array.dtype.itemsize}") for name, array in arrays.items()}
