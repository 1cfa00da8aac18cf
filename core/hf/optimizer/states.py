"""Views of a catalog in which one state of the optimizer takes the place of the weights.

::

    optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight       Megatron's global form
    optimizer.state.model.layers.0.mlp.gate_proj.weight.exp_avg          Hugging Face's names, as
    optimizer.state.model.layers.0.mlp.up_proj.weight.exp_avg            in DeepSpeed's checkpoints

A state has the shape of its parameter, so whatever fuses or splits a weight does the same to the
state. ``step`` is a number of steps (``core.hf.optimizer.steps``), not a state in this sense.

Not supported: states whose shape is not that of the parameter (Adafactor's factors), and states
under the parameters' numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import MASTER, STATES, split_state_key
from core.errors import UnsupportedError

STEP = "step"
"""The state that is a number of steps."""


def named_state_key(name: str, state: str) -> str:
    """Return the key of a state of a parameter with a Hugging Face name."""
    return f"{STATES}{name}.{state}"


def carrying_option(keys: Iterable[str]) -> str | None:
    """Return the option by which states under torch's names get the names of this module.

    Args:
        keys: keys of an optimizer, such as ``app.optim.state.model.norm.weight.exp_avg``.

    Returns:
        Such as ``--rename '^app\\.optim\\.=optimizer.'``; None if they have these names, or none of
        torch's.
    """
    prefixes = {
        start
        for key in keys
        if (start := key.partition("state.")[0]) != key and start.endswith(".")
    }
    prefixes.discard(STATES.removesuffix("state."))
    if len(prefixes) != 1:
        return None
    return f"--rename '^{re.escape(prefixes.pop())}=optimizer.'"


def named_state_of(catalog: Catalog, key: str) -> tuple[str, str] | None:
    """Split a key into (parameter, state); None unless it is a state of one of the weights."""
    if not key.startswith(STATES):
        return None
    name, _, state = key.removeprefix(STATES).rpartition(".")
    return (name, state) if name in catalog.tensors and state else None


def states_in_global_form(catalog: Catalog) -> list[str]:
    """Return the names of the states in Megatron's global form, in the order of the tensors."""
    return list(
        dict.fromkeys(
            pair[0] for key in catalog.tensors if (pair := split_state_key(key)) is not None
        )
    )


def states_by_name(catalog: Catalog) -> list[str]:
    """Return the names of the states under Hugging Face's names, without the number of steps."""
    states = dict.fromkeys(
        pair[1] for key in catalog.tensors if (pair := named_state_of(catalog, key)) is not None
    )
    return [state for state in states if state != STEP]


def view_of_global_state(catalog: Catalog, state: str) -> Catalog:
    """Return Megatron's global form with a state's tensors under the names of their parameters."""
    keys = {
        pair[1]: key
        for key in catalog.tensors
        if (pair := split_state_key(key)) is not None and pair[0] == state
    }
    return _view(catalog, keys)


def view_of_named_state(catalog: Catalog, state: str) -> Catalog:
    """Return a catalog with a state's tensors under the Hugging Face names of their parameters.

    Raises:
        UnsupportedError: a state has another shape than its parameter.
    """
    keys: dict[str, str] = {}
    for key, tensor in catalog.tensors.items():
        pair = named_state_of(catalog, key)
        if pair is None or pair[1] != state:
            continue
        shape = catalog.tensors[pair[0]].shape
        if tensor.shape != shape:
            raise UnsupportedError(
                f"the optimizer state has shape {tensor.shape}, but its parameter has shape "
                f"{shape}; only states with their parameter's shape can be converted to Megatron",
                key=key,
                hint="drop the optimizer with --no-optim",
            )
        keys[pair[0]] = key
    return _view(catalog, keys)


def _view(catalog: Catalog, keys: dict[str, str]) -> Catalog:
    """Return a catalog of other tensors; ``keys`` maps each new name to the stored key."""
    return replace(catalog, tensors={name: catalog.tensors[key] for name, key in keys.items()})


def with_masters(catalog: Catalog) -> Catalog:
    """Return a catalog whose float32 weights are master weights of the optimizer as well.

    A checkpoint that has only float32 weights, such as DeepSpeed's, needs no second copy. Megatron
    does, as soon as the weights are cast. Weights without states are not trained and get none.

    Args:
        catalog: weights and states under Hugging Face's names; without states, it is returned
            unchanged.
    """
    trained = {
        pair[0]
        for key in catalog.tensors
        if (pair := named_state_of(catalog, key)) is not None and pair[1] != STEP
    }
    masters = {
        key: name
        for name in catalog.tensors
        if name in trained
        and catalog.tensors[name].dtype == "float32"
        and (key := named_state_key(name, MASTER)) not in catalog.tensors
    }

    if not masters:
        return catalog

    states = {key: catalog.tensors[name] for key, name in masters.items()}
    return replace(catalog, tensors={**catalog.tensors, **states})
