"""Measure the values of tensors for ``ckpt inspect --stats``: one pass, in bounded memory.

Tensors are read band by band in their global shape, so that a box that several ranks hold counts
once, and vocabulary padding counts as stored. The numbers are those in the files: float8 weights
are not multiplied by their scales.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from core.arrays.dtypes import itemsize
from core.catalog.decoded import DEFAULT_CACHE_BYTES, decoding_bytes
from core.catalog.key_patterns import fold_keys
from core.convert.job import DEFAULT_MEMORY_BYTES
from core.errors import CapacityError, CheckpointingException, UnsupportedError
from core.files.syscalls import allowed_cores
from core.numbers.difference import has_numbers
from core.numbers.statistics import ValueStatistics, describe, merge_statistics
from core.plan.box_reader import BoxReader, TensorReader, bands
from core.plan.plan import DECODER_BYTES, MIB, RUNTIME_BYTES
from core.team.threads import ThreadGroup

if TYPE_CHECKING:
    from core.arrays.box import Box
    from core.catalog.catalog import Catalog, TensorMeta
    from core.opening.open import Checkpoint

_BAND_BYTES = 1 << 20
"""Size of a band; two fit into the cache of a core."""
_THREAD_BYTES = 8 * _BAND_BYTES
"""Memory of one thread: its buffers, and the temporary arrays of a block."""
_GROUP = 32
"""Number of bands that a thread takes at a time."""

Progress = Callable[[int, int], None]
"""Called with (bytes read, total bytes)."""


@dataclass(frozen=True, slots=True)
class FoldedStatistics:
    """The values of tensors whose names differ only in their numbers, such as those of all layers.

    Args:
        label: the common name, a pattern such as ``layers.[0-3].weight``.
        members: the tensors, in their order; they have one dtype and shape.
        total: all their values together; None if the dtype has no numbers.
        least, greatest: keys of the members with the extremes of ``total``; None without numbers.
        least_std, greatest_std: (key, standard deviation) of the members with the extreme ones;
            None without numbers.
    """

    label: str
    members: tuple[TensorMeta, ...]
    total: ValueStatistics | None
    least: str | None = None
    greatest: str | None = None
    least_std: tuple[str, float] | None = None
    greatest_std: tuple[str, float] | None = None

    def numbers_of(self, key: str) -> str:
        """Return what tells a member from the others: ``layers.2``, or ``layers.2 experts.5``."""
        names = key.split(".")
        return " ".join(
            ".".join(names[max(at - 1, 0) : at + 1])
            for at, name in enumerate(self.label.split("."))
            if name != names[at]
        )


def measure_tensors(
    checkpoint: Checkpoint,
    view: Catalog,
    tensors: Iterable[TensorMeta],
    *,
    threads: int | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
) -> dict[str, ValueStatistics | None]:
    """Read tensors and describe the values of each.

    Args:
        view: the catalog that ``inspect`` shows; a tensor that it lacks is one of the rank files.
        threads: number of threads; None for the number of processors. Fewer run if the memory is
            too small for them.
        progress: called from the reading threads.

    Returns:
        Description by key; None for a tensor whose dtype or kind has no numbers to read.

    Raises:
        CapacityError: the memory limit is too low for one thread.
        CheckpointingException: a tensor cannot be read.
    """
    # Each tensor is read from the catalog that has it.
    sources: list[tuple[Catalog, TensorMeta]] = []
    statistics: dict[str, ValueStatistics | None] = {}
    for meta in tensors:
        catalog = view if meta.key in view.tensors else checkpoint.catalog
        statistics[meta.key] = None
        if has_numbers(meta.dtype) and meta.key not in catalog.unsupported:
            sources.append((catalog, meta))

    # Divide the memory, and read in threads.
    n_threads, cache_bytes = _fit_to_memory(sources, threads or len(allowed_cores()), memory_bytes)
    readers = {
        id(catalog): BoxReader(catalog, checkpoint.store, cache_bytes=cache_bytes)
        for catalog in (view, checkpoint.catalog)
    }
    jobs = ((readers[id(catalog)], meta) for catalog, meta in sources)
    total_bytes = sum(meta.n_bytes for _, meta in sources)
    statistics.update(_Measurement(jobs, total_bytes, progress).run(n_threads))
    return statistics


def fold_statistics(
    tensors: Sequence[TensorMeta], statistics: Mapping[str, ValueStatistics | None]
) -> list[FoldedStatistics]:
    """Fold the tensors whose keys differ only in numbers, in order of first appearance.

    Args:
        statistics: description of each tensor by key.
    """
    metas = {meta.key: meta for meta in tensors}
    kinds = {key: (meta.dtype, meta.shape) for key, meta in metas.items()}
    return [
        _fold(label, [metas[key] for key in keys], statistics) for label, keys in fold_keys(kinds)
    ]


def _fold(
    label: str, members: Sequence[TensorMeta], statistics: Mapping[str, ValueStatistics | None]
) -> FoldedStatistics:
    """Merge the descriptions of some tensors, and find the members with the extremes."""
    parts = {meta.key: part for meta in members if (part := statistics[meta.key]) is not None}
    if not parts:
        return FoldedStatistics(label, tuple(members), None)
    leasts = {key: part.least for key, part in parts.items() if part.least is not None}
    greatests = {key: part.greatest for key, part in parts.items() if part.greatest is not None}
    stds = [(key, part.std) for key, part in parts.items() if part.std is not None]
    return FoldedStatistics(
        label,
        tuple(members),
        merge_statistics(list(parts.values())),
        least=min(leasts, key=leasts.__getitem__, default=None),
        greatest=max(greatests, key=greatests.__getitem__, default=None),
        least_std=min(stds, key=lambda pair: pair[1], default=None),
        greatest_std=max(stds, key=lambda pair: pair[1], default=None),
    )


def _fit_to_memory(
    sources: Iterable[tuple[Catalog, TensorMeta]], threads: int, memory_bytes: int
) -> tuple[int, int]:
    """Reduce the number of threads until they fit into the memory.

    Returns:
        The number of threads, and the size of the cache of decoded units (zarr chunks, deflated
        records); 0 if nothing is encoded.

    Raises:
        CapacityError: not even one thread fits.
    """
    unit_bytes = max(
        (decoding_bytes(catalog.fragments(meta.key)) for catalog, meta in sources), default=0
    )
    fixed = RUNTIME_BYTES + (DECODER_BYTES if unit_bytes else 0)
    free_bytes = memory_bytes - fixed
    threads = min(threads, free_bytes // (_THREAD_BYTES + unit_bytes))
    if threads < 1:
        n_mib = -(-(fixed + _THREAD_BYTES + unit_bytes) // MIB)
        raise CapacityError(
            f"--stats needs {n_mib:,} MiB of memory, but the limit is {memory_bytes // MIB:,} MiB",
            hint=f"set --memory to at least {n_mib}MiB",
        )
    spare_bytes = free_bytes - threads * (_THREAD_BYTES + unit_bytes)
    return threads, min(DEFAULT_CACHE_BYTES, spare_bytes) if unit_bytes else 0


@dataclass(slots=True)
class _MeasuredTensor:
    """A tensor that is being read: its reader, and what is known and missing of it."""

    key: str
    reader: TensorReader
    n_left: int
    parts: list[ValueStatistics] = field(default_factory=list)


class _Measurement:
    """One pass over tensors, in several threads.

    Args:
        tensors: (reader of its checkpoint, metadata) of each tensor.
        total_bytes: size of all tensors.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[BoxReader, TensorMeta]],
        total_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._items = self._all_items(tensors)
        self._total_bytes = total_bytes
        self._progress = progress
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._threads = ThreadGroup("stats")
        self._results: dict[str, ValueStatistics | None] = {}

    def run(self, n_threads: int) -> dict[str, ValueStatistics | None]:
        """Read everything and return the description of each tensor.

        Raises:
            CheckpointingException: the first error of a thread.
        """
        self._threads.run(self._work, n_threads)
        return self._results

    def _all_items(
        self, tensors: Iterable[tuple[BoxReader, TensorMeta]]
    ) -> Iterator[tuple[_MeasuredTensor, list[Box]]]:
        """Yield each tensor in groups of bands; called under the lock."""
        for reader, meta in tensors:
            try:
                tensor = reader.tensor(meta.key)
            except UnsupportedError:
                self._results[meta.key] = None
                continue
            except CheckpointingException as err:
                err.key = err.key or meta.key
                raise
            boxes = list(bands(tensor.shape, itemsize(tensor.dtype), _BAND_BYTES))
            groups = [boxes[at : at + _GROUP] for at in range(0, len(boxes), _GROUP)]
            # A tensor without elements has no bands.
            if not groups:
                self._results[meta.key] = ValueStatistics()
            job = _MeasuredTensor(meta.key, tensor, len(groups))
            for group in groups:
                yield job, group

    def _next_item(self) -> tuple[_MeasuredTensor, list[Box]] | None:
        """Return the next group of bands; None at the end."""
        with self._lock:
            return None if self._threads.is_stopped() else next(self._items, None)

    def _work(self) -> None:
        """Describe groups of bands until there are no more; the task of one thread."""
        out, raw = (memoryview(mmap.mmap(-1, _BAND_BYTES)) for _ in range(2))
        while (item := self._next_item()) is not None:
            job, boxes = item
            parts = []
            for box in boxes:
                if self._threads.is_stopped():
                    return
                data = out[: prod(box.shape) * itemsize(job.reader.dtype)]
                job.reader.read(box, data, raw)
                parts.append(describe(data, job.reader.dtype))
                self._advance(len(data))
            part = merge_statistics(parts)
            with self._lock:
                job.parts.append(part)
                job.n_left -= 1
                if job.n_left == 0:
                    self._results[job.key] = merge_statistics(job.parts)

    def _advance(self, n_bytes: int) -> None:
        """Report bytes that were read."""
        with self._lock:
            self._done_bytes += n_bytes
            done = self._done_bytes
        if self._progress is not None:
            self._progress(done, self._total_bytes)
