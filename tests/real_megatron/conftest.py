"""The workers in which megatron-core trains, and which tests are run.

Without more, one short test of every kind runs, in the installed megatron-core.
``scripts/megatron-tests`` runs the whole matrix (``--long``) and sets ``CKPT_MEGATRON_OLD`` to a
Python that has megatron-core 0.12.1.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real_megatron.megatron import Megatron, megatron

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("megatron") is None else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what starts processes."""
    place = str(Path(__file__).parent) + os.sep
    for item in items:
        if not str(item.path).startswith(place):
            continue
        item.add_marker(pytest.mark.dist)
        item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def worker() -> Iterator[Megatron]:
    """megatron-core as it is installed beside this project."""
    with megatron() as megatron_worker:
        yield megatron_worker


@pytest.fixture(scope="session")
def our_worker() -> Iterator[Megatron]:
    """The same megatron-core, which saves and loads through this project."""
    with megatron(ours=True) as megatron_worker:
        yield megatron_worker


@pytest.fixture(scope="session")
def old_worker() -> Iterator[Megatron]:
    """megatron-core 0.12.1."""
    python = os.environ.get("CKPT_MEGATRON_OLD")
    if not python:
        pytest.skip("scripts/megatron-tests runs megatron-core 0.12.1")
    with megatron(Path(python)) as megatron_worker:
        yield megatron_worker
