"""Keys of optimizer states in the global form, and the description of an optimizer's groups.

In the global per-layer form (``core.megatron.reshard.from_ranks``) every state of a parameter is a
tensor of its own, cut like the parameter::

    optimizer.state.fp32_param.decoder.layers.3.mlp.linear_fc2.weight    fp32 master weight
    optimizer.state.exp_avg.decoder.layers.3.mlp.linear_fc2.weight
    optimizer.state.exp_avg_sq.decoder.layers.3.mlp.linear_fc2.weight

All other facts are in ``Catalog.optimizer``, an ``Optimizer``. The formats store both as follows:

==================  ===============================================================================
 format              storage
==================  ===============================================================================
 rank files          ``kind`` fp32, float16: numbered states in ``model_optim_rng.pt``
                     (``core.megatron.optimizer.numbered.read``); distributed: flat buffers in
                     ``distrib_optim.pt`` (``core.megatron.optimizer.flat.read``)
 torch_dist, zarr    the same keys, with layers stacked; ``param`` instead of ``fp32_param`` for
                     distributed (``core.megatron.optimizer.sharded.read``)
 others              these keys, and the groups as objects
==================  ===============================================================================

Source: Megatron-LM d98e8a64 ``core/optimizer/{optimizer,distrib_optimizer}.py``, tests/golden.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from typing import Protocol

from core.arrays.box import Shape
from core.values import dataclass

LIGHTNING_VERSION = "pytorch-lightning_version"
"""Key of an entry that every PyTorch Lightning checkpoint has; its optimizers are numbered."""
STATES = "optimizer.state."
"""Prefix of the keys of optimizer states."""
MASTER = "fp32_param"
"""The state that is the fp32 master weight."""
STEP = "optimizer.common_step"
"""Key of the hidden tensor that is the number of steps, if that is a tensor."""
MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg", "sum"}
)
MASTERS = frozenset({"fp32_param", "fp32_from_fp16_params", "master_param", "fp32", "param"})
"""Names of fp32 master weights in any checkpoint; ``MOMENTS`` has those of the moments."""
FACTORS: Mapping[str, str] = {
    "exp_avg_sq_row": "Adafactor",
    "exp_avg_sq_col": "Adafactor",
    "moment2_buffer": "adaptive Muon",
    "vmean": "Adam-mini",
    **dict.fromkeys(("L", "R", "Q_L", "Q_R", "eigvals_L", "eigvals_R", "GG", "Q"), "SOAP"),
}
"""Names of states that may have another shape than their parameter → the optimizer that has them.

Source: transformers 5.23 ``optimization.py`` (Adafactor); Emerging-Optimizers 0.4
``orthogonalized_optimizers/adaptive_muon.py``, ``legacy_soap/soap.py``; SOAP's reference
implementation (``GG``, ``Q``); adam-mini 1.1.1 ``adam_mini.py`` (a mean for each head, row or
parameter).
"""
BITSANDBYTES = "__bnb_optimizer_quant_state__"
"""Key of the mapping in which bitsandbytes has a parameter's states, except ``step``."""
NOT_IN_HF = "Hugging Face checkpoints do not include it"
"""The reason for not carrying an optimizer into such a checkpoint."""
KINDS = ("fp32", "float16", "distributed")


_OPTIMIZER = re.compile(
    r"(^|\.)(optimizers?|optim|optimizer_(?:states?|\d+))\.|^(optimizer(?:_\d+)?|optim)$"
    r"|(^|\.)(exp_avg|exp_avg_sq|fp32_param|momentum_buffer|max_exp_avg_sq|fp32_from_fp16_params)"
    r"(\.|$)"
)


@lru_cache(maxsize=1 << 18)
def is_optimizer_key(key: str) -> bool:
    """Return whether a key names optimizer state such as moments, master weights and steps."""
    return _OPTIMIZER.search(key) is not None


def is_moment(key: str) -> bool:
    """Return whether a key names a moment, from which no weight is computed."""
    return not MOMENTS.isdisjoint(key.split("."))


def state_key(state: str, param: str) -> str:
    """Return the key of a parameter's state in the global form.

    Args:
        state: ``fp32_param``, ``exp_avg`` …
        param: the parameter's global name.
    """
    return f"{STATES}{state}.{param}"


def split_state_key(key: str) -> tuple[str, str] | None:
    """Split a key in the global form into (state, parameter); None for keys of other tensors."""
    if not key.startswith(STATES):
        return None
    state, dot, param = key[len(STATES) :].partition(".")
    return (state, param) if dot and param else None


def param_of(key: str) -> str:
    """Return the parameter whose layout rule applies: the key itself, or the state's parameter."""
    state = split_state_key(key)
    return key if state is None else state[1]


class HasShape(Protocol):
    """The part of ``core.engine.catalog.tensor.Tensor`` that is used."""

    @property
    def shape(self) -> Shape:
        """Shape, in elements."""


def trained(tensors: Mapping[str, HasShape]) -> dict[str, int]:
    """Return the parameters that have an optimizer state, in the order of ``tensors``.

    Returns:
        Parameter → number of its axes.
    """
    parameters = {state[1] for key in tensors if (state := split_state_key(key)) is not None}
    return {key: len(tensor.shape) for key, tensor in tensors.items() if key in parameters}


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A group of parameters that share their optimizer settings.

    Args:
        settings: the group's entries in the checkpoint (``lr``, ``betas``, ``wd_mult``, ``step``
            …), without ``params``.
        params: global names of its parameters, in order; None if the checkpoint does not record
            them (torch_dist).
    """

    settings: Mapping[str, object]
    params: tuple[str, ...] | None = None

    @property
    def is_expert(self) -> bool:
        """True for a group of experts that are distributed by expert parallelism."""
        return bool(self.settings.get("is_expert_parallel"))


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer without its tensors.

    Args:
        kind: one of ``KINDS``.
        groups: parameter groups in the checkpoint's order; chained optimizers one after the other.
        states: names of the states that parameters have, in the order of the files (``exp_avg`` …).
        step: the number of steps of all parameters: a number, a ``TensorLeaf`` with the key
            ``STEP``, or None if it is recorded only in the groups or not at all.
        entries: other entries of the optimizer, such as ``grad_scaler``.
        omits_empty: rank files omit the groups of which a rank has no parameter, as before
            megatron-core 0.14; None if the checkpoint does not show this.
    """

    kind: str
    groups: tuple[ParamGroup, ...]
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    step: object = None
    entries: Mapping[str, object] = field(default_factory=dict)
    omits_empty: bool | None = None
