"""Live Python values and the streams that store them (a first version: helper for the seams; the whole one follows)."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from core.errors import UnsupportedError


def stream_of(value: object) -> bytes:
    """The torch.save stream of a live value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def live_object(value: object, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """The live value of an inert one.

    Raises:
        UnsupportedError: not yet.
    """
    if isinstance(value, dict):
        return {key: live_object(item, tensor_of) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(live_object(item, tensor_of) for item in value)
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    raise UnsupportedError(f"a {type(value).__name__} is not made live yet")


def load_stream(store: Any, array: Any, *, key: str) -> Any:
    """The live value of a stream in a checkpoint.

    Raises:
        UnsupportedError: not yet.
    """
    from core.formats.torch_file import load_object

    value, _ = load_object(store, array, key=key)
    return live_object(value, lambda name: torch.empty(0))
