"""Name the extra states that a model of Transformer Engine requests from a checkpoint.

Megatron asks a torch_dist checkpoint for the extra state of every module that has one, and by
default fails where it is absent (``Missing key in checkpoint state_dict``); states that it did not
ask for are ignored (``--dist-ckpt-strictness assume_ok_unexpected``). Which modules have one
depends on the versions of megatron-core and Transformer Engine: linear modules always, norms and
attention cores in some. All are named here, and stored as ``None``, which every version accepts as
an empty state.

Rank files are loaded by ``load_state_dict``, which until megatron-core 0.13 fails on a state that
is missing or not expected; later versions then load again without strictness. They get the states
of linear modules and of norms (which have one since Transformer Engine 1.13), but none of attention
cores, which Transformer Engine loads without theirs. Before 1.13, only megatron-core 0.14 and later
load the norms' states.

Source: megatron-core 0.16.1 ``extensions/transformer_engine.py``, ``transformer/utils.py``
``make_sharded_tensors_for_checkpoint``, ``dist_checkpointing/validation.py``; Megatron-LM
``training/checkpointing.py`` ``load_checkpoint`` of core 0.12.1, ``load_model_state_dict`` of core
0.14.0; TransformerEngine 1.13 and 2.x ``pytorch/ops/op.py`` and ``pytorch/module/base.py``
``set_extra_state``, ``remove_extra_states_check`` of ``DotProductAttention``;
NVIDIA/Megatron-LM#6270 (``decoder.layers.pre_mlp_layernorm._extra_state`` absent).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from core.catalog.catalog import Catalog
from core.megatron.extras.common_state import EXTRA_STATE
from core.megatron.model.checks import ADAPTER

_ENGINE_MODULE = re.compile(
    r"(?P<module>(?:.*\.)?"
    # Heterogeneous models have linear modules in the place of an attention or MLP.
    r"(?:linear_\w+|eh_proj|in_proj|out_proj|\w*norm|self_attention|mlp))\.weight\d*"
)
_ATTENTION_STATE = re.compile(rf"(.*\.)?core_attention\.{EXTRA_STATE}")
_NORM_STATE = re.compile(rf"(.*\.)?\w*norm\.{EXTRA_STATE}")
_MAMBA_NORM_STATE = re.compile(rf"(.*\.)?(?:mamba_)?mixer\.norm\.{EXTRA_STATE}")
_PROJECTION = re.compile(r"(?P<attention>(?:.*\.)?(?:self|cross)_attention)\.linear_proj\.weight")


def requested_states(names: Iterable[str]) -> Iterator[str]:
    """Yield the names of the extra states of a model's modules, some of them more than once.

    Args:
        names: global names of the model's tensors under Transformer Engine's module names.
    """
    for name in names:
        # Adapters are those of Megatron-Bridge, whose loader does without their states.
        if ADAPTER in name:
            continue
        match = _ENGINE_MODULE.fullmatch(name)
        if match is not None:
            yield f"{match['module']}.{EXTRA_STATE}"
        match = _PROJECTION.fullmatch(name)
        if match is not None:
            yield f"{match['attention']}.core_attention.{EXTRA_STATE}"


def states_of_rank_files(names: Iterable[str]) -> Iterator[str]:
    """Yield the names of the extra states that rank files have, some of them more than once.

    Args:
        names: global names of the model's tensors under Transformer Engine's module names.
    """
    for state in requested_states(names):
        # The norm of a Mamba mixer is not Transformer Engine's, and has no state.
        if not (_ATTENTION_STATE.fullmatch(state) or _MAMBA_NORM_STATE.fullmatch(state)):
            yield state


def without_unexpected_states(catalog: Catalog, *, is_local: bool) -> Catalog:
    """Return the global per-layer form without empty states that loading rank files fails on.

    Args:
        is_local: the model is of the local implementation, whose norms have no states.
    """
    unexpected = (_ATTENTION_STATE, _NORM_STATE if is_local else _MAMBA_NORM_STATE)
    objects = {
        key: item
        for key, item in catalog.objects.items()
        if item.value is not None
        or item.raw_key is not None
        or not any(pattern.fullmatch(key) for pattern in unexpected)
    }
    return catalog if len(objects) == len(catalog.objects) else replace(catalog, objects=objects)
