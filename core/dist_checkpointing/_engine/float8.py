"""Tensors of Transformer Engine that hold eight-bit floats and scales, and pass for tensors of a wider dtype."""

from __future__ import annotations

from typing import Any

import torch

_PACKAGES = ("transformer_engine", "transformer_engine_torch")
_CLASSES = frozenset({"Float8Tensor", "QuantizedTensor"})


def is_float8tensor(tensor: Any) -> bool:
    """Whether it is such a tensor; Transformer Engine need not be installed for this.

    Source: Transformer Engine 1.x (``Float8Tensor``) and 2.x (``QuantizedTensor``, the base of all its kinds).
    """
    return isinstance(tensor, torch.Tensor) and any(
        kind.__name__ in _CLASSES and kind.__module__.split(".")[0] in _PACKAGES for kind in type(tensor).__mro__
    )


def dequantized(tensor: Any) -> Any:
    """The values of such a tensor as an ordinary one, of the dtype that it passes for."""
    return tensor.dequantize() if hasattr(tensor, "dequantize") else tensor.from_float8()
