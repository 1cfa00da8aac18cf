"""A sharded state dict under the names of its checkpoint, and back: what scripts do around torch's own dcp.

::

    {"model": {0: ShardedTensor(key="w")}}                         state dict of a program
      ── _replace_state_dict_keys_with_sharded_keys ──▶ {"w": [ShardedTensor]}, and two maps
      ── mcore_to_pyt_state_dict, dcp.load, _unwrap_pyt_sharded_tensor ──▶ {"w": [tensor]}
      ── _replace_sharded_keys_with_state_dict_keys ──▶ {"model": {"0": tensor}}
      ── _restore_dict_types ────────────────────────▶ {"model": {0: tensor}}

None of these names is documented, and the strategies do without them. But scripts that write torch_dist through another
storage writer (of SkyRL, slime, NeMo, ml-flashpoint) import them from ``strategies.torch``. Source: megatron-core
0.16.1, observed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint._traverse import set_element

from core.dist_checkpointing.mapping import ShardedStateDict, is_main_replica
from core.dist_checkpointing.strategies._torch.state import Leaf, Path, flatten_state_dict, name_of
from core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from core.errors import UsageError


def _replace_state_dict_keys_with_sharded_keys(
    sharded_state_dict: ShardedStateDict, keep_only_main_replica: bool = False
) -> tuple[dict[str, list[Leaf]], dict[str, Path], dict[str, list[str]]]:
    """The leaves by their names in the checkpoint, and what is needed for the way back.

    Args:
        sharded_state_dict: with no leaves but ShardedTensors and ShardedObjects.
        keep_only_main_replica: leave out the others.

    Returns:
        Name in the checkpoint → leaves; dot-joined path → path; name in the checkpoint → dot-joined paths, in the
        order of the leaves.

    Raises:
        UsageError: there is another leaf.
        ValueError: two leaves have one dot-joined path.
    """
    flat, paths = flatten_state_dict(sharded_state_dict)
    leaves: dict[str, list[Leaf]] = {}
    names: dict[str, list[str]] = {}
    for name, leaf in flat.items():
        key = name_of(leaf)
        if keep_only_main_replica and not is_main_replica(leaf.replica_id):
            continue
        leaves.setdefault(key, []).append(leaf)
        names.setdefault(key, []).append(name)
    return leaves, paths, names


def _unwrap_pyt_sharded_tensor(sh_ten: Any) -> Any:
    """The tensors in what ``mcore_to_pyt_state_dict`` has made, in a list; another value as it is."""
    if isinstance(sh_ten, CheckpointableShardedTensor):
        return [sh_ten._sh_ten.data]
    if isinstance(sh_ten, LocalShardsContainer):
        return [shard._sh_ten.data for shard in sh_ten._local_shards]
    return sh_ten


def _replace_sharded_keys_with_state_dict_keys(
    state_dict: Mapping[str, Sequence[Any]], flat_mapping: Mapping[str, Path], rename_mapping: Mapping[str, list[str]]
) -> ShardedStateDict:
    """The nesting of the program, with loaded values; keys of dicts are text.

    Args:
        state_dict: name in the checkpoint → values, in the order of the leaves.
        flat_mapping, rename_mapping: from ``_replace_state_dict_keys_with_sharded_keys``.

    Raises:
        UsageError: a name has another number of values than of leaves.
    """
    nested: ShardedStateDict = {}
    for key, values in state_dict.items():
        names = rename_mapping.get(key, [])
        if len(values) != len(names):
            raise UsageError(f"there are {len(values)} values for {len(names)} leaves", key=key)
        for name, value in zip(names, values, strict=True):
            set_element(nested, flat_mapping[name], value)
    return nested


def _restore_dict_types(x: Any, keys_template: Any) -> None:
    """Gives keys of dicts that became text their type again, in place.

    Args:
        x: dicts and lists.
        keys_template: the same nesting with the keys wanted.

    Raises:
        UsageError: the nesting is another one.
    """
    if type(keys_template) not in (dict, list):
        return
    if not isinstance(x, type(keys_template)):
        raise UsageError(f"a {type(x).__name__} is where a {type(keys_template).__name__} was")
    if isinstance(keys_template, list):
        for value, wanted in zip(x, keys_template, strict=False):
            _restore_dict_types(value, wanted)
        return
    for key, wanted in keys_template.items():
        if not isinstance(key, str):
            if str(key) not in x:
                raise UsageError(f"the key {key!r} is not there")
            x[key] = x.pop(str(key))
        _restore_dict_types(x[key], wanted)
