"""Tensor locations, derived from the arguments of the ``torch._utils._rebuild_*`` calls in pickles.

::

    _rebuild_tensor_v2(
        ('storage', torch.FloatStorage, '3', 'cpu', 24),    persistent id of the storage
                    │                    │          └ number of elements
                    └ element type       └ record data/3
        4,                   offset of element 0 in the storage, in elements
        (2, 3), (3, 1),      shape and strides, in elements
        False,               requires_grad
        OrderedDict())       backward hooks

``_rebuild_tensor_v3`` ends with the dtype and uses ``UntypedStorage``, whose length is in bytes.
Parameters and tensors with Python attributes wrap such a call. Several tensors may refer to one
storage, with any offsets and strides.

All numbers in a pickle are checked as Python integers before they are used (torch leaves some of
these checks to C).

Not plain dense tensors, hence not read (the call stays inert; ``unsupported_kind`` names it):
quantized, sparse, nested, meta tensors, subclasses such as DTensor, lazily conjugated or negated
views, element types that ``core.arrays.dtypes`` does not list, and expanded views of more than
4 GiB.

Source: torch 2.13 ``torch/_utils.py``, ``torch/_tensor.py``, ``torch/serialization.py``.

Tensors of torchao's classes become mappings of their parts::

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

from collections.abc import Callable, Mapping
from itertools import islice
from math import prod

from core.arrays.box import Shape, is_c_contiguous
from core.arrays.dtypes import BY_STORAGE, DTYPES
from core.arrays.gather import byte_span
from core.errors import CorruptError
from core.pickle.fields import MAX_RANK, describe_value
from core.pickle.inert import NO_STATE, Global, Inert, Persistent, Size, TensorLeaf
from core.values import dataclass

_MAX_ATTRIBUTES = 16
"""Maximum number of attribute names that are kept for a tensor."""
MAX_EXPANDED_BYTES = 1 << 32
"""Maximum dense size of a view that is larger than its storage."""

Hook = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Location:
    """The position, dtype, shape and strides of a tensor in a storage.

    Args:
        record: name of the record, ``data/<key>``.
        storage_bytes: length of the storage according to the pickle.
        offset: byte offset of element 0 in the record.
        dtype: canonical dtype name.
        shape: in elements.
        strides: in elements; None for C order.
    """

    record: str
    storage_bytes: int
    offset: int
    dtype: str
    shape: Shape
    strides: Shape | None

    @property
    def n_bytes(self) -> int:
        """Size of the dense tensor, in bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class TensorHooks:
    """Hooks that turn the tensors of one pickle into leaves, and the tensors read so far.

    A tensor becomes a ``TensorLeaf`` whose key is ``<label><number>``, unique in the pickle; a
    tensor that occurs in several places is one leaf.

    Args:
        label: prefix of the keys.
        hooks: additional hooks, by module and name of the callable.
        takes_apart: tensors of torchao's classes become mappings of their parts
            ; otherwise they stay inert.

    Attributes:
        taken_apart: class → number of its tensors that were taken apart.
        locations: key → location in a storage.
        attributes: key → names of the tensor's Python attributes, for tensors that have any.
    """

    def __init__(
        self,
        label: str = "#",
        hooks: Mapping[tuple[str, str], Hook] | None = None,
        *,
        takes_apart: bool = False,
    ) -> None:
        self._label = label
        self._takes_apart = takes_apart
        self.taken_apart: dict[str, int] = {}
        self._count = 0
        self.locations: dict[str, Location] = {}
        self.attributes: dict[str, tuple[str, ...]] = {}
        self._more_hooks = hooks or {}

    @property
    def hooks(self) -> dict[tuple[str, str], Hook]:
        """The hooks, by module and name of the callable.

        They are not kept: 10⁵ small pickles would leave as many cycles while the collector pauses.
        """
        return {
            ("torch._utils", "_rebuild_tensor"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor_v2,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor_v3,
            ("torch._utils", "_rebuild_parameter"): self._parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): self._parameter,
            ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): self._device_tensor,
            ("torch._tensor", "_rebuild_from_type_v2"): self._from_type,
            ("torch", "Size"): _size,
            **self._more_hooks,
        }

    def _leaf(
        self, location: Location, requires_grad: object, *, wrapper: str | None = None
    ) -> TensorLeaf:
        leaf = TensorLeaf(f"{self._label}{self._count}", wrapper, requires_grad is True)
        self._count += 1
        self.locations[leaf.key] = location
        return leaf

    def _tensor(self, storage: object, offset: object, size: object, stride: object) -> object:
        return self._build_tensor(storage, offset, size, stride, None, False)

    def _tensor_v2(
        self,
        storage: object,
        offset: object,
        size: object,
        stride: object,
        requires_grad: object,
        hooks: object,
        metadata: object = None,
    ) -> object:
        # With the conj or neg bit, the tensor's values are not the stored ones.
        if metadata:
            return NotImplemented
        return self._build_tensor(storage, offset, size, stride, None, requires_grad)

    def _tensor_v3(
        self,
        storage: object,
        offset: object,
        size: object,
        stride: object,
        requires_grad: object,
        hooks: object,
        dtype: object,
        metadata: object = None,
    ) -> object:
        if metadata:
            return NotImplemented
        return self._build_tensor(storage, offset, size, stride, dtype, requires_grad)

    def _parameter(
        self, data: object, requires_grad: object, hooks: object, state: object = None
    ) -> object:
        if not isinstance(data, TensorLeaf):
            return NotImplemented
        leaf = self._leaf(self.locations[data.key], requires_grad, wrapper="parameter")
        self._note_attributes(leaf, state)
        return leaf

    def _device_tensor(
        self, data: object, dtype: object, device: object, requires_grad: object
    ) -> object:
        """Build a tensor from a device whose storages torch cannot write (XLA and others).

        torch saves a copy on the CPU, and the dtype separately. If the two dtypes differ, loading
        casts, and the stored numbers are not the tensor's.
        """
        if not isinstance(data, TensorLeaf):
            return NotImplemented
        if dtype != Global("torch", self.locations[data.key].dtype):
            return NotImplemented
        return self._leaf(self.locations[data.key], requires_grad)

    def _from_type(self, fn: object, kind: object, args: object, state: object) -> object:
        """Build a tensor that has Python attributes; a subclass of Tensor stays inert."""

        rebuild = self.hooks.get((fn.module, fn.name)) if isinstance(fn, Global) else None
        if (
            rebuild is None
            or rebuild == self._from_type
            or kind not in _PLAIN_CLASSES
            or not isinstance(args, tuple)
        ):
            parts = parts_of_tensor(fn, kind, args, state) if self._takes_apart else None
            if parts is None:
                return NotImplemented
            name = str(parts["class"])
            self.taken_apart[name] = self.taken_apart.get(name, 0) + 1
            return parts
        leaf = rebuild(*args)
        if isinstance(leaf, TensorLeaf):
            self._note_attributes(leaf, state)
        return leaf

    def _note_attributes(self, leaf: TensorLeaf, state: object) -> None:
        # The state is the ``__dict__``, or (``__dict__``, slots) for classes with slots.
        parts = state if isinstance(state, tuple) else (state,)
        names = [
            name
            for part in parts[:_MAX_ATTRIBUTES]
            if isinstance(part, dict)
            for name in islice(part, _MAX_ATTRIBUTES)
            if isinstance(name, str)
        ]
        if names:
            self.attributes[leaf.key] = tuple(names)

    def _build_tensor(
        self,
        storage: object,
        offset: object,
        size: object,
        stride: object,
        dtype: object,
        requires_grad: object,
    ) -> object:
        location = locate(storage, offset, size, stride, dtype)
        return NotImplemented if location is None else self._leaf(location, requires_grad)


def _size(*args: object) -> object:
    """Build a ``torch.Size``, which without this hook would become a plain tuple."""
    # torch.Size(extents), or torch.Size() for the shape of a scalar.
    extents = args[0] if len(args) == 1 else () if not args else None
    if not isinstance(extents, (tuple, list)) or len(extents) > MAX_RANK:
        return NotImplemented
    if any(type(extent) is not int for extent in extents):
        return NotImplemented
    return Size(extents)


_PLAIN_CLASSES = (
    Global("torch", "Tensor"),
    Global("torch._tensor", "Tensor"),
    Global("torch.nn.parameter", "Parameter"),
    Global("torch.nn.parameter", "Buffer"),
)


def locate(
    storage: object, offset: object, size: object, stride: object, dtype: object = None
) -> Location | None:
    """Return the location of a tensor, from the arguments of its rebuild function.

    Args:
        storage: the persistent id, as ``Persistent``.
        dtype: the ``Global`` that names the element type if the storage does not (v3), else None.

    Returns:
        None if the tensor is well-formed but of a kind that is not supported.

    Raises:
        CorruptError: the tensor is malformed, or reaches outside its storage.
    """

    # Check all values from the pickle before any arithmetic with them.
    kind, key, numel = storage_of(storage)
    if (
        not isinstance(size, (tuple, list))
        or not isinstance(stride, (tuple, list))
        or len(size) != len(stride)
    ):
        raise CorruptError(
            f"a tensor's shape {describe_value(size)} does not match its strides "
            f"{describe_value(stride)}"
        )
    for value in (offset, *size, *stride):
        if type(value) is not int or not 0 <= value < 1 << 63:
            text = describe_value(value)
            raise CorruptError(f"a tensor has an invalid offset, size or stride: {text}")
    assert isinstance(offset, int)
    if len(size) > MAX_RANK:
        raise CorruptError(f"a tensor has {len(size)} axes; the limit is {MAX_RANK}")
    first, shape, strides = offset, tuple(size), tuple(stride)
    # The element type comes from the storage's class, or (v3) from an argument of its own.
    storage_dtype = _STORAGES.get(kind.name)
    if dtype is None:
        name = storage_dtype
    elif isinstance(dtype, Global) and dtype.module == "torch":
        name = dtype.name
    else:
        raise CorruptError(f"a tensor has an invalid dtype: {describe_value(dtype)}")
    if storage_dtype is None or name not in DTYPES:
        return None
    # The last element must be inside the storage.
    storage_bytes = numel * DTYPES[storage_dtype].itemsize
    itemsize = DTYPES[name].itemsize
    if 0 not in shape:
        stop = (first + byte_span(shape, 1, strides)) * itemsize
        if stop > storage_bytes:
            raise CorruptError(
                f"a tensor of shape {shape!r:.200} with strides {strides!r:.200} needs {stop} "
                f"bytes, but its storage is only {storage_bytes} bytes long",
                rule="torch.storage",
            )
    # torch's own element counts have 63 bits, too.
    if prod(shape) >= 1 << 63:
        raise CorruptError(
            f"a tensor of shape {shape!r:.200} has too many elements to count in 63 bits",
            rule="torch.storage",
        )
    location = Location(
        f"data/{key}",
        storage_bytes,
        first * itemsize,
        name,
        shape,
        None if is_c_contiguous(shape, strides) else strides,
    )
    # An expanded view (stride 0) repeats its elements; a huge one is not worth materializing.
    if location.n_bytes > max(storage_bytes, MAX_EXPANDED_BYTES):
        return None
    return location


_STORAGES = {
    **{name: dtype.name for name, dtype in BY_STORAGE.items()},
    "UntypedStorage": "uint8",
    "_UntypedStorage": "uint8",
}
"""Name of a storage class → dtype of its elements; untyped storages count bytes."""


_QUANTIZED_STORAGES = {
    "QInt8Storage": 1,
    "QUInt8Storage": 1,
    "QInt32Storage": 4,
    "QUInt4x2Storage": 1,
    "QUInt2x4Storage": 1,
}
"""Bytes per element of storages whose tensors are not read, but whose length must be known."""


def storage_itemsize(kind: Global) -> int | None:
    """Return the bytes per element of a storage class; None for an unknown class."""
    name = _STORAGES.get(kind.name)
    return DTYPES[name].itemsize if name is not None else _QUANTIZED_STORAGES.get(kind.name)


def unknown_storage(node: object) -> Global | None:
    """Return the class of a bare storage if torch has no such class, else None."""
    pid = node.value if isinstance(node, Persistent) else None
    if (
        not isinstance(pid, tuple)
        or len(pid) < 2
        or pid[0] != "storage"
        or not isinstance(pid[1], Global)
    ):
        return None
    return None if storage_itemsize(pid[1]) is not None else pid[1]


def storage_of(storage: object) -> tuple[Global, str, int]:
    """Return class, key and number of elements of a storage, from its persistent id.

    Raises:
        CorruptError: the persistent id is not one that torch writes.
    """
    pid = storage.value if isinstance(storage, Persistent) else None
    if pid is None:
        raise CorruptError("a tensor has no storage")
    if isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage":
        # The fourth part is the device, which does not matter here.
        _, kind, key, _, numel = pid
        is_storage_class = (
            isinstance(kind, Global)
            and kind.module.split(".")[0] == "torch"
            and kind.name.endswith("Storage")
        )
        if is_storage_class and type(key) is str and type(numel) is int and 0 <= numel < 1 << 63:
            return kind, key, numel
    raise CorruptError(f"a tensor has a malformed storage: {describe_value(pid)}")


_KINDS = {
    "_rebuild_qtensor": "quantized tensor",
    "_rebuild_sparse_tensor": "sparse tensor",
    "_rebuild_sparse_csr_tensor": "sparse tensor",
    "_rebuild_nested_tensor": "nested tensor",
    "_rebuild_njt": "nested tensor",
    "_rebuild_meta_tensor_no_storage": "meta tensor without data",
    "_rebuild_wrapper_subclass": "tensor subclass",
    "_rebuild_device_tensor_from_numpy": "tensor on an unsupported device",
    "_rebuild_device_tensor_from_cpu_tensor": "tensor on an unsupported device",
    "_rebuild_xla_tensor": "tensor on an unsupported device",
}
"""Name of a rebuild function in torch → kind of tensor, for kinds that are not supported."""


def unsupported_kind(value: object) -> str | None:
    """Return the kind of an inert value that stands for an unsupported tensor; None for others."""
    if isinstance(value, Persistent):
        return "bare storage"
    if not isinstance(value, Inert) or not isinstance(value.fn, Global):
        return None
    if value.fn.module.split(".")[0] != "torch":
        return None
    name, args = value.fn.name, value.args
    if name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_tensor"):
        # ``locate`` refused it. The metadata, {"conj": True} or {"neg": True}, is the last argument
        # if it is present.
        flags = next((part for part in reversed(args) if isinstance(part, dict) and part), None)
        if flags is not None:
            return f"view with the {' and '.join(str(name)[:40] for name in flags)} bit"
        dtype = args[6] if len(args) > 6 else None
        kind = storage_of(args[0])[0] if args and isinstance(args[0], Persistent) else None
        if isinstance(dtype, Global) and dtype.name not in DTYPES:
            return f"tensor of dtype {dtype.name}"
        if kind is not None and kind.name not in _STORAGES:
            return f"tensor with a {kind.name}"
        return f"view expanded to more than {MAX_EXPANDED_BYTES >> 30} GiB"
    # A parameter is unsupported because of the tensor that it wraps.
    if name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
        return unsupported_kind(args[0]) if args else "malformed parameter"
    if name == "_rebuild_from_type_v2":
        if len(args) < 2:
            return "malformed tensor"
        # So is a plain tensor with attributes; a subclass is unsupported because of its class.
        if args[1] in _PLAIN_CLASSES and len(args) > 2 and type(args[2]) is tuple:
            inner = unsupported_kind(Inert("reduce", args[0], args[2]))
            if inner:
                return inner
        return f"tensor of the class {args[1]}"
    return _KINDS.get(name)


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
