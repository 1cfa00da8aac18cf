"""core.megatron.extras.saved_sizes: the sizes of a run whose arguments were not saved."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from core.arrays.box import Box
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.tensor import Fragment, Tensor
from core.megatron.extras.saved_sizes import get_saved_sizes
from core.megatron.model.topology import Topology

EMBEDDING = "module.embedding.word_embeddings.weight"
EXPERT = "module.decoder.layers.mlp.experts.experts.linear_fc2.weight"


def stored(topology: Topology, *, has_groups: bool = True) -> Catalog:
    """A checkpoint as Megatron stores it, with the optimizer in buffers."""
    shapes = {EMBEDDING: (8, 4), EXPERT: (2, 4, 4, 8)}
    cuts = {EMBEDDING: (0, topology.tp), EXPERT: (3, topology.expert_tp)}
    n_pairs = topology.tp * topology.pp
    n_triples = topology.expert_tp * topology.ep * topology.pp if topology.ep > 1 else 0
    start = "chained_0." if n_triples else ""
    groups = [
        *(f"{start}optimizer.distributed.dp_group_idx_{n}.param" for n in range(n_pairs)),
        *(f"chained_1.optimizer.distributed.dp_group_idx_{n}.param" for n in range(n_triples)),
    ]
    shapes |= dict.fromkeys(groups if has_groups else (), (1,))

    def fragments_of(key: str) -> Sequence[Fragment]:
        axis, n = cuts.get(key, (0, 1))
        extent = list(shapes[key])
        extent[axis] //= n
        zeros = (0,) * len(extent)
        offsets = [(*zeros[:axis], i * extent[axis], *zeros[axis + 1 :]) for i in range(n)]
        return [Fragment(Box(offset, tuple(extent)), None, zeros) for offset in offsets]

    return Catalog(
        "torch_dist",
        None,
        {
            key: Tensor("bfloat16", shape, partial(fragments_of, key))
            for key, shape in shapes.items()
        },
    )


@pytest.mark.parametrize(
    "topology",
    [
        Topology(1, 1),
        Topology(2, 2),
        Topology(1, 1, ep=2),
        Topology(2, 1, ep=2),
        Topology(2, 2, ep=4, etp=1),
        Topology(1, 2, ep=2, etp=2),
    ],
)
def test_groups_of_buffers_tell_the_sizes_experts_included(topology: Topology) -> None:
    sizes = {
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
    }
    of_experts = {
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.expert_tp,
    }
    sizes_per_buffer = get_saved_sizes(stored(topology))
    assert sizes_per_buffer == (sizes | of_experts if topology.ep > 1 else sizes)


def test_without_buffers_the_embedding_tells_tensor_parallelism_alone() -> None:
    assert get_saved_sizes(stored(Topology(2, 2, ep=2), has_groups=False)) == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
    }
