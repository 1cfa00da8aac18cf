"""CK101, CK103: every stored array lies inside its file, whatever the format.

The readers of the built-in formats make sure of it for what they place themselves; this check holds for all of them,
and for those of other packages.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.catalog.catalog import Catalog
from core.catalog.stored import n_stored_bytes
from core.checks.check import Check
from core.checks.file_codes import MALFORMED, MISSING, TRUNCATED
from core.checks.finding import Finding
from core.checks.level import Level
from core.checks.problems import finding_of
from core.checks.subject import Subject
from core.errors import CheckpointingException

CODES = ()


def inside(subject: Subject) -> Iterator[Finding]:
    """The end of the last array in each file, against the file's size; one finding a file."""
    catalog = subject.catalog
    if catalog is None:
        return
    last: dict[str, tuple[int, str]] = {}
    for key in (*catalog.tensors, *catalog.hidden):
        try:
            for file, end in _ends(catalog, key):
                if end > last.get(file, (-1, ""))[0]:
                    last[file] = (end, key)
        except CheckpointingException as err:
            if not subject.is_explained(err.file):
                yield finding_of(err, default=MALFORMED, key=key)
    for file, (end, key) in sorted(last.items()):
        size = subject.files.get(file)
        if (size is None or size < end) and not subject.is_explained(file):
            yield (MISSING if size is None else TRUNCATED).finding(
                "a tensor lies in a file that is not there" if size is None else "a tensor lies behind the file's end",
                file=file,
                key=key,
                span=None if size is None else (size, end),
                expected=f"at least {end} bytes",
                found="no such file" if size is None else f"{size} bytes",
            )


def _ends(catalog: Catalog, key: str) -> Iterator[tuple[str, int]]:
    """(file, byte behind the last one in it that is known) of every array of a tensor."""
    for fragment in catalog.fragments(key):
        array = fragment.array
        if array is not None:
            yield array.extent.file, array.extent.offset + n_stored_bytes(array)


CHECKS = (Check(inside, Level.HEADERS),)
