"""Which boxes a rank holds, compared with what torch's own placements cut."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor.placement_types import _StridedShard

from core.arrays.box import Shape
from core.errors import UnsupportedError
from core.formats.torch_sharded.mesh_cut import MeshCut, local_boxes


def _cut_by_torch(tensor: torch.Tensor, mesh: Shape, place: Shape, placements: object) -> object:
    for n_parts, part, placement in zip(mesh, place, placements, strict=True):  # type: ignore[call-overload]
        if not isinstance(placement, Replicate):
            pieces, _ = placement._split_tensor(tensor, n_parts, with_padding=False)
            tensor = pieces[part]
    return tensor


def _cut_by_boxes(tensor: torch.Tensor, cuts: list[MeshCut]) -> torch.Tensor:
    local_shape, boxes = local_boxes(tuple(tensor.shape), cuts)
    local = torch.full(local_shape, -1, dtype=tensor.dtype)
    for local_box in boxes:
        source = tuple(
            slice(o, e) for o, e in zip(local_box.box.offset, local_box.box.end, strict=True)
        )
        target = tuple(
            slice(o, o + n) for o, n in zip(local_box.at, local_box.box.shape, strict=True)
        )
        local[target] = tensor[source]
    return local


def _cuts(mesh: Shape, place: Shape, placements: object) -> list[MeshCut]:
    return [
        MeshCut(placement.dim, n_parts, part, getattr(placement, "split_factor", 1))
        for n_parts, part, placement in zip(mesh, place, placements, strict=True)  # type: ignore[call-overload]
        if not isinstance(placement, Replicate)
    ]


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 2), (4, 2)], ids=str)
def test_boxes_are_those_that_torch_cuts_even_where_nothing_divides_evenly(mesh: Shape) -> None:
    placements = [
        (Shard(0), Shard(0)),
        (_StridedShard(0, split_factor=mesh[1]), Shard(0)),
        (_StridedShard(1, split_factor=mesh[1]), Shard(1)),
        (Shard(0), Shard(1)),
        (Replicate(), Shard(0)),
        (Shard(1), Replicate()),
        (Shard(0), _StridedShard(0, split_factor=2)),
    ]
    for rows, columns, pair in product((0, 1, 2, 5, 8, 11, 13), (1, 6, 7), placements):
        tensor = torch.arange(rows * columns).reshape(rows, columns)
        for place in product(*map(range, mesh)):
            expected = _cut_by_torch(tensor, mesh, place, pair)
            assert isinstance(expected, torch.Tensor)
            assert torch.equal(_cut_by_boxes(tensor, _cuts(mesh, place, pair)), expected)


def test_an_order_of_shards_is_the_same_as_the_strided_shards_that_torch_makes_of_it() -> None:
    mesh = (2, 3, 2)

    class _Mesh:
        def size(self, axis: int) -> int:
            return mesh[axis]

    placements = (Shard(0), Shard(0), Shard(0))
    for order in [(2, 0, 1), (1, 0, 2), (2, 1, 0), (0, 2, 1)]:
        strided = DTensorSpec._convert_shard_order_to_StridedShard(
            (ShardOrderEntry(0, order),),
            placements,
            _Mesh(),  # type: ignore[arg-type]
        )
        tensor = torch.arange(24)
        for place in product(*map(range, mesh)):
            in_order = [_cuts(mesh, place, placements)[axis] for axis in order]
            by_strides = _cut_by_boxes(tensor, _cuts(mesh, place, strided))
            assert torch.equal(_cut_by_boxes(tensor, in_order), by_strides)


def test_a_forged_split_factor_is_refused_without_work() -> None:
    with pytest.raises(UnsupportedError, match="split factor of 1152921504606846976"):
        local_boxes((1 << 40,), [MeshCut(0, 2, 1, 1 << 60)])
