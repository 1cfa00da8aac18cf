"""torch's element types and the project's names for them (``core.arrays.dtypes``)."""

from __future__ import annotations

import torch

from core.arrays.dtypes import DTYPES
from core.errors import UnsupportedError


def dtype_name(dtype: torch.dtype, *, key: str | None = None) -> str:
    """The canonical name of a torch dtype.

    Args:
        dtype: of a tensor.
        key: the tensor, for the message.

    Raises:
        UnsupportedError: checkpoints do not have it.
    """
    if not is_stored(dtype):
        raise UnsupportedError(f"tensors of type {dtype} are not stored", key=key, hint="cast the tensor first")
    return _plain_name(dtype)


def is_stored(dtype: torch.dtype) -> bool:
    """Whether checkpoints have an element type."""
    return _plain_name(dtype) in DTYPES


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a canonical name."""
    return getattr(torch, name)


def _plain_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
