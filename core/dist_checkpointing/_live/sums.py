"""The checksums of what one process of a save has written completely."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

from core.dist_checkpointing._live.share import has_one_holder
from core.engine.catalog.file_image import no_literals
from core.publish.manifest.of_copy import manifest_arrays

if TYPE_CHECKING:
    from core.engine.catalog.file_image import FileImage
    from core.engine.copy.run import CopyResult
    from core.engine.plan.plan import Plan
    from core.publish.manifest.file import FileSum, ManifestArray


def complete_arrays(plan: Plan, result: CopyResult) -> list[ManifestArray]:
    """Return the entries of the arrays that a process has filled completely.

    Args:
        plan: the share of the process.
        result: its result, with CRCs and digests.
    """
    # Other processes may fill the rest of an array; the sums of a part are not those of the array.
    n_filled: dict[str, int] = {}
    for key in iter(plan.keys()):
        for fragment in plan.target.fragments(key):
            if fragment.array is not None:
                name = fragment.array.name
                n_filled[name] = n_filled.get(name, 0) + fragment.box.n_elements
    return [
        entry
        for entry in manifest_arrays(plan, result, crc=True)
        if n_filled[entry.name] == prod(entry.shape)
    ]


def complete_files(
    files: Iterable[FileSum], images: Iterable[FileImage], arrays: Iterable[ManifestArray]
) -> list[FileSum]:
    """Return the entries of the files that a process has filled completely.

    Args:
        files: the entries of all files that the process has written to.
        images: the files as a whole, also with the arrays of other processes.
        arrays: from ``complete_arrays``.
    """
    filled = {entry.name for entry in arrays}
    complete = {
        image.path
        for image in images
        if has_one_holder(image)
        or (
            image.literals is no_literals
            and all(placed.array.name in filled for placed in image.arrays)
        )
    }
    return [file for file in files if file.path in complete]
