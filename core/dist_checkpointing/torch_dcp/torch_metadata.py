"""``.metadata`` of a DCP directory as torch's own objects, read without unpickling the file.

torch reads that file with an unrestricted ``pickle.load``, which lets a crafted file execute code.
``core.formats.dcp.metadata`` reads it safely, into columns. This module turns the columns into the
objects that torch's planners and readers expect.

Source: torch 2.13 ``torch/distributed/checkpoint/{metadata,filesystem}.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from core.dist_checkpointing._engine.torch_dtypes import torch_dtype
from core.dist_checkpointing._live.save import ProcessContribution
from core.dist_checkpointing.torch_dcp.planned_save import build_item_chunk, is_tensor
from core.errors import UnsupportedError
from core.files.source_store import open_store
from core.files.url import find_location
from core.formats.dcp.columns import DcpMetadata
from core.formats.dcp.plans import PlanRow, parse_plans
from core.formats.dcp.reading.data_files import METADATA
from core.formats.dcp.reading.stored_metadata import metadata_of


def read_torch_metadata(checkpoint_dir: str | Path) -> Metadata:
    """Read the metadata of a DCP or torch_dist directory as torch's object.

    Megatron's data about tensors and the plans of the ranks that wrote the checkpoint, if the file
    contains them, become the attributes ``mcore_data`` and ``all_local_plans``.

    Raises:
        CheckpointingException: as ``core.formats.dcp.format.read``.
    """
    with closing(open_store(find_location(checkpoint_dir))) as store:
        columns = metadata_of(store)
        metadata = torch_metadata(columns)
        if "all_local_plans" in columns.extras and store.exists(METADATA):
            data = store.read(METADATA, 0, store.size(METADATA))
            plans = parse_plans(data, label=METADATA)
            if plans is not None:
                metadata.all_local_plans = [*map(_torch_plan, plans)]
        return metadata


def _torch_plan(rows: Iterable[PlanRow]) -> SavePlan:
    """Return the plan of a rank, as Megatron's planner creates it."""
    items = []
    for key, tensor in rows:
        if tensor is None:
            items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
            continue
        offset = torch.Size(tensor.offset)
        data = TensorWriteData(
            ChunkStorageMetadata(offset, torch.Size(tensor.chunk_shape)),
            TensorProperties(dtype=torch_dtype(tensor.dtype)),
            torch.Size(tensor.shape),
        )
        items.append(WriteItem(MetadataIndex(key, offset), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items, planner_data={})


def torch_metadata(columns: DcpMetadata) -> Metadata:
    """Return metadata as torch's object, with the entries in the order of the file.

    Chunks are in elements, items in bytes.
    """
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    items: dict[MetadataIndex, _StorageInfo] = {}
    # Add the tensors. torch finds the item of a chunk by key and offset; the number is only a hint
    # where to look first.
    for key, tensor in columns.tensors.items():
        chunks = []
        for number, (box, item) in enumerate(columns.chunks(key)):
            offset = torch.Size(box.offset)
            chunks.append(ChunkStorageMetadata(offsets=offset, sizes=torch.Size(box.shape)))
            items[MetadataIndex(key, offset, number)] = _StorageInfo(
                *item, transform_descriptors=columns.descriptors.get(tensor.first + number)
            )
        properties = TensorProperties(
            dtype=torch_dtype(tensor.dtype), requires_grad=tensor.requires_grad
        )
        entries[key] = TensorStorageMetadata(
            properties=properties, size=torch.Size(tensor.shape), chunks=chunks
        )
    # Add the other entries, each of which is one stream.
    for key, item in columns.objects.items():
        entries[key] = BytesStorageMetadata()
        items[MetadataIndex(key)] = _StorageInfo(
            *item, transform_descriptors=columns.object_descriptors.get(key)
        )
    metadata = Metadata(
        state_dict_metadata=entries,
        planner_data=columns.planner_data,
        storage_data=items,
        storage_meta=StorageMeta(),
        version=columns.version,
    )
    # Megatron-Core sets this attribute on torch's object, which has no such field.
    if isinstance(columns.mcore_data, Mapping):
        metadata.mcore_data = dict(columns.mcore_data)
    return metadata


def contributions_of(metadata: Metadata | None) -> list[ProcessContribution] | None:
    """Return what each rank wrote of a loaded checkpoint; None if the metadata does not record it.

    Megatron records the plans of the ranks as ``all_local_plans``.

    The sizes of objects are 0, as plans do not contain them.

    Args:
        metadata: of a checkpoint, as ``read_torch_metadata`` or torch reads it.
    """
    plans = getattr(metadata, "all_local_plans", None)
    if not plans:
        return None
    try:
        return [
            ProcessContribution(
                chunks=tuple(build_item_chunk(item) for item in plan.items if is_tensor(item)),
                streams=tuple((item.index.fqn, 0) for item in plan.items if not is_tensor(item)),
            )
            for plan in plans
        ]
    except UnsupportedError:
        return None  # a dtype that this version does not save
