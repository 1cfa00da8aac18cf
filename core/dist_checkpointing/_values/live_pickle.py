"""Conversion of a live value to an inert tree, by way of the pickle that Python makes of it.

Only this program's own objects are pickled, and the result is read like any pickle of a file
(``core.pickle.reader``): so the tree equals the one that reading a saved file gives, and writing it
gives the same bytes.

Tensors are not pickled: each distinct one becomes a ``TensorLeaf``. Stand-ins become the objects
that they stand for.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from core.catalog.stored import PlannedArray
from core.dist_checkpointing._engine.torch_dtypes import dtype_name, is_stored
from core.dist_checkpointing._values.stand_in import rebuild_inert, rebuild_stand_in
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
        arrays: dtype and shape for the key of each leaf; leaves whose tensors have the same memory
            share one.
        tensors: the tensor of each array, by the array's name; strided, on any device.

    Raises:
        UnsupportedError: the value holds a tensor that is not plain and dense, a bare storage, or
            an object that cannot be pickled.
    """

    def __init__(self, value: object) -> None:
        self.arrays: dict[str, PlannedArray] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._array_at: dict[tuple[object, ...], PlannedArray] = {}
        buffer = io.BytesIO()
        pickler = _ValuePickler(buffer)
        self._pickled_tensors = pickler.tensors
        try:
            pickler.dump(value)
            data = buffer.getvalue()
            self.tree = safe_pickle.load(data, label="the value to be saved", hooks=self._hooks())
        except CheckpointingException:
            raise
        except (
            pickle.PicklingError,
            TypeError,
            AttributeError,
            NotImplementedError,
            RecursionError,
        ) as err:
            raise UnsupportedError(f"a value cannot be saved: {type(err).__name__}: {err}") from err

    def _hooks(self) -> dict[tuple[str, str], Hook]:
        return {
            _name_of(_tensor_by_number): self._leaf,
            _name_of(rebuild_stand_in): rebuild_inert,
            ("torch", "Size"): lambda *args: NotImplemented,
        }

    def _leaf(self, number: int) -> TensorLeaf:
        pickled = self._pickled_tensors[number]
        key = f"#{number}"
        tensor = plain_tensor(pickled)
        # Tensors with the same memory, type and shape are stored once; those without elements have
        # no memory.
        memory = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        array = self._array_at.get(memory) if tensor.numel() else None
        if array is None:
            array = PlannedArray(key, dtype_name(tensor.dtype), tuple(tensor.shape))
            self._array_at[memory] = array
            self.tensors[key] = tensor
        self.arrays[key] = array
        return TensorLeaf(
            key,
            "parameter" if isinstance(pickled, torch.nn.Parameter) else None,
            pickled.requires_grad,
        )


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without gradient, conjugation and negation.

    Raises:
        UnsupportedError: the tensor is quantized, sparse, nested, without data, or of a class or
            dtype that cannot be stored.
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
        raise UnsupportedError(
            f"a {kind} cannot be saved", hint="make it a plain dense tensor first"
        )
    return tensor.detach().resolve_conj().resolve_neg()


_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _tensor_by_number(number: int) -> None:
    """Stand for a tensor in the pickle; never called."""


def _name_of(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


class _ValuePickler(pickle.Pickler):
    """A pickler that leaves tensors out.

    Args:
        file: receives the pickle.

    Attributes:
        tensors: every distinct tensor; the pickle has its index.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    @override
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return _tensor_by_number, (len(self.tensors) - 1,)
        if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
            raise UnsupportedError("a bare storage cannot be saved", hint="save the tensor instead")
        return NotImplemented
