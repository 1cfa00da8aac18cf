"""The metadata of a DCP directory: one file, one per rank, or one per folder of accelerate."""

from __future__ import annotations

from contextlib import suppress
from shlex import quote
from typing import TYPE_CHECKING

from core.errors import CheckpointingException, MissingShardError, Report
from core.formats.dcp.folders import dcp_folders, join_folders
from core.formats.dcp.metadata import DcpMetadata, parse_metadata, salvaged_metadata
from core.formats.dcp.reading.data_files import METADATA, check_file_lengths

if TYPE_CHECKING:
    from core.files.store import ReadStore


_MOST_LEVELS = 4
"""Maximum number of directories above one with data files that are searched for ``.metadata``."""


def has_item_files(store: ReadStore) -> bool:
    """Return whether the directory has files of a DCP save other than ``.metadata``."""
    from core.formats.dcp.rank_metadata import RANK_METADATA

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

    folders = list_accelerate_folders(store)
    if not folders:
        return part(METADATA)
    return join_folders([(folder, part(f"{folder}/{METADATA}")) for folder in folders], store)


def list_data_files(store: ReadStore) -> list[str]:
    """Return the data files that the metadata lists; of damaged metadata, what can be read."""
    try:
        return stated_metadata(store).files
    except CheckpointingException:
        with suppress(CheckpointingException):
            return salvaged(store, lambda problem: None).files
        return []


def metadata_files(store: ReadStore) -> list[str]:
    """Return the names of a checkpoint's ``.metadata`` files; accelerate writes several."""
    return [f"{folder}/{METADATA}" for folder in list_accelerate_folders(store)] or [METADATA]


def list_accelerate_folders(store: ReadStore) -> tuple[str, ...]:
    """Return accelerate's directories; () if the directory itself is a DCP checkpoint."""
    return () if store.exists(METADATA) or has_item_files(store) else dcp_folders(store)


def metadata_of(store: ReadStore) -> DcpMetadata:
    """Read ``.metadata``, or merge the ranks' metadata, and check that the data files are complete.

    Raises the errors of ``read``.
    """
    from core.formats.dcp.safetensors_items import with_raw_files

    metadata = stated_metadata(store)
    check_file_lengths(store, metadata)
    return with_raw_files(store, metadata)


def stated_metadata(store: ReadStore) -> DcpMetadata:
    """Read the metadata without checking the data files; raises the errors of ``read``."""
    if store.exists(METADATA):
        return read_metadata_in(store)
    from core.formats.dcp.rank_metadata import list_rank_metadata, merge_rank_metadata

    if ranks := list_rank_metadata(store):
        return merge_rank_metadata([read_metadata_in(store, name=name) for name in ranks], store)
    folders = list_accelerate_folders(store)
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
                    f"{METADATA} is not in this directory; it is in {folder}",
                    file=store.label,
                    hint=f"pass {quote(str(folder))}",
                )
        raise _unwritten(METADATA, store, file=store.label)
    return join_folders([(folder, read_metadata_in(store, folder)) for folder in folders], store)


def read_metadata_in(store: ReadStore, folder: str = "", *, name: str = METADATA) -> DcpMetadata:
    """Read one metadata file, which must exist, in the directory or in a folder of it."""
    file = f"{folder}/{name}" if folder else name
    if not store.exists(file):
        raise _unwritten(file, store, file=file)
    return parse_metadata(store.read(file, 0, store.size(file)), label=file)


def _unwritten(name: str, store: ReadStore, *, file: str) -> MissingShardError:
    """Build the error for a missing ``.metadata``."""
    message, hint, _ = explain_missing_metadata(name, store)
    return MissingShardError(message, file=file, hint=hint)


def explain_missing_metadata(name: str, store: ReadStore) -> tuple[str, str, bool]:
    """Explain why a ``.metadata`` is missing, by the files next to it.

    Megatron writes ``metadata.json`` after it, so that file proves that the save was completed and
    a copy lost the hidden one. torch renames ``.metadata.tmp`` at the end of a save.

    Returns:
        The message, the hint, and whether the save was completed.
    """
    from core.formats.mcore.metadata_json import CONFIG

    folder = name.removesuffix(METADATA)
    if store.exists(folder + CONFIG):
        message = (
            f"{name} is missing, but {folder}{CONFIG}, which Megatron writes after it, exists, "
            "so the save finished, and a copy left the file out"
        )
        return (
            message,
            f"copy {METADATA} from the original; the file is hidden, and {_HIDDEN}",
            True,
        )
    if store.exists(f"{name}.tmp"):
        message = f"{name} is missing, but {name}.tmp exists, so the save did not finish"
        return message, "use an older checkpoint", False
    message = (
        f"{name} is missing; torch writes it last, so the save did not finish, or a copy left it "
        "out"
    )
    hint = (
        f"copy {METADATA} from the original ({_HIDDEN}); if it is missing there too, use an "
        "older checkpoint"
    )
    return message, hint, False


_HIDDEN = "cp DIR/* skips hidden files"
