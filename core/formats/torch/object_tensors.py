"""Weights inside objects: state dicts of pickled modules, and numpy arrays as tensors.

``torch.save(model)`` pickles the module itself. Its class stays a name, but its state dict needs no
code: it consists of the tensors in ``_parameters`` and ``_buffers``, under the paths of
``_modules``::

    Sequential                            0.weight, 0.bias, 1.weight, 1.bias, 1.running_mean …
      _modules: {"0": Conv2d, …}
        _parameters: {"weight": …}
        _buffers: {…}                     without those in _non_persistent_buffers_set

A numpy array's bytes are part of the pickle, so a tensor of it is encoded (``PickledArray``). Only
destinations that cannot store objects get such tensors; elsewhere an array stays one.

Not supported: ``_extra_state`` of modules, which their code makes; tensors of other objects, of
which a result without any tensor is refused (``core.verbs.convert.prepare``).

Source: torch 2.13 ``nn/modules/module.py`` (``_save_to_state_dict``); numpy 2.4
``_core/src/multiarray/methods.c`` (``array_reduce``).
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from core.arrays.dtypes import itemsize
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import tensors_of
from core.errors import list_some
from core.files.store import list_files_below
from core.pickle.inert import Global, Inert, TensorLeaf, as_mapping, attributes
from core.pickle.key_text import element_type, is_scalar_call
from core.pickle.nesting import MAX_DEPTH, containers, map_leaves
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

_MAX_ENTRIES = 1 << 20
"""Maximum number of entries of a module's state dict; shared modules repeat theirs."""
_NUMPY_MODULES = ("numpy.core", "numpy._core")
_ARRAYS = frozenset(Global(f"{name}.multiarray", "_reconstruct") for name in _NUMPY_MODULES)
_BUFFERS = frozenset(Global(f"{name}.numeric", "_frombuffer") for name in _NUMPY_MODULES)
_DTYPES = {
    **{f"i{n}": f"int{8 * n}" for n in (1, 2, 4, 8)},
    **{f"u{n}": f"uint{8 * n}" for n in (1, 2, 4, 8)},
    **{f"f{n}": f"float{8 * n}" for n in (2, 4, 8)},
    **{f"c{n}": f"complex{8 * n}" for n in (8, 16)},
    "b1": "bool",
}
"""numpy's code of an element type → its name."""


def with_state_dicts(root: object) -> tuple[object, tuple[str, ...]]:
    """Replace pickled modules by their state dicts.

    Args:
        root: the inert root of a file, without cycles; its containers are changed.

    Returns:
        The new root, and the classes of the modules.
    """
    classes: list[str] = []

    def replaced(value: object) -> object:
        if type(value) is tuple and any(isinstance(item, (tuple, Inert)) for item in value):
            items = tuple(map(replaced, value))
            return value if all(map(operator.is_, items, value)) else items
        state_dict = _make_state_dict(value) if isinstance(value, Inert) else None
        if state_dict is None or not isinstance(value, Inert):
            return value
        classes.append(value.class_name)
        return state_dict

    for _, node in list(containers(root, once=True)):
        if isinstance(node, dict):
            for key, value in node.items():
                node[key] = replaced(value)
        elif isinstance(node, list):
            node[:] = map(replaced, node)
        elif isinstance(node, Inert):
            node.entries = [(key, replaced(value)) for key, value in node.entries]
    return replaced(root), tuple(classes)


def _make_state_dict(module: Inert) -> dict[str, object] | None:
    """Return the state dict of a pickled module; None if it is no module or has no tensors."""
    result: dict[str, object] = {}
    # Modules that contain themselves have no end; torch cannot make a state dict of them either.
    stack: list[tuple[str, object, int]] = [("", module, 0)]
    while stack:
        prefix, node, depth = stack.pop()
        state = attributes(node)
        if state is None:
            if prefix and node is not None:
                return None
            continue
        parts = [as_mapping(state.get(name)) for name in ("_parameters", "_buffers", "_modules")]
        parameters, buffers, modules = parts
        if parameters is None or buffers is None or modules is None or depth > MAX_DEPTH:
            return None
        omitted = state.get("_non_persistent_buffers_set")
        omitted = omitted if isinstance(omitted, (set, frozenset)) else frozenset()
        for name, value in (*parameters.items(), *buffers.items()):
            if value is not None and name not in omitted:
                key = f"{prefix}{name}"
                result[key] = TensorLeaf(value.key) if isinstance(value, TensorLeaf) else value
        if len(result) + len(stack) + len(modules) > _MAX_ENTRIES:
            return None
        children = [(f"{prefix}{name}.", child, depth + 1) for name, child in modules.items()]
        stack += reversed(children)
    return result if any(isinstance(value, TensorLeaf) for value in result.values()) else None


@dataclass(frozen=True, slots=True)
class PickledArray:
    """The encoding of a tensor whose numbers are those of a numpy array in a pickle.

    Args:
        data: the array's bytes.
        code: numpy's code of the element type, with its byte order.
        is_fortran: the first axis varies fastest.
    """

    data: bytes
    code: str
    is_fortran: bool

    @property
    def name(self) -> str:
        """Name of the encoding, for users."""
        return "numpy array"

    @property
    def unit_bytes(self) -> int:
        """Size of the only unit."""
        return max(1, len(self.data))

    @property
    def working_bytes(self) -> int:
        """Maximum memory for decoding, without the unit."""
        return len(self.data)

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> memoryview:
        """Return the numbers in C order, little endian."""
        import numpy as np

        order: Any = "F" if self.is_fortran else "C"
        numbers = np.frombuffer(self.data, self.code).reshape(array.shape, order=order)
        plain = np.ascontiguousarray(numbers, dtype=numbers.dtype.newbyteorder("<"))
        return memoryview(plain.reshape(-1).view(np.uint8)).cast("B")


def with_array_tensors(catalog: Catalog, store: ReadStore) -> Catalog:
    """Return a catalog in which numpy arrays and scalars of numbers are tensors.

    Args:
        catalog: a catalog whose objects are loaded.
        store: its files.
    """
    arrays = {
        key: array
        for key, item in catalog.objects.items()
        if (array := _read_array(key, item.value)) is not None
    }
    if not arrays:
        return catalog
    # The numbers are read already: the file is only named.
    file = store.entry or next(iter(store.files() or list_files_below(store)))
    arrays = {
        key: replace(array, extent=replace(array.extent, file=file))
        for key, array in arrays.items()
    }

    skeleton = catalog.skeleton
    if skeleton is not None:
        skeleton = map_leaves(
            skeleton,
            lambda entry: TensorLeaf(entry.key) if entry.key in arrays else entry.leaf,
        )
    return replace(
        catalog,
        tensors={**catalog.tensors, **tensors_of(arrays)},
        objects={key: item for key, item in catalog.objects.items() if key not in arrays},
        skeleton=skeleton,
    ).noted([f"these NumPy arrays become tensors: {list_some(arrays)}"])


def _read_array(key: str, value: object) -> StoredArray | None:
    """Return the tensor of a numpy array or scalar, without its file; None for anything else."""
    if not isinstance(value, Inert) or value.kwargs or value.items or value.entries:
        return None
    shape: object
    if value.fn in _ARRAYS and isinstance(value.state, tuple) and len(value.state) == 5:
        _, shape, dtype, is_fortran, data = value.state
    elif value.fn in _BUFFERS and len(value.args) == 4:
        data, dtype, shape, order = value.args
        is_fortran = order == "F"
    elif is_scalar_call(value) and len(value.args) == 2:
        (dtype, data), shape, is_fortran = value.args, (), False
    else:
        return None
    kind = element_type(dtype)
    name = None if kind is None else _DTYPES.get(kind[0])
    if kind is None or name is None or not isinstance(data, (bytes, bytearray)):
        return None
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        return None
    if len(data) != math.prod(shape) * itemsize(name):
        return None
    encoding = PickledArray(bytes(data), kind[1] + kind[0], bool(is_fortran)) if data else None
    return StoredArray(key, name, shape, Extent("", 0, encoding=encoding))
