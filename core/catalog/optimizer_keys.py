"""Name the states of an optimizer, whatever the checkpoint calls them, and describe its groups.

In the global per-layer form (``core.megatron.reshard.from_ranks``) every state of a parameter is a
tensor of its own::

    optimizer.state.fp32_param.decoder.layers.3.mlp.linear_fc2.weight     the fp32 master, with the
    parameter's shape
    optimizer.state.exp_avg.decoder.layers.3.mlp.linear_fc2.weight
    optimizer.state.exp_avg_sq.decoder.layers.3.mlp.linear_fc2.weight

cut as the parameter is; everything else is ``Catalog.optimizer``, an ``Optimizer``. How each format
stores it:

=====================
=================================================================================================
 rank files             ``kind`` fp32, float16: numbered in model_optim_rng.pt
                        (``core.megatron.optimizer.numbered.read``); distributed: flat buffers in
                        distrib_optim.pt
                        (``core.megatron.optimizer.flat.read``)
 torch_dist, zarr       the same keys, with layers stacked; ``param`` instead of ``fp32_param`` for
 distributed
                        (``core.megatron.optimizer.sharded.read``)
 others                 these keys, and the groups as objects
=====================
=================================================================================================

Source: Megatron-LM d98e8a64 ``core/optimizer/{optimizer,distrib_optimizer}.py``, tests/golden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from core.arrays.box import Shape

STATES = "optimizer.state."
"""Prefix of the keys of optimizer states."""
MASTER = "fp32_param"
"""The state that is the parameter itself in fp32."""
STEP = "optimizer.common_step"
"""Key of the hidden tensor that is the number of steps, where it is a tensor."""
MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg", "sum"}
)
MASTERS = frozenset({"fp32_param", "fp32_from_fp16_params", "master_param", "fp32", "param"})
"""Names of moments and of fp32 masters in any checkpoint."""
KINDS = ("fp32", "float16", "distributed")


def state_key(state: str, param: str) -> str:
    """Return the key of a parameter's state in the global form.

    Args:
        state: ``fp32_param``, ``exp_avg`` …
        param: the parameter's global name.
    """
    return f"{STATES}{state}.{param}"


def state_of(key: str) -> tuple[str, str] | None:
    """Return (state, parameter) of a key in the global form, or None for other tensors."""
    if not key.startswith(STATES):
        return None
    state, dot, param = key[len(STATES) :].partition(".")
    return (state, param) if dot and param else None


def param_of(key: str) -> str:
    """Return the parameter whose rule a tensor follows: itself, or that of the state."""
    state = state_of(key)
    return key if state is None else state[1]


class HasShape(Protocol):
    """A tensor's metadata, as ``core.catalog.catalog.TensorMeta``, which imports this module."""

    @property
    def shape(self) -> Shape:
        """Return the shape, in elements."""


def trained(tensors: Mapping[str, HasShape]) -> dict[str, int]:
    """Return the parameters of a global form that have a state, in the order of ``tensors``.

    Returns:
        Parameter → number of its axes.
    """
    parameters = {state[1] for key in tensors if (state := state_of(key)) is not None}
    return {key: len(meta.shape) for key, meta in tensors.items() if key in parameters}


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A group of parameters that are trained alike.

    Args:
        settings: the group's entries as the checkpoint has them (``lr``, ``betas``, ``wd_mult``,
            ``step`` …), without ``params``.
        params: global names of its parameters, in order; None where the checkpoint does not record
            them (torch_dist).
    """

    settings: Mapping[str, object]
    params: tuple[str, ...] | None = None

    @property
    def is_expert(self) -> bool:
        """Return whether it is a group of experts that expert parallelism distributes."""
        return bool(self.settings.get("is_expert_parallel"))


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer, apart from its tensors.

    Args:
        kind: one of ``KINDS``.
        groups: in the checkpoint's order; those of chained optimizers one after the other.
        states: names of the states that parameters have, in the order of the files (``exp_avg`` …).
        step: the number of steps of all parameters: a number, a ``TensorLeaf`` with the key
            ``STEP``, or None where at most the groups record it.
        entries: other entries of the optimizer, such as ``grad_scaler``.
        omits_empty: rank files leave out the groups of which a rank has no parameter, as before
            megatron-core 0.14; None where the checkpoint does not show it.
    """

    kind: str
    groups: tuple[ParamGroup, ...]
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    step: object = None
    entries: Mapping[str, object] = field(default_factory=dict)
    omits_empty: bool | None = None
