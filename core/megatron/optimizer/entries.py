"""What a checkpoint says of its optimizer beside the tensors, as an entry of its common state or as an object.

megatron-core's common state (torch_dist, zarr), the tensors being elsewhere::

    optimizer                              FP32Optimizer: itself the next level
    ├── optimizer
    │   ├── state: {common_step}           the steps of all parameters, a tensor of one element; not with distributed
    │   └── param_groups: [{lr, betas, wd_mult, is_expert_parallel, step …}, …]
    ├── grad_scaler                        with fp16
    └── param_state_sharding_type          the distributed optimizer: ``fully_reshardable`` …

    optimizer: {0: …, 1: …}                chained ones: of what all share, and of experts

Which parameters a group has is not said: Megatron tells by its own groups, which have the same ``wd_mult``,
``lr_mult``, ``is_expert_parallel`` and ``is_decoupled_lr``.

Formats without a layout (DCP, torch, safetensors …) get one of this project's::

    optimizer
    ├── kind: "float16"                    ``core.catalog.optimizer_keys.KINDS``
    ├── common_step
    ├── omits_empty                        as in ``core.catalog.optimizer_keys.Optimizer``, where it is known
    ├── param_groups: [{lr, …, params: [global names]}, …]
    └── grad_scaler …

Source: Megatron-LM d98e8a64 and megatron-core 0.12.1, 0.16.1 ``core/optimizer/{optimizer,distrib_optimizer}.py``,
pinned in tests/golden (``mcore*_torch_dist``, ``mcore0121_zarr``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from core.catalog.optimizer_keys import KINDS, MASTER, STEP, Optimizer, ParamGroup
from core.errors import CorruptError, UnsupportedError
from core.pickle.inert import TensorLeaf, as_mapping, walk

SHARDING = "param_state_sharding_type"
FULLY_RESHARDABLE = "fully_reshardable"
MODEL_SPACE = "fully_sharded_model_space"
_TENSORS = frozenset(("state", "param_state", "fp32_from_fp16_params", "fp32_from_fp16"))
_OWN = frozenset(("kind", "common_step", "omits_empty", "param_groups", "state"))


@dataclass(frozen=True, slots=True)
class ReadEntries:
    """The optimizer of an entry.

    Args:
        optimizer: what it is.
        steps: keys of the tensors that are the number of steps; all are equal.
        sharding: how the distributed optimizer's states are kept, or None where it does not say.
        dropped: what is left out, with the reason.
    """

    optimizer: Optimizer
    steps: tuple[str, ...] = ()
    sharding: str | None = None
    dropped: tuple[str, ...] = ()


def read_entries(entry: object, *, states: Iterable[str]) -> ReadEntries:
    """The optimizer that an entry describes.

    Args:
        entry: inert, as in the module's docstring.
        states: names of the states that there are tensors of, in order; masters are called ``fp32_param``.

    Raises:
        UnsupportedError: the entry is of no known form.
        CorruptError: chained optimizers are of different kinds.
    """
    found = as_mapping(entry)
    names = tuple(states)
    moments = tuple(name for name in names if name != MASTER)
    if found is not None and found.get("kind") in KINDS:
        return _own(found, moments)
    members = _members(entry)
    read = [_member(member, has_masters=MASTER in names) for member in members]
    if len({(one.kind, one.sharding) for one in read}) > 1:
        raise CorruptError("the chained optimizers are of different kinds", key="optimizer")
    head = read[0]
    dropped = [
        f"optimizer {number}'s {name} (the first one's is kept)"
        for number, one in enumerate(read[1:], start=1)
        for name in one.entries
    ]
    groups = tuple(group for one in read for group in one.groups)
    leaves = tuple(dict.fromkeys(key for one in read for key in one.steps))
    if all("step" in group.settings for group in groups) and head.kind == "distributed":
        leaves = ()  # that of the groups is what the distributed optimizer loads
    step: object = TensorLeaf(STEP) if leaves else next((one.step for one in read if one.step is not None), None)
    return ReadEntries(
        Optimizer(head.kind, groups, moments or ("exp_avg", "exp_avg_sq"), step, head.entries),
        leaves,
        head.sharding,
        tuple(dropped),
    )


def _members(entry: object) -> list[Mapping[object, object]]:
    """The chained optimizers of an entry, or the only one."""
    found = as_mapping(entry)
    items: list[object] = [entry]
    if found and all(isinstance(name, int) for name in found):
        items = [found[name] for name in sorted(found)]  # type: ignore[type-var]
    elif isinstance(entry, list) and entry:
        items = entry
    members: list[Mapping[object, object]] = [mapping for item in items if (mapping := as_mapping(item)) is not None]
    if len(members) != len(items):
        raise UnsupportedError(
            "the optimizer's entry is in no form that is known", key="optimizer", hint="leave it out with --no-optim"
        )
    return members


@dataclass(frozen=True, slots=True)
class _Member:
    """One of chained optimizers; see ``Optimizer``."""

    kind: str
    groups: tuple[ParamGroup, ...]
    step: object
    steps: tuple[str, ...]
    entries: Mapping[str, object]
    sharding: str | None


def _member(entry: Mapping[object, object], *, has_masters: bool) -> _Member:
    inner = as_mapping(entry.get("optimizer"))
    is_wrapped = inner is not None
    sharding = entry.get(SHARDING)
    kind = "distributed" if sharding is not None else "float16" if is_wrapped or has_masters else "fp32"
    settings = entry if inner is None else inner
    state = as_mapping(settings.get("state")) or {}
    step = state.get("common_step", entry.get("common_step"))
    per_param = as_mapping(entry.get("param_state")) or {}
    leaves = [leaf.key for leaf in walk([step, *per_param.values()]) if isinstance(leaf, TensorLeaf)]
    left = {"optimizer", "param_groups", "common_step", SHARDING} | _TENSORS
    return _Member(
        kind,
        tuple(_groups(settings.get("param_groups"))),
        None if isinstance(step, TensorLeaf) else step,
        tuple(leaves),
        {str(name): value for name, value in entry.items() if name not in left},
        None if sharding is None else str(sharding),
    )


def _groups(value: object) -> Iterable[ParamGroup]:
    """The groups of a list of them.

    Raises:
        CorruptError: it is no list of dicts.
    """
    for item in value if isinstance(value, list) else ([] if value is None else [None]):
        group = as_mapping(item)
        if group is None:
            raise CorruptError("a parameter group is no dict", key="optimizer.param_groups")
        params = group.get("params")
        is_named = isinstance(params, list) and all(isinstance(name, str) for name in params)
        yield ParamGroup(
            {str(name): setting for name, setting in group.items() if name != "params"},
            tuple(str(name) for name in params) if is_named and isinstance(params, list) else None,
        )


def _own(entry: Mapping[object, object], moments: tuple[str, ...]) -> ReadEntries:
    step = entry.get("common_step")
    optimizer = Optimizer(
        str(entry["kind"]),
        tuple(_groups(entry.get("param_groups"))),
        moments or ("exp_avg", "exp_avg_sq"),
        TensorLeaf(STEP) if isinstance(step, TensorLeaf) else step,
        {str(name): value for name, value in entry.items() if name not in _OWN},
        omits if isinstance(omits := entry.get("omits_empty"), bool) else None,
    )
    return ReadEntries(optimizer, (step.key,) if isinstance(step, TensorLeaf) else ())


def common_entry(optimizer: Optimizer, *, sharding: str) -> object:
    """The entry of megatron-core's common state.

    Args:
        sharding: how a distributed optimizer's states are kept.
    """
    dense = [group for group in optimizer.groups if not group.is_expert]
    expert = [group for group in optimizer.groups if group.is_expert]
    if dense and expert:
        return {number: _common(optimizer, part, sharding) for number, part in enumerate((dense, expert))}
    return _common(optimizer, optimizer.groups, sharding)


def _common(optimizer: Optimizer, groups: Iterable[ParamGroup], sharding: str) -> dict[object, object]:
    inner: dict[object, object] = {}
    if optimizer.step is not None and optimizer.kind != "distributed":
        inner["state"] = {"common_step": optimizer.step}
    inner["param_groups"] = [dict(group.settings) for group in groups]
    if optimizer.kind == "fp32":
        inner |= optimizer.entries.items()
        return inner
    made: dict[object, object] = {"optimizer": inner}
    made |= optimizer.entries.items()
    if optimizer.kind == "distributed":
        made[SHARDING] = sharding
    return made


def object_entry(optimizer: Optimizer) -> dict[object, object]:
    """The entry of formats without a layout."""
    groups = [
        dict(group.settings) | ({} if group.params is None else {"params": list(group.params)})
        for group in optimizer.groups
    ]
    made: dict[object, object] = {"kind": optimizer.kind}
    if optimizer.step is not None:
        made["common_step"] = optimizer.step
    if optimizer.omits_empty is not None:
        made["omits_empty"] = optimizer.omits_empty
    made["param_groups"] = groups
    made |= optimizer.entries.items()
    return made
