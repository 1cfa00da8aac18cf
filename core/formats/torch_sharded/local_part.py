"""The part of a distributed tensor in one rank's file, and parsing that its classes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, TypeGuard

from core.arrays.box import Box, Shape
from core.arrays.sharding import ShardPiece
from core.errors import UnsupportedError
from core.formats.torch.tensors import unsupported_kind
from core.pickle.fields import FieldReader
from core.pickle.inert import Global, Inert, TensorLeaf
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray

_PARAMETERS = (
    Global("torch._utils", "_rebuild_parameter"),
    Global("torch._utils", "_rebuild_parameter_with_state"),
)
_MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class HeldArray:
    """An array in a rank's file, and the boxes of the global tensor that it consists of."""

    array: StoredArray
    boxes: tuple[ShardPiece, ...]


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """The rows that one rank holds of a tensor of torchao's classes.

    Args:
        box: the rows in the global tensor.
        parts: name → array of a part (``codes``, ``scale`` …) or value of a setting, in order.
    """

    box: Box
    parts: Mapping[str, StoredArray | object]


@dataclass(frozen=True, slots=True)
class LocalPart:
    """The part of a distributed tensor that is in the file of one rank.

    Args:
        kind: name of the class: ``DTensor`` or ``ShardedTensor``.
        dtype: canonical dtype name.
        shape: shape of the global tensor, in elements.
        arrays: the arrays of this rank; () if it holds nothing, or a tensor of torchao's classes.
        quantized: the tensor of torchao's classes that this rank holds, or None.
        wrapper, requires_grad: as in ``TensorLeaf``.
        rank: number of this rank in the job; None if the file does not record it.
        ranks: ranks of the job that the file names.
        cuts: a few words on how the tensor is divided, for people.
    """

    kind: str
    dtype: str
    shape: Shape
    arrays: tuple[HeldArray, ...]
    quantized: QuantizedPart | None = None
    wrapper: str | None = None
    requires_grad: bool = False
    rank: int | None = None
    ranks: frozenset[int] = field(default=frozenset())
    cuts: str = ""


def unwrapped(value: object) -> object:
    """Return the tensor that an inert parameter wraps; any other value unchanged."""
    if isinstance(value, Inert) and value.fn in _PARAMETERS and value.args:
        return value.args[0]
    return value


def shape_of(value: object, subject: str) -> Shape:
    """Return a shape, an offset or a place in a mesh, after checking its type.

    Raises:
        CorruptError: the value is not a short list of integers >= 0.
    """
    return FieldReader().read_shape(value, f"a distributed tensor is malformed: {subject}")


def is_rank(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _MOST_RANKS


def plain_array(value: object, arrays: Mapping[str, StoredArray], kind: str) -> StoredArray:
    """Return the array of a local tensor.

    Raises:
        UnsupportedError: the local tensor is not a plain one.
    """
    local = unwrapped(value)
    if not isinstance(local, TensorLeaf):
        inner = unsupported_kind(local) or "value of another class"
        raise UnsupportedError(f"{kind} whose local part is a {inner}")
    return arrays[local.key]
