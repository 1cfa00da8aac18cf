"""The mapping between torch's dtypes and the project's names for them (``core.arrays.dtypes``)."""

from __future__ import annotations

import torch

from core.arrays.dtypes import DTYPES
from core.errors import UnsupportedError


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
