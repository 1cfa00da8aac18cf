"""Names in a universal checkpoint, and the corresponding keys of a catalog."""

from __future__ import annotations

from collections.abc import Container, Mapping

from core.formats.deepspeed.tree import OPTIMIZER, STATE
from core.pickle.inert import Global, Inert, as_mapping, attributes

LATEST = "latest_universal"
ZERO = "zero"
MODEL_FILE = "mp_rank_00_model_states.pt"
ZERO_MODEL_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"
OPTIMIZER_FILE = "zero/optimizer_state.pt"
FP32 = "fp32"
STEP = "step"
PARAM = "param"
CAT_DIM = "cat_dim"

MASTER = "fp32_param"
STEP_COPY = "universal step"
"""Key of the hidden tensor that is the step in ``optimizer_state.pt``, see ``for_universal``."""

PACKAGES = frozenset({"deepspeed"})
"""Packages that the loader of a universal checkpoint can import, except torch and numpy."""
DS_VERSION = "0.19.8"
"""The version that is written if the source records none: that of the loader documented here."""

_SUBPARAM_KEY = "sub_param_shape"
_SUBPARAM_CLASS = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")


def plain_extras(extras: Mapping[str, object]) -> dict[str, object]:
    """Convert the description of a parameter's sharding to plain values.

    DeepSpeed's ``SubparamShape`` becomes a dict.
    """
    return {
        name: dict(fields)
        if name == _SUBPARAM_KEY and (fields := attributes(value)) is not None
        else value
        for name, value in extras.items()
    }


def stored_extras(extras: Mapping[object, object]) -> dict[object, object]:
    """Convert the description of a parameter's sharding to DeepSpeed's form.

    This is the inverse of ``plain_extras``.
    """
    stored = dict(extras)
    fields = as_mapping(stored.get(_SUBPARAM_KEY))
    if fields is not None:
        shape = Inert("newobj", _SUBPARAM_CLASS)
        shape.state = dict(fields)
        stored[_SUBPARAM_KEY] = shape
    return stored


def state_of(key: str, names: Container[str]) -> tuple[str, str] | None:
    """Split a key ``optimizer.state.<parameter>.<state>`` into parameter and state.

    Args:
        names: names of the parameters.

    Returns:
        None for other keys, and for states of other parameters.
    """
    prefix = f"{OPTIMIZER}.{STATE}."
    if not key.startswith(prefix):
        return None
    name, _, state = key.removeprefix(prefix).rpartition(".")
    return (name, state) if name in names and state else None
