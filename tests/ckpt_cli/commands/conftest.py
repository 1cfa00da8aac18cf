"""``ckpt inspect`` in this process, for the tests of its page."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_cli.app import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs ``ckpt inspect`` in this process; returns stdout after a clean run."""

    def call(*arguments: object) -> str:
        code = main(["inspect", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        return out

    return call


@pytest.fixture
def shown(run: Callable[..., str]) -> Callable[..., Any]:
    """``ckpt inspect --json``, parsed."""
    return lambda *arguments: json.loads(run(*arguments, "--json"))
