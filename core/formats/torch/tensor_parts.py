"""Tensors of torchao's classes, as mappings of their parts.

::

    _rebuild_from_type_v2(_rebuild_wrapper_subclass, Int8Tensor,
        (Int8Tensor, dtype, shape, strides, 0, layout, device, requires_grad),
        {"qdata": int8 tensor, "scale": tensor, "zero_point": tensor, "block_size": [1, 64], …})

becomes ``{"qdata": …, "scale": …, …, "class": "Int8Tensor", "dtype": "bfloat16", "shape": …}``:
the attributes under their own names, and what the tensor stands for. So the parts of ``0.weight``
have the keys ``0.weight.qdata``, ``0.weight.scale`` …, and are moved as they are.

Not supported: making the tensor of its parts again; other classes of torchao, which stay objects
that cannot be copied.

Source: torchao 0.18.0 ``quantization/quantize_/workflows`` (``float8_tensor``, ``int8_tensor``,
``intx_unpacked_to_int8_tensor``), ``optim/subclass_*.py``; files that it wrote, in
tests/golden/torchao.tar.xz.
"""

from __future__ import annotations

from core.pickle.inert import NO_STATE, Global, Inert, TensorLeaf

_CLASSES = {
    "Float8Tensor": ("qdata", "scale"),
    "Int8Tensor": ("qdata", "scale"),
    "IntxUnpackedToInt8Tensor": ("qdata", "scale"),
    "OptimState4bit": ("codes", "scale", "qmap"),
    "OptimState8bit": ("codes", "scale", "qmap"),
    "OptimStateFp8": ("codes", "scale"),
}
"""Class of torchao → attributes that must be plain tensors."""
_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")


def parts_of_tensor(
    fn: object, kind: object, args: object, state: object
) -> dict[object, object] | None:
    """Return the parts of a tensor of a known class of torchao.

    Args:
        fn, kind, args, state: arguments of ``_rebuild_from_type_v2``.

    Returns:
        None for a tensor of another class, or one whose parts are not plain tensors.
    """
    if fn != _WRAPPER or not isinstance(kind, Global) or not isinstance(state, dict):
        return None
    required = _CLASSES.get(kind.name) if kind.module.split(".")[0] == "torchao" else None
    if required is None or not isinstance(args, tuple) or len(args) < 3:
        return None
    if not all(isinstance(state.get(name), TensorLeaf) for name in required):
        return None
    parts: dict[object, object] = {name: _value(item) for name, item in state.items()}
    shape = list(args[2]) if isinstance(args[2], (tuple, list)) else args[2]
    return {**parts, "class": kind.name, "dtype": _value(args[1]), "shape": shape}


def _value(item: object) -> object:
    """Return an element type as text and a member of an enumeration as its value; others as is.

    So they need no class, and every format can store them.
    """
    if isinstance(item, Global) and item.module == "torch":
        return item.name
    is_member = (
        isinstance(item, Inert)
        and len(item.args) == 1
        and type(item.args[0]) in (str, int)
        and item.state is NO_STATE
    )
    return item.args[0] if is_member and isinstance(item, Inert) else item
