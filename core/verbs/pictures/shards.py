"""The boxes of a tensor, and what moves when its layout changes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from core.arrays.box import Box, Shape
from core.arrays.dtypes import itemsize
from core.engine.catalog.key_patterns import matching, natural_order
from core.engine.catalog.stored import StoredArray, coords_text
from core.errors import UsageError
from core.values import dataclass
from core.verbs.inspect.nearest import nearest_names

if TYPE_CHECKING:
    from core.engine.catalog.catalog import AnyCatalog
    from core.engine.catalog.stored import AnyArray
    from core.engine.plan.plan import Plan
    from core.engine.plan.positions import Places


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a tensor, and who holds it.

    Args:
        box: region of the tensor, in elements.
        ranks: the ranks that hold it, such as ``tp0 pp1``; several are copies of one another, and
            empty if the format does not say.
        files: the file of each copy.
        n_bytes: size of one copy.
    """

    box: Box
    ranks: tuple[str, ...]
    files: tuple[str, ...]
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ShardMap:
    """All boxes of one tensor.

    Args:
        key: name of the tensor.
        shape: global shape, in elements.
        dtype: canonical dtype name.
        cut_axes: axes that are cut, the first first.
        shards: the boxes, ordered by offset.
    """

    key: str
    shape: Shape
    dtype: str
    cut_axes: tuple[int, ...]
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class BoxMove:
    """Bytes of a tensor that go from a source's box to a target's.

    Args:
        source, target: positions in ``ShardMove.before.shards`` and ``ShardMove.after.shards``.
        n_bytes: number of bytes.
    """

    source: int
    target: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ShardMove:
    """A tensor before and after a change of layout.

    Args:
        before, after: the boxes.
        moves: what each box of the target is made of.
    """

    before: ShardMap
    after: ShardMap
    moves: tuple[BoxMove, ...]


@dataclass(frozen=True, slots=True)
class RankMoves:
    """The bytes that go from each source rank to each target rank, over all tensors.

    Args:
        sources, targets: names of the ranks, such as ``tp0 pp1``; files where there are none.
        n_bytes: a row for each source, a column for each target.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    n_bytes: tuple[tuple[int, ...], ...]


def shard_map(catalog: AnyCatalog, key: str, *, places: Places | None = None) -> ShardMap:
    """Return the boxes of a tensor; equal boxes are copies of one.

    Args:
        places: positions of the arrays of a target catalog.
    """
    tensor = catalog.tensor(key)
    copies: dict[Box, list[AnyArray]] = {}
    for fragment in catalog.fragments(key):
        arrays = copies.setdefault(fragment.box, [])
        if fragment.array is not None:
            arrays.append(fragment.array)
    shards = tuple(
        Shard(
            box,
            tuple(name for array in arrays if (name := coords_text(array.coords))),
            tuple(_file_name(array, places) for array in arrays),
            box.n_elements * itemsize(tensor.dtype),
        )
        for box, arrays in sorted(copies.items(), key=lambda item: item[0].offset)
    )
    cut_axes = tuple(
        axis
        for axis in range(len(tensor.shape))
        if len({shard.box.offset[axis] for shard in shards}) > 1
    )
    return ShardMap(key, tensor.shape, tensor.dtype, cut_axes, shards)


def shard_move(plan: Plan, key: str) -> ShardMove:
    """Return the boxes of a tensor before and after, and the bytes between them."""
    before = shard_map(plan.source, key)
    after = shard_map(plan.target, key, places=plan.places)
    sources = {shard.box: number for number, shard in enumerate(before.shards)}
    targets = {shard.box: number for number, shard in enumerate(after.shards)}
    work = plan.match(key)
    # A dictionary of the common boxes: copies of a target's box are one move.
    boxes: dict[tuple[int, int], set[Box]] = {}
    for piece, target, box in work.pairs:
        source_number = sources.get(work.pieces[piece][1].box)
        target_number = targets[work.targets[target].box]
        # Zeros by rule are in no box of the source.
        if source_number is not None:
            boxes.setdefault((source_number, target_number), set()).add(box)
    size = itemsize(work.dtype)
    moves = tuple(
        BoxMove(*ends, size * sum(box.n_elements for box in common))
        for ends, common in sorted(boxes.items())
    )
    return ShardMove(before, after, moves)


def planned_keys(plan: Plan, pattern: str) -> list[str]:
    """Return the tensors of a plan that a pattern selects, under their names in the target.

    Raises:
        UsageError: the pattern selects none, or is not valid.
    """
    names = list(iter(plan.keys()))
    keys = matching(names, pattern)
    if not keys:
        nearest = nearest_names(names, pattern)
        hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
        raise UsageError(
            f"no tensor of the destination matches {pattern!r}",
            hint=f"{hint}list all tensors with: --explain --map '*' --json",
        )
    return keys


def rank_moves(plan: Plan) -> RankMoves:
    """Add up the bytes that each target rank gets from each source rank."""
    n_bytes: Counter[tuple[str, str]] = Counter()
    for key in iter(plan.keys()):
        work = plan.match(key)
        size = itemsize(work.dtype)
        for piece, target, box in work.pairs:
            stored, planned = work.pieces[piece][1].array, work.targets[target].array
            if stored is not None and planned is not None:
                source_name = coords_text(stored.coords) or _file_name(stored, None)
                target_name = coords_text(planned.coords) or _file_name(planned, plan.places)
                n_bytes[source_name, target_name] += box.n_elements * size
    sources = tuple(sorted({source for source, _ in n_bytes}, key=natural_order))
    targets = tuple(sorted({target for _, target in n_bytes}, key=natural_order))
    rows = tuple(tuple(n_bytes[source, target] for target in targets) for source in sources)
    return RankMoves(sources, targets, rows)


def _file_name(array: AnyArray, places: Places | None) -> str:
    """Return the file of an array; the name of an array that has no position."""
    if isinstance(array, StoredArray):
        return array.extent.file
    number = None if places is None else places.number_of(array.name)
    return array.name if places is None or number is None else places.file_of(number)
