"""One process's share of a target that several processes write together.

All processes compute the same file layouts, and each fills its own regions. If the coords of all
arrays in a file name the same process, that process writes the complete file, literals included.
One process finishes the other files after all processes have filled their regions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from core.arrays.box import Box
from core.engine.catalog.catalog import TargetCatalog
from core.engine.catalog.file_image import FileImage, no_literals
from core.engine.catalog.tensor import Fragment, TargetFragment, TargetTensor, bind_argument
from core.values import dataclass

HOLDER = "file"
"""Coordinate of an array that names the only process that fills it.

Formats use its value as a file number.
"""


@dataclass(frozen=True, slots=True)
class ProcessShare:
    """The part of a target that one process writes.

    Args:
        target: the fragments that the process fills, under the target's keys.
        images: the files that it writes to, with the arrays that it fills; with literals only if
            no other process writes to the file.
    """

    target: TargetCatalog
    images: tuple[FileImage, ...]


def find_share(
    target: TargetCatalog, images: Sequence[FileImage], boxes_of: Mapping[str, Sequence[Box]]
) -> ProcessShare:
    """Return the share of a target that one process writes.

    Args:
        target: the complete target catalog; its arrays are placed in the images.
        images: layouts of all files.
        boxes_of: key → disjoint boxes of the tensor that the process writes, in elements.
    """
    # Reduce the catalog to the process's boxes, and to the tensors that have any.
    fragments = {key: clip_fragments(target, key, boxes) for key, boxes in boxes_of.items()}

    def share_of(tensors: Mapping[str, TargetTensor]) -> dict[str, TargetTensor]:
        return {
            key: replace(tensor, tiling=bind_argument(tuple, fragments[key]))
            for key, tensor in tensors.items()
            if fragments.get(key)
        }

    process_target = replace(
        target, tensors=share_of(target.tensors), hidden=share_of(target.hidden)
    )
    # Reduce the files to the arrays that the process fills. The literals of a shared file are
    # written at the end, because its checksums cover bytes of other processes.
    names = {
        fragment.array.name
        for clipped in fragments.values()
        for fragment in clipped
        if fragment.array is not None
    }
    process_images: list[FileImage] = []
    for image in images:
        arrays = [placed for placed in image.arrays if placed.array.name in names]
        if arrays and not has_one_holder(image):
            process_images.append(replace(image, arrays=arrays, literals=no_literals))
        elif arrays:
            process_images.append(image)
    return ProcessShare(process_target, tuple(process_images))


def has_one_holder(image: FileImage) -> bool:
    """Return True if a single process fills the file; False for a file without data."""
    holders = {placed.array.coords for placed in image.arrays if placed.array.n_bytes}
    return len(holders) == 1 and all(coords and coords[0][0] == HOLDER for coords in holders)


def clip_fragments(
    target: TargetCatalog, key: str, boxes: Sequence[Box]
) -> tuple[TargetFragment, ...]:
    """Return the intersections of a tensor's target fragments with boxes of the tensor."""
    clipped = []
    for fragment in target.fragments(key):
        for box in boxes:
            common = fragment.box if fragment.box == box else fragment.box.intersect(box)
            if common is None or common.is_empty:
                continue
            # Fragment and array are aligned at their last axis; extra leading axes have extent 1.
            delta = [a - b for a, b in zip(common.offset, fragment.box.offset, strict=True)]
            extra = len(fragment.at) - len(delta)
            moved = (*(0,) * extra, *delta) if extra >= 0 else tuple(delta[-extra:])
            at = tuple(a + b for a, b in zip(fragment.at, moved, strict=True))
            clipped.append(Fragment(common, fragment.array, at))
    return tuple(clipped)
