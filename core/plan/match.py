"""Match the fragments of source and target of one tensor: which source fills which part, proven."""

from __future__ import annotations

from collections.abc import Sequence

from core.arrays.box import Box, full_box
from core.arrays.cast import check_cast
from core.arrays.coverage import BoxIndex, first_hole, first_overlap, is_tiled
from core.arrays.fast_value import value
from core.catalog.catalog import (
    AnyFragment,
    Catalog,
    Fragment,
    TargetCatalog,
    TargetFragment,
    TensorMeta,
)
from core.catalog.stored import AnyArray, StoredArray
from core.errors import CorruptError, MissingShardError
from core.plan.positions import described, region_shape


@value(frozen=True, slots=True)
class Match:
    """The proven work of one tensor.

    Args:
        meta: the target tensor.
        dtype: dtype of the source.
        pieces: primary sources: disjoint boxes, each a part of its fragment's box, none empty.
        copies: (common box, fragment, primary): fragments whose bytes must equal the primary's in
            that box.
        targets: the target fragments that are not empty.
        pairs: (number of the piece, number of the target, common box).
    """

    meta: TensorMeta
    dtype: str
    pieces: Sequence[tuple[Box, Fragment]]
    copies: Sequence[tuple[Box, Fragment, Fragment]]
    targets: Sequence[TargetFragment]
    pairs: Sequence[tuple[int, int, Box]]


def match(
    source: Catalog,
    target: TargetCatalog,
    key: str,
    *,
    zeros: Sequence[Box] = (),
    covers: bool = True,
) -> Match:
    """Match source and target of one tensor, and prove that every element is filled.

    Args:
        zeros: boxes that no source holds and that are zero.
        covers: the target's fragments must cover the tensor; they need not if other processes fill
        the rest.

    Raises:
        MissingShardError, CorruptError, UnsupportedError: as for ``make_plan``.
    """
    return matched(source, target.meta(key), target.fragments(key), zeros=zeros, covers=covers)


def matched(
    source: Catalog,
    meta: TensorMeta,
    wanted: Sequence[TargetFragment],
    *,
    zeros: Sequence[Box] = (),
    covers: bool = True,
) -> Match:
    """Do what ``match`` does for a target tensor and its fragments.

    Args:
        meta: the target tensor.
        wanted: the target's fragments.
        zeros, covers: as for ``match``.
    """
    key = meta.key
    if key not in source.tensors and key not in source.hidden:
        raise MissingShardError("the source has no such tensor", key=key)
    have, stored = source.meta(key), source.fragments(key)
    if len(stored) == len(wanted) == 1 and not zeros and have.shape == meta.shape:
        if (simple := _of_whole(stored[0], have, wanted[0], meta)) is not None:
            return simple

    # Check both sides on their own.
    targets = [fragment for fragment in wanted if not fragment.box.is_empty]
    _check_shapes(have, meta, zeros)
    dtype = _check_fragments(stored, have)
    _check_targets(targets, meta, dtype=dtype)

    # Match them: whole tensors at once, others box by box.
    offered = [fragment for fragment in stored if not fragment.box.is_empty]
    offered += [Fragment(key, box, None, ()) for box in zeros if not box.is_empty]
    if offered and targets and _are_whole(offered, meta) and _are_whole(targets, meta):
        return _match_whole(meta, dtype, offered, targets)
    pieces, copies = _primaries(offered)
    pairs = _pairs(key, [box for box, _ in pieces], targets, meta)
    if covers:
        _check_covered(meta, [fragment.box for fragment in targets])
    return Match(meta, dtype, pieces, copies, targets, pairs)


def _match_whole(
    meta: TensorMeta, dtype: str, offered: Sequence[Fragment], targets: Sequence[TargetFragment]
) -> Match:
    """Return the work of a tensor whose fragments are all whole; the first is the primary."""
    primary = offered[0]
    copies = [
        (fragment.box, fragment, primary)
        for fragment in offered[1:]
        if fragment.array != primary.array
    ]
    box = primary.box
    return Match(
        meta, dtype, [(box, primary)], copies, targets, [(0, n, box) for n in range(len(targets))]
    )


def _of_whole(
    fragment: Fragment, have: TensorMeta, target: TargetFragment, meta: TensorMeta
) -> Match | None:
    """Return the work of a tensor that is one array on both sides, as most are, or None."""
    array, planned = fragment.array, target.array
    if array is None or planned is None or planned.dtype != meta.dtype or fragment.box.is_empty:
        return None
    if not (is_all(fragment, array, have) and is_all(target, planned, meta)):
        return None
    if array.dtype != meta.dtype:
        check_cast(array.dtype, meta.dtype, key=meta.key)
    return Match(
        meta, array.dtype, [(fragment.box, fragment)], (), [target], [(0, 0, fragment.box)]
    )


def is_all(fragment: AnyFragment, array: AnyArray, meta: TensorMeta) -> bool:
    """Return whether a fragment is all of the tensor and all of its array."""
    box = fragment.box
    return box.shape == meta.shape == array.shape and not any(box.offset) and not any(fragment.at)


def _are_whole(fragments: Sequence[AnyFragment], meta: TensorMeta) -> bool:
    """Return whether every fragment is all of the tensor and all of its array.

    Then nothing is cut, as with experts and norms.
    """
    return all(
        fragment.box.shape == meta.shape
        and fragment.array is not None
        and fragment.array.shape == meta.shape
        for fragment in fragments
    )


def _check_shapes(have: TensorMeta, want: TensorMeta, zeros: Sequence[Box]) -> None:
    """Raise unless source and target have one shape, or the target is larger by zeros.

    Raises:
        CorruptError: the shapes differ.
    """
    if have.shape == want.shape or want.flexible:
        return
    grows = len(have.shape) == len(want.shape) and all(
        a <= b for a, b in zip(have.shape, want.shape, strict=True)
    )
    if not (zeros and grows):
        raise CorruptError(
            f"the source has shape {have.shape}, but the target has {want.shape}", key=want.key
        )


def _check_fragments(fragments: Sequence[Fragment], meta: TensorMeta) -> str:
    """Check the bounds of the source's fragments, and return the one dtype of their arrays.

    Raises:
        CorruptError: a fragment is out of bounds, or the dtypes differ.
    """
    dtype = None
    for fragment in fragments:
        _check_bounds(fragment, meta)
        array = fragment.array
        if array is None:
            continue
        if dtype is not None and array.dtype != dtype:
            raise CorruptError(
                f"stored partly as {dtype} and partly as {array.dtype}",
                key=meta.key,
                file=array.extent.file,
            )
        dtype = array.dtype
    return meta.dtype if dtype is None else dtype


def _check_targets(targets: Sequence[TargetFragment], meta: TensorMeta, *, dtype: str) -> None:
    """Raise unless every fragment of the target lies in bounds, in an array of the right dtype.

    Args:
        dtype: dtype of the source.

    Raises:
        CorruptError: a fragment does not.
        UnsupportedError: the source cannot be cast to the target's dtype.
    """
    for fragment in targets:
        _check_bounds(fragment, meta)
        if fragment.array is None:
            raise CorruptError(
                f"{described(fragment.box)} of the target has no array", key=meta.key
            )
        if fragment.array.dtype != meta.dtype:
            raise CorruptError(
                f"array {fragment.array.name!r} is {fragment.array.dtype}, not {meta.dtype}",
                key=meta.key,
            )
    if dtype != meta.dtype:
        check_cast(dtype, meta.dtype, key=meta.key)


def _check_bounds(fragment: AnyFragment, meta: TensorMeta) -> None:
    """Raise unless a fragment lies in its tensor and in its array.

    Raises:
        CorruptError: it does not.
    """
    box, array = fragment.box, fragment.array
    if array is not None and is_all(fragment, array, meta):
        return
    if box.rank != len(meta.shape) or any(
        stop > n for stop, n in zip(box.end, meta.shape, strict=True)
    ):
        raise CorruptError(
            f"{described(box)} is out of bounds for shape {meta.shape}",
            key=meta.key,
            file=None if array is None else _file(array),
        )
    if array is None:
        return
    shape = region_shape(box, len(array.shape))
    fits = shape is not None and all(
        start >= 0 and start + n <= extent
        for start, n, extent in zip(fragment.at, shape, array.shape, strict=True)
    )
    if not fits:
        raise CorruptError(
            f"{described(box)} does not fit at {fragment.at} in array {array.name!r} of shape {array.shape}",
            key=meta.key,
            file=_file(array),
        )


_MOST_OVERLAPS = 250_000


def _primaries(
    offered: Sequence[Fragment],
) -> tuple[list[tuple[Box, Fragment]], list[tuple[Box, Fragment, Fragment]]]:
    """Return disjoint pieces, earlier fragments first, and the copies that overlap them.

    Raises:
        CorruptError: implausibly many pieces overlap.
    """
    first: dict[Box, Fragment] = {}
    copies = []
    for fragment in offered:
        primary = first.setdefault(fragment.box, fragment)
        if primary is not fragment and (fragment.array, fragment.at) != (primary.array, primary.at):
            copies.append((fragment.box, fragment, primary))
    boxes = list(first)
    if first_overlap(boxes) is None:
        return list(first.items()), copies
    index = BoxIndex(boxes)
    fragments = list(first.values())
    pieces: list[tuple[Box, Fragment]] = []
    n_overlaps = 0
    for number, fragment in enumerate(fragments):
        rest = [fragment.box]
        for earlier, common in sorted(index.meeting(fragment.box), key=lambda hit: hit[0]):
            if earlier < number:
                n_overlaps += 1
                if (
                    n_overlaps > _MOST_OVERLAPS
                ):  # a hostile metadata file of 5,000 chunks can have millions
                    raise CorruptError(
                        f"more than {_MOST_OVERLAPS:,} pairs of its pieces overlap",
                        key=fragment.key,
                    )
                copies += [
                    (part, fragment, fragments[earlier])
                    for old in rest
                    if (part := old.intersect(common)) is not None
                ]
                rest = [piece for old in rest for piece in old.subtract(common)]
        pieces += [(box, fragment) for box in rest]
    return pieces, copies


def _pairs(
    key: str, boxes: list[Box], targets: list[TargetFragment], meta: TensorMeta
) -> list[tuple[int, int, Box]]:
    """Return (piece number, target number, common box) for every piece and target that meet.

    Raises:
        MissingShardError: a part of a target has no source.
    """
    number_of = {box: number for number, box in enumerate(boxes)}
    index: BoxIndex | None = None
    pairs = []
    for n_target, fragment in enumerate(targets):
        box = fragment.box
        same = number_of.get(box)
        if same is not None:
            pairs.append((same, n_target, box))
            continue
        index = index or BoxIndex(boxes)
        hits = sorted(index.meeting(box), key=lambda hit: hit[1].offset)
        if sum(common.n_elements for _, common in hits) != box.n_elements:
            hole = first_hole(box, [common for _, common in hits])
            raise MissingShardError(
                f"{described(hole)} of the tensor of shape {meta.shape} is missing",
                key=key,
                hint="a shard is missing or incomplete; copy the checkpoint again or use an older one",
            )
        pairs += [(n_piece, n_target, common) for n_piece, common in hits]
    return pairs


def _check_covered(meta: TensorMeta, boxes: list[Box]) -> None:
    """Raise unless boxes, which may repeat or overlap, cover a tensor.

    Raises:
        CorruptError: a region of the tensor lies in no box.
    """
    if meta.n_elements == 0:
        return
    distinct = list(dict.fromkeys(boxes))
    region = full_box(meta.shape)
    if distinct == [region] or is_tiled(region, distinct):
        return
    hole = first_hole(region, distinct)
    if hole is not None:
        raise CorruptError(f"{described(hole)} would not be written anywhere", key=meta.key)


def _file(array: AnyArray) -> str | None:
    """Return the file of a stored array, for errors."""
    return array.extent.file if isinstance(array, StoredArray) else None
