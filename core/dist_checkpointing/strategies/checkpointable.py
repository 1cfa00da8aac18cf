"""ShardedTensors in a form that torch's distributed checkpoint saves and loads by itself.

::

    state = {
        "w": CheckpointableShardedTensor.from_sh_ten(sharded_w),
        # several shards of b on this rank
        "b": LocalShardsContainer([from_sh_ten(b0), from_sh_ten(b1)]),
    }
    # or load, which fills the data of the ShardedTensors
    torch.distributed.checkpoint.save(state, checkpoint_id=…)

Both classes are tensors only by their type, size, dtype and device; no operation works on them.
torch gets their chunks by the protocol ``torch.distributed._checkpointable._Checkpointable``. A
chunk is a box of the global tensor: prepended axes have the extent 1, and a flattened range has as
many boxes as it needs. The files are ordinary DCP files.

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


class _LocalChunk(NamedTuple):
    """A box of the global tensor, and the local data in the box, as a view of its shape."""

    box: Box
    data: torch.Tensor

    @property
    def metadata(self) -> ChunkStorageMetadata:
        """The box in torch's form."""
        return ChunkStorageMetadata(
            offsets=torch.Size(self.box.offset), sizes=torch.Size(self.box.shape)
        )


def _split_into_chunks(data: torch.Tensor, sh_ten: ShardedTensor) -> list[_LocalChunk]:
    """Split a ShardedTensor into boxes: one, or any number for a flattened range.

    Raises:
        UsageError: the data has another shape than the ShardedTensor declares.
    """
    if tuple(data.shape) != sh_ten.data_shape:
        raise UsageError(
            f"the data has shape {tuple(data.shape)}, but the ShardedTensor declares "
            f"{sh_ten.data_shape}",
            key=sh_ten.key,
        )
    # The local shape lacks the prepended axes, which the global shape has.
    local_shape = (1,) * sh_ten.prepend_axis_num + tuple(sh_ten.local_shape)
    flat_range = sh_ten.flattened_range
    if flat_range is None:
        box = Box(tuple(sh_ten.global_offset), local_shape)
        return [_LocalChunk(box, data[(None,) * sh_ten.prepend_axis_num])]

    # Cut the flat data at the borders of the boxes.
    chunks, start = [], 0
    for box in boxes_of_flat_range(local_shape, flat_range.start, flat_range.stop):
        stop = start + box.n_elements
        chunks.append(
            _LocalChunk(box.shift(sh_ten.global_offset), data[start:stop].view(box.shape))
        )
        start = stop
    return chunks


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
        self._chunks = _split_into_chunks(self._data, sh_ten)

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        """Wrap a ShardedTensor, which must have data.

        Raises:
            UsageError: ``sh_ten`` is not a ShardedTensor, or has no data.
        """
        if not isinstance(sh_ten, ShardedTensor):
            raise UsageError(f"expected a ShardedTensor, found a {type(sh_ten).__name__}")
        if sh_ten.data is None:
            raise UsageError(
                "the ShardedTensor has no data", key=sh_ten.key, hint="call init_data first"
            )
        return cls(sh_ten.data, sh_ten)

    def __create_write_items__(
        self, fqn: str, sh_ten: CheckpointableShardedTensor, index: int | None = None
    ) -> list[WriteItem]:
        """Return one item for each chunk to be written.

        Args:
            fqn: name of the tensor in the checkpoint.
            sh_ten: this object.
            index: number of the shard within a LocalShardsContainer.
        """
        return _write_items(
            fqn, sh_ten._chunks, size=torch.Size(sh_ten._sh_ten.global_shape), first=index
        )

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the chunks to be loaded, in elements of the global tensor."""
        return [chunk.metadata for chunk in self._chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the data of a chunk, as a view.

        Args:
            index: offset of the chunk, needed if there are several.

        Raises:
            ValueError: there are several chunks, and none of them has this offset.
        """
        # The only chunk needs no offset.
        if len(self._chunks) == 1:
            return self._chunks[0].data
        return _find_data(self._chunks, index)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        """Refuse every operation."""
        raise NotImplementedError(
            f"{cls.__name__} only passes a shard to a checkpoint and does not support {func}"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._sh_ten!r})"


class LocalShardsContainer(torch.Tensor):
    """A single value, as torch needs it, for all of a rank's shards of one global tensor.

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
                raise UsageError(
                    f"expected a CheckpointableShardedTensor, found a {type(shard).__name__}"
                )
            # The size of a wrapped shard is the global shape.
            if shard.size() != local_shards[0].size():
                shapes = f"{tuple(local_shards[0].size())} and {tuple(shard.size())}"
                raise UsageError(
                    f"the shards belong to tensors with different global shapes, {shapes}",
                    key=shard._sh_ten.key,
                )
        first = local_shards[0]
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[no-any-return]
            cls, first.size(), dtype=first.dtype, device=first.device
        )

    def __init__(self, local_shards: list[torch.Tensor]) -> None:
        self._local_shards = local_shards
        self._chunks: list[_LocalChunk] = [
            chunk for shard in local_shards for chunk in shard._chunks
        ]

    def __create_write_items__(
        self, fqn: str, local_shards_cont: LocalShardsContainer
    ) -> list[object]:
        """Return one item per chunk to write: the first of the chunks with the same box.

        Args:
            fqn: name of the tensor in the checkpoint.
            local_shards_cont: this object.
        """
        # The first chunk of each box, in order.
        chunk_by_box: dict[Box, _LocalChunk] = {}
        for chunk in local_shards_cont._chunks:
            chunk_by_box.setdefault(chunk.box, chunk)
        chunks = list(chunk_by_box.values())
        return [*_write_items(fqn, chunks, size=local_shards_cont.size(), first=0)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the chunks of all shards to be loaded, in elements of the global tensor."""
        return [chunk.metadata for chunk in self._chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the data of a chunk, as a view.

        Args:
            index: offset of the chunk, and as a hint its number in the list of chunks.

        Raises:
            ValueError: no chunk has this offset, or none is given.
        """
        return _find_data(self._chunks, index)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse every operation."""
        raise NotImplementedError(
            f"{cls.__name__} only passes shards to a checkpoint and does not support {func}"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._local_shards!r})"


def _write_items(
    fqn: str, chunks: list[_LocalChunk], *, size: torch.Size, first: int | None
) -> list[WriteItem]:
    """Return one item per chunk.

    Args:
        fqn: name of the tensor in the checkpoint.
        chunks: the chunks to be written.
        size: global shape of the tensor, in elements.
        first: number of the first chunk, None to omit numbers.
    """
    return [
        WriteItem(
            index=MetadataIndex(
                fqn, chunk.metadata.offsets, None if first is None else first + number
            ),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk.metadata,
                properties=TensorProperties.create_from_tensor(chunk.data),
                size=size,
            ),
        )
        for number, chunk in enumerate(chunks)
    ]


def _find_data(chunks: list[_LocalChunk], index: MetadataIndex) -> torch.Tensor:
    """Find the chunk at an offset and return its data.

    Raises:
        ValueError: no chunk has the offset, or none is given.
    """
    if index.offset is None:
        raise ValueError(f"{index.fqn} has several chunks, so an offset is needed to choose one")
    offset = tuple(index.offset)
    # Try the hinted number first: a flattened tensor may have very many chunks.
    hint = index.index
    if hint is not None and 0 <= hint < len(chunks) and chunks[hint].box.offset == offset:
        return chunks[hint].data
    for chunk in chunks:
        if chunk.box.offset == offset:
            return chunk.data
    raise ValueError(f"{index.fqn} has no chunk at {offset} on this rank")
