"""The keys of dicts as text, where they become parts of names.

A pickled key is a plain value, or a call: numpy's scalars, members of enumerations and namedtuples are calls of their
classes on plain values, which ``core.pickle.reader`` leaves inert. Their text is that of the value::

    np.int64(3)      3                Color.RED        Color(1), as its pickle has the value; Color.RED of Python 3.11
    np.float32(.1)   0.1              Point(1, "a")    Point(1, 'a'), as a namedtuple's pickle has no field names

Any other object (an instance with attributes, a tensor) has none that says which key it is.

Source: numpy 2.3 ``multiarray.scalar`` and ``dtype.__reduce__``; CPython 3.11 and 3.12 ``enum.py``, ``collections``.
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
_CODES = {
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
    """Return the text of a key, ``<class>`` for one without a faithful text."""
    if type(key) is str:  # most are
        return key
    text = faithful_text(key)
    return f"<{class_of_key(key)}>" if text is None else text


def faithful_text(key: object) -> str | None:
    """Return a text that tells which key it is; None if it has none."""
    return _text(key, _MAX_LEVELS, is_top=True)


def class_of_key(key: object) -> str:
    """Return what a key is an instance of."""
    if isinstance(key, (TensorLeaf, ObjectLeaf)):
        return "tensor" if isinstance(key, TensorLeaf) else "object"
    return key.class_name if isinstance(key, Inert) else type(key).__name__


def is_scalar_call(value: object) -> bool:
    """Return whether an inert value is one of numpy's scalars."""
    return isinstance(value, Inert) and isinstance(value.fn, Global) and str(value.fn) in _SCALAR


def _text(key: object, levels: int, *, is_top: bool = False) -> str | None:
    """Return the text of a key, or of a part of one (strings are quoted there)."""
    if isinstance(key, str):
        return key if is_top else repr(key) if len(key) <= _MAX_TEXT else None
    if isinstance(key, Inert):
        return _text_of_call(key, levels, is_top=is_top)
    if isinstance(key, (tuple, frozenset)) and any(isinstance(part, (Inert, TensorLeaf, tuple)) for part in key):
        if not levels or len(key) > _MAX_ARGUMENTS:
            return None
        parts = [_text(part, levels - 1) for part in key]
        texts = [part for part in parts if part is not None]
        if len(texts) < len(parts):
            return None
        if isinstance(key, frozenset):
            return f"frozenset({{{', '.join(sorted(texts))}}})"
        return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
    if isinstance(key, frozenset):
        return f"frozenset({{{', '.join(sorted(map(repr, key)))}}})"  # the order of a set of texts is random
    return None if isinstance(key, (TensorLeaf, ObjectLeaf)) else str(key)


def _text_of_call(key: Inert, levels: int, *, is_top: bool) -> str | None:
    """Return the text of an object that is a call of a class on values."""
    if key.kwargs or key.items or key.entries or key.state is not NO_STATE or not isinstance(key.fn, Global):
        return None
    if is_scalar_call(key):
        value = scalar_of(key)
        return None if value is None else _text(value, levels, is_top=is_top)
    is_plain = all(
        isinstance(arg, (str, bool, float, Inert, type(None))) or (type(arg) is int and arg.bit_length() <= _MAX_BITS)
        for arg in key.args
    )
    if not is_plain or not levels or not 0 < len(key.args) <= _MAX_ARGUMENTS:
        return None
    texts = [_text(arg, levels - 1) for arg in key.args]
    name = key.fn.name.rpartition(".")[2]
    return None if None in texts else f"{name}({', '.join(map(str, texts))})"


def scalar_of(value: Inert) -> int | float | bool | str | None:
    """Return the value of one of numpy's scalars; None if its type is not a simple one."""
    if len(value.args) != 2:
        return None
    dtype, data = value.args
    if not isinstance(dtype, Inert) or dtype.fn != _DTYPE or not dtype.args or type(data) is not bytes:
        return None
    code = dtype.args[0]
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "|"
    if type(code) is not str or order not in ("<", ">", "|", "="):
        return None
    is_big = order == ">"
    if code.startswith("U"):
        try:
            return data.decode("utf-32-be" if is_big else "utf-32-le").rstrip("\0")
        except UnicodeDecodeError:
            return None
    form = _CODES.get(code)
    if form is None or struct.calcsize(f"={form}") != len(data):
        return None
    (number,) = struct.unpack(f"{'>' if is_big else '<'}{form}", data)
    assert isinstance(number, (int, float))
    return _shortest(number, form) if isinstance(number, float) and form in "ef" else number


def _shortest(number: float, form: str) -> float:
    """Return the number of the fewest digits that becomes the same number of two or four bytes."""
    data = struct.pack(f"<{form}", number)
    for n_digits in range(1, 10):
        rounded = float(f"{number:.{n_digits}g}")
        try:
            if struct.pack(f"<{form}", rounded) == data:
                return rounded
        except OverflowError:
            continue  # rounded up beyond the largest
    return number
