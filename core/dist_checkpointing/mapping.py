"""The leaves of a sharded state dict: the parts of global tensors and objects that a process has.

A *sharded state dict* is a tree of dicts and lists. Some of its leaves describe which part of which
global tensor or object a process has; all others are common state. Shapes and offsets are in
elements of the global tensor; for objects, in shards.

Source: the documentation of ``megatron.core.dist_checkpointing.mapping``. Flattened tensors
(``flattened_range``, ``from_rank_offsets_flat`` and the coordinates), which megatron-core 0.16
dropped, behave as in 0.12.1, whose distributed optimizer wrote them.
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
from typing_extensions import override

from core.dist_checkpointing._engine.flattened import narrowed_pieces
from core.dist_checkpointing.dict_utils import dict_list_map_inplace
from core.errors import CheckpointingException, CorruptError
from core.megatron.extras.sharded_objects import split_sharded_key

logger = logging.getLogger(__name__)

StateDict = dict[str, Any]
"""A tree of plain tensors and other values."""

CommonStateDict = dict[str, Any]
"""The part of a sharded state dict that is equal on all ranks and stored once."""

ShardedStateDict = dict[str, Any]
"""A tree with ShardedBase objects among its leaves."""

ReplicaId = int | tuple[int, ...]
"""The number of a copy of a shard; zero, or all zeros, is the main copy, which is written."""

_logged_deprecations: dict[str, bool] = {}
"""Unused; scripts that were written for Megatron-Core may import it."""


class ShardedBase(ABC):
    """A leaf that stands for a part of a global tensor or object.

    Args:
        key: name of the global tensor or object in the checkpoint.
        data: the part that this process has; None where only the metadata is known.
        replica_id: number of this copy of the part.
    """

    key: str
    data: object
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Check that the attributes agree with each other.

        Raises:
            CheckpointingException: attributes contradict each other.
        """

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """Return a copy with ``data=None``."""


@dataclass
class ShardedTensor(ShardedBase):
    """A local tensor and its position in a global one.

    Args:
        key: name of the global tensor.
        data: the local tensor, 1-D if flattened; None where only the metadata is known.
        dtype: of the tensor.
        local_shape: shape of the local tensor before flattening, without the prepended axes.
        global_shape: shape of the global tensor, the prepended axes first.
        global_offset: index of the local tensor's first element in the global one.
        axis_fragmentations: number of shards along each global axis; None if the shards do not form
            a regular grid.
        replica_id: number of this copy, zero for the main one.
        prepend_axis_num: number of global axes that precede the local ones; the local tensor has
            the extent 1 along them.
        allow_shape_mismatch: on loading, the stored global shape may differ (padded vocabularies).
        flattened_range: the elements of the flattened local tensor that ``data`` consists of.

    Raises:
        CheckpointingException: attributes contradict each other; see
            ``validate_metadata_integrity``.
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

    @override
    def validate_metadata_integrity(self) -> None:
        """Check that the attributes agree with each other.

        Raises:
            CheckpointingException: numbers of axes differ, an offset in a regular grid is not a
                multiple of the local extent, the flattened range exceeds the local shape, or
                ``data`` has another dtype or shape than the attributes declare.
        """
        n_axes = len(self.local_shape) + self.prepend_axis_num
        if not len(self.global_shape) == len(self.global_offset) == n_axes:
            raise self._error(
                f"global shape {self.global_shape}, global offset {self.global_offset} and local "
                f"shape {self.local_shape} with prepend_axis_num={self.prepend_axis_num} do not "
                "have the same number of axes"
            )
        if self.has_regular_grid:
            # Shards of a grid are equal, so each begins at a multiple of its extent. Prepended axes
            # have the extent 1, and an empty shard may begin anywhere.
            for offset, extent in zip(
                self.global_offset[self.prepend_axis_num :], self.local_shape, strict=True
            ):
                if extent and offset % extent:
                    raise self._error(
                        f"the global offset {offset} is not a multiple of the local extent {extent}"
                    )
        flat = self.flattened_range
        if flat is not None:
            if flat.step is not None:
                raise self._error(f"the flattened range {flat} must not have a step")
            is_bounded = isinstance(flat.start, int) and isinstance(flat.stop, int)
            if not (is_bounded and 0 <= flat.start <= flat.stop <= prod(self.local_shape)):
                raise self._error(
                    f"the flattened range {flat} exceeds the local shape {self.local_shape}"
                )
        data = self.data
        if data is not None:
            if data.dtype != self.dtype:
                raise self._error(f"the data has dtype {data.dtype}, not the declared {self.dtype}")
            if tuple(data.shape) != self.data_shape:
                raise self._error(
                    f"the data has shape {tuple(data.shape)}, not the declared {self.data_shape}"
                )

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
        """True if the shards of the global tensor form a regular grid."""
        return self.axis_fragmentations is not None

    def global_slice(self) -> tuple[int | slice, ...]:
        """Return the index of the local tensor in the global one.

        The index has integers for the prepended axes and slices for the others.
        """
        local = zip(self.global_offset[self.prepend_axis_num :], self.local_shape, strict=True)
        return (
            *self.global_offset[: self.prepend_axis_num],
            *(slice(offset, offset + extent) for offset, extent in local),
        )

    def global_coordinates(self) -> tuple[np.ndarray, ...]:
        """Return the global indices of a flattened tensor's elements, in the order of ``data``.

        Returns:
            One array per global axis.

        Raises:
            CheckpointingException: the tensor is not flattened.
        """
        local = self.local_coordinates()
        # Along the prepended axes, all elements of the local tensor have the local index 0.
        first: list[np.ndarray] = [
            np.zeros(self.data_shape, dtype=np.int64)
        ] * self.prepend_axis_num
        return tuple(
            index + offset
            for index, offset in zip((*first, *local), self.global_offset, strict=True)
        )

    def local_coordinates(self) -> tuple[np.ndarray, ...]:
        """Return the local indices of a flattened tensor's elements, in the order of ``data``.

        Returns:
            One array per local axis.

        Raises:
            CheckpointingException: the tensor is not flattened.
        """
        if self.flattened_range is None:
            raise self._error(
                "this tensor has no flattened range, so it has no flattened coordinates"
            )
        elements = np.arange(self.flattened_range.start, self.flattened_range.stop)
        # numpy cannot unravel indices into the shape of a 0-d tensor, which has no axes anyway.
        if not self.local_shape:
            return ()
        coordinates: tuple[Any, ...] = np.unravel_index(elements, self.local_shape)
        return coordinates

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Return the index of the local tensor in the grid of shards.

        Raises:
            CheckpointingException: an offset is not a multiple of the local extent.
        """
        chunk = list(self.global_offset[: self.prepend_axis_num])
        for offset, extent in zip(
            self.global_offset[self.prepend_axis_num :], self.local_shape, strict=True
        ):
            # An empty shard has no multiples: its only possible position is 0.
            if offset % extent if extent else offset:
                raise self._error(
                    f"the global offset {offset} is not a multiple of the local extent {extent}"
                )
            chunk.append(offset // extent if extent else 0)
        return tuple(chunk)

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Return the largest shape of chunks of which ``axis_fragmentations`` fit the global shape.

        Raises:
            CheckpointingException: the shards do not form a regular grid, or the grid does not
                divide the global shape. If a shape mismatch is allowed, the grid need not divide
                it; no chunk then contains the remainder.
        """
        if self.axis_fragmentations is None or len(self.axis_fragmentations) != len(
            self.global_shape
        ):
            raise self._error(
                f"the axis_fragmentations {self.axis_fragmentations} do not fit the global shape "
                f"{self.global_shape}"
            )
        for extent, n_shards in zip(self.global_shape, self.axis_fragmentations, strict=True):
            if not self.allow_shape_mismatch and extent % n_shards:
                raise self._error(
                    f"a global extent of {extent} cannot be divided into {n_shards} shards"
                )
        return tuple(
            extent // n
            for extent, n in zip(self.global_shape, self.axis_fragmentations, strict=True)
        )

    @override
    def without_data(self) -> ShardedTensor:
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
        """Return the ShardedTensor of a local tensor in a regular grid of equal shards.

        Args:
            key: name of the global tensor.
            data: the local tensor.
            rank_offsets: (axis, index of the shard along it, number of shards along it) for every
                sharded axis. Axes are those of the global tensor, prepended ones first.
            replica_id: number of this copy, zero for the main one.
            prepend_axis_num: number of global axes that precede the local ones.
            flattened_range: must be None; ``from_rank_offsets_flat`` takes a range.
            init_kwargs: further arguments of ShardedTensor.

        Raises:
            ValueError: ``flattened_range`` is not None.
            CheckpointingException: an axis does not exist, or an index is not below the number of
                shards.
        """
        if flattened_range is not None:
            raise ValueError(
                "from_rank_offsets does not accept flattened_range; use from_rank_offsets_flat"
            )
        extents = (1,) * prepend_axis_num + tuple(data.shape)
        shape, offset, fragmentations = list(extents), [0] * len(extents), [1] * len(extents)
        # Along a sharded axis, the global extent is the local one times the number of shards.
        for axis, index, n_shards in rank_offsets:
            if not (0 <= axis < len(extents) and 0 <= index < n_shards):
                raise CheckpointingException(
                    f"shard {index} of {n_shards} along axis {axis} does not exist in a tensor "
                    f"of shape {extents}",
                    key=key,
                    hint="count shards and axes from 0",
                )
            shape[axis] = n_shards * extents[axis]
            offset[axis] = index * extents[axis]
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
        """Return the ShardedTensor of a slice of a flattened shard.

        Args:
            key: name of the global tensor.
            data: the slice, 1-D.
            non_flat_local_shape: shape of the complete shard.
            args, kwargs: arguments of ``from_rank_offsets``.
            flattened_range: elements of the flattened shard that ``data`` consists of; required.

        Raises:
            CheckpointingException: ``flattened_range`` is None, ``data`` does not have its length
                or is not 1-D, or ``from_rank_offsets`` refuses an argument.
        """
        if flattened_range is None:
            raise CheckpointingException("from_rank_offsets_flat requires flattened_range", key=key)
        # Let a tensor without memory stand for the complete shard, and then put in the slice.
        placeholder = torch.empty(non_flat_local_shape, dtype=data.dtype, device="meta")
        shard = cls.from_rank_offsets(key, placeholder, *args, **kwargs)
        return replace(shard, data=data, flattened_range=flattened_range)

    def init_data(
        self, device: str | torch.device, init_fn: Callable[..., torch.Tensor] = torch.empty
    ) -> None:
        """Create the local tensor if ``data`` is None.

        Args:
            device: device of the new tensor.
            init_fn: called with the shape, ``dtype`` and ``device``.
        """
        if self.data is None:
            self.data = init_fn(self.data_shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Narrow every shard along an axis as ``torch.narrow`` would; the data are views.

        The global tensor then consists of the narrowed shards, so the global extent and offset
        shrink in proportion.

        Args:
            dim: local axis, not counting the prepended ones.
            start: first element along it; a negative number counts from the end.
            length: number of elements along it.

        Returns:
            One tensor; for a flattened one, as many as ``data`` has contiguous parts in the
            narrowed shard, possibly none.

        Raises:
            ValueError: the axis or the elements are not in the local shape.
            CheckpointingException: the global extent or offset is not a multiple of the local
                extent.
        """
        dim, start = self._normalize_narrowing(dim, start, length)
        # The global extent and offset shrink in the same ratio as the local extent, so they must be
        # multiples of it.
        axis, extent = dim + self.prepend_axis_num, self.local_shape[dim]
        if extent == 0 or self.global_shape[axis] % extent or self.global_offset[axis] % extent:
            raise self._error(
                "only regular grids can be narrowed, and the global extent "
                f"{self.global_shape[axis]} or offset {self.global_offset[axis]} along axis {axis} "
                f"is not a multiple of the local extent {extent}"
            )
        # Shrink the metadata.
        narrowed = replace(
            self,
            data=None,
            local_shape=_replace_at(self.local_shape, dim, length),
            global_shape=_replace_at(
                self.global_shape, axis, self.global_shape[axis] // extent * length
            ),
            global_offset=_replace_at(
                self.global_offset, axis, self.global_offset[axis] // extent * length
            ),
            flattened_range=None,
        )
        # Narrow the data of an ordinary shard.
        if self.flattened_range is None:
            return [
                replace(
                    narrowed,
                    data=None if self.data is None else self.data.narrow(dim, start, length),
                )
            ]
        # Make a tensor of each run of elements of a flattened shard that stays contiguous.
        flat = range(self.flattened_range.start, self.flattened_range.stop)
        return [
            replace(
                narrowed,
                data=None if self.data is None else self.data[piece.held_start : piece.held_stop],
                flattened_range=slice(piece.start, piece.stop),
            )
            for piece in narrowed_pieces(self.local_shape, dim, start, length, held=flat)
        ]

    def _normalize_narrowing(self, dim: int, start: int, length: int) -> tuple[int, int]:
        """Return the axis and the first element as non-negative numbers.

        Raises:
            ValueError: the axis or the elements are not in the local shape.
        """
        n_axes = len(self.local_shape)
        if not -n_axes <= dim < n_axes:
            raise ValueError(f"the local shape {self.local_shape} of {self.key} has no axis {dim}")
        extent = self.local_shape[dim]
        first = start + extent if start < 0 else start
        if min(first, length) < 0 or first + length > extent:
            raise ValueError(
                f"{length} elements starting at {start} do not fit in axis {dim} of {self.key}, "
                f"which has size {extent}"
            )
        return dim % n_axes, first


def _replace_at(numbers: tuple[int, ...], index: int, number: int) -> tuple[int, ...]:
    """Return a copy of ``numbers`` with another number at ``index``."""
    return (*numbers[:index], number, *numbers[index + 1 :])


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether a replica id is that of the main replica: 0, or all zeros.

    The application must give every shard exactly one main replica.
    """
    if isinstance(replica_id, int):
        return replica_id == 0
    return all(number == 0 for number in replica_id)


class LocalNonpersistentObject:
    """A value that is not stored; loading returns the value from the given state dict.

    Args:
        obj: the value.
    """

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the wrapped value."""
        return self.obj


@dataclass
class ShardedObject(ShardedBase):
    """An element of a grid of objects that share one key. The grid cannot be resharded.

    Args:
        key: name of the global object.
        data: this process's object; None where only the metadata is known.
        global_shape: shape of the grid, in objects.
        global_offset: index of this object in the grid.
        replica_id: number of this copy, zero for the main one.

    Raises:
        CheckpointingException: shape and offset have different numbers of axes.
    """

    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    @override
    def validate_metadata_integrity(self) -> None:
        """Check that shape and offset have the same number of axes.

        Raises:
            CheckpointingException: the numbers of axes differ.
        """
        if len(self.global_shape) != len(self.global_offset):
            raise CheckpointingException(
                f"global shape {self.global_shape} and offset {self.global_offset} have different "
                "numbers of axes",
                key=self.key,
            )

    @override
    def without_data(self) -> ShardedObject:
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """Name of this object in a checkpoint: ``<key>/shard_<offset>_<shape>``.

        The numbers of offset and shape are joined by dots.
        """
        offset, shape = (
            ".".join(map(str, numbers)) for numbers in (self.global_offset, self.global_shape)
        )
        return f"{self.key}/shard_{offset}_{shape}"

    def __str__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Parse a ``unique_key`` into a ShardedObject without data.

        The shape may lack its last number, as it does in the first checkpoints of this kind; that
        number becomes -1, for unknown.

        Raises:
            CorruptError: the name is not of this form.
        """
        parts = split_sharded_key(unique_key)
        if parts is None:
            raise CorruptError(
                "the name does not have the form <key>/shard_<offset>_<shape>", key=unique_key
            )
        key, offset, shape = parts
        # Names of old checkpoints lack the last extent: key/shard_0.3_2 has the offset (0, 3).
        if len(shape) + 1 == len(offset):
            shape += (-1,)
        return cls(key, None, shape, offset, replica_id)


FactoryBuildFn = Callable[[str, torch.Tensor, ReplicaId, slice | None], ShardedStateDict]
"""Builds the sharded state dict to store from key, data, replica id and flattened range."""

FactoryMergeFn = Callable[[StateDict], torch.Tensor]
"""Merges the loaded values of that sharded state dict into the tensor."""


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A tensor that is stored in another form, such as a fused weight as its parts.

    The factory is also applied to the optimizer's moments of the parameter, so ``build_fn`` must
    depend on its arguments alone.

    Args:
        key: name that is passed to ``build_fn``.
        data: the parameter, or an optimizer's tensor for it.
        build_fn: builds the sharded state dict that is stored.
        merge_fn: the inverse of ``build_fn``, for the loaded values.
        replica_id: number of this copy; passed to ``build_fn``.
        flattened_range: the elements of the flattened tensor that ``data`` consists of; passed to
            ``build_fn``.
    """

    key: str
    data: torch.Tensor
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> ShardedStateDict:
        """Build the sharded state dict that is stored."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    @override
    def validate_metadata_integrity(self) -> None:
        """Do nothing, because the metadata exists only after ``build``."""

    @override
    def without_data(self) -> ShardedTensorFactory:
        return replace(self, data=None)


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace every ShardedTensorFactory by the state dict that it builds, in place."""
    dict_list_map_inplace(
        lambda leaf: leaf.build() if isinstance(leaf, ShardedTensorFactory) else leaf,
        sharded_state_dict,
    )


def apply_factory_merges(
    x1: StateDict, x2: ShardedStateDict, key: tuple[str, ...] = ()
) -> StateDict:
    """Replace the values loaded for each factory by the tensor it merges them into, in place.

    Args:
        x1: the loaded values.
        x2: only the factories, in the nesting of the requested state dict; a dict by index may
            stand for a list.
        key: path of both trees, for error messages.

    Returns:
        ``x1``, or the merged tensor if ``x2`` is itself a factory.

    Raises:
        ValueError: no value was loaded at a factory's path, or lists differ in length.
    """
    if isinstance(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)  # type: ignore[no-any-return]
    for name, inner in _factory_items(x1, x2, key):
        x1[name] = apply_factory_merges(x1[name], inner, key=(*key, name))
    return x1


def _factory_items(x1: Any, x2: Any, key: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """Return the items of ``x2``, by key or index, after checking that ``x1`` has all of them.

    Raises:
        ValueError: an item of ``x2`` is not in ``x1``, lists differ in length, or container types
            do not match.
    """
    if isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise ValueError(
                f"the list at {key} has {len(x2)} elements in the state dict, but {len(x1)} were "
                "loaded"
            )
        return list(enumerate(x2))
    if not isinstance(x1, dict | list) or not isinstance(x2, dict):
        raise ValueError(
            f"the factories at {key} are in a {type(x2).__name__}, but the loaded value is a "
            f"{type(x1).__name__}"
        )
    # A dict in x2 may stand for a list in x1; its keys are then indices.
    loaded = list(x1) if isinstance(x1, dict) else list(range(len(x1)))
    absent = [name for name in x2 if name not in loaded]
    if absent:
        raise ValueError(
            f"no value was loaded for the factory at {(*key, absent[0])}, only for {loaded}"
        )
    return list(x2.items())
