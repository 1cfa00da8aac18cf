"""The form in which a checkpoint stores its optimizer's state, recognised by key names alone.

============================= ====================================================================
 name                          what is stored
============================= ====================================================================
 ``megatron_float16``          rank files: fp32 master weights and moments of each parameter, by
                               number, per TP/PP rank
 ``megatron_distributed``      rank files: ``distrib_optim.pt``, flat buffers of all parameters of
                               a TP/PP rank
 ``per_parameter``             torch_dist: a global tensor per parameter and state (not distributed)
 ``fully_reshardable``         torch_dist: the same, written by the distributed optimizer
 ``fully_sharded_model_space`` torch_dist: flattened ranges of each parameter
 ``dp_reshardable``            torch_dist: flat buckets, tied to the TP and PP they were saved with
 ``dp_zero_gather_scatter``    torch_dist: one opaque object per TP/PP rank
 ``torch_by_name``             DCP and others: moments under the parameter's name
 ``torch_by_number``           ``torch.optim`` state dict: moments under the parameter's number
 ``bitsandbytes``              state dict of an optimizer of bitsandbytes: 8-bit codes with scales
 ``other``                     optimizer entries in none of these forms
============================= ====================================================================

Source: tests/golden (Megatron-LM d98e8a64, megatron-core 0.12.1 and 0.16.1, torch 2.13);
docs/facts/reshard.md 7.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from core.engine.catalog.optimizer_keys import MASTERS, MOMENTS, is_optimizer_key

NUMBERED = "megatron_float16"
TITLES = {
    NUMBERED: ("fp32 master weights and moments, numbered, per TP/PP rank (Float16Optimizer)"),
    "megatron_distributed": "distributed optimizer, flat buffers in distrib_optim.pt",
    "per_parameter": "fp32 master weights and moments by parameter",
    "fully_reshardable": "distributed optimizer, fully_reshardable",
    "fully_sharded_model_space": (
        "distributed optimizer, fully_sharded_model_space (flattened ranges)"
    ),
    "dp_reshardable": "distributed optimizer, dp_reshardable (flat buckets, tied to TP and PP)",
    "dp_zero_gather_scatter": "distributed optimizer, dp_zero_gather_scatter (opaque objects)",
    "torch_by_name": "torch.optim state by parameter name",
    "torch_by_number": "torch.optim state by parameter number",
    "bitsandbytes": "bitsandbytes states (8-bit, with scales)",
    "other": "not recognized",
}
"""Form → its description for people."""

_OWN_NAMES = {
    "megatron_distributed": re.compile(r"^distrib_optim"),
    "megatron_float16": re.compile(r"fp32_from_fp16_params"),
    "dp_reshardable": re.compile(r"gbuf_idx_\d+|\.bucket_idx_\d+"),
}
"""Form → names in keys that no other form has."""
_BY_STATE = re.compile(
    rf"(chained_\d+\.)?optimizer\.state\.(?P<state>{'|'.join(sorted(MOMENTS | MASTERS))})\.(?=.)"
)
_NUMBERED = re.compile(r"(^|\.)state\.\d+\.[a-z_0-9]+$")
_OPTIMIZER_OBJECT = re.compile(r"(^|[.:])(optimizer|optim)\b")


@lru_cache(maxsize=1 << 18)
def role_of(key: str) -> str:
    """Return the role of a tensor: ``model``, ``moments``, ``masters`` or ``other``.

    Args:
        key: name of the tensor, without the rank directory.
    """
    parts = key.split(".")
    if _belongs_to_optimizer(key):
        if not MOMENTS.isdisjoint(parts):
            return "moments"
        return "masters" if not MASTERS.isdisjoint(parts) else "other"
    if not _NEITHER.isdisjoint(parts):
        return "other"
    return "model"


_NEITHER = frozenset({
    "rng_state", "rng_states", "rng", "cuda_rng_state", "torch_rng_state", "rng_tracker_states",
    "random_rng_state", "np_rng_state", "lr_scheduler", "scheduler", "opt_param_scheduler",
    "dataloader", "train_state", "rerun_state_machine", "_extra_state", "step",
    "callbacks", "loops",
})  # fmt: skip
"""Parts of a key that belong to neither the model nor an optimizer's state."""


def _belongs_to_optimizer(key: str) -> bool:
    return key.startswith("distrib_optim") or is_optimizer_key(key)


def optim_format_of(
    tensor_keys: Iterable[str], object_keys: Iterable[str], *, has_flattened: bool = False
) -> str | None:
    """Return the optimizer's form, a name of the module's table; None without optimizer state.

    Args:
        tensor_keys, object_keys: names without rank directories.
        has_flattened: the metadata lists reformulated shapes
            (``nd_reformulated_orig_global_shape``).
    """
    keys = list(filter(_belongs_to_optimizer, tensor_keys))
    states = [key for key in keys if role_of(key) != "other"]
    if states:
        return _form_of_states(states, has_flattened=has_flattened)
    means = [key for key in keys if key.endswith(".vmean")]  # Adam-mini, whose moment is `m`
    if means:
        return "torch_by_number" if any(map(_NUMBERED.search, means)) else "torch_by_name"
    if any(key.endswith((".state1", ".absmax1")) for key in keys):
        return "bitsandbytes"

    # dp_zero_gather_scatter stores no tensors: all states of a rank are in one ShardedObject.
    objects = filter(_OPTIMIZER_OBJECT.search, object_keys)
    if any("distributed" in key and "/shard_" in key for key in objects):
        return "dp_zero_gather_scatter"
    return "other" if keys else None


def _form_of_states(keys: Sequence[str], *, has_flattened: bool) -> str:
    """Return the form of an optimizer whose states have these keys."""
    for form, pattern in _OWN_NAMES.items():
        if any(map(pattern.search, keys)):
            return form

    # The other forms of Megatron share their keys; only fully_reshardable has a state `param`.
    matches = map(_BY_STATE.match, keys)
    of_parameters = {match["state"] for match in matches if match is not None}
    if "param" in of_parameters:
        return "fully_reshardable"
    if of_parameters:
        return "fully_sharded_model_space" if has_flattened else "per_parameter"
    return "torch_by_number" if any(map(_NUMBERED.search, keys)) else "torch_by_name"
