"""Adapters that Megatron-Bridge wrote, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.megatron_lora import unpack_adapters


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that ``unpack_adapters`` describes."""
    return unpack_adapters(tmp_path_factory.mktemp("megatron_lora"))
