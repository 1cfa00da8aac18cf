"""Refuse sources in which one rank's file was copied over another's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.errors import CheckpointingException, CorruptError
from core.files.store import list_files_below
from core.opening.open import Checkpoint
from core.verbs.convert.job import Job

if TYPE_CHECKING:
    from core.engine.catalog.copied_files import CopiedFile


def check_copied_files(job: Job, source: Checkpoint, used: Catalog) -> list[str]:
    """Raise if a file that a job reads is a copy of another rank's, and note what may be one.

    Args:
        used: the tensors that the job reads, in the source's files.

    Raises:
        CorruptError: the layout gives two ranks different parts, but their files are identical.
    """
    identical = _identical(source)
    if not identical:
        return []
    from core.opening.canonical import list_tensor_files, without_other_files

    copies = _copied_files(job, source, without_other_files(identical, list_tensor_files(used)))
    for copied in copies:
        if copied.is_proven:
            raise _error(copied)
    return [
        f"{copied.file}: {copied.message}; for details, run ckpt validate --headers"
        for copied in copies
    ]


def raise_if_copied(job: Job, source: Checkpoint, err: CheckpointingException) -> None:
    """Raise in place of an error that a copied file explains.

    Args:
        err: what the layout or the optimizer of the source was refused with.

    Raises:
        CorruptError: the layout gives two ranks different parts, but their files are identical.
    """
    # What the job would have read is unknown: without the optimizer, its files do not count.
    if job.optim == "drop":
        return
    copies: list[CopiedFile] = []
    with suppress(CheckpointingException):  # the first error tells more
        copies = _copied_files(job, source, _identical(source))
    for copied in copies:
        if copied.is_proven:
            raise _error(copied) from err


def _identical(source: Checkpoint) -> list[list[str]]:
    """Return the groups of equal files of a checkpoint in which ranks have files of their own."""
    if not source.format.has_files_of_ranks:
        return []
    from core.formats.torch.zip.identical import identical_files

    return identical_files(source.store, list_files_below(source.store))


def _copied_files(
    job: Job, source: Checkpoint, groups: Sequence[Sequence[str]]
) -> list[CopiedFile]:
    """Return the files that were copied over those of other ranks, among groups of equal files."""
    from core.megatron.rules.tables import load_rules
    from core.opening.canonical import canonical_of, copied_files_of

    if not groups:
        return []  # building the canonical form takes time
    rules = load_rules(job.rules, unknown=job.unknown)
    form = canonical_of(source.catalog, source.store, rules=rules)
    return copied_files_of(form, source.catalog, source.store, groups)


def _error(copied: CopiedFile) -> CorruptError:
    from core.engine.catalog.copied_files import COPIED_HINT

    return CorruptError(copied.message, file=copied.file, hint=COPIED_HINT)
