"""Check the files that a trainer saves next to DeepSpeed's directory, with all codes.

::

    checkpoint-2/
    ├── global_step2/          the checkpoint under examination
    ├── model.safetensors      examined by this module, with all other files directly in this folder
    └── scheduler.pt  rng_state.pth …

Source: transformers 5.23 ``trainer.py`` (``_save_checkpoint``), accelerate 1.15 ``accelerator.py``
(``save_state``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from core.errors import CheckpointingException
from core.files.source_store import open_store
from core.formats.huggingface import bin_format as bin_shards
from core.formats.safetensors import format as safetensors
from core.verbs.checks.check import Check, Finding
from core.verbs.checks.file_codes import MALFORMED
from core.verbs.checks.metadata import tracker
from core.verbs.checks.problems import finding_of
from core.verbs.checks.registry import checks
from core.verbs.checks.subject import Subject


def files_above(subject: Subject) -> Iterator[Finding]:
    """Check the files (not the folders) directly above the checkpoint, at the subject's level."""
    if not subject.passed:
        return
    # Those files are a checkpoint of their own: the weights that transformers or accelerate save.
    store = open_store(subject.passed[-1])
    above = Subject(
        path=store.root,
        root=store.root,
        store=store,
        format=next(
            (format for format in (safetensors.FORMAT, bin_shards.FORMAT) if format.sniff(store)),
            None,
        ),
        level=subject.level,
        own_rules=subject.own_rules,
        threads=subject.threads,
        memory_bytes=subject.memory_bytes,
        has_folders=False,
    )
    try:
        for check in checks(above.level, above.format_name):
            # The checks of the subject itself have followed the trackers of all folders above it.
            if check not in tracker.CHECKS:
                try:
                    above.findings += check.run(above)
                except CheckpointingException as err:
                    above.findings.append(finding_of(err, default=MALFORMED))
    finally:
        store.close()
    # Name the files relative to the checkpoint, as in all other findings.
    for finding in above.findings:
        file = (
            None
            if finding.file is None
            else os.path.relpath(str(store.root / finding.file), str(subject.path))
        )
        yield replace(finding, file=file)


CHECKS = (Check(files_above, formats=("deepspeed", "deepspeed_universal")),)
