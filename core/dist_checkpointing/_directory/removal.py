"""Removes entries from a finished torch_dist (or DCP) checkpoint.

What stays is not touched: only ``.metadata`` is written again, beside the old one, which it then replaces at once;
files in which nothing is left are deleted afterwards. So whoever reads in between finds one state or the other. The
bytes of an entry in a file that has others, too, stay there, unused.
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
from core.formats.dcp.format import METADATA, metadata_of
from core.formats.dcp.metadata_writer import ChunkRow, ObjectRow, TensorRow, write_metadata
from core.manifest.of_copy import MANIFEST

logger = logging.getLogger(__name__)


def remove_entries(checkpoint_dir: str | Path, key_prefix: str) -> list[str]:
    """Removes the tensors and objects whose keys begin with a prefix.

    For one process. A manifest is deleted, as its sums would no longer be true.

    Args:
        checkpoint_dir: holds ``.metadata``.
        key_prefix: not empty.

    Returns:
        The keys that were removed.

    Raises:
        UsageError: the prefix is empty.
        UnsupportedError: what stays is stored in a way that new metadata cannot say.
        CheckpointingException: the metadata cannot be read, or the system refuses.
    """
    check_prefix(key_prefix)
    folder = Path(checkpoint_dir)
    with closing(LocalStore(folder)) as store:
        metadata = metadata_of(store)
        is_whole = store.exists(METADATA)
    gone = beginning_so((*metadata.tensors, *metadata.objects), key_prefix, folder)
    if not gone:
        return []
    _check_can_be_said(metadata, is_whole=is_whole)
    kept = {row.key: row for row in _rows(metadata) if not row.key.startswith(key_prefix)}
    write_file(folder, METADATA, [_written(metadata, kept)])
    delete_file(folder / MANIFEST)
    for name in sorted(set(metadata.files) - _files_of(metadata, kept)):
        delete_file(folder / name)
    sync_folder(folder)
    return gone


def _check_can_be_said(metadata: DcpMetadata, *, is_whole: bool) -> None:
    if metadata.descriptors or metadata.object_descriptors or metadata.raw_files or not is_whole:
        raise UnsupportedError(
            "entries cannot be removed where items are compressed or safetensors, or where every rank has its metadata",
            hint="ckpt convert --to torch_dist --exclude leaves tensors out of a copy",
        )


def _rows(metadata: DcpMetadata) -> Iterator[TensorRow | ObjectRow]:
    for key, tensor in metadata.tensors.items():
        chunks = (ChunkRow(box.offset, box.shape, *item) for box, item in metadata.chunks(key))
        yield TensorRow(key, tensor.dtype, tensor.shape, chunks, tensor.requires_grad)
    for key, item in metadata.objects.items():
        yield ObjectRow(key, *item)


def _files_of(metadata: DcpMetadata, kept: dict[str, TensorRow | ObjectRow]) -> set[str]:
    """Files in which something is left."""
    found = {item.file for key, item in metadata.objects.items() if key in kept}
    for key, tensor in metadata.tensors.items():
        if key in kept:
            rows = metadata.file_index[tensor.first : tensor.first + tensor.n_chunks]
            found.update(metadata.files[number] for number in set(rows))
    return found


def _written(metadata: DcpMetadata, kept: dict[str, TensorRow | ObjectRow]) -> bytes:
    paths, facts = metadata.planner_data, metadata.mcore_data
    attributes: dict[str, object] = {}
    if isinstance(facts, dict):
        attributes["mcore_data"] = {key: fact for key, fact in facts.items() if key in kept}
    return write_metadata(
        kept.values(),
        planner_data=None if paths is None else {key: path for key, path in paths.items() if key in kept},
        version=metadata.version or "1.0.0",
        attributes=attributes,
    )


def check_prefix(key_prefix: str) -> None:
    """Returns if entries can be removed by a prefix.

    Raises:
        UsageError: it is empty.
    """
    if not key_prefix:
        raise UsageError(
            "an empty prefix would remove the whole checkpoint", hint="delete its directory, if that is meant"
        )


def beginning_so(keys: Iterable[str], key_prefix: str, checkpoint_dir: Path) -> list[str]:
    """The keys that begin with a prefix; a warning is logged if there are none."""
    found = [key for key in keys if key.startswith(key_prefix)]
    if not found:
        logger.warning("nothing in %s has a key that begins with %r", checkpoint_dir, key_prefix)
    return found


def delete_file(path: Path) -> None:
    """Deletes a file, if it is there.

    Raises:
        StorageError: the system refuses.
    """
    with translate_os_errors(str(path), doing="delete"):
        path.unlink(missing_ok=True)
