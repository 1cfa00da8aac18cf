"""Parse the state of a DTensor.

::

    (None, {"_local_tensor": the part of this rank, a plain tensor
            "_spec": DTensorSpec {
                "mesh": see below
                "placements": (Shard {"dim"}, _StridedShard {"dim", "split_factor"},
                               Replicate, Partial, one for each axis of the mesh)
                "shard_order": (ShardOrderEntry(axis, mesh axes), …)   later torch; may be None
            }})

The position of the part follows from mesh and placements (``mesh_cut``), and is compared with the
shape of the local tensor. This may be of torchao's classes (``quantized_parts``).

Not supported, refused by name: ``Partial`` placements, whose ranks hold partial sums; placements of
other classes; local tensors of other classes; torchao's in strided shards.

Source: torch 2.13 ``torch/distributed/tensor/_dtensor_spec.py``, ``placement_types.py``; files that
it wrote, in tests/golden/dtensor.tar.xz.

The device mesh, as one rank's file describes it.

::

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

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Shape
from core.errors import CorruptError, UnsupportedError
from core.formats.torch_sharded.local_part import (
    HeldArray,
    LocalPart,
    QuantizedPart,
    is_rank,
    plain_array,
    shape_of,
)
from core.formats.torch_sharded.mesh_cut import MeshCut, local_boxes
from core.formats.torch_sharded.quantized_parts import parts_in
from core.pickle.fields import FieldReader, list_or_empty
from core.pickle.inert import Global, Inert, TensorLeaf, attributes
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray


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
            raise UnsupportedError(f"DTensor of {parts['class']} of torchao in strided shards")
        return replace(base, quantized=QuantizedPart(boxes[0].box, parts)) if boxes else base
    if stored_shape == local_shape:
        return replace(base, arrays=(HeldArray(array, tuple(boxes)),) if boxes else ())
    # Some versions of torch give an empty part another shape.
    if 0 in local_shape and 0 in stored_shape:
        return base
    raise CorruptError(
        f"a DTensor of shape {shape} has a local part of shape {stored_shape}, but its placements "
        f"({base.cuts}) give {local_shape}"
    )


def _cuts(spec: Mapping[str, object], shape: Shape, mesh: MeshPlace) -> list[MeshCut]:
    """Return the cuts of a DTensor, in the order in which they are applied.

    Raises:
        UnsupportedError: a placement is not a shard or replica.
        CorruptError: the placements do not fit the mesh or the tensor.
    """
    placements = spec.get("placements")
    if not isinstance(placements, (tuple, list)) or len(placements) != len(mesh.shape):
        raise CorruptError(f"a DTensor's placements do not fit its mesh of shape {mesh.shape}")
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
            summands = ", whose ranks hold partial sums" if "Partial" in name else ""
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
        shape = __layout_shape(layout)
    else:
        raise UnsupportedError(
            "DTensor on a device mesh that an unknown version of torch describes"
        )
    coordinate = fields.get("_coordinate_on_dim")
    place = None if coordinate is None else shape_of(coordinate, "the coordinate in the mesh")
    if place is not None and (
        len(place) != len(shape) or any(i >= n for i, n in zip(place, shape, strict=True))
    ):
        raise CorruptError(f"coordinate {place} is not in a device mesh of shape {shape}")
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


def __layout_shape(layout: Mapping[str, object]) -> Shape:
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
