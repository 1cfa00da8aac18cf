"""Strategies of somebody else, as users register them: the smallest that implement the documented
base classes.

A rank's tensors are one file, whole; loading puts the global tensors together in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from core.dist_checkpointing.strategies.async_utils import AsyncRequest
from core.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    register_default_strategy,
    require_backend,
    require_version,
)

BACKEND, COMMON = "own", "own_common"


def _nothing(rank: int) -> None:
    pass


class OwnSave(SaveShardedStrategy):
    """``rank_<n>.pt``; ``before`` is called with the rank before anything is written, ``amid``
    half-way.
    """

    def __init__(
        self, before: Callable[[int], None] = _nothing, amid: Callable[[int], None] = _nothing
    ) -> None:
        super().__init__(BACKEND, 3)
        self.before, self.amid = before, amid

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        rank = comm.rank()
        self.before(rank)
        (Path(checkpoint_dir) / f"begun_{rank}").write_bytes(b"x")
        self.amid(rank)
        _write(_held(sharded_state_dict), Path(checkpoint_dir), rank)


class OwnAsyncSave(AsyncSaveShardedStrategy):
    def __init__(self) -> None:
        super().__init__(BACKEND, 3)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        return AsyncRequest(
            _write, (_held(sharded_state_dict), Path(checkpoint_dir), comm.rank()), []
        )


def _held(sharded_state_dict: Any) -> list[tuple[Any, ...]]:
    parts = []
    for part in nested_values(sharded_state_dict):
        assert isinstance(part, ShardedTensor)
        if is_main_replica(part.replica_id):
            flat = part.flattened_range
            place = part.global_offset, (1,) * part.prepend_axis_num + tuple(part.local_shape)
            parts.append(
                (
                    part.key,
                    part.global_shape,
                    *place,
                    flat and (flat.start, flat.stop),
                    part.data.clone(),
                )
            )
    return parts


def _write(parts: list[tuple[Any, ...]], checkpoint_dir: Path, rank: int) -> None:
    torch.save(parts, checkpoint_dir / f"rank_{rank}.pt")


class OwnLoad(LoadShardedStrategy):
    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        require_backend(self, loaded_backend, BACKEND)

    def check_version_compatibility(self, loaded_version: Any) -> None:
        require_version(self, loaded_version, (3,))

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        stored = _whole(Path(checkpoint_dir))

        def value(part: ShardedTensor) -> torch.Tensor:
            if part.key not in stored:
                raise KeyError(part.key)
            tensor = stored[part.key][part.global_slice()].to(part.dtype)
            return (
                tensor if part.flattened_range is None else tensor.flatten()[part.flattened_range]
            )

        return dict_list_map_outplace(value, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        return {
            key: ShardedTensor.from_rank_offsets(key, tensor).without_data()
            for key, tensor in _whole(Path(checkpoint_dir)).items()
        }

    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None:
        for path in Path(checkpoint_dir).glob("rank_*.pt"):
            torch.save(
                [part for part in torch.load(path) if not part[0].startswith(key_prefix)], path
            )


def _whole(checkpoint_dir: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint_dir.glob("rank_*.pt")):
        for key, shape, offset, local, flat, data in torch.load(path):
            tensor = tensors.setdefault(key, torch.zeros(shape, dtype=data.dtype))
            place = tensor[tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))]
            if flat is None:
                place.copy_(data.reshape(local))
            else:
                shard = place.flatten()
                shard[slice(*flat)] = data
                place.copy_(shard.reshape(local))
    return tensors


class OwnCommonSave(SaveCommonStrategy):
    """``state.pt``, and ``object_<n>.pt`` for the objects of a rank."""

    can_handle_sharded_objects = True

    def __init__(self) -> None:
        super().__init__(COMMON, 5)

    def save_common(self, common_state_dict: Any, checkpoint_dir: Any) -> None:
        if comm.rank() == 0:
            torch.save(common_state_dict, Path(checkpoint_dir) / "state.pt")

    def save_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> None:
        parts = [
            part
            for part in nested_values(sharded_objects_state_dict)
            if is_main_replica(part.replica_id)
        ]
        torch.save(
            {part.unique_key: part.data for part in parts},
            Path(checkpoint_dir) / f"object_{comm.rank()}.pt",
        )


class OwnCommonLoad(LoadCommonStrategy):
    can_handle_sharded_objects = True

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        require_backend(self, loaded_backend, COMMON)

    def check_version_compatibility(self, loaded_version: Any) -> None:
        require_version(self, loaded_version, (5,))

    def load_common(self, checkpoint_dir: Any) -> Any:
        return torch.load(Path(checkpoint_dir) / "state.pt")

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        stored = _objects(Path(checkpoint_dir))
        return dict_list_map_outplace(
            lambda part: stored[part.unique_key], sharded_objects_state_dict
        )

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        return {
            key: ShardedObject.empty_from_unique_key(key) for key in _objects(Path(checkpoint_dir))
        }


def _objects(checkpoint_dir: Path) -> dict[str, Any]:
    objects: dict[str, Any] = {}
    for path in checkpoint_dir.glob("object_*.pt"):
        objects |= torch.load(path)
    return objects


def register() -> None:
    """Makes them the defaults of their backends, as a user's program does."""
    register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, 3, OwnSave())
    register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, 3, OwnLoad())
    register_default_strategy(StrategyAction.SAVE_COMMON, COMMON, 5, OwnCommonSave())
    register_default_strategy(StrategyAction.LOAD_COMMON, COMMON, 5, OwnCommonLoad())


OWN = {"sharded_strategy": (BACKEND, 3), "common_strategy": (COMMON, 5)}
"""Arguments of ``save``."""
