"""The zarr 2 arrays of a checkpoint as files: list, check, write and remove them.

On disk, as in ``core.formats.zarr.format``: a directory per key, with ``.zarray`` and a file per
chunk. Directories whose names begin with a dot or end with ``.sync`` are ignored.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from core.arrays.box import Box, Shape
from core.dist_checkpointing._directory.removal import check_prefix, delete_file, keys_with_prefix
from core.errors import CheckpointingException, UnsupportedError, UsageError
from core.files.folders import sync_folder
from core.files.json_object import read_small_file
from core.files.store import LocalStore, translate_os_errors
from core.formats.zarr.array import ZarrArray
from core.formats.zarr.chunks import check_chunks
from core.formats.zarr.grid import ChunkGrid, is_like_a_chunk
from core.formats.zarr.metadata2 import ARRAY_FILE, parse_zarray, zarray
from core.formats.zarr.tree import walk_folders
from core.megatron.extras.sharded_objects import is_sharded_object
from core.publish.manifest.of_copy import MANIFEST

_MAX_ZARRAY_BYTES = 1 << 20
_REMOVED = ".removed-array"


def array_keys(checkpoint_dir: Path) -> Iterator[str]:
    """Yield the keys of all arrays, which are the paths of their directories.

    Raises:
        UnsafeError: directories are nested too deeply.
    """
    store = LocalStore(checkpoint_dir)
    for folder, _, is_array in walk_folders(
        store, is_array=lambda folder, listing: ARRAY_FILE in listing
    ):
        if is_array and folder:
            yield folder


def array_metadata(array_dir: Path, *, key: str) -> ZarrArray:
    """Read ``.zarray`` of an array.

    Raises:
        MissingShardError: the file is missing.
        CorruptError: the file is malformed.
        UnsupportedError: this kind of array is not supported.
    """
    with closing(LocalStore(array_dir)) as store:
        data = read_small_file(store, ARRAY_FILE, max_bytes=_MAX_ZARRAY_BYTES, key=key)
    return parse_zarray(data, file=str(array_dir / ARRAY_FILE), key=key)


def clip_region(
    region: Sequence[int | slice], shape: Shape, *, key: str
) -> tuple[int | slice, ...]:
    """Clip a region to an array; a slice outside the array becomes empty.

    Args:
        region: an index, or a slice with start and stop, per axis; in elements.
        shape: shape of the array, in elements.

    Raises:
        CheckpointingException: the numbers of axes differ, or an index is outside the array.
    """
    if len(region) != len(shape):
        raise CheckpointingException(
            "the stored shape and the requested region have different numbers of axes: "
            f"{len(shape)} and {len(region)}",
            key=key,
        )
    for part, extent in zip(region, shape, strict=True):
        if isinstance(part, int) and not part < extent:
            raise CheckpointingException(
                f"index {part} is outside the stored shape {shape}", key=key
            )
    return tuple(
        part
        if isinstance(part, int)
        else slice(min(part.start, extent), min(part.stop, extent), part.step)
        for part, extent in zip(region, shape, strict=True)
    )


def check_region(checkpoint_dir: Path, key: str, region: Sequence[int | slice]) -> None:
    """Raise unless all chunks of a region are stored: readers use fill values for missing chunks.

    Args:
        region: an index, or a slice with start and stop, per axis; in elements. Parts outside the
            array are ignored.

    Raises:
        MissingShardError: a chunk or the ``.zarray`` is missing; the error names the file.
        CorruptError: a chunk has the wrong length.
    """
    # An index is a slice of one element.
    spans = [
        (part, part + 1) if isinstance(part, int) else (part.start, part.stop) for part in region
    ]
    box = Box(
        tuple(start for start, _ in spans), tuple(max(stop - start, 0) for start, stop in spans)
    )
    with closing(LocalStore(checkpoint_dir)) as store:
        check_chunks(store, key, array_metadata(checkpoint_dir / key, key=key), box, key=key)


def check_no_array(array_dir: Path, *, key: str) -> None:
    """Raise if a directory contains an array or chunks.

    Raises:
        UsageError: the directory contains an array or chunks.
    """
    # Chunks without .zarray remain from a save that did not finish.
    listing = LocalStore(array_dir).sizes()
    if ARRAY_FILE in listing or any(map(is_like_a_chunk, listing)):
        raise UsageError(
            "the array already exists",
            file=str(array_dir),
            key=key,
            hint="save into an empty directory",
        )


def create_array(array_dir: Path, grid: ChunkGrid, dtype: str, *, key: str) -> None:
    """Write the ``.zarray`` of an array; its chunks, not compressed, are written later.

    Args:
        array_dir: directory of the array, created if it does not exist.
        dtype: canonical dtype name.

    Raises:
        UnsupportedError: zarr does not support the dtype.
        UsageError: the array already exists.
        StorageError: the file cannot be written.
    """
    text = zarray(grid, dtype, key=key)
    check_no_array(array_dir, key=key)
    with translate_os_errors(str(array_dir / ARRAY_FILE), doing="create"):
        array_dir.mkdir(parents=True, exist_ok=True)
        with (array_dir / ARRAY_FILE).open("xb") as file:
            file.write(text)


def write_in_chunk(
    array_dir: Path, index: Sequence[int], offset: int, data: memoryview, *, key: str
) -> None:
    """Write some bytes of a plain chunk without changing its other bytes.

    Other processes may write other bytes of the chunk at the same time. The file gets the chunk's
    full length.

    Args:
        index: index of the chunk, per axis.
        offset: offset in bytes from the chunk's first element, in C order.

    Raises:
        UnsupportedError: the array's chunks are encoded, or not in C order.
        ValueError: the bytes are outside the chunk.
        StorageError, CapacityError: the file cannot be written.
    """
    # A range of elements is a range of bytes in plain chunks in C order only.
    array = array_metadata(array_dir, key=key)
    if not array.coding.is_plain or array.coding.strides is not None:
        raise UnsupportedError(
            "cannot write part of an encoded chunk", file=str(array_dir), key=key
        )
    chunk_bytes = array.coding.n_bytes
    if offset + len(data) > chunk_bytes:
        raise ValueError(
            f"bytes {offset}–{offset + len(data)} exceed the chunk size of {chunk_bytes} bytes"
        )
    path = array_dir / array.names.name(tuple(index))
    with translate_os_errors(str(path), doing="write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # Several processes may extend the file at once; all set the same length, and none
            # shortens it.
            if os.fstat(fd).st_size < chunk_bytes:
                os.ftruncate(fd, chunk_bytes)
            # pwrite may write less than requested.
            n_written = 0
            while n_written < len(data):
                n_written += os.pwrite(fd, data[n_written:], offset + n_written)
        finally:
            os.close(fd)


def remove_arrays(checkpoint_dir: Path, key_prefix: str) -> list[str]:
    """Remove the arrays and ShardedObjects whose keys begin with a prefix.

    Only one process may call this, and none may read the checkpoint at the same time. A manifest is
    deleted, as its checksums would no longer match.

    Returns:
        The keys that were removed.

    Raises:
        UsageError: the prefix is empty.
        StorageError: a file or directory cannot be removed.
    """
    check_prefix(key_prefix)
    keys = keys_with_prefix(_entry_keys(checkpoint_dir), key_prefix, checkpoint_dir)
    if keys:
        delete_file(checkpoint_dir / MANIFEST)
    for key in keys:
        # Rename the directory to a name that readers ignore before its files are deleted, so that
        # an interruption leaves all of the entry or nothing.
        entry_dir = checkpoint_dir / key
        removed_dir = entry_dir.with_name(_REMOVED)
        with translate_os_errors(str(entry_dir), doing="remove"):
            shutil.rmtree(removed_dir, ignore_errors=True)
            entry_dir.rename(removed_dir)
            sync_folder(entry_dir.parent)
            shutil.rmtree(removed_dir)
        # A key with slashes has directories around it; remove those that are empty now.
        for folder in entry_dir.relative_to(checkpoint_dir).parents[:-1]:
            with suppress(OSError):  # the folder is not empty
                (checkpoint_dir / folder).rmdir()
    return keys


def _entry_keys(checkpoint_dir: Path) -> list[str]:
    """List the directories of arrays and ShardedObjects, nested directories first."""
    store = LocalStore(checkpoint_dir)
    keys = [
        folder
        for folder, listing, is_array in walk_folders(
            store, is_array=lambda folder, listing: ARRAY_FILE in listing
        )
        if folder
        and (is_array or any(is_sharded_object(f"{folder}/{Path(name).stem}") for name in listing))
    ]
    return keys[::-1]
