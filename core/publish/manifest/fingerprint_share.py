"""Compute fingerprints with a team of ranks, each of which reads an equal number of bytes.

::

    tensors   |   a   |         b         | c |      d      |   in order, in bands of rows
    ranks     |     0     |     1     |     2     |   3     |   equal byte ranges

A band belongs to the rank whose byte range contains its first byte. A fingerprint is a sum, so the
lead adds the sums of the ranks. The lead reads tensors again that a rank could not read, and
reports their problems as a single process does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from math import prod
from pathlib import Path

from core.arrays.box import Box, flat_offset
from core.arrays.dtypes import itemsize
from core.engine.calibration.choice import choose_device
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.decoded import DEFAULT_CACHE_BYTES
from core.engine.device.device import FINGERPRINT, Device
from core.engine.fingerprint.definition import LANES, Fingerprint, add_lanes, form_of, format_lanes
from core.engine.fingerprint.kernel import Products, fastest_products
from core.engine.fingerprint.sums import FormSum
from core.engine.plan.box_reader import BoxReader, TensorReader, bands, fit_threads
from core.engine.plan.memory import RUNTIME_BYTES, limit_objects
from core.engine.scan.share import Meter, divide_in_order
from core.engine.team.agreement import observe_files, require_agreement
from core.engine.team.protocol import (
    ALONE,
    Figures,
    StoppedError,
    Team,
    broadcast_result,
    gather_results,
)
from core.engine.team.threads import ThreadGroup
from core.errors import CheckpointingException
from core.files.store import ReadStore, list_files_below
from core.megatron.rules.rules import Rules
from core.opening.canonical import canonical
from core.opening.open import FILL, Checkpoint, open_checkpoint
from core.progress import OnProgress, Phase, begin_phase
from core.publish.manifest.fingerprint_read import read_fingerprints
from core.values import dataclass

_BAND_BYTES = 1 << 20
_GROUP = 32
"""Number of bands that a thread takes at a time."""
_THREAD_BYTES = 8 * _BAND_BYTES
"""Memory of a reading thread."""


@dataclass(frozen=True, slots=True)
class SharedFingerprints:
    """Fingerprints computed by a team.

    Args:
        fingerprints: key → fingerprint; empty on ranks other than the lead.
        figures: bytes and time of each worker; empty without a team.
    """

    fingerprints: dict[str, Fingerprint] = field(default_factory=dict)
    figures: tuple[Figures, ...] = ()


def fingerprints_of_directory(
    path: Path,
    *,
    rules: Rules,
    threads: int,
    memory_bytes: int | None = None,
    progress: OnProgress | None = None,
    team: Team = ALONE,
    device: Device | None = None,
) -> SharedFingerprints:
    """Compute the fingerprints of a checkpoint; every rank calls this with the same arguments.

    Args:
        path: as for ``core.opening.open.open_checkpoint``.
        rules: the layout rules.
        threads: number of threads of each rank.
        memory_bytes: memory limit of each process; None for no limit.
        progress: called with the number of bytes that this process has read.
        team: divides the reading.
        device: may compute the fingerprints; None for the CPU path.

    Raises:
        CheckpointingException: the checkpoint cannot be read, or a tensor does not fit in memory.
        WorkerError: a rank failed, or the ranks find different checkpoints.
    """
    begin_phase(progress, Phase.FINGERPRINTING)
    with limit_objects(memory_bytes):
        opened = open_on_all_ranks(path, team=team)
    try:
        catalog = canonical(opened, rules=rules).catalog
        return shared_fingerprints(
            catalog,
            opened.store,
            threads=threads,
            memory_bytes=memory_bytes,
            progress=progress,
            team=team,
            device=device,
        )
    finally:
        opened.store.close()


def open_on_all_ranks(
    path: Path,
    *,
    iteration: int | None = None,
    needs_optimizer: bool = True,
    needs_masters: bool = True,
    missing_chunks: str = FILL,
    on_open: Callable[[int], None] | None = None,
    team: Team,
) -> Checkpoint:
    """Open a checkpoint on every rank, and check that all ranks find the same one.

    Args:
        path, iteration, needs_optimizer, needs_masters, missing_chunks, on_open: as for
            ``core.opening.open.open_checkpoint``.
        team: the ranks.

    Raises:
        CheckpointingException: the checkpoint cannot be opened.
        WorkerError: a rank failed, or the ranks find different checkpoints.
    """
    # A network file system may show hosts different states: compare the files with their sizes.
    return require_agreement(
        team,
        lambda: open_checkpoint(
            path,
            iteration=iteration,
            needs_optimizer=needs_optimizer,
            needs_masters=needs_masters,
            missing_chunks=missing_chunks,
            on_open=on_open,
        ),
        lambda opened: (
            str(opened.path),
            opened.format.name,
            observe_files(opened.store, list_files_below(opened.store)),
        ),
        subject=str(path),
    )


def shared_fingerprints(
    catalog: Catalog,
    store: ReadStore,
    keys: Iterable[str] | None = None,
    *,
    threads: int,
    memory_bytes: int | None = None,
    progress: OnProgress | None = None,
    team: Team = ALONE,
    device: Device | None = None,
) -> SharedFingerprints:
    """Compute fingerprints of tensors; the lead alone reads tensors that another rank could not.

    Args:
        catalog: in canonical form, the same on every rank.
        store: the checkpoint's files.
        keys: keys of the tensors, taken from the lead; None for all.
        threads, memory_bytes: number of threads and memory limit of each rank.
        progress: called with the number of bytes that this process has read.
        team: divides the reading; every rank calls this.
        device: this rank's device, which may compute the fingerprints.

    Raises:
        CheckpointingException: a tensor cannot be read, or does not fit in memory.
        WorkerError: a rank failed.
    """
    wanted = list(catalog.tensors if keys is None else keys)
    if team.size == 1:
        return SharedFingerprints(
            read_fingerprints(
                catalog,
                store,
                wanted,
                threads=threads,
                memory_bytes=memory_bytes,
                progress=progress,
                device=device,
            )
        )
    begin_phase(progress, Phase.FINGERPRINTING)
    readable = readable_fingerprints(
        catalog, store, wanted, threads=threads, memory_bytes=memory_bytes, team=team, device=device
    )

    # The lead keeps the fingerprints; an error in reading the others is raised on every rank.
    fingerprints = dict(readable.fingerprints)

    def read_missing() -> None:
        missing = [key for key in wanted if key not in fingerprints]
        if missing:
            fingerprints.update(
                read_fingerprints(
                    catalog, store, missing, threads=threads, memory_bytes=memory_bytes
                )
            )

    broadcast_result(team, read_missing)
    return SharedFingerprints(
        {key: fingerprints[key] for key in wanted if key in fingerprints}, readable.figures
    )


def readable_fingerprints(
    catalog: Catalog,
    store: ReadStore,
    keys: Iterable[str],
    *,
    threads: int,
    memory_bytes: int | None = None,
    team: Team,
    device: Device | None = None,
) -> SharedFingerprints:
    """Compute the fingerprints of the tensors that no rank failed to read.

    Args:
        catalog, store, threads, memory_bytes, team, device: as for ``shared_fingerprints``.
        keys: keys of the tensors, taken from the lead.

    Raises:
        WorkerError: a rank failed, or the ranks find different tensors.
    """
    wanted = broadcast_result(team, lambda: list(keys))

    def prepare() -> _FingerprintPass:
        return _FingerprintPass(
            catalog, store, wanted, team, choose_device(device, [FINGERPRINT], threads=threads)
        )

    work = require_agreement(team, prepare, _FingerprintPass.observed_state, subject=store.label)
    parts = gather_results(team, lambda: work.read_share(threads, memory_bytes))
    if parts is None:
        return SharedFingerprints()
    return SharedFingerprints(work.join(parts), tuple(part.figures for part in parts))


@dataclass(frozen=True, slots=True)
class _RankSums:
    """The sums that one rank has computed.

    Args:
        figures: bytes and time of the rank.
        sums: key → (number of bytes read, their sums).
        failed: keys of tensors that the rank could not read.
    """

    figures: Figures
    sums: dict[str, tuple[int, tuple[int, ...]]]
    failed: frozenset[str]


class _FingerprintPass:
    """One rank's share of reading tensors for their fingerprints.

    Args:
        catalog: in canonical form.
        store: the checkpoint's files.
        keys: keys of the tensors.
        team: divides the reading.
        device: computes the fingerprints; None for the CPU path.
    """

    def __init__(
        self,
        catalog: Catalog,
        store: ReadStore,
        keys: Sequence[str],
        team: Team,
        device: Device | None = None,
    ) -> None:
        self._device = device
        self._catalog = catalog
        self._store = store
        self._team = team
        self._share = divide_in_order(team, ((key, catalog.tensors[key].n_bytes) for key in keys))
        self._threads = ThreadGroup("fingerprints")
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._failed: set[str] = set()
        self._meter = Meter()

    def observed_state(self) -> object:
        """Return the part of the state that is equal on all ranks if their shares fit together."""
        return [
            (key, self._catalog.tensors[key].dtype, self._catalog.tensors[key].shape)
            for key in self._share.spans
        ]

    def read_share(self, threads: int, memory_bytes: int | None) -> _RankSums:
        """Read this rank's share, and return its sums.

        Args:
            threads: number of reading threads.
            memory_bytes: memory limit of the process; None for no limit.
        """
        begun = time.monotonic()
        self._meter = Meter(self._team, self._share.n_bytes)
        cache_bytes = DEFAULT_CACHE_BYTES
        if memory_bytes is not None:
            fit = fit_threads(
                (self._catalog.tensors[key] for key in self._share.spans),
                threads,
                memory_bytes - RUNTIME_BYTES - self._team.runtime_bytes,
                thread_bytes=_THREAD_BYTES,
            )
            threads, cache_bytes = fit.n_threads, fit.cache_bytes
        if threads:  # else the lead reports that the memory is too small
            reader = BoxReader(self._catalog, self._store, cache_bytes=cache_bytes)
            items = self._threads.share(self._items(reader))
            with fastest_products(self._share.n_bytes, self._device) as products:
                self._threads.run(lambda: self._work(items, products), threads)
        self._meter.finish()
        rank, n_bytes = self._team.rank, sum(n for n, _ in self._sums.values())
        figures = Figures(rank, self._team.hosts[rank], n_bytes, 0, time.monotonic() - begun)
        return _RankSums(figures, self._sums, frozenset(self._failed))

    def _items(self, reader: BoxReader) -> Iterator[tuple[str, TensorReader, list[Box]]]:
        """Yield this rank's bands, several of one tensor at a time; record tensors that fail."""
        for key, (start, stop) in self._share.spans.items():
            if start == stop or not self._share.meets(key):
                continue
            meta = self._catalog.tensors[key]
            size = itemsize(meta.dtype)
            # Bands consist of complete rows, so each is one byte range and has one owner.
            boxes = [
                box
                for box in bands(meta.shape, size, _BAND_BYTES)
                if self._share.is_own(key, size * flat_offset(box, meta.shape))
            ]
            if not boxes:
                continue
            try:
                tensor = reader.tensor(key)
            except CheckpointingException:
                self._failed.add(key)
                continue
            # Only the copy engine casts, so such a tensor is left to the lead.
            if tensor.dtype != meta.dtype:
                self._failed.add(key)
                continue
            for start in range(0, len(boxes), _GROUP):
                yield key, tensor, boxes[start : start + _GROUP]

    def _work(
        self, items: Iterator[tuple[str, TensorReader, list[Box]]], products: Products
    ) -> None:
        # Each thread has a buffer for a band, and one for scattered elements of it.
        out, raw = (memoryview(bytearray(_BAND_BYTES)) for _ in range(2))
        for key, tensor, boxes in items:
            try:
                self._sum_up(key, tensor, boxes, out, raw, products)
            except StoppedError:
                raise
            except CheckpointingException:
                self._failed.add(key)

    def _sum_up(
        self,
        key: str,
        tensor: TensorReader,
        boxes: Sequence[Box],
        out: memoryview,
        raw: memoryview,
        products: Products,
    ) -> None:
        """Read bands of a tensor, and add them to its sums.

        Args:
            boxes: the bands.
            out, raw: buffers of the thread.
        """
        size = itemsize(tensor.dtype)
        total = FormSum(form_of(tensor.shape, size), products)
        for box in boxes:
            if self._threads.is_stopped():
                return
            data = out[: prod(box.shape) * size]
            tensor.read(box, data, raw)
            total.add_run(size * flat_offset(box, tensor.shape), data)
            self._meter.advance(len(data))
        # A group that failed or was stopped halfway has added nothing.
        with self._lock:
            n_bytes, lanes = self._sums.get(key, (0, (0,) * LANES))
            self._sums[key] = n_bytes + total.n_bytes, add_lanes((lanes, total.lanes))

    def join(self, parts: Sequence[_RankSums]) -> dict[str, Fingerprint]:
        """Return the fingerprints of tensors whose bytes have all been read; runs on the lead."""
        # A tensor counts only if no rank failed to read a part of it.
        failed = frozenset[str]().union(*(part.failed for part in parts))
        sums: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
        for part in parts:
            for key, rank_sum in part.sums.items():
                sums.setdefault(key, []).append(rank_sum)
        fingerprints: dict[str, Fingerprint] = {}
        for key, rank_sums in sums.items():
            tensor = self._catalog.tensors[key]
            if key not in failed and sum(n_bytes for n_bytes, _ in rank_sums) == tensor.n_bytes:
                text = format_lanes(add_lanes(lanes for _, lanes in rank_sums))
                fingerprints[key] = Fingerprint(tensor.dtype, tensor.shape, text)
        return fingerprints
