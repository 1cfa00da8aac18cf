"""How the parameters of a rank go into the distributed optimizer's buffers: by optimizer and by
model chunk.

Experts that expert parallelism distributes have an optimizer of their own, chained after that of
all others; with ``overlap_param_gather_with_optimizer_step`` the first model chunk's dense
parameters have one, too.

Source: megatron-core 0.12.1 and 0.16.1 ``core/optimizer/__init__.py`` (``get_megatron_optimizer``),
``core/models/common/language_module/language_module.py`` (``setup_embeddings_and_output_layer``).
"""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import CorruptError
from core.megatron.model.facts import ModelFacts
from core.megatron.model.topology import Topology
from core.megatron.optimizer.flat.buffers import Bucketing
from core.megatron.rules.rules import Rules


@dataclass(frozen=True, slots=True)
class Member:
    """One of a rank's chained optimizers.

    Args:
        chunks: the model chunks that it has parameters of.
        is_expert: it is for distributed experts, not for all other parameters.
    """

    chunks: tuple[int, ...]
    is_expert: bool


def members_at(topology: Topology, bucketing: Bucketing, *, has_experts: bool) -> list[Member]:
    """Return the optimizers of a rank.

    Args:
        has_experts: whether one is of distributed experts.
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
    """Return the optimizers of a rank whose file holds that many.

    Raises:
        CorruptError: Megatron makes no such number.
    """
    usual = members_at(topology, bucketing, has_experts=topology.ep > 1)
    for members in (usual, members_at(topology, bucketing, has_experts=False)):
        if len(members) == n_members:
            return members
    raise CorruptError(
        f"the file holds {n_members} optimizers; with {topology} it should be {len(usual)}",
        rank=rank,
    )


def is_distributed_expert(name: str, topology: Topology, rules: Rules) -> bool:
    """Return whether a parameter belongs to experts that expert parallel ranks distribute."""
    return topology.ep > 1 and rules.expert_of(name) is not None


def is_shared_embedding(name: str, topology: Topology, facts: ModelFacts, rules: Rules) -> bool:
    """Return whether a parameter is an embedding that pipeline stages share, with a copy in each.

    The last stage has one as its output layer, if the two are tied, that of multi-token prediction
    another.
    """
    if topology.pp == 1 or not (facts.is_tied or facts.n_predictions):
        return False
    embedding = rules.rule_of(facts.kind.head).tied
    if name == embedding:
        return facts.is_tied or facts.n_predictions > 0
    return facts.is_tied and rules.rule_of(name).tied is not None
