"""CK508: check that no rank's file is a copy of another rank's.

``core.engine.catalog.copied_files`` says which equal files are copies. It is an error if the layout
rules out equal content, and a warning if layers or experts that began as copies would look the
same.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.engine.catalog.copied_files import COPIED_HINT
from core.formats.torch.zip.identical import identical_files
from core.opening.canonical import copied_files_of
from core.verbs.checks.finding import Finding, Level, Severity, get_code
from core.verbs.checks.subject import Check, Subject

COPIED = get_code("CK508")


_SUSPICION_HINT = (
    "unless the model started with identical layers or experts (upcycling, depth up-scaling), "
    + COPIED_HINT
)


def report_copied_files(subject: Subject) -> Iterator[Finding]:
    """Compare files of equal content with the parts of tensors that they should hold."""
    groups = identical_files(subject.store, subject.files)
    if not groups:
        return  # building the canonical form takes time
    stored, form = subject.catalog, subject.canonical
    if stored is None or form is None:
        return
    for copied in copied_files_of(form, stored, subject.store, groups):
        yield COPIED.finding(
            copied.message,
            file=copied.file,
            key=copied.key,
            hint=None if copied.is_proven else _SUSPICION_HINT,
            severity=None if copied.is_proven else Severity.WARNING,
        )


CHECKS = (Check(report_copied_files, Level.HEADERS, formats=("megatron", "deepspeed")),)
