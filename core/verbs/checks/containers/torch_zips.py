"""CK103, CK111, CK112, CK120–CK129: check each file written by ``torch.save``.

The lowest level opens one file of each group with similar names and equal sizes, and every file
that does not begin and end like a zip; higher levels open every file: its zip directory, the local
header and the descriptor of each record, the byte order, and the CRCs of the pickle and of other
small records. If the checkpoint's metadata could not be read, the pickles are parsed one by one as
well, so that every damaged file is found and not just the first.

Source: ``core.formats.torch.zip.container``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from core.errors import CheckpointingException, Report
from core.files.store import ReadStore
from core.formats.torch.item import DESCRIPTOR32, DESCRIPTOR64, DESCRIPTOR_SIGNATURE
from core.formats.torch.other_pickles import is_torch_zip
from core.formats.torch.stream import stream_kind
from core.formats.torch.zip.container import Archive, Record, check_kind, read_archive
from core.formats.torch.zip.records import is_big_endian, read_record
from core.verbs.checks.file_codes import MALFORMED, NOT_ITS_KIND
from core.verbs.checks.finding import Finding, Level, get_code
from core.verbs.checks.problems import collect_problems, finding_of, findings_of
from core.verbs.checks.subject import Check, Subject

ZIP_DESCRIPTOR = get_code("CK126")
TRAILING = get_code("CK112")

_ALWAYS = re.compile(r"\.(pt|pth)$")
_BIN = re.compile(r"(^|/)(pytorch|adapter|diffusion_pytorch)_model[^/]*\.bin$")
_PERHAPS = re.compile(r"\.(bin|ckpt|pkl)$")
_NUMBERS = re.compile(r"\d+")
_SMALL_BYTES = 1 << 20


def torch_files(subject: Subject, *, or_others: bool = False) -> Iterator[str]:
    """Yield the names of non-empty files of ``torch.save`` to open at the subject's level.

    Args:
        or_others: include files that may be other pickles, judging by their names.
    """
    # The lowest level opens one file of each group: names that differ only in numbers, equal size.
    # The others must begin and end as zips do.
    opened: set[tuple[str, int]] = set()
    for name, size in subject.files.items():
        if size == 0 or not (
            _ALWAYS.search(name) or _PERHAPS.search(name) or name == subject.store.entry
        ):
            continue
        group = (_NUMBERS.sub("0", name), size)
        if (
            subject.level == Level.METADATA
            and group in opened
            and subject.ends.is_complete_zip(name)
        ):
            continue
        opened.add(group)
        if or_others or _is_torch(subject, name, size):
            yield name


def _is_torch(subject: Subject, name: str, size: int) -> bool:
    """Return whether a file is one of ``torch.save``, by its name or its first bytes."""
    if _ALWAYS.search(name) or _BIN.search(name):
        return True
    try:
        kind = stream_kind(subject.store, name, 0, size)
        return kind == "legacy" or (kind == "zip" and is_torch_zip(subject.store, name, size))
    except CheckpointingException:
        return True  # whoever opens the file reports the error


def check_torch_files(subject: Subject) -> Iterator[Finding]:
    """Check every file of ``torch.save`` (CK120–CK129 and other damage)."""
    for name in torch_files(subject):
        yield from _check_torch_file(subject, name)


def _check_torch_file(subject: Subject, name: str) -> Iterator[Finding]:
    """Check the container of one file, and parse its pickle if reading the metadata did not."""
    from core.formats.torch.tree import parse

    store, size = subject.store, subject.files[name]
    try:
        kind = stream_kind(store, name, 0, size)
    except CheckpointingException as err:
        yield finding_of(err, default=MALFORMED, file=name)
        return
    if kind is None:
        if not any(finding.file == name for finding in subject.findings):
            yield NOT_ITS_KIND.finding(
                "neither a zip file nor a pickle stream from torch.save",
                file=name,
                expected="a torch file",
                found=f"{size} bytes beginning with {store.read(name, 0, min(size, 8)).hex(' ')}",
            )
        return
    # Check the zip container: its directory, and the records themselves from the headers level on.
    problems: list[CheckpointingException] = []
    archives: list[Archive] = []
    has_data = subject.level >= Level.HEADERS

    def check_zip(report: Report) -> None:
        archive, is_complete = open_archive(store, name, report)
        # A TorchScript program (constants.pkl) is an intact container; parsing it reports the kind.
        if is_complete and "constants.pkl" not in archive.records:
            check_kind(archive)
        check_records(store, archive, report, reads=has_data)
        archives.append(archive)

    if kind == "zip":
        problems = collect_problems(check_zip)
        yield from findings_of(problems, default=MALFORMED, file=name)
    for archive in archives:
        if archive.n_trailing:
            yield TRAILING.finding(
                "bytes follow the end of the zip archive",
                file=name,
                span=(size - archive.n_trailing, size),
                expected=f"{size - archive.n_trailing} bytes",
                found=f"{size} bytes",
            )
    # Parse the pickle of an intact container, unless that was done to read the metadata.
    if not problems and (subject.catalog is None or kind == "legacy"):
        yield from findings_of(
            collect_problems(lambda report: parse(store, name)), default=MALFORMED, file=name
        )
    # Descriptors come last: if the directory is wrong, they would be looked for in wrong places.
    if archives and not problems and has_data:
        names = subject.tensor_names
        yield from check_descriptors(
            store, archives[0], keys_of=lambda record: names.at(name, *record.span)
        )


def open_archive(
    store: ReadStore, name: str, report: Report, *, start: int = 0, n_bytes: int | None = None
) -> tuple[Archive, bool]:
    """Read the directory of a zip.

    Args:
        start, n_bytes: byte range of the zip in the file; by default the complete file.

    Returns:
        The directory, and whether it was read without a reported problem.
    """
    problems: list[CheckpointingException] = []
    archive = read_archive(store, name, start=start, n_bytes=n_bytes, report=problems.append)
    for problem in problems:
        report(problem)
    return archive, not problems


def check_records(store: ReadStore, archive: Archive, report: Report, *, reads: bool) -> None:
    """Report an invalid byte order and, if ``reads``, small records whose CRC does not match."""
    try:
        is_big_endian(store, archive)
    except CheckpointingException as err:
        report(err)
    # All records but the tensor storages are small; the byte order has just been read.
    for name, record in archive.records.items() if reads else ():
        if name.startswith("data/") or name == "byteorder" or record.n_bytes > _SMALL_BYTES:
            continue
        try:
            read_record(store, archive.file, record)
        except CheckpointingException as err:
            report(err)


def check_descriptors(
    store: ReadStore, archive: Archive, *, keys_of: Callable[[Record], Sequence[str]]
) -> Iterator[Finding]:
    """Check that the data descriptor behind each record matches the directory (CK126).

    Args:
        keys_of: returns the names of the tensors in a record, for the finding.
    """
    # A descriptor directly follows its record; the last one ends where the directory begins.
    end = archive.directory
    spans = [
        (record.span[1], min(DESCRIPTOR64.size, end - record.span[1]))
        for record in archive.records.values()
    ]
    descriptors = store.read_spans(archive.file, spans)
    for (name, record), data in zip(archive.records.items(), descriptors, strict=True):
        different = _differing_descriptor(data, record)
        if different is not None:
            yield ZIP_DESCRIPTOR.finding(
                f"the data descriptor of record {name} does not match the zip directory",
                file=archive.file,
                keys=keys_of(record),
                span=(record.span[1], record.span[1] + len(data)),
                expected=f"CRC {record.crc:08x}, {record.n_bytes} bytes",
                found=f"CRC {different[0]:08x}, {different[1]} bytes",
            )


def _differing_descriptor(data: bytes, record: Record) -> tuple[int, int] | None:
    """Return (CRC, size in bytes) of a data descriptor that differs from its record.

    Returns:
        None if the descriptor matches or is missing.
    """
    stored = record.span[1] - record.span[0]
    different = None
    # Nothing in the file marks the width of the sizes (8 or 4 bytes), so try both, and report the
    # one whose packed size is right.
    for layout in (DESCRIPTOR64, DESCRIPTOR32):
        if len(data) < layout.size:
            continue
        mark, crc, packed, n_bytes = layout.unpack_from(data)
        if mark != DESCRIPTOR_SIGNATURE:
            return None
        if (crc, packed, n_bytes) == (record.crc, stored, record.n_bytes):
            return None
        if packed == stored or different is None:
            different = (crc, n_bytes)
    return different


CHECKS = (Check(check_torch_files),)
