"""Fixtures of the tests of the ranks' torch files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.support.archives import unpacked


@pytest.fixture(scope="session")
def gold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked archive; to be read only."""
    return unpacked("dtensor", tmp_path_factory.mktemp("dtensor"))


@pytest.fixture
def each_rank() -> Callable[..., None]:
    """A function that calls another one with the mesh of every rank in turn, in one process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def call(shape: tuple[int, ...], work: Callable[[int, Any], None]) -> None:
        n_ranks = torch.tensor(shape).prod().item()
        for rank in range(int(n_ranks)):
            torch.distributed.init_process_group(
                "fake", store=FakeStore(), rank=rank, world_size=int(n_ranks)
            )
            try:
                work(rank, init_device_mesh("cpu", shape))
            finally:
                torch.distributed.destroy_process_group()

    return call
