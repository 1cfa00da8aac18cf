"""From the errors of readers to findings: which code an error has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from core.checks import file_codes
from core.checks.check import Code
from core.checks.finding import Finding
from core.errors import (
    CheckpointingException,
    MissingShardError,
    Report,
    StorageError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)

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
"""The order matters: the first two are CorruptErrors as well."""


def problems_of(read: Callable[[Report], object]) -> list[CheckpointingException]:
    """What a reader has to say: the problems that it reports, and the one that it ends with."""
    found: list[CheckpointingException] = []
    try:
        read(found.append)
    except CheckpointingException as err:
        found.append(err)
    return found


def code_of(err: CheckpointingException, *, default: Code) -> Code:
    """The code of an error.

    Args:
        default: for an error that says no more than that something is corrupt.
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
    """An error as a finding.

    Args:
        default: see ``code_of``.
        code: one that stands whatever the error is.
        file, key: where, if the error does not say it.
        expected, found: the two values that disagree, which errors have in their sentence.
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


def findings_of(problems: Sequence[CheckpointingException], *, default: Code, file: str) -> Iterator[Finding]:
    """The findings about one file; that it ends too early is said once."""
    short = [err for err in problems if isinstance(err, TruncatedError) and err.rule is None]
    for err in problems:
        if err not in short[1:]:
            yield finding_of(err, default=default, file=file)
