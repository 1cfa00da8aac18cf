"""numpy's part of the table of safe constructors: arrays, scalars, element types, random states.

numpy's own ``__setstate__`` functions trust what they get; here shapes, lengths and types are compared first. Element
types that hold Python objects are made from lists of live values only.

Not made (the stand-in rule or an error applies): subclasses of ndarray, memory maps, subarray types of objects.

Source: numpy 2.5 (``numpy/_core/_internal.py``, ``numpy/random/_pickle.py``), and the names of numpy 1.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from core.dist_checkpointing._values.constructors import Args, Filled, Made, Name, fits
from core.pickle.inert import NO_STATE

_CODE = re.compile(r"[?bBiufcmMOSUV]\d{0,9}|longdouble|clongdouble")
_ORDERS = ("<", ">", "|", "=")
_NATIVE = "<" if sys.byteorder == "little" else ">"
_UNITS = frozenset({"Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic"})


def _dtype(args: Args, state: Any) -> Any:
    """An element type: ``dtype('f4', False, True)`` and its state."""
    fits(1 <= len(args) <= 3 and type(args[0]) is str and _CODE.fullmatch(args[0]) is not None)
    made = np.dtype(args[0])
    if state is NO_STATE:
        return made
    fits(type(state) is tuple and 8 <= len(state) <= 9 and state[1] in _ORDERS)
    _, order, base, names, fields, n_bytes, _, flags, *_ = state
    if base is not None:
        fits(type(base) is tuple and len(base) == 2 and isinstance(base[0], np.dtype) and not base[0].hasobject)
        return np.dtype((base[0], _shape(base[1])))
    if names is not None:
        return _structured(names, fields, n_bytes, is_aligned=bool(flags & 0x80))
    if made.kind in "mM" and len(state) == 9 and state[8] is not None:
        unit, count = _datetime_unit(state[8])
        made = np.dtype(f"{made.kind}8[{count}{unit}]") if unit != "generic" else made
    return made if order in ("|", "=", _NATIVE) else made.newbyteorder(order)


def _datetime_unit(metadata: Any) -> tuple[str, int]:
    """Unit and count of a date type: (dictionary, (unit, numerator, denominator, event))."""
    fits(type(metadata) is tuple and len(metadata) == 2 and type(metadata[1]) is tuple and len(metadata[1]) >= 2)
    unit, count = metadata[1][0], metadata[1][1]
    unit = unit.decode("ascii") if type(unit) is bytes else unit
    fits(unit in _UNITS and type(count) is int and 0 < count < 1 << 31)
    return unit, count


def _structured(names: Any, fields: Any, n_bytes: Any, *, is_aligned: bool) -> Any:
    fits(type(names) is tuple and type(fields) is dict and type(n_bytes) is int and 0 <= n_bytes < 1 << 31)
    rows = [fields[name] for name in names]
    fits(all(type(row) is tuple and len(row) in (2, 3) and isinstance(row[0], np.dtype) for row in rows))
    fits(all(type(row[1]) is int and not row[0].hasobject for row in rows))
    spec = {
        "names": list(names),
        "formats": [row[0] for row in rows],
        "offsets": [row[1] for row in rows],
        "itemsize": n_bytes,
    }
    return np.dtype(spec, align=is_aligned)


def _shape(found: Any) -> tuple[int, ...]:
    fits(type(found) is tuple and len(found) <= 32 and all(type(n) is int and 0 <= n < 1 << 62 for n in found))
    return tuple(found)


def _array(args: Args, state: Any) -> object:
    """``_reconstruct(ndarray, (0,), b'b')`` and its state (version, shape, element type, is Fortran order, data)."""
    if len(args) != 3 or args[0] is not np.ndarray:
        return NotImplemented
    fits(type(state) is tuple and len(state) == 5)
    _, shape, dtype, is_fortran, data = state
    return _filled(data, dtype, _shape(shape), "F" if is_fortran else "C")


def _array_of_buffer(args: Args, state: Any) -> object:
    """``_frombuffer(data, element type, shape, order)`` of protocol 5."""
    fits(len(args) == 4 and state is NO_STATE and args[3] in ("C", "F"))
    return _filled(args[0], args[1], _shape(args[2]), args[3])


def _filled(data: Any, dtype: Any, shape: tuple[int, ...], order: str) -> Any:
    fits(isinstance(dtype, np.dtype))
    count = math.prod(shape)
    flat: Any
    if dtype.hasobject:
        fits(dtype == np.dtype(object) and type(data) is list and len(data) == count)
        flat = np.empty(count, dtype=object)
        for index, item in enumerate(data):
            flat[index] = item
    else:
        fits(isinstance(data, (bytes, bytearray)) and len(data) == count * dtype.itemsize)
        flat = np.frombuffer(bytearray(data), dtype=dtype, count=count) if len(data) else np.empty(count, dtype)
    return flat.reshape(shape, order=order)


def _scalar(args: Args, state: Any) -> object:
    fits(len(args) == 2 and isinstance(args[0], np.dtype) and not args[0].hasobject and type(args[1]) is bytes)
    fits(len(args[1]) == args[0].itemsize and state is NO_STATE)
    return np.frombuffer(args[1], dtype=args[0], count=1)[0] if args[1] else args[0].type()


def _bit_generator(args: Args, state: Any) -> object:
    """A bit generator by its name or class, and its state, which numpy checks."""
    fits(len(args) <= 1)
    name = args[0] if args else "MT19937"
    name = name.__name__ if isinstance(name, type) else name
    fits(name in _BIT_GENERATORS)
    made = getattr(np.random, name)(0)
    found = state[0] if type(state) is tuple and state else state
    if found is not NO_STATE:
        fits(type(found) is dict)
        made.state = found
    return made


def _random_state(args: Args, state: Any) -> object:
    fits(len(args) <= 2 and (not args or isinstance(args[0], (np.random.BitGenerator, str))))
    made = np.random.RandomState(args[0] if args and not isinstance(args[0], str) else np.random.MT19937(0))
    if state is not NO_STATE:
        fits(type(state) in (dict, tuple))
        made.set_state(state)
    return made


def _generator(args: Args, state: Any) -> object:
    fits(1 <= len(args) <= 2 and isinstance(args[0], np.random.BitGenerator))
    made = np.random.Generator(args[0])
    if type(state) is dict:
        made.bit_generator.state = state
    return made


def _seeds(args: Args, state: Any) -> object:
    """The seeds beside a bit generator's state: not needed to go on with it."""
    return None


_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def _rows(modules: tuple[str, ...], name: str, make: Callable[[Args, Any], object]) -> dict[Name, Made | Filled]:
    return {(module, name): Made(make) for module in modules}


CONSTRUCTORS: dict[Name, Made | Filled] = {
    **_rows(("numpy",), "dtype", _dtype),
    **_rows(("numpy.core.multiarray", "numpy._core.multiarray"), "_reconstruct", _array),
    **_rows(("numpy.core.multiarray", "numpy._core.multiarray"), "scalar", _scalar),
    **_rows(("numpy.core.numeric", "numpy._core.numeric"), "_frombuffer", _array_of_buffer),
    **_rows(("numpy.random._pickle",), "__bit_generator_ctor", _bit_generator),
    **_rows(("numpy.random._pickle",), "__randomstate_ctor", _random_state),
    **_rows(("numpy.random._pickle",), "__generator_ctor", _generator),
    **_rows(("numpy.random.bit_generator", "numpy.random._bit_generator"), "__pyx_unpickle_SeedSequence", _seeds),
}

CLASSES: dict[Name, object] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    **{
        ("numpy", kind.__name__): kind
        for kind in {*np.sctypeDict.values()}  # every scalar type
        if kind.__module__ == "numpy"
    },
    **{(f"numpy.random._{name.lower()}", name): getattr(np.random, name) for name in _BIT_GENERATORS},
    ("numpy.random.bit_generator", "SeedSequence"): np.random.SeedSequence,
}
CLASSES[("numpy.random._pcg64", "PCG64DXSM")] = np.random.PCG64DXSM
CLASSES |= {("numpy.dtypes", name): kind for name, kind in vars(np.dtypes).items() if isinstance(kind, type)}
