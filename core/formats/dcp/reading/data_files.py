"""Whether the data files that ``.metadata`` lists exist and are long enough."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from operator import add
from posixpath import join
from typing import TYPE_CHECKING

from core.errors import CheckpointingException, MissingShardError, Report, TruncatedError, raising
from core.formats.dcp.metadata import DcpMetadata

if TYPE_CHECKING:
    from core.files.store import ReadStore


METADATA = ".metadata"


def check_file_lengths(
    store: ReadStore, metadata: DcpMetadata, *, report: Report = raising
) -> None:
    """Check that every file that the metadata lists exists and is long enough.

    Args:
        store: the checkpoint.
        metadata: its metadata.
        report: receives an error for each file that is missing or too short.

    Raises:
        MissingShardError, TruncatedError: a file is missing or too short (default ``report``).
    """
    # Each file must reach to the end of its last item.
    ends = [0] * len(metadata.files)
    for file, end in _item_ends(metadata):
        ends[file] = max(ends[file], end)

    # The sizes of the files in bytes, None for missing ones. Listing directories is faster than a
    # look-up per file: 10⁵ of them may be missing.
    folders = {name.rpartition("/")[0] for name in metadata.files}
    existing = {join(folder, name) for folder in folders for name in store.files(folder)}
    # A web server lists nothing, and is asked for each file.
    sizes = [
        store.size(name) if name in existing or store.exists(name) else None
        for name in metadata.files
    ]
    short_files = {
        file: size for file, size in enumerate(sizes) if size is None or size < ends[file]
    }
    if not short_files:
        return

    # Report each of them with an entry that is lost with it.
    lost_keys = _first_lost_keys(metadata, {file: size or 0 for file, size in short_files.items()})
    for file, size in short_files.items():
        if size is None:
            error: CheckpointingException = MissingShardError(
                f"a file listed in {METADATA} is missing",
                hint="copy the checkpoint again, with all its files",
            )
        else:
            error = TruncatedError(
                f"the file is {size} bytes long, but {METADATA} places items up to byte "
                f"{ends[file]}",
                span=(size, ends[file]),
                hint="copy the checkpoint again, or use an older one",
            )
        error.file, error.key = metadata.files[file], lost_keys.get(file)
        report(error)


def _first_lost_keys(metadata: DcpMetadata, sizes: Mapping[int, int]) -> dict[int, str]:
    """Return the first entry, tensors before objects, that is lost with each truncated file.

    Args:
        sizes: number of a truncated file → its size in bytes, 0 if it is missing.

    Returns:
        File number → key.
    """
    chunk_keys = (repeat(tensor.key, tensor.n_chunks) for tensor in metadata.tensors.values())
    keys = chain(chain.from_iterable(chunk_keys), metadata.objects)
    lost_keys: dict[int, str] = {}
    for key, (file, end) in zip(keys, _item_ends(metadata), strict=True):
        if file in sizes and end > sizes[file]:
            lost_keys.setdefault(file, key)
    return lost_keys


def _item_ends(metadata: DcpMetadata) -> Iterator[tuple[int, int]]:
    """Yield file number and end, in bytes, of the items of all chunks and then of all objects."""
    yield from zip(
        metadata.file_index,
        map(add, metadata.item_offset, metadata.item_bytes),
        strict=True,
    )
    numbers = {name: file for file, name in enumerate(metadata.files)}
    for item in metadata.objects.values():
        yield numbers[item.file], item.offset + item.n_bytes
