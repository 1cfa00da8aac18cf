"""The version of the project, which manifests and reports record, and the commit that it is of."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"
TOOL = f"ckpt-toolkit {__version__}"
"""The writing software, as manifests record it."""
COMMIT_FILE = "commit.txt"
"""Stands beside this module in wheels and source distributions (``scripts/build_hook.py``)."""


def read_commit() -> str | None:
    """Return the commit that this code is of: ``3057e2a0``, ``3057e2a0+changes``.

    Returns:
        None if neither a build recorded it nor git can tell.
    """
    recorded = Path(__file__).with_name(COMMIT_FILE)
    if recorded.is_file():
        return recorded.read_text("utf-8").strip() or None
    root = Path(__file__).parents[1]
    # An installed package may lie in somebody else's repository: a .venv in a project's checkout.
    if not (root / ".git").exists() or not (root / "scripts" / "build_hook.py").exists():
        return None
    import subprocess

    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty=+changes"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return None
    return done.stdout.strip() or None
