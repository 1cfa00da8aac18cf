"""Experts of DeepSpeed's ``MoE`` layers, joined under their global numbers.

On disk, beside the files of the other parameters::

    layer_L_expert_E_mp_rank_00_model_states.pt   weights of expert E in the L-th MoE layer
    expert_E_mp_rank_00_model_states.pt           the same for all layers: old versions
    expp_rank_R_mp_rank_00_optim_states.pt        ZeRO-0: optimizer of expert-parallel rank R

The names in the files of weights have the global number of the expert. ``param_shapes`` and the
optimizer files have the number that it has on its rank::

    4 experts, ep_size 2           expert-parallel rank 0    expert-parallel rank 1
    deepspeed_experts.0            expert 0                  expert 2
    deepspeed_experts.1            expert 1                  expert 3

A flat group of experts is cut among the ranks that have the same experts: ranks k, k + ep_size …,
or, with ``use_data_before_expert_parallelism``, as many consecutive ranks. The weights in the files
of single experts are the rounded master weights, which proves the assignment: it is checked.

Versions: 0.3.17 and later. Not supported: experts with tensor parallelism, AutoEP.

Source: DeepSpeed 0.19.8 ``runtime/engine.py`` (``_save_moe_checkpoint``), ``utils/groups.py``
(``_create_expert_and_data_parallel``), ``runtime/zero/stage_1_and_2.py``; checkpoints that it
wrote, pinned in tests/golden/deepspeed_parallel.tar.xz.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.formats.deepspeed.partition import CutGroups, FlatGroup, cut_groups
from core.formats.deepspeed.runs import list_runs_in_groups, pair_with_copy
from core.megatron.optimizer.proof import is_master
from core.pickle.fields import mapping_or_empty

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.formats.deepspeed.model_states import ModelStates
    from core.formats.deepspeed.optim_states import OptimStates
    from core.formats.deepspeed.state_file import StateFile

_FILE = re.compile(r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_")
_NAME = re.compile(r"(?P<layer>.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(?P<number>\d+)\.")
_DATA_FIRST = "use_data_before_expert_parallelism"


def split_expert_name(name: str) -> tuple[str, int] | None:
    """Return the layer (the name before the number) and the number of a parameter's expert.

    Returns:
        None for parameters that do not belong to an expert.
    """
    match = _NAME.match(name)
    return None if match is None else (match["layer"], int(match["number"]))


def numbered(name: str, number: int) -> str:
    """Return the name that a parameter of an expert has in an expert of another number."""
    match = _NAME.match(name)
    assert match is not None
    return f"{match['layer']}{number}{name[match.end('number') :]}"


def with_experts(model: ModelStates, files: Sequence[StateFile]) -> ModelStates:
    """Return the model file with the weights of all experts, under their global numbers.

    Args:
        files: the files of single experts.

    Raises:
        MissingShardError: the file of an expert is missing.
        CorruptError: an expert is in the file of another one, or in two files.
    """
    _check_complete(model, [file.file for file in files])
    module = dict(model.module)
    for file in files:
        match = _FILE.match(file.file)
        assert match is not None
        for key, value in file.root.items():
            name = file.name(key, "the file")
            expert = split_expert_name(name)
            if expert is None or expert[1] != int(match["expert"]):
                raise file.mismatch(
                    f"the parameter does not belong to expert {int(match['expert'])}", key=name
                )
            if name in module:
                raise file.mismatch("another file also contains the parameter", key=name)
            module[name] = file.tensor(value, name)
    # Frozen parameters are listed under the numbers that experts have on rank 0; the files above
    # contain those of all ranks.
    frozen = {
        name: shape for name, shape in model.frozen.items() if split_expert_name(name) is None
    }
    return replace(model, module=module, frozen=frozen)


def _check_complete(model: ModelStates, files: Sequence[str]) -> None:
    """Check that there is a file for each expert that the model file counts.

    Raises:
        MissingShardError: names the first missing file.
    """
    # One number per MoE layer; old versions record a single one, and have no files per layer.
    recorded = model.other_entries.get("num_experts")
    if isinstance(recorded, (list, tuple)):
        expected = [
            f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
            for layer, count in enumerate(recorded)
            for expert in range(model.state.fields.read_int(count, f"num_experts[{layer}]"))
        ]
    else:
        count = model.state.fields.read_int(0 if recorded is None else recorded, "num_experts")
        expected = [f"expert_{expert}_mp_rank_00_model_states.pt" for expert in range(count)]
    for name in expected:
        if name not in files:
            raise MissingShardError(
                "an expert's file is missing",
                file=name,
                hint="copy the checkpoint again, with all its files",
            )


def cut_with_experts(
    store: ReadStore, model: ModelStates, optim: Sequence[OptimStates]
) -> CutGroups:
    """Return the partition of ZeRO-1 and 2 with groups of experts.

    Args:
        model: result of ``with_experts``.
        optim: the optimizer files by rank.

    Raises:
        CorruptError: shapes, sizes and weights contradict each other.
    """
    sizes = [[array.shape[0] for array in rank_optim.fp32] for rank_optim in optim]
    # The order of the ranks is a setting; without it, the weights tell which one was used.
    config = mapping_or_empty(model.other_entries.get("ds_config"))
    recorded = config.get(_DATA_FIRST, False) if config else None
    orders = [recorded] if isinstance(recorded, bool) else [False, True]
    problem: CorruptError | None = None
    for is_data_first in orders:
        groups = _groups(model, optim[0], is_data_first=is_data_first)
        try:
            partition = cut_groups(groups, sizes, alignment=optim[0].alignment)
            _check_weights(store, partition, model, optim)
        except CorruptError as err:
            problem = problem or err
        else:
            return partition
    assert problem is not None
    raise problem


def _groups(model: ModelStates, head: OptimStates, *, is_data_first: bool) -> list[FlatGroup]:
    """Return the groups of all parameters, those of experts once per expert-parallel rank.

    Args:
        head: the optimizer file of rank 0.
        is_data_first: consecutive ranks have the same experts.

    Raises:
        CorruptError: a group of experts contains other parameters, or experts without weights.
    """
    assert model.groups is not None
    experts: dict[str, set[int]] = {}
    for name in model.module:
        expert = split_expert_name(name)
        if expert is not None:
            experts.setdefault(expert[0], set()).add(expert[1])
    groups = []
    for number, shapes in enumerate(model.groups):
        count = head.counts[number] if head.counts else head.n_ranks
        if count == head.n_ranks:
            groups.append(FlatGroup(number, shapes, range(count)))
            continue
        if count == 0 or head.n_ranks % count:
            raise head.state.mismatch(
                f"group {number} is partitioned among {count} of {head.n_ranks} ranks"
            )
        ep_size = head.n_ranks // count
        for ep_rank in range(ep_size):
            ranks = (
                range(ep_rank * count, (ep_rank + 1) * count)
                if is_data_first
                else range(ep_rank, head.n_ranks, ep_size)
            )
            names = {}
            for name in shapes:
                expert = split_expert_name(name)
                if expert is None or expert[0] not in experts:
                    raise model.state.mismatch(
                        f"group {number} is partitioned among {count} of {head.n_ranks} ranks, but "
                        "the parameter does not belong to any expert that has a file",
                        key=name,
                    )
                layer, local = expert
                n_local, rest = divmod(len(experts[layer]), ep_size)
                if rest or local >= n_local:
                    raise model.state.mismatch(
                        f"{len(experts[layer])} experts cannot be divided evenly among {ep_size} "
                        "expert-parallel ranks",
                        key=name,
                    )
                names[numbered(name, ep_rank * n_local + local)] = name
            groups.append(
                FlatGroup(number, {new: shapes[old] for new, old in names.items()}, ranks, names)
            )
    return groups


def _check_weights(
    store: ReadStore, partition: CutGroups, model: ModelStates, optim: Sequence[OptimStates]
) -> None:
    """Check that the weights of experts are their rounded master weights.

    One parameter per group and expert-parallel rank is compared, in its first elements.

    Raises:
        CorruptError: names a parameter whose weights have another shape or are not those.
    """
    for group in partition.groups:
        if not group.stored_names:
            continue
        for name, shape in group.shapes.items():
            weights = model.module.get(name)
            if weights is None or weights.shape != shape:
                raise model.state.mismatch(
                    f"param_shapes lists shape {shape}, but the expert's file has "
                    f"{'no such parameter' if weights is None else f'shape {weights.shape}'}",
                    key=name,
                )
        # The largest parameter: biases are often zero.
        name = max(group.shapes, key=lambda key: prod(group.shapes[key]))
        runs = list_runs_in_groups(partition, name, [rank_optim.fp32 for rank_optim in optim])
        for _, masters, weights in islice(pair_with_copy(name, runs, model.module[name]), 1):
            try:
                is_rounded = is_master(store, masters, weights)
            except UnsupportedError as err:  # dtypes that are not those of a run with masters
                raise model.state.mismatch(err.message, key=name) from err
            if not is_rounded:
                raise model.state.mismatch(
                    "the expert's weights do not match its rounded master weights in the "
                    "optimizer files",
                    key=name,
                )


def local_names(partition: CutGroups) -> Mapping[str, str]:
    """Return the names in the optimizer files of parameters that have another one there."""
    return {name: old for group in partition.groups for name, old in group.stored_names.items()}
