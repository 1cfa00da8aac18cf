"""Sum up the states of an optimizer, which ``ckpt inspect`` shows on one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from core.engine.catalog.optimizer_keys import MOMENTS, is_optimizer_key
from core.engine.catalog.tensor import Tensor
from core.megatron.optimizer.form import role_of
from core.values import dataclass

_ALGORITHMS = (
    ({"momentum_buffer", "exp_avg", "exp_avg_sq"}, "Muon with Adam"),
    ({"exp_avg", "exp_avg_sq"}, "Adam"),
    ({"exp_avg", "exp_inf"}, "Adamax"),
    ({"momentum_buffer"}, "SGD with momentum, or Muon"),
    ({"m", "vmean"}, "Adam-mini"),
)
"""States that an algorithm has, and its name; the first row whose states all exist decides."""


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """The states of an optimizer.

    Args:
        algorithm: name of the algorithm; None if its states do not tell.
        bytes_of: name of a state (``exp_avg``, ``fp32 masters``, ``step``) → bytes of all tensors.
    """

    algorithm: str | None
    bytes_of: dict[str, int]


def is_state(key: str) -> bool:
    """Return whether a tensor belongs to an optimizer.

    Args:
        key: name of the tensor, without the rank directory.
    """
    return role_of(key) in ("moments", "masters") or is_optimizer_key(key)


def states_of(
    tensors: Mapping[str, Tensor], *, bare: Callable[[str], str] = str
) -> OptimizerStates:
    """Sum up the tensors of an optimizer by state, in order of first appearance, moments first.

    Args:
        bare: returns a key without its rank directory.
    """
    bytes_of: dict[str, dict[str, int]] = {"moments": {}, "masters": {}, "other": {}}
    for full_key, tensor in tensors.items():
        key = bare(full_key)
        parts = key.split(".")
        role = role_of(key)
        if role == "moments":
            name = next(part for part in parts if part in MOMENTS)
        elif role == "masters":
            is_float32 = tensor.dtype == "float32"
            name = "fp32 masters" if is_float32 else f"master weights in {tensor.dtype}"
        else:
            name = next((part for part in reversed(parts) if not part.isdigit()), key)
        sums = bytes_of.get(role, bytes_of["other"])
        sums[name] = sums.get(name, 0) + tensor.n_bytes
    names = bytes_of["moments"].keys() | bytes_of["other"].keys()
    algorithm = next((name for states, name in _ALGORITHMS if states <= names), None)
    return OptimizerStates(
        algorithm, {name: size for sums in bytes_of.values() for name, size in sums.items()}
    )
