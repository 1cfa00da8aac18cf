"""One process's share of a target that several processes write together.

All processes have the same file images; each fills its regions. A file whose arrays all name one
process in their coords is written by that process, literals included; one process finishes the
other files when all are done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from core.arrays.box import Box
from core.catalog.catalog import Fragment, TargetCatalog, TargetFragment
from core.catalog.file_image import FileImage, no_literals

HOLDER = "file"
"""The coordinate of an array that names the one process that fills it; formats take it as the
number of a file.
"""


@dataclass(frozen=True, slots=True)
class ProcessShare:
    """The part of a target that one process writes.

    Args:
        target: the fragments that the process fills, under the target's keys.
        images: the files that it writes to, with the arrays that it fills; literals only for files
            that no other process fills.
    """

    target: TargetCatalog
    images: tuple[FileImage, ...]


def find_share(
    target: TargetCatalog, images: Sequence[FileImage], boxes_of: Mapping[str, Sequence[Box]]
) -> ProcessShare:
    """Return the share of a process.

    Args:
        target: the complete target catalog; its arrays are placed in the images.
        images: all files.
        boxes_of: key → disjoint boxes of the tensor that the process writes, in elements.
    """
    fragments = {key: clip_fragments(target, key, boxes) for key, boxes in boxes_of.items()}
    names = {
        piece.array.name
        for pieces in fragments.values()
        for piece in pieces
        if piece.array is not None
    }
    own_images: list[FileImage] = []
    for image in images:
        arrays = [placed for placed in image.arrays if placed.array.name in names]
        if arrays:
            own_images.append(
                image
                if has_one_holder(image)
                else replace(image, arrays=arrays, literals=no_literals)
            )
    share = replace(
        target,
        tensors={key: meta for key, meta in target.tensors.items() if fragments.get(key)},
        hidden={key: meta for key, meta in target.hidden.items() if fragments.get(key)},
        fragments_of=lambda key: fragments.get(key, ()),
    )
    return ProcessShare(share, tuple(own_images))


def has_one_holder(image: FileImage) -> bool:
    """Return whether a single process fills the file; False for a file without data."""
    holders = {placed.array.coords for placed in image.arrays if placed.array.n_bytes}
    return len(holders) == 1 and all(coords and coords[0][0] == HOLDER for coords in holders)


def clip_fragments(
    target: TargetCatalog, key: str, boxes: Sequence[Box]
) -> tuple[TargetFragment, ...]:
    """Return the parts of a tensor's target fragments that lie in the boxes."""
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
            clipped.append(Fragment(key, common, fragment.array, at))
    return tuple(clipped)
