"""Conversion of sharded state dicts to the form that torch's own dcp.save and dcp.load take.

::

    {"model": {"w": ShardedTensor(key="w"), "b": [ShardedTensor(key="b"), …]},
     "rng": ShardedObject(key="rng")}
      ── flatten_state_dict ─────▶ {"model.w": …, "model.b.0": …, "rng": …}, and a map back
      ── group_by_key ───────────▶ {"w": [ShardedTensor], "b": [ShardedTensor, …],
                                    "rng/shard_0_1": [ShardedObject]}
      ── mcore_to_pyt_state_dict ▶ {"w": CheckpointableShardedTensor, "b": LocalShardsContainer,
                                    "rng/shard_0_1": BytesIO}

The strategies do not need these functions: they use the engine. The functions serve scripts that
call torch with such state dicts, or with the planners of
``core.dist_checkpointing.strategies._torch.planners``.

Source: the documented functions of ``core.dist_checkpointing.strategies.torch``; megatron-core 0.15
and 0.16.1 (torch's ShardedTensor, which they use for prepended axes, is deprecated, and needs a
process group and a regular grid).

Scripts convert a sharded state dict to the names of its checkpoint and back, around torch's dcp::

    {"model": {0: ShardedTensor(key="w")}}                         state dict of a program
      ── _replace_state_dict_keys_with_sharded_keys ──▶ {"w": [ShardedTensor]}, and two maps
      ── mcore_to_pyt_state_dict, dcp.load, _unwrap_pyt_sharded_tensor ──▶ {"w": [tensor]}
      ── _replace_sharded_keys_with_state_dict_keys ──▶ {"model": {"0": tensor}}
      ── _restore_dict_types ────────────────────────▶ {"model": {0: tensor}}

None of these names is documented, and the strategies do not need them. But scripts that write
torch_dist through another storage writer (in SkyRL, slime, NeMo, ml-flashpoint) import them from
``strategies.torch``. Source: megatron-core 0.16.1, observed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element

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
        state_dict: dicts and lists. A list without tensors or sharded leaves in it is a leaf.

    Returns:
        Leaves by dot-joined path; and paths by dot-joined path, with keys of dicts as strings and
        indices of lists as numbers.

    Raises:
        ValueError: two leaves have the same name.
    """
    flattened: ShardedStateDict = {}
    mappings: dict[str, Path] = {}
    for path, leaf in _leaves(state_dict, ()):
        name = ".".join(map(str, path))
        if name in flattened:
            raise ValueError(f"two leaves of the state dict have the same flattened name: {name!r}")
        flattened[name] = leaf
        mappings[name] = path
    return flattened, mappings


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves with their paths; torch keeps lists of plain values as leaves."""
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
        sharded_state_dict: nested; all leaves are ShardedTensors or ShardedObjects.
        only_main_replicas: omit other replicas.

    Raises:
        UsageError: a leaf is of another type, or a tensor and an object have the same name.
    """
    groups: dict[str, list[Leaf]] = {}
    for leaf in nested_values(sharded_state_dict):
        key = checkpoint_name(leaf)  # raises for other types, also of replicas that are omitted
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
        UsageError: the value is of another type.
    """
    if isinstance(leaf, ShardedObject):
        return leaf.unique_key
    if isinstance(leaf, ShardedTensor):
        return leaf.key
    raise UsageError(
        f"a sharded strategy cannot save or load a {type(leaf).__name__}",
        hint="save common state with the common strategy, and call apply_factories for factories",
    )


def sharded_tensor_to_torch_sharded_tensor(
    sh_tens: list[ShardedTensor],
    rank: int | None = None,
    load_legacy_1d_flatten_tensors: bool = False,
) -> CheckpointableShardedTensor | LocalShardsContainer:
    """Wrap all shards of a tensor that this rank has in one value for torch's dcp.

    Args:
        sh_tens: shards of one key, with data; at least one.
        rank: not used; torch's own ShardedTensor needed it.
        load_legacy_1d_flatten_tensors: not used; flattened tensors are boxes of the global tensor,
            whatever its number of axes.

    Returns:
        A value with the attributes ``key`` and ``mcore_sh_ten``: the first shard, without data.

    Raises:
        UsageError: there is no shard, a shard has no data, or global shapes differ.
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
    """Build a flat state dict for torch's dcp.save or dcp.load.

    Args:
        state_dict: this rank's ShardedTensors or ShardedObjects, by name in the checkpoint; result
            of ``group_by_key``.
        is_loading: prepare for dcp.load: allocate missing data of the ShardedTensors, and set those
            with ``allow_shape_mismatch`` to zero, because the checkpoint may lack some elements.
        init_device: device of new data.
        load_legacy_1d_flatten_tensors: not used.

    Returns:
        Values by the same names. Objects become a stream with the list of their data.

    Raises:
        UsageError: a tensor to be saved has no data.
    """
    values: dict[str, CheckpointableShardedTensor | LocalShardsContainer | io.BytesIO] = {}
    for key, leaves in state_dict.items():
        tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
        # All leaves of a name have the same type. Objects become streams.
        if not tensors:
            values[key] = io.BytesIO(stream_of([leaf.data for leaf in leaves]))
            continue
        if is_loading:
            for tensor in tensors:
                if tensor.data is None:
                    tensor.init_data(
                        init_device, torch.zeros if tensor.allow_shape_mismatch else torch.empty
                    )
                elif tensor.allow_shape_mismatch:
                    tensor.data.detach().zero_()
        values[key] = sharded_tensor_to_torch_sharded_tensor(
            tensors, comm.rank(), load_legacy_1d_flatten_tensors
        )
    return values


def _replace_state_dict_keys_with_sharded_keys(
    sharded_state_dict: ShardedStateDict, keep_only_main_replica: bool = False
) -> tuple[dict[str, list[Leaf]], dict[str, Path], dict[str, list[str]]]:
    """Group the leaves by their names in the checkpoint, with two maps for the way back.

    Args:
        sharded_state_dict: nested; all leaves are ShardedTensors or ShardedObjects.
        keep_only_main_replica: omit other replicas.

    Returns:
        Leaves by name in the checkpoint; paths by dot-joined path; and dot-joined paths by name in
        the checkpoint, in the order of the leaves.

    Raises:
        UsageError: a leaf is neither a ShardedTensor nor a ShardedObject.
        ValueError: two leaves have the same dot-joined path.
    """
    flat, paths = flatten_state_dict(sharded_state_dict)
    leaves: dict[str, list[Leaf]] = {}
    names: dict[str, list[str]] = {}
    for name, leaf in flat.items():
        key = checkpoint_name(leaf)
        if keep_only_main_replica and not is_main_replica(leaf.replica_id):
            continue
        leaves.setdefault(key, []).append(leaf)
        names.setdefault(key, []).append(name)
    return leaves, paths, names


def _unwrap_pyt_sharded_tensor(sh_ten: Any) -> Any:
    """Return the tensors in a value of ``mcore_to_pyt_state_dict`` as a list.

    Other values are returned as they are.
    """
    if isinstance(sh_ten, CheckpointableShardedTensor):
        return [sh_ten._sh_ten.data]
    if isinstance(sh_ten, LocalShardsContainer):
        return [shard._sh_ten.data for shard in sh_ten._local_shards]
    return sh_ten


def _replace_sharded_keys_with_state_dict_keys(
    state_dict: Mapping[str, Sequence[Any]],
    flat_mapping: Mapping[str, Path],
    rename_mapping: Mapping[str, list[str]],
) -> ShardedStateDict:
    """Put loaded values into the nesting of the program's state dict, with strings as keys.

    Args:
        state_dict: values by name in the checkpoint, in the order of the leaves.
        flat_mapping, rename_mapping: maps from ``_replace_state_dict_keys_with_sharded_keys``.

    Raises:
        UsageError: the number of values of a name differs from its number of leaves.
    """
    nested: ShardedStateDict = {}
    for key, values in state_dict.items():
        names = rename_mapping.get(key, [])
        if len(values) != len(names):
            raise UsageError(
                f"{len(values)} values were loaded for {len(names)} leaves of the state dict",
                key=key,
            )
        for name, value in zip(names, values, strict=True):
            set_element(nested, flat_mapping[name], value)
    return nested


def _restore_dict_types(x: Any, keys_template: Any) -> None:
    """Restore the type of dict keys that were converted to strings, in place.

    Args:
        x: dicts and lists.
        keys_template: the same nesting with the original keys.

    Raises:
        UsageError: the nesting differs.
    """
    if type(keys_template) not in (dict, list):
        return
    if not isinstance(x, type(keys_template)):
        raise UsageError(f"expected a {type(keys_template).__name__}, found a {type(x).__name__}")
    # The lists may differ in length; the items that both have are restored.
    if isinstance(keys_template, list):
        for value, template in zip(x, keys_template, strict=False):
            _restore_dict_types(value, template)
        return
    for key, template in keys_template.items():
        if not isinstance(key, str):
            if str(key) not in x:
                raise UsageError(f"the key {key!r} is missing from the loaded state dict")
            x[key] = x.pop(str(key))
        _restore_dict_types(x[key], template)
