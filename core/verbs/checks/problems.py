"""Convert errors raised by readers to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from core.errors import (
    CheckpointingException,
    MissingShardError,
    Report,
    StorageError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)
from core.verbs.checks import file_codes
from core.verbs.checks.check import Code
from core.verbs.checks.finding import Finding

_BY_RULE = {
    "zip.directory": file_codes.ZIP_DIRECTORY,
    "zip.duplicate": file_codes.ZIP_DUPLICATE,
    "zip.roots": file_codes.ZIP_DUPLICATE,
    "zip.header": file_codes.ZIP_HEADER,
    "zip.sizes": file_codes.ZIP_HEADER,
    "zip.overlap": file_codes.ZIP_OVERLAP,
    "zip.unreadable": file_codes.ZIP_CODING,
    "torch.order": file_codes.ZIP_ORDER,
    "torch.crc": file_codes.ZIP_SMALL_CRC,
    "torch.kind": file_codes.ZIP_NO_PICKLE,
    "torch.storage": file_codes.ZIP_STORAGE,
    "safetensors.duplicate": file_codes.ST_DUPLICATE,
    "safetensors.metadata": file_codes.ST_METADATA,
    "safetensors.entry": file_codes.ST_ENTRY,
    "safetensors.order": file_codes.ST_ORDER,
    "safetensors.rest": file_codes.ST_REST,
    "zarr.missing": file_codes.ZARR_MISSING,
    "zarr.size": file_codes.ZARR_SIZE,
    "zarr.beyond": file_codes.ZARR_BEYOND,
    "zarr.shard": file_codes.ZARR_SHARD,
    "zarr.inner": file_codes.ZARR_INNER,
}
_BY_KIND = (
    (TruncatedError, file_codes.TRUNCATED),
    (MissingShardError, file_codes.MISSING),
    (UnsafeError, file_codes.UNSAFE),
    (StorageError, file_codes.UNREADABLE_FILE),
    (UnsupportedError, file_codes.NOT_HANDLED),
)
"""Error class → code; the order matters, because the first two are CorruptErrors as well."""


def collect_problems(read: Callable[[Report], object]) -> list[CheckpointingException]:
    """Call a reader; return the problems that it reports, and last the error that it raises."""
    problems: list[CheckpointingException] = []
    try:
        read(problems.append)
    except CheckpointingException as err:
        problems.append(err)
    return problems


def code_of(err: CheckpointingException, *, default: Code) -> Code:
    """Return the code for an error: that of its rule, or else that of its class.

    Args:
        default: the code of an error for which neither exists.
    """
    if err.rule is not None and err.rule in _BY_RULE:
        return _BY_RULE[err.rule]
    for kind, code in _BY_KIND:
        if isinstance(err, kind):
            return code
    return default


def finding_of(
    err: CheckpointingException,
    *,
    default: Code,
    code: Code | None = None,
    file: str | None = None,
    key: str | None = None,
    expected: object = None,
    found: object = None,
) -> Finding:
    """Convert an error to a finding.

    Args:
        default: as in ``code_of``.
        code: overrides the code that follows from the error.
        file: overrides the error's file.
        key: used if the error names no tensor or object.
        expected, found: the two values that disagree.
    """
    return (code or code_of(err, default=default)).finding(
        err.message,
        file=file or err.file,
        key=err.key or key,
        rank=err.rank,
        span=err.span,
        expected=expected,
        found=found,
        hint=err.hint,
    )


def findings_of(
    problems: Sequence[CheckpointingException], *, default: Code, file: str
) -> Iterator[Finding]:
    """Convert errors about one file to findings; of several truncations, keep only the first."""
    truncations = [err for err in problems if isinstance(err, TruncatedError) and err.rule is None]
    for err in problems:
        if err not in truncations[1:]:
            yield finding_of(err, default=default, file=file)
