"""Which parameter is where in a stored buffer: computed from the arguments, else found by the
values; always proven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm

from core.errors import UnsupportedError
from core.megatron.optimizer.flat.buffers import Bucketing, discover, fit_buckets, lay_out_buffer

HINT = (
    "leave the optimizer out with --no-optim (the weights are exact), or save once as torch_dist with "
    "--dist-ckpt-optim-fully-reshardable"
)


@dataclass(frozen=True, slots=True)
class FlatParam:
    """A parameter of a rank, as its buffer sees it.

    Args:
        name: for messages.
        n: elements of the parameter.
        is_shared: an embedding that pipeline stages share.
    """

    name: str
    n: int
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class FlatSpace:
    """A buffer of a rank, before it is known what is where.

    Args:
        params: in the model's order.
        n_elements: elements of the buffer.
        buckets: elements of every bucket, where they are stored.
        bucketing: what the arguments say.
        chunk: (virtual stage, pipeline stage).
        n_rank: elements of all the rank's parameters.
        n_copies: ranks that share the buffer, as far as the arguments say.
        label, rank: for messages.
    """

    params: Sequence[FlatParam]
    n_elements: int
    buckets: Sequence[int] | None
    bucketing: Bucketing
    chunk: tuple[int, int]
    n_rank: int
    n_copies: int
    label: str
    rank: str

    @property
    def sizes(self) -> list[int]:
        """Elements of the parameters."""
        return [param.n for param in self.params]


@dataclass(frozen=True, slots=True)
class ParamStarts:
    """The elements at which the parameters of a buffer begin.

    Args:
        starts: elements of the buffer before each parameter, in the model's order.
        notes: what the user should know about it.
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
        fits: whether the masters of a parameter (its place) may begin at an element, by their
            values; None where there are no values to look at.
        all_fit: whether all parameters fit where they are said to begin: what ``fits`` says of
            each, asked at once.

    Raises:
        UnsupportedError: no layout that Megatron makes has this length, the values contradict it,
            or several fit.
    """
    tried: list[list[int]] = []
    for starts in _computed(space):
        if starts in tried:
            continue
        tried.append(starts)
        if fits is None:
            return ParamStarts(starts)
        if all_fit(starts) if all_fit is not None else all(map(fits, range(len(starts)), starts)):
            return ParamStarts(starts)

    # The arguments may not describe the run that saved: search for starts at which all values fit.
    possible: list[list[int]] = []
    if fits is not None and space.buckets is None:
        divisors = (
            [lcm(space.n_copies, 128)] if any(param.is_shared for param in space.params) else []
        )
        possible = discover(space.sizes, space.n_elements, fits, divisors=divisors)
    if len(possible) == 1:
        note = (
            f"{space.rank}: where parameters lie in {space.label} of the optimizer was found by comparing masters with "
            "weights; the training arguments say otherwise"
        )
        return ParamStarts(possible[0], (note,))
    if possible:
        places = [
            place
            for place, starts in enumerate(zip(*possible, strict=True))
            if len(set(starts)) > 1
        ]
        raise UnsupportedError(
            f"where parameters lie in {space.label} of the optimizer is not certain: "
            f"{_listed([space.params[place].name for place in places])} may begin at several places",
            rank=space.rank,
            hint=HINT,
        )
    raise UnsupportedError(_contradiction(space, tried, fits), rank=space.rank, hint=HINT)


def _computed(space: FlatSpace) -> list[list[int]]:
    """Return the layouts that the arguments, or the buckets' sizes, allow; the likeliest first."""
    sizes = space.sizes
    if space.buckets is not None:
        fitted = [fit_buckets(sizes, space.buckets), fit_buckets(sizes, space.buckets, step=1)]
        return [[slot.start for slot in layout.slots] for layout in fitted if layout is not None]
    shared = frozenset(place for place, param in enumerate(space.params) if param.is_shared)
    vp_rank, pp_rank = space.chunk
    stated = space.bucketing.has_buckets
    wanted = [
        replace(space.bucketing, has_buckets=has).bucket_size(
            pp_rank=pp_rank, vp_rank=vp_rank, n_params=space.n_rank
        )
        for has in ((False, True) if stated is None else (stated,))
    ]
    layouts = [lay_out_buffer(sizes, bucket_size=size, shared=shared) for size in wanted]
    return [
        [slot.start for slot in layout.slots]
        for layout in layouts
        if layout.n_elements == space.n_elements
    ]


def _contradiction(
    space: FlatSpace, tried: list[list[int]], fits: Callable[[int, int], bool] | None
) -> str:
    """Return the reason why no layout is right, in words."""
    buffer = f"{space.label} of the optimizer has {space.n_elements} elements"
    if not tried or fits is None:
        n_params = sum(space.sizes)
        return (
            f"{buffer}, the {len(space.params)} parameters it should hold {n_params}: "
            "no layout of Megatron's has both"
        )
    for starts in tried:
        for place in reversed(range(len(starts))):
            if not fits(place, starts[place]):
                param, start = space.params[place], starts[place]
                return (
                    f"the masters of {param.name} should be elements {start}–{start + param.n} of {space.label}, but "
                    "what is there does not round to its weights"
                )
    raise AssertionError("one of them fits")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" … ({len(names)} in all)" if len(names) > 4 else "")
