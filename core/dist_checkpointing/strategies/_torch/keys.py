"""Conversion of a sharded state dict to the names of its checkpoint and back.

Scripts do this around torch's own dcp::

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

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint._traverse import set_element

from core.dist_checkpointing.mapping import ShardedStateDict, is_main_replica
from core.dist_checkpointing.strategies._torch.state import (
    Leaf,
    Path,
    checkpoint_name,
    flatten_state_dict,
)
from core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from core.errors import UsageError


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
                f"loaded {len(values)} values for {len(names)} leaves of the state dict",
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
                raise UsageError(f"the key {key!r} is missing in the loaded state dict")
            x[key] = x.pop(str(key))
        _restore_dict_types(x[key], template)
