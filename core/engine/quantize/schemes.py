"""Recognise weights that other software quantized, by the rules of ``quantize/schemes.toml``.

A quantized weight consists of its stored numbers, the scales to multiply them by, and further
tensors such as zero points. These tensors are moved unchanged. They are never cast: scales of
another dtype result in different weights, and numbers without their scales are not weights.

Not supported, and not recognised: parameters that are instances of torchao's classes (objects that
are not read), GGUF files.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from core.arrays.dtypes import dtype_of
from core.engine.catalog.tensor import Tensor
from core.errors import UnsupportedError
from core.pickle.fields import mapping_or_empty, text_or_none
from core.values import dataclass

_TABLE = "schemes.toml"


@dataclass(frozen=True, slots=True)
class Scheme:
    """A rule of the table; the comment in ``schemes.toml`` explains the fields."""

    name: str
    mark: str
    weight: str
    source: str
    methods: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    needs_config: bool = False
    weight_dtypes: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    dequantize: str | None = None


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight of a catalog.

    Args:
        scheme: rule by which the weight was recognised.
        key: name of the tensor with the stored numbers.
        scales: names of the tensors with its scales.
        others: names of other tensors that belong to the weight.
    """

    scheme: Scheme
    key: str
    scales: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of all tensors of the weight."""
        return (self.key, *self.scales, *self.others)


@cache
def schemes() -> tuple[Scheme, ...]:
    """Read the rules of the table."""
    table = tomllib.loads(Path(__file__).with_name(_TABLE).read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = [
        {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
        for row in table["scheme"]
    ]
    return tuple(Scheme(**row) for row in rows)


def method_of(config: Mapping[str, object] | None) -> str | None:
    """Return ``quant_method`` of a configuration's ``quantization_config``.

    Returns:
        None if there is none.
    """
    stated = mapping_or_empty((config or {}).get("quantization_config"))
    method = text_or_none(stated.get("quant_method"))
    return None if method is None else method.lower()


def quantized_weights(
    tensors: Mapping[str, Tensor], config: Mapping[str, object] | None = None
) -> tuple[QuantizedWeight, ...]:
    """Return the quantized weights among some tensors, in the order of the tensors that mark them.

    Args:
        config: parsed ``config.json`` of the model; None if there is none.
    """
    method = method_of(config)
    rows = sorted(schemes(), key=lambda row: method not in row.methods)
    # Try the rules for the declared method first, as the first rule that matches wins. A tensor
    # belongs to one weight only, so tensors of recognised weights mark nothing.
    marks = tuple({row.mark for row in rows})
    claimed: set[str] = set()
    weights: list[QuantizedWeight] = []
    for key in tensors:
        if not key.endswith(marks) or key in claimed:
            continue
        candidates = (
            _match_rule(row, key, tensors, is_declared=method in row.methods) for row in rows
        )
        weight = next(
            (
                candidate
                for candidate in candidates
                if candidate is not None and candidate.key not in claimed
            ),
            None,
        )
        if weight is not None:
            claimed.update(weight.keys)
            weights.append(weight)
    return tuple(weights)


def _match_rule(
    row: Scheme, mark: str, tensors: Mapping[str, Tensor], *, is_declared: bool
) -> QuantizedWeight | None:
    """Return the weight that a tensor marks by a rule; None if the rule does not match."""
    base = mark.removesuffix(row.mark)
    key = base + row.weight
    if not mark.endswith(row.mark) or key not in tensors or (row.needs_config and not is_declared):
        return None
    if row.weight_dtypes and tensors[key].dtype not in row.weight_dtypes:
        return None
    if not is_declared and not all(base + suffix in tensors for suffix in row.also):
        return None

    def present(suffixes: Iterable[str]) -> tuple[str, ...]:
        return tuple(
            name for suffix in suffixes if (name := base + suffix) in tensors and name != key
        )

    return QuantizedWeight(row, key, present(row.scales), present(row.others))


def refused_scheme(weight: QuantizedWeight) -> UnsupportedError:
    """Return the error for a weight that cannot be dequantized."""
    return UnsupportedError(
        f"--dequantize: ckpt cannot dequantize {weight.scheme.name} weights",
        key=weight.key,
        hint="dequantize the model with the library that quantized it, save it, "
        "and convert the saved copy",
    )


def check_numbers(key: str, tensor: Tensor) -> None:
    """Raise if a tensor that the destination would use as a weight holds quantized numbers.

    Raises:
        UnsupportedError: the tensor holds integers or float8 numbers.
    """
    kind = dtype_of(tensor.dtype)
    if kind.kind != "float" or kind.itemsize < 2:
        raise UnsupportedError(
            f"the tensor contains a quantized weight's {kind.name} values, "
            "which are meaningless without their scales",
            key=key,
            hint="keep the scales and apply them with --dequantize bf16; "
            "if float8 values need no scales, cast them with --dtype GLOB=bf16",
        )


def check_scheme(config: Mapping[str, object] | None, *, doing: str) -> None:
    """Raise if a configuration declares a quantization method that is not in the table.

    Args:
        doing: name of the requested option, such as ``--dtype``.

    Raises:
        UnsupportedError: the method is unknown, so the scales cannot be recognised.
    """
    method = method_of(config)
    if method is not None and not any(method in row.methods for row in schemes()):
        raise UnsupportedError(
            f"{doing}: the quantization method {method[:40]!r} in config.json is not supported",
            hint="use the library that quantized the model to save it without quantization, "
            "and convert the saved copy",
        )
