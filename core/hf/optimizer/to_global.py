"""Convert the states of an optimizer from Hugging Face's names to the global Megatron form."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Set
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import MASTER, STATES, Optimizer, state_key
from core.errors import MissingShardError, UnsupportedError
from core.hf.name_tables import Pair
from core.hf.optimizer.states import (
    STEP,
    named_state_key,
    named_state_of,
    states_by_name,
    view_of_named_state,
)
from core.hf.tensors.global_tensor import GlobalTensor, global_tensor
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class ConvertedStates:
    """The optimizer's states in the global form.

    Args:
        tensors: key in the global form → tensor.
        used: tensors of the source that they consist of, and the numbers of steps.
        params: Megatron's names of the trained parameters.
        names: names of the states.
    """

    tensors: Mapping[str, GlobalTensor]
    used: Set[str]
    params: tuple[str, ...]
    names: tuple[str, ...]

    def kept(self, optimizer: Optimizer) -> dict[str, GlobalTensor]:
        """Return the tensors that an optimizer of its kind has."""
        return {
            key: tensor
            for key, tensor in self.tensors.items()
            if optimizer.kind != "fp32" or not key.startswith(f"{STATES}{MASTER}.")
        }


NO_STATES = ConvertedStates({}, frozenset(), (), ())


def convert_states(
    catalog: Catalog, pairs: Iterable[Pair], weights: Mapping[str, GlobalTensor]
) -> ConvertedStates:
    """Convert the states of an optimizer like the weights.

    Args:
        catalog: weights and states under Hugging Face's names.
        pairs: the pairs of the model.
        weights: the weights in the global form.

    Raises:
        UnsupportedError: a tensor is only partly trained, or a state has another shape than its
            parameter.
        MissingShardError: a parameter lacks a state that others have.
    """
    names = states_by_name(catalog)
    views = {state: view_of_named_state(catalog, state) for state in names}
    tensors: dict[str, GlobalTensor] = {}
    params: list[str] = []
    used = {
        key
        for key in catalog.tensors
        if (owned := named_state_of(catalog, key)) is not None and owned[1] == STEP
    }
    for pair in pairs:
        name = pair.names[0]
        weight = weights[name]
        keys = [key for key in weight.used if key not in weight.copies]
        trained = [key for key in keys if any(key in view.tensors for view in views.values())]
        if not trained:
            continue
        if len(trained) < len(keys):
            raise UnsupportedError(
                f"the optimizer trains {trained[0]} but not {_first_missing(keys, trained)}, "
                "although Megatron stores both in one tensor",
                key=name,
                hint="drop the optimizer with --no-optim",
            )
        params.append(name)
        for state, view in views.items():
            if any(key not in view.tensors for key in keys):
                if state == MASTER:  # weights that are float32 need none
                    continue
                missing = _first_missing(keys, view.tensors)
                raise MissingShardError(
                    f"the optimizer has {state} for other parameters, but not for this parameter",
                    key=missing,
                    hint="drop the optimizer with --no-optim",
                )
            # A moment is not shifted with its weight; redundant copies of a weight have no states.
            shift = pair.shift if state == MASTER else None
            tensor = global_tensor(view, replace(pair, shift=shift, copies=(), twins=()))
            tensors[state_key(state, name)] = tensor
            used |= {named_state_key(part, state) for part in tensor.used}
    return ConvertedStates(tensors, frozenset(used), tuple(params), tuple(names))


def _first_missing(keys: Iterable[str], names: Container[str]) -> str:
    """Return the first key that is not among the names."""
    return next(key for key in keys if key not in names)
