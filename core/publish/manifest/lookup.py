"""Find the manifest of a checkpoint, next to it or in the training root above it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from core.errors import CheckpointingException
from core.files.source_store import open_store
from core.publish.manifest.file import MANIFEST, Manifest, manifest_name, read_manifest
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class RecordedManifest:
    """The manifest of a checkpoint, or the reason why it cannot be read.

    Args:
        name: path of the manifest file, relative to the checkpoint.
        manifest: its content, with paths relative to the checkpoint; None if the file cannot be
            read.
        failure: why the file cannot be read; None if it can.
    """

    name: str
    manifest: Manifest | None
    failure: CheckpointingException | None = None


def is_manifest(name: str) -> bool:
    """Return whether a file is a manifest, by its name."""
    last = name.rpartition("/")[2]
    return last == MANIFEST or last.endswith(f".{MANIFEST}")


def find_manifest(folder: Path, *, entry: str | None = None) -> RecordedManifest | None:
    """Find the manifest of a checkpoint; return None if there is none.

    A conversion to a training root puts its manifest next to the tracker, so the parent directory
    is searched too.

    Args:
        folder: the checkpoint's directory.
        entry: name of the file if the checkpoint is a single file in the directory.
    """
    # Its own manifest comes first, even a damaged one. A single file has no other.
    result = _read(folder, manifest_name(entry))
    if result is not None or entry is not None:
        return result
    resolved = folder.resolve()
    result = _read(resolved.parent, MANIFEST)
    if result is None or result.manifest is None:
        return None  # a damaged manifest of the root may be about other iterations

    # Select the entries of this iteration; paths become relative to it.
    prefix = f"{resolved.name}/"
    files = tuple(
        replace(file, path=file.path.removeprefix(prefix))
        for file in result.manifest.files
        if file.path.startswith(prefix)
    )
    arrays = tuple(
        replace(array, file=array.file.removeprefix(prefix))
        for array in result.manifest.arrays
        if array.file.startswith(prefix)
    )
    if not files:
        return None
    return RecordedManifest(f"../{MANIFEST}", replace(result.manifest, files=files, arrays=arrays))


def _read(folder: Path, name: str) -> RecordedManifest | None:
    """Read a manifest if the file exists; a damaged one is returned with its failure."""
    store = open_store(folder)
    try:
        if not store.exists(name):
            return None
        return RecordedManifest(name, read_manifest(store, name))
    except CheckpointingException as err:
        return RecordedManifest(name, None, err)
    finally:
        store.close()
