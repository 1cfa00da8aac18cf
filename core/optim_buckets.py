"""Optimizer state that torch_dist keeps as the distributed optimizer's flat buffers.

::

    [chained_1.]optimizer.distributed.dp_group_idx_3.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param
                                      rank of the    buffer                                           bucket       state
                                      model replica
    …dp_group_idx_3.{per_bucket_numel,per_bucket_numel_unpadded,optimizer}                            objects

in the forms ``dp_reshardable`` (core 0.15 and later, its default) and ``fully_sharded_bucket_space`` (core ≤ 0.14, with
the padding at the end of buckets); ``dp_zero_gather_scatter`` has one object ``…dp_group_idx_3.param_state`` instead,
which is what distrib_optim.pt of rank files holds (``core.optim_flat``). Megatron loads all three only at the TP and PP
sizes that they were saved with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from core.catalog import Catalog, Fragment, TensorMeta
from core.errors import UnsupportedError
from core.layout_args import Facts
from core.layout_rules import Rules
from core.optimizer import Optimizer
from core.store import ReadStore

MARK = "optimizer.distributed.dp_group_idx_"
"""What the keys of buffers hold."""


@dataclass(frozen=True, slots=True)
class BucketStates:
    """The optimizer of a checkpoint with buffers, in the global per-layer form.

    Args:
        tensors: its states, by ``core.optimizer.state_key``.
        fragments_of: their fragments.
        optimizer: the rest of it.
        notes: what the user should know.
    """

    tensors: Mapping[str, TensorMeta]
    fragments_of: Callable[[str], Sequence[Fragment]]
    optimizer: Optimizer
    notes: Sequence[str] = ()


def has_buckets(catalog: Catalog) -> bool:
    """Whether a torch_dist catalog keeps its optimizer in buffers."""
    return any(MARK in key for key in (*catalog.tensors, *catalog.objects))


def read_buckets(
    catalog: Catalog, model: Catalog, facts: Facts, rules: Rules, *, store: ReadStore | None
) -> BucketStates:
    """The optimizer out of the buffers.

    Args:
        catalog: of torch_dist, its objects loaded.
        model: the global per-layer form of its weights.
        facts: of the run that saved.
        store: the checkpoint's files, to compare masters with weights; None leaves that out.

    Raises:
        UnsupportedError: it is not determined, or nothing proves, which parameter is where.
        MissingShardError: a rank's buffers are absent.
        CorruptError: buffers and arguments contradict each other.
    """
    raise UnsupportedError(
        "optimizer state in buffers cannot be resharded yet",
        hint="leave it out with --no-optim; the weights are exact, and training starts with a fresh optimizer",
    )
