"""The part of a distributed tensor in one rank's file: of a DTensor, and of torchao's classes.

The parts of DTensors whose local tensors are of torchao's classes::

    rank 0   exp_avg: DTensor [Shard(0)] of OptimState8bit (64, 64)   codes scale qmap, rows 0–63
    rank 1   exp_avg: DTensor [Shard(0)] of OptimState8bit (64, 64)   codes scale qmap, rows 64–127

become ``exp_avg.codes``, ``exp_avg.scale``, ``exp_avg.qmap`` of the global tensor and its settings,
as in DCP (``core.formats.torch.joined_parts``, which tells what cannot be joined). Where several
ranks hold the same rows (HSDP), their parts are replicas.

Source: torchao 0.18.0 ``optim/subclass_*.py``; files that torch 2.13 wrote of its optimizers under
FSDP2, in tests/golden/quantized_ranks.tar.xz.

The state of a DTensor::

    (None, {"_local_tensor": the part of this rank, a plain tensor
            "_spec": DTensorSpec {
                "mesh": see below
                "placements": (Shard {"dim"}, _StridedShard {"dim", "split_factor"},
                               Replicate, Partial, one for each axis of the mesh)
                "shard_order": (ShardOrderEntry(axis, mesh axes), …)   later torch; may be None
            }})

The position of the part follows from mesh and placements (``mesh_cut``), and is compared with the
shape of the local tensor. This may be of torchao's classes.

Not supported, refused by name: ``Partial`` placements, whose ranks hold partial sums; placements of
other classes; local tensors of other classes; torchao's in strided shards.

Source: torch 2.13 ``torch/distributed/tensor/_dtensor_spec.py``, ``placement_types.py``; files that
it wrote, in tests/golden/dtensor.tar.xz.

The device mesh, as one rank's file describes it::

    DeviceMesh {"_layout": _MeshLayout {"axes": (_FlatLayout {"shape"}, …)},   or {"shape"} before
                "_flatten_rank_map": ranks of the mesh that this one was sliced from,
                "_rank": this rank, "_coordinate_on_dim": its place in the mesh, or None,
                "_mesh_dim_names": names of the axes, or None}                 torch 2.10 and later

    DeviceMesh {"mesh": tensor of ranks, "_flatten_mesh_list": the same as a list,
                "_coordinate_on_dim", "mesh_dim_names"}                        torch 2.2 to 2.9

Source: torch 2.13 ``torch/distributed/device_mesh.py``, ``_mesh_layout.py``, and their versions
since 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from math import prod
from typing import TypeGuard

from core.arrays.box import Box, Shape
from core.arrays.sharding import ShardPiece
from core.engine.catalog.stored import StoredArray, array_name
from core.engine.catalog.tensor import Fragment, Tensor, bind_argument
from core.errors import CorruptError, UnsupportedError
from core.formats.torch.joined_parts import JoinedParts, joined_parts
from core.formats.torch.tensors import unsupported_kind
from core.formats.torch.tree import TorchTree
from core.formats.torch_sharded.mesh_cut import MeshCut, local_boxes
from core.pickle.fields import FieldReader, list_or_empty
from core.pickle.inert import Global, Inert, TensorLeaf, attributes
from core.values import dataclass

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
        inner = unsupported_kind(local) or "value of an unsupported class"
        raise UnsupportedError(f"{kind} with a local part that is a {inner}")
    return arrays[local.key]


def parts_in(
    local: object, arrays: Mapping[str, StoredArray]
) -> Mapping[str, StoredArray | object] | None:
    """Return the parts and settings of a local tensor of torchao's classes; None for any other.

    Args:
        local: the local tensor, as the hooks of ``core.formats.torch.tensors`` left it.
        arrays: the arrays of the file by the keys of their leaves.
    """
    value = unwrapped(local)
    if not isinstance(value, dict):
        return None
    return {
        str(name): arrays[item.key] if isinstance(item, TensorLeaf) else item
        for name, item in value.items()
    }


def join_quantized(key: str, shape: Shape, parts: Sequence[QuantizedPart]) -> JoinedParts | str:
    """Join the parts of a tensor that the ranks hold.

    Args:
        key, shape: the global tensor.
        parts: what each rank holds; their arrays have the rank as coordinate.

    Returns:
        The reason, if they cannot be joined.
    """
    first_of = {part.box: part for part in reversed(parts)}
    joined = joined_parts(key, shape, [(part.box, _tree(key, part)) for part in first_of.values()])
    if isinstance(joined, str):
        return joined

    # A replica has the boxes of the first rank with the same rows.
    tensors: dict[str, Tensor] = {}
    for name, tensor in joined.tensors.items():
        fragments: list[Fragment] = []
        for fragment in tensor.fragments():
            for array in _replicas(name, fragment, parts):
                named = replace(array, name=f"{array.extent.file}:{array_name(name, fragment.box)}")
                fragments.append(replace(fragment, array=named))
        tensors[name] = replace(tensor, tiling=bind_argument(tuple, fragments))
    return replace(joined, tensors=tensors)


def _tree(key: str, part: QuantizedPart) -> TorchTree:
    """Return a rank's parts in the form of an item of DCP."""
    names = {name: f"{key}.{name}" for name in part.parts}
    value = {
        name: TensorLeaf(names[name]) if isinstance(item, StoredArray) else item
        for name, item in part.parts.items()
    }
    arrays = {
        names[name]: item for name, item in part.parts.items() if isinstance(item, StoredArray)
    }
    return TorchTree(value, arrays)


def _replicas(
    name: str, fragment: Fragment, parts: Sequence[QuantizedPart]
) -> Iterator[StoredArray]:
    """Yield the arrays of all ranks that hold the same rows as a fragment of a part."""
    part_name = name.rpartition(".")[2]
    assert fragment.array is not None
    owner = next(
        part
        for part in parts
        if isinstance(item := part.parts[part_name], StoredArray)
        and item.extent == fragment.array.extent
    )
    for part in parts:
        item = part.parts[part_name]
        if part.box == owner.box and isinstance(item, StoredArray):
            yield item


def dtensor_part(state: object, shape: Shape, arrays: Mapping[str, StoredArray]) -> LocalPart:
    """Parse the state of a DTensor; raises the errors of ``local_part``."""
    # The state is (None, slots) with the attributes in either part.
    fields: dict[object, object] = {}
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            fields |= part
    spec = attributes(fields.get("_spec"))
    if spec is None or "_local_tensor" not in fields:
        raise CorruptError("a DTensor is malformed: it has no spec or no local tensor")
    # A tensor of torchao's classes is a mapping of its parts, with the shape that they stand for.
    parts = parts_in(fields["_local_tensor"], arrays)
    if parts is None:
        array = plain_array(fields["_local_tensor"], arrays, "DTensor")
        dtype, stored_shape = array.dtype, array.shape
    else:
        dtype = str(parts["dtype"])
        stored_shape = shape_of(parts["shape"], "the shape of its local tensor")
    mesh = mesh_place(spec.get("mesh"), arrays)
    cuts = _cuts(spec, shape, mesh)
    base = LocalPart(
        "DTensor",
        dtype,
        shape,
        (),
        rank=mesh.rank,
        ranks=mesh.ranks,
        cuts=_placements_text(spec, mesh),
    )
    # A rank that is not in the mesh has an empty local tensor.
    if mesh.coordinate is None:
        return base
    local_shape, boxes = local_boxes(shape, cuts)
    if stored_shape == local_shape and parts is not None:
        if len(boxes) > 1:
            raise UnsupportedError(
                f"DTensor that splits a torchao {parts['class']} into strided shards"
            )
        return replace(base, quantized=QuantizedPart(boxes[0].box, parts)) if boxes else base
    if stored_shape == local_shape:
        return replace(base, arrays=(HeldArray(array, tuple(boxes)),) if boxes else ())
    # Some versions of torch give an empty part another shape.
    if 0 in local_shape and 0 in stored_shape:
        return base
    raise CorruptError(
        f"a DTensor of shape {shape} has a local part of shape {stored_shape}, but its placements "
        f"({base.cuts}) imply a local shape of {local_shape}"
    )


def _cuts(spec: Mapping[str, object], shape: Shape, mesh: MeshPlace) -> list[MeshCut]:
    """Return the cuts of a DTensor, in the order in which they are applied.

    Raises:
        UnsupportedError: a placement is not a shard or replica.
        CorruptError: the placements do not fit the mesh or the tensor.
    """
    placements = spec.get("placements")
    if not isinstance(placements, (tuple, list)) or len(placements) != len(mesh.shape):
        raise CorruptError(
            f"a DTensor's placements do not match its device mesh of shape {mesh.shape}"
        )
    coordinate = mesh.coordinate or (0,) * len(mesh.shape)
    reader = FieldReader()
    cuts: dict[int, MeshCut] = {}
    for number, placement in enumerate(placements):
        name = _class_of(placement)
        if name == "Replicate":
            continue
        fields = attributes(placement) or {}
        axis, split_factor = fields.get("dim"), fields.get("split_factor", 1)
        if name not in ("Shard", "_StridedShard"):
            summands = ", where every rank has a partial sum" if "Partial" in name else ""
            raise UnsupportedError(f"DTensor with the placement {name}{summands}")
        n = len(shape)
        axis = reader.read_int(
            axis, f"the axis of a DTensor of shape {shape}", least=-n, most=n - 1
        )
        factor = reader.read_int(split_factor, "the split factor of a DTensor", least=1)
        cuts[number] = MeshCut(axis % n, mesh.shape[number], coordinate[number], factor)
    # Cuts are applied from left to right, unless plain shards come with an order of their own.
    if all(cut.split_factor == 1 for cut in cuts.values()):
        order = _shard_order(spec.get("shard_order"))
        if sorted(order) == sorted(cuts):
            return [cuts[number] for number in order]
    return list(cuts.values())


def _class_of(value: object) -> str:
    """Return the name of an inert object's class without its module."""
    return value.fn.name if isinstance(value, Inert) and isinstance(value.fn, Global) else "?"


def _shard_order(value: object) -> list[int]:
    """Return the mesh axes of a ``shard_order``, by tensor axis; [] without one.

    Raises:
        CorruptError: it is malformed.
    """
    if value is None:
        return []
    order: list[int] = []
    for entry in list_or_empty(value):
        if not isinstance(entry, Inert) or len(entry.args) != 2:
            raise CorruptError("a DTensor's shard_order is malformed")
        order += shape_of(entry.args[1], "shard_order")
    return order


def _placements_text(spec: Mapping[str, object], mesh: MeshPlace) -> str:
    """Return a few words on mesh and placements: ``dp 2 × tp 4: Shard(0), Replicate``."""
    placements = spec.get("placements")
    names = mesh.names if len(mesh.names) == len(mesh.shape) else ("",) * len(mesh.shape)
    axes = " × ".join(
        f"{name} {extent}".strip() for name, extent in zip(names, mesh.shape, strict=True)
    )
    texts = []
    for placement in list_or_empty(placements):
        axis = (attributes(placement) or {}).get("dim")
        texts.append(_class_of(placement) + (f"({axis})" if type(axis) is int else ""))
    return f"{axes}: {', '.join(texts)}"


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """A device mesh as one rank's file describes it.

    Args:
        shape: number of ranks along each axis.
        coordinate: place of the rank in it; None if the rank is not in it.
        rank: number of the rank in the job; None if unknown.
        ranks: the ranks in the mesh, or in the mesh that it was sliced from.
        names: names of the axes; () if they have none.
    """

    shape: Shape
    coordinate: Shape | None
    rank: int | None
    ranks: frozenset[int]
    names: tuple[str, ...]


def mesh_place(value: object, arrays: Mapping[str, StoredArray]) -> MeshPlace:
    """Parse a DeviceMesh.

    Raises:
        CorruptError: it is malformed.
        UnsupportedError: its shape is not described in a known way.
    """
    fields = attributes(value)
    if fields is None:
        raise CorruptError("a DTensor is malformed: it has no device mesh")
    layout = attributes(fields.get("_layout"))
    if isinstance(fields.get("mesh"), TensorLeaf):
        leaf = fields["mesh"]
        assert isinstance(leaf, TensorLeaf)
        shape = arrays[leaf.key].shape
    elif layout is not None:
        shape = _layout_shape(layout)
    else:
        raise UnsupportedError("DTensor with a device mesh in an unknown format")
    coordinate = fields.get("_coordinate_on_dim")
    place = None if coordinate is None else shape_of(coordinate, "the coordinate in the mesh")
    if place is not None and (
        len(place) != len(shape) or any(i >= n for i, n in zip(place, shape, strict=True))
    ):
        raise CorruptError(f"coordinate {place} is outside its device mesh of shape {shape}")
    # Torch 2.10 and later record the ranks of the mesh that this one was sliced from.
    listed = fields.get("_flatten_rank_map", fields.get("_flatten_mesh_list", ()))
    if not isinstance(listed, (tuple, list)) or not all(is_rank(rank) for rank in listed):
        raise CorruptError("a device mesh lists values that are not ranks")
    rank = fields.get("_rank")
    if not is_rank(rank):
        # Before, a mesh listed its own ranks, in the order of its coordinates.
        rank = None
        if place is not None and len(listed) == prod(shape) and "_flatten_mesh_list" in fields:
            rank = listed[_flat_index(place, shape)]
    names = fields.get("_mesh_dim_names", fields.get("mesh_dim_names"))
    return MeshPlace(
        shape,
        place,
        rank,
        frozenset(listed),
        tuple(map(str, list_or_empty(names))),
    )


def _layout_shape(layout: Mapping[str, object]) -> Shape:
    """Return the shape of a mesh from its ``MeshPlaceLayout``.

    The layout has a list of axes, each with a shape that may consist of several numbers; before, it
    had one shape, in which an axis may be a tuple.
    """
    axes = layout.get("axes")
    if isinstance(axes, (tuple, list)):
        extents: list[object] = [(attributes(axis) or {}).get("shape") for axis in axes]
    else:
        sizes = layout.get("shape")
        extents = list(sizes) if isinstance(sizes, (tuple, list)) else [sizes]
    return tuple(
        prod(shape_of(extent if isinstance(extent, (tuple, list)) else (extent,), "a mesh axis"))
        for extent in extents
    )


def _flat_index(place: Shape, shape: Shape) -> int:
    """Return the number of a place in C order."""
    index = 0
    for i, n in zip(place, shape, strict=True):
        index = index * n + i
    return index
