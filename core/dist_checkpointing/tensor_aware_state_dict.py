"""A sharded state dict whose tensors can be taken out and put back: for checkpoints in memory or on local disks.

::

    sharded state dict ── from_state_dict ──▶ common state │ ShardedTensors and ShardedObjects
                                                            │ pop_tensors ──▶ tensors, to be kept elsewhere
                                                            │ hollow: can be pickled, small
                                                            │ insert_tensors ◀── the same tensors
    plain state dict   ◀── to_state_dict ───┘

With ``algo="fully_parallel"`` each shard is kept by one of the ranks that hold it, and they exchange them again on the
way back; with ``"atomic"`` every rank keeps what it holds.

Source: the documented package. There the base class is nvidia_resiliency_ext's; here it stands below, and nothing needs
that package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

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
from core.dist_checkpointing.state_dict_utils import load_preprocess, remaining_factories, save_preprocess
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


class TensorAwareStateDict(ABC):
    """A state dict that knows where its tensors are, so that they can be stored apart from the rest."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """Whether the tensors have been taken out and not put back."""

    @property
    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors, always in the same order."""

    @property
    @abstractmethod
    def common_state_dict(self) -> StateDict:
        """What is not sharded."""

    @abstractmethod
    def pop_tensors(self) -> list[torch.Tensor]:
        """Takes the tensors out."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Puts tensors back, in the order in which they were taken out."""

    @abstractmethod
    def init_tensors(self) -> None:
        """Puts uninitialised tensors where some were taken out."""

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replaces the tensors by copies in host memory."""

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Moves the tensors back to where they were before they were copied or taken out."""


@dataclass
class MCoreTensorAwareStateDict(TensorAwareStateDict):
    """That of a sharded state dict.

    Args:
        common: what is not sharded.
        sharded_state_dict: ShardedTensors and ShardedObjects, nested. A ShardedTensor without data is kept by another
            rank, or hollow.
    """

    common: StateDict
    sharded_state_dict: ShardedStateDict
    _is_hollow: bool = False

    def __post_init__(self) -> None:
        # Place among all ShardedTensors → type of the device that its data was on before it was taken out or copied.
        # A type, because another process may put it back, whose device has another number.
        self._devices: dict[int, str] = {}
        self._popped: tuple[int, ...] = ()

    @classmethod
    def from_state_dict(
        cls,
        sharded_state_dict: ShardedStateDict,
        algo: str = "fully_parallel",
        parallelization_group: Any = None,
        cached_metadata: ShardDistribution | None = None,
    ) -> tuple[MCoreTensorAwareStateDict, ShardDistribution | None]:
        """Takes a state dict apart; collective. Neither it nor its leaves are changed; the tensors are shared.

        Args:
            sharded_state_dict: what this rank holds.
            algo: atomic or fully_parallel.
            parallelization_group: process group within which each shard is kept once, None for all ranks.
            cached_metadata: what an earlier call for a state dict of the same structure returned; then nothing is
                exchanged, and nothing validated.

        Returns:
            The new object, and the distribution of its shards; None if each rank keeps all that it holds.

        Raises:
            ValueError: no such ``algo``, or the cached distribution is of another structure.
            CheckpointingException: the shards of all ranks do not make whole tensors; on every rank.
        """
        _check_algorithm(algo)
        sharded, common = save_preprocess(sharded_state_dict, cached_metadata is None)
        sharded = dict_list_map_outplace(copy, sharded)
        distribution = cached_metadata if algo == "fully_parallel" else None
        if algo == "fully_parallel" and distribution is None:
            distribution = determine_main_replica_uniform_distribution(sharded, parallelization_group, True)
        if distribution is not None:
            _leave_to_others(sharded, distribution, comm.rank(parallelization_group))
        return cls(common, sharded), distribution

    @property
    def is_hollow(self) -> bool:
        """Whether the tensors have been taken out and not put back."""
        return self._is_hollow

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that this rank keeps, always in the same order.

        Raises:
            UsageError: it is hollow.
        """
        return iter([tensor.data for _, tensor in self._held()])

    @property
    def common_state_dict(self) -> StateDict:
        """What is not sharded."""
        return self.common

    def pop_tensors(self) -> list[torch.Tensor]:
        """Takes the tensors out: what remains is hollow.

        Raises:
            UsageError: it is hollow already.
        """
        held = self._held()
        found = [tensor.data for _, tensor in held]
        for place, tensor in held:
            self._devices.setdefault(place, tensor.data.device.type)
            tensor.data = None
        self._popped = tuple(place for place, _ in held)
        self._is_hollow = True
        return found

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Puts tensors back, on whatever device.

        Args:
            tensor_data: as many as ``pop_tensors`` returned, in its order, of the same dtypes and shapes.

        Raises:
            UsageError: it is not hollow, or a tensor is of another dtype or shape; nothing was inserted.
            ValueError: there are more or fewer of them.
        """
        pairs = list(zip_strict(self._hollows(), tensor_data))
        for (_, tensor), data in pairs:
            if (data.dtype, tuple(data.shape)) != (tensor.dtype, tuple(tensor.data_shape)):
                raise UsageError(
                    f"a tensor of {data.dtype} and shape {tuple(data.shape)} was inserted in place of one of "
                    f"{tensor.dtype} and shape {tuple(tensor.data_shape)}",
                    key=tensor.key,
                )
        for (place, tensor), data in pairs:
            tensor.data = data
            if self._devices[place] == data.device.type:
                del self._devices[place]
        self._is_hollow, self._popped = False, ()

    def init_tensors(self) -> None:
        """Puts uninitialised tensors where some were taken out, on devices of the same types.

        Raises:
            UsageError: it is not hollow.
        """
        for place, tensor in self._hollows():
            tensor.init_data(self._devices.pop(place))
        self._is_hollow, self._popped = False, ()

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replaces the tensors by copies in host memory, unless they are such copies already.

        Args:
            non_blocking: do not wait for the device; the copies are valid once it is synchronised.

        Raises:
            UsageError: it is hollow.
        """
        for place, tensor in self._held():
            if place not in self._devices:
                data = tensor.data.detach()
                self._devices[place] = data.device.type
                is_there = data.device.type == "cpu"
                tensor.data = data.clone() if is_there else data.to("cpu", non_blocking=non_blocking)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Moves the tensors back to devices of the types that they were on before they were copied or taken out.

        Args:
            non_blocking: do not wait for the device.

        Raises:
            UsageError: it is hollow.
        """
        for place, tensor in self._held():
            if place in self._devices:
                tensor.data = tensor.data.to(self._devices.pop(place), non_blocking=non_blocking)

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
        """The plain state dict, of the nesting asked for; collective. Its tensors are those kept here, not copies.

        Args:
            sharded_state_dict: what this rank wants, cut as it was when it was taken apart; {} for the common state.
            algo: as for ``from_state_dict``.
            exchange_algo: how ranks get what others keep; see ``exchange_utils``.
            validate_access_integrity: check that the ranks together ask for whole tensors.
            parallelization_group: as for ``from_state_dict``.
            strict: what to do where keys differ.
            return_mismatch_keys: return missing and unexpected keys, too.

        Raises:
            UsageError: it is hollow, or the shards asked for do not fit together.
            MissingShardError: something asked for is not kept by this rank (atomic), or by none of the group.
            ValueError: no such ``algo``, ``exchange_algo`` or ``strict``.
        """
        _check_algorithm(algo)
        handling = parse_strict_flag(strict)
        self._held()
        state = dict_list_map_outplace(lambda leaf: leaf, self.common)
        if not sharded_state_dict:
            return (state, set(), set()) if return_mismatch_keys else state
        whole, local, factories = load_preprocess(sharded_state_dict)
        merge(state, local)
        before = extract_sharded_base(whole)[0]
        stored = own = everyone = None
        if StrictHandling.requires_explicit_ckpt_mismatch_check(handling):
            stored = {leaf.key: leaf.without_data() for leaf in nested_values(self.sharded_state_dict)}
        if validate_access_integrity or StrictHandling.requires_global_app_metadata(handling):
            own, everyone = determine_global_metadata(before)
        wanted, missing, unexpected = validate_integrity_and_strict_load(
            before, handling, validate_access_integrity, own, everyone, stored
        )
        tensors = {_sharded_tensor_shard_id(tensor): tensor.data for _, tensor in self._held()}
        if algo == "fully_parallel":
            tensors = _exchanged(tensors, wanted, parallelization_group, exchange_algo)
        merge(state, comm.together(lambda: self._filled(wanted, tensors)))
        state = apply_factory_merges(state, remaining_factories(factories, before, wanted))
        return (state, missing, unexpected) if return_mismatch_keys else state

    def _filled(self, wanted: ShardedStateDict, tensors: dict[_ShardId, torch.Tensor]) -> StateDict:
        """The same nesting with the tensors, and the objects kept here."""
        leaves = nested_values(self.sharded_state_dict)
        objects = {_sharded_object_id(leaf): leaf.data for leaf in leaves if isinstance(leaf, ShardedObject)}

        def value(leaf: Any) -> Any:
            is_object = isinstance(leaf, ShardedObject)
            shard = _sharded_object_id(leaf) if is_object else _sharded_tensor_shard_id(leaf)
            kept: dict[_ShardId, Any] = objects if is_object else tensors
            if shard not in kept:
                raise MissingShardError(f"no shard at offset {leaf.global_offset} is kept", key=leaf.key)
            return kept[shard]

        return dict_list_map_outplace(value, wanted)  # type: ignore[no-any-return]

    def _held(self) -> list[tuple[int, Any]]:
        """The ShardedTensors with data, and their places among all."""
        if self.is_hollow:
            raise UsageError("the tensors have been taken out", hint="call insert_tensors or init_tensors first")
        return [(place, tensor) for place, tensor in enumerate(self._all()) if tensor.data is not None]

    def _hollows(self) -> list[tuple[int, Any]]:
        """The ShardedTensors whose data was taken out, and their places among all."""
        if not self.is_hollow:
            raise UsageError("the tensors have not been taken out", hint="call pop_tensors first")
        tensors = self._all()
        return [(place, tensors[place]) for place in self._popped]

    def _all(self) -> list[ShardedTensor]:
        return [leaf for leaf in nested_values(self.sharded_state_dict) if isinstance(leaf, ShardedTensor)]


def _check_algorithm(algo: str) -> None:
    if algo not in _ALGORITHMS:
        raise ValueError(f"algo is one of {', '.join(_ALGORITHMS)}, not {algo!r}")


def _leave_to_others(sharded: ShardedStateDict, distribution: ShardDistribution, rank: int) -> None:
    """Drops the data of the shards that other ranks keep."""
    for leaf in nested_values(sharded):
        if isinstance(leaf, ShardedTensor):
            shard = _sharded_tensor_shard_id(leaf)
            if shard not in distribution.main_rank_for_shard:
                raise ValueError(f"the cached distribution was made for another state dict: it has no {leaf.key}")
            if distribution.main_rank_for_shard[shard] != rank:
                leaf.data = None


def _exchanged(
    tensors: dict[_ShardId, torch.Tensor], wanted: ShardedStateDict, group: Any, exchange_algo: str
) -> dict[_ShardId, torch.Tensor]:
    """The tensors, and those of the wanted ones that other ranks of the group keep; collective.

    Raises:
        MissingShardError: no rank keeps one; on every rank.
    """
    distribution = determine_main_replica_uniform_distribution(wanted, group, True)
    if distribution is None:
        return tensors
    keeper: dict[_ShardId, int] = {}
    for rank, shards in enumerate(comm.all_gather(list(tensors), group)):
        for shard in shards:
            keeper.setdefault(shard, rank)
    for shard, tensor in distribution.shard_to_metadata.items():
        if shard not in keeper:
            raise MissingShardError(f"no rank keeps the shard at offset {tensor.global_offset}", key=tensor.key)
    distribution = distribution._replace(
        main_rank_for_shard={shard: keeper[shard] for shard in distribution.main_rank_for_shard}
    )
    given = {shard: tensor for shard, tensor in tensors.items() if keeper[shard] == comm.rank(group)}
    leaves = [leaf for leaf in nested_values(wanted) if isinstance(leaf, ShardedTensor)]
    absent = {_sharded_tensor_shard_id(leaf): leaf for leaf in leaves}
    absent = {shard: leaf for shard, leaf in absent.items() if shard not in tensors}
    return {**exchange_by_distribution(given, absent, distribution, group, exchange_algo), **tensors}
