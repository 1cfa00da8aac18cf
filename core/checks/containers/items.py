"""CK207–CK209: is what a file holds the tensor, or the object, that the metadata says?

DCP's ``.metadata`` states dtype and shape of every chunk, and so does the item in the file, which also states strides
and the length of its storage. Items are torch zips; their own structure is for other checks. An object's item is read
as a conversion reads it: what that refuses is found here.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.catalog.stored import StoredArray
from core.checks.check import Check, Code
from core.checks.file_codes import NOT_HANDLED
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.problems import finding_of
from core.checks.subject import Subject
from core.errors import CheckpointingException
from core.formats.torch.format import load_object
from core.formats.torch.item import item_location, stored_tensor
from core.formats.torch.tensors import unknown_storage
from core.pickle.inert import PLAIN, walk

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

OBJECT = Code(
    "CK209",
    Severity.ERROR,
    "a stored object cannot be read",
    "copy the checkpoint again, or use an older one",
    Level.HEADERS,
)

CODES = (DIFFERS, UNFIT, OBJECT)
_FORMATS = ("dcp", "torch_dist")


def as_stated(subject: Subject) -> Iterator[Finding]:
    """Compares dtype and shape of every item with the metadata, and its strides with its storage."""
    catalog = subject.salvaged.catalog
    if catalog is None:
        return
    for key in catalog.tensors:
        for fragment in catalog.fragments(key):
            array = fragment.array
            if array is not None and array.extent.is_late:
                yield from _of_item(subject, key, array)


def _of_item(subject: Subject, key: str, array: StoredArray) -> Iterator[Finding]:
    extent = array.extent
    assert extent.item_bytes is not None
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


def objects(subject: Subject) -> Iterator[Finding]:
    """Read every object that is stored as a stream of its own."""
    catalog = subject.salvaged.catalog
    if catalog is None:
        return
    for key, item in catalog.objects.items():
        array = None if item.raw_key is None else catalog.fragments(item.raw_key)[0].array
        if array is None:
            continue
        file, span = array.extent.file, (array.extent.offset, array.extent.offset + array.n_bytes)
        if subject.files.get(file, 0) < span[1]:
            continue  # as for chunks
        try:
            value, _ = load_object(subject.store, array, key=key)
        except CheckpointingException as err:
            if not subject.is_explained(file, span):
                yield finding_of(err, default=OBJECT, file=file, key=key)
            continue
        yield from _unknown_storages(value, key=key, file=file)


def storages(subject: Subject) -> Iterator[Finding]:
    """Find tensors whose storage has an element type that is not known; torch could not make them either."""
    catalog = subject.catalog
    for key, item in {} if catalog is None else catalog.objects.items():
        if item.raw_key is None and type(item.value) not in PLAIN:
            yield from _unknown_storages(item.value, key=key, file=None)


def _unknown_storages(value: object, *, key: str, file: str | None) -> Iterator[Finding]:
    names = sorted({kind.name for node in walk(value) if (kind := unknown_storage(node)) is not None})
    if names:
        yield NOT_HANDLED.finding(
            "a tensor has a storage of an element type that is not known",
            file=file,
            key=key,
            expected="a storage of torch's",
            found=", ".join(names[:3]),
        )


CHECKS = (
    Check(as_stated, level=Level.HEADERS, formats=_FORMATS),
    Check(objects, level=Level.HEADERS, formats=_FORMATS),
    Check(storages),
)
