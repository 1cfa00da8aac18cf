"""CK101, CK103, CK106, CK150–CK153: compare the files of a DCP checkpoint with ``.metadata``.

Every file that ``.metadata`` names must exist and be long enough for its items. From the headers
level on, every item is opened where ``.metadata`` places it: it must be a complete torch zip, and
no two items may overlap. A ``.distcp`` file that ``.metadata`` does not name is left over from an
earlier save with more ranks; an empty one belongs to a writer that had nothing to write (torch 2.13
``filesystem.py`` opens a file for every bucket).

Source: ``core.formats.dcp.format``; torch 2.13.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from core.engine.catalog.facets import DcpFacts
from core.errors import (
    CheckpointingException,
    MissingShardError,
    Report,
    TruncatedError,
    UnsafeError,
)
from core.files.store import LocalStore
from core.formats.dcp.columns import DcpItem, DcpMetadata
from core.formats.dcp.reading.data_files import METADATA, check_file_lengths
from core.formats.dcp.reading.stored_metadata import metadata_files, salvaged, stated_metadata
from core.formats.dcp.safetensors_items import with_raw_files
from core.formats.torch.zip.container import Archive, check_kind
from core.values import n_text
from core.verbs.checks.containers.torch_zips import check_descriptors, check_records, open_archive
from core.verbs.checks.file_codes import EXTRA
from core.verbs.checks.finding import Finding, Level, Severity, get_code
from core.verbs.checks.problems import collect_problems, finding_of
from core.verbs.checks.subject import Check, Subject

DCP_ORPHAN = get_code("CK153")
DCP_ITEM = get_code("CK152")
DCP_OVERLAP = get_code("CK151")
DCP_METADATA = get_code("CK150")

_FORMATS = ("dcp", "torch_dist")
_SUFFIX = ".distcp"


def check_data_files(subject: Subject) -> Iterator[Finding]:
    """Check that the files named by ``.metadata`` exist, and that there are no others.

    Codes: CK101, CK103, CK106, CK110, CK150.
    """
    problems: list[CheckpointingException] = []
    facts = None if subject.catalog is None else subject.catalog.facet(DcpFacts)
    # If the metadata could be read, all files of items are known to exist and to be long enough.
    if facts is not None:
        names: Sequence[str] = facts.item_files
        orphans = facts.orphans
    # Otherwise read it leniently, and compare the files with the remaining entries.
    else:
        if any(subject.files.get(name) == 0 for name in metadata_files(subject.store)):
            return
        try:
            metadata = _read_metadata(subject, problems.append)
        except CheckpointingException as err:
            # A missing .metadata means an unfinished save (CK515). An error with a key is about an
            # entry of it, which is reported here.
            if not isinstance(err, MissingShardError) or err.key is not None:
                yield finding_of(err, default=DCP_METADATA, file=err.file or METADATA)
            return
        names, orphans = metadata.files, metadata.orphans
        yield from _check_sizes(subject, metadata)

    # Items in the files without an entry, and file names that lead out of the checkpoint.
    if orphans:
        yield DCP_ORPHAN.finding(
            f"no metadata entry refers to the stored items of {n_text(len(orphans), 'key')}",
            file=METADATA,
            key=orphans[0],
            expected="an entry for each item",
            found="items without an entry",
        )
    unsafe = [err for err in problems if isinstance(err, UnsafeError)]
    if unsafe:
        yield finding_of(
            unsafe[0],
            default=DCP_METADATA,
            file=METADATA,
            expected="names inside the checkpoint",
            found=len(unsafe),
        )
    # If the file name of an item could not be read, a file that seems unreferenced may be that one.
    if not any(err.rule == "dcp.items" for err in problems):
        yield from _find_unreferenced_files(subject, set(names))


def _read_metadata(subject: Subject, report: Report) -> DcpMetadata:
    """Read ``.metadata`` without its invalid entries, which other checks report.

    Args:
        report: called with an error for each omitted entry.

    Raises:
        CheckpointingException: the file is missing, or no part of it can be read.
    """
    failure = subject.failure if subject.catalog is None else None
    if (
        failure is not None
        and failure.file in metadata_files(subject.store)
        and not _is_of_an_entry(failure)
    ):
        raise failure  # a second attempt would fail the same way
    try:
        return stated_metadata(subject.store)
    except CheckpointingException as err:
        if not _is_of_an_entry(err):
            raise
        return salvaged(subject.store, report)


def _is_of_an_entry(err: CheckpointingException) -> bool:
    """Return whether an error concerns single entries of ``.metadata``, not the complete file."""
    return (err.rule or "").startswith("dcp.")


def _check_sizes(subject: Subject, metadata: DcpMetadata) -> Iterator[Finding]:
    """Report files that are missing or too short for their items."""
    for err in collect_problems(
        lambda report: check_file_lengths(subject.store, metadata, report=report)
    ):
        size = subject.files.get(err.file or "")
        expected = "the file"
        if isinstance(err, TruncatedError) and err.span is not None:
            expected = f"at least {err.span[1]} bytes"
        yield finding_of(
            err,
            default=DCP_METADATA,
            expected=expected,
            found="no such file" if size is None else f"{size} bytes",
        )


def _find_unreferenced_files(subject: Subject, referenced: set[str]) -> Iterator[Finding]:
    """Report ``.distcp`` files without items; empty ones, which torch creates, only as notes."""
    unreferenced = {
        name: size
        for name, size in subject.files.items()
        if name.endswith(_SUFFIX) and name not in referenced
    }
    # A file may be referred to by the name of a link that leads to it.
    if unreferenced and isinstance(subject.store, LocalStore):
        targets = {os.path.realpath(subject.store.path(name)) for name in referenced}
        unreferenced = {
            name: size
            for name, size in unreferenced.items()
            if os.path.realpath(subject.store.path(name)) not in targets
        }
    for name, size in unreferenced.items():
        yield EXTRA.finding(
            f"{METADATA} does not refer to this file" + ("" if size else ", which is empty"),
            file=name,
            expected="a file that .metadata refers to",
            found=f"{size} unreferenced bytes",
            severity=None if size else Severity.NOTE,
        )


def check_items(subject: Subject) -> Iterator[Finding]:
    """Check that items are where ``.metadata`` places them, and do not overlap (CK151, CK152).

    The lowest level looks only into files that do not begin and end like a zip.
    """
    is_complete = subject.level >= Level.HEADERS
    names = [name for name, size in subject.files.items() if size and name.endswith(_SUFFIX)]
    if not is_complete and all(map(subject.ends.is_complete_zip, names)):
        return
    try:
        metadata = _read_metadata(subject, lambda problem: None)
    except CheckpointingException:
        return  # reported by ``check_data_files``
    # Items of torch's Hugging Face storage are raw bytes in safetensors files. That can only be
    # determined if those files can be read; errors in them are reported elsewhere.
    with suppress(CheckpointingException):
        metadata = with_raw_files(subject.store, metadata)
    # Look into every item within the size of its file; a truncated file is reported elsewhere.
    for key, item in _zip_items(metadata):
        if not is_complete and subject.ends.is_complete_zip(item.file):
            continue
        if item.offset + item.n_bytes <= subject.files.get(item.file, -1):
            yield from _check_item(subject, key, item)
    if not is_complete:
        return
    # Sort all items by file and position, then compare neighbours. Several entries may refer to the
    # same item, so identical positions are no overlap. The last field only breaks ties.
    items = [
        (metadata.files[file], offset, n_bytes, row)
        for row, (file, offset, n_bytes) in enumerate(
            zip(metadata.file_index, metadata.item_offset, metadata.item_bytes, strict=True)
        )
        if n_bytes
    ]
    n_tensor_items = len(items)
    items += [
        (item.file, item.offset, item.n_bytes, n_tensor_items + n)
        for n, item in enumerate(metadata.objects.values())
    ]
    items.sort()
    for before, after in pairwise(items):
        end = before[1] + before[2]
        if before[0] == after[0] and end > after[1] and before[1:3] != after[1:3]:
            yield DCP_OVERLAP.finding(
                "two items overlap",
                file=after[0],
                span=(after[1], end),
                expected=f"an item that starts at byte {end} or later",
                found=f"an item at byte {after[1]}",
            )


def _zip_items(metadata: DcpMetadata) -> Iterator[tuple[str, DcpItem]]:
    """Yield (key, item) for every item stored as a torch zip; other kinds have their own checks."""
    for tensor in metadata.tensors.values():
        for row, (_, item) in enumerate(metadata.chunks(tensor.key), tensor.first):
            if (
                row not in metadata.descriptors
                and metadata.file_index[row] not in metadata.raw_files
            ):
                yield tensor.key, item
    for key, item in metadata.objects.items():
        if key not in metadata.object_descriptors:
            yield key, item


def _check_item(subject: Subject, key: str, item: DcpItem) -> Iterator[Finding]:
    """Check that one item is an intact torch zip."""
    store = subject.store
    archives: list[Archive] = []

    def read_item(report: Report) -> None:
        archive, is_complete = open_archive(
            store, item.file, report, start=item.offset, n_bytes=item.n_bytes
        )
        # In an incomplete directory, the record that identifies the kind may be the missing one.
        if is_complete:
            check_kind(archive)
        check_records(store, archive, report, reads=True)
        archives.append(archive)

    problems = collect_problems(read_item)
    for err in problems:
        # Without a zip directory, no zip begins or ends at these bytes: the position is wrong.
        is_misplaced = err.rule in (None, "zip.directory")
        finding = finding_of(
            err,
            default=DCP_ITEM,
            code=DCP_ITEM if is_misplaced else None,
            file=item.file,
            key=key,
            expected=f"a torch zip at bytes {item.offset}–{item.offset + item.n_bytes}",
        )
        # The code's hint says the same for all of them as the errors do, in several wordings.
        yield replace(finding, hint=DCP_ITEM.hint) if is_misplaced else finding
    if not problems:
        yield from check_descriptors(store, archives[0], keys_of=lambda record: (key,))


CHECKS = (
    Check(check_data_files, formats=_FORMATS),
    Check(check_items, formats=_FORMATS),
)
