"""The distribution of a rank's parameters over optimizers and model chunks, which have own buffers.

Experts that expert parallelism distributes have an optimizer of their own, chained after that of
all other parameters. With ``overlap_param_gather_with_optimizer_step``, the dense parameters of the
first model chunk have an optimizer of their own, too.

Source: megatron-core 0.12.1 and 0.16.1 ``core/optimizer/__init__.py`` (``get_megatron_optimizer``),
``core/models/common/language_module/language_module.py`` (``setup_embeddings_and_output_layer``).
"""

from __future__ import annotations

from core.errors import CorruptError
from core.megatron.model.facts import ModelFacts
from core.megatron.model.topology import Topology
from core.megatron.optimizer.flat.buffers import Bucketing
from core.megatron.rules.rules import Rules
from core.values import dataclass


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
        f"the file contains {n_members} optimizers, but {topology} needs {len(usual)}",
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
