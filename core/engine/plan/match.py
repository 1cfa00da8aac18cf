"""Match the source and target fragments of one tensor: prove which source fills which part."""

from __future__ import annotations

from collections.abc import Sequence

from core.arrays.box import Box, Shape, full_box
from core.arrays.coverage import BoxIndex, first_hole, first_overlap, is_tiled
from core.engine.catalog.stored import AnyArray, StoredArray
from core.engine.catalog.tensor import (
    AnyFragment,
    AnyTensor,
    Fragment,
    TargetFragment,
    TargetTensor,
    Tensor,
)
from core.engine.plan.positions import described, region_shape
from core.errors import UNLIKE_ANY_WRITER, CorruptError, MissingShardError
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """Proven work of one tensor.

    Args:
        key: key of the tensor, for errors.
        tensor: the target tensor.
        dtype: dtype of the source.
        pieces: primary sources: disjoint boxes, each a part of its fragment's box, none empty.
        copies: (common box, fragment, primary): fragments whose bytes must equal the primary's in
            that box.
        targets: the target fragments that are not empty.
        pairs: (index in ``pieces``, index in ``targets``, common box).
    """

    key: str
    tensor: TargetTensor
    dtype: str
    pieces: Sequence[tuple[Box, Fragment]]
    copies: Sequence[tuple[Box, Fragment, Fragment]]
    targets: Sequence[TargetFragment]
    pairs: Sequence[tuple[int, int, Box]]


def match(
    key: str,
    source: Tensor | None,
    target: TargetTensor,
    *,
    fragments: Sequence[TargetFragment] | None = None,
    covers: bool = True,
) -> Match:
    """Match source and target of one tensor, and prove that every element is filled.

    Args:
        key: key of the tensor, for errors.
        source: the tensor to copy; None if the source has none under the key.
        target: the tensor to write; what a flexible one has beyond the source's shape is zero.
        fragments: the target's fragments, if the caller has looked them up.
        covers: the target's fragments must cover the tensor; they need not if other processes fill
            the remainder.

    Raises:
        MissingShardError: the source lacks the tensor, or a region that the target requires.
        CorruptError: boxes are out of bounds, or shapes or dtypes contradict each other.
        UnsupportedError: the cast is not supported.
    """
    if source is None:
        raise MissingShardError("the source has no such tensor", key=key)
    stored = source.fragments()
    if fragments is None:
        fragments = target.fragments()

    # Most tensors are one array on both sides; none of the work below is needed for them.
    if (simple := _match_arrays(key, source, stored, target, fragments)) is not None:
        return simple

    # Check both sides separately.
    targets = [fragment for fragment in fragments if not fragment.box.is_empty]
    if source.shape != target.shape and not target.flexible:
        raise CorruptError(
            f"the source has shape {source.shape}, but the target has shape {target.shape}", key=key
        )
    dtype = _check_fragments(key, source, stored)
    _check_targets(key, target, targets, dtype=dtype)

    # Match them.
    candidates = [fragment for fragment in stored if not fragment.box.is_empty]
    if source.shape != target.shape and len(source.shape) == len(target.shape):
        beyond = full_box(target.shape).subtract(full_box(source.shape))
        candidates += [Fragment(box, None, ()) for box in beyond]
    pieces, copies = _split_primaries(key, candidates)
    pairs = _pair(key, target.shape, [box for box, _ in pieces], targets)
    if covers:
        _check_covered(key, target, targets)
    return Match(key, target, dtype, pieces, copies, targets, pairs)


def _match_arrays(
    key: str,
    source: Tensor,
    stored: Sequence[Fragment],
    target: TargetTensor,
    fragments: Sequence[TargetFragment],
) -> Match | None:
    """Match a tensor that is exactly one complete array on both sides; return None for others.

    Raises:
        UnsupportedError: the cast is not supported.
    """
    if not (len(stored) == len(fragments) == 1 and source.shape == target.shape):
        return None
    fragment, written = stored[0], fragments[0]
    array, planned = fragment.array, written.array
    if array is None or planned is None or planned.dtype != target.dtype or fragment.box.is_empty:
        return None
    if not (is_all(fragment, array, source) and is_all(written, planned, target)):
        return None
    if array.dtype != target.dtype:
        from core.arrays.cast import check_cast

        check_cast(array.dtype, target.dtype, key=key)
    box = fragment.box
    return Match(key, target, array.dtype, [(box, fragment)], (), [written], [(0, 0, box)])


def is_all(fragment: AnyFragment, array: AnyArray, tensor: AnyTensor) -> bool:
    """Return whether a fragment is the complete tensor and its array holds nothing else."""
    box = fragment.box
    return box.shape == tensor.shape == array.shape and not any(box.offset) and not any(fragment.at)


def _check_fragments(key: str, tensor: Tensor, fragments: Sequence[Fragment]) -> str:
    """Check the bounds of the source's fragments, and return the common dtype of their arrays.

    Raises:
        CorruptError: a fragment is out of bounds, or the dtypes differ.
    """
    dtype = None
    for fragment in fragments:
        _check_bounds(key, tensor, fragment)
        array = fragment.array
        if array is None:
            continue
        if dtype is not None and array.dtype != dtype:
            raise CorruptError(
                f"the tensor is stored partly as {dtype} and partly as {array.dtype}",
                key=key,
                file=array.extent.file,
            )
        dtype = array.dtype
    return tensor.dtype if dtype is None else dtype


def _check_targets(
    key: str, tensor: TargetTensor, targets: Sequence[TargetFragment], *, dtype: str
) -> None:
    """Raise unless every target fragment is in bounds and has an array of the target's dtype.

    Args:
        dtype: dtype of the source.

    Raises:
        CorruptError: a fragment is out of bounds, has no array, or its array has another dtype.
        UnsupportedError: the source cannot be cast to the target's dtype.
    """
    for fragment in targets:
        _check_bounds(key, tensor, fragment)
        if fragment.array is None:
            raise CorruptError(
                f"no array is planned for {described(fragment.box)} of the target", key=key
            )
        if fragment.array.dtype != tensor.dtype:
            raise CorruptError(
                f"array {fragment.array.name!r} is {fragment.array.dtype}, not {tensor.dtype}",
                key=key,
            )
    if dtype != tensor.dtype:
        from core.arrays.cast import check_cast

        check_cast(dtype, tensor.dtype, key=key)


def _check_bounds(key: str, tensor: AnyTensor, fragment: AnyFragment) -> None:
    """Raise unless a fragment is within the bounds of its tensor and of its array.

    Raises:
        CorruptError: the fragment is out of bounds.
    """
    box, array = fragment.box, fragment.array
    if array is not None and is_all(fragment, array, tensor):
        return

    # Bounds of the tensor; zeros have no array and need no other check.
    if box.rank != len(tensor.shape) or any(
        stop > n for stop, n in zip(box.end, tensor.shape, strict=True)
    ):
        raise CorruptError(
            f"{described(box)} is out of bounds for shape {tensor.shape}",
            key=key,
            file=_file(array),
        )
    if array is None:
        return

    # Bounds of the array, whose rank may differ.
    region = region_shape(box, len(array.shape))
    if region is None or not all(
        0 <= start <= extent - n
        for start, n, extent in zip(fragment.at, region, array.shape, strict=True)
    ):
        raise CorruptError(
            f"{described(box)} does not fit at {fragment.at} "
            f"in array {array.name!r} of shape {array.shape}",
            key=key,
            file=_file(array),
        )


# A hostile metadata file of 5,000 chunks can have millions of overlaps.
_MOST_OVERLAPS = 250_000
OVERLAPS_RULE = "plan.overlaps"
"""Rule of the error about implausibly many overlaps, which no destination avoids."""


def _split_primaries(
    key: str,
    candidates: Sequence[Fragment],
) -> tuple[list[tuple[Box, Fragment]], list[tuple[Box, Fragment, Fragment]]]:
    """Return ``Match.pieces`` and ``Match.copies`` of fragments; earlier fragments are preferred.

    Raises:
        CorruptError: implausibly many fragments overlap.
    """
    # Replicas have equal boxes. One that is the same bytes of the same array needs no comparison.
    primary_of: dict[Box, Fragment] = {}
    copies = []
    for fragment in candidates:
        primary = primary_of.setdefault(fragment.box, fragment)
        if primary is not fragment and (fragment.array, fragment.at) != (primary.array, primary.at):
            copies.append((fragment.box, fragment, primary))

    # Distinct boxes rarely overlap.
    if first_overlap(list(primary_of)) is None:
        return list(primary_of.items()), copies
    pieces, overlaps = _subtract_earlier(key, list(primary_of.values()))
    return pieces, copies + overlaps


def _subtract_earlier(
    key: str,
    fragments: Sequence[Fragment],
) -> tuple[list[tuple[Box, Fragment]], list[tuple[Box, Fragment, Fragment]]]:
    """Return what each fragment adds to the earlier ones, and what it has in common with them.

    Raises:
        CorruptError: implausibly many fragments overlap.
    """
    index = BoxIndex([fragment.box for fragment in fragments])
    pieces: list[tuple[Box, Fragment]] = []
    copies: list[tuple[Box, Fragment, Fragment]] = []
    n_overlaps = 0
    for number, fragment in enumerate(fragments):
        # The remainder stays disjoint, so that every element is compared with one primary only.
        remainder = [fragment.box]
        for earlier, common in sorted(index.meeting(fragment.box), key=lambda hit: hit[0]):
            if earlier >= number:
                break
            n_overlaps += 1
            if n_overlaps > _MOST_OVERLAPS:
                raise CorruptError(
                    f"more than {_MOST_OVERLAPS:,} pairs of the tensor's shards overlap",
                    key=key,
                    hint=UNLIKE_ANY_WRITER,
                    rule=OVERLAPS_RULE,
                )
            copies += [
                (part, fragment, fragments[earlier])
                for box in remainder
                if (part := box.intersect(common)) is not None
            ]
            remainder = [part for box in remainder for part in box.subtract(common)]
        pieces += [(box, fragment) for box in remainder]
    return pieces, copies


def _pair(
    key: str, shape: Shape, boxes: list[Box], targets: list[TargetFragment]
) -> list[tuple[int, int, Box]]:
    """Return ``Match.pairs``: every source piece and target that meet, with their common box.

    Args:
        shape: shape of the tensor.
        boxes: disjoint boxes of the source pieces.

    Raises:
        MissingShardError: a part of a target has no source.
    """
    number_of = {box: number for number, box in enumerate(boxes)}
    index: BoxIndex | None = None
    pairs = []
    for n_target, fragment in enumerate(targets):
        # Equal boxes need no search; the index is built for the first box that differs.
        box = fragment.box
        same = number_of.get(box)
        if same is not None:
            pairs.append((same, n_target, box))
            continue
        index = index or BoxIndex(boxes)
        hits = sorted(index.meeting(box), key=lambda hit: hit[1].offset)

        # The pieces are disjoint: they cover the target exactly if the volumes agree.
        if sum(common.n_elements for _, common in hits) != box.n_elements:
            hole = first_hole(box, [common for _, common in hits])
            raise MissingShardError(
                f"{described(hole)} of the tensor (shape {shape}) is missing",
                key=key,
                hint="a shard is missing or incomplete; "
                "copy the checkpoint again, or use an older one",
            )
        pairs += [(n_piece, n_target, common) for n_piece, common in hits]
    return pairs


def _check_covered(key: str, tensor: TargetTensor, targets: Sequence[TargetFragment]) -> None:
    """Raise unless the target fragments, which may repeat or overlap, cover the tensor.

    Raises:
        CorruptError: a region of the tensor is not in any fragment.
    """
    if tensor.n_elements == 0:
        return
    distinct = list(dict.fromkeys(fragment.box for fragment in targets))
    region = full_box(tensor.shape)
    if distinct == [region] or is_tiled(region, distinct):
        return
    # Boxes that overlap do not tile the region, but may still cover it.
    hole = first_hole(region, distinct)
    if hole is not None:
        raise CorruptError(f"{described(hole)} would not be written to any file", key=key)


def _file(array: AnyArray | None) -> str | None:
    """Return the file of an array, for errors; planned arrays and zeros have none."""
    return array.extent.file if isinstance(array, StoredArray) else None
