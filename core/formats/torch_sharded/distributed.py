"""Find and parse the DTensors and ShardedTensors of one rank's file, which stay inert in its tree.

::

    _rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor or ShardedTensor,
                          (class, dtype, shape, strides, 0, layout, device, requires_grad),
                          state)      see ``dtensor`` and ``sharded_tensor``

Either may be wrapped in a parameter.

Versions: torch 2.2 (``torch.distributed._tensor``) and later.

Source: torch 2.13 ``torch/_tensor.py`` (``_reduce_ex_internal``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from core.arrays.dtypes import DTYPES
from core.errors import CorruptError, UnsupportedError
from core.formats.torch_sharded.dtensor import dtensor_part
from core.formats.torch_sharded.local_part import LocalPart, shape_of, unwrapped
from core.formats.torch_sharded.sharded_tensor import sharded_tensor_part
from core.pickle.inert import Global, Inert, walk

if TYPE_CHECKING:
    from core.catalog.stored import StoredArray

_DTENSOR = (
    Global("torch.distributed.tensor", "DTensor"),
    Global("torch.distributed._tensor.api", "DTensor"),
    Global("torch.distributed._tensor", "DTensor"),
)
_SHARDED_TENSOR = (Global("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"),)
_REBUILD = Global("torch._tensor", "_rebuild_from_type_v2")


def is_distributed(value: object) -> bool:
    """Return whether an inert value is a DTensor or ShardedTensor, also one inside a parameter."""
    tensor = unwrapped(value)
    return (
        isinstance(tensor, Inert)
        and tensor.fn == _REBUILD
        and len(tensor.args) == 4
        and tensor.args[1] in (*_DTENSOR, *_SHARDED_TENSOR)
    )


def holds_distributed(value: object) -> bool:
    """Return whether a DTensor or ShardedTensor is anywhere in an inert value."""
    return any(is_distributed(node) for node in walk(value) if type(node) is Inert)


def parse_distributed(value: object, arrays: Mapping[str, StoredArray]) -> LocalPart:
    """Parse a distributed tensor.

    Args:
        value: an inert value for which ``is_distributed`` is true.
        arrays: the arrays of the file by the keys of their leaves.

    Raises:
        UnsupportedError: it cannot be read; the message is a noun phrase that says what it is.
        CorruptError: it is malformed, or its parts contradict each other.
    """
    tensor = unwrapped(value)
    assert isinstance(tensor, Inert)
    args, state = tensor.args[2], tensor.args[3]
    if not isinstance(args, tuple) or len(args) < 3 or not isinstance(args[1], Global):
        raise CorruptError("a distributed tensor is malformed")
    shape = shape_of(args[2], "its shape")
    parse = dtensor_part if tensor.args[1] in _DTENSOR else sharded_tensor_part
    part = parse(state, shape, arrays)
    # The dtype is that of the local parts; a rank may have none.
    dtype = args[1].name
    if args[1].module != "torch" or part.dtype not in ("", dtype):
        raise CorruptError(f"a {part.kind} of {dtype} has local parts of {part.dtype}")
    if dtype not in DTYPES:
        raise UnsupportedError(f"{part.kind} of dtype {dtype}")
    # torch.nn.Parameter(dtensor) stays a DTensor, with a mark in its __dict__.
    marks = state[0] if isinstance(state, tuple) and state and isinstance(state[0], dict) else {}
    is_parameter = tensor is not value or marks.get("_is_param") is True
    return replace(
        part,
        dtype=dtype,
        wrapper="parameter" if is_parameter else None,
        requires_grad=args[7:8] == (True,),
    )
