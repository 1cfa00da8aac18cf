"""The content of a ``*_optim_states.pt`` file of DeepSpeed.

Names in parentheses are those of ZeRO-3::

    optimizer_state_dict
    ├── zero_stage, partition_count
    ├── single_partition_of_fp32_groups (fp32_flat_groups)
    │       flat master weights, one per group
    ├── base_optimizer_state (optimizer_state_dict)
    │       state: {group: {exp_avg …}}, param_groups
    └── param_slice_mappings (none)
            positions of the parameters in this rank's part

Source: DeepSpeed 0.19.8 ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py`` and
``runtime/bf16_optimizer.py`` (``state_dict``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from core.errors import CheckpointingException, UnsupportedError
from core.formats.deepspeed.files import UNIVERSAL_HINT
from core.formats.deepspeed.state_file import read_state_file
from core.pickle.fields import describe_value, int_or_none, mapping_or_empty
from core.pickle.inert import Inert, TensorLeaf, attributes
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore
    from core.formats.deepspeed.state_file import StateFile

OPTIMIZER_STATE = "optimizer_state_dict"
BASE_STATE = "base_optimizer_state"
FLAT_12 = "single_partition_of_fp32_groups"
FLAT_3 = "fp32_flat_groups"
SLICES = "param_slice_mappings"


@dataclass(frozen=True, slots=True)
class OptimStates:
    """A ``*_optim_states.pt`` file.

    Args:
        state: the file.
        stage: ZeRO stage, 1 to 3.
        n_ranks: number of such files that this one records.
        counts: per group, the number of ranks among which it is partitioned; groups of experts
            have fewer than ``n_ranks``. Empty if all groups have ``n_ranks``.
        fp32: this rank's part of the master weights, one flat array per group.
        states: per flat group, state name → tensor or value; {} for a group that was never stepped.
        param_groups: the settings of the optimizer's groups, as stored.
        slices: per group, parameter name → (first element in this rank's part, number of
            elements); None if it is not recorded.
        alignment: per group, the padding after each parameter, in elements; None if it is not
            recorded.
        other_entries: all other entries of the optimizer's state.
    """

    state: StateFile
    stage: int
    n_ranks: int
    counts: Sequence[int]
    fp32: Sequence[StoredArray]
    states: Sequence[Mapping[str, object]]
    param_groups: Sequence[Mapping[object, object]]
    slices: Sequence[Mapping[str, tuple[int, int]]] | None
    alignment: Sequence[Sequence[int]] | None
    other_entries: Mapping[str, object]


_MOST_VOTES = 3
"""Files that are asked for the number of ranks: one may be damaged, or from another run."""


def recorded_ranks(store: ReadStore, files: Iterable[str]) -> int | None:
    """Return the number of ranks that most of some ``*_optim_states.pt`` files record.

    Returns:
        None if none of them can be read.
    """
    votes: Counter[int] = Counter()
    for name in islice(files, _MOST_VOTES):
        with suppress(CheckpointingException):
            votes[parse_optim_states(read_state_file(store, name)).n_ranks] += 1
    return votes.most_common(1)[0][0] if votes else None


CONSUMED_OPTIM = frozenset({
    "zero_stage", "partition_count", "group_paddings", "param_alignment_paddings", "ds_version",
    "ds_zero_partition_groups", "universal_checkpoint_info",
    OPTIMIZER_STATE, BASE_STATE, FLAT_12, FLAT_3, SLICES,
})  # fmt: skip
"""Entries of the optimizer's state that are parsed, or that only describe the partition."""


def parse_optim_states(state: StateFile) -> OptimStates:
    """Parse the content of a ``*_optim_states.pt`` file.

    Raises:
        CorruptError: an entry is missing, of another type, or contradicts another one.
        UnsupportedError: groups are partitioned among different numbers of ranks (experts).
    """
    if OPTIMIZER_STATE not in state.root:
        raise state.corrupt(
            f"the entry {OPTIMIZER_STATE!r} is missing; this is not an optimizer states file"
        )
    root = state.fields.read_mapping(state.root[OPTIMIZER_STATE], OPTIMIZER_STATE)
    # The stage decides the names of the other entries. ``BF16_Optimizer`` (ZeRO-1) does not record
    # it.
    stage = enum_number(root.get("zero_stage"))
    if stage is None:
        if root.get("zero_stage") is not None:
            raise state.fields.build_error(root["zero_stage"], "zero_stage", "a number")
        stage = 3 if FLAT_3 in root else 1
    if stage not in (1, 2, 3):
        raise state.corrupt(f"zero_stage is {stage}, which has no optimizer files")
    flat_name, base_name = (FLAT_3, OPTIMIZER_STATE) if stage == 3 else (FLAT_12, BASE_STATE)
    if flat_name not in root:
        raise state.corrupt(f"{OPTIMIZER_STATE}.{flat_name}, which ZeRO-{stage} needs, is missing")
    # The master weights, then the states of the wrapped optimizer, by flat group.
    groups = state.fields.read_list(root[flat_name], flat_name)
    fp32 = [state.flat(group, f"{flat_name}[{number}]") for number, group in enumerate(groups)]
    states, param_groups = _base_state(state, root.get(base_name), base_name, len(fp32))
    counts = _partition_counts(state, root, stage)
    if len(set(counts)) > 1 and len(counts) != len(fp32):
        raise state.corrupt(
            f"partition_count has {len(counts)} groups, but there are {len(fp32)} flat groups"
        )
    return OptimStates(
        state=state,
        stage=stage,
        n_ranks=max(counts),
        counts=counts if len(set(counts)) > 1 else (),
        fp32=fp32,
        states=states,
        param_groups=param_groups,
        slices=_slices(state, root.get(SLICES), len(fp32)),
        alignment=_alignment(state, root.get("param_alignment_paddings"), len(fp32)),
        other_entries={
            str(name): value for name, value in root.items() if name not in CONSUMED_OPTIM
        },
    )


def enum_number(value: object) -> int | None:
    """Return the number of a stage, an int or a ``ZeroStageEnum``; None for other values."""
    if isinstance(value, Inert) and len(value.args) == 1:
        value = value.args[0]
    return int_or_none(value)


def _partition_counts(state: StateFile, root: Mapping[object, object], stage: int) -> list[int]:
    """Return the numbers of ranks among which the groups are partitioned.

    Returns:
        One number per group, or a single one that holds for all groups.

    Raises:
        CorruptError: the number is missing or malformed.
        UnsupportedError: the number differs between the groups of ZeRO-3.
    """
    if "partition_count" not in root:
        raise state.corrupt(f"{OPTIMIZER_STATE}.partition_count is missing")
    # One number, or one per group; ZeRO-3 may record it as well in ds_zero_partition_groups.
    stored = root["partition_count"]
    counts = [
        state.fields.read_int(count, "partition_count")
        for count in (stored if isinstance(stored, (list, tuple)) else [stored])
    ]
    path = "ds_zero_partition_groups"
    for partition in state.fields.read_list(root.get(path) or [], path):
        count = mapping_or_empty(partition).get("partition_count")
        counts += [count] if isinstance(count, int) else []
    if not counts:
        raise state.corrupt("partition_count is an empty list")
    # Groups of experts are partitioned among fewer ranks than the others. In ZeRO-3, only AutoEP
    # has them.
    if len(set(counts)) > 1 and stage == 3:
        raise UnsupportedError(
            "the groups are partitioned across different numbers of ranks "
            f"({', '.join(map(str, sorted(set(counts))))}), as for ZeRO-3 experts (AutoEP), which "
            "ckpt does not support",
            file=state.file,
            hint=UNIVERSAL_HINT,
        )
    return counts


def _base_state(
    state: StateFile, base: object, path: str, n_groups: int
) -> tuple[list[Mapping[str, object]], list[Mapping[object, object]]]:
    """Return the states of each flat group and the settings of the groups of the wrapped optimizer.

    Args:
        base: the entry of the wrapped optimizer.
        path: name of that entry, for messages.

    Raises:
        CorruptError: the entry is malformed, or has states of a group that does not exist.
    """
    if base is None:  # tools that shrink checkpoints remove it
        return [{} for _ in range(n_groups)], []
    reader = state.fields
    # The state dict of a torch optimizer; in elastic checkpoints only a list of its states.
    param_groups: list[Mapping[object, object]] = []
    if isinstance(base, (list, tuple)):
        by_number: Mapping[object, object] = dict(enumerate(base))
    else:
        root = reader.read_mapping(base, path)
        by_number = reader.read_mapping(root.get("state") or {}, f"{path}.state")
        settings = reader.read_list(root.get("param_groups") or [], f"{path}.param_groups")
        param_groups = [reader.read_mapping(group, f"{path}.param_groups") for group in settings]
    # The wrapped optimizer's parameters are the flat groups. One that was never stepped has no
    # states.
    for number in by_number:
        if type(number) is not int or not 0 <= number < n_groups:
            raise state.corrupt(
                f"{path}.state has an entry {describe_value(number)}, but there are {n_groups} "
                "flat groups"
            )
    states: list[Mapping[str, object]] = []
    for number in range(n_groups):
        entries = reader.read_mapping(by_number.get(number) or {}, f"{path}.state[{number}]")
        states.append({
            str(name): state.arrays[value.key] if isinstance(value, TensorLeaf) else value
            for name, value in entries.items()
        })  # fmt: skip
    return states, param_groups


def _slices(
    state: StateFile, stored: object, n_groups: int
) -> list[Mapping[str, tuple[int, int]]] | None:
    """Return the positions of parameters in this rank's part of each group; None if not recorded.

    Raises:
        CorruptError: the entry is malformed, or has another number of groups.
    """
    if stored is None:
        return None
    reader = state.fields
    groups = reader.read_list(stored, SLICES)
    if len(groups) != n_groups:
        raise state.corrupt(
            f"{SLICES} has {len(groups)} groups, but there are {n_groups} flat groups"
        )
    slices: list[Mapping[str, tuple[int, int]]] = []
    for group in groups:
        group_slices = {}
        for name, address in reader.read_mapping(group, SLICES).items():
            name = state.name(name, SLICES)
            # An object ``fragment_address``, or a dict with the same fields.
            fields = attributes(address) or mapping_or_empty(address)
            start = reader.read_int(fields.get("start"), f"{SLICES}.{name}.start")
            length = reader.read_int(fields.get("numel"), f"{SLICES}.{name}.numel")
            group_slices[name] = (start, length)
        slices.append(group_slices)
    return slices


def _alignment(state: StateFile, stored: object, n_groups: int) -> list[list[int]] | None:
    """Return the padding after each parameter of each group, in elements; None if not recorded.

    Raises:
        CorruptError: the entry is malformed, or has another number of groups.
    """
    path = "param_alignment_paddings"
    if stored is None:
        return None
    reader = state.fields
    groups = [reader.read_list(group, path) for group in reader.read_list(stored, path)]
    if len(groups) != n_groups:
        raise state.corrupt(
            f"{path} has {len(groups)} groups, but there are {n_groups} flat groups"
        )
    return [[reader.read_int(padding, path) for padding in group] for group in groups]
