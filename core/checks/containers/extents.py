"""CK101, CK103: every stored array lies inside its file, in every format.

The readers of the built-in formats check most of this; this check covers formats of other packages
as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.catalog.stored import n_stored_bytes
from core.checks.check import Check
from core.checks.file_codes import MALFORMED, MISSING, TRUNCATED
from core.checks.finding import Finding
from core.checks.level import Level
from core.checks.problems import finding_of
from core.checks.subject import Subject
from core.errors import CheckpointingException

CODES = ()


def check_extents(subject: Subject) -> Iterator[Finding]:
    """Compare the end of the last array in each file with the size of the file.

    One finding per file.
    """
    catalog = subject.catalog
    if catalog is None:
        return
    last: dict[str, tuple[int, str]] = {}
    for key in (*catalog.tensors, *catalog.hidden):
        try:
            for fragment in catalog.fragments(key):
                if fragment.array is None:
                    continue
                extent = fragment.array.extent
                end = extent.offset + n_stored_bytes(fragment.array)
                if end > last.get(extent.file, (-1, ""))[0]:
                    last[extent.file] = (end, key)
        except CheckpointingException as err:
            if not subject.is_covered_by_finding(err.file):
                yield finding_of(err, default=MALFORMED, key=key)
    for file, (end, key) in sorted(last.items()):
        yield from _check_size(subject, file, end, key)


def _check_size(subject: Subject, file: str, end: int, key: str) -> Iterator[Finding]:
    """Report a file that is missing or shorter than ``end`` bytes, unless a finding covers it."""
    size = subject.files.get(file)
    if (size is not None and size >= end) or subject.is_covered_by_finding(file):
        return
    yield (MISSING if size is None else TRUNCATED).finding(
        "the file of a tensor is missing"
        if size is None
        else "a tensor extends beyond the end of the file",
        file=file,
        key=key,
        span=None if size is None else (size, end),
        expected=f"at least {end} bytes",
        found="no such file" if size is None else f"{size} bytes",
    )


CHECKS = (Check(check_extents, Level.HEADERS),)
