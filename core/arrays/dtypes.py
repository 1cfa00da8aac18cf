"""The table of element types, with their names in every format.

The canonical name is torch's (``bfloat16``, ``float8_e4m3fn``). Data are moved as opaque bytes;
only casts need more than ``itemsize``.

Sources: torch 2.13 ``torch/storage.py`` (storage classes) and ``torch/_utils.py``
(``_rebuild_tensor_v3`` for the types without a storage class); safetensors 0.8 ``Dtype``; names of
ml_dtypes 0.6.

``int4``, ``int2`` and ``float4_e2m1fn`` are those of jax and ml_dtypes: a value in the low bits of
each byte. torch has no operations for its ``int4`` and ``int2``, but loads them as they are.

Not supported: torch's quantized types (``qint8`` …) and other types of less than a byte (``uint4``,
``int7`` …), which torch 2.13 refuses to save.
"""

from __future__ import annotations

from typing import Any

from core.errors import UnsupportedError, UsageError, did_you_mean
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Args:
        name: canonical name, torch's without the ``torch.`` prefix.
        itemsize: bytes per stored element (``float4_e2m1fn_x2`` holds two values in one).
        kind: ``float``, ``int``, ``uint``, ``bool``, ``complex``, ``packed``, or ``bits`` (no
            numbers).
        storage: name of torch's typed storage class, or None if pickles use ``UntypedStorage``
            and name the dtype.
        numpy: name in numpy or ml_dtypes, or None if neither has the type.
        safetensors: name in a safetensors header, or None if the format does not have the type.
        value_bits: bits of an element that hold its value; None if that is all of them.
        is_in_torch: whether torch has the type.
    """

    name: str
    itemsize: int
    kind: str
    storage: str | None
    numpy: str | None
    safetensors: str | None
    value_bits: int | None = None
    is_in_torch: bool = True


_TABLE = (
    DType("float64", 8, "float", "DoubleStorage", "float64", "F64"),
    DType("float32", 4, "float", "FloatStorage", "float32", "F32"),
    DType("float16", 2, "float", "HalfStorage", "float16", "F16"),
    DType("bfloat16", 2, "float", "BFloat16Storage", "bfloat16", "BF16"),
    DType("float8_e4m3fn", 1, "float", None, "float8_e4m3fn", "F8_E4M3"),
    DType("float8_e5m2", 1, "float", None, "float8_e5m2", "F8_E5M2"),
    DType("float8_e4m3fnuz", 1, "float", None, "float8_e4m3fnuz", "F8_E4M3FNUZ"),
    DType("float8_e5m2fnuz", 1, "float", None, "float8_e5m2fnuz", "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 1, "float", None, "float8_e8m0fnu", "F8_E8M0"),
    DType("float4_e2m1fn_x2", 1, "packed", None, None, "F4"),
    DType("int64", 8, "int", "LongStorage", "int64", "I64"),
    DType("int32", 4, "int", "IntStorage", "int32", "I32"),
    DType("int16", 2, "int", "ShortStorage", "int16", "I16"),
    DType("int8", 1, "int", "CharStorage", "int8", "I8"),
    DType("uint64", 8, "uint", None, "uint64", "U64"),
    DType("uint32", 4, "uint", None, "uint32", "U32"),
    DType("uint16", 2, "uint", None, "uint16", "U16"),
    DType("uint8", 1, "uint", "ByteStorage", "uint8", "U8"),
    DType("bool", 1, "bool", "BoolStorage", "bool", "BOOL"),
    DType("complex128", 16, "complex", "ComplexDoubleStorage", "complex128", None),
    DType("complex64", 8, "complex", "ComplexFloatStorage", "complex64", "C64"),
    DType("complex32", 4, "complex", None, None, None),
    DType("int4", 1, "int", None, "int4", None, value_bits=4),
    DType("int2", 1, "int", None, "int2", None, value_bits=2),
    DType("float4_e2m1fn", 1, "float", None, "float4_e2m1fn", None, 4, is_in_torch=False),
    DType("float8_e3m4", 1, "float", None, "float8_e3m4", None, is_in_torch=False),
    DType("float8_e4m3b11fnuz", 1, "float", None, "float8_e4m3b11fnuz", None, is_in_torch=False),
    DType("bits8", 1, "bits", None, None, None),
    DType("bits16", 2, "bits", None, None, None),
    DType("bits1x8", 1, "bits", None, None, None),
    DType("bits2x4", 1, "bits", None, None, None),
    DType("bits4x2", 1, "bits", None, None, None),
)

DTYPES = {dtype.name: dtype for dtype in _TABLE}
BY_STORAGE = {dtype.storage: dtype for dtype in _TABLE if dtype.storage is not None}
"""Element types by canonical name, and by the name of torch's storage class."""

_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
    "fp8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}


def dtype_of(name: str) -> DType:
    """Look up an element type by its canonical name, with or without ``torch.``, or by an alias.

    Raises:
        UnsupportedError: the name is not in the table.
    """
    plain = name.removeprefix("torch.").lower()
    dtype = DTYPES.get(_ALIASES.get(plain, plain))
    if dtype is None:
        raise UnsupportedError(
            f"unknown dtype {name!r}", hint=f"supported dtypes: {', '.join(DTYPES)}"
        )
    return dtype


def is_float8(dtype: str) -> bool:
    """Return whether a dtype is a float8 type with a mantissa (e8m0fnu has only an exponent)."""
    facts = dtype_of(dtype)
    return facts.kind == "float" and facts.itemsize == 1 and dtype != "float8_e8m0fnu"


def dtype_called(name: str) -> DType:
    """Look up an element type that a user named, as ``dtype_of`` does.

    Raises:
        UsageError: the name is not in the table.
    """
    try:
        return dtype_of(name)
    except UnsupportedError as err:
        guess = did_you_mean(name.removeprefix("torch."), (*_ALIASES, *DTYPES))
        raise UsageError(err.message, hint=guess or err.hint) from None


def numpy_dtype(name: str) -> Any:
    """Return numpy's dtype of an element type, or ml_dtypes' where numpy has none.

    Raises:
        UnsupportedError: neither has the type, or the name is not in the table.
    """
    import numpy as np

    numpy_name = dtype_of(name).numpy
    if numpy_name is None:
        raise UnsupportedError(f"NumPy does not support {name}")
    if hasattr(np, numpy_name):
        return np.dtype(numpy_name)
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, numpy_name))


def itemsize(name: str) -> int:
    """Return the bytes per element of a dtype.

    Raises:
        UnsupportedError: the name is not in the table.
    """
    # A shortcut for canonical names, as planning looks up millions.
    dtype = DTYPES.get(name)
    return dtype.itemsize if dtype is not None else dtype_of(name).itemsize
