"""Planners for torch's own dcp.save and dcp.load of the results of ``mcore_to_pyt_state_dict``.

Source: the documented classes of ``core.dist_checkpointing.strategies.torch``; torch 2.13
``torch/distributed/checkpoint/{default_planner,planner_helpers}.py``.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    Metadata,
    ReadItem,
    SavePlan,
)
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from typing_extensions import override

from core.dist_checkpointing._engine.torch_dtypes import is_float8tensor
from core.dist_checkpointing._values.objects import load_stream
from core.dist_checkpointing.mapping import ShardedTensor
from core.errors import CorruptError, MissingShardError, UsageError


class MCoreSavePlanner(DefaultSavePlanner):
    """A save planner that writes the objects of all ranks, as the streams that they already are.

    Args:
        args: arguments of torch's DefaultSavePlanner.
        dedup_replicated_tensors: argument of torch's DefaultSavePlanner, which no longer uses it.
        can_run_decentralized_global_plan: let every rank build its part of the global plan
            separately. No two ranks may then have the same entries, and the state dict is flat.
        kwargs: keyword arguments of torch's DefaultSavePlanner.

    Raises:
        UsageError: a decentralized plan is combined with ``dedup_replicated_tensors`` or
            ``flatten_state_dict``, which need all ranks.
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
                raise UsageError(
                    "a decentralized plan cannot remove replicas (dedup_replicated_tensors=True)"
                )
            self._check_is_flat()

    def _check_is_flat(self) -> None:
        if self.flatten_state_dict:
            raise UsageError(
                "a decentralized plan cannot flatten the state dict",
                hint="pass flatten_state_dict=False, or can_run_decentralized_global_plan=False",
            )

    @override
    def create_local_plan(self) -> SavePlan:
        """Plan all chunks and objects of this rank."""
        # megatron-core overrides torch here, which used to plan objects on the coordinator only.
        # Its plans, which are compared with loaded ones, have an empty mapping and not None.
        plan = super().create_local_plan()
        # A plan without items may stand for a cached one, which torch has set already.
        if plan.items:
            plan = self.plan = replace(plan, planner_data=self.mappings)
        return plan

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Return the local plan unchanged: it does not depend on other ranks.

        Args:
            local_plan: this rank's plan.

        Raises:
            UsageError: the plan has planner data, or the state dict was flattened.
        """
        self._check_is_flat()
        if local_plan.planner_data:
            raise UsageError("a decentralized plan must not contain planner data")
        return local_plan

    @override
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Convert an object to a stream, unless it already is one.

        Args:
            write_item: the item to be written.
            object: a tensor, a stream, or another value.
        """
        return (
            object
            if isinstance(object, io.BytesIO)
            else super().transform_object(write_item, object)
        )


class MCoreLoadPlanner(DefaultLoadPlanner):
    """A load planner that checks global shapes, and loads objects without unpickling classes.

    Args:
        args: arguments of torch's DefaultLoadPlanner.
        shapes_validation_sharded_tensors: tensors whose global shape must equal the stored one.
        allow_shape_mismatch_sharded_tensors: tensors by key whose global shape may differ from the
            stored one; the overlap is loaded.
        kwargs: keyword arguments of torch's DefaultLoadPlanner.
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
        self._float8_targets: dict[int, torch.Tensor] = {}

    @override
    def create_local_plan(self) -> LoadPlan:
        """Plan the reads of this rank.

        Raises:
            MissingShardError: the checkpoint lacks a tensor whose shape is to be compared.
            CorruptError: a tensor has another shape in the checkpoint.
        """
        assert self.metadata is not None, "torch sets the planner up first"
        stored = self.metadata
        stored_entries = stored.state_dict_metadata

        # Compare the shapes that have to match.
        for tensor in self.shapes_validation_sharded_tensors:
            entry = stored_entries.get(tensor.key)
            if not isinstance(entry, TensorStorageMetadata):
                raise MissingShardError("the tensor is not in the checkpoint", key=tensor.key)
            if tuple(entry.size) != tuple(tensor.global_shape):
                raise CorruptError(
                    f"the global shape is {tuple(entry.size)} in the checkpoint, expected "
                    f"{tensor.global_shape}",
                    key=tensor.key,
                )

        # torch refuses other shapes, so let it take the requested sizes for the stored ones; the
        # chunks stay, and it reads those that overlap.
        entries = dict(stored_entries)
        for key, tensor in (self.allow_shape_mismatch_sharded_tensors or {}).items():
            entry = entries.get(key)
            if isinstance(entry, TensorStorageMetadata):
                entries[key] = replace(entry, size=torch.Size(tensor.global_shape))
        self.metadata = replace(stored, state_dict_metadata=entries)
        try:
            return super().create_local_plan()
        finally:
            self.metadata = stored

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put the value of an object into the state dict.

        Args:
            read_item: the item of the object.
            value: stream of the object.

        Raises:
            UnsafeError: the object names something that runs code.
            CheckpointingException: the stream cannot be read.
        """
        key = read_item.dest_index.fqn
        loaded = load_stream(value.getvalue(), key=key)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], loaded)
        else:
            self.state_dict[key] = loaded

    @override
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor to read into.

        For a float8 tensor this is a dense one of its nominal dtype.

        Args:
            read_item: the item to be read.
        """
        target = super().resolve_tensor(read_item)
        if not is_float8tensor(target):
            return target
        # torch passes the dense tensor back to commit_tensor, where its address finds the target.
        dense = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        self._float8_targets[dense.data_ptr()] = target
        return dense

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Copy a dense tensor that was read into the float8 tensor that it stands for.

        Args:
            read_item: the item that was read.
            tensor: the result of ``resolve_tensor``.
        """
        target = self._float8_targets.pop(tensor.data_ptr(), None)
        if target is not None:
            target.copy_(tensor)
        super().commit_tensor(read_item, tensor)
