"""CK101, CK103, CK106, CK150–CK153: the files of a DCP checkpoint against its ``.metadata``.

Every file that ``.metadata`` names is there and long enough for the items in it. With headers, every item is opened
where ``.metadata`` says that it lies: it is a whole torch zip, and no two of them overlap. A ``.distcp`` file that
``.metadata`` does not name is what an earlier save of more ranks left; an empty one is a writer's that had nothing to
write (torch 2.13 ``filesystem.py`` opens a file for every bucket).

Source: ``core.formats.dcp.format``; torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

from core.checks.check import Check
from core.checks.containers.torch_zips import check_records, descriptors, opened
from core.checks.file_codes import DCP_ITEM, DCP_METADATA, DCP_ORPHAN, DCP_OVERLAP, EXTRA
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.problems import finding_of, problems_of
from core.checks.subject import Subject
from core.errors import CheckpointingException, MissingShardError, Report, TruncatedError, UnsafeError
from core.formats.dcp.columns import DcpItem, DcpMetadata
from core.formats.dcp.facets import DcpFacts
from core.formats.dcp.format import METADATA, check_files, metadata_files, salvaged, stated_metadata
from core.formats.dcp.safetensors_items import with_raw_files
from core.formats.torch.zip.container import Archive, check_kind

CODES = ()
_FORMATS = ("dcp", "torch_dist")
_SUFFIX = ".distcp"


def data_files(subject: Subject) -> Iterator[Finding]:
    """CK101, CK103, CK106, CK110, CK150: what ``.metadata`` names is there, and nothing else."""
    problems: list[CheckpointingException] = []
    facts = None if subject.catalog is None else subject.catalog.facet(DcpFacts)
    if facts is None:
        if any(subject.files.get(name) == 0 for name in metadata_files(subject.store)):
            return
        try:
            metadata = _metadata(subject, problems.append)
        except MissingShardError as err:
            if err.key is not None:  # one of its chunks; that .metadata itself is missing is an unfinished save
                yield finding_of(err, default=DCP_METADATA, file=err.file or METADATA)
            return
        except CheckpointingException as err:
            yield finding_of(err, default=DCP_METADATA, file=err.file or METADATA)
            return
        named: Sequence[str] = metadata.files
        for problem in problems_of(lambda report: check_files(subject.store, metadata, report=report)):
            yield _lost(subject, problem)
        orphans = metadata.orphans
    else:
        named, orphans = facts.item_files, facts.orphans
    if orphans:
        yield DCP_ORPHAN.finding(
            f"{len(orphans)} keys have stored items that no entry refers to",
            file=METADATA,
            key=orphans[0],
            expected="an entry for each item",
            found="items alone",
        )
    outside = [err for err in problems if isinstance(err, UnsafeError)]
    if outside:
        yield finding_of(outside[0], default=DCP_METADATA, file=METADATA, expected="names inside", found=len(outside))
    if not any(err.rule == "dcp.items" for err in problems):  # else a name that is not understood may be this one
        yield from _unnamed(subject, set(named))


def _metadata(subject: Subject, report: Report) -> DcpMetadata:
    """What ``.metadata`` says, without entries that make no sense, which have checks of their own.

    Args:
        report: told of what is left out.

    Raises:
        CheckpointingException: it is absent, or nothing of it can be read.
    """
    known = subject.failure if subject.catalog is None else None
    if known is not None and known.file in metadata_files(subject.store) and not _is_of_an_entry(known):
        raise known  # it would end so again
    try:
        return stated_metadata(subject.store)
    except CheckpointingException as err:
        if not _is_of_an_entry(err):
            raise
        return salvaged(subject.store, report)


def _is_of_an_entry(err: CheckpointingException) -> bool:
    return (err.rule or "").startswith("dcp.")


def _lost(subject: Subject, err: CheckpointingException) -> Finding:
    size = subject.files.get(err.file or "")
    expected = f"at least {err.span[1]} bytes" if isinstance(err, TruncatedError) and err.span else "the file"
    return finding_of(
        err, default=DCP_METADATA, expected=expected, found="no such file" if size is None else f"{size} bytes"
    )


def _unnamed(subject: Subject, named: set[str]) -> Iterator[Finding]:
    for name, size in subject.files.items():
        if name.endswith(_SUFFIX) and name not in named:
            yield EXTRA.finding(
                f"{METADATA} does not name the file" + ("" if size else ", which is empty"),
                file=name,
                expected="a file that is named",
                found=f"{size} bytes that nothing refers to",
                severity=None if size else Severity.NOTE,
            )


def items(subject: Subject) -> Iterator[Finding]:
    """CK151, CK152: items lie where ``.metadata`` says, and do not overlap."""
    try:
        metadata = _metadata(subject, lambda problem: None)
    except CheckpointingException:
        return  # said by ``data_files``
    with suppress(CheckpointingException):  # a file is missing, or kept the checkpoint from being opened
        metadata = with_raw_files(subject.store, metadata)
    whole = [item for item in _items(metadata) if item[1].offset + item[1].n_bytes <= _size(subject, item[1])]
    for key, item in whole:
        yield from _item(subject, key, item)
    yield from _overlaps(metadata)


def _size(subject: Subject, item: DcpItem) -> int:
    return subject.files.get(item.file, -1)


def _items(metadata: DcpMetadata) -> Iterator[tuple[str, DcpItem]]:
    """(key, item) of everything that is stored as a torch zip; the others have checks of their own."""
    for tensor in metadata.tensors.values():
        for row, (_, item) in enumerate(metadata.chunks(tensor.key), tensor.first):
            if row not in metadata.descriptors and metadata.file_index[row] not in metadata.raw_files:
                yield tensor.key, item
    for key, item in metadata.objects.items():
        if key not in metadata.object_descriptors:
            yield key, item


def _item(subject: Subject, key: str, item: DcpItem) -> Iterator[Finding]:
    store = subject.store
    archives: list[Archive] = []

    def look(report: Report) -> None:
        archive, is_whole = opened(store, item.file, report, start=item.offset, n_bytes=item.n_bytes)
        if is_whole:
            check_kind(archive)
        check_records(store, archive, report, reads=True)
        archives.append(archive)

    problems = problems_of(look)
    for err in problems:
        yield finding_of(
            err,
            default=DCP_ITEM,
            code=DCP_ITEM if err.rule in (None, "zip.directory") else None,  # no zip begins or ends there
            file=item.file,
            key=key,
            expected=f"a torch zip at bytes {item.offset}–{item.offset + item.n_bytes}",
        )
    if not problems:
        yield from descriptors(store, archives[0], keys_of=lambda record: (key,))


def _overlaps(metadata: DcpMetadata) -> Iterator[Finding]:
    placed = [
        (metadata.files[file], offset, n_bytes, row)
        for row, (file, offset, n_bytes) in enumerate(
            zip(metadata.file_index, metadata.item_offset, metadata.item_bytes, strict=True)
        )
        if n_bytes
    ]
    number = len(placed)
    placed += [(item.file, item.offset, item.n_bytes, number + n) for n, item in enumerate(metadata.objects.values())]
    placed.sort()
    for before, after in pairwise(placed):
        if before[0] == after[0] and before[1] + before[2] > after[1] and before[1:3] != after[1:3]:
            yield DCP_OVERLAP.finding(
                "two items share bytes",
                file=after[0],
                span=(after[1], before[1] + before[2]),
                expected=f"an item that begins at byte {before[1] + before[2]} or later",
                found=f"one at byte {after[1]}",
            )


CHECKS = (Check(data_files, formats=_FORMATS), Check(items, Level.HEADERS, formats=_FORMATS))
