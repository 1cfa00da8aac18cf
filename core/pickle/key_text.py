"""Turn the keys of dicts into text, for names that contain them.

A pickled key is a plain value or a call: numpy scalars, members of enumerations and namedtuples are
pickled as calls of their classes on plain values, which ``core.pickle.reader`` leaves inert. Their
text is that of the value::

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
from collections.abc import Collection

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
"""numpy's name of an element type → the format character for ``struct``."""


def describe_key(key: object) -> str:
    """Return the text of a key, or ``<class>`` if no text identifies it."""
    if type(key) is str:  # a shortcut for nearly all keys
        return key
    text = faithful_text(key)
    return f"<{class_of_key(key)}>" if text is None else text


def faithful_text(key: object) -> str | None:
    """Return a text that identifies a key, or None if no text does."""
    return _text(key, _MAX_LEVELS, is_top=True)


def class_of_key(key: object) -> str:
    """Return the name of a key's class."""
    if isinstance(key, (TensorLeaf, ObjectLeaf)):
        return "tensor" if isinstance(key, TensorLeaf) else "object"
    return key.class_name if isinstance(key, Inert) else type(key).__name__


def is_scalar_call(value: object) -> bool:
    """Return whether an inert value is a numpy scalar."""
    return isinstance(value, Inert) and isinstance(value.fn, Global) and str(value.fn) in _SCALAR


def _text(key: object, levels: int, *, is_top: bool = False) -> str | None:
    """Return the text of a key, or of a part of a key (in which strings are quoted).

    Args:
        levels: levels of parts that may follow.
        is_top: the value is the key itself.

    Returns:
        None if no text identifies the value, or the text would be too long.
    """
    if isinstance(key, str):
        if is_top:
            return key
        return repr(key) if len(key) <= _MAX_TEXT else None
    if isinstance(key, Inert):
        return _text_of_call(key, levels, is_top=is_top)
    if isinstance(key, (TensorLeaf, ObjectLeaf)):
        return None
    if not isinstance(key, (tuple, frozenset)):
        return str(key)
    # Python's own text serves where it shows neither an inert object nor a tuple in it.
    texts: list[str] | None
    if any(isinstance(part, (Inert, TensorLeaf, tuple)) for part in key):
        texts = _texts_of(key, levels)
        if texts is None:
            return None
    else:
        texts = list(map(repr, key))
    # Sorted, because the order of a set of strings differs from run to run.
    if isinstance(key, frozenset):
        return f"frozenset({{{', '.join(sorted(texts))}}})"
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def _texts_of(parts: Collection[object], levels: int) -> list[str] | None:
    """Return the texts of the parts of a key; None if a part has none or they are too many."""
    if not levels or len(parts) > _MAX_ARGUMENTS:
        return None
    texts = [_text(part, levels - 1) for part in parts]
    return None if None in texts else [text for text in texts if text is not None]


def _text_of_call(key: Inert, levels: int, *, is_top: bool) -> str | None:
    """Return the text of an object that is pickled as a call of a class on values."""
    # Attributes, items and entries would not show in the text.
    has_more = any((key.kwargs, key.items, key.entries)) or key.state is not NO_STATE
    if has_more or not isinstance(key.fn, Global):
        return None
    if is_scalar_call(key):
        value = scalar_of(key)
        return None if value is None else _text(value, levels, is_top=is_top)
    # Other arguments do not identify the key, and a huge integer would take long to format.
    if any(type(arg) is int and arg.bit_length() > _MAX_BITS for arg in key.args):
        return None
    if not all(isinstance(arg, (str, int, float, Inert, type(None))) for arg in key.args):
        return None
    texts = _texts_of(key.args, levels)
    name = key.fn.name.rpartition(".")[2]
    return f"{name}({', '.join(texts)})" if texts else None


def scalar_of(value: Inert) -> int | float | bool | str | None:
    """Return the value of a numpy scalar; None if it is not a number, bool or string."""
    if len(value.args) != 2:
        return None
    dtype, data = value.args
    kind = element_type(dtype)
    if kind is None or type(data) is not bytes:
        return None
    code, order = kind
    # Strings are fixed-width UTF-32, padded with NULs.
    if code.startswith("U"):
        try:
            return data.decode("utf-32-be" if order == ">" else "utf-32-le").rstrip("\0")
        except UnicodeDecodeError:
            return None
    struct_code = _STRUCT_CODES.get(code)
    if struct_code is None or struct.calcsize(f"={struct_code}") != len(data):
        return None
    number: int | float | bool = struct.unpack(f"{order}{struct_code}", data)[0]
    # Python prints a double with the fewest digits, but a narrower float with those of the double
    # that it was widened to: 0.10000000149011612 for float32's 0.1.
    return _shortest(number, struct_code) if struct_code in "ef" else number


def element_type(dtype: object) -> tuple[str, str] | None:
    """Return numpy's code of an inert dtype, such as ``f4``, and its byte order (``<`` or ``>``).

    Returns:
        None if ``dtype`` does not have the form in which numpy pickles simple types.
    """
    if not isinstance(dtype, Inert) or dtype.fn != _DTYPE or not dtype.args:
        return None
    code = dtype.args[0]
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "|"
    if type(code) is not str or order not in ("<", ">", "|", "="):
        return None
    return code, ">" if order == ">" else "<"


def _shortest(number: float, struct_code: str) -> float:
    """Return the number with the fewest digits that has the same bytes in a narrower float type."""
    data = struct.pack(f"<{struct_code}", number)
    for n_digits in range(1, 10):
        rounded = float(f"{number:.{n_digits}g}")
        try:
            if struct.pack(f"<{struct_code}", rounded) == data:
                return rounded
        except OverflowError:
            continue  # rounded up beyond the largest number of the type
    return number
