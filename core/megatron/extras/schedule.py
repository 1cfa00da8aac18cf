"""The state of Megatron's learning rate scheduler, without which it loads no optimizer.

``opt_param_scheduler``
    The entry of Megatron-LM, which also reads ``lr_scheduler``, verl's name.
``lr_schedulers``
    The list of NeMo and Lightning. Its first item may be a state of Megatron's scheduler.

The schedule of other software has no counterpart in Megatron. Its place is taken by a constant one,
with the step that training has reached, and ``--override-opt_param-scheduler`` tells Megatron to
use the schedule of its own arguments.

Source: megatron-core 0.16.1 ``core/optimizer_param_scheduler.py`` (``load_state_dict``);
Megatron-LM d98e8a64 ``training/checkpointing.py`` (``load_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.pickle.fields import int_or_none, list_or_empty
from core.pickle.inert import as_mapping

OVERRIDE = "--override-opt_param-scheduler"
ENTRY = "opt_param_scheduler"
_OTHER_ENTRIES = ("lr_scheduler", "lr_schedulers")
_NEEDED = (
    ("max_lr", "start_lr"),
    ("min_lr",),
    ("lr_warmup_steps", "warmup_steps", "warmup_iter"),
    ("lr_decay_steps", "decay_steps", "end_iter"),
    ("lr_decay_style", "decay_style"),
    ("num_steps", "num_iters"),
)
"""Values that Megatron reads, each under one of several names."""


def build_constant_schedule(settings: Mapping[str, object], *, n_samples: int) -> dict[str, object]:
    """Return a state of Megatron's scheduler for a run of other software.

    Args:
        settings: those of the optimizer's first group.
        n_samples: number of samples that training has reached.
    """
    decay = settings.get("weight_decay", 0.0)
    return {
        "max_lr": settings.get("max_lr", settings.get("lr")),
        "lr_warmup_steps": 0,
        "num_steps": n_samples,
        "lr_decay_style": "constant",
        "lr_decay_steps": max(n_samples, 1),
        "min_lr": 0.0,
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": max(n_samples, 1),
    }


def is_constant_schedule(state: object) -> bool:
    """Return whether a scheduler's state is one of ``build_constant_schedule``."""
    fields = as_mapping(state) or {}
    n_samples = fields.get("num_steps")
    return type(n_samples) is int and fields == {
        **build_constant_schedule({}, n_samples=n_samples),
        **{name: fields.get(name) for name in ("max_lr", "start_wd", "end_wd")},
    }


def describe_position(n_samples: int) -> str:
    """Return the note on a schedule that is not carried."""
    position = (
        f"after {n_samples} samples"
        if n_samples
        else "at sample 0, because the source does not record how many samples it has trained on"
    )
    return (
        f"the learning rate schedule is not carried over, so start Megatron with {OVERRIDE}, which "
        f"makes Megatron use its own schedule, {position}"
    )


def with_schedule(catalog: Catalog) -> Catalog:
    """Return a model's global form whose optimizer has a scheduler's state, as Megatron needs."""
    common = catalog.common or {}
    if catalog.optimizer is None or not catalog.optimizer.groups:
        return catalog
    if any(as_mapping(common.get(name)) is not None for name in (ENTRY, _OTHER_ENTRIES[0])):
        return catalog
    listed = list_or_empty(common.get(_OTHER_ENTRIES[1]))
    state = as_mapping(listed[0]) if listed else None
    if state is not None and all(any(name in state for name in names) for names in _NEEDED):
        return replace(catalog, common={**common, ENTRY: state})
    n_samples = int_or_none(common.get("consumed_train_samples")) or 0
    schedule = build_constant_schedule(catalog.optimizer.groups[0].settings, n_samples=n_samples)
    catalog = replace(catalog, common={**common, ENTRY: schedule})
    return catalog.noted([describe_position(n_samples)])
