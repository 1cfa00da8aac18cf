"""Checkpoints as cases of your own test suite: copy this file into it.

::

    CHECKPOINTS=runs/llama:runs/moe pytest test_checkpoints.py

Every path is a checkpoint or a training root, of which the iteration is taken that its tracker
names. A failure shows what ``ckpt validate`` shows. For checkpoints that were written by the test
itself, call ``assert_whole``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.verbs.checks.check import Level, Severity
from core.verbs.validate.run import validate

PATHS = [path for path in os.environ.get("CHECKPOINTS", "").split(os.pathsep) if path]


def assert_whole(path: str | Path, *, level: Level = Level.HEADERS) -> None:
    """Fails with everything that is wrong with the checkpoint at ``path``.

    Args:
        level: ``Level.DEEP`` reads every byte: checksums, NaN, zeros, replicas.
    """
    found = validate(Path(path), level=level)
    errors = [finding for finding in found.findings if finding.severity == Severity.ERROR]
    lines = [
        f"{one.code} {one.file or one.key or one.rank or ''}: {one.message}. {one.hint or ''}"
        for one in errors
    ]
    assert not errors, "\n".join([f"{found.path} is not whole:", *lines])


@pytest.mark.parametrize("path", PATHS)
def test_the_checkpoint_is_whole(path: str) -> None:
    assert_whole(path)
