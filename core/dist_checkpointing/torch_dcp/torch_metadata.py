"""``.metadata`` of a DCP directory as torch's own objects, without unpickling the file.

torch reads that file with an unrestricted ``pickle.load``, which runs whatever a crafted one asks for.
``core.formats.dcp.metadata`` reads it safely, into columns; here they become what torch's planners and readers expect.

Source: torch 2.13 ``torch/distributed/checkpoint/{metadata,filesystem}.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from core.dist_checkpointing._engine.torch_dtypes import torch_dtype
from core.files.store import LocalStore
from core.formats.dcp.columns import DcpMetadata, DcpTensor
from core.formats.dcp.format import metadata_of


def read_torch_metadata(checkpoint_dir: str | Path) -> Metadata:
    """The metadata of a DCP or torch_dist directory, as torch's object.

    Megatron's facts about tensors, where the file has them, are the attribute ``mcore_data``.

    Raises:
        CheckpointingException: as for ``core.formats.dcp.format.read``.
    """
    with closing(LocalStore(Path(checkpoint_dir))) as store:
        return torch_metadata(metadata_of(store))


def torch_metadata(found: DcpMetadata) -> Metadata:
    """The same as torch's object: entries in the order of the file, chunks in elements, items in bytes."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    items: dict[MetadataIndex, _StorageInfo] = {}
    for key, tensor in found.tensors.items():
        chunks = []
        for number, (box, item) in enumerate(found.chunks(key)):
            offset = torch.Size(box.offset)
            chunks.append(ChunkStorageMetadata(offsets=offset, sizes=torch.Size(box.shape)))
            items[MetadataIndex(key, offset, number)] = _StorageInfo(
                *item, transform_descriptors=found.descriptors.get(tensor.first + number)
            )
        entries[key] = _tensor_entry(tensor, chunks)
    for key, item in found.objects.items():
        entries[key] = BytesStorageMetadata()
        items[MetadataIndex(key)] = _StorageInfo(*item, transform_descriptors=found.object_descriptors.get(key))
    made = Metadata(
        state_dict_metadata=entries,
        planner_data=found.planner_data,
        storage_data=items,
        storage_meta=StorageMeta(),
        version=found.version,
    )
    if isinstance(found.mcore_data, Mapping):
        made.mcore_data = dict(found.mcore_data)
    return made


def _tensor_entry(tensor: DcpTensor, chunks: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    properties = TensorProperties(dtype=torch_dtype(tensor.dtype), requires_grad=tensor.requires_grad)
    return TensorStorageMetadata(properties=properties, size=torch.Size(tensor.shape), chunks=chunks)
