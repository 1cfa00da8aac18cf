"""A live value as an inert tree, by way of the pickle that Python makes of it.

Only this program's own objects are pickled, and what comes out is read as any pickle of a file is
(``core.pickle.reader``): so the tree is the one that reading a saved file gives, and writing it gives the same bytes.

Tensors do not go through the pickle: each distinct one becomes a ``TensorLeaf``. Stand-ins become what they stand for.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from core.catalog.stored import PlannedArray
from core.dist_checkpointing._engine.torch_dtypes import dtype_name, is_stored
from core.dist_checkpointing._values.stand_in import inert_again, stood_in
from core.errors import CheckpointingException, UnsupportedError
from core.pickle import reader as safe_pickle
from core.pickle.inert import TensorLeaf
from core.pickle.machine import Hook

_PROTOCOL = 2  # torch.save's


class LivePickle:
    """The inert tree of one live value, and its tensors.

    Args:
        value: any value that pickle can describe.

    Attributes:
        tree: inert, with a ``TensorLeaf`` for every tensor.
        arrays: key of a leaf → dtype and shape; leaves whose tensors are the same bytes share one.
        tensors: name of an array → the tensor, strided, on any device.

    Raises:
        UnsupportedError: a tensor that is no plain dense one, a bare storage, or an object that cannot be pickled.
    """

    def __init__(self, value: object) -> None:
        self.arrays: dict[str, PlannedArray] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._by_place: dict[tuple[object, ...], PlannedArray] = {}
        self._found: list[torch.Tensor] = []
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self._found).dump(value)
            data = buffer.getvalue()
            self.tree = safe_pickle.load(data, label="the value to be saved", hooks=self._hooks())
        except CheckpointingException:
            raise
        except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RecursionError) as err:
            raise UnsupportedError(f"a value cannot be saved: {type(err).__name__}: {err}") from err

    def _hooks(self) -> dict[tuple[str, str], Hook]:
        return {
            _name_of(_nth_tensor): self._leaf,
            _name_of(stood_in): inert_again,
            ("torch", "Size"): lambda *args: NotImplemented,
        }

    def _leaf(self, number: int) -> TensorLeaf:
        found = self._found[number]
        key = f"#{number}"
        tensor = plain_tensor(found)
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        array = self._by_place.get(place) if tensor.numel() else None
        if array is None:
            array = PlannedArray(key, dtype_name(tensor.dtype), tuple(tensor.shape))
            self._by_place[place] = array
            self.tensors[key] = tensor
        self.arrays[key] = array
        return TensorLeaf(key, "parameter" if isinstance(found, torch.nn.Parameter) else None, found.requires_grad)


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without gradient, conjugation and negation, if its elements can be stored as they are.

    Raises:
        UnsupportedError: it is quantized, sparse, nested, without data, of a class or an element type of its own.
    """
    kind = None
    if type(tensor) not in _PLAIN_CLASSES:
        kind = f"tensor of the class {type(tensor).__module__}.{type(tensor).__qualname__}"
    elif tensor.is_quantized:
        kind = "quantized tensor"
    elif tensor.layout != torch.strided or tensor.is_nested:
        kind = "sparse or nested tensor"
    elif tensor.device.type == "meta":
        kind = "meta tensor, which has no data"
    elif not is_stored(tensor.dtype):
        kind = f"tensor of dtype {tensor.dtype}"
    if kind is not None:
        raise UnsupportedError(f"a {kind} cannot be saved", hint="make it a plain dense tensor first")
    return tensor.detach().resolve_conj().resolve_neg()


_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _nth_tensor(number: int) -> None:
    """What a tensor is in the pickle; never called."""


def _name_of(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


class _Pickler(pickle.Pickler):
    """Pickles everything but tensors.

    Args:
        file: gets the pickle.
        tensors: gets every distinct tensor; its index stands in the pickle.
    """

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._tensors = tensors

    def reducer_override(self, value: Any) -> Any:
        """See ``pickle.Pickler``."""
        if isinstance(value, torch.Tensor):
            self._tensors.append(value)
            return _nth_tensor, (len(self._tensors) - 1,)
        if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
            raise UnsupportedError("a bare storage cannot be saved", hint="save the tensor instead")
        return NotImplemented
