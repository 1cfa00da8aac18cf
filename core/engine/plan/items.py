"""Cut the work of a plan into items: what one thread does at a time.

The matched boxes of a tensor become

* **moves**: a run of bytes that is consecutive in its source and in all its destinations; streamed;
* **interleaves**: sources and destinations that meet in boxes which are not consecutive on both
  sides (splits and merges along an inner axis). All connected sources and destinations are walked
  in common row bands, so that every source byte is read once and every destination byte is written
  once, both in long runs;
* **comparisons**: replicas with their primary.

Items are about ``ITEM_BYTES`` long, so that threads share the largest tensor too. The items and
their order follow from the plan alone: a resumed run repeats the same ones. Everything here is
integers; only late-bound addresses are looked up through ``bind``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import gcd

from core.arrays.box import Box
from core.arrays.checksum import BLOCK_BYTES
from core.arrays.coverage import first_overlap
from core.arrays.dtypes import itemsize
from core.arrays.gather import is_dense
from core.engine.catalog.tensor import Fragment
from core.engine.plan.addresses import Bind, Destination, Ends, Source
from core.engine.plan.bands import cut_rows, row_bands
from core.engine.plan.match import Match
from core.engine.plan.positions import Places
from core.values import dataclass

ITEM_BYTES = 32 << 20
"""Approximate number of target bytes of one item."""
_MANY_ENDS = 16
"""Number of sources and destinations above which an item is cut shorter."""
_SMALL_BYTES = 64 << 10
"""Runs shorter than this on average are interleaved, if there are more than ``_MANY_RUNS``."""
_MANY_RUNS = 64
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Move:
    """A run of elements, consecutive in the source and in every destination.

    Args:
        key: key of the tensor.
        n_elements: length of the run.
        source: address of the run's first element.
        destinations: (array number, flat element index) of each copy to write.
        dtypes: dtypes of the source and of the target.
    """

    key: str
    n_elements: int
    source: Source
    destinations: tuple[tuple[int, int], ...]
    dtypes: tuple[str, str]

    @property
    def n_bytes(self) -> int:
        """Total length of all destinations, in bytes."""
        return self.n_elements * itemsize(self.dtypes[1]) * len(self.destinations)


@dataclass(frozen=True, slots=True)
class Link:
    """A source and a destination that meet in ``box`` and start at its first element."""

    box: Box
    source: Source
    destination: Destination


@dataclass(frozen=True, slots=True)
class Interleave:
    """Consecutive row bands of connected sources and destinations.

    Args:
        key: key of the tensor.
        links: the pairs of a source and a destination that meet; the boxes are disjoint.
        bands: boxes to walk, in C order.
        is_regular: every link spans each band on the axes up to the one that is cut, so that bands
            of one shape differ only by their addresses.
        dtypes: dtypes of the source and of the target.
    """

    key: str
    links: Sequence[Link]
    bands: Sequence[Box]
    is_regular: bool
    dtypes: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Copies that must equal their primary in a box.

    Args:
        key: key of the tensor.
        box: the region; the sources begin at its first element.
        primary: the source whose bytes are written.
        copies: the other sources.
        bands: parts of the box, each at most as long as a digest block.
        dtype: dtype of all sources.
        is_tied: whether the sources are different tensors of one rank or checkpoint, such as an
            embedding and the output layer, not replicas.
    """

    key: str
    box: Box
    primary: Source
    copies: tuple[Source, ...]
    bands: Sequence[Box]
    dtype: str
    is_tied: bool = False


Item = Move | Interleave | Comparison
ItemNumber = tuple[int, int]
"""Index of the tensor in the plan, and of the item in the tensor; the same for every worker."""


@dataclass(frozen=True, slots=True)
class Portion:
    """The part of a tensor that one worker does.

    Args:
        number: index of the tensor in the plan.
        match: the proven work of the complete tensor.
        start, stop: the worker does the items that begin in these bytes, counted by ``weight_of``;
            a stop of None is the end.
    """

    number: int
    match: Match
    start: int = 0
    stop: int | None = None


def items_of_portion(
    portion: Portion, *, places: Places, bind: Bind, band_bytes: int, item_bytes: int = ITEM_BYTES
) -> Iterator[tuple[ItemNumber, Item]]:
    """Yield the work items of a portion, with their numbers.

    Args:
        places, bind, band_bytes, item_bytes: as for ``items_of``.
    """
    items = items_of(
        portion.match, places=places, bind=bind, band_bytes=band_bytes, item_bytes=item_bytes
    )
    if portion.start == 0 and portion.stop is None:
        yield from (((portion.number, n), item) for n, item in enumerate(items))
        return
    # Items are cut from the complete tensor, so that they have the same numbers for every worker.
    begin = 0
    for n, item in enumerate(items):
        if portion.stop is not None and begin >= portion.stop:
            return
        if begin >= portion.start:
            yield (portion.number, n), item
        begin += weight_of(item)


def weight_of(item: Item) -> int:
    """Return approximately how many bytes an item reads and writes."""
    if isinstance(item, Move):
        return item.n_bytes + (
            0 if item.source.file is None else item.n_elements * itemsize(item.dtypes[0])
        )
    n_elements = sum(band.n_elements for band in item.bands)
    if isinstance(item, Comparison):
        return n_elements * itemsize(item.dtype) * (1 + len(item.copies))
    return n_elements * sum(map(itemsize, item.dtypes))


def items_of(
    match: Match, *, places: Places, bind: Bind, band_bytes: int, item_bytes: int = ITEM_BYTES
) -> Iterator[Item]:
    """Yield the work items of one tensor: comparisons, then moves, then interleaves.

    Args:
        places: positions of the target's arrays.
        bind: finds the positions of the source's late-bound arrays.
        band_bytes: maximum number of source bytes in a band of an interleave.
        item_bytes: approximate number of bytes of an item.
    """
    if match.tensor.n_elements == 0:
        return

    # Comparisons come first, so that most differences show before the tensor is written.
    ends = Ends(match, places, bind)
    yield from _list_comparisons(match, ends, min(band_bytes, BLOCK_BYTES), item_bytes)

    # One item reads a run once, and writes it to all its destinations.
    runs, interleaved = _split_runs(match, ends)
    dtypes = (match.dtype, match.tensor.dtype)
    for (n_piece, box), n_targets in runs.items():
        targets = [ends.destination_of(n_target, box) for n_target in n_targets]
        move = Move(
            match.key,
            box.n_elements,
            ends.source_of(n_piece, box),
            tuple((target.array, target.start) for target in targets),
            dtypes,
        )
        yield from _cut_move(move, _item_bytes(item_bytes, 1 + len(targets)))

    # What is not consecutive is interleaved, together with everything that it is connected to.
    for layer in _layers(interleaved):
        for links in _components(layer, match, ends):
            yield from _cut_interleave(
                match.key, links, dtypes, band_bytes=band_bytes, item_bytes=item_bytes
            )


def _split_runs(
    match: Match, ends: Ends
) -> tuple[dict[tuple[int, Box], list[int]], list[tuple[int, int, Box]]]:
    """Split the pairs of a match into runs that are moved, and pairs that are interleaved.

    Returns:
        runs: (piece index, box) → indices of the targets; consecutive in the source and in all of
            them.
        interleaved: the other pairs, as in ``Match.pairs``.
    """
    size = itemsize(match.dtype)
    runs: dict[tuple[int, Box], list[int]] = {}
    interleaved: list[tuple[int, int, Box]] = []
    for n_piece, n_target, box in match.pairs:
        in_source = is_dense(box.shape, size, ends.source(n_piece).strides)
        if in_source and is_dense(box.shape, 1, ends.destination(n_target).strides):
            runs.setdefault((n_piece, box), []).append(n_target)
        else:
            interleaved.append((n_piece, n_target, box))

    # Many tiny runs that share few arrays on one side become long ones if they are interleaved.
    if (
        len(runs) > _MANY_RUNS
        and sum(box.n_elements for _, box in runs) * size < _SMALL_BYTES * len(runs)
        and 4 * min(len(match.targets), len(match.pieces)) < len(runs) + 4
    ):
        interleaved += [
            (n_piece, n_target, box)
            for (n_piece, box), n_targets in runs.items()
            for n_target in n_targets
        ]
        runs = {}
    return runs, interleaved


def _item_bytes(item_bytes: int, n_ends: int) -> int:
    """Return the length of an item, in bytes of one source or destination.

    Items with many of them are shorter: otherwise they would be far more work than others.
    """
    return item_bytes if n_ends <= _MANY_ENDS else max(1, item_bytes * _MANY_ENDS // n_ends)


def _list_comparisons(
    match: Match, ends: Ends, band_bytes: int, item_bytes: int
) -> Iterator[Comparison]:
    """Yield the comparisons of one tensor's copies with their primaries."""
    # All copies of a region are compared in one item, which reads the primary once.
    groups: dict[tuple[Box, int], list[Fragment]] = {}
    primaries: dict[int, Fragment] = {}
    for box, fragment, primary in match.copies:
        groups.setdefault((box, id(primary)), []).append(fragment)
        primaries[id(primary)] = primary

    size = itemsize(match.dtype)
    for (box, number), fragments in groups.items():
        used = ends.bound(primaries[number], box)
        # The names of one rank's or checkpoint's replicas differ in numbers at most.
        arrays = [fragment.array for fragment in (primaries[number], *fragments)]
        names = {array.name.partition(":") for array in arrays if array is not None}
        owners = {owner if colon else "" for owner, colon, _ in names}
        is_tied = len(owners) == 1 and len({_DIGITS.sub("", "".join(name)) for name in names}) > 1
        copies = tuple(dict.fromkeys(ends.bound(fragment, box) for fragment in fragments))
        axis, rows = cut_rows(box.shape, size, band_bytes)
        group_bytes = _item_bytes(item_bytes, 1 + len(copies))
        for bands in _group_bands(box, axis, rows, size, 1, group_bytes):
            yield Comparison(match.key, box, used, copies, bands, match.dtype, is_tied)


def _cut_move(move: Move, item_bytes: int) -> Iterator[Move]:
    """Yield a move in parts of about ``item_bytes``."""
    source_size, target_size = (itemsize(name) for name in move.dtypes)
    position = move.destinations[0][1] * target_size
    done = 0
    while done < move.n_elements:
        # Cut where a digest block of the first destination begins: few items share a block then.
        stop = position + done * target_size + item_bytes
        if item_bytes >= 2 * BLOCK_BYTES:
            stop -= stop % BLOCK_BYTES
        end = max(done + 1, (stop - position) // target_size)

        # A remainder of less than 1/16 of an item is not worth an item of its own.
        if end * target_size + item_bytes // 16 > move.n_elements * target_size:
            end = move.n_elements

        source = Source(
            move.source.file, move.source.start + done * source_size, (), move.source.record
        )
        ends = tuple((array, start + done) for array, start in move.destinations)
        yield Move(move.key, end - done, source, ends, move.dtypes)
        done = end


def _layers(pairs: list[tuple[int, int, Box]]) -> list[list[tuple[int, int, Box]]]:
    """Return pairs in groups whose boxes are disjoint."""
    if first_overlap([box for _, _, box in pairs]) is None:
        return [pairs] if pairs else []

    # Targets that repeat the boxes of earlier ones: the n-th repetition goes to the n-th layer.
    n_repeats: dict[tuple[Box, ...], int] = {}
    by_turn: dict[int, list[tuple[int, int, Box]]] = {}
    for group in _group_by_target(pairs):
        boxes = tuple(box for _, _, box in group)
        turn = n_repeats[boxes] = n_repeats.get(boxes, 0) + 1
        by_turn.setdefault(turn, []).extend(group)

    # Targets that overlap only partly get a layer each.
    layers = []
    for layer in by_turn.values():
        if first_overlap([box for _, _, box in layer]) is None:
            layers.append(layer)
        else:
            layers += _group_by_target(layer)
    return layers


def _group_by_target(pairs: list[tuple[int, int, Box]]) -> list[list[tuple[int, int, Box]]]:
    """Return pairs grouped by their target, in the order of each target's first pair."""
    groups: dict[int, list[tuple[int, int, Box]]] = {}
    for pair in pairs:
        groups.setdefault(pair[1], []).append(pair)
    return list(groups.values())


def _components(
    pairs: list[tuple[int, int, Box]], match: Match, ends: Ends
) -> Iterator[list[Link]]:
    """Yield the links of each group of connected sources and destinations.

    Two pairs are connected if they share a source piece or a target, or pieces (or targets) of one
    array whose regions there are interleaved.
    """
    size = itemsize(match.dtype)
    parent: dict[object, object] = {}

    def root(node: object) -> object:
        """Return the representative of a node's group (union-find with path halving)."""
        while (above := parent.setdefault(node, node)) != node:
            parent[node] = parent[above]
            node = above
        return node

    # Connect both ends of each pair. An end with gaps in its array is represented by the array:
    # what fills the gaps belongs to the same group.
    for n_piece, n_target, _ in pairs:
        box, fragment = match.pieces[n_piece]
        source: object = ("piece", n_piece)
        if fragment.array is not None and not is_dense(
            box.shape, size, ends.source(n_piece).strides
        ):
            source = ("from", fragment.array.name)
        destination: object = ("target", n_target)
        if not is_dense(match.targets[n_target].box.shape, 1, ends.destination(n_target).strides):
            destination = ("to", ends.destination(n_target).array)
        parent[root(source)] = root(destination)
        parent[root(("piece", n_piece))] = root(source)

    # Collect the links by group.
    groups: dict[object, list[Link]] = {}
    for n_piece, n_target, box in pairs:
        link = Link(box, ends.source_of(n_piece, box), ends.destination_of(n_target, box))
        groups.setdefault(root(("piece", n_piece)), []).append(link)
    yield from groups.values()


def _cut_interleave(
    key: str, links: list[Link], dtypes: tuple[str, str], *, band_bytes: int, item_bytes: int
) -> Iterator[Interleave]:
    """Yield interleaves of about ``item_bytes`` for a group of connected links."""
    bounds = _bounding_box([link.box for link in links])
    size, target_size = (itemsize(name) for name in dtypes)

    # Sources in C order need only short bands (256 KiB per file, at least 1 MiB). Transposed ones
    # use the full size, because their runs grow with the band.
    n_ends = len({link.destination.array for link in links} | {link.source.file for link in links})
    is_consecutive = all(
        sorted(link.source.strides, reverse=True) == list(link.source.strides) for link in links
    )
    wanted_bytes = min(band_bytes, max(1 << 20, n_ends << 18)) if is_consecutive else band_bytes

    axis, rows = cut_rows(bounds.shape, size, wanted_bytes)
    is_regular = all(
        link.box.offset[: axis + 1] == bounds.offset[: axis + 1]
        and link.box.end[: axis + 1] == bounds.end[: axis + 1]
        for link in links
    )
    row_bytes = links[0].destination.strides[axis] * target_size
    for bands in _group_bands(bounds, axis, rows, size, row_bytes, item_bytes):
        yield Interleave(key, links, bands, is_regular, dtypes)


def _bounding_box(boxes: Sequence[Box]) -> Box:
    """Return the smallest box that contains all boxes."""
    offset = tuple(map(min, zip(*(box.offset for box in boxes), strict=True)))
    end = tuple(map(max, zip(*(box.end for box in boxes), strict=True)))
    return Box(offset, tuple(b - a for a, b in zip(offset, end, strict=True)))


def _group_bands(
    bounds: Box, axis: int, rows: int, size: int, row_bytes: int, item_bytes: int
) -> Iterator[list[Box]]:
    """Yield the row bands of a box, in groups of about ``item_bytes``.

    Args:
        axis, rows: the axis along which the bands are cut, and the number of rows in a band.
        size: bytes per element.
        row_bytes: bytes of a destination's row. Groups end where a digest block of the destination
            ends, if that is not too far away.
        item_bytes: approximate size of a group.
    """
    if not bounds.shape:
        yield [bounds]
        return

    # After every ``even`` rows the destination is at the start of a digest block.
    even = BLOCK_BYTES // gcd(BLOCK_BYTES, row_bytes)
    if axis == 0 and even < rows:
        rows -= rows % even
    bands: list[Box] = []
    n_bytes = 0
    for band in row_bands(bounds, axis, rows):
        bands.append(band)
        n_bytes += band.n_elements * size
        is_even = axis > 0 or (band.end[0] - bounds.offset[0]) % even == 0
        if n_bytes >= item_bytes and (is_even or n_bytes >= 2 * item_bytes):
            yield bands
            bands, n_bytes = [], 0
    if bands:
        yield bands
