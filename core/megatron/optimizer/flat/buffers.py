"""The distributed optimizer's flat buffers: where each parameter lies in them.

Parameters of one model chunk, one dtype and one kind (experts that expert parallelism distributes,
or the others) share a buffer, the last one first. A parameter starts at a multiple of 64 elements;
a bucket ends as soon as it holds ``bucket_size`` elements, and around an embedding that pipeline
stages share. Buckets are padded at their end in
memory; files leave that padding out, but not what stands before a parameter inside a bucket::

    memory       | output_layer . . | norm . . . | fc2    pad || fc1 . . | qkv      pad ||
    file         | output_layer . . | norm . . . | fc2        || fc1 . . | qkv          ||
                 ^ multiple of 64 in its bucket

So in a file a parameter starts at the next multiple of 64 after the one before, counted from its
bucket's beginning, or exactly where that one ends, if a bucket ends there. Neither depends on how
many ranks share the buffer.

Source: megatron-core 0.12.1, 0.15.0 and 0.16.1, ``core/distributed/{param_and_grad_buffer,
distributed_data_parallel}.py`` (checked in tests against 0.16.1's own class); for the arguments
``get_model`` of Megatron-LM's ``training/training.py``.

Not supported: the layer-wise optimizer's buffers, those of Megatron-FSDP, and of parameters that
are FP8 themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from core.errors import UnsupportedError
from core.megatron.model.args import size_in

ALIGNMENT = 64
"""Elements; a parameter starts at a multiple of it in its bucket."""

MIN_BUCKET = 40_000_000
"""Elements of a bucket where the arguments do not say."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a parameter in a buffer.

    Args:
        bucket: number of its bucket.
        start: elements of the file's buffer before it.
    """

    bucket: int
    start: int


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """A buffer as files have it.

    Args:
        slots: places of the parameters, in the model's order.
        buckets: elements of each bucket, without the padding at its end.
    """

    slots: tuple[Slot, ...]
    buckets: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        """Elements of the buffer in a file (Megatron's ``numel_unpadded``)."""
        return sum(self.buckets)


def aligned(offset: int) -> int:
    """Return the next offset at which a parameter may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def lay_out_buffer(
    sizes: Sequence[int], *, bucket_size: int | None, shared: frozenset[int] = frozenset()
) -> BufferLayout:
    """Return the places that Megatron gives parameters in a buffer.

    Args:
        sizes: elements of the parameters, in the model's order.
        bucket_size: elements after which a bucket ends; None makes one bucket of all.
        shared: places in ``sizes`` of embeddings that pipeline stages share.
    """
    slots: list[Slot] = []
    buckets: list[int] = []
    before = end = 0  # elements of the finished buckets, and of this one
    for place in reversed(range(len(sizes))):
        offset = aligned(end)
        if place in shared and end:
            buckets.append(offset)
            before, offset = before + offset, 0
        slots.append(Slot(len(buckets), before + offset))
        end = offset + sizes[place]
        if place in shared or (bucket_size is not None and end >= bucket_size):
            buckets.append(end)
            before, end = before + end, 0
    if end:
        buckets.append(end)
    return BufferLayout(tuple(reversed(slots)), tuple(buckets))


def fit_buckets(
    sizes: Sequence[int], buckets: Sequence[int], *, step: int = ALIGNMENT
) -> BufferLayout | None:
    """Return the places of parameters in buckets of known sizes; None if they do not fit.

    Args:
        sizes: elements of the parameters, in the model's order.
        buckets: elements of each bucket, without the padding at its end.
        step: what a parameter's offset is a multiple of; 1 for megatron-core of before 2024-02.
    """
    slots: list[Slot] = []
    number = before = end = 0
    for size in reversed(sizes):
        offset = -(-end // step) * step
        if end and number < len(buckets) and offset >= buckets[number]:
            before, number, offset = before + buckets[number], number + 1, 0
        if number >= len(buckets) or offset + size > buckets[number]:
            return None
        slots.append(Slot(number, before + offset))
        end = offset + size
    is_full = number == len(buckets) - 1 and end == buckets[-1] if sizes else not buckets
    return BufferLayout(tuple(reversed(slots)), tuple(buckets)) if is_full else None


Fits = Callable[[int, int], bool]
"""Tells whether a parameter (its place in the model's order) may start at an element of the
buffer.
"""

_MAX_BRANCHES = 64


@dataclass(frozen=True, slots=True)
class _PartialLayout:
    """The beginning of a layout: number of its last start, end of that parameter, start of its
    bucket.
    """

    last: int
    end: int
    bucket: int


def discover(
    sizes: Sequence[int], n_elements: int, fits: Fits, *, divisors: Sequence[int] = ()
) -> list[list[int]]:
    """Find the starts of the parameters in a file's buffer whose buckets are not stated anywhere.

    Each starts where the one before ends (a new bucket), or at the next multiple of 64 of its
    bucket; megatron-core 0.12 may pad to another multiple before an embedding that stages share.

    Args:
        sizes: elements of the parameters, in the model's order.
        n_elements: elements of the buffer.
        fits: asked for every possible start.
        divisors: the other multiples that the beginning of a bucket may have been padded to.

    Returns:
        Every possibility, each in the model's order; [] if none fits, or if more than 64 do.
    """
    # Grow all layouts at once, from the last parameter, and forget those that do not fit.
    numbers: dict[tuple[int, int], int] = {}  # (number before, start), in order of their numbers
    branches = [_PartialLayout(-1, 0, 0)]
    for place in reversed(range(len(sizes))):
        fits_at: dict[int, bool] = {}
        next_branches: dict[tuple[int, int], _PartialLayout] = {}
        for branch in branches:
            for start, bucket in _candidates(branch, divisors):
                end = start + sizes[place]
                if start not in fits_at:
                    fits_at[start] = end <= n_elements and fits(place, start)
                if fits_at[start]:
                    last = numbers.setdefault((branch.last, start), len(numbers))
                    phase = (end - bucket) % lcm(ALIGNMENT, *divisors)
                    next_branches.setdefault((last, phase), _PartialLayout(last, end, bucket))
        branches = list(next_branches.values())
        if len(branches) > _MAX_BRANCHES:
            return []
    before = list(numbers)
    return [
        _starts(before, last)
        for last in {branch.last: None for branch in branches if branch.end == n_elements}
    ]


def _starts(before: Sequence[tuple[int, int]], last: int) -> list[int]:
    """Return the starts of a branch, its last one first."""
    starts = []
    while last >= 0:
        last, start = before[last]
        starts.append(start)
    return starts


def _candidates(branch: _PartialLayout, divisors: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, beginning of its bucket) of each place where the next parameter may begin."""
    used = branch.end - branch.bucket
    candidates = [(branch.end, branch.end), (branch.bucket + aligned(used), branch.bucket)]
    for divisor in (ALIGNMENT, *divisors):
        start = branch.bucket + -(-used // divisor) * divisor
        candidates.append((start, start))
    return list(dict.fromkeys(candidates))


@dataclass(frozen=True, slots=True)
class Bucketing:
    """The settings of buckets in the training arguments.

    Args:
        has_buckets: whether buffers are cut into buckets (``overlap_grad_reduce``); None where
            nothing says.
        size: elements after which a bucket ends (``ddp_bucket_size``).
        n_parts: a bucket ends after the rank's parameters divided by this (``ddp_num_buckets``), or
            None.
        is_chunk_alone: no chunk is cut (``overlap_param_gather_with_optimizer_step``).
        n_ranks: ranks that share a buffer.
    """

    has_buckets: bool | None
    size: int
    n_parts: int | None
    is_chunk_alone: bool
    n_ranks: int

    def bucket_size(self, *, pp_rank: int, vp_rank: int, n_params: int) -> int | None:
        """Return the elements after which a bucket ends; None where there is only one.

        Only the first stage's first chunk has several: the others' communication does not delay
        anybody.

        Args:
            n_params: elements of all the rank's parameters.
        """
        if not self.has_buckets or pp_rank > 0 or vp_rank > 0 or self.is_chunk_alone:
            return None
        return self.size if self.n_parts is None else n_params // self.n_parts


def bucketing_of(fields: Mapping[str, object]) -> Bucketing:
    """Return the bucketing of a run.

    Args:
        fields: training arguments of the run.

    Raises:
        UnsupportedError: its buffers are of a kind that is not handled.
        CorruptError: a size is no positive integer.
    """
    for name, owner in _OTHERS.items():
        if fields.get(name):
            raise UnsupportedError(f"the optimizer's buffers are those of {owner} ({name} is set)")
    overlaps = fields.get("overlap_grad_reduce")
    n_ranks = (size_in(fields, "data_parallel_size") or 1) * (
        size_in(fields, "context_parallel_size") or 1
    )
    return Bucketing(
        has_buckets=None if overlaps is None else bool(overlaps),
        size=size_in(fields, "ddp_bucket_size") or max(MIN_BUCKET, 1_000_000 * n_ranks),
        n_parts=size_in(fields, "ddp_num_buckets"),
        is_chunk_alone=bool(fields.get("overlap_param_gather_with_optimizer_step")),
        n_ranks=n_ranks,
    )


_OTHERS = {
    "use_megatron_fsdp": "Megatron-FSDP",
    "use_custom_fsdp": "Megatron-FSDP",
    "use_torch_fsdp2": "FSDP2",
    "use_layer_wise_distributed_optimizer": "the layer-wise optimizer",
}
