"""Comparing live values: equal types, equal bits."""

from __future__ import annotations

import argparse
import io
import random
import types
from typing import Any

import numpy as np
import torch


def assert_alike(found: Any, expected: Any, path: str = "value") -> None:
    """Fails, with the path, where two values differ in type, content, dtype, shape or strides."""
    assert type(found) is type(expected), f"{path}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        for name in ("dtype", "shape", "requires_grad", "device"):
            assert getattr(found, name) == getattr(expected, name), f"{path}.{name}"
        assert _bits(found).equal(_bits(expected)), f"{path}: {found} instead of {expected}"
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        if expected.dtype.hasobject:
            assert_alike(found.tolist(), expected.tolist(), path)
        else:
            assert found.tobytes() == expected.tobytes(), path
    elif isinstance(expected, dict):
        assert_alike(list(found), list(expected), f"{path}.keys")
        for key in expected:
            assert_alike(found[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_alike(*pair, f"{path}[{index}]")
    elif isinstance(expected, (argparse.Namespace, types.SimpleNamespace)):
        assert_alike(vars(found), vars(expected), path)
    elif isinstance(expected, io.BytesIO):
        assert (found.getvalue(), found.tell()) == (expected.getvalue(), expected.tell()), path
    elif isinstance(expected, random.Random):
        assert found.getstate() == expected.getstate(), path
    elif isinstance(expected, torch.Generator):
        assert found.device == expected.device and found.get_state().equal(expected.get_state()), (
            path
        )
    elif isinstance(expected, (float, complex, np.generic)):
        assert repr(found) == repr(expected), f"{path}: {found!r} instead of {expected!r}"
    else:
        assert found == expected, f"{path}: {found!r} instead of {expected!r}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
