"""Refuse sources in which one rank's file was copied over another's."""

from __future__ import annotations

from core.catalog.catalog import Catalog
from core.catalog.copied_files import COPIED_HINT, RANK_FILE_FORMATS
from core.convert.job import Job
from core.errors import CorruptError
from core.files.store import list_files_below
from core.formats.torch.zip.identical import identical_files
from core.megatron.reshard.reshard import load_rules
from core.opening.canonical import canonical_of, copied_files_of
from core.opening.open import Checkpoint


def check_copied_files(job: Job, source: Checkpoint, used: Catalog | None = None) -> list[str]:
    """Raise if a file that a job reads is a copy of another rank's, and note what may be one.

    Args:
        used: the tensors that the job reads, in the source's files; None if the job failed before
            they were determined.

    Raises:
        CorruptError: the layout gives two ranks different parts, but their files are identical.
    """
    if source.format.name not in RANK_FILE_FORMATS:
        return []
    groups = identical_files(source.store, list_files_below(source.store))
    if not groups:
        return []
    if used is not None:
        files = {fragment.array.extent.file for fragment in used.all_fragments() if fragment.array}
        groups = [group for group in groups if files.issuperset(group)]
    rules = load_rules(job.rules, unknown=job.unknown)
    form = canonical_of(source.catalog, source.store, rules=rules)
    notes = []
    for copied in copied_files_of(form, source.catalog, source.store, groups):
        if copied.is_proven:
            raise CorruptError(copied.message, file=copied.file, hint=COPIED_HINT)
        notes.append(f"{copied.file}: {copied.message}; ckpt validate --headers says more")
    return notes
