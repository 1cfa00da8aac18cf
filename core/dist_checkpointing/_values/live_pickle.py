"""Conversion of a live value to an inert tree, through a pickle in memory.

The pickle contains only the program's own objects, and is read by ``core.pickle.reader`` like the
pickle of a file. The tree therefore equals the one that is read from a saved file, and both are
written as the same bytes.

Tensors are not pickled: each distinct tensor becomes a ``TensorLeaf``. Stand-ins become the objects
that they describe.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from core.dist_checkpointing._engine.torch_dtypes import dtype_name, is_stored
from core.dist_checkpointing._values.stand_in import rebuild_inert, rebuild_stand_in
from core.engine.catalog.stored import PlannedArray
from core.errors import CheckpointingException, UnsupportedError
from core.pickle import reader as safe_pickle
from core.pickle.inert import TensorLeaf
from core.pickle.machine import Hook

_PROTOCOL = 2  # default of torch.save


class LivePickle:
    """Inert tree of one live value, and its tensors.

    Args:
        value: any value that pickle can describe.

    Attributes:
        tree: inert tree with a ``TensorLeaf`` for every tensor.
        arrays: dtype and shape, by the key of the leaf; leaves with the same memory share one.
        tensors: the tensor of each array, by the array's name; strided, on any device.

    Raises:
        UnsupportedError: the value contains a tensor that is not plain and dense, a bare storage,
            or an object that cannot be pickled.
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
            raise UnsupportedError(
                f"the value cannot be saved: {type(err).__name__}: {err}"
            ) from err

    def _hooks(self) -> dict[tuple[str, str], Hook]:
        """Return the functions that the reader calls for the names in the pickle."""
        return {
            _name_of(_tensor_by_number): self._leaf,
            _name_of(rebuild_stand_in): rebuild_inert,
            # Keep a torch.Size as the call that was pickled.
            ("torch", "Size"): lambda *args: NotImplemented,
        }

    def _leaf(self, number: int) -> TensorLeaf:
        """Return the leaf of a pickled tensor, and register its array and data."""
        pickled = self._pickled_tensors[number]
        key = f"#{number}"
        tensor = plain_tensor(pickled)
        # Store tensors with the same memory, dtype and shape once. Tensors without elements are
        # excluded: their data pointers are all zero.
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
    """Return a tensor detached, with lazy conjugation and negation applied.

    Raises:
        UnsupportedError: the tensor is quantized, sparse, nested or on the meta device, or its
            class or dtype cannot be stored.
    """
    kind, hint = None, "convert it to a plain dense tensor first"
    if type(tensor) not in _PLAIN_CLASSES:
        kind = f"tensor of the class {type(tensor).__module__}.{type(tensor).__qualname__}"
    elif tensor.is_quantized:
        kind = "quantized tensor"
    elif tensor.layout != torch.strided or tensor.is_nested:
        kind = "sparse or nested tensor"
    elif tensor.device.type == "meta":
        kind, hint = "meta tensor", "it has no data: materialize it on a real device first"
    elif not is_stored(tensor.dtype):
        kind, hint = f"tensor of dtype {tensor.dtype}", "cast it to a supported dtype first"
    if kind is not None:
        raise UnsupportedError(f"a {kind} cannot be saved", hint=hint)
    # torch may only mark a view as conjugated or negated; its memory still has the old values.
    return tensor.detach().resolve_conj().resolve_neg()


_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _tensor_by_number(number: int) -> None:
    """Represent a tensor in the pickle; only the name is used, nothing calls the function."""


def _name_of(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


class _ValuePickler(pickle.Pickler):
    """A pickler that replaces each tensor by its index in ``tensors``.

    Args:
        file: destination of the pickle.

    Attributes:
        tensors: every distinct tensor, in the order of first use.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    @override
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # Pickle memoizes the result, so this runs only once for every tensor object.
            self.tensors.append(value)
            return _tensor_by_number, (len(self.tensors) - 1,)
        if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
            raise UnsupportedError("a bare storage cannot be saved", hint="save the tensor instead")
        return NotImplemented
