"""Conversion of sharded state dicts to the form that torch's own dcp.save and dcp.load take.

::

    {"model": {"w": ShardedTensor(key="w"), "b": [ShardedTensor(key="b"), …]}, "rng":
    ShardedObject(key="rng")}
      ── flatten_state_dict ───▶ {"model.w": …, "model.b.0": …, "rng": …}, and the way back
      ── group_by_key ─────────▶ {"w": [ShardedTensor], "b": [ShardedTensor, …], "rng/shard_0_1": [ShardedObject]}
      ── mcore_to_pyt_state_dict ▶ {"w": CheckpointableShardedTensor, "b": LocalShardsContainer,
                                    "rng/shard_0_1": BytesIO}

The strategies do not need this: they use the engine. It serves scripts that call torch with such
state dicts, or with the planners of ``core.dist_checkpointing.strategies._torch.planners``.

Source: the documented functions of ``core.dist_checkpointing.strategies.torch``; megatron-core 0.15
and 0.16.1 (torch's ShardedTensor, which they use for prepended axes, is deprecated, and needs a
process group and a regular grid).
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
from core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from core.errors import UsageError

Path = tuple[str | int, ...]
Leaf = ShardedTensor | ShardedObject


def flatten_state_dict(state_dict: ShardedStateDict) -> tuple[ShardedStateDict, dict[str, Path]]:
    """Flatten a state dict to one level, with a map for the way back.

    Args:
        state_dict: dicts and lists. A list that has no tensors and sharded leaves in it is a leaf.

    Returns:
        Leaves by dot-joined path; and paths by dot-joined path, with keys of dicts as strings and
        indices of lists as numbers.

    Raises:
        ValueError: two leaves have one name.
    """
    flattened: ShardedStateDict = {}
    mappings: dict[str, Path] = {}
    for path, leaf in _leaves(state_dict, ()):
        name = ".".join(map(str, path))
        if name in flattened:
            raise ValueError(f"two leaves would both be called {name!r} in the flat state dict")
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


def group_by_key(
    sharded_state_dict: ShardedStateDict, *, only_main_replicas: bool = False
) -> dict[str, list[Leaf]]:
    """Group the leaves of a sharded state dict by their names in a checkpoint, in order.

    Args:
        sharded_state_dict: with no leaves but ShardedTensors and ShardedObjects.
        only_main_replicas: leave out other replicas.

    Raises:
        UsageError: a leaf is of another kind, or a name is both a tensor's and an object's.
    """
    groups: dict[str, list[Leaf]] = {}
    for leaf in nested_values(sharded_state_dict):
        key = checkpoint_name(leaf)
        if only_main_replicas and not is_main_replica(leaf.replica_id):
            continue
        leaves = groups.setdefault(key, [])
        if leaves and type(leaves[0]) is not type(leaf):
            raise UsageError("a tensor and an object have the same name", key=key)
        leaves.append(leaf)
    return groups


def checkpoint_name(leaf: Any) -> str:
    """Return the name in a checkpoint of a ShardedTensor or a ShardedObject.

    Raises:
        UsageError: the value is of another kind.
    """
    if isinstance(leaf, ShardedObject):
        return leaf.unique_key
    if isinstance(leaf, ShardedTensor):
        return leaf.key
    raise UsageError(
        f"a sharded state dict with a {type(leaf).__name__} cannot be saved or loaded by a sharded strategy",
        hint="save common state by the common strategy, and replace factories by apply_factories",
    )


def sharded_tensor_to_torch_sharded_tensor(
    sh_tens: list[ShardedTensor],
    rank: int | None = None,
    load_legacy_1d_flatten_tensors: bool = False,
) -> CheckpointableShardedTensor | LocalShardsContainer:
    """Return all shards of a tensor that this rank has, as one value for torch's dcp.

    Args:
        sh_tens: of one key, with data; at least one.
        rank: not used; torch's own ShardedTensor needed it.
        load_legacy_1d_flatten_tensors: not used; flattened tensors of any number of axes are boxes
            of the global one.

    Returns:
        A value with the attributes ``key`` and ``mcore_sh_ten``, the first of the shards without
        data.

    Raises:
        UsageError: there is no shard, one has no data, or global shapes differ.
    """
    shards = [CheckpointableShardedTensor.from_sh_ten(shard) for shard in sh_tens]
    value: Any = shards[0] if len(shards) == 1 else LocalShardsContainer([*shards])
    value.key = sh_tens[0].key
    value.mcore_sh_ten = sh_tens[0].without_data()
    return value  # type: ignore[no-any-return]


def mcore_to_pyt_state_dict(
    state_dict: Mapping[str, Sequence[ShardedBase]],
    is_loading: bool = False,
    init_device: torch.device = torch.device("cpu"),  # noqa: B008 (a value, and the documented default)
    load_legacy_1d_flatten_tensors: bool = False,
) -> dict[str, CheckpointableShardedTensor | LocalShardsContainer | io.BytesIO]:
    """Return a flat state dict for torch's dcp.save or dcp.load.

    Args:
        state_dict: the ShardedTensors, or the ShardedObjects, of this rank by name in the
            checkpoint; result of ``group_by_key``. For loading, ShardedTensors get the data that
            they lack.
        is_loading: for dcp.load: tensors without data get some, and those with
            ``allow_shape_mismatch`` become zero, because the checkpoint may not have all of their
            elements.
        init_device: device of new data.
        load_legacy_1d_flatten_tensors: not used.

    Returns:
        Values by the same names; objects as the stream of the list of their data.

    Raises:
        UsageError: a tensor to be saved has no data.
    """
    values: dict[str, CheckpointableShardedTensor | LocalShardsContainer | io.BytesIO] = {}
    for key, leaves in state_dict.items():
        tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
        if not tensors:
            values[key] = io.BytesIO(stream_of([leaf.data for leaf in leaves]))
            continue
        if is_loading:
            for tensor in tensors:
                _prepare_data(tensor, init_device)
        values[key] = sharded_tensor_to_torch_sharded_tensor(
            tensors, comm.rank(), load_legacy_1d_flatten_tensors
        )
    return values


def _prepare_data(tensor: ShardedTensor, device: str | torch.device) -> None:
    """Give a ShardedTensor data to load into: zeros if it may be larger than the stored tensor."""
    if tensor.data is None:
        tensor.init_data(device, torch.zeros if tensor.allow_shape_mismatch else torch.empty)
    elif tensor.allow_shape_mismatch:
        tensor.data.detach().zero_()
