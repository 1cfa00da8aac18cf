"""The offsets of parameters in a stored buffer, computed from the arguments or found by values.

Either way, the values prove them: at its offset, the master weights round to a parameter's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

from core.errors import UnsupportedError, list_some
from core.megatron.optimizer.flat.buffers import (
    Bucketing,
    aligned,
    discover,
    fit_buckets,
    lay_out_buffer,
)
from core.values import dataclass

HINT = (
    "drop the optimizer with --no-optim (the weights are unaffected), or save once in Megatron as "
    "torch_dist with --dist-ckpt-optim-fully-reshardable"
)
UNPROVEN = "optim.buffers"
"""Rule of the error for a buffer in which master weights do not round to weights."""


@dataclass(frozen=True, slots=True)
class FlatParam:
    """The facts about a parameter that decide its place in a buffer.

    Args:
        name: name for messages.
        n: number of elements.
        is_shared: the parameter is an embedding that pipeline stages share.
    """

    name: str
    n: int
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class FlatSpace:
    """A buffer of a rank, whose parameters' offsets are still unknown.

    Args:
        params: parameters in the model's order.
        n_elements: number of elements in the buffer.
        buckets: number of elements of every bucket; None if the file does not record it.
        bucketing: settings of buckets in the arguments.
        chunk: (virtual stage, pipeline stage).
        n_rank: number of elements of all the rank's parameters.
        label, rank: names of the buffer and of the rank directory, for messages.
    """

    params: Sequence[FlatParam]
    n_elements: int
    buckets: Sequence[int] | None
    bucketing: Bucketing
    chunk: tuple[int, int]
    n_rank: int
    label: str
    rank: str

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each parameter."""
        return [param.n for param in self.params]


@dataclass(frozen=True, slots=True)
class ParamStarts:
    """The elements at which the parameters of a buffer begin.

    Args:
        starts: number of elements of the buffer before each parameter, in the model's order.
        notes: notes for the user.
    """

    starts: list[int]
    notes: tuple[str, ...] = ()


def find_starts(
    space: FlatSpace,
    fits: Callable[[int, int], bool] | None,
    *,
    all_fit: Callable[[Sequence[int]], bool] | None = None,
) -> ParamStarts:
    """Find where every parameter begins in a buffer.

    Args:
        fits: checks by values if the master weights of a parameter (its index) may begin at an
            element; None if there are no values to compare.
        all_fit: checks if all parameters fit at their starts, like ``fits`` for each, but faster.

    Raises:
        UnsupportedError: no layout of Megatron's has this length, the values contradict it, or
            several layouts fit.
    """
    # Without values, the layout that the arguments give has to do.
    candidates = _compute_layouts(space)
    for starts in candidates:
        if fits is None:
            return ParamStarts(list(starts))
        if all_fit(starts) if all_fit is not None else all(map(fits, range(len(starts)), starts)):
            return ParamStarts(list(starts))

    # The arguments may not describe the run that saved: search for starts at which all values fit.
    possible: list[list[int]] = []
    if fits is not None and space.buckets is None:
        # megatron-core 0.12 pads to this multiple before a shared embedding.
        has_shared = any(param.is_shared for param in space.params)
        divisors = [lcm(space.bucketing.n_ranks, 128)] if has_shared else []
        possible = discover(space.sizes, space.n_elements, fits, divisors=divisors)
    if len(possible) == 1:
        note = (
            f"{space.rank}: ckpt found the parameters' offsets in the optimizer's {space.label} by "
            "comparing master weights with weights, because the training arguments imply different "
            "offsets"
        )
        return ParamStarts(possible[0], (note,))

    # Name the parameters that start at different elements in the possible layouts.
    if possible:
        names = [
            param.name
            for param, starts in zip(space.params, zip(*possible, strict=True), strict=True)
            if len(set(starts)) > 1
        ]
        raise UnsupportedError(
            f"the parameters' offsets in the optimizer's {space.label} are ambiguous, because "
            f"{list_some(names, 4)} may begin at several elements",
            rank=space.rank,
            hint=HINT,
        )
    raise UnsupportedError(
        _describe_contradiction(space, candidates, fits),
        rank=space.rank,
        hint=HINT,
        rule=UNPROVEN,
    )


def find_trained(space: FlatSpace, fits: Callable[[int, int], bool]) -> list[int | None] | None:
    """Find which parameters a buffer holds that has fewer elements than all of them together.

    Parameters that are not trained (``requires_grad=False``) have no place in a buffer, and the
    files do not list them: the values tell. The others follow one another as if there were none.

    Args:
        fits: as for ``find_starts``.

    Returns:
        The start of each parameter, None for one that is not trained; or None if no layout of
        Megatron's fits.

    Raises:
        UnsupportedError: the values of a parameter that is not trained are those of a trained one.
    """
    for size in space.bucketing.bucket_sizes(space.chunk, n_params=space.n_rank):
        starts, n_elements = _walk_trained(space, size, fits)
        if n_elements != space.n_elements or all(start is None for start in starts):
            continue

        # Equal values could mean that another of them is the trained one.
        for place, start in enumerate(starts):
            for other, taken in enumerate(starts):
                if start is not None or taken is None or space.sizes[other] != space.sizes[place]:
                    continue
                if fits(place, taken):
                    raise UnsupportedError(
                        f"the optimizer's {space.label} contains either {space.params[other].name} "
                        f"or {space.params[place].name}, but ckpt cannot tell which, because their "
                        "values are equal",
                        rank=space.rank,
                        hint=HINT,
                    )
        return starts
    return None


def _walk_trained(
    space: FlatSpace, bucket_size: int | None, fits: Callable[[int, int], bool]
) -> tuple[list[int | None], int]:
    """Lay out the parameters whose values fit, as ``lay_out_buffer`` does.

    Returns:
        The start of each parameter, None if its values do not fit; the length of such a buffer.
    """
    starts: list[int | None] = [None] * len(space.params)
    before = end = 0
    for place in reversed(range(len(space.params))):
        param, offset = space.params[place], aligned(end)
        is_first = param.is_shared and end > 0
        start = before + offset
        if start + param.n > space.n_elements or not fits(place, start):
            continue
        if is_first:
            before, offset = start, 0
        starts[place] = start
        end = offset + param.n
        if param.is_shared or (bucket_size is not None and end >= bucket_size):
            before, end = before + end, 0
    return starts, before + end


def _compute_layouts(space: FlatSpace) -> list[tuple[int, ...]]:
    """Return starts of all parameters, in each layout that fits; the most likely layout first.

    The sizes of the buckets decide, or else the training arguments and the buffer's size.
    """
    # Files that record buckets (before 2024-02) are aligned, or from before the alignment.
    sizes = space.sizes
    if space.buckets is not None:
        layouts = [fit_buckets(sizes, space.buckets), fit_buckets(sizes, space.buckets, step=1)]
    else:
        shared = frozenset(place for place, param in enumerate(space.params) if param.is_shared)
        layouts = []
        for size in space.bucketing.bucket_sizes(space.chunk, n_params=space.n_rank):
            layout = lay_out_buffer(sizes, bucket_size=size, shared=shared)
            layouts.append(layout if layout.n_elements == space.n_elements else None)
    starts = (tuple(slot.start for slot in layout.slots) for layout in layouts if layout)
    return list(dict.fromkeys(starts))


def _describe_contradiction(
    space: FlatSpace,
    candidates: Sequence[Sequence[int]],
    fits: Callable[[int, int], bool] | None,
) -> str:
    """Return the message that no layout is right, with the first parameter that contradicts it."""
    if not candidates or fits is None:
        return (
            f"the optimizer's {space.label} has {space.n_elements} elements and its "
            f"{len(space.params)} parameters have {sum(space.sizes)}, which fits none of "
            "Megatron's layouts"
            + (
                " (the buffer does not contain parameters that are not trained)"
                if space.n_elements < sum(space.sizes)
                else ""
            )
        )
    for starts in candidates:
        for place in reversed(range(len(starts))):
            if not fits(place, starts[place]):
                param, start = space.params[place], starts[place]
                return (
                    f"the master weights of {param.name} should be elements "
                    f"{start}–{start + param.n} of the optimizer's {space.label}, but the values "
                    "there do not round to its weights"
                )
    raise AssertionError("a candidate that fits was returned before")
