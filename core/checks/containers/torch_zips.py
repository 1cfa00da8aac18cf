"""CK103, CK111, CK120–CK129: files of ``torch.save``, each by itself.

At the lowest level one file of those that are called alike and have one size is opened, above it every one: its zip
directory, the local header and the descriptor behind each record, the byte order, and the CRC of the pickle and of the
other small records. Where the checkpoint's metadata could not be read, the pickles are parsed as well, one by one, so
that every damaged file is found and not the first.

Source: ``core.formats.torch.zip.container``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from core.checks.check import Check
from core.checks.file_codes import MALFORMED, NOT_ITS_KIND, ZIP_DESCRIPTOR
from core.checks.finding import Finding
from core.checks.level import Level
from core.checks.problems import finding_of, findings_of, problems_of
from core.checks.subject import Subject
from core.errors import CheckpointingException, Report
from core.files.store import ReadStore
from core.formats.torch.item import DESCRIPTOR32, DESCRIPTOR64, DESCRIPTOR_SIGNATURE
from core.formats.torch.tree import parse, stream_kind
from core.formats.torch.zip.container import Archive, Record, check_kind, read_archive
from core.formats.torch.zip.records import is_big_endian, read_record

CODES = ()

_ALWAYS = re.compile(r"\.(pt|pth)$")
_BIN = re.compile(r"(^|/)(pytorch|adapter|diffusion_pytorch)_model[^/]*\.bin$")
_PERHAPS = re.compile(r"\.(bin|ckpt|pkl)$")
_NUMBERS = re.compile(r"\d+")
_SMALL_BYTES = 1 << 20


def torch_files(subject: Subject, *, or_others: bool = False) -> Iterator[str]:
    """The files of ``torch.save`` that are to be opened at the subject's level; empty ones are left out.

    Args:
        or_others: also what is only called like one, and may be a pickle that torch would run.
    """
    seen: set[tuple[str, int]] = set()
    for name, size in subject.files.items():
        if size == 0 or not (_ALWAYS.search(name) or _PERHAPS.search(name) or name == subject.store.entry):
            continue
        alike = (_NUMBERS.sub("0", name), size)
        if subject.level == Level.METADATA and alike in seen:
            continue
        seen.add(alike)
        if or_others or _is_torch(subject, name, size):
            yield name


def _is_torch(subject: Subject, name: str, size: int) -> bool:
    if _ALWAYS.search(name) or _BIN.search(name):
        return True
    try:
        return stream_kind(subject.store, name, 0, size) in ("zip", "legacy")
    except CheckpointingException:
        return True


def zips(subject: Subject) -> Iterator[Finding]:
    """CK120–CK129, and what else is wrong with a file of ``torch.save``."""
    for name in torch_files(subject):
        yield from _file(subject, name)


def _file(subject: Subject, name: str) -> Iterator[Finding]:
    store, size = subject.store, subject.files[name]
    try:
        kind = stream_kind(store, name, 0, size)
    except CheckpointingException as err:
        yield finding_of(err, default=MALFORMED, file=name)
        return
    if kind is None:
        if not any(finding.file == name for finding in subject.findings):
            yield NOT_ITS_KIND.finding(
                "neither a zip nor a stream of torch.save",
                file=name,
                expected="a torch file",
                found=f"{size} bytes that begin {store.read(name, 0, min(size, 8)).hex(' ')}",
            )
        return
    problems: list[CheckpointingException] = []
    archives: list[Archive] = []
    if kind == "zip":
        problems = problems_of(lambda report: archives.append(_zip(store, name, report, level=subject.level)))
        yield from findings_of(problems, default=MALFORMED, file=name)
    if not problems and (subject.catalog is None or kind == "legacy"):
        yield from findings_of(problems_of(lambda report: parse(store, name)), default=MALFORMED, file=name)
    if archives and not problems and subject.level >= Level.HEADERS:
        names = subject.tensor_names
        yield from descriptors(store, archives[0], keys_of=lambda record: names.at(name, *record.span))


def _zip(store: ReadStore, name: str, report: Report, *, level: Level) -> Archive:
    archive, is_whole = opened(store, name, report)
    if is_whole and "constants.pkl" not in archive.records:
        check_kind(archive)
    check_records(store, archive, report, reads=level >= Level.HEADERS)
    return archive


def opened(
    store: ReadStore, name: str, report: Report, *, start: int = 0, n_bytes: int | None = None
) -> tuple[Archive, bool]:
    """A zip's directory, and whether no record is left out because of what was reported."""
    problems: list[CheckpointingException] = []
    archive = read_archive(store, name, start=start, n_bytes=n_bytes, report=problems.append)
    for problem in problems:
        report(problem)
    return archive, not problems


def check_records(store: ReadStore, archive: Archive, report: Report, *, reads: bool) -> None:
    """Reports what is wrong with the byte order, and with ``reads`` the small records whose CRC is another."""
    try:
        is_big_endian(store, archive)
    except CheckpointingException as err:
        report(err)
    for record in _small(archive) if reads else ():
        try:
            read_record(store, archive.file, record)
        except CheckpointingException as err:
            report(err)


def _small(archive: Archive) -> Iterator[Record]:
    """The records that are no storages."""
    for name, record in archive.records.items():
        if not name.startswith("data/") and name != "byteorder" and record.n_bytes <= _SMALL_BYTES:
            yield record


def descriptors(store: ReadStore, archive: Archive, *, keys_of: Callable[[Record], Sequence[str]]) -> Iterator[Finding]:
    """CK126: what stands behind each record says what the directory says."""
    end = archive.directory
    spans = [(record.span[1], min(DESCRIPTOR64.size, end - record.span[1])) for record in archive.records.values()]
    behind = store.read_spans(archive.file, spans)
    for (name, record), data in zip(archive.records.items(), behind, strict=True):
        stated = _stated(data, record)
        if stated is not None:
            yield ZIP_DESCRIPTOR.finding(
                f"the descriptor behind the record {name!r} differs from the directory",
                file=archive.file,
                keys=keys_of(record),
                span=(record.span[1], record.span[1] + len(data)),
                expected=f"CRC {record.crc:08x}, {record.n_bytes} bytes",
                found=f"CRC {stated[0]:08x}, {stated[1]} bytes",
            )


def _stated(data: bytes, record: Record) -> tuple[int, int] | None:
    """(CRC, bytes) of a descriptor that differs from its record; None if there is none, or it does not differ."""
    stored = record.span[1] - record.span[0]
    found = None
    for layout in (DESCRIPTOR64, DESCRIPTOR32):
        if len(data) < layout.size:
            continue
        mark, crc, packed, n_bytes = layout.unpack_from(data)
        if mark != DESCRIPTOR_SIGNATURE:
            return None
        if (crc, packed, n_bytes) == (record.crc, stored, record.n_bytes):
            return None
        if packed == stored or found is None:
            found = (crc, n_bytes)
    return found


CHECKS = (Check(zips),)
