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

from core.errors import list_some
from core.hf.config_json.experts import describe_ranking
from core.hf.config_json.rope import unsaid_rope
from core.hf.family import Family
from core.hf.settings import gelu_notes
from core.hf.tensors.global_tensor import GlobalTensor
from core.hf.traits import Model
from core.hf.values import CONFIG, count_of

_BRIDGE = "Megatron-Bridge's GPTModelProvider supports it"
_USUAL_FACTOR = 8
"""The factor of the scaling of Llama 3 that every version of Megatron's script computes with."""
_ENGINE_ONLY = frozenset({"hybrid", "parallel_mamba", "linear_attention", "latent"})
"""Features of layers that Megatron builds of Transformer Engine's modules alone.

So are RMSNorms that store their weights minus one; and the local attention core takes no
``k_channels``, which latent attention gives it (megatron-core 0.12 to 0.19 and d98e8a64).
"""


def list_megatron_notes(
    tensors: Mapping[str, GlobalTensor],
    family: Family,
    config: Mapping[str, object],
    fields: Mapping[str, object],
    model: Model,
    *,
    is_composite: bool,
    transformer_impl: str | None,
) -> Iterator[str]:
    """Yield what a user must know about a model that becomes Megatron's.

    Args:
        tensors: the model's tensors by Megatron's names.
        family: family of the model.
        config: parsed ``config.json``.
        fields: training arguments by name.
        model: the text model.
        is_composite: the model has towers besides.
        transformer_impl: the implementation that the user named; None for the default.
    """
    # The tensors: those that are missing, left out, or have other numbers in Megatron.
    n_mtp = count_of(fields, "mtp_num_layers", default=0, least=0)
    declared_mtp = config.get(family.mtp_names.count, n_mtp) if "mtp" in family.allows else n_mtp
    if (declared_mtp or 0) != n_mtp:
        yield (
            f"{CONFIG} declares {declared_mtp or 0} multi-token prediction layers, but ckpt uses "
            f"the {n_mtp} that have tensors"
        )
    copies = [key for tensor in tensors.values() for key in tensor.copies]
    if copies:
        yield f"copies of other tensors are not stored again: {list_some(copies, 3)}"
    shifted = [tensor.used[0] for tensor in tensors.values() if tensor.is_shifted]
    if shifted:
        from core.hf.tensors.shifted import SHIFT_NOTE

        more = f" (and {len(shifted) - 1} more)" if shifted[1:] else ""
        yield f"{shifted[0]}{more}: {SHIFT_NOTE}"

    # The model, as Megatron builds it.
    yield from _building_notes(family, config, model)
    yield from list_model_notes(family, fields)
    yield from _names_notes(family, model, is_composite=is_composite, requested=transformer_impl)


def list_model_notes(family: Family, fields: Mapping[str, object]) -> Iterator[str]:
    """Yield what a user must know about a model that goes to Megatron or comes from it.

    Args:
        fields: training arguments by name.
    """
    yield from family.notes()
    ranking = describe_ranking(fields, family)
    if ranking is not None:
        yield f"Megatron computes this model differently, because {ranking}"
    if family.builder is None and not fields.get("multi_latent_attention"):
        yield from _scaling_notes(fields)
    yield from gelu_notes(family.settings, fields)


def _building_notes(family: Family, config: Mapping[str, object], model: Model) -> Iterator[str]:
    """Yield notes about what a Megatron run needs besides the arguments to be the same model."""
    if family.builder is not None:
        yield (
            f"Megatron's training script cannot build {family.model_type} models, but "
            f"{family.builder}"
        )
    elif model.n_mtp and family.mtp_names.dense and "moe" in model.kinds_of(model.n_layers - 1):
        yield (
            "Megatron's training script gives multi-token prediction layers experts, like the "
            f"decoder's last layer, but those of {family.model_type} models have no experts; use "
            "Megatron-Bridge to build them"
        )
    if model.unindexed:
        yield (
            "some layers reuse an earlier layer's indexer, which requires megatron-core 0.19 or "
            "later, and every pipeline stage must begin with a layer that has its own indexer"
        )
    unsaid = unsaid_rope(config, family)
    if unsaid is not None:
        yield f"Megatron's arguments cannot express {unsaid}, so {CONFIG} is kept in the checkpoint"


def _names_notes(
    family: Family, model: Model, *, is_composite: bool, requested: str | None
) -> Iterator[str]:
    """Yield the note about the implementation whose module names are written.

    Args:
        family: family of the model.
        model: the text model.
        is_composite: the model has towers besides.
        requested: the implementation that the user named; None for the default.
    """
    args = family.fixed_args
    is_minus_one = (
        args.get("layernorm_zero_centered_gamma") is True and args.get("normalization") == "RMSNorm"
    )
    has_local = not (
        is_composite or family.builder or _ENGINE_ONLY & family.requires or is_minus_one
    )
    if requested == "local" and not has_local:
        yield (
            "module names are for --transformer-impl local, but Megatron cannot build "
            f"{family.model_type} models with it; omit the option to get Transformer Engine's names"
        )
    elif requested is None and model.is_local:
        yield "module names are for --transformer-impl local"
    elif requested is None:
        note = "module names are for Transformer Engine, Megatron's default"
        yield (
            (
                f"{note}; pass --transformer-impl local to get the names of Megatron's local "
                "implementation"
            )
            if has_local
            else note
        )


def _scaling_notes(fields: Mapping[str, object]) -> Iterator[str]:
    """Yield the note on the scaling of rotary embeddings that not every version applies."""
    linear = fields.get("rotary_seq_len_interpolation_factor")
    factor = fields.get("rope_scaling_factor")
    if fields.get("position_embedding_type") == "yarn":
        yield (
            "the model uses YaRN scaling, which Megatron's training script supports only in "
            f"megatron-core 0.19 and later; {_BRIDGE}"
        )
    elif fields.get("use_rope_scaling") and factor not in (None, _USUAL_FACTOR):
        yield (
            f"rope_scaling_factor is {factor}, but Megatron's training script (up to megatron-core "
            f"0.19 and d98e8a64) does not pass it to the model and computes with {_USUAL_FACTOR}, "
            f"which gives different logits; {_BRIDGE}"
        )
    elif linear not in (None, 1):
        yield (
            f"rotary_seq_len_interpolation_factor is {linear}, but Megatron's training script "
            f"ignores it before megatron-core 0.19, which gives different logits; {_BRIDGE}"
        )
