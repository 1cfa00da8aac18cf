"""core.arrays.sharding: the geometry of sharding rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.arrays.box import Box
from core.arrays.sharding import (
    ShardPiece,
    check_divides,
    check_heads,
    padded_vocab_size,
    replicated_pieces,
    shard_shape,
    split_axis,
    trim_piece,
)
from core.errors import UnsupportedError


def rows_of(pieces: list[ShardPiece]) -> list[int]:
    return [row for piece in pieces for row in range(piece.box.offset[0], piece.box.end[0])]


def test_a_gated_mlp_keeps_gate_and_up_apart() -> None:
    assert rows_of(split_axis((24, 4), 0, parts=[12, 12], rank=0, n=2)) == [
        *range(6),
        *range(12, 18),
    ]
    assert rows_of(split_axis((24, 4), 0, parts=[12, 12], rank=1, n=2)) == [
        *range(6, 12),
        *range(18, 24),
    ]


def test_a_mamba_projection_has_five_parts() -> None:
    assert rows_of(split_axis((32,), 0, parts=[8, 8, 6, 6, 4], rank=0, n=2)) == [
        *range(4),
        *range(8, 12),
        *range(16, 19),
        *range(22, 25),
        28,
        29,
    ]


def test_row_parallel_cuts_columns() -> None:
    assert split_axis((3, 8), 1, parts=[8], rank=1, n=4) == [
        ShardPiece(Box((0, 2), (3, 2)), (0, 0))
    ]


def test_pieces_lie_behind_each_other_in_the_shard() -> None:
    pieces = split_axis((24, 4), 0, parts=[12, 12], rank=1, n=2)
    assert [piece.at for piece in pieces] == [(0, 0), (6, 0)]


def test_replication_is_one_piece() -> None:
    assert replicated_pieces((2, 3)) == [ShardPiece(Box((0, 0), (2, 3)), (0, 0))]
    assert replicated_pieces(()) == [ShardPiece(Box((), ()), ())]


@given(
    units=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    n=st.integers(1, 6),
    axis=st.integers(0, 2),
)
def test_shards_tile_the_tensor(units: list[int], n: int, axis: int) -> None:
    parts = [unit * n for unit in units]
    shape = tuple(sum(parts) if a == axis else 2 for a in range(3))
    owner: dict[int, int] = {}
    for rank in range(n):
        n_before = 0
        for piece in split_axis(shape, axis, parts=parts, rank=rank, n=n):
            assert piece.at[axis] == n_before
            n_before += piece.box.shape[axis]
            for index in range(piece.box.offset[axis], piece.box.end[axis]):
                assert index not in owner
                owner[index] = rank
        assert n_before == shard_shape(shape, axis, n)[axis]
    assert sorted(owner) == list(range(shape[axis]))


def test_a_size_that_does_not_divide_names_those_that_do() -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_divides([96, 96], 5, key="decoder.layers.0.mlp.linear_fc1.weight", axis=0, group="TP")
    assert "96 elements of axis 0 are not divisible by TP 5" in str(caught.value)
    assert "1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96" in str(caught.value)
    assert caught.value.key == "decoder.layers.0.mlp.linear_fc1.weight"


def test_heads_that_do_not_divide_name_the_sizes_that_do() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"28 attention heads are not divisible by TP 8.*: 1, 2, 4, 7, 14, 28$",
    ):
        check_heads(n_heads=28, n_groups=28, tp=8, key="k")


@pytest.mark.parametrize(
    ("n_heads", "n_groups", "tp"), [(128, 8, 16), (8, 4, 8), (8, 4, 4), (8, 1, 8), (1, 1, 1)]
)
def test_tensor_parallelism_may_be_a_multiple_of_the_groups(
    n_heads: int, n_groups: int, tp: int
) -> None:
    check_heads(n_heads=n_heads, n_groups=n_groups, tp=tp, key="k")


def test_groups_that_neither_divide_nor_are_divided_are_refused() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"TP 4 is neither a divisor nor a multiple of the 6 query groups.*: 1, 2",
    ):
        check_heads(n_heads=24, n_groups=6, tp=4, key="k")


@pytest.mark.parametrize(
    ("n_rows", "padded"),
    [
        (50257, [50304, 50432, 50688, 51200, 51200]),
        (128256, [128256, 128256, 128512, 129024, 129024]),
        (151643, [151680, 151808, 152064, 152576, 153600]),
        (129280, [129280, 129280, 129536, 130048, 131072]),
        (256000, [256000] * 5),
    ],
)
def test_vocabularies_are_padded_as_megatron_does(n_rows: int, padded: list[int]) -> None:
    assert [padded_vocab_size(n_rows, divisible_by=128, tp=tp) for tp in (1, 2, 4, 8, 16)] == padded


def test_pieces_are_cut_at_the_true_vocabulary() -> None:
    piece = ShardPiece(Box((4, 0), (4, 3)), (0, 0))
    assert trim_piece(piece, 0, 6) == ShardPiece(Box((4, 0), (2, 3)), (0, 0))
    assert trim_piece(piece, 0, 8) == piece
    assert trim_piece(piece, 0, 4) is None
