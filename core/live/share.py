"""One process's share of a target that several processes write together.

Everybody has the same file images; each fills the regions that it holds. A file whose arrays all name one holder in
their coords is that one's own, literals included; the others are finished by one process, when all are done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from core.arrays.box import Box
from core.catalog.catalog import Fragment, TargetCatalog, TargetFragment
from core.catalog.file_image import FileImage, no_literals

HOLDER = "file"
"""The coordinate of an array that names the one process that fills it; formats take it as the number of a file."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one process writes.

    Args:
        target: the fragments that it fills, under the target's keys.
        images: the files that it writes to, with the arrays that it fills; literals only for files that are its own.
    """

    target: TargetCatalog
    images: tuple[FileImage, ...]


def share_of(target: TargetCatalog, images: Sequence[FileImage], held: Mapping[str, Sequence[Box]]) -> Share:
    """The share of a process.

    Args:
        target: the whole target catalog; its arrays are placed in the images.
        images: all files.
        held: key → disjoint boxes of the tensor that the process writes, in elements.
    """
    fragments = {key: filled(target, key, boxes) for key, boxes in held.items()}
    names = {fragment.array.name for found in fragments.values() for fragment in found if fragment.array is not None}
    mine: list[FileImage] = []
    for image in images:
        arrays = [placed for placed in image.arrays if placed.array.name in names]
        if arrays:
            mine.append(image if is_own(image) else replace(image, arrays=arrays, literals=no_literals))
    share = replace(
        target,
        tensors={key: meta for key, meta in target.tensors.items() if fragments.get(key)},
        hidden={key: meta for key, meta in target.hidden.items() if fragments.get(key)},
        fragments_of=lambda key: fragments.get(key, ()),
    )
    return Share(share, tuple(mine))


def is_own(image: FileImage) -> bool:
    """Whether one process fills all of a file; where it has no data, nobody does."""
    holders = {placed.array.coords for placed in image.arrays if placed.array.n_bytes}
    return len(holders) == 1 and all(coords and coords[0][0] == HOLDER for coords in holders)


def filled(target: TargetCatalog, key: str, boxes: Sequence[Box]) -> tuple[TargetFragment, ...]:
    """The parts of a tensor's target fragments that lie in boxes."""
    found = []
    for fragment in target.fragments(key):
        for box in boxes:
            common = fragment.box if fragment.box == box else fragment.box.intersect(box)
            if common is None or common.is_empty:
                continue
            delta = [a - b for a, b in zip(common.offset, fragment.box.offset, strict=True)]
            extra = len(fragment.at) - len(delta)
            moved = (*(0,) * extra, *delta) if extra >= 0 else tuple(delta[-extra:])
            at = tuple(a + b for a, b in zip(fragment.at, moved, strict=True))
            found.append(Fragment(key, common, fragment.array, at))
    return tuple(found)
