"""CK207–CK209: compare stored items with the metadata.

DCP's ``.metadata`` records dtype and shape of every chunk, and so does the item in the file, which
also records strides and the length of its storage. Items are torch zips, whose structure is checked
by ``dcp_files``. The item of an object is read as in a conversion, to find what a conversion would
refuse.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.engine.catalog.stored import StoredArray
from core.errors import CheckpointingException
from core.formats.torch.tensors import unknown_storage
from core.pickle.inert import PLAIN, walk
from core.verbs.checks.file_codes import NOT_HANDLED
from core.verbs.checks.finding import Finding, Level, get_code
from core.verbs.checks.problems import finding_of
from core.verbs.checks.subject import Check, Subject

DIFFERS = get_code("CK207")
UNFIT = get_code("CK208")

OBJECT = get_code("CK209")

_FORMATS = ("dcp", "torch_dist")


def check_tensor_items(subject: Subject) -> Iterator[Finding]:
    """Compare dtype and shape of every item with the metadata, and its strides with its storage."""
    catalog = subject.salvaged.catalog
    if catalog is None:
        return
    for key in catalog.tensors:
        for fragment in catalog.fragments(key):
            array = fragment.array
            if array is not None and array.extent.is_late:
                yield from _check_item(subject, key, array)


def _check_item(subject: Subject, key: str, array: StoredArray) -> Iterator[Finding]:
    """Check one tensor item (CK207, CK208)."""
    from core.formats.torch.item import stored_tensor

    extent = array.extent
    assert extent.item is not None
    span = (extent.offset, extent.offset + extent.item.n_bytes)
    if subject.files.get(extent.file, 0) < span[1]:
        return  # missing or truncated file: reported by the checks of files
    # If dtype and shape match, the strides may still exceed the storage: ``locate`` raises.
    try:
        dtype, shape = stored_tensor(subject.store, array)
        if dtype == array.dtype and shape == array.shape:
            array.locate(subject.store)
            return
    except CheckpointingException as err:
        if not subject.is_covered_by_finding(extent.file, span):
            yield UNFIT.finding(err.message, file=extent.file, key=key, span=span, hint=err.hint)
        return
    yield DIFFERS.finding(
        "the stored tensor's dtype or shape does not match the metadata",
        file=extent.file,
        key=key,
        span=span,
        expected=f"{array.dtype} of shape {array.shape}",
        found=f"{dtype} of shape {shape}",
    )


def check_object_items(subject: Subject) -> Iterator[Finding]:
    """Read every object that is stored as a stream of its own (CK209)."""
    from core.formats.torch.tree import load_object

    catalog = subject.salvaged.catalog
    if catalog is None:
        return
    for key, item in catalog.objects.items():
        array = None if item.raw_key is None else catalog.fragments(item.raw_key)[0].array
        if array is None:
            continue
        file, span = array.extent.file, (array.extent.offset, array.extent.offset + array.n_bytes)
        if subject.files.get(file, 0) < span[1]:
            continue  # missing or truncated file: reported by the checks of files
        try:
            value, _ = load_object(subject.store, array, key=key)
        except CheckpointingException as err:
            if not subject.is_covered_by_finding(file, span):
                yield finding_of(err, default=OBJECT, file=file, key=key)
            continue
        yield from _unknown_storages(value, key=key, file=file)


def check_storages(subject: Subject) -> Iterator[Finding]:
    """Report tensors whose storage has an unknown element type, which torch cannot load either."""
    catalog = subject.catalog
    for key, item in {} if catalog is None else catalog.objects.items():
        # Objects with streams of their own are covered by ``check_object_items``.
        if item.raw_key is None and type(item.value) not in PLAIN:
            yield from _unknown_storages(item.value, key=key, file=None)


def _unknown_storages(value: object, *, key: str, file: str | None) -> Iterator[Finding]:
    """Report the unknown storage types in an object."""
    names = sorted(
        {kind.name for node in walk(value) if (kind := unknown_storage(node)) is not None}
    )
    if names:
        yield NOT_HANDLED.finding(
            "a tensor's storage has an unknown element type",
            file=file,
            key=key,
            expected="a torch storage type",
            found=", ".join(names[:3]),
        )


CHECKS = (
    Check(check_tensor_items, level=Level.HEADERS, formats=_FORMATS),
    Check(check_object_items, level=Level.HEADERS, formats=_FORMATS),
    Check(check_storages),
)
