"""The options that write only the model of a training checkpoint, under its own names.

A trainer saves model and optimizer in one tree, below names of its own (``app.model.…`` and
``app.optim.…`` of torchtitan and PyTorch's examples of FSDP2). What wraps the names of the model is
known if the optimizer has states by the names of parameters: they are those of the module.

PyTorch Lightning numbers its optimizers instead. In a file, or in DCP with ``meta.pt``::

    {"epoch": 3, "global_step": 120, "pytorch-lightning_version": "2.4.0",
     "state_dict": {"model.embed.weight": …}, "optimizer_states": […], "callbacks": {…}, …}

The module's parameters are below ``state_dict``, usually in one submodule (``model``); in the
directories of FSDPStrategy they are below ``model``.

Source: Lightning 2.6.6 ``pytorch/trainer/connectors/checkpoint_connector.py``.
"""

from __future__ import annotations

import shlex

from core.engine.catalog.catalog import AnyCatalog
from core.engine.catalog.key_patterns import find_shared_prefix
from core.engine.catalog.optimizer_keys import LIGHTNING_VERSION, is_optimizer_key

_STATE_DICTS = ("state_dict.", "model.")


def model_options(catalog: AnyCatalog, *, takes_submodule: bool = False) -> str | None:
    """Return the options that write only the model of a checkpoint, under its own names.

    Args:
        catalog: a catalog with the keys of the source.
        takes_submodule: remove the name of Lightning's submodule too, if it has all parameters.

    Returns:
        None if nothing wraps the names, or the optimizer does not show what.
    """
    if LIGHTNING_VERSION not in catalog.objects:
        prefix = _find_wrapper(catalog)
        return None if prefix is None else _spell_options(f"{prefix}*", prefix)
    prefix = next(
        (text for text in _STATE_DICTS if any(key.startswith(text) for key in catalog.tensors)),
        None,
    )
    if prefix is None:
        return None
    names = [key for key in catalog.tensors if key.startswith(prefix)]
    include = f"{prefix}*"
    modules = {name.removeprefix(prefix).partition(".")[0] for name in names}
    if takes_submodule and len(modules) == 1:
        prefix += f"{modules.pop()}."
    return _spell_options(include, prefix)


def _spell_options(include: str, prefix: str) -> str:
    """Return the options as a shell takes them."""
    return f"--include {shlex.quote(include)} --strip-prefix {shlex.quote(prefix)}"


def _find_wrapper(catalog: AnyCatalog) -> str | None:
    """Return the text before the names that the optimizer has for the parameters of a model.

    None if there is no such text, or the optimizer's own names begin with it as well.
    """
    weights = [key for key in catalog.tensors if not is_optimizer_key(key)]
    states = [key for key in catalog.tensors if is_optimizer_key(key)]
    if not weights or not states:
        return None
    names = find_shared_prefix(weights).split(".")[:-1]
    wrappers = [f"{'.'.join(names[:n])}." for n in range(1, len(names) + 1)]
    # The longest name by which the optimizer knows the first parameter is that of the module.
    for prefix in ("", *wrappers):
        if any(f".{weights[0][len(prefix) :]}." in state for state in states):
            is_shared = any(state.startswith(prefix) for state in states)
            return None if is_shared else prefix
    return None
