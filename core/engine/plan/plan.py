"""Make a plan: source catalog × target catalog → proven work.

``make_plan`` shows, before any byte moves, that

* every target fragment belongs to an array that has a position in an output file, and the
  fragments of an array tile it;
* the arrays of an output file do not overlap, and every one of them is filled;
* the target fragments of a tensor cover it, and every element that they require has a source (or
  is zero by rule);
* where sources overlap, one is the *primary* and the others are *copies* to be compared with it.

The plan does not store the matches: ``Plan.match`` derives the match of a key again when the key is
copied, so that the fragments of all keys never exist at once. The plan holds metadata only, and
their memory counts like that of buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from core.arrays.dtypes import itemsize
from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.decoded import DEFAULT_CACHE_BYTES, decoding_bytes
from core.engine.catalog.file_image import FileImage
from core.engine.plan.match import Match, match
from core.engine.plan.memory import DECODER_BYTES, MIB, RUNTIME_BYTES
from core.engine.plan.positions import ArrayCoverage, Places
from core.errors import CapacityError
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.plan.items import Portion

DEFAULT_THREADS = 2
DEFAULT_BUFFER_BYTES = 24 * MIB
"""Buffer size per thread.

Runs that are consecutive on both sides use one MiB of it, splits and merges along an inner axis one
to four MiB; transposed sources profit from the full size.
"""
MIN_BUFFER_BYTES = MIB
TENSOR_BYTES = 4 << 10
"""Metadata per tensor: catalog entries, path in a nested state, header text, manifest line."""
PIECE_BYTES = 3 << 9
"""Metadata per source fragment and per placed array."""
MATCH_BYTES = 1 << 10
"""Memory per fragment of the tensor that is being copied, in addition to ``PIECE_BYTES``."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Proven work, derived key by key.

    Args:
        source, target: catalogs of the source and the target.
        places: positions of the target's arrays.
        threads: number of copying threads.
        buffer_bytes: maximum size of a thread's buffers.
        read_bytes: source bytes to read, copies included.
        write_bytes: bytes of the target's arrays.
        file_bytes: bytes of all output files.
        n_fragments: number of source fragments that are read.
        n_copies: number of replicas to compare.
        memory_bytes: memory that the process needs.
        metadata_bytes: the part of ``memory_bytes`` that is metadata and cannot be reduced.
        cache_bytes: cache for decoded units of encoded arrays; 0 if nothing is encoded.
        compares: copies are compared with the primary; otherwise they are not read.
        n_ignored: number of copies that are not compared.
        copy_bytes: the part of ``read_bytes`` that belongs to copies.
        is_share: the target is only the part that one of several processes fills.
    """

    source: Catalog
    target: TargetCatalog
    places: Places
    threads: int
    buffer_bytes: int
    read_bytes: int
    write_bytes: int
    file_bytes: int
    n_fragments: int
    n_copies: int
    memory_bytes: int
    metadata_bytes: int = 0
    cache_bytes: int = 0
    compares: bool = True
    n_ignored: int = 0
    copy_bytes: int = 0
    is_share: bool = False

    @property
    def least_read_bytes(self) -> int:
        """Minimum number of source bytes to read: every required element once."""
        return self.read_bytes - self.copy_bytes

    @property
    def images(self) -> Sequence[FileImage]:
        """Descriptions of the files to write."""
        return self.places.images

    def keys(self) -> Iterator[str]:
        """Yield the keys that have arrays to fill, in order."""
        return _keys(self.target)

    def portions(self) -> Iterator[Portion]:
        """Yield the work of all keys, each as one portion, as ``copy.run.Work`` defines."""
        from core.engine.plan.items import Portion

        return (Portion(number, self.match(key)) for number, key in enumerate(self.keys()))

    def match(self, key: str) -> Match:
        """Derive the match of one key again."""
        work = match(
            key,
            self.source.find(key),
            self.target.tensor(key),
            covers=not self.is_share,
        )
        return work if self.compares else replace(work, copies=())


@dataclass(slots=True)
class _Totals:
    """Sums over the matches of all keys so far.

    Args:
        decode_bytes: largest memory that decoding one tensor's encoded arrays takes.
        most_fragments: largest number of source fragments of one tensor.
    """

    read_bytes: int = 0
    copy_bytes: int = 0
    n_fragments: int = 0
    n_copies: int = 0
    decode_bytes: int = 0
    most_fragments: int = 0
    n_ignored: int = 0

    def add(self, work: Match) -> None:
        """Add the match of one key."""
        # Zeros by rule have no array: they are written, but not read.
        stored = [(box, fragment) for box, fragment in work.pieces if fragment.array is not None]
        n_copies = len(work.copies)
        n_fragments = len(stored) + n_copies
        size = itemsize(work.dtype)
        copy_bytes = size * sum([prod(box.shape) for box, _, _ in work.copies])
        self.read_bytes += size * sum([prod(box.shape) for box, _ in stored]) + copy_bytes
        self.copy_bytes += copy_bytes
        self.n_fragments += n_fragments
        self.most_fragments = max(self.most_fragments, n_fragments, len(work.pairs))
        self.n_copies += n_copies
        self.decode_bytes = max(
            self.decode_bytes, decoding_bytes([fragment for _, fragment in stored])
        )


def make_plan(
    source: Catalog,
    target: TargetCatalog,
    images: Sequence[FileImage],
    *,
    threads: int = DEFAULT_THREADS,
    memory_bytes: int | None = None,
    beside_bytes: int = 0,
    compares: bool = True,
    is_share: bool = False,
) -> Plan:
    """Make the plan that fills the target's arrays from the source.

    Args:
        source: a catalog whose arrays have extents; it has every key of the target.
        target: a catalog whose arrays the images place by name; a tied tensor is one array.
        images: the files to write, from the target format's ``lay_out``.
        threads: number of copying threads.
        memory_bytes: memory limit of the process, imports included; None for no limit.
        beside_bytes: memory that the caller uses for other purposes; it counts against the limit.
        compares: compare copies with the primary; otherwise they are not read.
        is_share: the target is only the part that this process holds or requests
            (``core.dist_checkpointing._live.share``, ``core.dist_checkpointing._live.tensors``):
            its fragments need not cover their tensors, nor fill the arrays.

    Raises:
        MissingShardError: the source lacks a tensor, or a region that the target requires.
        CorruptError: boxes are out of bounds, shapes differ, target arrays have holes or are
            written twice, or file images are invalid.
        UnsupportedError: a cast is not supported.
        CapacityError: the work does not fit into ``memory_bytes``.
    """
    # Match every tensor, and add up the work. No match is stored, see the module's docstring.
    places = Places(images)
    totals = _Totals()
    coverage = ArrayCoverage(places)
    for key in _keys(target):
        tensor = target.tensor(key)
        fragments = tensor.fragments()
        work = match(
            key,
            source.find(key),
            tensor,
            fragments=fragments,
            covers=not is_share,
        )
        coverage.add(key, fragments)
        if not compares:
            totals.n_ignored += len(work.copies)
            work = replace(work, copies=())
        totals.add(work)
    # Only now can arrays with holes be detected: several keys may share an array.
    if not is_share:
        coverage.finish()

    # Divide the memory between buffers and caches.
    n_tensors = sum(1 for _ in target.all_tensors())
    metadata = _Metadata(n_tensors, len(places), totals.n_fragments, totals.most_fragments)
    memory = _divide_memory(threads, metadata, totals.decode_bytes, memory_bytes, beside_bytes)
    return Plan(
        source=source,
        target=target,
        places=places,
        threads=memory.threads,
        buffer_bytes=memory.buffer_bytes,
        read_bytes=totals.read_bytes,
        write_bytes=places.n_bytes,
        file_bytes=sum(image.size for image in images),
        n_fragments=totals.n_fragments,
        n_copies=totals.n_copies,
        memory_bytes=memory.n_bytes,
        metadata_bytes=metadata.n_bytes,
        cache_bytes=memory.cache_bytes,
        compares=compares,
        n_ignored=totals.n_ignored,
        copy_bytes=totals.copy_bytes,
        is_share=is_share,
    )


def _keys(target: TargetCatalog) -> Iterator[str]:
    """Yield the target's keys, of tied tensors the first: they are written once."""
    return (key for key, _ in target.all_tensors() if key not in target.ties)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Division of the process's memory.

    Args:
        threads: number of copying threads; fewer than requested if decoding would take too much.
        buffer_bytes: buffer size per thread.
        cache_bytes: cache for decoded units.
        n_bytes: memory that the process needs.
    """

    threads: int
    buffer_bytes: int
    cache_bytes: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Amount of metadata.

    Args:
        n_tensors: number of target tensors, hidden ones included.
        n_arrays: number of target arrays that have a position in a file.
        n_fragments: number of source fragments.
        most_fragments: largest number of source fragments of one tensor.
    """

    n_tensors: int
    n_arrays: int
    n_fragments: int
    most_fragments: int

    @property
    def n_bytes(self) -> int:
        """Memory that the metadata take."""
        fragment_bytes = PIECE_BYTES * (self.n_arrays + self.n_fragments)
        # Matches exist one at a time, so that only the largest one counts.
        return TENSOR_BYTES * self.n_tensors + fragment_bytes + MATCH_BYTES * self.most_fragments


def _divide_memory(
    threads: int,
    metadata: _Metadata,
    decode_bytes: int,
    memory_bytes: int | None,
    beside_bytes: int,
) -> _Memory:
    """Divide the memory between buffers and caches.

    Args:
        metadata: the metadata, which take memory as long as the work lasts.
        decode_bytes: maximum memory for decoding one unit of an encoded array; 0 if nothing is
            encoded.
        memory_bytes: memory limit of the process; None for no limit.
        beside_bytes: memory that the caller uses for other purposes.

    Raises:
        CapacityError: the work does not fit.
    """
    fixed = beside_bytes + RUNTIME_BYTES + metadata.n_bytes + (DECODER_BYTES if decode_bytes else 0)
    buffer_bytes, cache_bytes = DEFAULT_BUFFER_BYTES, DEFAULT_CACHE_BYTES if decode_bytes else 0
    if memory_bytes is not None:
        # Every thread decodes a unit of its own: use only as many threads as fit.
        if decode_bytes:
            n_fitting = (memory_bytes - fixed) // (MIN_BUFFER_BYTES + decode_bytes)
            threads = max(1, min(threads, n_fitting))

        # Buffers come first: below the minimum there is no work, without a cache it is only slower.
        free_bytes = memory_bytes - fixed - threads * decode_bytes
        buffer_bytes = min(buffer_bytes, free_bytes // threads)
        if buffer_bytes < MIN_BUFFER_BYTES:
            least = fixed + threads * (MIN_BUFFER_BYTES + decode_bytes)
            is_fitting_one = fixed + MIN_BUFFER_BYTES + decode_bytes <= memory_bytes
            load = "1 thread" if threads == 1 else f"{threads} threads"
            load += (
                " and 1 array" if metadata.n_arrays == 1 else f" and {metadata.n_arrays:,} arrays"
            )
            if metadata.n_fragments > metadata.n_arrays:
                load += f" from {metadata.n_fragments:,} source fragments"
            if decode_bytes:
                load += (
                    f", plus the largest encoded chunk ({-(-decode_bytes // MIB):,} MiB decoded)"
                )
            if beside_bytes > RUNTIME_BYTES:
                load += f", plus {-(-beside_bytes // MIB):,} MiB for objects and network buffers"
            raise CapacityError(
                f"{load} need {-(-least // MIB):,} MiB of memory, "
                f"but the limit is {memory_bytes // MIB:,} MiB",
                hint=f"set --memory to at least {-(-least // MIB)}MiB"
                + (", or use fewer threads" if is_fitting_one and threads > 1 else ""),
            )
        cache_bytes = min(cache_bytes, free_bytes - threads * buffer_bytes)
    need = fixed + threads * (buffer_bytes + decode_bytes) + cache_bytes
    return _Memory(threads, buffer_bytes, cache_bytes, need)
