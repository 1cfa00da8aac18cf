"""Records the commit in wheels and source distributions, for ``ckpt --version``.

hatchling runs it (``pyproject.toml``). A wheel that is built from a source distribution takes over
what that one records.
"""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RecordCommit(BuildHookInterface[Any]):
    """Adds ``core/commit.txt`` to what is built, unless it is an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the file where the builder takes it from, outside of the tree."""
        module = runpy.run_path(str(Path(self.root, "core", "version.py")))
        if version == "editable" or Path(self.root, "core", module["COMMIT_FILE"]).exists():
            return
        commit = module["read_commit"]()
        if commit is not None:
            self._folder = tempfile.TemporaryDirectory()
            path = Path(self._folder.name, module["COMMIT_FILE"])
            path.write_text(f"{commit}\n", "utf-8")
            build_data["force_include"][str(path)] = f"core/{path.name}"
