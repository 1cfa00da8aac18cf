"""CK101, CK103, CK105, CK108: check that files have a beginning and an end, in every format.

The readers of the built-in formats check most of this; these checks cover formats of other packages
as well, and files that no reader opens at the lowest level.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.engine.catalog.stored import n_stored_bytes
from core.errors import CheckpointingException
from core.verbs.checks.containers.files import WEIGHTS
from core.verbs.checks.file_codes import MALFORMED, MISSING, NOT_ITS_KIND, UNREADABLE_FILE
from core.verbs.checks.finding import Finding, Level, get_code
from core.verbs.checks.problems import finding_of
from core.verbs.checks.subject import DATA, Check, Subject

TRUNCATED = get_code("CK103")

_HEADER_BYTES = 8
"""Minimum length of the zeros that are reported; the shortest header, of safetensors, has 8."""
WITHOUT_HEADER = ("big-endian", "fill value")
"""Encodings of zarr chunks that are not compressed."""
_ZEROS_HINT = (
    "the bytes were lost in a copy or never reached the disk; copy the file again from the "
    "original checkpoint, or use an older checkpoint"
)


def check_extents(subject: Subject) -> Iterator[Finding]:
    """Compare the end of the last array in each file with the size of the file."""
    catalog = subject.catalog
    if catalog is None:
        return
    # Find the array that ends last in each file, so that a truncated file gets one finding.
    last: dict[str, tuple[int, str]] = {}
    for key, tensor in catalog.all_tensors():
        try:
            for fragment in tensor.fragments():
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
            yield MISSING.missing_file(
                "the tensor's file is missing", file, key=key, expected=expected
            )
        elif size < end:
            yield TRUNCATED.finding(
                "the tensor extends beyond the end of the file",
                file=file,
                key=key,
                span=(size, end),
                expected=expected,
                found=f"{size} bytes",
            )


def check_beginnings(subject: Subject) -> Iterator[Finding]:
    """Report files that cannot be read (CK105), and zeros where a header belongs (CK108).

    An interrupted copy leaves a file of the right length that is zeros from some byte on.
    """
    for name, err in subject.ends.errors.items():
        if not subject.is_covered_by_finding(name):
            yield finding_of(err, default=UNREADABLE_FILE, file=name)
    zeros = {
        name
        for name, head in subject.ends.heads.items()
        if len(head) >= _HEADER_BYTES and not any(head)
    }
    headed = {name for name in zeros if DATA.search(name) and not name.endswith(".bin")}
    headed |= {name for name in zeros if WEIGHTS.search(name)}
    # Of other files only compressed chunks never begin with zeros.
    if (zeros := zeros - headed) and subject.catalog is not None:
        arrays = (fragment.array for fragment in subject.catalog.all_fragments())
        headed |= {
            array.extent.file
            for array in arrays
            if array is not None
            and array.extent.file in zeros
            and array.extent.offset == 0
            and array.extent.encoding is not None
            and array.extent.encoding.name not in WITHOUT_HEADER
        }
    for name in sorted(headed):
        if subject.is_covered_by_finding(name):
            continue
        n_zeros = len(subject.ends.heads[name])
        yield NOT_ITS_KIND.finding(
            f"the file begins with {n_zeros} zero bytes instead of its header",
            file=name,
            expected="a header",
            found=f"{n_zeros} zero bytes",
            hint=_ZEROS_HINT,
        )


CHECKS = (Check(check_extents, Level.HEADERS), Check(check_beginnings))
