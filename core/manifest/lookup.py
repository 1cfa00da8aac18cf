"""What was written down about a checkpoint: its manifest, found beside it or in the training root above it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from core.errors import CheckpointingException
from core.files.store import LocalStore
from core.manifest.file import MANIFEST, Manifest, manifest_name, read_manifest


@dataclass(frozen=True, slots=True)
class Recorded:
    """A manifest that speaks of a checkpoint.

    Args:
        name: where it is, relative to the checkpoint.
        manifest: what it says, with paths relative to the checkpoint; None if it cannot be read.
        failure: why it cannot.
    """

    name: str
    manifest: Manifest | None
    failure: CheckpointingException | None = None


def is_manifest(name: str) -> bool:
    """Whether a file is a manifest, by its name."""
    last = name.rpartition("/")[2]
    return last == MANIFEST or last.endswith(f".{MANIFEST}")


def recorded(folder: Path, *, entry: str | None = None) -> Recorded | None:
    """The manifest of a checkpoint; None if there is none.

    A conversion to a training root puts its manifest beside the tracker, so the directory above is looked at too.

    Args:
        folder: the checkpoint's directory.
        entry: the one file in it that is the checkpoint.
    """
    name = manifest_name(entry)
    found = _read(folder, name)
    if found is not None or entry is not None:
        return found
    above = folder.resolve()
    found = _read(above.parent, MANIFEST)
    if found is None or found.manifest is None:
        return None  # a broken one may be about something else
    prefix = f"{above.name}/"
    files = tuple(
        replace(one, path=one.path.removeprefix(prefix)) for one in found.manifest.files if one.path.startswith(prefix)
    )
    arrays = tuple(
        replace(one, file=one.file.removeprefix(prefix)) for one in found.manifest.arrays if one.file.startswith(prefix)
    )
    if not files:
        return None
    return Recorded(f"../{MANIFEST}", replace(found.manifest, files=files, arrays=arrays))


def _read(folder: Path, name: str) -> Recorded | None:
    store = LocalStore(folder)
    try:
        if not store.exists(name):
            return None
        return Recorded(name, read_manifest(store, name))
    except CheckpointingException as err:
        return Recorded(name, None, err)
    finally:
        store.close()
