"""Name the extra states that a model of Transformer Engine requests from a torch_dist checkpoint.

Megatron asks a torch_dist checkpoint for the extra state of every module that has one, and by
default fails where it is absent (``Missing key in checkpoint state_dict``); states that it did not
ask for are ignored (``--dist-ckpt-strictness assume_ok_unexpected``). Which modules have one
depends on the versions of megatron-core and Transformer Engine: linear modules always, norms and
attention cores in some. All are named here, and stored as ``None``, which every version accepts as
an empty state.

Rank files need none, as Megatron loads them again without strictness if states are absent; those of
norms and attention cores are left out of them, which a strict load would not expect.

Source: megatron-core 0.16.1 ``extensions/transformer_engine.py``, ``transformer/utils.py``
``make_sharded_tensors_for_checkpoint``, ``dist_checkpointing/validation.py``; TransformerEngine 2.x
``pytorch/ops/op.py`` and ``pytorch/module/base.py`` ``set_extra_state``; NVIDIA/Megatron-LM#6270
(``decoder.layers.pre_mlp_layernorm._extra_state`` absent).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from core.catalog.catalog import Catalog
from core.megatron.extras.common_state import EXTRA_STATE

_ENGINE_MODULE = re.compile(
    r"(?P<module>(?:.*\.)?(?:linear_\w+|eh_proj|in_proj|out_proj|\w*norm))\.weight\d*"
)
_OF_SOME_VERSIONS = re.compile(rf"(.*\.)?(core_attention|\w*norm)\.{EXTRA_STATE}")
_PROJECTION = re.compile(r"(?P<attention>(?:.*\.)?(?:self|cross)_attention)\.linear_proj\.weight")


def requested_states(names: Iterable[str]) -> Iterator[str]:
    """Yield the names of the extra states of a model's modules, some of them more than once.

    Args:
        names: global names of the model's tensors under Transformer Engine's module names.
    """
    for name in names:
        match = _ENGINE_MODULE.fullmatch(name)
        if match is not None:
            yield f"{match['module']}.{EXTRA_STATE}"
        match = _PROJECTION.fullmatch(name)
        if match is not None:
            yield f"{match['attention']}.core_attention.{EXTRA_STATE}"


def without_requested_states(catalog: Catalog) -> Catalog:
    """Return the global per-layer form without empty states of norms and attention cores."""
    objects = {
        key: item
        for key, item in catalog.objects.items()
        if item.value is not None
        or item.raw_key is not None
        or not _OF_SOME_VERSIONS.fullmatch(key)
    }
    return catalog if len(objects) == len(catalog.objects) else replace(catalog, objects=objects)
