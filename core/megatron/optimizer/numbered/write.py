"""Writing the numbered optimizer of rank files (``core.megatron.optimizer.numbered.content``).

On every rank, parameters get new numbers: group by group, in the order of the rank's file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from core.engine.catalog.dropped import Dropped
from core.engine.catalog.file_image import JoinedArray
from core.engine.catalog.optimizer_keys import MASTER, state_key, trained
from core.engine.catalog.stored import Coords, PlannedArray
from core.engine.catalog.tensor import TargetFragment
from core.errors import MissingShardError, UnsupportedError
from core.megatron.model.cut import param_array
from core.megatron.model.topology import Rank
from core.megatron.optimizer.groups import HALF, is_muon
from core.megatron.optimizer.numbered.content import INNER, MASTERS, STEP_NAME
from core.megatron.optimizer.rank_state import HeldParam
from core.megatron.optimizer.reshard_target import ReshardTarget, TargetArrays
from core.megatron.optimizer.target_groups import target_groups
from core.pickle.inert import TensorLeaf


class NumberedFiles:
    """An FP32 or Float16 optimizer at a destination of rank files.

    Raises:
        MissingShardError: a parameter lacks states.
        UnsupportedError: Muon is distributed by layers.
        UnsupportedError, CorruptError: as for ``target_groups``.
    """

    def __init__(self, target: ReshardTarget) -> None:
        self.files: dict[Coords, object] = {}
        self.arrays: dict[str, PlannedArray | JoinedArray] = {}
        self.notes: list[str] = []
        self.dropped: list[Dropped] = []
        self._target = target
        self._planned = TargetArrays(target)
        self.beside = self._planned.beside
        self._moments = [name for name in target.optimizer.states if name != MASTER]
        self._has_masters = target.optimizer.kind != "fp32"
        if target.is_layer_wise:
            raise UnsupportedError(
                "the source's arguments select layer-wise distributed Muon (dist_muon), and ckpt "
                "cannot write that optimizer's rank files (layer_wise_optimizer_N.pt)",
                hint="use --to torch_dist, or drop the optimizer with --no-optim",
            )

        # Without parameters in the groups, the states tell which parameters the optimizer has.
        params = trained(target.catalog.tensors)
        groups = target.optimizer.groups
        if all(group.params is not None for group in groups):
            named = {name for group in groups for name in group.params or ()}
            tensors = target.catalog.tensors
            params = {key: len(tensor.shape) for key, tensor in tensors.items() if key in named}
        self._groups = target_groups(target, params)
        tensors = self._target.catalog.tensors
        by_muon: dict[bool, list[str]] = {False: [], True: []}
        for state in self._moments:
            owners = {
                self._is_by_muon(name) for name in params if state_key(state, name) in tensors
            }
            for owner in owners or {False}:
                by_muon[owner].append(state)
        self._moments_by_muon = by_muon
        self._check_states(params)

    def _is_by_muon(self, name: str) -> bool:
        return is_muon(self._groups.settings[self._groups.group_of[name]])

    def _check_states(self, params: Mapping[str, int]) -> None:
        """Raise unless every parameter has all states, and only 16-bit ones master weights."""
        tensors = self._target.catalog.tensors
        for name in params:
            moments = self._moments_by_muon[self._is_by_muon(name)]
            masters = [MASTER] if self._has_master(name) else []
            if self._has_masters and not masters and state_key(MASTER, name) in tensors:
                raise UnsupportedError(
                    f"the parameter is {tensors[name].dtype} and has fp32 master weights, but "
                    "rank files store master weights only for 16-bit parameters",
                    key=name,
                    hint="do not cast this parameter, or drop the optimizer with --no-optim",
                )
            for state in (*masters, *moments):
                if state_key(state, name) not in tensors:
                    raise MissingShardError(
                        f"the optimizer has no {state} for this parameter", key=name
                    )

    def _has_master(self, name: str) -> bool:
        return self._has_masters and self._target.catalog.tensors[name].dtype in HALF

    def add(self, rank: Rank, folder: str, coords: Coords, params: Sequence[HeldParam]) -> object:
        """Add the tensors of a rank's file, and return the rank's entry ``optimizer``."""
        # One parameter may hold several tensors (GroupedMLP), and two may have one key: copies of
        # the embedding in one stage.
        stored: dict[tuple[str, str], list[str]] = {}
        for param in params:
            if param.key in self._groups.group_of:
                stored.setdefault((param.chunk, param.name), []).append(param.key)
        keys_of_params = tuple(stored.values())
        names = [keys[0] for keys in keys_of_params]
        listed = self._groups.order(names)
        self._note_order(listed, names)

        # Muon and Adam, and dense parameters and experts, have chained optimizers of their own.
        members = self._groups.by_member(listed) or [[]]
        place = f"{folder}:optimizer"
        if len(members) == 1:
            return self._member(rank, place, coords, members[0], keys_of_params)
        return [
            self._member(rank, f"{place}.{i}", coords, groups, keys_of_params)
            for i, groups in enumerate(members)
        ]

    def _note_order(self, listed: Sequence[int], keys: Iterable[str]) -> None:
        """Note the order and the empty groups that only some versions of megatron-core load.

        Args:
            listed: numbers of the groups that a rank lists.
            keys: parameters of the rank.
        """
        if self._groups.is_sorted or self._target.version is not None:
            return
        added = []
        if list(listed) != sorted(listed):
            added.append(
                "the optimizer's param groups keep the source's order, which is that of "
                "megatron-core before 0.16"
            )
        is_any_empty = len(listed) > len({self._groups.group_of[name] for name in keys})
        if is_any_empty and self._target.optimizer.omits_empty is None:
            added.append(
                "empty param groups are written, as in megatron-core 0.14 and later; older "
                "versions do not write them"
            )
        self.notes += [note for note in added if note not in self.notes]

    def _member(
        self,
        rank: Rank,
        place: str,
        coords: Coords,
        numbers: Sequence[int],
        keys_of_params: Sequence[Sequence[str]],
    ) -> dict[object, object]:
        """Return one optimizer of a rank.

        Args:
            place: prefix of the optimizer's array names.
            numbers: numbers of the optimizer's groups.
            keys_of_params: keys of the tensors that each of the rank's parameters holds, in order.
        """
        inner = f"{place}.{INNER[0]}" if self._has_masters else place
        state: dict[object, object] = {}
        groups: list[object] = []
        masters: list[object] = []

        # Number the parameters group by group.
        for at, number in enumerate(numbers):
            params = [keys for keys in keys_of_params if self._groups.group_of[keys[0]] == number]
            first = len(state)
            leaves: list[object] = []
            for i, keys in enumerate(params, start=first):
                state[i] = self._state(keys, f"{inner}.state.{i}", rank, coords)
                if self._has_master(keys[0]):
                    array_name = f"{place}.{MASTERS[0]}.{at}.{len(leaves)}"
                    leaves.append(self._leaf(MASTER, keys, array_name, rank, coords))
            settings = self._planned.copy_entries(
                self._groups.settings[number], f"{inner}.param_groups.{at}", coords
            )
            groups.append({**settings, "params": list(range(first, len(state)))})
            masters.append(leaves)

        # An optimizer without moments and steps (SGD) has no states, not empty ones.
        content: dict[object, object] = {"state": state, "param_groups": groups}
        if not self._moments and self._target.optimizer.step is None:
            state.clear()
        entries = self._planned.copy_entries(self._target.optimizer.entries, place, coords)
        if not self._has_masters:
            return {**content, **entries}
        return {INNER[0]: content, **entries, MASTERS[0]: masters}

    def _state(
        self, names: Sequence[str], place: str, rank: Rank, coords: Coords
    ) -> dict[object, object]:
        """Return the states of one parameter.

        Args:
            names: keys of the tensors that the parameter holds.
            place: prefix of the states' array names.
        """
        states: dict[object, object] = {}
        by_muon = self._is_by_muon(names[0])
        step = None if by_muon else self._target.optimizer.step
        if isinstance(step, TensorLeaf):
            tensor = self._target.catalog.tensor(step.key)
            array = PlannedArray(f"{place}.{STEP_NAME}", tensor.dtype, tensor.shape, coords=coords)
            self.beside.setdefault(step.key, []).append(array)
            states[STEP_NAME] = TensorLeaf(array.name)
        elif step is not None:
            states[STEP_NAME] = step
        for state in self._moments_by_muon[by_muon]:
            states[state] = self._leaf(state, names, f"{place}.{state}", rank, coords)
        return states

    def _leaf(
        self, state: str, names: Sequence[str], array_name: str, rank: Rank, coords: Coords
    ) -> TensorLeaf:
        """Plan the array of a state, and return its leaf in the file's tree."""
        keys = [state_key(state, name) for name in names]
        target = self._target
        array = param_array(
            array_name, keys, target.catalog.tensors, target.cuts, target.rules, coords=coords
        )
        self.arrays[array_name] = array
        parts = [part for _, part in array.parts] if isinstance(array, JoinedArray) else [array]
        for key, part in zip(keys, parts, strict=True):
            self._planned.add_shard(key, rank, part)
        return TensorLeaf(array_name)

    def fragments(self, key: str) -> Sequence[TargetFragment]:
        """Return the target's fragments of one state; all ranks must have been added."""
        return self._planned.fragments(key)
