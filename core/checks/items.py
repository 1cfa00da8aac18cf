"""CK207, CK208: is what a file holds the tensor that the metadata says?

DCP's ``.metadata`` states dtype and shape of every chunk, and so does the item in the file, which also states strides
and the length of its storage. Items are torch zips; their own structure is for other checks.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.catalog import StoredArray
from core.checks import Check, Code, Level
from core.checks.subject import Subject
from core.errors import CheckpointingException
from core.finding import Finding, Severity
from core.formats.torch_item import item_location, stored_tensor

DIFFERS = Code(
    "CK207",
    Severity.ERROR,
    "a stored item is not the chunk of the metadata",
    "use another checkpoint: .metadata and data files are of different saves, or one was edited",
    Level.HEADERS,
)
UNFIT = Code(
    "CK208",
    Severity.ERROR,
    "a stored item cannot be located",
    "copy the checkpoint again, or use an older one",
    Level.HEADERS,
)

CODES = (DIFFERS, UNFIT)


def as_stated(subject: Subject) -> Iterator[Finding]:
    """Compares dtype and shape of every item with the metadata, and its strides with its storage."""
    catalog = subject.salvaged.catalog
    if catalog is None:
        return
    for key in catalog.tensors:
        for fragment in catalog.fragments(key):
            array = fragment.array
            if array is not None and array.extent is not None and array.extent.is_late:
                yield from _of_item(subject, key, array)


def _of_item(subject: Subject, key: str, array: StoredArray) -> Iterator[Finding]:
    extent = array.extent
    assert extent is not None and extent.item_bytes is not None
    span = (extent.offset, extent.offset + extent.item_bytes)
    if subject.files.get(extent.file, 0) < span[1]:
        return  # the file is absent or too short, which is found where files are looked at
    try:
        dtype, shape = stored_tensor(subject.store, array)
        if dtype == array.dtype and shape == array.shape:
            item_location(subject.store, array)
            return
    except CheckpointingException as err:
        if not subject.is_explained(extent.file, span):
            yield UNFIT.finding(err.message, file=extent.file, key=key, span=span, hint=err.hint)
        return
    yield DIFFERS.finding(
        "the file holds another tensor than the metadata says",
        file=extent.file,
        key=key,
        span=span,
        expected=f"{array.dtype} of shape {array.shape}",
        found=f"{dtype} of shape {shape}",
    )


CHECKS = (Check(as_stated, level=Level.HEADERS, formats=("dcp", "torch_dist")),)
