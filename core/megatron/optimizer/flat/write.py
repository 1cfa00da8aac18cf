"""Writing the distributed optimizer of rank files: the flat buffers of distrib_optim.pt.

Megatron loads the file only if its buffers are as long as those of the run, so they are laid out as
by a run with the target's arguments. As in Megatron, ranks of data parallel rank 0 write the
buffers: with expert parallelism, only the files of a stage's first TP ranks contain dense
parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm, prod

from core.arrays.dtypes import DTYPES
from core.engine.catalog.dropped import Dropped
from core.engine.catalog.file_image import JoinedArray
from core.engine.catalog.optimizer_keys import MASTER, split_state_key, state_key, trained
from core.engine.catalog.stored import Coords, PlannedArray
from core.engine.catalog.tensor import TargetFragment
from core.errors import MissingShardError, UnsupportedError
from core.megatron.model.args import fields_of
from core.megatron.model.new_args import dp_at
from core.megatron.model.topology import Rank
from core.megatron.model.version import MegatronVersion
from core.megatron.optimizer.flat.buffers import (
    BufferLayout,
    Member,
    bucketing_of,
    is_distributed_expert,
    is_shared_embedding,
    lay_out_buffer,
    members_at,
)
from core.megatron.optimizer.flat.content import COALESCED, N_ELEMENTS, PARAM, OptimFile
from core.megatron.optimizer.flat.groups import GROUPS
from core.megatron.optimizer.rank_state import HeldParam
from core.megatron.optimizer.reshard_target import ReshardTarget, TargetArrays
from core.megatron.optimizer.target_groups import target_groups
from core.pickle.inert import Global, TensorLeaf

_HINT = "use --to torch_dist, which every layout can load, or drop the optimizer with --no-optim"
_FP32 = "float32"


class FlatFiles:
    """The distributed optimizer at a destination of rank files.

    Raises:
        UnsupportedError: the arguments do not decide the layout of the target's buffers, or the
            buffers cannot store a state; as for ``target_groups``.
        MissingShardError: a parameter lacks states.
        CorruptError: as for ``target_groups``.
    """

    def __init__(self, target: ReshardTarget) -> None:
        self.files: dict[Coords, object] = {}
        self.arrays: dict[str, PlannedArray | JoinedArray] = {}
        self.notes: list[str] = []
        self.dropped: list[Dropped] = []
        self._target = target
        self._planned = TargetArrays(target)
        self.beside = self._planned.beside
        self._args = {
            **fields_of(target.args),
            "data_parallel_size": dp_at(target.args, target.topology),
        }

        # The target's own arguments decide how its buffers are laid out.
        self._bucketing = bucketing_of(self._args)
        if self._bucketing.is_chunk_alone:
            raise UnsupportedError(
                "ckpt cannot write the distributed optimizer of a run with "
                "overlap_param_gather_with_optimizer_step",
                hint=_HINT,
            )
        self._trained = trained(target.catalog.tensors)
        self._states = (MASTER, *(state for state in target.optimizer.states if state != MASTER))
        self._check_states()
        self._groups = target_groups(target, self._trained)

    def _check_states(self) -> None:
        """Raise unless every parameter has every state, in fp32."""
        for key in self._target.catalog.tensors:
            state_and_param = split_state_key(key)
            if state_and_param is not None and state_and_param[0] not in self._states:
                raise UnsupportedError(
                    "distrib_optim.pt cannot store this state", key=key, hint=_HINT
                )
        for name in self._trained:
            for state in self._states:
                tensor = self._target.catalog.tensors.get(state_key(state, name))
                if tensor is None:
                    raise MissingShardError(
                        f"the optimizer has no {state} for this parameter",
                        key=name,
                        hint="drop the optimizer with --no-optim",
                    )
                if tensor.dtype != _FP32:
                    raise UnsupportedError(
                        f"the state is {tensor.dtype}, but distrib_optim.pt stores only {_FP32}",
                        key=state_key(state, name),
                        hint=_HINT,
                    )

    def add(self, rank: Rank, folder: str, coords: Coords, params: Sequence[HeldParam]) -> object:
        """Add the tensors of a rank's file, and return the rank's entry ``optimizer``.

        Raises:
            UnsupportedError: the arguments, or the target's version, do not allow the buffers.
        """
        # A rank without experts has their optimizer, too, if empty groups are listed.
        place = f"{folder}:distrib_optim"
        listed = self._groups.order(
            dict.fromkeys(param.key for param in params if param.key in self._trained)
        )
        has_experts = any(map(self._groups.is_expert, listed))

        # Write the buffers of the optimizers for which this rank is data parallel rank 0.
        topology = self._target.topology
        members = members_at(topology, self._bucketing, has_experts=has_experts)
        joined: dict[str, JoinedArray] = {}
        contents: list[object] = []
        for number, member in enumerate(members):
            n = topology.expert_tp * topology.ep if member.is_expert else topology.tp
            if not any(topology.rank_of(q, rank.pp) == rank for q in range(n)):
                contents.append(None)
                continue
            start = place if len(members) == 1 else f"{place}.{number}"
            contents.append(self._member(member, rank, start, coords, params, joined))
        if any(content is not None for content in contents):
            self.files[coords] = OptimFile(contents[0] if len(contents) == 1 else contents, joined)
        return self._entry(f"{folder}:optimizer", coords, listed, has_experts=has_experts)

    def _member(
        self,
        member: Member,
        rank: Rank,
        place: str,
        coords: Coords,
        params: Sequence[HeldParam],
        joined: dict[str, JoinedArray],
    ) -> dict[object, object]:
        """Return the buffers of one optimizer of a rank; their arrays are added to ``joined``."""
        content: dict[object, object] = {COALESCED: True}
        n_rank = sum(
            prod(self._target.cuts[param.key].shard_shape)
            for param in params
            if self._target.rules.is_param(param.key)
        )
        for vp_rank in member.chunks:
            for dtype, of_buffer in self._buffers(params, vp_rank, is_expert=member.is_expert):
                number = len(content) - 1
                layout = self._layout(of_buffer, (vp_rank, rank.pp), n_rank)
                key = (
                    Global("torch", DTYPES[dtype].name),
                    Global("torch", self._grad_dtype(dtype)),
                )
                entry: dict[object, object] = {}
                for state in self._states:
                    name = PARAM if state == MASTER else state
                    array_name = f"{place}.{number}.{key}.{name}"
                    joined[array_name] = self._joined(
                        array_name, state, of_buffer, layout, rank, coords
                    )
                    entry[name] = TensorLeaf(array_name)
                content[number] = {key: {**entry, N_ELEMENTS: layout.n_elements}}
        return content

    def _buffers(
        self, params: Sequence[HeldParam], vp_rank: int, *, is_expert: bool
    ) -> Iterator[tuple[str, list[HeldParam]]]:
        """Yield (dtype, parameters) of a chunk's buffers, in the order of their first use."""
        chunk = "model" if self._target.topology.vpp == 1 else f"model{vp_rank}"
        by_dtype: dict[str, list[HeldParam]] = {}
        for param in params:
            if param.chunk != chunk or param.key not in self._trained:
                continue
            if (
                is_distributed_expert(param.key, self._target.topology, self._target.rules)
                == is_expert
            ):
                by_dtype.setdefault(self._target.catalog.tensors[param.key].dtype, []).append(param)
        yield from by_dtype.items()

    def _layout(
        self, of_buffer: Sequence[HeldParam], chunk: tuple[int, int], n_rank: int
    ) -> BufferLayout:
        """Return the layout of a buffer's parameters.

        Args:
            chunk: (virtual stage, pipeline stage).
            n_rank: number of elements of all the rank's parameters.

        Raises:
            UnsupportedError: the arguments do not decide the layout, or the target's version has
                another one.
        """
        sizes = [prod(self._target.cuts[param.key].shard_shape) for param in of_buffer]
        shared = frozenset(
            i
            for i, param in enumerate(of_buffer)
            if is_shared_embedding(
                param.name, self._target.topology, self._target.facts, self._target.rules
            )
        )

        # If the arguments do not decide whether there are buckets, both layouts must be the same.
        layouts = [
            lay_out_buffer(sizes, bucket_size=size, shared=shared)
            for size in reversed(self._bucketing.bucket_sizes(chunk, n_params=n_rank))
        ]
        for layout in layouts:
            self._check_old_version(layout, shared, of_buffer)
        if len({layout.slots for layout in layouts}) > 1:
            raise UnsupportedError(
                "the training arguments do not specify whether the optimizer's buffers are split "
                "into buckets (overlap_grad_reduce), so Megatron may fail to load them",
                key=of_buffer[0].key,
                hint=_HINT,
            )
        return layouts[0]

    def _check_old_version(
        self, layout: BufferLayout, shared: frozenset[int], of_buffer: Sequence[HeldParam]
    ) -> None:
        """Raise if the target's version is before 0.15 and has another layout of a buffer.

        Seen in megatron-core 0.12.1, not in 0.15.0: a shared embedding starts at the end of the
        previous bucket's elements, which does not include padding.
        """
        if self._target.version is None or self._target.version >= MegatronVersion(0, 15):
            return
        unit = lcm(self._bucketing.n_ranks, 128)
        for place in shared:
            number = layout.slots[place].bucket
            if number and layout.buckets[number - 1] % unit:
                raise UnsupportedError(
                    f"the bucket before this shared embedding has {layout.buckets[number - 1]} "
                    f"elements, which is not a multiple of {unit}, so megatron-core "
                    f"{self._target.version} lays out its buffers differently",
                    key=of_buffer[place].key,
                    hint=_HINT,
                )

    def _grad_dtype(self, dtype: str) -> str:
        """Return torch's name of the gradients' dtype for parameters of a dtype."""
        if dtype == _FP32:
            return _FP32
        in_fp32 = self._args.get("accumulate_allreduce_grads_in_fp32")
        if in_fp32 is None:
            raise UnsupportedError(
                "the training arguments do not specify the dtype for reducing gradients "
                "(accumulate_allreduce_grads_in_fp32), which distrib_optim.pt must record",
                hint=_HINT,
            )
        return _FP32 if in_fp32 else DTYPES[dtype].name

    def _joined(
        self,
        name: str,
        state: str,
        of_buffer: Sequence[HeldParam],
        layout: BufferLayout,
        rank: Rank,
        coords: Coords,
    ) -> JoinedArray:
        """Return one state of a buffer as the shards of its parameters, the last one first."""
        parts = []
        for param, slot in zip(reversed(of_buffer), reversed(layout.slots), strict=True):
            key = state_key(state, param.key)
            array = PlannedArray(
                f"{name}[{slot.start}]", _FP32, self._target.cuts[key].shard_shape, coords=coords
            )
            self._planned.add_shard(key, rank, array)
            parts.append((slot.start, array))
        return JoinedArray(name, _FP32, layout.n_elements, tuple(parts))

    def _entry(
        self, place: str, coords: Coords, listed: Sequence[int], *, has_experts: bool
    ) -> object:
        """Return the optimizer's entry in model_optim_rng.pt: groups without their parameters."""
        members = [[number for number in listed if not self._groups.is_expert(number)]]
        if has_experts:
            members.append([number for number in listed if self._groups.is_expert(number)])
        optimizers: list[object] = []
        for i, numbers in enumerate(members):
            start = place if len(members) == 1 else f"{place}.{i}"
            groups = [
                self._planned.copy_entries(
                    self._groups.settings[number], f"{start}.optimizer.{GROUPS}.{at}", coords
                )
                for at, number in enumerate(numbers)
            ]
            entries = self._planned.copy_entries(self._target.optimizer.entries, start, coords)
            optimizers.append({"optimizer": {GROUPS: groups}, **entries})
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def fragments(self, key: str) -> Sequence[TargetFragment]:
        """Return the target's fragments of one state; all ranks must have been added."""
        return self._planned.fragments(key)
