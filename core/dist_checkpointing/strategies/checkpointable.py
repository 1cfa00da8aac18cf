"""ShardedTensors as values that torch's distributed checkpoint saves and loads by itself.

::

    state = {"w": CheckpointableShardedTensor.from_sh_ten(sharded_w),
             "b": LocalShardsContainer([from_sh_ten(b0), from_sh_ten(b1)])}     # several shards of b on this rank
    torch.distributed.checkpoint.save(state, checkpoint_id=…)                   # or load, which fills their data

Both are tensors only by their type, size, dtype and device; no operation works on them. torch asks them for the chunks
that they hold by the protocol ``torch.distributed._checkpointable._Checkpointable``. A chunk is a box of the global
tensor: prepended axes have the extent 1 in it, and a flattened range is as many boxes as it needs. Files are plain DCP.

Source: the documented package ``core.dist_checkpointing.strategies.checkpointable``; torch 2.13
``torch/distributed/checkpoint/{planner_helpers,default_planner,utils}.py``. Beyond the documented package: prepended
axes, flattened ranges, the dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from core.arrays.box import Box, boxes_of_flat_range
from core.dist_checkpointing.mapping import ShardedTensor
from core.errors import UsageError


class _Piece(NamedTuple):
    """A box of the global tensor, and a view of the local data that has its shape."""

    box: Box
    data: torch.Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.box.offset), sizes=torch.Size(self.box.shape))


def _pieces_of(data: torch.Tensor, sh_ten: ShardedTensor) -> list[_Piece]:
    """The boxes that a ShardedTensor holds: one, or for a flattened range any number.

    Raises:
        UsageError: the data's shape is not the one that is stated.
    """
    local = (1,) * sh_ten.prepend_axis_num + tuple(sh_ten.local_shape)
    held = sh_ten.flattened_range
    if tuple(data.shape) != sh_ten.data_shape:
        raise UsageError(f"the data's shape {tuple(data.shape)} is not {sh_ten.data_shape}, as stated", key=sh_ten.key)
    if held is None:
        return [_Piece(Box(tuple(sh_ten.global_offset), local), data[(None,) * sh_ten.prepend_axis_num])]
    pieces, start = [], 0
    for box in boxes_of_flat_range(local, held.start, held.stop):
        stop = start + box.n_elements
        pieces.append(_Piece(box.shift(sh_ten.global_offset), data[start:stop].view(box.shape)))
        start = stop
    return pieces


class CheckpointableShardedTensor(torch.Tensor):
    """A ShardedTensor that torch's distributed checkpoint understands.

    Its size is the global shape. Loading fills ``data`` in place.

    Args:
        data: what this rank holds, of the ShardedTensor's local shape; 1-D for a flattened range. Any strides.
        sh_ten: where that lies.

    Raises:
        UsageError: the data's shape is not the one that the ShardedTensor states.
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
        """A ShardedTensor, wrapped with its data.

        Args:
            sh_ten: with data.

        Raises:
            UsageError: it is no ShardedTensor, or has no data.
        """
        if not isinstance(sh_ten, ShardedTensor):
            raise UsageError(f"a {type(sh_ten).__name__} is no ShardedTensor")
        if sh_ten.data is None:
            raise UsageError("the ShardedTensor has no data", key=sh_ten.key, hint="call init_data first")
        return cls(sh_ten.data, sh_ten)

    def __create_write_items__(
        self, fqn: str, sh_ten: CheckpointableShardedTensor, index: int | None = None
    ) -> list[WriteItem]:
        """What is to be written: an item a chunk.

        Args:
            fqn: the tensor's name in the checkpoint.
            sh_ten: this object.
            index: the shard's number within a LocalShardsContainer.
        """
        return _write_items(fqn, sh_ten._pieces, size=torch.Size(sh_ten._sh_ten.global_shape), first=index)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The chunks that are to be loaded, in elements of the global tensor."""
        return [piece.chunk for piece in self._pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The data of a chunk, a view.

        Args:
            index: tells the chunk, where there are several.

        Raises:
            ValueError: there are several, and none of them is at this offset.
        """
        if len(self._pieces) == 1:
            return self._pieces[0].data
        return _found(self._pieces, index)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        """Refuses every operation."""
        raise NotImplementedError(
            f"{cls.__name__} only carries a shard into a checkpoint; {func} cannot be called on it"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._sh_ten!r})"


class LocalShardsContainer(torch.Tensor):
    """All shards of one global tensor that a rank holds, as torch wants a single value per name and rank.

    Args:
        local_shards: CheckpointableShardedTensors of one global shape; at least one.

    Raises:
        UsageError: there is none, or another kind of value, or global shapes differ.
    """

    @staticmethod
    def __new__(cls, local_shards: list[torch.Tensor]) -> LocalShardsContainer:
        if not local_shards:
            raise UsageError("a LocalShardsContainer needs at least one shard")
        for shard in local_shards:
            if not isinstance(shard, CheckpointableShardedTensor):
                raise UsageError(f"a {type(shard).__name__} is no CheckpointableShardedTensor")
            if shard.size() != local_shards[0].size():
                shapes = f"{tuple(local_shards[0].size())} and {tuple(shard.size())}"
                raise UsageError(f"shards of global shape {shapes} are of no one tensor", key=shard._sh_ten.key)
        first = local_shards[0]
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[no-any-return]
            cls, first.size(), dtype=first.dtype, device=first.device
        )

    def __init__(self, local_shards: list[torch.Tensor]) -> None:
        self._local_shards = local_shards
        self._pieces: list[_Piece] = [piece for shard in local_shards for piece in shard._pieces]

    def __create_write_items__(self, fqn: str, local_shards_cont: LocalShardsContainer) -> list[object]:
        """What is to be written: an item a chunk, and of copies only the first.

        Args:
            fqn: the tensor's name in the checkpoint.
            local_shards_cont: this object.
        """
        once = {piece.box: piece for piece in reversed(local_shards_cont._pieces)}
        pieces = [piece for piece in local_shards_cont._pieces if once[piece.box] is piece]
        return [*_write_items(fqn, pieces, size=local_shards_cont.size(), first=0)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The chunks of all shards that are to be loaded, in elements of the global tensor."""
        return [piece.chunk for piece in self._pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The data of a chunk, a view.

        Args:
            index: the chunk's offset, and as a hint its number in the list of chunks.

        Raises:
            ValueError: no chunk has this offset, or none is given.
        """
        return _found(self._pieces, index)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses every operation."""
        raise NotImplementedError(
            f"{cls.__name__} only carries shards into a checkpoint; {func} cannot be called on it"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._local_shards!r})"


def _write_items(fqn: str, pieces: list[_Piece], *, size: torch.Size, first: int | None) -> list[WriteItem]:
    return [
        WriteItem(
            index=MetadataIndex(fqn, piece.chunk.offsets, None if first is None else first + number),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=piece.chunk, properties=TensorProperties.create_from_tensor(piece.data), size=size
            ),
        )
        for number, piece in enumerate(pieces)
    ]


def _found(pieces: list[_Piece], index: MetadataIndex) -> torch.Tensor:
    """The data of the piece at an offset, by the number that is hinted at if that fits, else by search.

    Raises:
        ValueError: there is none.
    """
    if index.offset is None:
        raise ValueError(f"{index.fqn} has several chunks, so one cannot be found without its offset")
    at = tuple(index.offset)
    hint = index.index
    if hint is not None and 0 <= hint < len(pieces) and pieces[hint].box.offset == at:
        return pieces[hint].data
    for piece in pieces:
        if piece.box.offset == at:
            return piece.data
    raise ValueError(f"{index.fqn} has no chunk at {at} on this rank")
