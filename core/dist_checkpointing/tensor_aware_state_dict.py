"""A sharded state dict whose tensors can be taken out and put back.

It serves checkpoints in memory or on local disks::

    sharded state dict ── from_state_dict ──▶ common state, ShardedTensors and ShardedObjects
                                                │ pop_tensors ──▶ tensors, stored elsewhere
                                              hollow: small, can be pickled
                                                │ insert_tensors ◀── the same tensors
    plain state dict   ◀── to_state_dict ──── common state, ShardedTensors and ShardedObjects

With ``algo="fully_parallel"`` each shard is kept by only one of the ranks that hold it, and
``to_state_dict`` exchanges the shards again; with ``"atomic"`` every rank keeps all its shards.

The managers and replication strategies of nvidia-resiliency-ext store these objects: they send a
hollow one to other ranks and its tensors separately, and pickle a filled one to a file. Where that
package is installed, its base class is used, and else the same class that is defined below.

Source: the documented package, nvidia-resiliency-ext 0.4.1. As there, the type of the device that a
tensor was on is the attribute ``orig_device`` of its ShardedTensor, so that either implementation
can restore what the other one pickled. Only the type, because the process that restores the tensor
may use a device with another number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, ValuesView
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge, nested_values
from core.dist_checkpointing.exchange_utils import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
    exchange_by_distribution,
)
from core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    apply_factory_merges,
)
from core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from core.dist_checkpointing.utils import (
    _sharded_object_id,
    _sharded_tensor_shard_id,
    _ShardId,
    extract_sharded_base,
    zip_strict,
)
from core.dist_checkpointing.validation import (
    StrictHandling,
    determine_global_metadata,
    parse_strict_flag,
    validate_integrity_and_strict_load,
)
from core.errors import MissingShardError, UsageError

_ALGORITHMS = ("atomic", "fully_parallel")


class _UnkeptShardError(MissingShardError, AssertionError):
    """A requested shard that is not kept.

    Scripts that were written for megatron-core expect an AssertionError here.
    """


class _TensorAwareStateDict(ABC):
    """A state dict whose tensors can be stored separately from everything else."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """True if the tensors have been taken out and not put back."""

    @property
    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]:
        """Iterator over the tensors, always in the same order."""

    @property
    @abstractmethod
    def common_state_dict(self) -> StateDict:
        """State that is not sharded."""

    @abstractmethod
    def pop_tensors(self) -> list[torch.Tensor]:
        """Take the tensors out and return them."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors back, in the order in which they were taken out."""

    @abstractmethod
    def init_tensors(self) -> None:
        """Put uninitialised tensors in place of those that were taken out."""

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies in host memory."""

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors back to the devices that they were on originally."""

    def values(self) -> ValuesView[Any]:
        """Return the values of the attributes, as scripts search them like those of a dict."""
        return vars(self).values()


if TYPE_CHECKING:
    TensorAwareStateDict = _TensorAwareStateDict
else:
    # The checkpoint managers check for their own base class.
    try:
        from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
    except ImportError:
        TensorAwareStateDict = _TensorAwareStateDict


@dataclass
class MCoreTensorAwareStateDict(TensorAwareStateDict):
    """A TensorAwareStateDict of a sharded state dict.

    Args:
        common: state that is not sharded.
        sharded_state_dict: ShardedTensors and ShardedObjects, nested. A ShardedTensor has no data
            if another rank keeps its shard, or if the state dict is hollow.
    """

    common: StateDict
    sharded_state_dict: ShardedStateDict
    _is_hollow: bool = False

    @classmethod
    def from_state_dict(
        cls,
        sharded_state_dict: ShardedStateDict,
        algo: str = "fully_parallel",
        parallelization_group: Any = None,
        cached_metadata: ShardDistribution | None = None,
    ) -> tuple[MCoreTensorAwareStateDict, ShardDistribution | None]:
        """Build the object from a state dict; collective.

        The state dict is not changed. Its tensors are not copied.

        Args:
            sharded_state_dict: this rank's state.
            algo: atomic or fully_parallel.
            parallelization_group: process group within which each shard is kept once, None for all
                ranks.
            cached_metadata: the distribution that an earlier call for a state dict of the same
                structure returned; metadata is then neither exchanged nor validated.

        Returns:
            The new object, and the distribution of its shards; None if each rank keeps all shards
            that it holds.

        Raises:
            ValueError: ``algo`` is unknown, or the cached distribution lacks a shard.
            CheckpointingException: the shards of all ranks do not form complete tensors; on every
                rank.
        """
        _check_algorithm(algo)
        sharded, common = save_preprocess(sharded_state_dict, cached_metadata is None)
        # Copy the leaves, because the caller's must keep their data.
        sharded = dict_list_map_outplace(copy, sharded)
        # Choose one keeper for each shard, unless each rank keeps all its shards.
        distribution = cached_metadata if algo == "fully_parallel" else None
        if algo == "fully_parallel" and distribution is None:
            distribution = determine_main_replica_uniform_distribution(
                sharded, parallelization_group, True
            )
        if distribution is not None:
            rank = comm.rank(parallelization_group)
            for leaf in nested_values(sharded):
                if not isinstance(leaf, ShardedTensor):
                    continue
                shard = _sharded_tensor_shard_id(leaf)
                if shard not in distribution.main_rank_for_shard:
                    raise ValueError(
                        "the cached distribution belongs to a different state dict and "
                        f"lacks {leaf.key}"
                    )
                if distribution.main_rank_for_shard[shard] != rank:
                    leaf.data = None
        return cls(common, sharded), distribution

    @property
    @override
    def is_hollow(self) -> bool:
        return self._is_hollow

    @property
    @override
    def tensors(self) -> Iterator[torch.Tensor]:
        """Iterator over the tensors that this rank keeps, always in the same order.

        Raises:
            UsageError: the state dict is hollow.
        """
        return iter([tensor.data for tensor in self._tensors_with_data()])

    @property
    @override
    def common_state_dict(self) -> StateDict:
        return self.common

    @override
    def pop_tensors(self) -> list[torch.Tensor]:
        """Take the tensors out, which makes the state dict hollow, and return them.

        Raises:
            UsageError: the state dict is already hollow.
        """
        tensors = self._tensors_with_data()
        popped = [tensor.data for tensor in tensors]
        for tensor in tensors:
            # A tensor that was copied to host memory keeps the record of its original device.
            if not hasattr(tensor, "orig_device"):
                tensor.orig_device = tensor.data.device.type
            tensor.data = None
        self._is_hollow = True
        return popped

    @override
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors back, on whatever device they are.

        Args:
            tensor_data: as many tensors as ``pop_tensors`` returned, in its order, of the same
                dtypes and shapes.

        Raises:
            UsageError: the state dict is not hollow, or a tensor has another dtype or shape; no
                tensor was inserted then.
            ValueError: the number of tensors differs.
        """
        # Check all tensors before any is inserted, so that an error leaves the state dict hollow.
        pairs = list(zip_strict(self._popped_tensors(), tensor_data))
        for tensor, data in pairs:
            if (data.dtype, tuple(data.shape)) != (tensor.dtype, tuple(tensor.data_shape)):
                raise UsageError(
                    f"cannot insert a {data.dtype} tensor of shape {tuple(data.shape)}, "
                    f"expected {tensor.dtype} and shape {tuple(tensor.data_shape)}",
                    key=tensor.key,
                )
        for tensor, data in pairs:
            tensor.data = data
            # A tensor that is on its original type of device needs no restoring.
            if tensor.orig_device == data.device.type:
                del tensor.orig_device
        self._is_hollow = False

    @override
    def init_tensors(self) -> None:
        """Put uninitialised tensors in place of those taken out, on devices of the same types.

        Raises:
            UsageError: the state dict is not hollow.
        """
        for tensor in self._popped_tensors():
            tensor.init_data(tensor.orig_device)
            del tensor.orig_device
        self._is_hollow = False

    @override
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies in host memory, except those that already are such copies.

        Args:
            non_blocking: do not wait for the device; the copies are valid after it is synchronised.

        Raises:
            UsageError: the state dict is hollow.
        """
        for tensor in self._tensors_with_data():
            # A recorded device means that the tensor already is a copy.
            if not hasattr(tensor, "orig_device"):
                data = tensor.data.detach()
                tensor.orig_device = data.device.type
                is_on_cpu = data.device.type == "cpu"
                tensor.data = (
                    data.clone() if is_on_cpu else data.to("cpu", non_blocking=non_blocking)
                )

    @override
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors back to devices of their original types.

        The original device is the one before a tensor was copied or taken out.

        Args:
            non_blocking: do not wait for the device.

        Raises:
            UsageError: the state dict is hollow.
        """
        for tensor in self._tensors_with_data():
            if hasattr(tensor, "orig_device"):
                tensor.data = tensor.data.to(tensor.orig_device, non_blocking=non_blocking)
                del tensor.orig_device

    def to_state_dict(
        self,
        sharded_state_dict: ShardedStateDict,
        algo: str = "atomic",
        exchange_algo: str = "broadcast",
        validate_access_integrity: bool = True,
        parallelization_group: Any = None,
        strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
        return_mismatch_keys: bool = False,
    ) -> StateDict | tuple[StateDict, set[str], set[str]]:
        """Return the plain state dict in the requested nesting; collective.

        Tensors that this object holds are returned themselves, not as copies.

        Args:
            sharded_state_dict: the request of this rank, sharded as the original state dict was; {}
                for the common state only.
            algo: algorithm that was passed to ``from_state_dict``.
            exchange_algo: algorithm by which ranks get shards that others keep; see
                ``exchange_utils``.
            validate_access_integrity: check that the ranks together request complete tensors.
            parallelization_group: process group that was passed to ``from_state_dict``.
            strict: reaction to keys that differ; a requested shard that no rank keeps is an error
                in any case, after this reaction.
            return_mismatch_keys: also return missing and unexpected keys.

        Returns:
            The state dict; with ``return_mismatch_keys`` also the missing and the unexpected keys.

        Raises:
            UsageError: the state dict is hollow, or the requested shards do not fit together.
            MissingShardError: a requested shard is not kept by this rank (atomic), or by no rank of
                the group. It is an AssertionError, too, unless ``strict`` raises it.
            ValueError: ``algo``, ``exchange_algo`` or ``strict`` is unknown.
        """
        _check_algorithm(algo)
        handling = parse_strict_flag(strict)
        self._require_tensors()
        # Begin with the common state, in new containers, because loaded values are merged into it.
        state = dict_list_map_outplace(lambda leaf: leaf, self.common)
        if not sharded_state_dict:
            return (state, set(), set()) if return_mismatch_keys else state
        tree, local, factories = load_preprocess(sharded_state_dict)
        merge(state, local)

        # Compare the request with the kept shards and with the other ranks, where the arguments
        # require it.
        requested = extract_sharded_base(tree)[0]
        stored = local_metadata = global_metadata = None
        if StrictHandling.requires_explicit_ckpt_mismatch_check(handling):
            stored = {
                leaf.key: leaf.without_data() for leaf in nested_values(self.sharded_state_dict)
            }
        if validate_access_integrity or StrictHandling.requires_global_app_metadata(handling):
            local_metadata, global_metadata = determine_global_metadata(requested)
        _, missing, unexpected = validate_integrity_and_strict_load(
            requested, handling, validate_access_integrity, local_metadata, global_metadata, stored
        )

        # Fetch the shards that other ranks keep, and put all into the requested nesting. Unexpected
        # keys are part of it: a local checkpoint has the state that the program saved, so one that
        # lacks a shard is not the right one.
        tensors = {
            _sharded_tensor_shard_id(tensor): tensor.data for tensor in self._tensors_with_data()
        }
        if algo == "fully_parallel":
            tensors = _fetch_from_keepers(tensors, requested, parallelization_group, exchange_algo)
        merge(state, comm.together(lambda: self._fill(requested, tensors)))
        state = apply_factory_merges(state, factories)
        return (state, missing, unexpected) if return_mismatch_keys else state

    def _fill(self, tree: ShardedStateDict, tensors: dict[_ShardId, torch.Tensor]) -> StateDict:
        """Return the tree with its leaves replaced by tensors and by the objects of this rank.

        Args:
            tree: ShardedTensors and ShardedObjects.
            tensors: the tensors of this rank, and those received from others.

        Raises:
            MissingShardError: a leaf has no tensor or object.
        """
        leaves = nested_values(self.sharded_state_dict)
        objects = {
            _sharded_object_id(leaf): leaf.data
            for leaf in leaves
            if isinstance(leaf, ShardedObject)
        }

        def value_of(leaf: Any) -> Any:
            is_object = isinstance(leaf, ShardedObject)
            shard = _sharded_object_id(leaf) if is_object else _sharded_tensor_shard_id(leaf)
            kept: dict[_ShardId, Any] = objects if is_object else tensors
            if shard not in kept:
                raise _UnkeptShardError(
                    f"the shard at offset {leaf.global_offset} is missing",
                    key=leaf.key,
                    hint="request only shards that the ranks saved",
                )
            return kept[shard]

        return dict_list_map_outplace(value_of, tree)  # type: ignore[no-any-return]

    def _require_tensors(self) -> None:
        if self.is_hollow:
            raise UsageError(
                "the tensors were removed from the state dict",
                hint="call insert_tensors or init_tensors first",
            )

    def _tensors_with_data(self) -> list[Any]:
        """Return the ShardedTensors with data.

        Raises:
            UsageError: the state dict is hollow.
        """
        self._require_tensors()
        return [tensor for tensor in self._all_tensors() if tensor.data is not None]

    def _popped_tensors(self) -> list[Any]:
        """Return the ShardedTensors whose data was taken out.

        Raises:
            UsageError: the state dict is not hollow.
        """
        if not self.is_hollow:
            raise UsageError(
                "the tensors are still in the state dict", hint="call pop_tensors first"
            )
        # A ShardedTensor whose shard another rank keeps has no record of a device.
        return [tensor for tensor in self._all_tensors() if hasattr(tensor, "orig_device")]

    def _all_tensors(self) -> list[ShardedTensor]:
        return [
            leaf
            for leaf in nested_values(self.sharded_state_dict)
            if isinstance(leaf, ShardedTensor)
        ]


def _check_algorithm(algo: str) -> None:
    if algo not in _ALGORITHMS:
        raise ValueError(f"algo must be one of {', '.join(_ALGORITHMS)}, got {algo!r}")


def _fetch_from_keepers(
    tensors: dict[_ShardId, torch.Tensor],
    requested: ShardedStateDict,
    group: Any,
    exchange_algo: str,
) -> dict[_ShardId, torch.Tensor]:
    """Return the tensors of this rank and the requested ones that other ranks keep; collective.

    Raises:
        MissingShardError: no rank of the group keeps a requested shard; on every rank.
    """
    distribution = determine_main_replica_uniform_distribution(requested, group, True)
    if distribution is None:
        return tensors
    # Make the main rank of every shard a rank that really keeps it. The computed distribution need
    # not be the one that the shards were kept by: the request may be another state dict.
    keeper: dict[_ShardId, int] = {}
    for rank, shards in enumerate(comm.all_gather(list(tensors), group)):
        for shard in shards:
            keeper.setdefault(shard, rank)
    for shard, tensor in distribution.shard_to_metadata.items():
        if shard not in keeper:
            raise _UnkeptShardError(
                f"no rank holds the shard at offset {tensor.global_offset}", key=tensor.key
            )
    distribution = distribution._replace(
        main_rank_for_shard={shard: keeper[shard] for shard in distribution.main_rank_for_shard}
    )
    # Send the shards that this rank keeps for all, and receive those that it lacks.
    sent = {shard: tensor for shard, tensor in tensors.items() if keeper[shard] == comm.rank(group)}
    leaves = {
        _sharded_tensor_shard_id(leaf): leaf
        for leaf in nested_values(requested)
        if isinstance(leaf, ShardedTensor)
    }
    lacking = {shard: leaf for shard, leaf in leaves.items() if shard not in tensors}
    return {
        **exchange_by_distribution(sent, lacking, distribution, group, exchange_algo),
        **tensors,
    }
