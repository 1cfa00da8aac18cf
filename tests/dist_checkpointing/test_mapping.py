"""Sharded tensors, objects and factories: like megatron-core's, and by their own rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.dist_checkpointing import mapping
from core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    is_main_replica,
)
from core.errors import CheckpointingException, CorruptError
from tests.support.rounds import rounds

FIELDS = """
    key dtype local_shape global_shape global_offset axis_fragmentations replica_id prepend_axis_num
    allow_shape_mismatch flattened_range
    """.split()
MODEST = settings(max_examples=rounds(300), deadline=None)


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    """megatron-core's module of the same name."""
    pytest.importorskip("megatron.core")
    return pytest.importorskip("megatron.core.dist_checkpointing.mapping")


def outcome(function: Callable[[], Any]) -> Any:
    """What it returns, or None if it raises one of the errors that these functions may raise."""
    try:
        return function()
    except (CheckpointingException, ValueError):
        return None


def their_outcome(function: Callable[[], Any]) -> Any:
    """What it returns, or None if it raises anything."""
    try:
        return function()
    except Exception:
        return None


def described(tensor: Any) -> Any:
    """All attributes of a sharded tensor, its data as nested lists."""
    if tensor is None:
        return None
    return {name: getattr(tensor, name) for name in FIELDS} | {
        "data": None if tensor.data is None else tensor.data.tolist()
    }


small = st.integers(0, 3)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
offsets = st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, 3), st.integers(0, 4)), max_size=3)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


@MODEST
@given(
    shape=shapes,
    rank_offsets=offsets,
    prepend=small,
    replica=st.sampled_from([0, 1, (0, 0), (0, 1, 2)]),
    flexible=st.booleans(),
)
def test_rank_offsets_give_the_same_tensor_or_an_error_in_both(
    theirs: ModuleType, shape: Any, rank_offsets: Any, prepend: int, replica: Any, flexible: bool
) -> None:
    def make_tensor(module: ModuleType) -> Any:
        return module.ShardedTensor.from_rank_offsets(
            "w",
            numbered(shape),
            *rank_offsets,
            replica_id=replica,
            prepend_axis_num=prepend,
            allow_shape_mismatch=flexible,
        )

    ours, other = outcome(lambda: make_tensor(mapping)), their_outcome(lambda: make_tensor(theirs))
    assert described(ours) == described(other)
    if ours is not None:
        assert repr(ours) == repr(other)
        assert ours.global_slice() == other.global_slice()
        assert ours.max_allowed_chunks() == other.max_allowed_chunks()
        assert ours.has_regular_grid is other.has_regular_grid is True
        assert described(ours.without_data()) == described(other.without_data())
        if 0 not in shape:  # theirs divides by zero
            assert ours.local_chunk_offset_in_global() == other.local_chunk_offset_in_global()


@MODEST
@given(
    data=st.none() | shapes,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    local=shapes,
    extents=shapes,
    offset=shapes,
    fragmentations=st.none() | st.lists(st.integers(1, 3), max_size=3).map(tuple),
    prepend=small,
    flexible=st.booleans(),
)
def test_any_attributes_are_accepted_or_refused_by_both(
    theirs: ModuleType,
    data: Any,
    dtype: Any,
    local: Any,
    extents: Any,
    offset: Any,
    fragmentations: Any,
    prepend: int,
    flexible: bool,
) -> None:
    values = None if data is None else numbered(data)

    def make_tensor(module: ModuleType) -> Any:
        return module.ShardedTensor(
            "w", values, dtype, local, extents, offset, fragmentations, 0, prepend, flexible
        )

    ours, other = outcome(lambda: make_tensor(mapping)), their_outcome(lambda: make_tensor(theirs))
    assert described(ours) == described(other)
    if ours is None:
        return
    assert ours.global_slice() == other.global_slice()
    if 0 not in local:
        chunks = [
            outcome(ours.local_chunk_offset_in_global),
            their_outcome(other.local_chunk_offset_in_global),
        ]
        assert chunks[0] == chunks[1]
    if fragmentations is not None and len(fragmentations) == len(
        extents
    ):  # theirs leaves out what has no partner
        assert outcome(ours.max_allowed_chunks) == their_outcome(other.max_allowed_chunks)


@MODEST
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    prepend=small,
    grid=st.lists(st.integers(1, 3), min_size=6, max_size=6),
    dim=st.integers(-1, 3),
    start=st.integers(-2, 4),
    length=st.integers(-1, 4),
)
def test_narrowing_gives_the_same_tensor_or_an_error_in_both(
    theirs: ModuleType, shape: Any, prepend: int, grid: Any, dim: int, start: int, length: int
) -> None:
    rank_offsets = [(axis, grid[axis] - 1, grid[axis]) for axis in range(prepend + len(shape))]

    def narrowed(module: ModuleType) -> Any:
        full = module.ShardedTensor.from_rank_offsets(
            "w", numbered(shape), *rank_offsets, prepend_axis_num=prepend
        )
        return full.narrow(dim, start, length)

    if dim < 0 and prepend:  # theirs takes the shape of a prepended axis then
        return
    ours, other = outcome(lambda: narrowed(mapping)), their_outcome(lambda: narrowed(theirs))
    assert (ours is None) == (other is None)
    if ours is not None:
        assert [described(tensor) for tensor in ours] == [described(tensor) for tensor in other]


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    parts=st.lists(st.integers(0, 100), min_size=5, max_size=5),
)
def test_narrowed_flattened_tensors_hold_what_the_flattened_narrowed_shard_has(
    shape: Any, parts: Any
) -> None:
    n = int(np.prod(shape))
    begin, end = sorted(number % (n + 1) for number in parts[:2])
    dim = parts[2] % len(shape)
    start = parts[3] % shape[dim]
    length = parts[4] % (shape[dim] - start) + 1
    full = numbered(shape)
    flat = ShardedTensor.from_rank_offsets_flat(
        "w", full.flatten()[begin:end], shape, (dim, 1, 3), flattened_range=slice(begin, end)
    )
    pieces = flat.narrow(dim, start, length)
    narrowed = full.narrow(dim, start, length)
    in_range = [value for value in narrowed.flatten().tolist() if begin <= value < end]
    assert [value for piece in pieces for value in piece.data.tolist()] == in_range
    for piece in pieces:
        assert narrowed.flatten()[piece.flattened_range].equal(piece.data)
        assert (
            piece.data.numel() > 0
            and piece.data.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        )
        assert piece.local_shape == tuple(narrowed.shape)
        assert (piece.global_shape[dim], piece.global_offset[dim]) == (3 * length, length)
    assert dim != 0 or len(pieces) <= 1


def test_a_flattened_tensor_has_the_shape_of_its_range_and_the_coordinates_of_its_elements() -> (
    None
):
    full = numbered((3, 4))
    flat = ShardedTensor.from_rank_offsets_flat(
        "w",
        full.flatten()[3:6],
        (3, 4),
        (0, 2, 5),
        (1, 1, 2),
        prepend_axis_num=1,
        flattened_range=slice(3, 6),
    )
    assert (flat.local_shape, flat.global_shape, flat.global_offset) == (
        (3, 4),
        (5, 6, 4),
        (2, 3, 0),
    )
    assert [axis.tolist() for axis in flat.local_coordinates()] == [[0, 1, 1], [3, 0, 1]]
    assert [axis.tolist() for axis in flat.global_coordinates()] == [
        [2, 2, 2],
        [3, 4, 4],
        [3, 0, 1],
    ]
    assert full[flat.local_coordinates()].equal(flat.data)
    empty = flat.without_data()
    empty.init_data("cpu", torch.zeros)
    assert empty.data.tolist() == [0, 0, 0] and empty.data.dtype == torch.float32
    with pytest.raises(CheckpointingException, match="no flattened range"):
        ShardedTensor.from_rank_offsets("w", full).global_coordinates()


@pytest.mark.parametrize(
    ("data", "flattened_range"),
    [
        (torch.zeros(2), slice(0, 3)),
        (torch.zeros(2, 2), slice(0, 4)),
        (torch.zeros(2), slice(5, 7)),
        (torch.zeros(2), slice(-2, 0)),
        (torch.zeros(2), slice(None, 2)),
        (torch.zeros(1), slice(0, 2, 2)),
        (torch.zeros(2), None),
    ],
)
def test_a_flattened_range_that_does_not_fit_is_refused(
    data: torch.Tensor, flattened_range: Any
) -> None:
    with pytest.raises(CheckpointingException):
        ShardedTensor.from_rank_offsets_flat("w", data, (2, 3), flattened_range=flattened_range)


def test_a_flattened_range_belongs_to_the_other_constructor() -> None:
    with pytest.raises(ValueError, match="from_rank_offsets_flat"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2), flattened_range=slice(0, 2))


def test_data_are_made_where_there_are_none() -> None:
    tensor = ShardedTensor.from_rank_offsets(
        "w", torch.ones(2, 3, dtype=torch.bfloat16)
    ).without_data()
    tensor.init_data("meta")
    assert tensor.data.device.type == "meta" and tensor.data.dtype == torch.bfloat16
    data = tensor.data
    tensor.init_data("cpu")
    assert tensor.data is data


def test_empty_tensors_have_a_chunk_and_irregular_ones_have_none() -> None:
    assert ShardedTensor.from_rank_offsets(
        "w", torch.zeros(0, 3)
    ).local_chunk_offset_in_global() == (0, 0)
    irregular = ShardedTensor("w", None, torch.float32, (2,), (5,), (3,), None)
    assert irregular.has_regular_grid is False
    for call in (
        irregular.local_chunk_offset_in_global,
        irregular.max_allowed_chunks,
        lambda: irregular.narrow(0, 0, 1),
    ):
        with pytest.raises(CheckpointingException):
            call()


def test_metadata_alone_can_be_narrowed() -> None:
    tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (0, 1, 2)).without_data()
    (narrowed,) = tensor.narrow(0, 1, 2)
    assert (narrowed.data, narrowed.local_shape, narrowed.global_offset) == (None, (2, 2), (2, 0))


def test_attributes_may_be_changed_and_are_checked_on_demand() -> None:
    tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(4))
    tensor.key, tensor.replica_id = "v", 3
    tensor.validate_metadata_integrity()
    tensor.dtype = torch.int8
    with pytest.raises(CheckpointingException, match="int8") as caught:
        tensor.validate_metadata_integrity()
    assert caught.value.key == "v"


@given(
    key=st.text(min_size=1),
    pair=st.lists(st.tuples(small, small), min_size=1, max_size=3),
    replica=st.sampled_from([0, (1, 0)]),
)
def test_the_unique_key_of_an_object_can_be_turned_back(
    theirs: ModuleType, key: str, pair: Any, replica: Any
) -> None:
    offset, shape = zip(*pair, strict=True)
    original = ShardedObject(key, b"", shape, offset, replica)
    other = theirs.ShardedObject(key, b"", shape, offset, replica)
    assert original.unique_key == other.unique_key
    parsed = ShardedObject.empty_from_unique_key(original.unique_key, replica)
    assert parsed == original.without_data() and parsed.data is None
    if "/" not in key:
        again = theirs.ShardedObject.empty_from_unique_key(original.unique_key, replica)
        assert vars(parsed) == vars(again)


def test_a_shape_without_its_last_number_is_completed(theirs: ModuleType) -> None:
    ours, other = (
        module.ShardedObject.empty_from_unique_key("a/shard_0.1_2") for module in (mapping, theirs)
    )
    assert vars(ours) == vars(other) and ours.global_shape == (2, -1)
    assert str(ours) == str(other)


@pytest.mark.parametrize(
    "name",
    ["a", "a/shard_0", "a/shard_0_1_2", "a/shard_x_1", "a/chunk_0_1", "/shard_0_1", "a/shard__"],
)
def test_a_name_that_is_no_unique_key_is_corrupt(name: str) -> None:
    with pytest.raises(CorruptError):
        ShardedObject.empty_from_unique_key(name)


def test_a_unique_key_of_unequal_axes_is_refused() -> None:
    with pytest.raises(CheckpointingException):
        ShardedObject.empty_from_unique_key("a/shard_0_1.2")
    with pytest.raises(CheckpointingException, match="numbers of axes"):
        ShardedObject("a", None, (1,), (0, 0))


@pytest.mark.parametrize("replica", [0, 1, (), (0,), (0, 0), (0, 1), (1, 0), [0, 0], True])
def test_the_same_replicas_are_main(theirs: ModuleType, replica: Any) -> None:
    assert is_main_replica(replica) is theirs.is_main_replica(replica)


def test_a_nonpersistent_object_is_unwrapped_to_itself() -> None:
    value = object()
    assert LocalNonpersistentObject(value).unwrap() is value


def halves(module: ModuleType, key: str, data: torch.Tensor) -> Any:
    """A factory that stores a matrix as two, one below the other."""

    def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        parts = tensor.chunk(2)
        return [
            module.ShardedTensor.from_rank_offsets(f"{key}.{i}", parts[i], replica_id=replica_id)
            for i in range(2)
        ]

    return module.ShardedTensorFactory(key, data, build, torch.cat, 3)


def tree(module: ModuleType) -> Any:
    plain = module.ShardedTensor.from_rank_offsets("c", torch.ones(2))
    return {
        "a": {"b": halves(module, "b", numbered((4, 2)))},
        "c": [plain, halves(module, "d", numbered((2,))), 5],
    }


def test_factories_are_built_in_place_and_merged_back_in_place(theirs: ModuleType) -> None:
    states = []
    for module in (mapping, theirs):
        state, factories = (
            tree(module),
            {
                "a": {"b": halves(module, "b", numbered((4, 2)))},
                "c": {1: halves(module, "d", numbered((2,)))},
            },
        )
        inner = state["a"]
        assert module.apply_factories(state) is None
        assert state["a"] is inner
        built = [(t.key, t.replica_id, t.data.tolist()) for t in (*state["a"]["b"], *state["c"][1])]
        loaded = {
            "a": {"b": [t.data for t in state["a"]["b"]]},
            "c": [7, [t.data for t in state["c"][1]], 5],
            "e": 1,
        }
        merged = module.apply_factory_merges(loaded, factories)
        assert merged is loaded
        states.append(
            (built, merged["a"]["b"].tolist(), merged["c"][0], merged["c"][1].tolist(), merged["e"])
        )
    assert states[0] == states[1]
    assert states[0][1] == numbered((4, 2)).tolist()


@pytest.mark.parametrize(
    ("loaded", "factories"),
    [
        ({"a": 1}, {"b": 1}),
        ({"a": [1]}, {"a": [1, 2]}),
        ([1], {"x": 1}),
        ([1], {4: 1}),
        ([1], {-1: 1}),
        ({"a": 1}, {"a": 2}),
        ({"a": {}}, {"a": []}),
        (3, {"a": 1}),
    ],
)
def test_factories_that_find_nothing_loaded_are_wrong_arguments(
    loaded: Any, factories: Any
) -> None:
    with pytest.raises(ValueError):
        apply_factory_merges(loaded, factories)


def test_a_factory_can_be_the_whole_tree_to_merge() -> None:
    assert apply_factory_merges(
        [torch.zeros(1), torch.ones(1)], halves(mapping, "w", torch.zeros(2))
    ).tolist() == [
        0,
        1,
    ]  # type: ignore[arg-type]


def test_a_factory_without_data_keeps_its_functions() -> None:
    factory = halves(mapping, "w", torch.zeros(2))
    bare = factory.without_data()
    bare.validate_metadata_integrity()
    assert isinstance(bare, ShardedTensorFactory)
    assert (bare.data, bare.build_fn, bare.merge_fn, bare.replica_id) == (
        None,
        factory.build_fn,
        factory.merge_fn,
        3,
    )


def test_what_a_factory_builds_is_not_built_again() -> None:
    inner = halves(mapping, "w", torch.zeros(2))
    state = {
        "a": ShardedTensorFactory(
            "outer", torch.zeros(2), lambda *args: {"b": inner}, lambda loaded: loaded["b"]
        )
    }
    apply_factories(state)
    assert state["a"]["b"] is inner


def test_every_chunk_of_a_grid_has_its_own_place() -> None:
    grid = (2, 1, 3)
    coordinates = {
        ShardedTensor.from_rank_offsets(
            "w",
            torch.zeros(2, 4),
            *((axis, index[axis], grid[axis]) for axis in range(3)),
            prepend_axis_num=1,
        ).local_chunk_offset_in_global()
        for index in itertools.product(*map(range, grid))
    }
    assert coordinates == set(itertools.product(*map(range, grid)))
