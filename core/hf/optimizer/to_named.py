"""Convert the optimizer of the global Megatron form to Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.optimizer_keys import MASTER, Optimizer
from core.engine.catalog.tensor import Tensor
from core.errors import UnsupportedError
from core.hf.name_tables import Pair
from core.hf.optimizer.groups import torch_groups
from core.hf.optimizer.states import (
    STEP,
    named_state_key,
    states_in_global_form,
    view_of_global_state,
)
from core.hf.optimizer.steps import step_of_megatron
from core.hf.tensors.hf_tensor import hf_tensors, list_padding
from core.megatron.model.args import fields_of
from core.megatron.optimizer.groups import is_muon


def hf_states(
    catalog: Catalog, optimizer: Optimizer, pairs: Mapping[str, Pair]
) -> tuple[dict[str, Tensor], dict[str, StoredObject], dict[str, Tensor]]:
    """Convert the states and groups of the optimizer.

    Returns:
        The states under Hugging Face's names; the groups as objects, by key; and rows of the states
        that are those of padding of the vocabulary, by any name.

    Raises:
        UnsupportedError: Muon trains some of the parameters, only some experts of a tensor have
            states, or the groups have different numbers of steps.
    """
    if any(is_muon(group.settings) for group in optimizer.groups):
        raise UnsupportedError(
            "Muon's momentum has no counterpart in the optimizers of Hugging Face models",
            hint="drop the optimizer with --no-optim",
        )
    tensors: dict[str, Tensor] = {}
    padding: dict[str, Tensor] = {}
    names_of: dict[str, list[str]] = {}
    for state in states_in_global_form(catalog):
        # A moment is not shifted with its weight; a master weight is.
        view = view_of_global_state(catalog, state)
        used = {
            name: pair if state == MASTER else replace(pair, shift=None)
            for name, pair in pairs.items()
            if name in view.tensors
        }
        _check_experts(pairs, used, state)
        for key, tensor in hf_tensors(view, used).items():
            tensors[named_state_key(key, state)] = tensor
        for name, rows in list_padding(view.tensors, used).items():
            padding[named_state_key(name, state)] = rows
        for name, pair in used.items():
            keys = [tensor.names[0] for tensor in pair.tensors] if pair.packed is None else []
            names_of[name] = keys or [pair.packed.key if pair.packed else name]

    # Every trained parameter has the number of steps: the first one the copies of all ranks, which
    # are compared, the others one of these.
    step = step_of_megatron(catalog, optimizer)
    if step is not None:
        one_copy = replace(step, tiling=lambda: step.fragments()[:1])
        for number, key in enumerate(dict.fromkeys(chain.from_iterable(names_of.values()))):
            tensors[named_state_key(key, STEP)] = step if number == 0 else one_copy
    objects = torch_groups(optimizer, names_of)
    samples = fields_of(catalog.args).get("consumed_train_samples")
    if type(samples) is int and samples > 0:
        objects["global_samples"] = StoredObject("global_samples", value=samples)
    return tensors, objects, padding


def _check_experts(all_pairs: Mapping[str, Pair], used: Mapping[str, Pair], state: str) -> None:
    """Raise unless all or none of the experts of a tensor that holds them all have a state.

    Raises:
        UnsupportedError: only some have it.
    """

    def shared_key(pair: Pair) -> str | None:
        """Return the name of the tensor of all experts, or of the first of several; else None."""
        if pair.packed is not None:
            return pair.packed.key
        return None if pair.entry is None else pair.tensors[0].names[0]

    shared = {key for pair in used.values() if (key := shared_key(pair)) is not None}
    for name, pair in all_pairs.items():
        if shared_key(pair) in shared and name not in used:
            raise UnsupportedError(
                f"this expert has no {state}, but other experts in {shared_key(pair)} do",
                key=name,
                hint="drop the optimizer with --no-optim",
            )
