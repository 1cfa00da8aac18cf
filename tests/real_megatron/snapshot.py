"""Every parameter and optimizer tensor of a training as global tensors, put together by Megatron's
own offsets.

Each rank writes its pieces (``pieces``); ``assembled`` joins those of all ranks, and finds out
whether replicas agree.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.real_megatron.cpu import sharded_state

Piece = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]
"""Key, global shape, offset in it (both in elements), values."""

STATES = ("fp32_param", "exp_avg", "exp_avg_sq")
MOMENTS = (*STATES[1:], "momentum_buffer")


def pieces(training: Any) -> list[Piece]:
    """What this rank holds of the parameters, buffers and optimizer states."""
    all_pieces: list[Piece] = []
    for model in training.models:
        sharded = _sharded(model)
        all_pieces += [piece for item in sharded for piece in _pieces(item, item.data, "")]
        by_tensor = {id(item.data): item for item in sharded}
        for parameter in model.parameters():
            for state, tensor in _states(training.optimizer, parameter).items():
                all_pieces += _pieces(by_tensor[id(parameter)], tensor, f"{state}/")
    return all_pieces


def _sharded(model: Any) -> list[Any]:
    """Sharded tensors, and factories of several, of one model chunk."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    leaves = nested_values(sharded_state(model))
    return [leaf for leaf in leaves if isinstance(leaf, (ShardedTensor, ShardedTensorFactory))]


def _pieces(sharded: Any, tensor: torch.Tensor, prefix: str) -> list[Piece]:
    """A tensor that is cut like ``sharded``, in pieces of global tensors."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    tensor = tensor.detach()
    if isinstance(sharded, ShardedTensorFactory):
        parts = nested_values({"made": replace(sharded, data=tensor).build()})
    else:
        parts = [replace(sharded, data=tensor, dtype=tensor.dtype)]
    return [
        (
            prefix + leaf.key,
            tuple(leaf.global_shape),
            tuple(leaf.global_offset),
            leaf.data.reshape((1,) * leaf.prepend_axis_num + tuple(leaf.data.shape)).clone(),
        )
        for leaf in parts
    ]


def held(optimizer: Any, parameter: torch.Tensor) -> dict[str, tuple[torch.Tensor, int, int]]:
    """What this process holds of the optimizer's tensors of a parameter: flat views, and which
    elements they are.

    {} for a parameter that another data parallel rank holds.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if parameter in getattr(part, "model_param_gbuf_map", ()):
            param_range = part._get_model_param_range_map(parameter)["param"]
            tensors = part._get_main_param_and_optimizer_states(parameter)
            names = {"fp32_param": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
            return {
                state: (tensors[name].view(-1), param_range.start, param_range.end)
                for state, name in names.items()
            }
        if hasattr(part, "model_param_gbuf_map"):
            continue
        own = getattr(parameter, "main_param", parameter)
        if any(own is item for item in part.get_parameters()):
            state = part.optimizer.state[own]  # empty until the first step
            tensors = {name: state[name] for name in MOMENTS if name in state}
            tensors |= {} if own is parameter else {STATES[0]: own.data}
            return {
                name: (tensor.view(-1), 0, parameter.numel()) for name, tensor in tensors.items()
            }
    return {}


def _states(optimizer: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The optimizer's tensors of a parameter, with its shape.

    With the distributed optimizer every rank adds the elements that it holds to zeros.
    """
    tensors = held(optimizer, parameter)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if any(
            parameter is item for buffer in getattr(part, "buffers", ()) for item in buffer.params
        ):
            states = {state: torch.zeros(parameter.numel()) for state in STATES}
            for state, (tensor, start, stop) in tensors.items():
                states[state][start:stop] = tensor
            for tensor in states.values():
                torch.distributed.all_reduce(tensor, group=part.data_parallel_group)
            return {state: tensor.view(parameter.shape) for state, tensor in states.items()}
    return {state: tensor.view(parameter.shape) for state, (tensor, _, _) in tensors.items()}


def assembled(
    folder: Path, *, rows: int | None = None, has_all_states: bool = True
) -> dict[str, torch.Tensor]:
    """Global tensors by key from the pieces of all ranks (``rank*.pt``).

    Args:
        folder: where the ranks wrote.
        rows: true rows of the vocabulary; padding rows are cut.
        has_all_states: every parameter has optimizer states; otherwise, zeros stand for the others.

    Raises:
        AssertionError: replicas disagree, or elements are missing.
    """
    tensors: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("rank*.pt")):
        for key, shape, offset, data in torch.load(path)["pieces"]:
            if key not in tensors:
                tensors[key] = torch.zeros(shape, dtype=data.dtype)
                filled[key] = torch.zeros(shape, dtype=torch.bool)
            box = tuple(
                slice(start, start + size) for start, size in zip(offset, data.shape, strict=True)
            )
            is_held = filled[key][box]
            assert torch.equal(tensors[key][box][is_held], data[is_held]), (
                f"{path.name}: replicas of {key} differ"
            )
            tensors[key][box] = data
            filled[key][box] = True
    for key, is_filled in filled.items():
        assert is_filled.all() or ("/" in key and not has_all_states), (
            f"{key}: {int((~is_filled).sum())} elements are held by no rank"
        )
    if rows is not None:
        tensors = {
            key: tensor[:rows]
            if key.endswith(("word_embeddings.weight", "output_layer.weight"))
            else tensor
            for key, tensor in tensors.items()
        }
    return tensors
