"""Rank files of Megatron with some of their content exchanged, saved by torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.rank_files import MODEL_FILE, load_rank_file, rank_dirs

Change = Callable[[str, str, Any], Any]
"""(rank directory, name in the model, value) → another value."""


def rewritten(
    source: Path,
    target: Path,
    change: Change,
    *,
    more: Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a root of rank files with a changed model; returns it.

    Args:
        source, target: roots.
        more: entries to add to the model of every rank.
        args: arguments to set.
    """
    target.mkdir(parents=True)
    (target / "latest_checkpointed_iteration.txt").write_text("10")
    for folder, path in rank_dirs(source).items():
        loaded = load_rank_file(path / MODEL_FILE)
        plain = {name: value for name, value in vars(loaded["args"]).items() if is_plain(value)}
        model = loaded["model"]
        for name, value in model.items():
            model[name] = change(folder, name, value)
        model.update(more or {})
        out = target / "iter_0000010" / folder
        out.mkdir(parents=True)
        settings = argparse.Namespace(**{**plain, **(args or {})})
        torch.save(
            {"args": settings, "checkpoint_version": 3.0, "iteration": 10, "model": model},
            out / MODEL_FILE,
        )
    return target


def is_plain(value: object) -> bool:
    """Whether an argument can be saved without Megatron's classes."""
    return (
        value is None
        or isinstance(value, (int, float, str, bool))
        or (isinstance(value, list) and not value)
    )


def model_of(root: Path, folder: str) -> dict[str, Any]:
    """The model of a rank."""
    model = load_rank_file(rank_dirs(root)[folder] / MODEL_FILE)["model"]
    assert isinstance(model, dict)
    return model
