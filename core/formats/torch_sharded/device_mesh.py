"""The device mesh of a DTensor, as one rank's file describes it.

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
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Shape
from core.errors import CorruptError, UnsupportedError
from core.formats.torch_sharded.local_part import is_rank, shape_of
from core.pickle.inert import TensorLeaf, attributes
from core.values import dataclass

if TYPE_CHECKING:
    from core.catalog.stored import StoredArray


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
        tuple(map(str, names)) if isinstance(names, (tuple, list)) else (),
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
