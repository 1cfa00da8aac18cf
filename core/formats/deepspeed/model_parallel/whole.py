"""Parameters that every tensor-parallel rank has completely, though no pattern says so.

``universal_checkpoint_info`` before version 0.3, without ``tp_replicated_parameter_patterns``, says
nothing of norms and of biases of row-parallel layers. Joined like column-parallel ones,
they would be as many times too long as there are ranks. In this order, the first that applies:

1. the bias of a layer is cut if the rows of its weight are, and else whole;
2. a vector whose shards add up to the model's hidden size is cut;
3. what is the same on all ranks is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from core.formats.deepspeed.model_parallel.join import are_equal
from core.formats.deepspeed.runs import UnkeyedTensor
from core.formats.deepspeed.state_file import mapping_or_empty
from core.pickle.inert import attributes

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.formats.deepspeed.model_parallel.rules import JoinPlan, TensorParallelRules
    from core.formats.deepspeed.model_states import ModelStates

_FIRST_BYTES, _MOST_BYTES = 1 << 12, 1 << 24
"""Bytes of each shard that are compared: first a few, then up to all of an ordinary layer."""
_WEIGHT, _BIAS = ".weight", ".bias"


def read_hidden_size(model: ModelStates) -> int | None:
    """Return the hidden size in the training arguments of a model file, None without it."""
    args = model.other_entries.get("args")
    size = (attributes(args) or mapping_or_empty(args)).get("hidden_size")
    return size if type(size) is int else None


def is_whole(
    store: ReadStore,
    name: str,
    shards: Sequence[UnkeyedTensor],
    rules: TensorParallelRules,
    *,
    plans: Mapping[str, JoinPlan],
    hidden_size: int | None,
) -> bool:
    """Return whether every rank has a parameter completely, which no pattern matches.

    Args:
        shards: the parameter by tensor-parallel rank.
        plans: name → how it is joined, for the weights of layers.
        hidden_size: of the model; None if it is unknown.
    """
    shape, tp = shards[0].shape, len(shards)
    if tp == 1 or not shape or any(shard.shape != shape for shard in shards):
        return False
    if rules.states_axis(name):
        return False
    weight = plans.get(name.removesuffix(_BIAS) + _WEIGHT) if name.endswith(_BIAS) else None
    if weight is not None and len(weight.shape) > len(shape) == 1:
        rows = weight.shape[0] + weight.n_padding
        if rows in (shape[0], tp * shape[0]):
            return rows == shape[0]
    if len(shape) == 1 and hidden_size == tp * shape[0]:
        return False
    return all(are_equal(store, shards, n) for n in (_FIRST_BYTES, _MOST_BYTES))
