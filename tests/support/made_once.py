"""Directories that are made once per run of the tests, and that pytest-xdist's workers share."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(
    name: str, make: Callable[[Path], None], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return the directory of a name in this run's folder; to be read only.

    Args:
        make: fills the directory, which exists; the first that needs it calls this, others wait.
    """
    base_dir = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base_dir = base_dir.parent
    shared_dir = base_dir / name
    with (base_dir / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared_dir.exists():
            unfinished_dir = base_dir / f"{name}.unfinished"
            unfinished_dir.mkdir(exist_ok=True)
            make(unfinished_dir)
            unfinished_dir.rename(shared_dir)
    return shared_dir
