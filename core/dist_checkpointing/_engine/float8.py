"""Transformer Engine's tensors of float8 values and scales, which report a wider dtype."""

from __future__ import annotations

from typing import Any

import torch

_PACKAGES = ("transformer_engine", "transformer_engine_torch")
_CLASSES = frozenset({"Float8Tensor", "QuantizedTensor"})


def is_float8tensor(tensor: Any) -> bool:
    """Return whether a value is one of Transformer Engine's float8 tensors.

    Transformer Engine need not be installed: its classes are recognised by name.

    Source: Transformer Engine 1.x (``Float8Tensor``) and 2.x (``QuantizedTensor``, the base of all
    its kinds).
    """
    return isinstance(tensor, torch.Tensor) and any(
        kind.__name__ in _CLASSES and kind.__module__.split(".")[0] in _PACKAGES
        for kind in type(tensor).__mro__
    )


def dequantize(tensor: Any) -> Any:
    """Return the values of a float8 tensor as a plain tensor of the dtype that it reports."""
    # Older versions have only from_float8().
    return tensor.dequantize() if hasattr(tensor, "dequantize") else tensor.from_float8()
