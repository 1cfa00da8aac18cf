"""Divide the work of a plan over several workers, by bytes.

::

    large tensors   ├────────┬───────┬─────────┬──────┤   in a row that is cut into equal parts
    small tensors   ▉ ▊ ▋ ▌ ▍ ▎ ▏                         largest first, to the least busy worker

A large tensor is cut where an item begins (``core.engine.plan.items``), so a worker has at most one
item more than its share. Tensors whose bytes must be computed (casts, codecs) take longer than
others, so they form a second row. All numbers are bytes that are read and written. Pure: the
division follows from the numbers alone.

Where hosts must not write into the same file (``core.files.network_mounts``), tensors that are
connected by files form a group, a group belongs to one host, and that host's workers divide its
groups (``divide_by_hosts``).
"""

from __future__ import annotations

import heapq
from array import array as columns
from collections.abc import Iterator, Sequence

from core.engine.plan.items import ITEM_BYTES
from core.values import dataclass

_LARGE_ITEMS = 2
"""A tensor of more items than this may be shared by several workers."""


@dataclass(frozen=True, slots=True)
class KeyWork:
    """The work of one tensor, as the division sees it.

    Args:
        n_bytes: bytes that are read and written.
        is_made: the bytes are cast or decoded.
        is_cuttable: several workers may share the tensor.
    """

    n_bytes: int
    is_made: bool = False
    is_cuttable: bool = True


@dataclass(frozen=True, slots=True)
class WorkPart:
    """The part of one tensor that a worker does.

    Args:
        start, stop: byte range of the tensor; the worker copies the items that begin in it. None is
            the tensor's end.
        n_bytes: approximate number of bytes that these items read and write.
    """

    start: int
    stop: int | None
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a plan's tensors over workers.

    Args:
        owners: the worker of each tensor; -1 for a tensor that several share.
        shared: number of a shared tensor → its (worker, part) pairs in order.
        n_workers: number of workers.
        loads: bytes of each worker.
    """

    owners: columns[int]
    shared: dict[int, list[tuple[int, WorkPart]]]
    n_workers: int
    loads: Sequence[int]

    @property
    def balance(self) -> float:
        """Load of the busiest worker divided by the mean; 1.0 without any load."""
        total = sum(self.loads)
        return max(self.loads) * self.n_workers / total if total else 1.0


def divide_by_hosts(
    works: Sequence[KeyWork],
    files: Sequence[Sequence[int]],
    hosts: Sequence[str],
    *,
    item_bytes: int = ITEM_BYTES,
) -> Division:
    """Divide all tensors so that only workers of one host write into a file.

    Args:
        works: the work of each tensor.
        files: numbers of the files that each tensor is written to.
        hosts: the host of each worker.
        item_bytes: as for ``divide_work``.
    """
    owners = columns("i", bytes(4 * len(works)))
    loads = [0] * len(hosts)
    shared: dict[int, list[tuple[int, WorkPart]]] = {}
    workers_of_host: dict[str, list[int]] = {name: [] for name in sorted(set(hosts))}
    for worker, host in enumerate(hosts):
        workers_of_host[host].append(worker)
    worker_lists = list(workers_of_host.values())

    # Give each group of tensors, largest first, to the host with the least load per worker.
    heap = [(0.0, index) for index in range(len(worker_lists))]
    tensors_of_host: list[list[int]] = [[] for _ in worker_lists]
    groups = [(sum(works[n].n_bytes for n in group), group) for group in _group_by_files(files)]
    for n_bytes, group in sorted(groups, key=lambda item: -item[0]):
        load, index = heap[0]
        tensors_of_host[index] += group
        heapq.heapreplace(heap, (load + n_bytes / len(worker_lists[index]), index))

    # Divide each host's tensors over its workers; the division numbers both from 0.
    for workers, tensors in zip(worker_lists, map(sorted, tensors_of_host), strict=True):
        division = divide_work([works[n] for n in tensors], len(workers), item_bytes=item_bytes)
        for number, owner in zip(tensors, division.owners, strict=True):
            owners[number] = workers[owner] if owner >= 0 else -1
        for position, parts in division.shared.items():
            shared[tensors[position]] = [(workers[worker], part) for worker, part in parts]
        for worker, host_load in zip(workers, division.loads, strict=True):
            loads[worker] = host_load
    return Division(owners, shared, len(hosts), loads)


def _group_by_files(files: Sequence[Sequence[int]]) -> list[list[int]]:
    """Group tensors so that tensors of different groups have no file in common.

    Args:
        files: numbers of the files of each tensor.
    """
    # Union-find over files: all files of one tensor get the same root.
    parent: dict[int, int] = {}

    def root(node: int) -> int:
        while (above := parent.setdefault(node, node)) != node:
            parent[node] = parent[above]
            node = above
        return node

    for numbers in files:
        for file in numbers[1:]:
            parent[root(file)] = root(numbers[0])
    groups: dict[int, list[int]] = {}
    for tensor, numbers in enumerate(files):
        groups.setdefault(root(numbers[0]) if numbers else -1 - tensor, []).append(tensor)
    return list(groups.values())


def divide_work(
    works: Sequence[KeyWork], n_workers: int, *, item_bytes: int = ITEM_BYTES
) -> Division:
    """Divide all tensors over workers of one host.

    Args:
        works: the work of each tensor.
        n_workers: number of workers.
        item_bytes: approximate number of bytes that an item writes; it reads as many.
    """
    max_bytes = _LARGE_ITEMS * 2 * item_bytes
    owners = columns("i", bytes(4 * len(works)))
    loads = [0] * n_workers

    # Cut the large tensors: those that are copied, then those whose bytes must be computed.
    shared: dict[int, list[tuple[int, WorkPart]]] = {}
    large = [
        n
        for n, work in enumerate(works)
        if work.is_cuttable and work.n_bytes > max_bytes and n_workers > 1
    ]
    for is_made in (False, True):
        row = [(n, works[n].n_bytes) for n in large if works[n].is_made == is_made]
        for number, worker, part in _cut_row(row, n_workers):
            loads[worker] += part.n_bytes
            shared.setdefault(number, []).append((worker, part))
    for number in large:
        owners[number] = -1

    # Give each remaining tensor, largest first, to the worker with the least load.
    small = [n for n in range(len(works)) if owners[n] == 0]
    heap = [(load, worker) for worker, load in enumerate(loads)]
    heapq.heapify(heap)
    for number in sorted(small, key=lambda n: -works[n].n_bytes):
        load, worker = heap[0]
        owners[number] = worker
        loads[worker] = load + works[number].n_bytes
        heapq.heapreplace(heap, (loads[worker], worker))
    return Division(owners, shared, n_workers, loads)


def _cut_row(row: Sequence[tuple[int, int]], n_workers: int) -> Iterator[tuple[int, int, WorkPart]]:
    """Yield (tensor, worker, part) for tensors in a row that is cut into equal parts.

    Args:
        row: (tensor, size in bytes) in order.
        n_workers: number of parts.
    """
    total = sum(size for _, size in row)
    begin = 0  # of the tensor in the row
    worker = 0
    for number, size in row:
        start = 0
        while True:
            end = (worker + 1) * total // n_workers - begin  # of the worker's part, in the tensor
            if end >= size or worker == n_workers - 1:
                yield number, worker, WorkPart(start, None, size - start)
                break
            if end > start:
                yield number, worker, WorkPart(start, end, end - start)
                start = end
            worker += 1
        begin += size
