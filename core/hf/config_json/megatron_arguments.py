"""Find the training arguments of a Megatron model without any in the ``config.json`` beside it.

Frameworks of reinforcement learning (verl, SkyRL, AReaL) save torch_dist checkpoints without
Megatron's arguments, and next to them the ``config.json`` of the model that they trained. It
describes the model as arguments would; what it does not say is taken from the tensors: whether the
output layer is one of its own, layers of multi-token prediction, the padding of the vocabulary, and
the parallel sizes of the run (``core.megatron.extras.saved_sizes``).

Source: verl 1dda039b ``utils/checkpoint/megatron_checkpoint_manager.py``, SkyRL a9564572
``distributed/megatron/megatron_strategy.py``, AReaL 4aef98d8 ``engine/megatron_utils``.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.arrays.sharding import padded_vocab_size
from core.engine.catalog.catalog import Catalog
from core.errors import MissingShardError
from core.hf.config_json.config import build_arguments
from core.hf.config_json.origin import choose_config_text
from core.hf.family import Family, family_of
from core.hf.text_model import is_composite, text_config_of
from core.hf.values import ARGUMENT
from core.megatron.extras.saved_sizes import get_saved_sizes
from core.megatron.model.facts import PREDICTION_STACK
from core.megatron.rules.prefixes import numbered_names, prefix_of
from core.megatron.rules.rules import GPT
from core.megatron.rules.tables import load_rules

_DIVISORS = (128, 64, 32, 16, 8, 4, 2, 1)
"""Numbers whose multiples by TP the padded vocabulary may be; Megatron's default is the first."""


def derive_arguments(
    catalog: Catalog,
    config: Mapping[str, object],
    *,
    document: bytes | None,
    iteration: int | None = None,
    family: Family | None = None,
) -> dict[str, object]:
    """Return the training arguments that a ``config.json`` stands for, by name.

    Args:
        catalog: global tensors with Megatron's names, without arguments.
        config: the parsed ``config.json``.
        document: its content, to write it again; None if it is not known.
        iteration: number of the iteration, if the metadata does not record it.
        family: the model's family, if the user describes it.

    Raises:
        UnsupportedError: the model type is of no supported family, or Megatron has no arguments for
            a value.
        CorruptError: the configuration lacks a value, or contradicts itself.
        MissingShardError: there is no embedding.
    """
    rules = load_rules()
    prefix = prefix_of(catalog, rules)
    text = choose_config_text(config, document)
    embedding = catalog.tensors.get(prefix + GPT.embedding)
    if embedding is None or not embedding.shape:
        raise MissingShardError("the tensor is not in the checkpoint", key=GPT.embedding)
    has_output = prefix + GPT.output in catalog.tensors
    if is_composite(config):
        config = text_config_of(config, has_head=has_output)
    n_seen = rules.model_of(numbered_names(catalog, prefix, rules)).n_seen
    fields = build_arguments(
        config,
        family or family_of(config.get("model_type")),
        dtype=embedding.dtype,
        transformer_impl=None,
        divisible_by=1,
        iteration=catalog.iteration or iteration or 1,
        n_mtp=n_seen.get(PREDICTION_STACK, 0),
    )
    n_rows, sizes = fields["vocab_size"], get_saved_sizes(catalog)
    assert isinstance(n_rows, int)
    tp = sizes.get("tensor_model_parallel_size", 1)
    divisors = (
        d
        for d in _DIVISORS
        if padded_vocab_size(n_rows, divisible_by=d, tp=tp) == embedding.shape[0]
    )
    # Nothing says how many ranks shared the data; buffers alone show how many shared the experts.
    for name in ("world_size", "data_parallel_size", "expert_tensor_parallel_size"):
        fields[name] = None
    fields |= {
        "make_vocab_size_divisible_by": next(divisors, _DIVISORS[-1]),
        "ckpt_format": "torch_dist",
        "use_dist_ckpt": True,
        ARGUMENT: text,
        **sizes,
    }
    if has_output:
        fields["untie_embeddings_and_output_weights"] = True
    return fields
