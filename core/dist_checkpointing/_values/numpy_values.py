"""numpy's part of the table of safe constructors: arrays, scalars, dtypes, random states.

numpy's own ``__setstate__`` functions trust their arguments; here shapes, lengths and types are
checked first. Arrays of Python objects are built from lists of live values only.

Not supported (a stand-in or an error): subclasses of ndarray, memory maps, and structured or
subarray dtypes that contain Python objects.

Source: numpy 2.5 (``numpy/_core/_internal.py``, ``numpy/random/_pickle.py``), and the names of
numpy 1.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from core.dist_checkpointing._values.constructors import (
    Args,
    ContainerConstructor,
    Name,
    ValueConstructor,
    require,
)
from core.pickle.inert import NO_STATE

_CODE = re.compile(r"[?bBiufcmMOSUV]\d{0,9}|longdouble|clongdouble")
_ORDERS = ("<", ">", "|", "=")
_NATIVE = "<" if sys.byteorder == "little" else ">"
_UNITS = frozenset(
    {"Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic"}
)


def _dtype(args: Args, state: Any) -> Any:
    """Rebuild a dtype from ``dtype('f4', False, True)`` and its state."""
    require(1 <= len(args) <= 3 and type(args[0]) is str and _CODE.fullmatch(args[0]) is not None)
    dtype = np.dtype(args[0])
    return dtype if state is NO_STATE else _dtype_with_state(dtype, state)


def _dtype_with_state(dtype: Any, state: Any) -> Any:
    """Apply the state that numpy pickles with a dtype.

    The state is (version, byte order, subarray, field names, fields, size, alignment, flags, unit);
    the unit is present only for dates and times.
    """
    require(type(state) is tuple and 8 <= len(state) <= 9 and state[1] in _ORDERS)
    _, order, base, names, fields, n_bytes, _, flags, *metadata = state
    # Subarrays and structures are described by the dtypes of their elements, which have an order.
    if base is not None:
        require(
            type(base) is tuple
            and len(base) == 2
            and isinstance(base[0], np.dtype)
            and not base[0].hasobject
        )
        return np.dtype((base[0], _checked_shape(base[1])))
    if names is not None:
        # 0x80 is numpy's flag NPY_ALIGNED_STRUCT.
        require(
            type(names) is tuple
            and type(fields) is dict
            and type(n_bytes) is int
            and 0 <= n_bytes < 1 << 31
        )
        checked = [_checked_field(fields[name]) for name in names]
        spec = {
            "names": list(names),
            "formats": [dtype for dtype, _ in checked],
            "offsets": [offset for _, offset in checked],
            "itemsize": n_bytes,
        }
        return np.dtype(spec, align=bool(flags & 0x80))
    if dtype.kind in "mM" and metadata and metadata[0] is not None:
        dtype = _dtype_with_unit(dtype, metadata[0])
    return dtype if order in ("|", "=", _NATIVE) else dtype.newbyteorder(order)


def _dtype_with_unit(dtype: Any, metadata: Any) -> Any:
    """Apply the unit of a date type, (dictionary, (unit, numerator, denominator, event))."""
    require(
        type(metadata) is tuple
        and len(metadata) == 2
        and type(metadata[1]) is tuple
        and len(metadata[1]) >= 2
    )
    # In M8[25s], the numerator 25 is the count; numpy pickles the unit as bytes or text.
    unit, count = metadata[1][0], metadata[1][1]
    unit = unit.decode("ascii") if type(unit) is bytes else unit
    require(unit in _UNITS and type(count) is int and 0 < count < 1 << 31)
    return dtype if unit == "generic" else np.dtype(f"{dtype.kind}8[{count}{unit}]")


def _checked_field(field: Any) -> tuple[Any, int]:
    """Return the dtype and the offset of a field, without the title that may follow them."""
    require(type(field) is tuple and len(field) in (2, 3) and isinstance(field[0], np.dtype))
    require(type(field[1]) is int and not field[0].hasobject)
    return field[0], field[1]


def _checked_shape(shape: Any) -> tuple[int, ...]:
    require(
        type(shape) is tuple
        and len(shape) <= 32
        and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
    )
    return tuple(shape)


def _array(args: Args, state: Any) -> object:
    """Rebuild the array of ``_reconstruct(ndarray, (0,), b'b')`` from its state.

    The state is (version, shape, dtype, is Fortran order, data).
    """
    if len(args) != 3 or args[0] is not np.ndarray:
        return NotImplemented
    require(type(state) is tuple and len(state) == 5)
    _, shape, dtype, is_fortran, data = state
    return _array_from_data(data, dtype, _checked_shape(shape), "F" if is_fortran else "C")


def _array_of_buffer(args: Args, state: Any) -> object:
    """Rebuild the array of ``_frombuffer(data, dtype, shape, order)``, used by protocol 5."""
    require(len(args) == 4 and state is NO_STATE and args[3] in ("C", "F"))
    return _array_from_data(args[0], args[1], _checked_shape(args[2]), args[3])


def _array_from_data(data: Any, dtype: Any, shape: tuple[int, ...], order: str) -> Any:
    require(isinstance(dtype, np.dtype))
    count = math.prod(shape)
    flat: Any
    # Data that numpy interprets as pointers must never come from bytes of the file.
    if dtype.hasobject:
        require(dtype == np.dtype(object) and type(data) is list and len(data) == count)
        flat = np.empty(count, dtype=object)
        for index, item in enumerate(data):
            flat[index] = item
    else:
        require(isinstance(data, (bytes, bytearray)) and len(data) == count * dtype.itemsize)
        # bytearray copies the data, so that the array can be written to.
        flat = (
            np.frombuffer(bytearray(data), dtype=dtype, count=count)
            if len(data)
            else np.empty(count, dtype)
        )
    return flat.reshape(shape, order=order)


def _scalar(args: Args, state: Any) -> object:
    require(
        len(args) == 2
        and isinstance(args[0], np.dtype)
        and not args[0].hasobject
        and type(args[1]) is bytes
    )
    require(len(args[1]) == args[0].itemsize and state is NO_STATE)
    return np.frombuffer(args[1], dtype=args[0], count=1)[0] if args[1] else args[0].type()


def _bit_generator(args: Args, state: Any) -> object:
    """Rebuild a bit generator from its name or class and its state, which numpy checks."""
    require(len(args) <= 1)
    # numpy pickles the class or, in old versions, its name.
    name = args[0] if args else "MT19937"
    name = name.__name__ if isinstance(name, type) else name
    require(name in _BIT_GENERATORS)
    generator = getattr(np.random, name)(0)
    # New versions of numpy add the seeds: (state, seeds).
    generator_state = state[0] if type(state) is tuple and state else state
    if generator_state is not NO_STATE:
        require(type(generator_state) is dict)
        generator.state = generator_state
    return generator


def _random_state(args: Args, state: Any) -> object:
    require(len(args) <= 2 and (not args or isinstance(args[0], (np.random.BitGenerator, str))))
    # Old versions of numpy pickle only the name of the bit generator; MT19937, the default of
    # RandomState, is assumed, and set_state refuses the state of any other.
    random_state = np.random.RandomState(
        args[0] if args and not isinstance(args[0], str) else np.random.MT19937(0)
    )
    if state is not NO_STATE:
        require(type(state) in (dict, tuple))
        random_state.set_state(state)
    return random_state


def _generator(args: Args, state: Any) -> object:
    require(1 <= len(args) <= 2 and isinstance(args[0], np.random.BitGenerator))
    generator = np.random.Generator(args[0])
    if type(state) is dict:
        generator.bit_generator.state = state
    return generator


def _seeds(args: Args, state: Any) -> object:
    """Drop a bit generator's seed sequence, which is not needed to continue its numbers."""
    return None


_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def _rows(
    modules: tuple[str, ...], name: str, make: Callable[[Args, Any], object]
) -> dict[Name, ValueConstructor | ContainerConstructor]:
    return {(module, name): ValueConstructor(make) for module in modules}


CONSTRUCTORS: dict[Name, ValueConstructor | ContainerConstructor] = {
    **_rows(("numpy",), "dtype", _dtype),
    **_rows(("numpy.core.multiarray", "numpy._core.multiarray"), "_reconstruct", _array),
    **_rows(("numpy.core.multiarray", "numpy._core.multiarray"), "scalar", _scalar),
    **_rows(("numpy.core.numeric", "numpy._core.numeric"), "_frombuffer", _array_of_buffer),
    **_rows(("numpy.random._pickle",), "__bit_generator_ctor", _bit_generator),
    **_rows(("numpy.random._pickle",), "__randomstate_ctor", _random_state),
    **_rows(("numpy.random._pickle",), "__generator_ctor", _generator),
    **_rows(
        ("numpy.random.bit_generator", "numpy.random._bit_generator"),
        "__pyx_unpickle_SeedSequence",
        _seeds,
    ),
}

CLASSES: dict[Name, object] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    **{
        ("numpy", kind.__name__): kind
        for kind in {*np.sctypeDict.values()}  # every scalar type
        if kind.__module__ == "numpy"
    },
    **{
        (f"numpy.random._{name.lower()}", name): getattr(np.random, name)
        for name in _BIT_GENERATORS
    },
    ("numpy.random.bit_generator", "SeedSequence"): np.random.SeedSequence,
}
CLASSES[("numpy.random._pcg64", "PCG64DXSM")] = np.random.PCG64DXSM
CLASSES |= {
    ("numpy.dtypes", name): kind for name, kind in vars(np.dtypes).items() if isinstance(kind, type)
}
