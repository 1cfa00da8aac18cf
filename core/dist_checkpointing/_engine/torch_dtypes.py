"""The mapping between torch's dtypes and the project's names for them (``core.arrays.dtypes``).

Transformer Engine's tensors of float8 values and scales report a wider dtype (``is_float8tensor``).
"""

from __future__ import annotations

from typing import Any

import torch

from core.arrays.dtypes import DTYPES
from core.errors import UnsupportedError

_PACKAGES = ("transformer_engine", "transformer_engine_torch")
_CLASSES = frozenset({"Float8Tensor", "QuantizedTensor"})


def dtype_name(dtype: torch.dtype, *, key: str | None = None) -> str:
    """Return the canonical name of a torch dtype.

    Args:
        dtype: dtype of a tensor.
        key: name of the tensor, for the error.

    Raises:
        UnsupportedError: checkpoints do not support the dtype.
    """
    if not is_stored(dtype):
        raise UnsupportedError(
            f"checkpoints cannot store tensors of dtype {dtype}",
            key=key,
            hint="cast the tensor first",
        )
    return _plain_name(dtype)


def is_stored(dtype: torch.dtype) -> bool:
    """Return whether checkpoints support a dtype."""
    return _plain_name(dtype) in DTYPES


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype for a canonical name."""
    return getattr(torch, name)


def _plain_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the module; most are the canonical names."""
    return str(dtype).removeprefix("torch.")


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


def dequantize_tensor(tensor: Any) -> Any:
    """Return the values of a float8 tensor as a plain tensor of the dtype that it reports."""
    # Older versions have only from_float8().
    return tensor.dequantize() if hasattr(tensor, "dequantize") else tensor.from_float8()
