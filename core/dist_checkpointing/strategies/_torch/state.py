"""Sharded state dicts in the form that torch's own dcp.save and dcp.load take.

::

    {"model": {"w": ShardedTensor(key="w"), "b": [ShardedTensor(key="b"), …]}, "rng": ShardedObject(key="rng")}
      ── flatten_state_dict ──▶ {"model.w": …, "model.b.0": …, "rng": …}, and the way back
      ── by_key ──────────────▶ {"w": [ShardedTensor], "b": [ShardedTensor, …], "rng/shard_0_1": [ShardedObject]}
      ── mcore_to_pyt_state_dict ▶ {"w": CheckpointableShardedTensor, "b": LocalShardsContainer,
                                    "rng/shard_0_1": BytesIO}

The strategies do not need this: they go through the engine. It serves scripts that call torch with such state dicts, or
with the planners of ``core.dist_checkpointing.strategies._torch.planners``.

Source: the documented functions of ``core.dist_checkpointing.strategies.torch``; megatron-core 0.15 and 0.16.1 (torch's
ShardedTensor, which they give for prepended axes, is deprecated, and needs a process group and a regular grid).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._values.objects import stream_of
from core.dist_checkpointing.dict_utils import nested_values
from core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    is_main_replica,
)
from core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from core.errors import UsageError

Path = tuple[str | int, ...]
Leaf = ShardedTensor | ShardedObject


def flatten_state_dict(state_dict: ShardedStateDict) -> tuple[ShardedStateDict, dict[str, Path]]:
    """A state dict of one level, and where its entries come from.

    Args:
        state_dict: dicts and lists. A list without tensors and sharded leaves in it is a leaf.

    Returns:
        Dot-joined path → leaf; the same name → path, keys of dicts as text, indices of lists as numbers.

    Raises:
        ValueError: two leaves have one name.
    """
    flattened: ShardedStateDict = {}
    mappings: dict[str, Path] = {}
    for path, leaf in _leaves(state_dict, ()):
        name = ".".join(map(str, path))
        if name in flattened:
            raise ValueError(f"two leaves are called {name!r} once the state dict is flat")
        flattened[name] = leaf
        mappings[name] = path
    return flattened, mappings


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(value, (list, tuple)) and _holds_tensors(value):
        for number, inner in enumerate(value):
            yield from _leaves(inner, (*path, number))
    else:
        yield path, value


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, (torch.Tensor, ShardedBase))


def by_key(sharded_state_dict: ShardedStateDict, *, only_main_replicas: bool = False) -> dict[str, list[Leaf]]:
    """The leaves of a sharded state dict under the names that they have in a checkpoint, in order.

    Args:
        sharded_state_dict: with no leaves but ShardedTensors and ShardedObjects.
        only_main_replicas: leave out the others.

    Raises:
        UsageError: there is another leaf, or a name is both a tensor's and an object's.
    """
    found: dict[str, list[Leaf]] = {}
    for leaf in nested_values(sharded_state_dict):
        key = name_of(leaf)
        if only_main_replicas and not is_main_replica(leaf.replica_id):
            continue
        leaves = found.setdefault(key, [])
        if leaves and type(leaves[0]) is not type(leaf):
            raise UsageError("the name is that of a tensor and of an object", key=key)
        leaves.append(leaf)
    return found


def name_of(leaf: Any) -> str:
    """The name in a checkpoint of a ShardedTensor or a ShardedObject.

    Raises:
        UsageError: it is another value.
    """
    if isinstance(leaf, ShardedObject):
        return leaf.unique_key
    if isinstance(leaf, ShardedTensor):
        return leaf.key
    raise UsageError(
        f"a sharded state dict with a {type(leaf).__name__} cannot be saved or loaded by a sharded strategy",
        hint="common state is for the common strategy, and apply_factories builds what factories stand for",
    )


def sharded_tensor_to_torch_sharded_tensor(
    sh_tens: list[ShardedTensor], rank: int | None = None, load_legacy_1d_flatten_tensors: bool = False
) -> CheckpointableShardedTensor | LocalShardsContainer:
    """All shards of a tensor that this rank has, as one value for torch's distributed checkpoint.

    Args:
        sh_tens: of one key, with data; at least one.
        rank: not needed; torch's own ShardedTensor, which this is not, had to know it.
        load_legacy_1d_flatten_tensors: not needed; flattened tensors of any number of axes are boxes of the global one.

    Returns:
        It has the attributes ``key`` and ``mcore_sh_ten``, the first of the shards without data.

    Raises:
        UsageError: there is no shard, one has no data, or global shapes differ.
    """
    shards = [CheckpointableShardedTensor.from_sh_ten(shard) for shard in sh_tens]
    made: Any = shards[0] if len(shards) == 1 else LocalShardsContainer([*shards])
    made.key = sh_tens[0].key
    made.mcore_sh_ten = sh_tens[0].without_data()
    return made  # type: ignore[no-any-return]


def mcore_to_pyt_state_dict(
    state_dict: Mapping[str, Sequence[ShardedBase]],
    is_loading: bool = False,
    init_device: torch.device = torch.device("cpu"),  # noqa: B008 (a value, and the documented default)
    load_legacy_1d_flatten_tensors: bool = False,
) -> dict[str, CheckpointableShardedTensor | LocalShardsContainer | io.BytesIO]:
    """A flat state dict for torch's dcp.save or dcp.load.

    Args:
        state_dict: name in the checkpoint → the ShardedTensors, or the ShardedObjects, that this rank has of it; what
            ``by_key`` gives. ShardedTensors get the data that they lack, if it is for loading.
        is_loading: for dcp.load: tensors without data get some, and those with ``allow_shape_mismatch`` become zero,
            because not all of them may be in the checkpoint.
        init_device: where missing data are made.
        load_legacy_1d_flatten_tensors: see ``sharded_tensor_to_torch_sharded_tensor``.

    Returns:
        The same names; objects as the stream of the list of their data.

    Raises:
        UsageError: data to be saved are missing.
    """
    made: dict[str, CheckpointableShardedTensor | LocalShardsContainer | io.BytesIO] = {}
    for key, leaves in state_dict.items():
        tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
        if not tensors:
            made[key] = io.BytesIO(stream_of([leaf.data for leaf in leaves]))
            continue
        if is_loading:
            for tensor in tensors:
                _make_room(tensor, init_device)
        made[key] = sharded_tensor_to_torch_sharded_tensor(tensors, comm.rank(), load_legacy_1d_flatten_tensors)
    return made


def _make_room(tensor: ShardedTensor, device: str | torch.device) -> None:
    """Gives a ShardedTensor data to be filled, zeros where it may be larger than what is stored."""
    if tensor.data is None:
        tensor.init_data(device, torch.zeros if tensor.allow_shape_mismatch else torch.empty)
    elif tensor.allow_shape_mismatch:
        tensor.data.detach().zero_()
