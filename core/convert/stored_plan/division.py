"""Who of several workers does what: the work of a plan divided by bytes.

::

    large tensors     ├────────┬───────┬─────────┬──────┤     laid in a row, which is cut into equal pieces
    small tensors     ▉ ▊ ▋ ▌ ▍ ▎ ▏                           largest first, each to whoever has least

A cut in a large tensor is where an item begins (``core.plan.items``), so a worker has at most one item more than its
share. Tensors whose bytes must be made (casts, codecs) take longer than others, so they have a row of their own. All
numbers are bytes that are read and written. Pure: which worker does what follows from the numbers alone.

Where hosts must not write into one file (``core.files.network_mounts``), tensors whose files hang together form a
group, a group belongs to one host, and that host's workers divide what it has (``divided_by_hosts``).
"""

from __future__ import annotations

import heapq
from array import array as columns
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from core.plan.items import ITEM_BYTES

_LARGE_ITEMS = 2
"""A tensor of more than so many items may be shared."""


@dataclass(frozen=True, slots=True)
class KeyWork:
    """What is known of a tensor for dividing.

    Args:
        n_bytes: that are read and written.
        is_made: its bytes are cast or decoded.
        is_cuttable: several workers may share it.
    """

    n_bytes: int
    is_made: bool = False
    is_cuttable: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """What a worker does of one tensor.

    Args:
        start, stop: those items that begin in these bytes of it; None for the end.
        n_bytes: about how many they read and write.
    """

    start: int
    stop: int | None
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Division:
    """Who does what.

    Args:
        owners: the worker of each tensor; -1 for one that several share.
        shared: number of such a tensor → (worker, part) in order.
        n_workers: how many there are.
        loads: bytes of each worker.
    """

    owners: columns[int]
    shared: dict[int, list[tuple[int, Part]]]
    n_workers: int
    loads: Sequence[int]

    @property
    def balance(self) -> float:
        """The largest worker's bytes by the mean; 1.0 without any."""
        total = sum(self.loads)
        return max(self.loads) * self.n_workers / total if total else 1.0


def divided_by_hosts(
    works: Sequence[KeyWork], files: Sequence[Sequence[int]], hosts: Sequence[str], *, item_bytes: int = ITEM_BYTES
) -> Division:
    """The work of all tensors, so that workers of one host only write into a file.

    Args:
        files: numbers of the files that each tensor is written to.
        hosts: of each worker.
        item_bytes: as for ``divided``.
    """
    owners = columns("i", bytes(4 * len(works)))
    loads = [0] * len(hosts)
    shared: dict[int, list[tuple[int, Part]]] = {}
    names = sorted(set(hosts))
    workers = {name: [worker for worker, host in enumerate(hosts) if host == name] for name in names}
    heap = [(0.0, place) for place in range(len(names))]
    mine: list[list[int]] = [[] for _ in names]
    groups = [(sum(works[n].n_bytes for n in group), group) for group in _groups(files)]
    for n_bytes, group in sorted(groups, key=lambda one: -one[0]):
        load, place = heap[0]
        mine[place] += group
        heapq.heapreplace(heap, (load + n_bytes / len(workers[names[place]]), place))
    for place, name in enumerate(names):
        numbers = sorted(mine[place])
        part = divided([works[n] for n in numbers], len(workers[name]), item_bytes=item_bytes)
        for at, number in enumerate(numbers):
            owner = part.owners[at]
            owners[number] = workers[name][owner] if owner >= 0 else -1
            if owner < 0:
                shared[number] = [(workers[name][w], piece) for w, piece in part.shared[at]]
        for at, load in enumerate(part.loads):
            loads[workers[name][at]] = load
    return Division(owners, shared, len(hosts), loads)


def _groups(files: Sequence[Sequence[int]]) -> list[list[int]]:
    """Tensors in groups that have no file in common."""
    parent: dict[int, int] = {}

    def root(node: int) -> int:
        while (above := parent.setdefault(node, node)) != node:
            parent[node] = parent[above]
            node = above
        return node

    for found in files:
        for file in found[1:]:
            parent[root(file)] = root(found[0])
    groups: dict[int, list[int]] = {}
    for number, found in enumerate(files):
        groups.setdefault(root(found[0]) if found else -1 - number, []).append(number)
    return list(groups.values())


def divided(works: Sequence[KeyWork], n_workers: int, *, item_bytes: int = ITEM_BYTES) -> Division:
    """The work of all tensors, by their numbers, for ``n_workers`` workers.

    Args:
        item_bytes: about what an item writes; it reads as much.
    """
    most = _LARGE_ITEMS * 2 * item_bytes
    owners = columns("i", bytes(4 * len(works)))
    loads = [0] * n_workers
    shared: dict[int, list[tuple[int, Part]]] = {}
    large = [n for n, work in enumerate(works) if work.is_cuttable and work.n_bytes > most and n_workers > 1]
    for is_made in (False, True):
        row = [(n, works[n].n_bytes) for n in large if works[n].is_made == is_made]
        for number, worker, part in _cut(row, n_workers):
            loads[worker] += part.n_bytes
            shared.setdefault(number, []).append((worker, part))
    for number in large:
        owners[number] = -1
    rest = sorted((n for n in range(len(works)) if owners[n] == 0), key=lambda n: -works[n].n_bytes)
    heap = [(load, worker) for worker, load in enumerate(loads)]
    heapq.heapify(heap)
    for number in rest:
        load, worker = heap[0]
        owners[number] = worker
        loads[worker] = load + works[number].n_bytes
        heapq.heapreplace(heap, (loads[worker], worker))
    return Division(owners, shared, n_workers, loads)


def _cut(row: Sequence[tuple[int, int]], n_workers: int) -> Iterator[tuple[int, int, Part]]:
    """(tensor, worker, part) of tensors in a row that is cut into equal pieces; their sizes in bytes."""
    total = sum(size for _, size in row)
    begin = 0  # of the tensor in the row
    worker = 0
    for number, size in row:
        start = 0
        while True:
            end = (worker + 1) * total // n_workers - begin  # of the worker's piece, in the tensor
            if end >= size or worker == n_workers - 1:
                yield number, worker, Part(start, None, size - start)
                break
            if end > start:
                yield number, worker, Part(start, end, end - start)
                start = end
            worker += 1
        begin += size
