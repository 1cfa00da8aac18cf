"""ShardedTensors in a form that torch's distributed checkpoint saves and loads by itself.

::

    state = {"w": CheckpointableShardedTensor.from_sh_ten(sharded_w),
             "b": LocalShardsContainer([from_sh_ten(b0), from_sh_ten(b1)])}     # several shards of
             b on this rank
    torch.distributed.checkpoint.save(state, checkpoint_id=…)                   # or load, which
    fills their data

Both are tensors only by their type, size, dtype and device; no operation works on them. torch asks
them for their chunks by the protocol ``torch.distributed._checkpointable._Checkpointable``. A chunk
is a box of the global tensor: prepended axes have the extent 1 in it, and a flattened range has as
many boxes as it needs. The files are plain DCP.

Source: the documented package ``core.dist_checkpointing.strategies.checkpointable``; torch 2.13
``torch/distributed/checkpoint/{planner_helpers,default_planner,utils}.py``. Beyond the documented
package: prepended axes, flattened ranges, the dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from core.arrays.box import Box, boxes_of_flat_range
from core.dist_checkpointing.mapping import ShardedTensor
from core.errors import UsageError


class _ShardPiece(NamedTuple):
    """A box of the global tensor, and a view of the local data that has its shape."""

    box: Box
    data: torch.Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(
            offsets=torch.Size(self.box.offset), sizes=torch.Size(self.box.shape)
        )


def _pieces_of(data: torch.Tensor, sh_ten: ShardedTensor) -> list[_ShardPiece]:
    """Return the boxes of a ShardedTensor: one, or any number for a flattened range.

    Raises:
        UsageError: the data has another shape than the ShardedTensor declares.
    """
    local = (1,) * sh_ten.prepend_axis_num + tuple(sh_ten.local_shape)
    flat = sh_ten.flattened_range
    if tuple(data.shape) != sh_ten.data_shape:
        raise UsageError(
            f"the data has shape {tuple(data.shape)}, but {sh_ten.data_shape} is declared",
            key=sh_ten.key,
        )
    if flat is None:
        return [
            _ShardPiece(
                Box(tuple(sh_ten.global_offset), local), data[(None,) * sh_ten.prepend_axis_num]
            )
        ]
    pieces, start = [], 0
    for box in boxes_of_flat_range(local, flat.start, flat.stop):
        stop = start + box.n_elements
        pieces.append(
            _ShardPiece(box.shift(sh_ten.global_offset), data[start:stop].view(box.shape))
        )
        start = stop
    return pieces


class CheckpointableShardedTensor(torch.Tensor):
    """A ShardedTensor that torch's distributed checkpoint understands.

    Its size is the global shape. Loading fills ``data`` in place.

    Args:
        data: this rank's data, of the ShardedTensor's local shape; 1-D for a flattened range. Any
            strides.
        sh_ten: position of the data in the global tensor.

    Raises:
        UsageError: the data has another shape than the ShardedTensor declares.
    """

    @staticmethod
    def __new__(cls, data: torch.Tensor, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        size = torch.Size(sh_ten.global_shape)
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[no-any-return]
            cls, size, dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor, sh_ten: ShardedTensor) -> None:
        self._data = data.detach()
        self._sh_ten = sh_ten
        self._pieces = _pieces_of(self._data, sh_ten)

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        """Wrap a ShardedTensor with its data.

        Args:
            sh_ten: with data.

        Raises:
            UsageError: ``sh_ten`` is not a ShardedTensor, or has no data.
        """
        if not isinstance(sh_ten, ShardedTensor):
            raise UsageError(f"a {type(sh_ten).__name__} is not a ShardedTensor")
        if sh_ten.data is None:
            raise UsageError(
                "the ShardedTensor has no data", key=sh_ten.key, hint="call init_data first"
            )
        return cls(sh_ten.data, sh_ten)

    def __create_write_items__(
        self, fqn: str, sh_ten: CheckpointableShardedTensor, index: int | None = None
    ) -> list[WriteItem]:
        """Return one item per chunk that is to be written.

        Args:
            fqn: name of the tensor in the checkpoint.
            sh_ten: this object.
            index: number of the shard within a LocalShardsContainer.
        """
        return _write_items(
            fqn, sh_ten._pieces, size=torch.Size(sh_ten._sh_ten.global_shape), first=index
        )

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the chunks that are to be loaded, in elements of the global tensor."""
        return [piece.chunk for piece in self._pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the data of a chunk, as a view.

        Args:
            index: offset of the chunk, where there are several.

        Raises:
            ValueError: there are several chunks, and none of them has this offset.
        """
        if len(self._pieces) == 1:
            return self._pieces[0].data
        return _find_data(self._pieces, index)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        """Refuse every operation."""
        raise NotImplementedError(
            f"{cls.__name__} only carries a shard into a checkpoint; {func} cannot be called on it"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._sh_ten!r})"


class LocalShardsContainer(torch.Tensor):
    """All shards of one global tensor that a rank has, in the single value that torch needs.

    Args:
        local_shards: CheckpointableShardedTensors of one global shape; at least one.

    Raises:
        UsageError: the list is empty, has another kind of value, or global shapes differ.
    """

    @staticmethod
    def __new__(cls, local_shards: list[torch.Tensor]) -> LocalShardsContainer:
        if not local_shards:
            raise UsageError("a LocalShardsContainer needs at least one shard")
        for shard in local_shards:
            if not isinstance(shard, CheckpointableShardedTensor):
                raise UsageError(f"a {type(shard).__name__} is not a CheckpointableShardedTensor")
            if shard.size() != local_shards[0].size():
                shapes = f"{tuple(local_shards[0].size())} and {tuple(shard.size())}"
                raise UsageError(
                    f"shards of global shape {shapes} are not of one tensor", key=shard._sh_ten.key
                )
        first = local_shards[0]
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[no-any-return]
            cls, first.size(), dtype=first.dtype, device=first.device
        )

    def __init__(self, local_shards: list[torch.Tensor]) -> None:
        self._local_shards = local_shards
        self._pieces: list[_ShardPiece] = [
            piece for shard in local_shards for piece in shard._pieces
        ]

    def __create_write_items__(
        self, fqn: str, local_shards_cont: LocalShardsContainer
    ) -> list[object]:
        """Return one item per chunk that is to be written; of identical chunks only the first.

        Args:
            fqn: name of the tensor in the checkpoint.
            local_shards_cont: this object.
        """
        first_at = {piece.box: piece for piece in reversed(local_shards_cont._pieces)}
        pieces = [piece for piece in local_shards_cont._pieces if first_at[piece.box] is piece]
        return [*_write_items(fqn, pieces, size=local_shards_cont.size(), first=0)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the chunks of all shards to be loaded, in elements of the global tensor."""
        return [piece.chunk for piece in self._pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the data of a chunk, as a view.

        Args:
            index: offset of the chunk, and as a hint its number in the list of chunks.

        Raises:
            ValueError: no chunk has this offset, or none is given.
        """
        return _find_data(self._pieces, index)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse every operation."""
        raise NotImplementedError(
            f"{cls.__name__} only carries shards into a checkpoint; {func} cannot be called on it"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._local_shards!r})"


def _write_items(
    fqn: str, pieces: list[_ShardPiece], *, size: torch.Size, first: int | None
) -> list[WriteItem]:
    return [
        WriteItem(
            index=MetadataIndex(
                fqn, piece.chunk.offsets, None if first is None else first + number
            ),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=piece.chunk,
                properties=TensorProperties.create_from_tensor(piece.data),
                size=size,
            ),
        )
        for number, piece in enumerate(pieces)
    ]


def _find_data(pieces: list[_ShardPiece], index: MetadataIndex) -> torch.Tensor:
    """Return the data of the piece at an offset.

    The piece with the hinted number is tried first.

    Raises:
        ValueError: no piece has the offset, or none is given.
    """
    if index.offset is None:
        raise ValueError(
            f"{index.fqn} has several chunks, so one cannot be found without its offset"
        )
    offset = tuple(index.offset)
    hint = index.index
    if hint is not None and 0 <= hint < len(pieces) and pieces[hint].box.offset == offset:
        return pieces[hint].data
    for piece in pieces:
        if piece.box.offset == offset:
            return piece.data
    raise ValueError(f"{index.fqn} has no chunk at {offset} on this rank")
