"""Choose the kind of destination that a location is; nothing else tells the kinds apart."""

from __future__ import annotations

from pathlib import Path

from core.files.remote_path import is_remote
from core.publish.stage.protocol import OutputDestination


def choose_destination(dst: Path) -> OutputDestination:
    """Return the destination at a location.

    Args:
        dst: the location, as ``core.files.remote_path.location_of`` returns it.
    """
    if is_remote(dst):
        from core.publish.stage.bucket.stage import StoreDestination

        return StoreDestination(dst)
    from core.publish.stage.stage import LocalDestination

    return LocalDestination(dst)
