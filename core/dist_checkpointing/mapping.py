"""What a process holds of a checkpoint's tensors and objects: the leaves of a sharded state dict.

A *sharded state dict* is a tree of dicts and lists. Some of its leaves say which part of which global tensor or object
a process has; all others are common state. Shapes and offsets are in elements of the global tensor; for objects, in
shards.

Source: the documentation of ``megatron.core.dist_checkpointing.mapping``. Flattened tensors (``flattened_range``,
``from_rank_offsets_flat`` and the coordinates), which megatron-core 0.16 dropped, behave as in 0.12.1; its distributed
optimizer made them.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import torch

from core.dist_checkpointing._engine.flattened import narrowed_pieces
from core.dist_checkpointing.dict_utils import dict_list_map_inplace
from core.errors import CheckpointingException, CorruptError
from core.formats.mcore.objects import parts_of_sharded_object

logger = logging.getLogger(__name__)

StateDict = dict[str, Any]
"""A tree with plain tensors and other values."""

CommonStateDict = dict[str, Any]
"""What of a sharded state dict is equal on all ranks and stored once."""

ShardedStateDict = dict[str, Any]
"""A tree with ShardedBase objects among its leaves."""

ReplicaId = int | tuple[int, ...]
"""Which of the copies of a shard; zero, or all zeros, is the main one, which is written."""


class ShardedBase(ABC):
    """A leaf that stands for a part of something global.

    Args:
        key: name of the whole in the checkpoint.
        data: what this process holds of it; None where only the metadata is known.
        replica_id: which of the copies of the part.
    """

    key: str
    data: object
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Checks that the attributes agree with each other.

        Raises:
            CheckpointingException: they do not.
        """

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """The same with ``data=None``."""


@dataclass
class ShardedTensor(ShardedBase):
    """Where a local tensor lies in a global one.

    Args:
        key: name of the global tensor.
        data: the local tensor, 1-D for a flattened one; None where only the metadata is known.
        dtype: of the tensor.
        local_shape: shape of the local tensor before flattening, without the prepended axes.
        global_shape: shape of the global tensor, the prepended axes first.
        global_offset: index of the local tensor's first element in the global one.
        axis_fragmentations: number of shards along each global axis; None for shards that form no regular grid.
        replica_id: see ReplicaId.
        prepend_axis_num: global axes that come before the local ones; the local tensor has the extent 1 along them.
        allow_shape_mismatch: on loading, the stored global shape may differ (padded vocabularies).
        flattened_range: the elements of the flattened local tensor that ``data`` consists of.

    Raises:
        CheckpointingException: see ``validate_metadata_integrity``.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Checks that the attributes agree with each other.

        Raises:
            CheckpointingException: numbers of axes differ, an offset in a regular grid is no multiple of the local
                extent, the flattened range lies outside the local shape, or dtype or shape of the data are not the
                stated ones.
        """
        n_axes = len(self.local_shape) + self.prepend_axis_num
        if not len(self.global_shape) == len(self.global_offset) == n_axes:
            raise self._error(
                f"global shape {self.global_shape}, global offset {self.global_offset} and local shape "
                f"{self.local_shape} with {self.prepend_axis_num} axes prepended differ in their number of axes"
            )
        if self.has_regular_grid:
            for offset, extent in zip(self.global_offset[self.prepend_axis_num :], self.local_shape, strict=True):
                if extent and offset % extent:
                    raise self._error(f"the global offset {offset} is no multiple of the local extent {extent}")
        if self.flattened_range is not None:
            self._check_flattened_range(self.flattened_range)
        if self.data is not None:
            self._check_data(self.data)

    def _check_flattened_range(self, held: slice) -> None:
        if held.step is not None:
            raise self._error(f"the flattened range {held} has a step")
        is_bounded = isinstance(held.start, int) and isinstance(held.stop, int)
        if not (is_bounded and 0 <= held.start <= held.stop <= prod(self.local_shape)):
            raise self._error(f"the flattened range {held} does not lie in the local shape {self.local_shape}")

    def _check_data(self, data: torch.Tensor) -> None:
        if data.dtype != self.dtype:
            raise self._error(f"the data's dtype {data.dtype} is not the stated {self.dtype}")
        if tuple(data.shape) != self.data_shape:
            raise self._error(f"the data's shape {tuple(data.shape)} is not the stated {self.data_shape}")

    def _error(self, message: str) -> CheckpointingException:
        return CheckpointingException(message, key=self.key)

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of ``data``: the local shape, or the length of the flattened range."""
        if self.flattened_range is None:
            return self.local_shape
        return (self.flattened_range.stop - self.flattened_range.start,)

    @property
    def has_regular_grid(self) -> bool:
        """Whether the shards of the global tensor form a regular grid."""
        return self.axis_fragmentations is not None

    def global_slice(self) -> tuple[int | slice, ...]:
        """The index of the local tensor in the global one: numbers for the prepended axes, slices for the others."""
        local = zip(self.global_offset[self.prepend_axis_num :], self.local_shape, strict=True)
        return (
            *self.global_offset[: self.prepend_axis_num],
            *(slice(offset, offset + extent) for offset, extent in local),
        )

    def global_coordinates(self) -> tuple[np.ndarray, ...]:
        """Per global axis, the indices of the elements of a flattened tensor, in the order of ``data``.

        Raises:
            CheckpointingException: it is not flattened.
        """
        local = self.local_coordinates()
        first: list[np.ndarray] = [np.zeros(self.data_shape, dtype=np.int64)] * self.prepend_axis_num
        return tuple(index + offset for index, offset in zip((*first, *local), self.global_offset, strict=True))

    def local_coordinates(self) -> tuple[np.ndarray, ...]:
        """Per local axis, the indices of the elements of a flattened tensor, in the order of ``data``.

        Raises:
            CheckpointingException: it is not flattened.
        """
        if self.flattened_range is None:
            raise self._error("coordinates are for flattened tensors, and this one has no flattened range")
        held = np.arange(self.flattened_range.start, self.flattened_range.stop)
        if not self.local_shape:
            return ()
        coordinates: tuple[Any, ...] = np.unravel_index(held, self.local_shape)
        return coordinates

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Index of the local tensor in the grid of shards.

        Raises:
            CheckpointingException: an offset is no multiple of the local extent.
        """
        chunk = list(self.global_offset[: self.prepend_axis_num])
        for offset, extent in zip(self.global_offset[self.prepend_axis_num :], self.local_shape, strict=True):
            if offset % extent if extent else offset:
                raise self._error(f"the global offset {offset} is no multiple of the local extent {extent}")
            chunk.append(offset // extent if extent else 0)
        return tuple(chunk)

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Largest shape, per global axis, of chunks of which there are ``axis_fragmentations``.

        Raises:
            CheckpointingException: there is no regular grid, or it does not divide the global shape, which may be only
                where a shape mismatch is allowed (the remainder then is in no chunk).
        """
        if self.axis_fragmentations is None or len(self.axis_fragmentations) != len(self.global_shape):
            raise self._error(f"the fragmentations {self.axis_fragmentations} are not those of {self.global_shape}")
        for extent, n_shards in zip(self.global_shape, self.axis_fragmentations, strict=True):
            if not self.allow_shape_mismatch and extent % n_shards:
                raise self._error(f"a global extent of {extent} cannot be divided into {n_shards} shards")
        return tuple(extent // n for extent, n in zip(self.global_shape, self.axis_fragmentations, strict=True))

    def without_data(self) -> ShardedTensor:
        """The same with ``data=None``."""
        return replace(self, data=None)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """The ShardedTensor of a local tensor that is one of a regular grid of equal shards.

        Args:
            key: name of the global tensor.
            data: the local tensor.
            rank_offsets: (axis, index of the shard along it, number of shards along it) of every axis that is cut;
                axes are those of the global tensor, prepended ones first.
            replica_id: see ReplicaId.
            prepend_axis_num: see ShardedTensor.
            flattened_range: has to be None; see ``from_rank_offsets_flat``.
            init_kwargs: further arguments of ShardedTensor.

        Raises:
            ValueError: a flattened range.
            CheckpointingException: an axis that there is not, or an index that is not below the number of shards.
        """
        if flattened_range is not None:
            raise ValueError("from_rank_offsets takes no flattened_range; from_rank_offsets_flat does")
        local = (1,) * prepend_axis_num + tuple(data.shape)
        shape, offset, fragmentations = list(local), [0] * len(local), [1] * len(local)
        for axis, index, n_shards in rank_offsets:
            if not (0 <= axis < len(local) and 0 <= index < n_shards):
                raise CheckpointingException(
                    f"shard {index} of {n_shards} along axis {axis} cannot be in a tensor of {len(local)} axes",
                    key=key,
                    hint="shards and axes are counted from 0",
                )
            shape[axis] = n_shards * local[axis]
            offset[axis] = index * local[axis]
            fragmentations[axis] = n_shards
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            tuple(shape),
            tuple(offset),
            tuple(fragmentations),
            replica_id,
            prepend_axis_num,
            **init_kwargs,
        )

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: tuple[int, ...],
        *args: tuple[int, int, int],
        flattened_range: slice | None = None,
        **kwargs: Any,
    ) -> ShardedTensor:
        """The ShardedTensor of a slice of a flattened shard.

        Args:
            key: name of the global tensor.
            data: the slice, 1-D.
            non_flat_local_shape: shape of the whole shard.
            args, kwargs: as of ``from_rank_offsets``.
            flattened_range: elements of the flattened shard that ``data`` consists of; required.

        Raises:
            CheckpointingException: there is no range, or the data is not 1-D or not of its length.
        """
        if flattened_range is None:
            raise CheckpointingException("from_rank_offsets_flat needs a flattened_range", key=key)
        shard = torch.empty(non_flat_local_shape, dtype=data.dtype, device="meta")
        whole = cls.from_rank_offsets(key, shard, *args, **kwargs)
        return replace(whole, data=data, flattened_range=flattened_range)

    def init_data(self, device: str | torch.device, init_fn: Callable[..., torch.Tensor] = torch.empty) -> None:
        """Makes the local tensor, unless there is one.

        Args:
            device: where.
            init_fn: called with the shape, ``dtype`` and ``device``.
        """
        if self.data is None:
            self.data = init_fn(self.data_shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """What remains when every shard is narrowed along an axis as ``torch.narrow`` would; data are views.

        The global tensor then consists of the narrowed shards, so its extent and the offset shrink in proportion.

        Args:
            dim: local axis, not counting the prepended ones.
            start: first element along it; negative counts from the end.
            length: number of elements along it.

        Returns:
            One tensor; for a flattened one, as many as ``data`` has contiguous parts in the narrowed shard, which may
            be none.

        Raises:
            ValueError: the axis or the elements are not in the local shape.
            CheckpointingException: the global extent or offset is no multiple of the local extent.
        """
        dim, start = self._checked_narrowing(dim, start, length)
        axis, extent = dim + self.prepend_axis_num, self.local_shape[dim]
        if extent == 0 or self.global_shape[axis] % extent or self.global_offset[axis] % extent:
            raise self._error(
                f"only regular grids can be narrowed, and the global extent {self.global_shape[axis]} or offset "
                f"{self.global_offset[axis]} along axis {axis} is no multiple of the local extent {extent}"
            )
        narrowed = replace(
            self,
            data=None,
            local_shape=_with(self.local_shape, dim, length),
            global_shape=_with(self.global_shape, axis, self.global_shape[axis] // extent * length),
            global_offset=_with(self.global_offset, axis, self.global_offset[axis] // extent * length),
            flattened_range=None,
        )
        if self.flattened_range is None:
            return [replace(narrowed, data=None if self.data is None else self.data.narrow(dim, start, length))]
        held = range(self.flattened_range.start, self.flattened_range.stop)
        return [
            replace(
                narrowed,
                data=None if self.data is None else self.data[piece.held_start : piece.held_stop],
                flattened_range=slice(piece.start, piece.stop),
            )
            for piece in narrowed_pieces(self.local_shape, dim, start, length, held=held)
        ]

    def _checked_narrowing(self, dim: int, start: int, length: int) -> tuple[int, int]:
        """The axis and the first element, neither of them negative."""
        n_axes = len(self.local_shape)
        if not -n_axes <= dim < n_axes:
            raise ValueError(f"there is no axis {dim} in the local shape {self.local_shape} of {self.key}")
        extent = self.local_shape[dim]
        first = start + extent if start < 0 else start
        if min(first, length) < 0 or first + length > extent:
            raise ValueError(
                f"{length} elements from {start} do not lie in the extent {extent} of axis {dim} of {self.key}"
            )
        return dim % n_axes, first


def _with(numbers: tuple[int, ...], index: int, number: int) -> tuple[int, ...]:
    return (*numbers[:index], number, *numbers[index + 1 :])


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Whether a replica is the main one: 0, or only zeros. To have one of every shard is up to the application."""
    if isinstance(replica_id, int):
        return replica_id == 0
    return all(number == 0 for number in replica_id)


class LocalNonpersistentObject:
    """A value that is not stored; on loading, the state dict gets the one that was wrapped.

    Args:
        obj: the value.
    """

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """The value."""
        return self.obj


@dataclass
class ShardedObject(ShardedBase):
    """One of a grid of objects of one name. Unlike a tensor's, the grid cannot be changed on loading.

    Args:
        key: name of the global object.
        data: this process's object; None where only the metadata is known.
        global_shape: the grid's shape, in objects.
        global_offset: this object's index in it.
        replica_id: see ReplicaId.

    Raises:
        CheckpointingException: shape and offset differ in their number of axes.
    """

    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Checks that shape and offset have the same number of axes.

        Raises:
            CheckpointingException: they do not.
        """
        if len(self.global_shape) != len(self.global_offset):
            raise CheckpointingException(
                f"global shape {self.global_shape} and offset {self.global_offset} differ in their number of axes",
                key=self.key,
            )

    def without_data(self) -> ShardedObject:
        """The same with ``data=None``."""
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """``<key>/shard_<offset>_<shape>``, dots inside offset and shape: the name of this object in a checkpoint."""
        offset, shape = (".".join(map(str, numbers)) for numbers in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    def __str__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """The object, without data, whose ``unique_key`` is given.

        Where a shape lacks the last number, as in the first checkpoints of this kind, that one is -1: unknown.

        Raises:
            CorruptError: the name is not of this form.
        """
        parts = parts_of_sharded_object(unique_key)
        if parts is None:
            raise CorruptError("the name is not <key>/shard_<offset>_<shape>", key=unique_key)
        key, offset, shape = parts
        if len(shape) + 1 == len(offset):
            shape += (-1,)
        return cls(key, None, shape, offset, replica_id)


FactoryBuildFn = Callable[[str, torch.Tensor, ReplicaId, slice | None], ShardedStateDict]
"""Key, data, replica id and flattened range → the sharded state dict to be stored."""

FactoryMergeFn = Callable[[StateDict], torch.Tensor]
"""What was loaded for the sharded state dict → the tensor."""


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A tensor that is stored as something else: a fused weight as its parts, for instance.

    An optimizer does the same to the moments of the parameter, so what is built has to follow from the arguments alone.

    Args:
        key: name that is given to ``build_fn``.
        data: the parameter, or what an optimizer has for it.
        build_fn: makes the sharded state dict that is stored.
        merge_fn: the inverse, for what was loaded.
        replica_id: see ReplicaId; given to ``build_fn``.
        flattened_range: the part of the flattened tensor that ``data`` is; given to ``build_fn``.
    """

    key: str
    data: torch.Tensor
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> ShardedStateDict:
        """The sharded state dict that is stored."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Nothing is known before it is built."""

    def without_data(self) -> ShardedTensorFactory:
        """The same with ``data=None``."""
        return replace(self, data=None)


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replaces every ShardedTensorFactory by what it builds, in place."""
    dict_list_map_inplace(lambda x: x.build() if isinstance(x, ShardedTensorFactory) else x, sharded_state_dict)


def apply_factory_merges(x1: StateDict, x2: ShardedStateDict, key: tuple[str, ...] = ()) -> StateDict:
    """``x1`` with what was loaded for each factory replaced by the tensor that the factory merges it to, in place.

    Args:
        x1: what was loaded.
        x2: only the factories, at the places that they had; a dict may stand for a list, by index.
        key: path of both, for errors.

    Raises:
        ValueError: a factory's place is not in ``x1``, or the lists differ in length.
    """
    if isinstance(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)  # type: ignore[no-any-return]
    for name, inner in _places(x1, x2, key):
        x1[name] = apply_factory_merges(x1[name], inner, key=(*key, name))
    return x1


def _places(x1: Any, x2: Any, key: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """The keys or indices of ``x2`` and what it has there, once all of them are known to be in ``x1``."""
    if isinstance(x1, dict) and isinstance(x2, dict):
        absent = [name for name in x2 if name not in x1]
        if absent:
            raise ValueError(f"a factory at {(*key, absent[0])} was not loaded; there is {list(x1)}")
        return list(x2.items())
    if isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise ValueError(f"lists of {len(x1)} and {len(x2)} elements cannot be merged, at {key}")
        return list(enumerate(x2))
    if isinstance(x1, list) and isinstance(x2, dict):
        wrong = [name for name in x2 if not isinstance(name, int) or not 0 <= name < len(x1)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no index of a list of {len(x1)} elements, at {key}")
        return list(x2.items())
    raise ValueError(f"a {type(x1).__name__} was loaded where factories are in a {type(x2).__name__}, at {key}")
