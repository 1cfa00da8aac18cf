"""Validate checkpoints as cases of your own test suite: copy this file into it.

::

    CHECKPOINTS=runs/llama:runs/moe pytest test_checkpoints.py

Every path is a checkpoint or a training root; of a root, the iteration that its tracker file names
is checked. A failure shows what ``ckpt validate`` shows. For checkpoints that a test writes itself,
call ``assert_intact``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.verbs.checks.finding import Level, Severity
from core.verbs.validate.run import validate

PATHS = [path for path in os.environ.get("CHECKPOINTS", "").split(os.pathsep) if path]


def assert_intact(path: str | Path, *, level: Level = Level.HEADERS) -> None:
    """Fail with everything that is wrong with the checkpoint at ``path``.

    Args:
        level: ``Level.DEEP`` reads every byte: checksums, NaN, zeros, replicas.
    """
    report = validate(Path(path), level=level)
    errors = [finding for finding in report.findings if finding.severity == Severity.ERROR]
    lines = [
        f"{error.code} {error.file or error.key or error.rank or ''}: "
        f"{error.message}. {error.hint or ''}"
        for error in errors
    ]
    assert not errors, "\n".join([f"{report.path} is not intact:", *lines])


@pytest.mark.parametrize("path", PATHS)
def test_the_checkpoint_is_intact(path: str) -> None:
    assert_intact(path)
