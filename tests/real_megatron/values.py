"""Parameters and optimizer states whose values are a function of key and global index: the same at
every layout.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch

from tests.real_megatron.cpu import sharded_state
from tests.real_megatron.snapshot import held

_ROWS = 512
"""Rows of which every vocabulary gets the first ones, so that padding does not change the
others.
"""


@torch.no_grad()
def fill(training: Any, *, salt: str, states: bool = False) -> None:
    """Gives every parameter its values, through Megatron's own offsets, and the optimizer's masters
    the same.

    Args:
        training: what to fill.
        salt: other values for another salt.
        states: give the masters values that the model's are rounded from, and the moments values of
            their own.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for model in training.models:
        sharded = nested_values(sharded_state(model))
        sharded = [
            item for item in sharded if isinstance(item, (ShardedTensor, ShardedTensorFactory))
        ]
        for leaf in sharded:
            if leaf.data.is_floating_point():
                leaf.data.copy_(_made(leaf, salt, leaf.data))
        by_tensor = {id(item.data): item for item in sharded}
        for parameter in model.parameters():
            for state, (tensor, start, stop) in (
                held(training.optimizer, parameter).items() if states else ()
            ):
                value = _made(
                    by_tensor[id(parameter)], salt if state == "fp32_param" else state, parameter
                )
                value = value.abs() * 0.01 if state == "exp_avg_sq" else value
                tensor.copy_(value.view(-1)[start:stop])
    if not states:
        training.optimizer.reload_model_params()


@torch.no_grad()
def clear_padding(training: Any) -> None:
    """Zeroes the padding rows of the vocabulary and of its states.

    Training fills them, because they are in the softmax; resharding leaves them out, and makes them
    anew as zeros.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    for model in training.models:
        by_tensor = {
            id(leaf.data): leaf
            for leaf in nested_values(sharded_state(model))
            if hasattr(leaf, "data")
        }
        for parameter in model.parameters():
            sharded = by_tensor[id(parameter)]
            if getattr(sharded, "allow_shape_mismatch", False):
                n_rows = max(0, training.run.model.vocab - sharded.global_offset[0])
                first = n_rows * parameter.shape[1]
                parameter.data.view(-1)[first:] = 0
                for tensor, start, _ in held(training.optimizer, parameter).values():
                    tensor[max(0, first - start) :] = 0


def _made(sharded: Any, salt: str, like: torch.Tensor) -> torch.Tensor:
    """Values in float32 of a tensor that is cut like ``sharded``."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    values = torch.zeros(like.shape)
    if isinstance(sharded, ShardedTensorFactory):
        for part in nested_values({"made": replace(sharded, data=values).build()}):
            part.data.copy_(_part(part, salt))
    else:
        values.copy_(_part(sharded, salt))
    return values


def _part(sharded: Any, salt: str) -> torch.Tensor:
    shape = tuple(sharded.global_shape)
    digest = hashlib.sha256((salt + sharded.key).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
    values = (
        torch.randn(
            (_ROWS, *shape[1:]) if sharded.allow_shape_mismatch else shape, generator=generator
        )
        * 0.1
    )
    if len(shape) - sharded.prepend_axis_num == 1 and "norm" in sharded.key:
        values += 1
    local = tuple(sharded.local_shape)
    sizes = (1,) * sharded.prepend_axis_num + local
    box = tuple(
        slice(start, start + size) for start, size in zip(sharded.global_offset, sizes, strict=True)
    )
    return values[box].reshape(local)
