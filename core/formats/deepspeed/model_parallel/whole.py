"""Parameters that every tensor-parallel rank has completely, though no pattern says so.

``universal_checkpoint_info`` before version 0.3, without ``tp_replicated_parameter_patterns``, says
nothing of norms and of biases of row-parallel layers. Joined like column-parallel ones,
they would be as many times too long as there are ranks. In this order, the first that applies:

1. the bias of a layer is cut if the rows of its weight are, and else whole;
2. a vector whose shards add up to the model's hidden size (of the arguments, or else of
   ``config.json``) is cut;
3. what is the same on all ranks is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from core.catalog.tensor import Tensor
from core.errors import CheckpointingException
from core.files.source_store import open_store
from core.formats.deepspeed.model_parallel.join import are_equal
from core.formats.deepspeed.state_file import mapping_or_empty
from core.formats.huggingface.files import config_of
from core.pickle.inert import attributes

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.formats.deepspeed.model_parallel.rules import JoinPlan, TensorParallelRules
    from core.formats.deepspeed.model_states import ModelStates

_FIRST_BYTES, _MOST_BYTES = 1 << 12, 1 << 24
"""Bytes of each shard that are compared: first a few, then up to all of an ordinary layer."""
_WEIGHT, _BIAS = ".weight", ".bias"


def read_hidden_size(model: ModelStates, store: ReadStore) -> int | None:
    """Return the hidden size of a model, or None if nothing states it.

    It is in the training arguments of a model file; or else in a ``config.json`` of the directory,
    or of that above, where transformers' Trainer saves it.
    """
    args = model.other_entries.get("args")
    size = (attributes(args) or mapping_or_empty(args)).get("hidden_size")
    if type(size) is int:
        return size
    size = _stated_size(store)
    root = getattr(store, "root", None)
    if size is None and root is not None:
        with closing(open_store(root.parent)) as above:
            size = _stated_size(above)
    return size


def _stated_size(store: ReadStore) -> int | None:
    """Return the hidden size in ``config.json``; None without one that can be read."""
    try:
        config = config_of(store) or {}
    except CheckpointingException:
        return None
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        for name in ("hidden_size", "n_embd"):
            if type(size := part.get(name)) is int:
                return size
    return None


def is_whole(
    store: ReadStore,
    name: str,
    shards: Sequence[Tensor],
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
