"""Copies of DeepSpeed checkpoints with other content."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from core.files.store import LocalStore


def edited(source: Path, folder: Path, change: Callable[[str, Any], None]) -> LocalStore:
    """A copy of a checkpoint, each model file of which went through ``change``."""
    shutil.copytree(source, folder)
    for path in folder.glob("*model_states.pt"):
        content = torch.load(path, weights_only=False)
        change(path.name, content)
        torch.save(content, path)
    return LocalStore(folder)
