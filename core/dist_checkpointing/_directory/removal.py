"""Removal of entries from a finished torch_dist (or DCP) checkpoint.

The remaining data is not changed: a new ``.metadata`` is written next to the old one and replaces
it atomically; files without remaining entries are deleted afterwards. A concurrent reader therefore
finds the old or the new metadata. If a file has other entries, the bytes of a removed entry stay in
it, unused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

from core.dist_checkpointing._directory.durable_file import write_file
from core.errors import UnsupportedError, UsageError
from core.files.folders import sync_folder
from core.files.store import LocalStore, translate_os_errors
from core.formats.dcp.columns import DcpMetadata
from core.formats.dcp.metadata_writer import ChunkRow, ObjectRow, TensorRow, write_metadata
from core.formats.dcp.reading.data_files import METADATA
from core.formats.dcp.reading.stored_metadata import metadata_of
from core.publish.manifest.of_copy import MANIFEST

logger = logging.getLogger(__name__)


def remove_by_prefix(checkpoint_dir: str | Path, key_prefix: str) -> list[str]:
    """Remove the tensors and objects whose keys begin with a prefix; for one process.

    A manifest is deleted, as its checksums would no longer match.

    Args:
        checkpoint_dir: a directory with ``.metadata``.
        key_prefix: must not be empty.

    Returns:
        The keys that were removed.

    Raises:
        UsageError: the prefix is empty.
        UnsupportedError: the remaining entries are stored in a way that new metadata cannot
            describe.
        CheckpointingException: the metadata cannot be read, or a file cannot be written.
    """
    check_prefix(key_prefix)
    folder = Path(checkpoint_dir)
    with closing(LocalStore(folder)) as store:
        metadata = metadata_of(store)
        has_one_metadata_file = store.exists(METADATA)
    removed = keys_with_prefix((*metadata.tensors, *metadata.objects), key_prefix, folder)
    if not removed:
        return []
    # New metadata can only describe uncompressed torch.save items, in one .metadata file.
    if (
        metadata.descriptors
        or metadata.object_descriptors
        or metadata.raw_files
        or not has_one_metadata_file
    ):
        raise UnsupportedError(
            "cannot remove entries from this checkpoint: its items are compressed or stored as "
            "safetensors, or each rank has its own metadata file",
            hint="create a copy without the entries: "
            "ckpt convert SRC DST --to torch_dist --exclude KEY",
        )
    # Replace the metadata first, so that no reader looks for bytes that are being deleted.
    remaining = {row.key: row for row in _list_rows(metadata) if not row.key.startswith(key_prefix)}
    # Megatron's own attributes have an item per key, too.
    paths, mcore_data = metadata.planner_data, metadata.mcore_data
    attributes: dict[str, object] = {}
    if isinstance(mcore_data, dict):
        attributes["mcore_data"] = {
            key: value for key, value in mcore_data.items() if key in remaining
        }
    content = write_metadata(
        remaining.values(),
        planner_data=None
        if paths is None
        else {key: path for key, path in paths.items() if key in remaining},
        version=metadata.version or "1.0.0",
        attributes=attributes,
    )
    write_file(folder, METADATA, [content])
    delete_file(folder / MANIFEST)

    # Keep the files with data of the remaining entries.
    names = {item.file for key, item in metadata.objects.items() if key in remaining}
    for key, tensor in metadata.tensors.items():
        if key in remaining:
            rows = metadata.file_index[tensor.first : tensor.first + tensor.n_chunks]
            names.update(metadata.files[number] for number in set(rows))
    for name in sorted(set(metadata.files) - names):
        delete_file(folder / name)
    sync_folder(folder)
    return removed


def _list_rows(metadata: DcpMetadata) -> Iterator[TensorRow | ObjectRow]:
    """Yield all entries in the form that the writer of ``.metadata`` takes."""
    for key, tensor in metadata.tensors.items():
        chunks = (ChunkRow(box.offset, box.shape, *item) for box, item in metadata.chunks(key))
        yield TensorRow(key, tensor.dtype, tensor.shape, chunks, tensor.requires_grad)
    for key, item in metadata.objects.items():
        yield ObjectRow(key, *item)


def check_prefix(key_prefix: str) -> None:
    """Raise if a prefix is empty.

    Raises:
        UsageError: the prefix is empty, so it would remove everything.
    """
    if not key_prefix:
        raise UsageError(
            "an empty prefix would remove the entire checkpoint",
            hint="to remove the checkpoint, delete its directory",
        )


def keys_with_prefix(keys: Iterable[str], key_prefix: str, checkpoint_dir: Path) -> list[str]:
    """Select the keys that begin with a prefix; log a warning if there are none."""
    matches = [key for key in keys if key.startswith(key_prefix)]
    if not matches:
        logger.warning("no key in %s begins with %r", checkpoint_dir, key_prefix)
    return matches


def delete_file(path: Path) -> None:
    """Delete a file if it exists.

    Raises:
        StorageError: the file cannot be deleted.
    """
    with translate_os_errors(str(path), doing="delete"):
        path.unlink(missing_ok=True)
