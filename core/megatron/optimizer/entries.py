"""The entry ``optimizer``: an optimizer's settings and param groups, without its state tensors.

In megatron-core's common state (torch_dist, zarr)::

    optimizer                      FP32Optimizer: the next level's entries are here
    ├── optimizer
    │   ├── state: {common_step}   steps of all parameters, a tensor of one element;
    │   │                          the distributed optimizer has none
    │   └── param_groups: [{lr, betas, wd_mult, is_expert_parallel, step …}, …]
    ├── grad_scaler                fp16 only
    └── param_state_sharding_type  distributed optimizer: ``fully_reshardable`` …

    optimizer: {0: …, 1: …}        chained optimizers: of dense parameters, and of experts; Muon's
                                   precede Adam's

The parameters of a group are not listed: Megatron matches a stored group with the run's group that
has the same ``wd_mult``, ``lr_mult``, ``is_expert_parallel`` and ``is_decoupled_lr``.

In formats without a Megatron layout (DCP, torch, safetensors …), this project writes::

    optimizer
    ├── kind: "float16"            one of ``core.engine.catalog.optimizer_keys.KINDS``
    ├── common_step
    ├── omits_empty                as in ``core.engine.catalog.optimizer_keys.Optimizer``, if known
    ├── param_groups: [{lr, …, params: [global names]}, …]
    └── grad_scaler …

Source: Megatron-LM d98e8a64 and megatron-core 0.12.1, 0.16.1
``core/optimizer/{optimizer,distrib_optimizer}.py``, pinned in tests/golden (``mcore*_torch_dist``,
``mcore0121_zarr``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from core.engine.catalog.dropped import Dropped
from core.engine.catalog.optimizer_keys import KINDS, MASTER, STEP, Optimizer, ParamGroup
from core.errors import CorruptError, UnsupportedError
from core.megatron.optimizer.groups import is_muon, member_of
from core.pickle.inert import TensorLeaf, as_mapping, walk
from core.values import dataclass

SHARDING = "param_state_sharding_type"
FULLY_RESHARDABLE = "fully_reshardable"
MODEL_SPACE = "fully_sharded_model_space"
_TENSORS = frozenset(("state", "param_state", "fp32_from_fp16_params", "fp32_from_fp16"))
_OWN = frozenset(("kind", "common_step", "omits_empty", "param_groups", "state"))


@dataclass(frozen=True, slots=True)
class ParsedEntries:
    """The optimizer that an entry describes.

    Args:
        optimizer: kind, groups and other entries.
        steps: keys of the tensors that hold the number of steps; all are equal.
        sharding: the distributed optimizer's ``param_state_sharding_type``, or None if the entry
            has none.
        dropped: parts that are not read, with the reason.
    """

    optimizer: Optimizer
    steps: tuple[str, ...] = ()
    sharding: str | None = None
    dropped: tuple[Dropped, ...] = ()


def parse_entries(entry: object, *, states: Iterable[str]) -> ParsedEntries:
    """Parse the optimizer that an entry describes.

    Args:
        entry: inert tree, in one of the forms of the module's docstring.
        states: names of the states that have tensors, in order; the master weights are
            ``fp32_param``.

    Raises:
        UnsupportedError: the entry has an unknown form.
        CorruptError: chained optimizers are of different kinds, or a param group is not a dict.
    """
    mapping = as_mapping(entry)
    names = tuple(states)
    moments = tuple(name for name in names if name != MASTER) or ("exp_avg", "exp_avg_sq")
    if mapping is not None and mapping.get("kind") in KINDS:
        step, omits_empty = mapping.get("common_step"), mapping.get("omits_empty")
        optimizer = Optimizer(
            str(mapping["kind"]),
            tuple(_groups(mapping.get("param_groups"))),
            moments,
            TensorLeaf(STEP) if isinstance(step, TensorLeaf) else step,
            {str(name): value for name, value in mapping.items() if name not in _OWN},
            omits_empty if isinstance(omits_empty, bool) else None,
        )
        return ParsedEntries(optimizer, (step.key,) if isinstance(step, TensorLeaf) else ())
    chain = [
        _parse_member(member, moments, has_masters=MASTER in names)
        for member in _split_chain(entry)
    ]
    return _combine_chain(chain)


def _combine_chain(chain: Sequence[ParsedEntries]) -> ParsedEntries:
    """Combine chained optimizers into one.

    Raises:
        UnsupportedError: Muon is chained with a distributed optimizer.
        CorruptError: other optimizers are of different kinds.
    """
    groups = tuple(group for member in chain for group in member.optimizer.groups)
    if len({(member.optimizer.kind, member.sharding) for member in chain}) > 1:
        kinds = ", ".join(member.optimizer.kind for member in chain)
        if any(is_muon(group.settings) for group in groups):
            raise muon_chain_error(kinds)
        raise CorruptError(
            f"the chained optimizers are of different kinds: {kinds}", key="optimizer"
        )
    first = chain[0].optimizer

    # The global form holds entries such as the loss scaler once.
    dropped = [
        Dropped((f"{name} of optimizer {number}",), "only the entry of optimizer 0 is kept")
        for number, member in enumerate(chain[1:], start=1)
        for name in member.optimizer.entries
    ]

    # The distributed optimizer loads the steps of its groups, and ignores tensors that hold them.
    steps = tuple(dict.fromkeys(key for member in chain for key in member.steps))
    if first.kind == "distributed" and all("step" in group.settings for group in groups):
        steps = ()
    plain_steps = (m.optimizer.step for m in chain if m.optimizer.step is not None)
    step = TensorLeaf(STEP) if steps else next(plain_steps, None)
    optimizer = replace(first, groups=groups, step=step)
    return ParsedEntries(optimizer, steps, chain[0].sharding, tuple(dropped))


def muon_chain_error(kinds: str) -> UnsupportedError:
    """Return the error about Muon's optimizer that is chained with a distributed one.

    Args:
        kinds: kinds of the chained optimizers, in order.
    """
    return UnsupportedError(
        f"the optimizer chains Muon with an optimizer of a different kind ({kinds}), as "
        "Megatron-LM does with --use-distributed-optimizer, which is not supported",
        key="optimizer",
        hint="save with --no-use-layer-wise-param-layout, or drop the optimizer with --no-optim",
    )


def _split_chain(entry: object) -> list[Mapping[object, object]]:
    """Return the entries of the chained optimizers, or of the only one.

    Raises:
        UnsupportedError: an optimizer is not a dict.
    """
    # A chain is a dict by number (torch_dist) or a list (rank files).
    mapping = as_mapping(entry)
    items: list[object] = [entry]
    if mapping and all(isinstance(name, int) for name in mapping):
        items = [mapping[name] for name in sorted(mapping)]  # type: ignore[type-var]
    elif isinstance(entry, list) and entry:
        items = entry
    members: list[Mapping[object, object]] = [
        member for item in items if (member := as_mapping(item)) is not None
    ]
    if len(members) != len(items):
        raise UnsupportedError(
            "the optimizer's entry has an unknown format",
            key="optimizer",
            hint="drop the optimizer with --no-optim",
        )
    return members


def _parse_member(
    entry: Mapping[object, object], moments: tuple[str, ...], *, has_masters: bool
) -> ParsedEntries:
    """Read the entry that megatron-core writes for one optimizer of a chain, or for the only one.

    Steps that are tensors are not repeated in the optimizer's ``step``.
    """
    # Only the FP32 optimizer has no inner `optimizer`; only the distributed one is sharded.
    inner = as_mapping(entry.get("optimizer"))
    sharding = entry.get(SHARDING)
    if sharding is not None:
        kind = "distributed"
    else:
        kind = "float16" if inner is not None or has_masters else "fp32"
    settings = entry if inner is None else inner

    # The steps are one value or tensor of all parameters, or a tensor per parameter.
    state = as_mapping(settings.get("state")) or {}
    step = state.get("common_step", entry.get("common_step"))
    per_param = as_mapping(entry.get("param_state")) or {}
    leaves = [
        leaf.key for leaf in walk([step, *per_param.values()]) if isinstance(leaf, TensorLeaf)
    ]
    read = {"optimizer", "param_groups", "common_step", SHARDING} | _TENSORS
    optimizer = Optimizer(
        kind,
        tuple(_groups(settings.get("param_groups"))),
        moments,
        None if isinstance(step, TensorLeaf) else step,
        {str(name): value for name, value in entry.items() if name not in read},
    )
    return ParsedEntries(optimizer, tuple(leaves), None if sharding is None else str(sharding))


def _groups(value: object) -> Iterator[ParamGroup]:
    """Yield the groups of an entry ``param_groups``; none for None.

    Raises:
        CorruptError: the value is not a list of dicts.
    """
    if value is None:
        return
    for item in value if isinstance(value, list) else [None]:
        group = as_mapping(item)
        if group is None:
            raise CorruptError("a param group is not a dict", key="optimizer.param_groups")

        # Megatron lists parameters by number, which is of no use without the rank's files.
        params = group.get("params")
        is_named = isinstance(params, list) and all(isinstance(name, str) for name in params)
        yield ParamGroup(
            {str(name): setting for name, setting in group.items() if name != "params"},
            tuple(str(name) for name in params) if is_named and isinstance(params, list) else None,
        )


def common_entry(optimizer: Optimizer, *, sharding: str, is_layer_wise: bool = False) -> object:
    """Return the entry of megatron-core's common state.

    Args:
        sharding: ``param_state_sharding_type`` of a distributed optimizer.
        is_layer_wise: as for ``core.megatron.optimizer.groups.member_of``.
    """
    # Megatron chains Muon before Adam, and the experts' optimizer after that of the others.
    members: dict[tuple[bool, bool], list[ParamGroup]] = {}
    for group in optimizer.groups:
        member = member_of(group.settings, is_layer_wise=is_layer_wise)
        members.setdefault(member, []).append(group)
    if len(members) > 1:
        return {
            number: _member_entry(optimizer, members[member], sharding)
            for number, member in enumerate(sorted(members))
        }
    return _member_entry(optimizer, optimizer.groups, sharding)


def _member_entry(
    optimizer: Optimizer, groups: Sequence[ParamGroup], sharding: str
) -> dict[object, object]:
    """Return the entry of one optimizer of a chain, in megatron-core's form."""
    inner: dict[object, object] = {}
    counts_steps = optimizer.kind != "distributed" and not any(
        is_muon(group.settings) for group in groups
    )
    if optimizer.step is not None and counts_steps:
        inner["state"] = {"common_step": optimizer.step}
    inner["param_groups"] = [dict(group.settings) for group in groups]
    if optimizer.kind == "fp32":
        inner |= optimizer.entries.items()
        return inner
    entry: dict[object, object] = {"optimizer": inner}
    entry |= optimizer.entries.items()
    if optimizer.kind == "distributed":
        entry[SHARDING] = sharding
    return entry


def build_object_entry(optimizer: Optimizer) -> dict[object, object]:
    """Return the entry for formats without a Megatron layout."""
    entry: dict[object, object] = {"kind": optimizer.kind}
    if optimizer.step is not None:
        entry["common_step"] = optimizer.step
    if optimizer.omits_empty is not None:
        entry["omits_empty"] = optimizer.omits_empty
    entry["param_groups"] = [
        dict(group.settings) | ({} if group.params is None else {"params": list(group.params)})
        for group in optimizer.groups
    ]
    entry |= optimizer.entries.items()
    return entry
