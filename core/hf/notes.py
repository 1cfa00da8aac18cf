"""Tell the user what a model's weights and arguments mean to Megatron, in both directions.

Megatron's training script builds the model from arguments, and some of them it does not hand over.
What it does with the scaling of rotary embeddings of ordinary attention, by its version::

    linear                  rotary_seq_len_interpolation_factor   since core 0.19; ignored before
    llama3, factor 8        use_rope_scaling                      since core 0.10
    llama3, another factor  rope_scaling_factor                   in no version up to core 0.19 and
                                                                  d98e8a64: the factor is always 8
    yarn                    yarn_…, rotary_scaling_factor         since core 0.19; fails before

Megatron-Bridge's GPTModelProvider hands all of them to the model.

Source: Megatron-LM core_v0.8.0 to core_v0.19.0 and d98e8a64 ``pretrain_gpt.py``,
``gpt_builders.py``, ``training/argument_utils.py`` ``gpt_config_from_args``,
``core_transformer_config_from_args``; Megatron-Bridge 067f987d ``models/gpt_provider.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from core.hf.config_json.experts import describe_ranking
from core.hf.family import Family
from core.hf.settings import gelu_notes

_BRIDGE = "Megatron-Bridge's GPTModelProvider takes it"
_USUAL_FACTOR = 8
"""The factor of the scaling of Llama 3 that every version of Megatron's script computes with."""


def list_model_notes(family: Family, fields: Mapping[str, object]) -> Iterator[str]:
    """Yield what a user must know about a model that goes to Megatron or comes from it.

    Args:
        fields: training arguments by name.
    """
    yield from family.notes()
    ranking = describe_ranking(fields, family)
    if ranking is not None:
        yield f"Megatron computes this model differently: {ranking}"
    if family.builder is None and not fields.get("multi_latent_attention"):
        yield from _scaling_notes(fields)
    yield from gelu_notes(family.settings, fields)


def _scaling_notes(fields: Mapping[str, object]) -> Iterator[str]:
    """Yield the note on the scaling of rotary embeddings that not every version applies."""
    linear = fields.get("rotary_seq_len_interpolation_factor")
    factor = fields.get("rope_scaling_factor")
    if fields.get("position_embedding_type") == "yarn":
        yield (
            "YaRN scaling of the rotary embeddings: Megatron's training script builds such models "
            f"since megatron-core 0.19, and older versions fail; {_BRIDGE}"
        )
    elif fields.get("use_rope_scaling") and factor not in (None, _USUAL_FACTOR):
        yield (
            f"rope_scaling_factor is {factor}: Megatron's training script (up to megatron-core "
            f"0.19 and d98e8a64) does not hand it to the model and computes with {_USUAL_FACTOR}, "
            f"which gives other logits; {_BRIDGE}"
        )
    elif linear not in (None, 1):
        yield (
            f"rotary_seq_len_interpolation_factor is {linear}: Megatron's training script hands "
            "it to the model since megatron-core 0.19, and older versions rotate without it, which "
            f"gives other logits; {_BRIDGE}"
        )
