"""The directories of a training root that hold iterations; see the table in ``open``.

Shell completion lists them, so importing this module is cheap.
"""

from __future__ import annotations

import re

from core.files.source_store import SourceStore

ITERATION_DIR = re.compile(
    r"(?:iter_|step-|step_|global_step_?|checkpoint[-_])(\d+)(?:_universal)?$"
)
_ORBAX_STEP = "_CHECKPOINT_METADATA"
"""File in the directories of Orbax's CheckpointManager, whose names are bare numbers."""


def iteration_dirs(store: SourceStore) -> dict[int, str]:
    """Return iteration → directory name, for the directories right below a training root."""
    names: dict[int, str] = {}
    # Folders are sorted, so that a plain directory comes before its ``_universal`` form.
    for name in store.folders():
        if match := ITERATION_DIR.match(name):
            names.setdefault(int(match.group(1)), name)
        elif name.isascii() and name.isdigit() and store.exists(f"{name}/{_ORBAX_STEP}"):
            names.setdefault(int(name), name)
    return names
