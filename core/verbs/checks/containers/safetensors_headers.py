"""CK103, CK130–CK135: check the header of each safetensors file.

A header describes its file completely: its length, and the names and byte ranges of the tensors,
which must follow each other without gap or overlap up to the end of the file. If the checkpoint's
metadata could be read, the headers of its own files are known to be valid; other files are opened
from the headers level on. Otherwise every file is opened.

Source: ``core.formats.safetensors.header``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from core.engine.catalog.facets import PipelineFacts
from core.errors import Report
from core.files.store import ReadStore
from core.verbs.checks.check import Check, Finding, Level, get_code
from core.verbs.checks.problems import collect_problems, findings_of
from core.verbs.checks.subject import Subject

ST_HEADER = get_code("CK130")

_SUFFIX = ".safetensors"


def check_headers(subject: Subject) -> Iterator[Finding]:
    """Check the header of every safetensors file that was not read for the metadata.

    Codes: CK130–CK135.
    """
    if subject.catalog is not None and subject.level < Level.HEADERS:
        return
    is_safetensors = subject.format is not None and _SUFFIX in subject.format.suffixes
    # A file with a finding is a pointer or an error page saved in its place.
    skipped = {finding.file for finding in subject.findings}
    if is_safetensors:
        skipped.update(_files_of_catalog(subject))
    for name, size in subject.files.items():
        is_candidate = name.endswith(_SUFFIX) or (is_safetensors and name == subject.store.entry)
        if size == 0 or name in skipped or not is_candidate:
            continue
        problems = collect_problems(partial(_read_header, subject.store, name))
        yield from findings_of(problems, default=ST_HEADER, file=name)


def _read_header(store: ReadStore, name: str, report: Report) -> None:
    from core.formats.safetensors.header import read_header

    read_header(store, name, report=report)


def _files_of_catalog(subject: Subject) -> Sequence[str]:
    """Return the files whose headers were read for the catalog, and are therefore valid."""
    from core.formats.safetensors.files import INDEX_SUFFIX, list_safetensors_files

    if subject.catalog is None:
        return ()
    entry = subject.store.entry
    if entry is not None and not entry.endswith(INDEX_SUFFIX):
        return (entry,)
    if subject.catalog.facet(PipelineFacts) is not None:
        arrays = (fragment.array for fragment in subject.catalog.all_fragments())
        return tuple({array.extent.file for array in arrays if array is not None})
    return list_safetensors_files(subject.store).names


CHECKS = (Check(check_headers),)
