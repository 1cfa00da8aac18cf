"""Sharded state dicts of optimizers, made from those of their models: a moment is sharded as its parameter is.

The documented names of ``megatron.core.dist_checkpointing.optimizer``. Parameters are recognised by identity, so the
model's state dict has to hold the very parameters that the optimizer was given (``state_dict(keep_vars=True)``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.dict_utils import nested_values
from core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)
from core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from core.errors import CheckpointingException

logger = logging.getLogger(__name__)

KEEP_VARS_HINT = (
    "pass keep_vars=True to state_dict() so that it holds the optimizer's own parameters, and store a parameter as "
    "something else through a ShardedTensorFactory"
)


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.nn.Parameter]) -> dict[int, int]:
    """``id()`` of every parameter (of its local tensor, for a DTensor) → its number in the optimizer's state.

    A parameter that is there twice has its first number.
    """
    numbers: dict[int, int] = {}
    for number, param in enumerate(optim_params_iter):
        numbers.setdefault(id(_local(param)), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.nn.Parameter]
) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    """Number of a parameter in the optimizer's state → how the model shards it.

    Args:
        model_sharded_state_dict: the model's tensors, in any nesting; those that the optimizer does not have are
            skipped.
        optim_params_iter: the optimizer's parameters, in its order.
    """
    sharded, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    numbers = get_optim_param_to_id_map(optim_params_iter)
    found = {}
    for leaf in nested_values(sharded):
        number = numbers.get(id(leaf.data))
        if number is None:
            logger.debug("%s is not tracked by the optimizer", leaf.key)
        else:
            found[number] = leaf
    if not found and comm.rank() == 0:
        logger.warning("no tensor of the model's state dict is one of the optimizer's parameters; %s", KEEP_VARS_HINT)
    return found


def make_sharded_optimizer_tensor(
    model_param: ShardedTensor | ShardedTensorFactory, optim_param: torch.Tensor, prefix: str
) -> ShardedTensor | ShardedTensorFactory:
    """A tensor of the optimizer, sharded as its parameter is, with the key ``<prefix>.<key of the parameter>``.

    Args:
        model_param: how the model shards the parameter; for a factory, the result is one as well.
        optim_param: the tensor, of the parameter's local shape and of any dtype.
        prefix: what the tensor is to the parameter.

    Raises:
        CheckpointingException: the shapes differ.
    """
    optim_param = _local(optim_param)
    key = f"{prefix}.{model_param.key}"
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=optim_param)
    if tuple(optim_param.shape) != tuple(model_param.data_shape):
        raise CheckpointingException(
            f"the optimizer's shape {tuple(optim_param.shape)} is not the parameter's {tuple(model_param.data_shape)}",
            key=key,
            hint=KEEP_VARS_HINT,
        )
    return replace(model_param, key=key, data=optim_param, dtype=optim_param.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[int, ShardedTensor | ShardedTensorFactory],
    exclude_keys: tuple[str, ...] = (),
) -> None:
    """Makes an optimizer's state dict a sharded one, in place.

    Every tensor of ``state`` becomes sharded, with the key ``optimizer.state.<its name>.<key of the parameter>``. The
    numbers in ``param_groups`` are those of this process, so they are not stored.

    Args:
        optim_state_dict: what the optimizer's ``state_dict()`` returned; the dict changes, its values do not.
        id_to_sharded_param_map: see ``get_param_id_to_sharded_param_map``.
        exclude_keys: names in the state of a parameter that are left out, such as a number of steps.

    Raises:
        ValueError: a number has no parameter.
        CheckpointingException: a tensor does not have its parameter's shape.
    """
    unknown = [number for number in optim_state_dict["state"] if number not in id_to_sharded_param_map]
    if unknown:
        raise ValueError(f"the parameter {unknown[0]} of the optimizer is none of the model's; {KEEP_VARS_HINT}")
    state = {
        number: {
            name: make_sharded_optimizer_tensor(id_to_sharded_param_map[number], value, f"optimizer.state.{name}")
            for name, value in values.items()
            if name not in exclude_keys
        }
        for number, values in optim_state_dict["state"].items()
    }
    groups = deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict["state"] = state
    optim_state_dict["param_groups"] = groups


def _local(tensor: Any) -> Any:
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # with gradients, to_local() would make a new tensor each time
        return tensor.to_local()
