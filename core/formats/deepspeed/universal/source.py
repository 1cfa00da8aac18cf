"""Preparing a source catalog for writing a universal checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from core.catalog.dropped import left_out
from core.catalog.optimizer_keys import is_optimizer_key
from core.catalog.tensor import Tensor
from core.formats.deepspeed.tree import OPTIMIZER, PARAM_GROUPS
from core.formats.deepspeed.universal.names import MASTER, STEP, STEP_COPY, state_of

if TYPE_CHECKING:
    from core.catalog.catalog import Catalog


NO_STATE = (
    "there is no optimizer state: ZeRO-1 and 2 load the weights and keep their own moments, ZeRO-3 "
    "loads the weights with load_module_only=True"
)


def for_universal(catalog: Catalog) -> Catalog:
    """Return the source with the tensors that a universal checkpoint stores.

    Call this before the target catalog is created. Master weights
    (``optimizer.state.<name>.fp32_param``) replace the weights, one of the steps is added a second
    time (``STEP_COPY``), and notes list what DeepSpeed will miss.

    Args:
        catalog: global tensors under their final names, with objects loaded.
    """
    state_of_key = {
        key: state_key
        for key in catalog.tensors
        if (state_key := state_of(key, catalog.tensors)) is not None
    }
    # Master weights take the names of the weights and of those tied to them, and stop being states.
    # Of the other states, each is a tensor of its own.
    masters = {name: key for key, (name, state) in state_of_key.items() if state == MASTER}
    master_of = {
        id(catalog.tensors[name]): catalog.tensors[key]
        for name, key in masters.items()
        if name in catalog.tensors
    }
    tensors: dict[str, Tensor] = {}
    for key, tensor in catalog.tensors.items():
        if key in masters:
            tensors[key] = catalog.tensors[masters[key]]
        elif state_of_key.get(key, ("", ""))[1] != MASTER:
            is_state = is_optimizer_key(key)
            tensors[key] = replace(tensor) if is_state else master_of.get(id(tensor), tensor)
    # ZeRO-3 reads the step from another file than ZeRO-1 and 2, and the steps of all parameters are
    # equal: write any of them twice.
    step = next((key for key, (_, state) in state_of_key.items() if state == STEP), None)
    hidden = dict(catalog.hidden)
    if step is not None:
        hidden[STEP_COPY] = tensors[step]

    notes = _notes(catalog, {state for _, state in state_of_key.values()})
    rounded = {name: catalog.tensors[name] for name in masters if name in catalog.tensors}
    record = (*catalog.dropped, *left_out(rounded, "rounded master weights, which are written"))
    result = replace(catalog, tensors=tensors, hidden=hidden, skeleton=None, dropped=record)
    return result.noted(notes)


def _notes(catalog: Catalog, states: set[str]) -> list[str]:
    """Return notes on missing optimizer state, with the consequences for DeepSpeed.

    Args:
        states: names of the states that are tensors.
    """
    objects = {
        state_key[1]
        for key in catalog.objects
        if (state_key := state_of(key, catalog.tensors)) is not None
    }
    if not (states | objects) - {MASTER}:
        return [NO_STATE]
    notes = []
    if STEP not in states | objects:
        notes.append(
            "there is no optimizer step: ZeRO-3 cannot load the optimizer's state, ZeRO-1 and 2 can"
        )
    if not any(key.startswith(f"{OPTIMIZER}.{PARAM_GROUPS}.") for key in catalog.objects):
        notes.append(
            "there are no param_groups: the run that loads the checkpoint keeps its own learning "
            "rate and other settings"
        )
    return notes
