"""Parameter groups of an optimizer, from Megatron to torch's form and back.

::

    Megatron   two groups, and two more of experts: {lr, betas, eps, weight_decay, wd_mult, lr_mult,
               is_expert_parallel, is_decoupled_lr, max_lr, min_lr, step …}
    torch      any number of groups: {lr, betas, eps, weight_decay, … params}, as objects
               optimizer.param_groups.<number>.<setting>, or
               optimizer.param_groups.<parameter>.<setting> as torch flattens them

To torch, only settings that torch.optim's Adam and SGD know are written. Groups that then are equal
become one; groups with weight decay come first, because DeepSpeed's ZeRO-3 applies the settings of
the first group to all.

To Megatron, groups are formed anew, as Megatron matches a group by ``wd_mult`` and others: biases
and vectors have no weight decay. Its scheduler sets the learning rate and the weight decay of a
group before every step, so a difference matters only where the source gave single parameters a
learning rate or a weight decay of their own. Groups that differ in other settings are refused.

Source: megatron-core 0.16.1 ``core/optimizer/__init__.py``, ``core/optimizer_param_scheduler.py``;
DeepSpeed 0.19.8 ``runtime/base_optimizer.py``, ``runtime/zero/stage3.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.dropped import Dropped, dropped_together
from core.engine.catalog.optimizer_keys import Optimizer, ParamGroup
from core.errors import UnsupportedError
from core.hf.optimizer.states import STEP
from core.megatron.optimizer.groups import Policy

PARAM_GROUPS = "optimizer.param_groups."
_PARAMS = "params"
_OF_TORCH = (
    "lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "maximize",
    "momentum", "dampening", "nesterov",
)  # fmt: skip
"""Settings of torch.optim's Adam and SGD, and of the fused Adam of Apex, TE and DeepSpeed."""
_OF_MEGATRON = {
    "lr_mult": 1.0,
    "is_expert_parallel": False,
    "is_decoupled_lr": False,
    "default_config": True,
}
"""Settings by which Megatron finds a group of ordinary parameters."""


def torch_groups(
    optimizer: Optimizer, names_of: Mapping[str, Sequence[str]]
) -> dict[str, StoredObject]:
    """Return the groups of a Megatron optimizer in torch's form, as objects by key.

    Args:
        optimizer: the optimizer, whose groups list their parameters.
        names_of: Megatron's name of every trained parameter → its Hugging Face names.
    """
    groups: dict[str, tuple[dict[str, object], list[str]]] = {}
    for group in optimizer.groups:
        settings = {
            name: group.settings[name] for name in _OF_TORCH if group.settings.get(name) is not None
        }
        names = [hf for name in group.params or () for hf in names_of.get(name, ())]
        if names:
            groups.setdefault(repr(settings), (settings, []))[1].extend(names)
    ordered = sorted(groups.values(), key=lambda group: not group[0].get("weight_decay"))
    entries = {
        f"{PARAM_GROUPS}{number}.{name}": value
        for number, (settings, names) in enumerate(ordered)
        for name, value in {**settings, _PARAMS: list(dict.fromkeys(names))}.items()
    }
    return {key: StoredObject(key, value=value) for key, value in entries.items()}


def record_other_settings(catalog: Catalog) -> tuple[Dropped, ...]:
    """Return the record of the settings of torch's groups that Megatron's groups do not have.

    Args:
        catalog: weights, states and groups under Hugging Face's names.
    """
    keys = (key for key in catalog.objects if key.startswith(PARAM_GROUPS))
    names = dict.fromkeys(key.rpartition(".")[2] for key in keys)
    others = [f"{PARAM_GROUPS}*.{name}" for name in names if name not in (*_OF_TORCH, _PARAMS)]
    return dropped_together(others, "settings that Megatron's optimizer does not have")


def megatron_groups(
    catalog: Catalog, trained: Mapping[str, tuple[int, str]], *, n_steps: int | None
) -> tuple[list[ParamGroup], list[str]]:
    """Form the groups of a Megatron optimizer that continues a run of other software.

    Args:
        catalog: weights, states and groups under Hugging Face's names.
        trained: Megatron's name of each trained parameter → number of its axes, and the Hugging
            Face name of its first part.
        n_steps: the number of steps taken; None if it is not recorded.

    Returns:
        The groups with their parameters, and notes for the user.

    Raises:
        UnsupportedError: the source has no settings of a parameter, or its groups differ in
            settings that Megatron has once, such as betas.
    """
    settings_of = _settings_by_name(catalog)
    members: dict[bool, list[str]] = {False: [], True: []}
    for name, (n_axes, _) in trained.items():
        traits = Policy().traits(name, n_axes, is_expert=False)
        assert traits is not None, "the policy trains all parameters"
        members[traits.is_exempt].append(name)

    # A group has the settings of its first parameter with weight decay, as embeddings often have
    # none, and Megatron's own.
    groups = []
    for is_exempt, names in members.items():
        if not names:
            continue
        hf_names = [trained[name][1] for name in names]
        hf = next((hf for hf in hf_names if hf not in settings_of), None)
        if hf is not None:
            raise UnsupportedError(
                "no parameter group records the optimizer's settings for this parameter",
                key=hf,
                hint="drop the optimizer with --no-optim",
            )
        decayed = (hf for hf in hf_names if settings_of[hf].get("weight_decay"))
        settings = settings_of[next(decayed, hf_names[0])]
        own: dict[str, object] = {name: settings[name] for name in _OF_TORCH if name in settings}
        own |= _OF_MEGATRON
        own["wd_mult"] = 0.0 if is_exempt else 1.0
        if "betas" in own:  # the fused Adam of Apex and TE reads it from the checkpoint
            own.setdefault("bias_correction", True)
        if is_exempt:
            own["weight_decay"] = 0.0
        if n_steps is not None:
            own[STEP] = n_steps
        groups.append(ParamGroup(own, tuple(names)))
    return groups, _notes(groups, trained, settings_of)


def _notes(
    groups: Sequence[ParamGroup],
    trained: Mapping[str, tuple[int, str]],
    settings_of: Mapping[str, Mapping[str, object]],
) -> list[str]:
    """Return notes on settings that Megatron's groups do not keep.

    Raises:
        UnsupportedError: parameters of a group differ in other settings than rates and decay.
    """
    rates = {repr(settings_of[hf].get("lr")) for _, hf in trained.values()}
    notes = []
    if len(rates) > 1:
        notes.append(
            f"the source's parameter groups have {len(rates)} different learning rates, but "
            "Megatron's schedule uses the same rate for all parameters"
        )
    if any(
        settings_of[hf].get("decoupled_weight_decay") is False
        and settings_of[hf].get("weight_decay")
        for _, hf in trained.values()
    ):
        notes.append(
            "the source's Adam adds weight decay to the gradients (L2), but Megatron decouples "
            "weight decay, as AdamW does, unless decoupled_weight_decay is off in its "
            "OptimizerConfig"
        )
    for group in groups:
        hf_names = [trained[name][1] for name in group.params or ()]
        decay = group.settings.get("weight_decay")
        others = {hf: settings_of[hf].get("weight_decay") for hf in hf_names}
        changed = sorted(hf for hf, own in others.items() if (own or 0.0) != (decay or 0.0))
        if changed and group.settings["wd_mult"]:
            values = sorted({str(others[hf] or 0.0) for hf in changed})
            several = f"{len(changed)} matrices such as " if changed[1:] else "the matrix "
            notes.append(
                f"{several}{changed[0]} had weight decay {', '.join(values)}, but Megatron's "
                f"groups use {decay} for all matrices"
            )
        elif changed:
            several = f"{len(changed)} biases and vectors" if changed[1:] else changed[0]
            notes.append(
                f"{several} had weight decay, but Megatron exempts biases and vectors from it "
                "(wd_mult 0)"
            )
    # All groups of Megatron get these from the same arguments.
    for name in _OF_TORCH:
        if name in ("lr", "weight_decay"):
            continue
        first = next(iter(settings_of[hf].get(name) for _, hf in trained.values()), None)
        other = next((hf for _, hf in trained.values() if settings_of[hf].get(name) != first), None)
        if other is not None:
            raise UnsupportedError(
                f"the optimizer's parameter groups differ in {name} ({first!r:.40} and "
                f"{settings_of[other].get(name)!r:.40}), but Megatron has a single value for all "
                "parameters",
                key=other,
                hint="drop the optimizer with --no-optim",
            )
    return notes


def _settings_by_name(catalog: Catalog) -> dict[str, Mapping[str, object]]:
    """Return the settings of each parameter's group, by its Hugging Face name."""
    by_owner: dict[str, dict[str, object]] = {}
    for key, item in catalog.objects.items():
        if key.startswith(PARAM_GROUPS):
            owner, _, setting = key.removeprefix(PARAM_GROUPS).rpartition(".")
            by_owner.setdefault(owner, {})[setting] = item.value
    result: dict[str, Mapping[str, object]] = {}
    for owner, settings in by_owner.items():
        names = settings.get(_PARAMS)
        for name in names if isinstance(names, (list, tuple)) else (owner,):
            result[str(name)] = settings
    return result
