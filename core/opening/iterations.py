"""The directories of a training root that hold iterations; see the table in ``open``.

Shell completion lists them, so importing this module is cheap.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from core.files.source_store import SourceStore, open_store

ITERATION_DIR = re.compile(
    r"(?:iter_|step-|step_|global_step_?|checkpoint[-_])(\d+)(?:_universal)?$"
)
CHECKPOINTS_BELOW = "opening.below"
"""Rule of the error for a directory that is no checkpoint, but contains some."""
MOST_PATHS = 4
"""Maximum number of paths in a message."""
_ORBAX_STEP = "_CHECKPOINT_METADATA"
"""File in the directories of Orbax's CheckpointManager, whose names are bare numbers."""


def iteration_dirs(store: SourceStore) -> dict[int, str]:
    """Return iteration → directory name, for the directories right below a training root."""
    # Folders are sorted, so that a plain directory comes before its ``_universal`` form.
    return {number: names[0] for number, names in all_iteration_dirs(store).items()}


def all_iteration_dirs(store: SourceStore) -> dict[int, list[str]]:
    """Return iteration → names of all its directories, right below a training root."""
    names: dict[int, list[str]] = {}
    folders = store.folders()
    # In an object store, the object of this name marks a prefix whose objects are being deleted.
    files = set(store.files()) if store.is_remote else frozenset()
    for name in folders:
        if removed_name(name) in files:
            continue
        if match := ITERATION_DIR.match(name):
            names.setdefault(int(match.group(1)), []).append(name)
        elif name.isascii() and name.isdigit() and store.exists(f"{name}/{_ORBAX_STEP}"):
            names.setdefault(int(name), []).append(name)
    return names


def list_other_iterations(passed: Sequence[Path], taken: Path) -> list[Path]:
    """Return the iterations beside the one that was chosen, the newest first.

    Args:
        passed: the directories that were descended through, the outermost first.
        taken: the checkpoint that was chosen.
    """
    others: dict[int, Path] = {}
    for root in passed:
        with closing(open_store(root)) as store:
            others |= {
                number: root / name
                for number, name in iteration_dirs(store).items()
                if not taken.is_relative_to(root / name)
            }
    return [others[number] for number in sorted(others, reverse=True)]


def removed_name(name: str) -> str:
    """Return the hidden name that an iteration has while it is removed (``verbs.prune``)."""
    return f".{name}.ckpt-removed"
