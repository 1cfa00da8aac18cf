"""core.engine.catalog.flat_runs: every element of a shard comes from where a flat array has
it.
"""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from core.arrays.box import Shape
from core.arrays.sharding import replicated_pieces, split_axis, trim_piece
from core.engine.catalog.flat_runs import FlatRun, fragments_of_run, runs_in
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment


def _stored(name: str, n: int, offset: int = 0) -> StoredArray:
    return StoredArray(name, "float32", (n,), Extent(name, offset))


def _fill(dense_array: np.ndarray, fragment: Fragment, data: dict[str, np.ndarray]) -> None:
    """Copies a fragment out of its file; an element is copied once."""
    assert fragment.array is not None
    start = fragment.array.extent.offset // 4
    dense = data[fragment.array.extent.file][start : start + prod(fragment.array.shape)].reshape(
        fragment.array.shape
    )
    box = fragment.box
    region = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
    assert (dense_array[region] == -1).all()
    dense_array[region] = dense[
        tuple(slice(a, a + n) for a, n in zip(fragment.at, box.shape, strict=True))
    ]


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Shape, int, list[int], int, list[int]]:
    """(global shape, cut axis, its parts, ranks, where the flat shard is cut)."""
    n_ranks = draw(st.integers(1, 3))
    axis = draw(st.integers(0, 2))
    parts = [n_ranks * draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 2)))]
    shape = [draw(st.integers(1, 4)) for _ in range(3)]
    shape[axis] = sum(parts)
    cuts = sorted({0, *draw(st.lists(st.integers(0, prod(shape) // n_ranks), max_size=5))})
    return tuple(shape), axis, parts, n_ranks, cuts


@given(_cases(), st.integers(0, 7))
def test_runs_of_all_shards_make_the_tensor(
    case: tuple[Shape, int, list[int], int, list[int]], at: int
) -> None:
    shape, axis, parts, n_ranks, cuts = case
    true = np.arange(prod(shape)).reshape(shape)
    values = np.full(shape, -1)
    for rank in range(n_ranks):
        pieces = split_axis(shape, axis, parts=parts, rank=rank, n=n_ranks)
        local = tuple(n // n_ranks if i == axis else n for i, n in enumerate(shape))
        shard = np.zeros(local, np.int64)
        for piece in pieces:
            region = tuple(slice(o, o + n) for o, n in zip(piece.at, piece.box.shape, strict=True))
            shard[region] = true[
                tuple(slice(o, e) for o, e in zip(piece.box.offset, piece.box.end, strict=True))
            ]
        for start, stop in zip(cuts, [*cuts[1:], prod(local)], strict=True):
            name = f"{rank}.{start}"
            flat = np.concatenate([np.full(at, -7), shard.reshape(-1)[start:stop], np.full(3, -7)])
            run = FlatRun(start, stop - start, _stored(name, len(flat)), at)
            for fragment in fragments_of_run(run, pieces, shape=local):
                _fill(values, fragment, {name: flat})
    assert (values == true).all()


def test_what_pieces_leave_out_is_in_no_fragment() -> None:
    (piece,) = split_axis((8, 3), 0, parts=[8], rank=1, n=2)
    trimmed = trim_piece(piece, 0, 6)
    assert trimmed is not None
    fragments = list(fragments_of_run(FlatRun(1, 11, _stored("a", 11), 0), [trimmed], shape=(4, 3)))
    assert [fragment.box.offset for fragment in fragments] == [(4, 1), (5, 0)]
    assert sum(fragment.box.n_elements for fragment in fragments) == 5


def test_a_scalar_and_an_empty_run() -> None:
    (fragment,) = fragments_of_run(
        FlatRun(0, 1, _stored("a", 4), 2), replicated_pieces(()), shape=()
    )
    assert (
        fragment.array is not None
        and fragment.array.shape == ()
        and fragment.array.extent == Extent("a", 8)
    )
    assert (
        list(
            fragments_of_run(
                FlatRun(3, 0, _stored("a", 4), 2), replicated_pieces((2, 2)), shape=(2, 2)
            )
        )
        == []
    )


def test_a_run_of_a_flat_tensor_in_several_arrays() -> None:
    first, second, third = (_stored(name, n) for name, n in (("a", 5), ("b", 2), ("c", 9)))
    stored = [(0, first), (5, second), (7, third)]
    assert list(runs_in(stored, 3, 6)) == [
        FlatRun(0, 2, first, 3),
        FlatRun(2, 2, second, 0),
        FlatRun(4, 2, third, 0),
    ]
    assert list(runs_in(stored, 7, 9)) == [FlatRun(0, 9, third, 0)]
