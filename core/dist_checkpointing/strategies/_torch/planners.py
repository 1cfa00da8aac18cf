"""Planners for torch's own dcp.save and dcp.load of what ``mcore_to_pyt_state_dict`` makes.

Source: the documented classes of ``core.dist_checkpointing.strategies.torch``; torch 2.13
``torch/distributed/checkpoint/{default_planner,planner_helpers}.py``.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan, Metadata, ReadItem, SavePlan
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from core.dist_checkpointing._engine.float8 import is_float8tensor
from core.dist_checkpointing._values.objects import load_stream
from core.dist_checkpointing.mapping import ShardedTensor
from core.errors import CorruptError, MissingShardError, UsageError


class MCoreSavePlanner(DefaultSavePlanner):
    """Writes objects of all ranks, each as the stream that it is already.

    Args:
        args: as of torch's DefaultSavePlanner.
        dedup_replicated_tensors: as there; torch has no use for it any more.
        can_run_decentralized_global_plan: every rank may make its part of the global plan by itself: what it holds,
            nobody else holds, and the state dict is flat.
        kwargs: as of torch's DefaultSavePlanner.

    Raises:
        UsageError: a decentralized plan together with ``dedup_replicated_tensors`` or ``flatten_state_dict``, which
            need to know of all ranks.
    """

    def __init__(
        self,
        *args: Any,
        dedup_replicated_tensors: bool | None = None,
        can_run_decentralized_global_plan: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.can_run_decentralized_global_plan = can_run_decentralized_global_plan
        if can_run_decentralized_global_plan:
            if dedup_replicated_tensors:
                raise UsageError("a decentralized plan cannot remove replicas (dedup_replicated_tensors=True)")
            self._check_is_flat()

    def _check_is_flat(self) -> None:
        if self.flatten_state_dict:
            raise UsageError(
                "a decentralized plan takes the state dict as it is",
                hint="pass flatten_state_dict=False, or can_run_decentralized_global_plan=False",
            )

    def create_local_plan(self) -> SavePlan:
        """All that this rank holds: chunks and objects, whether it is the coordinator or not."""
        return super().create_local_plan()

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """The plan, which needs no other rank.

        Args:
            local_plan: of this rank.

        Raises:
            UsageError: it has planner data, or the state dict was flattened.
        """
        self._check_is_flat()
        if local_plan.planner_data:
            raise UsageError("a decentralized plan has no planner data")
        return local_plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The stream of an object, which it is in most cases already.

        Args:
            write_item: what is to be written.
            object: a tensor, a stream, or another value.
        """
        return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)


class MCoreLoadPlanner(DefaultLoadPlanner):
    """Compares global shapes with the checkpoint's, and loads objects without unpickling classes.

    Args:
        args: as of torch's DefaultLoadPlanner.
        shapes_validation_sharded_tensors: have to have the global shape of the checkpoint.
        allow_shape_mismatch_sharded_tensors: key → tensor whose global shape may differ: what overlaps is loaded.
        kwargs: as of torch's DefaultLoadPlanner.
    """

    metadata: Metadata | None

    def __init__(
        self,
        *args: Any,
        shapes_validation_sharded_tensors: Iterable[ShardedTensor] = (),
        allow_shape_mismatch_sharded_tensors: dict[str, ShardedTensor] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.shapes_validation_sharded_tensors = shapes_validation_sharded_tensors
        self.allow_shape_mismatch_sharded_tensors = allow_shape_mismatch_sharded_tensors
        self._aside: dict[int, torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads.

        Raises:
            MissingShardError: the checkpoint lacks a tensor whose shape is to be compared.
            CorruptError: it has another shape there.
        """
        assert self.metadata is not None, "torch sets the planner up first"
        _check_shapes(self.metadata, self.shapes_validation_sharded_tensors)
        stored = self.metadata
        self.metadata = _with_sizes(stored, self.allow_shape_mismatch_sharded_tensors or {})
        try:
            return super().create_local_plan()
        finally:
            self.metadata = stored

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts the value of an object into the state dict.

        Args:
            read_item: says which.
            value: its stream.

        Raises:
            UnsafeError: it names what runs code.
            CheckpointingException: any other, from reading.
        """
        key = read_item.dest_index.fqn
        found = load_stream(value.getvalue(), key=key)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], found)
        else:
            self.state_dict[key] = found

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where to read into; for eight-bit tensors of Transformer Engine a dense tensor beside them.

        Args:
            read_item: what is read.
        """
        target = super().resolve_tensor(read_item)
        if not is_float8tensor(target):
            return target
        dense = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        self._aside[dense.data_ptr()] = target
        return dense

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Copies what was read beside its target to there.

        Args:
            read_item: what was read.
            tensor: what ``resolve_tensor`` gave.
        """
        target = self._aside.pop(tensor.data_ptr(), None)
        if target is not None:
            target.copy_(tensor)
        super().commit_tensor(read_item, tensor)


def _check_shapes(metadata: Metadata, tensors: Iterable[ShardedTensor]) -> None:
    for tensor in tensors:
        entry = metadata.state_dict_metadata.get(tensor.key)
        if not isinstance(entry, TensorStorageMetadata):
            raise MissingShardError("the checkpoint has no such tensor", key=tensor.key)
        if tuple(entry.size) != tuple(tensor.global_shape):
            raise CorruptError(
                f"the tensor has the global shape {tuple(entry.size)} in the checkpoint, but {tensor.global_shape} is "
                "asked for",
                key=tensor.key,
            )


def _with_sizes(metadata: Metadata, tensors: Mapping[str, ShardedTensor]) -> Metadata:
    """The same chunks in tensors of the sizes that are asked for, which torch then takes for the stored ones."""
    entries = dict(metadata.state_dict_metadata)
    for key, tensor in tensors.items():
        if isinstance(entries.get(key), TensorStorageMetadata):
            entries[key] = replace(entries[key], size=torch.Size(tensor.global_shape))
    return replace(metadata, state_dict_metadata=entries)
