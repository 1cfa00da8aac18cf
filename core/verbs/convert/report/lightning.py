"""PyTorch Lightning's checkpoints: the options that write only the model, under its own names.

In a file, or in DCP with ``meta.pt``::

    {"epoch": 3, "global_step": 120, "pytorch-lightning_version": "2.4.0",
     "state_dict": {"model.embed.weight": …}, "optimizer_states": […], "callbacks": {…}, …}

The module's parameters are below ``state_dict``, usually in one submodule (``model``); in the
directories of FSDPStrategy they are below ``model``.

Source: Lightning 2.6.6 ``pytorch/trainer/connectors/checkpoint_connector.py``.
"""

from __future__ import annotations

import shlex

from core.engine.catalog.catalog import AnyCatalog

_VERSION = "pytorch-lightning_version"
_STATE_DICTS = ("state_dict.", "model.")


def model_options(catalog: AnyCatalog, *, takes_submodule: bool = False) -> str | None:
    """Return the options that write only the model of a Lightning checkpoint.

    Args:
        catalog: a catalog with the keys of the source.
        takes_submodule: remove the name of the submodule too, if it has all parameters.

    Returns:
        None if the checkpoint is not Lightning's, or the keys have changed.
    """
    prefix = next(
        (text for text in _STATE_DICTS if any(key.startswith(text) for key in catalog.tensors)),
        None,
    )
    if prefix is None or _VERSION not in catalog.objects:
        return None
    names = [key for key in catalog.tensors if key.startswith(prefix)]
    include = f"{prefix}*"
    modules = {name.removeprefix(prefix).partition(".")[0] for name in names}
    if takes_submodule and len(modules) == 1:
        prefix += f"{modules.pop()}."
    return f"--include {shlex.quote(include)} --strip-prefix {shlex.quote(prefix)}"
