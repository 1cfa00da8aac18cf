"""Turn the keys of dicts into text, for names that contain them.

A pickled key is a plain value, or a call: numpy's scalars, members of enumerations and namedtuples
are calls of their classes on plain values, which ``core.pickle.reader`` leaves inert. Their text is
that of the value::

    np.int64(3)      3
    np.float32(.1)   0.1
    Color.RED        Color(1), as its pickle has the value; Color.RED if pickled by Python 3.11
    Point(1, "a")    Point(1, 'a'), as a namedtuple's pickle has no field names

Any other object (an instance with attributes, a tensor) has no text that identifies it.

Source: numpy 2.3 ``multiarray.scalar`` and ``dtype.__reduce__``; CPython 3.11 and 3.12 ``enum.py``,
``collections``.
"""

from __future__ import annotations

import struct

from core.pickle.inert import NO_STATE, Global, Inert, ObjectLeaf, TensorLeaf

_MAX_ARGUMENTS = 16
_MAX_LEVELS = 2
_MAX_TEXT = 1000
_MAX_BITS = 256
_SCALAR = frozenset({"numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"})
_DTYPE = Global("numpy", "dtype")
_STRUCT_CODES = {
    "i1": "b",
    "i2": "h",
    "i4": "i",
    "i8": "q",
    "u1": "B",
    "u2": "H",
    "u4": "I",
    "u8": "Q",
    "f2": "e",
    "f4": "f",
    "f8": "d",
    "b1": "?",
}
"""numpy's name of an element type → its format for ``struct``."""


def text_of(key: object) -> str:
    """Return the text of a key, or ``<class>`` if no text identifies it."""
    if type(key) is str:  # most keys are
        return key
    text = faithful_text(key)
    return f"<{class_of_key(key)}>" if text is None else text


def faithful_text(key: object) -> str | None:
    """Return a text that identifies a key, or None if there is none."""
    return _text(key, _MAX_LEVELS, is_top=True)


def class_of_key(key: object) -> str:
    """Return the name of a key's class."""
    if isinstance(key, (TensorLeaf, ObjectLeaf)):
        return "tensor" if isinstance(key, TensorLeaf) else "object"
    return key.class_name if isinstance(key, Inert) else type(key).__name__


def is_scalar_call(value: object) -> bool:
    """Return whether an inert value is one of numpy's scalars."""
    return isinstance(value, Inert) and isinstance(value.fn, Global) and str(value.fn) in _SCALAR


def _text(key: object, levels: int, *, is_top: bool = False) -> str | None:
    """Return the text of a key, or of a part of one (where strings are quoted)."""
    if isinstance(key, str):
        if is_top:
            return key
        return repr(key) if len(key) <= _MAX_TEXT else None
    if isinstance(key, Inert):
        return _text_of_call(key, levels, is_top=is_top)
    if isinstance(key, (TensorLeaf, ObjectLeaf)):
        return None
    if isinstance(key, (tuple, frozenset)) and any(
        isinstance(part, (Inert, TensorLeaf, tuple)) for part in key
    ):
        return _text_of_parts(key, levels)
    if isinstance(key, frozenset):
        # Sorted, because the order of a set of strings differs from run to run.
        return f"frozenset({{{', '.join(sorted(map(repr, key)))}}})"
    return str(key)


def _text_of_parts(key: tuple[object, ...] | frozenset[object], levels: int) -> str | None:
    """Return the text of a tuple or frozenset that holds inert objects or tuples."""
    if not levels or len(key) > _MAX_ARGUMENTS:
        return None
    parts = [_text(part, levels - 1) for part in key]
    texts = [part for part in parts if part is not None]
    if len(texts) < len(parts):
        return None
    if isinstance(key, frozenset):
        return f"frozenset({{{', '.join(sorted(texts))}}})"
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def _text_of_call(key: Inert, levels: int, *, is_top: bool) -> str | None:
    """Return the text of an object that is a call of a class on values."""
    if (
        key.kwargs
        or key.items
        or key.entries
        or key.state is not NO_STATE
        or not isinstance(key.fn, Global)
    ):
        return None
    if is_scalar_call(key):
        value = scalar_of(key)
        return None if value is None else _text(value, levels, is_top=is_top)
    if (
        not levels
        or not 0 < len(key.args) <= _MAX_ARGUMENTS
        or not all(map(_is_plain_argument, key.args))
    ):
        return None
    texts = [_text(arg, levels - 1) for arg in key.args]
    name = key.fn.name.rpartition(".")[2]
    return None if None in texts else f"{name}({', '.join(map(str, texts))})"


def _is_plain_argument(arg: object) -> bool:
    if type(arg) is int:
        return arg.bit_length() <= _MAX_BITS
    return isinstance(arg, (str, bool, float, Inert, type(None)))


def scalar_of(value: Inert) -> int | float | bool | str | None:
    """Return the value of a numpy scalar; None if it is not a number, bool or string."""
    if len(value.args) != 2:
        return None
    dtype, data = value.args
    element_type = _element_type(dtype)
    if element_type is None or type(data) is not bytes:
        return None
    # Strings are fixed-width UTF-32, padded with NULs.
    code, is_big_endian = element_type
    if code.startswith("U"):
        try:
            return data.decode("utf-32-be" if is_big_endian else "utf-32-le").rstrip("\0")
        except UnicodeDecodeError:
            return None
    return _number_of(data, code, is_big_endian=is_big_endian)


def _number_of(data: bytes, code: str, *, is_big_endian: bool) -> int | float | bool | None:
    """Return the number in the bytes of a numpy scalar; None if the type is not a simple one."""
    struct_code = _STRUCT_CODES.get(code)
    if struct_code is None or struct.calcsize(f"={struct_code}") != len(data):
        return None
    (number,) = struct.unpack(f"{'>' if is_big_endian else '<'}{struct_code}", data)
    assert isinstance(number, (int, float))
    # A double prints its shortest text by itself; narrower floats would show digits of a double.
    return (
        _shortest(number, struct_code)
        if isinstance(number, float) and struct_code in "ef"
        else number
    )


def _element_type(dtype: object) -> tuple[str, bool] | None:
    """Return numpy's code of an inert dtype, such as ``f4``, and whether it is big-endian.

    Returns:
        None if ``dtype`` does not have the form in which numpy pickles simple types.
    """
    if not isinstance(dtype, Inert) or dtype.fn != _DTYPE or not dtype.args:
        return None
    code = dtype.args[0]
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "|"
    if type(code) is not str or order not in ("<", ">", "|", "="):
        return None
    return code, order == ">"


def _shortest(number: float, struct_code: str) -> float:
    """Return the number with the fewest digits that is the same in a narrower float type."""
    data = struct.pack(f"<{struct_code}", number)
    for n_digits in range(1, 10):
        rounded = float(f"{number:.{n_digits}g}")
        try:
            if struct.pack(f"<{struct_code}", rounded) == data:
                return rounded
        except OverflowError:
            continue  # rounded up beyond the largest number of the type
    return number
