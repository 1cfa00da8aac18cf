"""CK101, CK103: check that stored arrays do not exceed their files, in every format.

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
    """Compare the end of the last array in each file with the size of the file."""
    catalog = subject.catalog
    if catalog is None:
        return
    # Find the array that ends last in each file, so that a truncated file gets one finding.
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
        size, expected = subject.files.get(file), f"at least {end} bytes"
        if subject.is_covered_by_finding(file):
            continue
        if size is None:
            yield MISSING.finding(
                "the file of a tensor is missing",
                file=file,
                key=key,
                expected=expected,
                found="no such file",
            )
        elif size < end:
            yield TRUNCATED.finding(
                "a tensor extends beyond the end of the file",
                file=file,
                key=key,
                span=(size, end),
                expected=expected,
                found=f"{size} bytes",
            )


CHECKS = (Check(check_extents, Level.HEADERS),)
