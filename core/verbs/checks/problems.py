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
from core.verbs.checks.check import Code, Finding, get_code

_BY_RULE = {
    "zip.directory": "CK120",
    "zip.duplicate": "CK121",
    "zip.roots": "CK121",
    "zip.header": "CK122",
    "zip.sizes": "CK122",
    "zip.overlap": "CK123",
    "zip.unreadable": "CK124",
    "torch.order": "CK125",
    "torch.crc": "CK127",
    "torch.kind": "CK128",
    "torch.storage": "CK129",
    "safetensors.duplicate": "CK131",
    "safetensors.metadata": "CK132",
    "safetensors.entry": "CK133",
    "safetensors.order": "CK134",
    "safetensors.rest": "CK135",
    "zarr.missing": "CK141",
    "zarr.size": "CK142",
    "zarr.beyond": "CK143",
    "zarr.shard": "CK145",
    "zarr.inner": "CK146",
}
_BY_KIND = (
    (TruncatedError, "CK103"),
    (MissingShardError, "CK101"),
    (UnsafeError, "CK110"),
    (StorageError, "CK105"),
    (UnsupportedError, "CK109"),
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
        return get_code(_BY_RULE[err.rule])
    for kind, code in _BY_KIND:
        if isinstance(err, kind):
            return get_code(code)
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
