"""The offsets of parameters in the distributed optimizer's flat buffers.

Parameters of one model chunk, one dtype and one kind (experts that expert parallelism distributes,
or the others) share a buffer, in reverse order. A parameter starts at a multiple of 64 elements. A
bucket ends after the parameter that fills it to ``bucket_size`` elements, and before and after an
embedding that pipeline stages share. In memory, buckets are padded at their end; files omit that
padding, but keep the padding before a parameter inside a bucket::

    memory       | output_layer . . | norm . . . | fc2    pad || fc1 . . | qkv      pad ||
    file         | output_layer . . | norm . . . | fc2        || fc1 . . | qkv          ||
                 ^ multiple of 64 in its bucket

So in a file, a parameter starts at the next multiple of 64 after the previous one, counted from the
beginning of its bucket, or exactly at the end of the previous one, if a bucket ends there. Neither
depends on the number of ranks that share the buffer.

Source: megatron-core 0.12.1, 0.15.0 and 0.16.1, ``core/distributed/{param_and_grad_buffer,
distributed_data_parallel}.py`` (checked in tests against 0.16.1's own class); for the arguments
``get_model`` of Megatron-LM's ``training/training.py``.

Optimizers and model chunks have buffers of their own. Experts that expert parallelism distributes
have an optimizer of their own, chained after that of all other parameters. With
``overlap_param_gather_with_optimizer_step``, the dense parameters of the first model chunk have an
optimizer of their own, too.

Source for the optimizers: megatron-core 0.12.1 and 0.16.1 ``core/optimizer/__init__.py``
(``get_megatron_optimizer``), ``core/models/common/language_module/language_module.py``
(``setup_embeddings_and_output_layer``).

Not supported: buffers of the layer-wise optimizer, of Megatron-FSDP and of FP8 parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import lcm

from core.errors import CorruptError, UnsupportedError
from core.megatron.model.args import size_in
from core.megatron.model.facts import ModelFacts
from core.megatron.model.topology import Topology
from core.megatron.rules.rules import Rules
from core.values import dataclass

ALIGNMENT = 64
"""A parameter's offset in its bucket is a multiple of this number of elements."""

MIN_BUCKET = 40_000_000
"""Smallest size of a bucket, in elements, unless the arguments specify one."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a parameter in a buffer.

    Args:
        bucket: number of the bucket.
        start: number of elements of the file's buffer before the parameter.
    """

    bucket: int
    start: int


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The layout of a buffer in a file.

    Args:
        slots: places of the parameters, in the model's order.
        buckets: number of elements of each bucket, without the padding at its end.
    """

    slots: tuple[Slot, ...]
    buckets: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        """Number of elements of the buffer in a file (Megatron's ``numel_unpadded``)."""
        return sum(self.buckets)


def aligned(offset: int) -> int:
    """Return the next offset at which a parameter may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def lay_out_buffer(
    sizes: Sequence[int], *, bucket_size: int | None, shared: frozenset[int] = frozenset()
) -> BufferLayout:
    """Lay parameters out in a buffer as Megatron does.

    Args:
        sizes: number of elements of each parameter, in the model's order.
        bucket_size: number of elements after which a bucket ends; None for a single bucket.
        shared: indices into ``sizes`` of embeddings that pipeline stages share.
    """
    slots: list[Slot] = []
    buckets: list[int] = []
    before = end = 0  # elements of the finished buckets, and of this one
    for place in reversed(range(len(sizes))):
        # A shared embedding begins a bucket; the one before it keeps its padding in the file.
        offset = aligned(end)
        if place in shared and end:
            buckets.append(offset)
            before, offset = before + offset, 0
        slots.append(Slot(len(buckets), before + offset))

        # A shared embedding, or a full bucket, ends the bucket without padding.
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
    """Lay parameters out in buckets of known sizes; return None if they do not fit.

    Args:
        sizes: number of elements of each parameter, in the model's order.
        buckets: number of elements of each bucket, without the padding at its end.
        step: alignment of a parameter in its bucket; 1 for megatron-core before 2024-02.
    """
    slots: list[Slot] = []
    number = before = end = 0
    for size in reversed(sizes):
        # A parameter that would begin at or after the bucket's end begins the next one.
        offset = -(-end // step) * step
        if end and number < len(buckets) and offset >= buckets[number]:
            before, number, offset = before + buckets[number], number + 1, 0
        if number >= len(buckets) or offset + size > buckets[number]:
            return None
        slots.append(Slot(number, before + offset))
        end = offset + size

    # The parameters must fill the last bucket exactly.
    is_full = number == len(buckets) - 1 and end == buckets[-1] if sizes else not buckets
    return BufferLayout(tuple(reversed(slots)), tuple(buckets)) if is_full else None


Fits = Callable[[int, int], bool]
"""Checks if a parameter (its index in the model's order) may start at an element of the buffer."""

_MAX_BRANCHES = 64


@dataclass(frozen=True, slots=True)
class _PartialLayout:
    """The beginning of a layout.

    Args:
        last: number of its last start in the table of ``discover``; -1 before the first.
        end: end of that parameter.
        bucket: beginning of that parameter's bucket.
    """

    last: int
    end: int
    bucket: int


def discover(
    sizes: Sequence[int], n_elements: int, fits: Fits, *, divisors: Sequence[int] = ()
) -> list[list[int]]:
    """Search for the starts of parameters in a buffer whose buckets are not recorded.

    Each parameter starts at the end of the previous one (a new bucket), or at the next multiple of
    64 in its bucket; megatron-core 0.12 may pad to another multiple before an embedding that stages
    share.

    Args:
        sizes: number of elements of each parameter, in the model's order.
        n_elements: number of elements of the buffer.
        fits: called for every possible start.
        divisors: other multiples that the beginning of a bucket may have been padded to.

    Returns:
        The starts in every possible layout, in the model's order; [] if no layout fits, or if more
        than 64 do.
    """
    # Grow all layouts at once, from the last parameter, and drop those that do not fit. Layouts
    # whose further growth is equal are one branch: the same starts so far, modulo the alignment.
    numbers: dict[tuple[int, int], int] = {}  # (number before, start) → number
    branches = [_PartialLayout(-1, 0, 0)]
    for place in reversed(range(len(sizes))):
        fits_at: dict[int, bool] = {}
        next_branches: dict[tuple[int, int], _PartialLayout] = {}
        for branch in branches:
            for start, bucket in _candidate_starts(branch, divisors):
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

    # Follow the layouts that fill the buffer back to their beginning, which is the last parameter.
    previous = list(numbers)
    layouts = []
    for last in dict.fromkeys(branch.last for branch in branches if branch.end == n_elements):
        starts = []
        number = last
        while number >= 0:
            number, start = previous[number]
            starts.append(start)
        layouts.append(starts)
    return layouts


def _candidate_starts(branch: _PartialLayout, divisors: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, beginning of its bucket) for each possible start of the next parameter."""
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
        has_buckets: buffers are cut into buckets (``overlap_grad_reduce``); None if unknown.
        size: number of elements after which a bucket ends (``ddp_bucket_size``).
        n_parts: number of buckets that a rank's parameters are divided into (``ddp_num_buckets``),
            which then decides their size, or None.
        is_chunk_alone: no chunk is cut (``overlap_param_gather_with_optimizer_step``).
        n_ranks: number of ranks that share a buffer.
    """

    has_buckets: bool | None
    size: int
    n_parts: int | None
    is_chunk_alone: bool
    n_ranks: int

    def bucket_sizes(self, chunk: tuple[int, int], *, n_params: int) -> list[int | None]:
        """Return the number of elements after which a bucket ends; None for a single bucket.

        Only the first stage's first chunk has several: communication of the other chunks is not on
        the critical path.

        Args:
            chunk: (virtual stage, pipeline stage).
            n_params: number of elements of all the rank's parameters.

        Returns:
            The only size; or both, if the arguments do not specify whether there are buckets.
        """
        if self.has_buckets is False or chunk != (0, 0) or self.is_chunk_alone:
            return [None]
        size = self.size if self.n_parts is None else n_params // self.n_parts
        return [size] if self.has_buckets else [None, size]


def bucketing_of(fields: Mapping[str, object]) -> Bucketing:
    """Return the bucketing of a run.

    Args:
        fields: training arguments of the run.

    Raises:
        UnsupportedError: another optimizer or FSDP lays out the buffers.
        CorruptError: a size is not a positive integer.
    """
    for name, owner in _OTHERS.items():
        if fields.get(name):
            raise UnsupportedError(
                f"ckpt does not support the optimizer buffers of {owner} ({name} is set)",
                hint="drop the optimizer with --no-optim",
            )

    # Megatron's defaults where the arguments have no sizes.
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
"""Argument → owner of buffers with another layout."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of a rank's chained optimizers.

    Args:
        chunks: numbers of the model chunks that the parameters belong to.
        is_expert: the optimizer is for distributed experts, not for all other parameters.
    """

    chunks: tuple[int, ...]
    is_expert: bool


def members_at(topology: Topology, bucketing: Bucketing, *, has_experts: bool) -> list[Member]:
    """Return the optimizers of a rank.

    Args:
        has_experts: the rank has an optimizer for distributed experts.
    """
    chunks = tuple(range(topology.vpp))
    parts = [chunks[:1], chunks[1:]] if bucketing.is_chunk_alone else [chunks]
    return [
        *(Member(part, False) for part in parts),
        *([Member(chunks, True)] if has_experts else []),
    ]


def members_of_file(
    topology: Topology, bucketing: Bucketing, *, n_members: int, rank: str
) -> list[Member]:
    """Return the optimizers of a rank, given the number of optimizers in its file.

    Args:
        rank: name of the rank directory, for messages.

    Raises:
        CorruptError: Megatron never creates that number of optimizers.
    """
    # A model without experts has no optimizer for them, even if the arguments contain EP.
    usual = members_at(topology, bucketing, has_experts=topology.ep > 1)
    for members in (usual, members_at(topology, bucketing, has_experts=False)):
        if len(members) == n_members:
            return members
    raise CorruptError(
        f"the file contains {n_members} optimizers, but {topology} requires {len(usual)}",
        rank=rank,
    )


def is_distributed_expert(name: str, topology: Topology, rules: Rules) -> bool:
    """Return whether a parameter belongs to experts that expert parallel ranks distribute."""
    return topology.ep > 1 and rules.expert_of(name) is not None


def is_shared_embedding(name: str, topology: Topology, facts: ModelFacts, rules: Rules) -> bool:
    """Return whether a parameter is an embedding of which several pipeline stages have a copy.

    If embedding and output layer are tied, the last stage has a copy as its output layer; the stage
    of multi-token prediction has one, too.
    """
    if topology.pp == 1 or not (facts.is_tied or facts.n_predictions):
        return False
    embedding = rules.rule_of(facts.kind.head).tied
    if name == embedding:
        return facts.is_tied or facts.n_predictions > 0
    is_head = facts.is_tied and rules.rule_of(name).tied is not None
    return is_head and not facts.has_unused_head(topology)
