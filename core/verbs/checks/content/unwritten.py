"""CK716: weights in holes of files, or raw chunks of zeros, found without reading the data.

An interrupted copy, a preallocated file, and a crash before the data reached the disk leave files
of the right length that read as zeros. A header or an end record tells
(``core.verbs.checks.containers.extents``); these checks cover the data itself:

- Holes: file systems record the ranges of a file that were never written. Copies (``rsync -S``,
  ``tar -S``) and compressing file systems make holes of true zeros, so a hole counts as zeros, no
  more: it is not reported where zeros are usual (``values``), where the container's CRC-32 is that
  of zeros, and where it is less than half of an array. Compressed data has no block of zeros.
- Chunks of zarr that are not compressed, files that begin with zeros: a sample is read. Some chunks
  of several are reported; a tensor of zeros alone may be meant so.

Vocabularies are left out: their last rows may be padding, at toy sizes all rows of a shard.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from core.engine.catalog.stored import n_stored_bytes, stored_bytes_of
from core.errors import CheckpointingException
from core.verbs.checks.finding import Finding, get_code
from core.verbs.checks.subject import Check, Subject

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore

UNWRITTEN = get_code("CK716")


_VOCABULARY = re.compile(r"embed|wte|lm_head|output_layer|vocab", re.IGNORECASE)
_COMPRESSED = re.compile(r"zstd|gzip|zlib|blosc|lz4|bz2|lzma|deflate")
"""Names of encodings whose bytes are not zeros where the elements are."""
_N_SAMPLES = 16
_SAMPLE_BYTES = 512


def check_unwritten(subject: Subject) -> Iterator[Finding]:
    """Report weights in holes of files, and raw chunks of zeros among chunks that are not."""
    catalog = subject.salvaged.catalog
    if catalog is None:
        return
    holes, zeros = _holes(subject), _files_beginning_with_zeros(subject)
    if not holes and not zeros:
        return
    from core.verbs.checks.content.values import is_zero_unusual

    for key, tensor in catalog.tensors.items():
        # A single array of zarr has the name of its directory.
        if not is_zero_unusual(key, tensor) or _VOCABULARY.search(f"{subject.path.name}/{key}"):
            continue
        try:
            fragments = [item for item in catalog.fragments(key) if item.array is not None]
        except CheckpointingException:
            continue  # reported by ``check_extents``
        zero_chunks = {
            array.extent.file
            for array in (fragment.array for fragment in fragments)
            if array is not None and _is_zero_chunk(array, zeros, subject.store)
        }
        for fragment in fragments:
            array = fragment.array
            assert array is not None
            file = array.extent.file
            n_bytes, n_lost = _measure_loss(array, subject.files.get(file, 0), holes.get(file, ()))
            if n_lost:
                message = (
                    f"{n_lost} of {n_bytes} bytes are in holes in the file, which read as zeros"
                )
            elif file in zero_chunks and len(zero_chunks) < len(fragments):
                message = (
                    "a sample of this chunk is all zeros, but the weight's other chunks are not"
                )
            else:
                continue
            yield UNWRITTEN.finding(message, file=file, key=key)


def _holes(subject: Subject) -> Mapping[str, Sequence[tuple[int, int]]]:
    """Return the holes of all files that have some, except those that are almost only holes."""
    holes = {}
    for name in subject.files.keys() - subject.hollow - subject.ends.errors.keys():
        with suppress(CheckpointingException):  # reported by ``check_beginnings``
            if spans := subject.store.holes(name):
                holes[name] = spans
    return holes


def _files_beginning_with_zeros(subject: Subject) -> set[str]:
    """Return the files that begin with zeros, which no earlier finding is about."""
    heads = subject.ends.heads.items()
    return {
        name for name, head in heads if not any(head) and not subject.is_covered_by_finding(name)
    }


def _is_zero_chunk(array: StoredArray, files: Container[str], store: ReadStore) -> bool:
    """Return whether an array is a file of its own, without a header, and a sample is zeros.

    Args:
        files: the files that begin with zeros.
    """
    from core.verbs.checks.containers.extents import WITHOUT_HEADER

    if array.extent.file not in files or array.extent.offset:
        return False
    encoding = array.extent.encoding
    if encoding is not None and encoding.name not in WITHOUT_HEADER:
        return False
    size = store.size(array.extent.file)
    step = max(1, size // _N_SAMPLES)
    return not any(
        any(store.read(array.extent.file, at, min(_SAMPLE_BYTES, size - at)))
        for at in range(0, size, step)
    )


def _measure_loss(
    array: StoredArray, size: int, holes: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Return the stored bytes of an array, and how many lie in holes; 0 if they may be true zeros.

    Args:
        size: bytes of its file.
        holes: ranges of the file, in bytes.
    """
    from core.arrays.checksum import crc32_of_zeros

    extent, n_bytes, is_packed = array.extent, n_stored_bytes(array), False
    if extent.encoding is not None:
        n_bytes = stored_bytes_of(extent.encoding) or size - extent.offset
        is_packed = _COMPRESSED.search(extent.encoding.name) is not None
    stop = extent.offset + n_bytes
    n_lost = sum(
        max(0, min(hole_stop, stop) - max(hole_start, extent.offset))
        for hole_start, hole_stop in holes
    )
    if not is_packed and (2 * n_lost < n_bytes or extent.crc == crc32_of_zeros(n_bytes)):
        n_lost = 0
    return n_bytes, n_lost


CHECKS = (Check(check_unwritten),)
