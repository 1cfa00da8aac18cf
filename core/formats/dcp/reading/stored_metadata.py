"""The metadata of a DCP directory: one file, one per rank, or one per folder of accelerate."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from core.errors import (
    CheckpointingException,
    MissingShardError,
    Report,
)
from core.formats.dcp.folders import dcp_folders, joined
from core.formats.dcp.metadata import DcpMetadata, read_metadata, salvaged_metadata
from core.formats.dcp.rank_metadata import RANK_METADATA, merge_rank_metadata, rank_files
from core.formats.dcp.reading.data_files import METADATA, check_files
from core.formats.dcp.safetensors_items import with_raw_files

if TYPE_CHECKING:
    from core.files.store import ReadStore


_MOST_LEVELS = 4
"""Maximum number of directories above one with data files that are searched for ``.metadata``."""


def has_item_files(store: ReadStore) -> bool:
    """Return whether the directory has files of a DCP save other than ``.metadata``."""
    return any(
        name == METADATA + ".tmp" or RANK_METADATA.fullmatch(name) or name.endswith(".distcp")
        for name in store.files()
    )


def salvaged(store: ReadStore, report: Report) -> DcpMetadata:
    """Read the metadata without its damaged entries; data files may be missing.

    Args:
        report: receives the problems, see ``salvaged_metadata``.

    Raises:
        MissingShardError: ``.metadata`` is missing.
        CorruptError, UnsupportedError, UnsafeError: nothing of it can be read.
    """

    def part(name: str) -> DcpMetadata:
        return salvaged_metadata(store.read(name, 0, store.size(name)), label=name, report=report)

    folders = folders_of(store)
    if not folders:
        return part(METADATA)
    return joined([(folder, part(f"{folder}/{METADATA}")) for folder in folders], store)


def list_indexed(store: ReadStore) -> list[str]:
    """Return the data files that the metadata lists; of damaged metadata, what can be read."""
    try:
        return stated_metadata(store).files
    except CheckpointingException:
        with suppress(CheckpointingException):
            return salvaged(store, lambda problem: None).files
        return []


def metadata_files(store: ReadStore) -> list[str]:
    """Return the names of a checkpoint's ``.metadata`` files; accelerate writes several."""
    return [f"{folder}/{METADATA}" for folder in folders_of(store)] or [METADATA]


def folders_of(store: ReadStore) -> tuple[str, ...]:
    """Return accelerate's directories; () if the directory itself is a DCP checkpoint."""
    return () if store.exists(METADATA) or has_item_files(store) else dcp_folders(store)


def metadata_of(store: ReadStore) -> DcpMetadata:
    """Read ``.metadata``, or merge the ranks' metadata, and check that the data files are complete.

    Raises the errors of ``read``.
    """
    metadata = stated_metadata(store)
    check_files(store, metadata)
    return with_raw_files(store, metadata)


def stated_metadata(store: ReadStore) -> DcpMetadata:
    """Read the metadata without checking the data files; raises the errors of ``read``."""
    if store.exists(METADATA):
        return _metadata_in(store, METADATA)
    if ranks := rank_files(store):
        return merge_rank_metadata([_metadata_in(store, name) for name in ranks], store)
    folders = folders_of(store)
    if not folders:
        # The index may be above: writers spread data files over subdirectories.
        root = getattr(store, "root", None)
        above = [] if root is None else list(root.resolve().parents)[:_MOST_LEVELS]
        for folder in above:
            is_index = False
            with suppress(CheckpointingException, OSError):  # it may not be readable
                is_index = (folder / METADATA).is_file()
            if is_index:
                raise MissingShardError(
                    f"{METADATA} is not in this directory but above it, in {folder}",
                    file=store.label,
                    hint=f"point at {folder}",
                )
        raise _unwritten(METADATA, file=store.label)
    return joined(
        [(folder, _metadata_in(store, f"{folder}/{METADATA}")) for folder in folders], store
    )


def _metadata_in(store: ReadStore, name: str) -> DcpMetadata:
    """Read one metadata file, which must exist."""
    if not store.exists(name):
        raise _unwritten(name, file=name)
    return read_metadata(store.read(name, 0, store.size(name)), label=name)


def _unwritten(name: str, *, file: str) -> MissingShardError:
    """Build the error for a missing ``.metadata``."""
    return MissingShardError(
        f"{name} is missing; torch writes it last, so the save did not finish",
        file=file,
        hint="use an older checkpoint",
    )
