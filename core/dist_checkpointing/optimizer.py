"""Sharded state dicts of optimizers, in which every moment is sharded as its parameter is.

These are the documented names of ``megatron.core.dist_checkpointing.optimizer``. Parameters are
recognised by identity, so the model's state dict must contain the parameter objects that the
optimizer updates, not detached tensors (``state_dict(keep_vars=True)``).
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
    "pass keep_vars=True to state_dict() so that it contains the optimizer's own parameters, and "
    "use a ShardedTensorFactory for a parameter that is stored in a different form"
)


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.nn.Parameter]) -> dict[int, int]:
    """Map ``id()`` of each parameter (for a DTensor, of its local tensor) to its number.

    The number is the parameter's index in the optimizer's state; the first one if a parameter
    occurs twice.
    """
    numbers: dict[int, int] = {}
    for number, param in enumerate(optim_params_iter):
        numbers.setdefault(id(_local_tensor(param)), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.nn.Parameter]
) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    """Map each parameter's number in the optimizer's state to the model's sharded tensor for it.

    Args:
        model_sharded_state_dict: the model's tensors, in any nesting; those that the optimizer does
            not have are skipped.
        optim_params_iter: the optimizer's parameters, in its order.
    """
    sharded, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    numbers = get_optim_param_to_id_map(optim_params_iter)
    sharded_params = {}
    for leaf in nested_values(sharded):
        number = numbers.get(id(leaf.data))
        if number is None:
            logger.debug("%s is not tracked by the optimizer", leaf.key)
        else:
            sharded_params[number] = leaf
    if not sharded_params and comm.rank() == 0:
        logger.warning(
            "no tensor of the model's state dict is one of the optimizer's parameters; %s",
            KEEP_VARS_HINT,
        )
    return sharded_params


def make_sharded_optimizer_tensor(
    model_param: ShardedTensor | ShardedTensorFactory, optim_param: torch.Tensor, prefix: str
) -> ShardedTensor | ShardedTensorFactory:
    """Build the sharded tensor of an optimizer's tensor, sharded as its parameter is.

    Its key is ``<prefix>.<key of the parameter>``.

    Args:
        model_param: the model's sharded tensor of the parameter; for a factory, the result is a
            factory as well.
        optim_param: the optimizer's tensor, of the parameter's local shape and of any dtype.
        prefix: the first part of the key, such as ``optimizer.state.exp_avg``.

    Raises:
        CheckpointingException: the shapes differ.
    """
    optim_param = _local_tensor(optim_param)
    key = f"{prefix}.{model_param.key}"
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=optim_param)
    if tuple(optim_param.shape) != tuple(model_param.data_shape):
        raise CheckpointingException(
            f"the optimizer's tensor has shape {tuple(optim_param.shape)}, but its "
            f"parameter has shape {tuple(model_param.data_shape)}",
            key=key,
            hint=KEEP_VARS_HINT,
        )
    return replace(model_param, key=key, data=optim_param, dtype=optim_param.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[int, ShardedTensor | ShardedTensorFactory],
    exclude_keys: tuple[str, ...] = (),
) -> None:
    """Turn an optimizer's state dict into a sharded one, in place.

    Every tensor in ``state`` becomes sharded, with the key ``optimizer.state.<its name>.<key of the
    parameter>``. The numbers in ``param_groups`` are valid in this process only, so they are not
    stored.

    Args:
        optim_state_dict: the result of the optimizer's ``state_dict()``; the dict changes, its
            values do not.
        id_to_sharded_param_map: result of ``get_param_id_to_sharded_param_map``.
        exclude_keys: names in a parameter's state that are skipped, such as the step count.

    Raises:
        ValueError: a parameter of the optimizer is not in the map.
        CheckpointingException: a tensor does not have its parameter's shape.
    """
    # Find parameters without a sharded tensor before anything changes.
    unknown = [
        number for number in optim_state_dict["state"] if number not in id_to_sharded_param_map
    ]
    if unknown:
        raise ValueError(
            f"optimizer parameter {unknown[0]} is not in the model's state dict; {KEEP_VARS_HINT}"
        )
    # Shard every tensor like its parameter.
    state = {
        number: {
            name: make_sharded_optimizer_tensor(
                id_to_sharded_param_map[number], value, f"optimizer.state.{name}"
            )
            for name, value in values.items()
            if name not in exclude_keys
        }
        for number, values in optim_state_dict["state"].items()
    }
    # Keep the parameter numbers out of the checkpoint: other ranks number other parameters.
    groups = deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict["state"] = state
    optim_state_dict["param_groups"] = groups


def _local_tensor(tensor: Any) -> Any:
    """Return the local tensor of a DTensor, and any other value unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    # With gradients, to_local() would create a new tensor each time, whose id() identifies nothing.
    with torch.no_grad():
        return tensor.to_local()
