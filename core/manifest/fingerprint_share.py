"""The fingerprints of a checkpoint, made by the ranks of a team together: each reads an equal run of all bytes.

::

    tensors   |   a   |         b         | c |      d      |      one after the other, in bands of whole rows
    ranks     |     0     |     1     |     2     |   3     |      a band is its who owns its first byte

A fingerprint is a sum, so the lead adds up what each rank has of a tensor. What somebody could not read is read again
by the lead alone, which says what is wrong with it as one process does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

from core.arrays.box import Box, flat_offset
from core.arrays.dtypes import itemsize
from core.calibration.choice import settled
from core.catalog.catalog import Catalog
from core.catalog.decoded import DEFAULT_CACHE_BYTES, decoding_bytes
from core.device.device import FINGERPRINT, Device
from core.errors import CheckpointingException
from core.files.store import ReadStore, list_files_below
from core.fingerprint.definition import LANES, Fingerprint, added, form_of, text_of
from core.fingerprint.kernel import Products, kernel
from core.fingerprint.sums import FormSum
from core.manifest.fingerprint_read import read_fingerprints
from core.megatron.reshard.reshard import Rules
from core.opening.canonical import canonical
from core.opening.open import FILL, Checkpoint, open_checkpoint
from core.plan.box_reader import BoxReader, TensorReader, bands
from core.plan.plan import DECODER_BYTES, RUNTIME_BYTES
from core.scan.share import Meter, share_in_a_row
from core.team.agreement import agreed, sight_of_files
from core.team.protocol import ALONE, Figures, StoppedError, Team, collected, told
from core.team.threads import Crew

_BAND_BYTES = 1 << 20
_GROUP = 32
"""Bands that a thread takes at a time."""
_THREAD_BYTES = 8 * _BAND_BYTES


@dataclass(frozen=True, slots=True)
class SharedFingerprints:
    """What the ranks have made together.

    Args:
        fingerprints: by key; at the lead only, elsewhere none.
        figures: of the workers; none of a process that works alone.
    """

    fingerprints: dict[str, Fingerprint] = field(default_factory=dict)
    figures: tuple[Figures, ...] = ()


def fingerprints_of_directory(
    path: Path,
    *,
    rules: Rules,
    threads: int,
    memory_bytes: int | None = None,
    team: Team = ALONE,
    device: Device | None = None,
) -> SharedFingerprints:
    """The fingerprints of a checkpoint, by reading it; every rank calls this with the same arguments.

    Args:
        path: as for ``core.opening.open.open_checkpoint``.
        rules: the layout's table.
        threads: that read, of each rank.
        memory_bytes: most bytes that each process may use; None for no limit.
        device: on which they may be made; None for the CPU path.

    Raises:
        CheckpointingException: it cannot be read.
        WorkerError: the ranks see different checkpoints.
    """
    opened = opened_alike(path, team=team)
    try:
        catalog = canonical(opened, rules=rules).catalog
        return shared_fingerprints(
            catalog, opened.store, threads=threads, memory_bytes=memory_bytes, team=team, device=device
        )
    finally:
        opened.store.close()


def opened_alike(path: Path, *, iteration: int | None = None, missing_chunks: str = FILL, team: Team) -> Checkpoint:
    """A checkpoint that all ranks have opened, and that is the same for all.

    Raises:
        CheckpointingException: it cannot be opened.
        WorkerError: the ranks see different checkpoints.
    """
    return agreed(
        team,
        lambda: open_checkpoint(path, iteration=iteration, missing_chunks=missing_chunks),
        lambda found: (str(found.path), found.format.name, sight_of_files(found.store, list_files_below(found.store))),
        what=str(path),
    )


def shared_fingerprints(
    catalog: Catalog,
    store: ReadStore,
    keys: Iterable[str] | None = None,
    *,
    threads: int,
    memory_bytes: int | None = None,
    team: Team = ALONE,
    device: Device | None = None,
) -> SharedFingerprints:
    """The fingerprints of tensors, all of them; as ``core.manifest.fingerprint_read.read_fingerprints``.

    Args:
        keys: which tensors; None for all. Those of the lead count.
        team: every rank calls this with the same catalog.
        device: of this rank, on which they may be made.

    Raises:
        CheckpointingException: a tensor cannot be read, or does not fit in memory.
    """
    wanted = list(catalog.tensors if keys is None else keys)
    if team.size == 1:
        read = partial(read_fingerprints, threads=threads, memory_bytes=memory_bytes, device=device)
        return SharedFingerprints(read(catalog, store, wanted))
    made = readable_fingerprints(
        catalog, store, wanted, threads=threads, memory_bytes=memory_bytes, team=team, device=device
    )

    def rest() -> dict[str, Fingerprint]:
        left = [key for key in wanted if key not in made.fingerprints]
        return read_fingerprints(catalog, store, left, threads=threads, memory_bytes=memory_bytes) if left else {}

    found = made.fingerprints | _at_lead(team, rest)
    return SharedFingerprints({key: found[key] for key in wanted if key in found}, made.figures)


def _at_lead(team: Team, work: Callable[[], dict[str, Fingerprint]]) -> dict[str, Fingerprint]:
    """What ``work()`` gives at the lead, which keeps it; an error is one of all ranks."""
    kept: dict[str, Fingerprint] = {}
    told(team, lambda: kept.update(work()))
    return kept


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
    """The fingerprints of those tensors that can be read; as ``shared_fingerprints``, which reads the rest as well."""
    wanted = told(team, lambda: list(keys))

    def prepared() -> _Pass:
        return _Pass(catalog, store, wanted, team, settled(device, [FINGERPRINT], threads=threads))

    work = agreed(team, prepared, _Pass.sight, what=store.label)
    parts = collected(team, lambda: work.part(threads, memory_bytes))
    return SharedFingerprints(
        {} if parts is None else work.joined(parts), () if parts is None else tuple(p.figures for p in parts)
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank has made.

    Args:
        figures: how much it did.
        sums: by key, bytes that were read and their contribution.
        failed: keys of tensors that it could not read.
    """

    figures: Figures
    sums: dict[str, tuple[int, tuple[int, ...]]]
    failed: frozenset[str]


class _Pass:
    """One rank's share of the reading.

    Args:
        catalog: in canonical form.
        store: its files.
        keys: of the tensors.
        team: that works together.
        device: that makes fingerprints, or none.
    """

    def __init__(
        self, catalog: Catalog, store: ReadStore, keys: Sequence[str], team: Team, device: Device | None = None
    ) -> None:
        self._device = device
        self._catalog = catalog
        self._store = store
        self._team = team
        self._share = share_in_a_row(team, ((key, catalog.tensors[key].n_bytes) for key in keys))
        self._crew = Crew("fingerprints")
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._failed: set[str] = set()
        self._meter = Meter()

    def sight(self) -> object:
        """What all ranks must see alike, for their shares to fit together."""
        return [(key, self._catalog.tensors[key].dtype, self._catalog.tensors[key].shape) for key in self._share.places]

    def part(self, threads: int, memory_bytes: int | None) -> _Part:
        """Reads this rank's share."""
        begun = time.monotonic()
        self._meter = Meter(self._team, self._share.n_bytes)
        threads, cache_bytes = self._fitting(threads, memory_bytes)
        if threads:  # else the lead says that the memory is too small
            items = self._items(BoxReader(self._catalog, self._store, cache_bytes=cache_bytes))
            with kernel(self._share.n_bytes, self._device) as products:
                self._crew.run(lambda: self._work(items, products), threads)
        self._meter.finish()
        rank, n_bytes = self._team.rank, sum(n for n, _ in self._sums.values())
        figures = Figures(rank, self._team.hosts[rank], n_bytes, 0, time.monotonic() - begun)
        return _Part(figures, self._sums, frozenset(self._failed))

    def _fitting(self, threads: int, memory_bytes: int | None) -> tuple[int, int]:
        """(threads, bytes for decoded units) that fit in memory; no threads if not even one does."""
        most = max((decoding_bytes(self._catalog.fragments(key)) for key in self._share.places), default=0)
        if memory_bytes is None:
            return threads, DEFAULT_CACHE_BYTES
        left = memory_bytes - RUNTIME_BYTES - self._team.runtime_bytes - (DECODER_BYTES if most else 0)
        threads = max(0, min(threads, left // (_THREAD_BYTES + most)))
        return threads, min(DEFAULT_CACHE_BYTES, left - threads * (_THREAD_BYTES + most)) if most else 0

    def _items(self, reader: BoxReader) -> Iterator[tuple[str, TensorReader, list[Box]]]:
        """This rank's bands, some of one tensor at a time."""
        for key, (start, stop) in self._share.places.items():
            if start == stop or not self._share.meets(key):
                continue
            meta = self._catalog.tensors[key]
            size = itemsize(meta.dtype)
            boxes = [
                box
                for box in bands(meta.shape, size, _BAND_BYTES)
                if self._share.is_mine(key, size * flat_offset(box, meta.shape))
            ]
            if not boxes:
                continue
            try:
                tensor = reader.tensor(key)
            except CheckpointingException:
                self._failed.add(key)
                continue
            if tensor.dtype != meta.dtype:  # to be cast, which the lead's plan does
                self._failed.add(key)
                continue
            for at in range(0, len(boxes), _GROUP):
                yield key, tensor, boxes[at : at + _GROUP]

    def _next(self, items: Iterator[tuple[str, TensorReader, list[Box]]]) -> tuple[str, TensorReader, list[Box]] | None:
        with self._lock:
            return None if self._crew.is_stopped() else next(items, None)

    def _work(self, items: Iterator[tuple[str, TensorReader, list[Box]]], products: Products) -> None:
        out, raw = (memoryview(bytearray(_BAND_BYTES)) for _ in range(2))
        while (item := self._next(items)) is not None:
            key, tensor, boxes = item
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
        size = itemsize(tensor.dtype)
        made = FormSum(form_of(tensor.shape, size), products)
        for box in boxes:
            if self._crew.is_stopped():
                return
            data = out[: prod(box.shape) * size]
            tensor.read(box, data, raw)
            made.add_run(size * flat_offset(box, tensor.shape), data)
            self._meter.advance(len(data))
        with self._lock:
            n_bytes, lanes = self._sums.get(key, (0, (0,) * LANES))
            self._sums[key] = n_bytes + made.n_bytes, added((lanes, made.lanes))

    def joined(self, parts: Sequence[_Part]) -> dict[str, Fingerprint]:
        """The fingerprints of the tensors of which all bytes have been read; at the lead."""
        found: dict[str, Fingerprint] = {}
        failed = frozenset[str]().union(*(part.failed for part in parts))
        sums: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
        for part in parts:
            for key, one in part.sums.items():
                sums.setdefault(key, []).append(one)
        for key, several in sums.items():
            meta = self._catalog.tensors[key]
            if key not in failed and sum(n for n, _ in several) == meta.n_bytes:
                found[key] = Fingerprint(meta.dtype, meta.shape, text_of(added(lanes for _, lanes in several)))
        return found
