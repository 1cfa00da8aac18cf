"""Comparing live values: equal types, equal bits."""

from __future__ import annotations

import argparse
import io
import random
import types
from typing import Any

import numpy as np
import torch


def assert_alike(actual: Any, expected: Any, path: str = "value") -> None:
    """Fails, with the path, where two values differ in type, content, dtype, shape or strides."""
    assert type(actual) is type(expected), f"{path}: {type(actual)} instead of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        for name in ("dtype", "shape", "requires_grad", "device"):
            assert getattr(actual, name) == getattr(expected, name), f"{path}.{name}"
        assert _bits(actual).equal(_bits(expected)), f"{path}: {actual} instead of {expected}"
    elif isinstance(expected, np.ndarray):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), path
        if expected.dtype.hasobject:
            assert_alike(actual.tolist(), expected.tolist(), path)
        else:
            assert actual.tobytes() == expected.tobytes(), path
    elif isinstance(expected, dict):
        assert_alike(list(actual), list(expected), f"{path}.keys")
        for key in expected:
            assert_alike(actual[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), path
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_alike(*pair, f"{path}[{index}]")
    elif isinstance(expected, (argparse.Namespace, types.SimpleNamespace)):
        assert_alike(vars(actual), vars(expected), path)
    elif isinstance(expected, io.BytesIO):
        assert (actual.getvalue(), actual.tell()) == (expected.getvalue(), expected.tell()), path
    elif isinstance(expected, random.Random):
        assert actual.getstate() == expected.getstate(), path
    elif isinstance(expected, torch.Generator):
        assert actual.device == expected.device and actual.get_state().equal(
            expected.get_state()
        ), path
    elif isinstance(expected, (float, complex, np.generic)):
        assert repr(actual) == repr(expected), f"{path}: {actual!r} instead of {expected!r}"
    else:
        assert actual == expected, f"{path}: {actual!r} instead of {expected!r}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
