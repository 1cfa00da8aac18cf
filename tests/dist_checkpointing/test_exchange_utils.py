"""Shards are distributed evenly and alike on all ranks, and what one rank loaded reaches the others
bit for bit.
"""

from __future__ import annotations

import importlib
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from core.dist_checkpointing import exchange_utils
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._ranks.shard_bytes import PARCEL_BYTES, own_bytes
from core.dist_checkpointing.exchange_utils import (
    determine_main_replica_uniform_distribution,
    distribute_shards_to_ranks,
    exchange_by_distribution,
    exchange_loaded_objects_gather_object,
)
from core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from core.dist_checkpointing.utils import _sharded_tensor_shard_id
from core.errors import CheckpointingException
from tests.dist_checkpointing.ranks import run_ranks

MAX_TRIED = 7
"""Shards of which all schedules can be tried."""

ALGORITHMS = ["broadcast", "gather_rounds", "gather_object"]


@st.composite
def workloads(
    draw: st.DrawFn, *, replicated: bool = False
) -> tuple[dict[Any, list[int]], dict[Any, int], int, set[Any]]:
    """Holders and sizes of shards in a group, and those that belong to other groups."""
    n_ranks = draw(st.integers(1, 8))
    everyone = list(range(n_ranks))
    holders = (
        st.just(everyone)
        if replicated
        else st.lists(st.sampled_from(everyone), min_size=1, unique=True)
    )
    offsets = st.tuples(st.integers(0, 3))
    flat = st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(4, 9)))
    shards = draw(
        st.lists(st.tuples(st.sampled_from("abc"), offsets, flat), unique=True, max_size=24)
    )
    shard_to_ranks = {shard: sorted(draw(holders)) for shard in shards}
    sizes = {shard: draw(st.integers(0, 50)) for shard in shards}
    foreign = set() if replicated or not shards else draw(st.sets(st.sampled_from(shards)))
    return shard_to_ranks, sizes, n_ranks, foreign


@given(workloads())
def test_every_shard_is_given_once_to_one_of_its_holders(workload):
    shard_to_ranks, sizes, n_ranks, foreign = workload
    distribution = distribute_shards_to_ranks(shard_to_ranks, sizes, n_ranks, foreign)
    assert distribution.keys() == shard_to_ranks.keys()
    assert all(distribution[shard] in ranks for shard, ranks in shard_to_ranks.items())


@given(workloads(), st.randoms(use_true_random=False))
def test_the_order_of_the_arguments_does_not_matter(workload, rng: random.Random):
    shard_to_ranks, sizes, n_ranks, foreign = workload
    items = list(shard_to_ranks.items())
    rng.shuffle(items)
    shuffled = {shard: rng.sample(ranks, len(ranks)) for shard, ranks in items}
    first = distribute_shards_to_ranks(shard_to_ranks, sizes, n_ranks, foreign)
    other = distribute_shards_to_ranks(shuffled, sizes, n_ranks, foreign)
    assert list(first.items()) == list(other.items())


@given(workloads(replicated=True))
def test_fully_replicated_shards_are_balanced_within_the_bound_of_largest_first(workload):
    shard_to_ranks, sizes, n_ranks, foreign = workload
    distribution = distribute_shards_to_ranks(shard_to_ranks, sizes, n_ranks, foreign)
    loads = [
        sum(sizes[shard] for shard, rank in distribution.items() if rank == number)
        for number in range(n_ranks)
    ]
    ordered = sorted(sizes.values(), reverse=True)
    assert max(loads) - min(loads) <= max(ordered, default=0)
    assert max(loads) * n_ranks <= sum(ordered) + (n_ranks - 1) * max(ordered, default=0)
    if len(ordered) <= MAX_TRIED:
        assert max(loads) * 3 * n_ranks <= (4 * n_ranks - 1) * _best(ordered, n_ranks)


def _best(sizes: list[int], n_ranks: int) -> int:
    """The smallest possible maximum, by trying all schedules of few shards."""
    best = sum(sizes)

    def place(index: int, loads: tuple[int, ...]) -> None:
        nonlocal best
        if max(loads) >= best:
            return
        if index == len(sizes):
            best = max(loads)
            return
        for load in set(loads):
            rest = list(loads)
            rest.remove(load)
            place(index + 1, (*rest, load + sizes[index]))

    place(0, (0,) * n_ranks)
    return best


@pytest.fixture(scope="module")
def megatron() -> Any:
    """The module of megatron-core, which warns of much when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("megatron.core.dist_checkpointing.exchange_utils")


@given(workload=workloads())
def test_the_distribution_is_that_of_megatron_core(megatron, workload):
    shard_to_ranks, sizes, n_ranks, foreign = workload
    kinds = {(shard[0], shard[1]): shard[2] is None for shard in shard_to_ranks}
    for shard in list(shard_to_ranks):  # megatron-core compares None with tuples otherwise
        if (shard[2] is None) != kinds[shard[0], shard[1]]:
            del shard_to_ranks[shard]
    ours = distribute_shards_to_ranks(shard_to_ranks, sizes, n_ranks, foreign)
    assert ours == megatron.distribute_shards_to_ranks(shard_to_ranks, sizes, n_ranks, foreign)


def test_shards_of_this_group_go_first_so_that_loading_resembles_saving():
    everyone = {"small": [0, 1], "large": [0, 1], "foreign": [0, 1]}
    sizes = {"small": 1, "large": 5, "foreign": 9}
    assert list(distribute_shards_to_ranks(everyone, sizes, 2, {"foreign"})) == [
        "large",
        "small",
        "foreign",
    ]


@pytest.mark.parametrize("ranks", [[], [2], [-1]])
def test_a_shard_without_a_holder_in_the_group_is_an_error(ranks):
    with pytest.raises(ValueError, match="one or more ranks from 0 to 1"):
        distribute_shards_to_ranks({"a": ranks}, {"a": 1}, 2, set())


def test_one_process_needs_no_distribution_and_exchanges_nothing():
    assert determine_main_replica_uniform_distribution({"a": _tensor("a", 4)}, None) is None
    assert exchange_loaded_objects_gather_object({("o", (0,), (1,)): 5}) == {("o", (0,), (1,)): 5}


def test_unknown_algorithms_and_absent_distributions_are_refused():
    with pytest.raises(ValueError, match="broadcast, gather_rounds, gather_object, got 'scatter'"):
        exchange_by_distribution({}, {}, None, exchange_algo="scatter")
    for algorithm in ALGORITHMS:
        with pytest.raises(ValueError, match="distribution"):
            exchange_by_distribution({}, {}, None, exchange_algo=algorithm)


def _tensor(key: str, n: int, dtype: torch.dtype = torch.float32, **fields: Any) -> ShardedTensor:
    """A whole tensor of ``n`` elements, bytes a function of the key."""
    n_bytes = n * dtype.itemsize
    period = torch.arange(251).mul(31).add(sum(key.encode())).remainder(251).to(torch.uint8)
    data = period.repeat(n_bytes // 251 + 1)[:n_bytes]
    data = data.remainder(2).bool()[:n] if dtype == torch.bool else data.view(dtype)
    return ShardedTensor.from_rank_offsets(key, data, **fields)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
]


def _shards(rank: int, world: int) -> dict[str, ShardedTensor]:
    """What a rank holds: tensors of all ranks, of some, of itself only; all dtypes, empty, 0-d,
    flat, strided.
    """
    shards = {
        f"all.{dtype}": _tensor(f"all.{dtype}", 3 + index, dtype)
        for index, dtype in enumerate(DTYPES)
    }
    shards["empty"] = _tensor("empty", 0)
    shards["large"] = _tensor("large", PARCEL_BYTES // 4 + 3)
    shards["wide"] = ShardedTensor.from_rank_offsets(
        "wide", shards["large"].data[:-3].view(8, -1).t()
    )
    shards["scalar"] = ShardedTensor.from_rank_offsets("scalar", torch.tensor(2.5))
    matrix = torch.arange(35.0).view(7, 5).t()
    shards["strided"] = ShardedTensor.from_rank_offsets("strided", matrix)
    shards["stacked"] = ShardedTensor.from_rank_offsets(
        "stacked", torch.arange(6.0), (0, 2, 3), prepend_axis_num=1
    )
    flat = ShardedTensor.from_rank_offsets("flat", torch.arange(24.0).view(4, 6))
    flat.data, flat.flattened_range = torch.arange(5.0, 17.0), slice(5, 17)
    shards["flat"] = flat
    if rank % 2 == 0:
        shards["even"] = _tensor("even", 17)
        shards["even.large"] = _tensor("even.large", PARCEL_BYTES + 3, torch.uint8)
    shards[f"own.{rank}"] = _tensor(f"own.{rank}", 11)
    for index, tensor in enumerate(shards.values()):
        tensor.replica_id = (0, rank) if index % 3 else 0 if rank == 0 else rank
    return shards


def _members(world: int, size: int) -> list[list[int]]:
    return [list(range(start, start + size)) for start in range(0, world, size)]


def _group(rank: int, world: int, size: int) -> Any:
    groups = [dist.new_group(ranks) for ranks in _members(world, size)]
    return groups[rank // size]


def _exchanged(rank: int, world: int, size: int) -> tuple[Any, list[str]]:
    group = _group(rank, world, size)
    wrong = []
    for algorithm in ALGORITHMS:
        for has_memory in (True, False):
            distribution, names = _exchanged_by(rank, world, group, algorithm, has_memory)
            wrong += [f"{algorithm}, {has_memory}: {name}" for name in names]
    return distribution, wrong


def _exchanged_by(
    rank: int, world: int, group: Any, algorithm: str, has_memory: bool
) -> tuple[Any, list[str]]:
    expected = _shards(rank, world)
    shards = _shards(rank, world)
    distribution = determine_main_replica_uniform_distribution(shards, group, True)
    loaded, unloaded, places = {}, {}, {}
    for name, tensor in shards.items():
        shard = _sharded_tensor_shard_id(tensor)
        if distribution.main_rank_for_shard[shard] == comm.rank(group):
            loaded[shard] = tensor.data
        else:
            unloaded[shard] = tensor
            if has_memory:
                places[name] = torch.zeros_like(tensor.data)  # keeps the strides
            tensor.data = places.get(name)
    exchanged = exchange_by_distribution(loaded, unloaded, distribution, group, algorithm)
    wrong = []
    assert exchanged.keys() == {_sharded_tensor_shard_id(tensor) for tensor in shards.values()}
    for name, tensor in expected.items():
        got = exchanged[_sharded_tensor_shard_id(tensor)]
        if (
            got.dtype != tensor.dtype
            or got.shape != tensor.data.shape
            or not _is_same(got, tensor.data)
        ):
            wrong.append(name)
        if name in places and places[name].numel() and got.data_ptr() != places[name].data_ptr():
            wrong.append(f"{name} lies elsewhere")
    return distribution, wrong


def _is_same(first: torch.Tensor, other: torch.Tensor) -> bool:
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, other)]
    return torch.equal(*raw)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "size"),
    [
        pytest.param(2, 2, marks=pytest.mark.long),
        (4, 2),
        pytest.param(8, 4, marks=pytest.mark.long),
    ],
)
def test_exchanged_tensors_are_equal_bit_for_bit(world, size):
    results = run_ranks(world, _exchanged, size)
    assert [wrong for _, wrong in results] == [[]] * world
    for ranks in _members(world, size):
        first = results[ranks[0]][0]
        for rank in ranks[1:]:
            assert results[rank][0].main_rank_for_shard == first.main_rank_for_shard
            assert list(results[rank][0].main_rank_for_shard) == list(first.main_rank_for_shard)
            assert results[rank][0].all_ranks_for_shard == first.all_ranks_for_shard
            assert results[rank][0].shards_in_this_group == first.shards_in_this_group


def _broken(rank: int, world: int) -> dict[str, str]:
    return {
        f"{algorithm}, {fault}": _error_of(rank, algorithm, fault)
        for algorithm in ALGORITHMS
        for fault in ("not loaded", "wrong dtype", "no memory", "not distributed")
    }


def _error_of(rank: int, algorithm: str, fault: str) -> str:
    """What a rank raises if rank 1 does what it should not."""
    shards = {"a": _tensor("a", 8), "b": _tensor("b", 8), "c": _tensor("c", 2)}
    distribution = determine_main_replica_uniform_distribution(shards, None, True)
    loaded, unloaded = {}, {}
    for tensor in shards.values():
        shard = _sharded_tensor_shard_id(tensor)
        if distribution.main_rank_for_shard[shard] == rank:
            loaded[shard] = tensor.data
        else:
            unloaded[shard] = tensor
    if rank == 1 and fault == "not loaded":
        loaded.clear()
    if rank == 1 and fault == "wrong dtype":
        loaded = {shard: tensor.double() for shard, tensor in loaded.items()}
    if rank == 1 and fault == "no memory":
        for tensor in unloaded.values():
            tensor.data = None
            tensor.init_data = _out_of_memory  # type: ignore[method-assign]
    if rank == 1 and fault == "not distributed":
        unloaded["z", (0,), None] = _tensor("z", 4)
    try:
        exchange_by_distribution(loaded, unloaded, distribution, None, algorithm)
    except Exception as err:
        return f"{type(err).__name__}: {err}"
    return "nothing"


def _out_of_memory(device: object) -> None:
    raise MemoryError("no memory")


@pytest.mark.dist
def test_what_fails_on_one_rank_fails_on_all_before_anything_is_sent():
    texts = {
        "not loaded": "no rank in the group loaded b at offset (0,)",
        "wrong dtype": "the loaded shard has dtype torch.float64, expected torch.float32",
        "no memory": "no memory",
        "not distributed": "no rank in the group loaded z at offset (0,)",
    }
    results = run_ranks(2, _broken)
    for fault, text in texts.items():
        for algorithm in ALGORITHMS:
            other, own = (of_rank[f"{algorithm}, {fault}"] for of_rank in results)
            assert text in own and text in other, (algorithm, fault)
            assert "failed: " in other or "failed: " in own


def _disagreeing(rank: int, world: int) -> str:
    shards = {"a": _tensor("a", 8, torch.float32 if rank == 0 else torch.float16)}
    with pytest.raises(CheckpointingException) as caught:
        determine_main_replica_uniform_distribution(shards, None)
    return str(caught.value)


@pytest.mark.dist
def test_ranks_that_disagree_about_a_shard_all_fail():
    first, other = run_ranks(2, _disagreeing)
    assert first == other and "dtype" in first and "tensor a" in first


def _groups_apart(rank: int, world: int) -> Any:
    group = _group(rank, world, 2)
    shards = {
        "x": _tensor("x", 8, replica_id=rank),
        "y": _tensor("y", 8, replica_id=0 if rank == 3 else rank + 1),
    }
    assert is_main_replica(shards["x"].replica_id) == (rank == 0)
    saved = determine_main_replica_uniform_distribution(shards, group)
    loaded = determine_main_replica_uniform_distribution(shards, group, True)
    return sorted(shard[0] for shard in saved.main_rank_for_shard), sorted(
        loaded.main_rank_for_shard.values()
    )


@pytest.mark.dist
def test_a_group_saves_what_it_has_the_main_replica_of_and_loads_everything():
    assert run_ranks(4, _groups_apart) == [
        (["x"], [0, 1]),
        (["x"], [0, 1]),
        (["y"], [0, 1]),
        (["y"], [0, 1]),
    ]


def _objects(rank: int, world: int, twice: bool) -> Any:
    loaded = {("o", (0 if twice else rank,), (world,)): {"rank": rank}}
    try:
        return exchange_loaded_objects_gather_object(loaded)
    except CheckpointingException as err:
        return f"{type(err).__name__}: {err}"


@pytest.mark.dist
def test_objects_reach_every_rank_and_may_be_loaded_once_only():
    everything = {("o", (number,), (3,)): {"rank": number} for number in range(3)}
    assert run_ranks(3, _objects, False) == [everything] * 3
    for text in run_ranks(3, _objects, True):
        assert text.startswith(
            "CheckpointingException: two ranks loaded the same shards: o at offset (0,)"
        )


def test_float8_tensors_of_transformer_engine_are_none_without_it():
    assert not exchange_utils.is_float8tensor(torch.zeros(2))


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 3), (1, 4, 1)])
def test_bytes_are_found_whatever_the_strides_of_axes_of_one_element_are(shape):
    full = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4).repeat(2, 2, 2)[0, 0]
    tensor = full.flatten()[: torch.Size(shape).numel()].reshape(shape)
    strides = [
        7 if extent == 1 else step for extent, step in zip(shape, tensor.stride(), strict=True)
    ]
    odd = tensor.as_strided(shape, strides)
    data = own_bytes(odd, torch.device("cpu"))
    assert odd.is_contiguous() and bytes(data.tolist()) == tensor.numpy().tobytes()


def test_the_memory_of_a_conjugated_view_is_not_its_value():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert own_bytes(tensor.conj(), torch.device("cpu")) is None
    assert own_bytes(tensor.conj().imag, torch.device("cpu")) is None
    assert own_bytes(tensor, torch.device("cpu")) is not None


MEASURED_BYTES = 16 << 20
"""Size of each tensor whose exchange is measured, large beside other memory of an exchange."""


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


def _extra_bytes(rank: int, world: int, algorithm: str) -> int:
    """Peak of the memory that an exchange takes beside the tensors, which all exist before it."""
    for n in (1 << 10, MEASURED_BYTES // 4):  # the first exchange sets up what gloo needs
        shards = {index: _filled(f"w{index}", n, index) for index in range(world + 1)}
        if rank < 2:  # the others forward a shard that they do not keep
            shards[world + 1] = _filled("of.few", n, world + 1)
        distribution = determine_main_replica_uniform_distribution(shards, None, True)
        loaded, unloaded = {}, {}
        for tensor in shards.values():
            shard = _sharded_tensor_shard_id(tensor)
            if distribution.main_rank_for_shard[shard] == rank:
                loaded[shard] = tensor.data
            else:
                unloaded[shard] = tensor
                tensor.data.fill_(-1)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        before = _status_bytes("VmRSS")
        exchange_by_distribution(loaded, unloaded, distribution, None, algorithm)
        extra = _status_bytes("VmHWM") - before
        assert all(tensor.data.eq(number).all() for number, tensor in shards.items())
    return extra


def _filled(key: str, n: int, value: float) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.full((n,), float(value)))


@pytest.mark.dist
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures as only Linux can")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_exchange_takes_about_the_memory_of_one_tensor(algorithm):
    extra = run_ranks(4, _extra_bytes, algorithm)
    assert max(extra) < 1.25 * MEASURED_BYTES, extra
