"""CK103, CK130–CK135: safetensors files, each by itself.

A header says everything about its file: its length, the names, and that the tensors follow each other without hole or
overlap up to the file's end. Where the checkpoint's metadata could be read, all of this holds for the files that count,
and only with headers the others are opened as well; where not, every file is.

Source: ``core.formats.safetensors.header``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core.checks.check import Check
from core.checks.file_codes import ST_HEADER
from core.checks.finding import Finding
from core.checks.level import Level
from core.checks.problems import findings_of, problems_of
from core.checks.subject import Subject
from core.files.store import ReadStore
from core.formats.safetensors.files import INDEX_SUFFIX, files_of
from core.formats.safetensors.header import read_header

CODES = ()

_SUFFIX = ".safetensors"


def headers(subject: Subject) -> Iterator[Finding]:
    """CK130–CK135, for every file that is called so."""
    if subject.catalog is not None and subject.level < Level.HEADERS:
        return
    is_read = subject.catalog is not None and _is_safetensors(subject)
    whole = set(_read_files(subject)) if is_read else set()
    for name, size in subject.files.items():
        if (
            size == 0
            or name in whole
            or not (name.endswith(_SUFFIX) or (name == subject.store.entry and _is_safetensors(subject)))
        ):
            continue
        if any(finding.file == name for finding in subject.findings):
            continue  # a pointer or a page, not the file
        yield from header(subject.store, name)


def _read_files(subject: Subject) -> Sequence[str]:
    """Return the files whose headers were read for the catalog, so that nothing is wrong with them."""
    entry = subject.store.entry
    if entry is not None and not entry.endswith(INDEX_SUFFIX):
        return (entry,)
    return files_of(subject.store).names


def header(store: ReadStore, name: str) -> Iterator[Finding]:
    """What is wrong with one file."""
    problems = problems_of(lambda report: read_header(store, name, report=report))
    yield from findings_of(problems, default=ST_HEADER, file=name)


def _is_safetensors(subject: Subject) -> bool:
    return subject.format is not None and subject.format.name == "safetensors"


CHECKS = (Check(headers),)
