"""The dtypes that zarr-python lacks for zarr 2 arrays: bfloat16 and the 8-bit floats.

zarr-python 3.1.6 supports numpy's own dtypes only; it refuses ``"dtype": "bfloat16"``. Importing
this module registers one data type for all missing dtypes in ``zarr.dtype.data_type_registry``.
(The alternative is to read and write such arrays with tensorstore.) In memory the dtypes are those
of ml_dtypes; ``.zarray`` has the bare name (``bfloat16``, ``float8_e4m3fn``), as Megatron-Core 0.12
and tensorstore write it. A dtype that zarr-python already supports, because its version is newer or
another package has registered the dtype, is not registered again.

The module also converts between such arrays and torch's tensors, bit for bit, without an
intermediate dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import torch
from typing_extensions import override
from zarr.dtype import DataTypeValidationError, ZDType, data_type_registry

from core.arrays.cast import check_cast, find_cast
from core.arrays.dtypes import DTYPES
from core.errors import UnsupportedError
from core.formats.zarr.array import v2_dtype

_RAW = {1: torch.uint8, 2: torch.int16}
"""Dtypes, by itemsize, that torch and numpy share, for elements whose own dtype numpy lacks."""
_NATIVE: dict[str, np.dtype[Any]] = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name, dtype in DTYPES.items()
    if hasattr(ml_dtypes, name) and v2_dtype(name) and hasattr(torch, name) and not dtype.value_bits
}
"""The dtypes of zarr arrays that ml_dtypes adds to numpy, by canonical name."""


def _is_supported_by_zarr(name: str) -> bool:
    try:
        data_type_registry.match_dtype(_NATIVE[name])
        data_type_registry.match_json({"name": name, "object_codec_id": None}, zarr_format=2)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class NamedFloat(ZDType):  # type: ignore[type-arg,unused-ignore]
    """A floating-point dtype of ml_dtypes, which zarr 2 and 3 spell by its name.

    The methods are those of ``zarr.dtype.ZDType``.

    Args:
        name: canonical dtype name.
    """

    dtype_cls: ClassVar[type] = np.dtype
    _zarr_v3_name: ClassVar[str] = "ml_dtypes"
    taught: ClassVar[frozenset[str]] = frozenset(
        name for name in _NATIVE if not _is_supported_by_zarr(name)
    )

    name: str

    @classmethod
    @override
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> NamedFloat:
        """Return the data type of a numpy dtype.

        Raises:
            DataTypeValidationError: the dtype is not one of those registered here; zarr then tries
                its other data types.
        """
        name = getattr(dtype, "name", None)
        if name not in cls.taught or dtype != _NATIVE[name]:
            raise DataTypeValidationError(f"{dtype} is not one of: {', '.join(sorted(cls.taught))}")
        return cls(name=name)

    @override
    def to_native_dtype(self) -> np.dtype[Any]:
        return _NATIVE[self.name]

    @classmethod
    def _from_json_v2(cls, data: Any) -> NamedFloat:
        return cls._from_json_v3(data.get("name") if isinstance(data, dict) else data)

    @classmethod
    def _from_json_v3(cls, data: Any) -> NamedFloat:
        if not isinstance(data, str) or data not in cls.taught:
            raise DataTypeValidationError(
                f"{data!r} is not one of: {', '.join(sorted(cls.taught))}"
            )
        return cls(name=data)

    @override
    def to_json(self, zarr_format: int) -> Any:
        """Return the name as in ``.zarray`` (zarr 2) or ``zarr.json`` (zarr 3)."""
        return {"name": self.name, "object_codec_id": None} if zarr_format == 2 else self.name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (int, float, np.floating, np.integer, _NATIVE[self.name].type))

    @override
    def cast_scalar(self, data: object) -> Any:
        """Convert a number to a scalar of the dtype.

        Raises:
            TypeError: ``data`` is not a number.
        """
        if not self._check_scalar(data):
            raise TypeError(f"cannot convert {data!r} to {self.name}: it is not a number")
        return _NATIVE[self.name].type(data)

    @override
    def default_scalar(self) -> Any:
        """Return zero."""
        return _NATIVE[self.name].type(0)

    @override
    def from_json_scalar(self, data: object, *, zarr_format: int) -> Any:
        """Parse a fill value: a number, or one of ``NaN``, ``Infinity``, ``-Infinity``."""
        return self.cast_scalar(float(data) if isinstance(data, str) else data)

    @override
    def to_json_scalar(self, data: object, *, zarr_format: int) -> float | str:
        """Convert a fill value to JSON: a number, or the name of one that JSON lacks."""
        number = float(self.cast_scalar(data))
        if np.isfinite(number):
            return number
        return "NaN" if np.isnan(number) else "Infinity" if number > 0 else "-Infinity"


data_type_registry.register(NamedFloat._zarr_v3_name, NamedFloat)

numpy_to_torch_dtype_dict: dict[np.dtype[Any], torch.dtype] = {
    _NATIVE.get(name) or np.dtype(dtype.numpy): getattr(torch, name)
    for name, dtype in DTYPES.items()
    if dtype.numpy is not None and hasattr(torch, name) and not dtype.value_bits
}
torch_to_numpy_dtype_dict = {
    torch_dtype: dtype for dtype, torch_dtype in numpy_to_torch_dtype_dict.items()
}


def numpy_of(tensor: torch.Tensor, *, key: str) -> Any:
    """Convert a tensor to a numpy array in host memory.

    The array shares the memory of a CPU tensor in C order; otherwise the elements are copied.

    Raises:
        UnsupportedError: numpy and zarr do not support the dtype.
    """
    dtype = torch_to_numpy_dtype_dict.get(tensor.dtype)
    if dtype is None:
        raise UnsupportedError(
            f"zarr does not support {tensor.dtype}", key=key, hint="cast the tensor first"
        )
    dense = tensor.detach().cpu().contiguous()
    # torch refuses to convert dtypes that numpy itself lacks; pass them as integers.
    if dtype.name in _NATIVE:
        dense = dense.view(_RAW[dtype.itemsize])
    return dense.numpy().view(dtype)


def tensor_of(array: Any, *, key: str) -> torch.Tensor:
    """Convert a numpy array to a tensor.

    The tensor shares the memory of a writable array in C order and native byte order; otherwise the
    elements are copied.

    Raises:
        UnsupportedError: torch does not support the dtype.
    """
    # torch.from_numpy needs native byte order and writable memory.
    dense: Any = np.asarray(array)
    dense = np.require(
        dense.astype(dense.dtype.newbyteorder("="), copy=False), requirements=["C", "W"]
    )
    dtype = numpy_to_torch_dtype_dict.get(dense.dtype)
    if dtype is None:
        raise UnsupportedError(f"torch does not support the NumPy dtype {dense.dtype}", key=key)
    if dense.dtype.name not in _NATIVE:
        return torch.from_numpy(dense)
    # Pass a dtype that numpy itself lacks as integers of its size.
    raw = dense.reshape(-1).view(np.uint8 if dense.itemsize == 1 else np.int16)
    return torch.from_numpy(raw).view(dtype).reshape(dense.shape)


def cast_array(array: Any, dtype: torch.dtype, *, key: str) -> Any:
    """Cast an array to a torch dtype, with the rounding of ``core.arrays.cast``.

    Raises:
        UnsupportedError: the cast would lose more than precision, or numpy does not support the
            dtype.
    """
    # The cast works on bytes in C order and native byte order. (ascontiguousarray makes 0-d arrays
    # 1-d, so restore the shape.)
    dense: Any = np.asarray(array)
    dense = np.ascontiguousarray(dense.astype(dense.dtype.newbyteorder("="), copy=False)).reshape(
        dense.shape
    )
    target = torch_to_numpy_dtype_dict.get(dtype)
    if target is None:
        raise UnsupportedError(f"NumPy does not support {dtype}", key=key)
    if dense.dtype == target:
        return dense
    check_cast(dense.dtype.name, target.name, key=key)
    out: Any = np.empty(dense.shape, target)
    find_cast(dense.dtype.name, target.name)(_bytes_of(dense), _bytes_of(out))
    return out


def _bytes_of(dense: Any) -> memoryview:
    return memoryview(dense.reshape(-1).view(np.uint8))
