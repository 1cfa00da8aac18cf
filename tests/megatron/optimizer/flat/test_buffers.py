"""core.megatron.optimizer.flat.buffers against megatron-core's own buffers, and buffers that nobody
describes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import CorruptError, UnsupportedError
from core.megatron.optimizer.flat.buffers import (
    BufferLayout,
    Slot,
    bucketing_of,
    discover,
    fit_buckets,
    lay_out_buffer,
)

SIZES = [(100, 64), (7,), (64, 65, 3), (40, 30, 200, 1, 129, 64), tuple(range(1, 60))]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one, as Megatron logs through it."""
    dist = pytest.importorskip("torch.distributed")
    store = tmp_path_factory.mktemp("world") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def megatron_layout(
    sizes: Sequence[int],
    *,
    bucket_size: int | None,
    shared: frozenset[int],
    n_ranks: int,
    is_wide: bool,
) -> BufferLayout:
    """The layout of a buffer that megatron-core 0.16.1 makes."""
    import torch

    buffers = pytest.importorskip("megatron.core.distributed.param_and_grad_buffer")
    from megatron.core.distributed import DistributedDataParallelConfig

    params = [torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in sizes]
    for place in shared:
        params[place].shared_embedding = True
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        pad_buckets_for_high_nccl_busbw=is_wide,
        grad_reduce_in_fp32=True,
    )
    group = SimpleNamespace(size=lambda: n_ranks, rank=lambda: 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(buffers, "log_on_each_pipeline_stage", lambda *_, **__: None)
        buffer = buffers._ParamAndGradBuffer(
            config,
            torch.bfloat16,
            torch.float32,
            params,
            group,
            bucket_size,
            dict.fromkeys(params, "p"),
            1.0,
            list(range(len(params))),
            False,
            SimpleNamespace(tp=group, dp_cp=group),
        )
    unpadded = tuple(bucket.numel_unpadded for bucket in buffer.buckets)
    slots = []
    for param in params:
        start, _, bucket = buffer.param_index_map[param]
        offset = start - buffer.bucket_indices[bucket][0]
        slots.append(Slot(bucket, sum(unpadded[:bucket]) + offset))
    assert buffer.numel_unpadded == sum(unpadded)
    return BufferLayout(tuple(slots), unpadded)


@pytest.mark.pairwise
@pytest.mark.parametrize("sizes", SIZES, ids=len)
@pytest.mark.parametrize("bucket_size", [None, 1, 100, 256, 1000])
@pytest.mark.parametrize(("n_ranks", "is_wide"), [(1, False), (6, False), (4, True)])
@pytest.mark.parametrize("shared_index", [None, 0, -1])
def test_layouts_are_those_of_megatron_core(
    world: None,
    sizes: tuple[int, ...],
    bucket_size: int | None,
    n_ranks: int,
    is_wide: bool,
    shared_index: int | None,
) -> None:
    shared = frozenset() if shared_index is None else frozenset({shared_index % len(sizes)})
    true = megatron_layout(
        sizes, bucket_size=bucket_size, shared=shared, n_ranks=n_ranks, is_wide=is_wide
    )
    assert lay_out_buffer(sizes, bucket_size=bucket_size, shared=shared) == true
    assert fit_buckets(sizes, true.buckets) == true


_sizes = st.lists(st.integers(1, 300), min_size=1, max_size=12)


@given(_sizes, st.one_of(st.none(), st.integers(1, 900)), st.data())
def test_every_layout_is_discovered(
    sizes: list[int], bucket_size: int | None, data: st.DataObject
) -> None:
    shared = data.draw(st.frozensets(st.integers(0, len(sizes) - 1), max_size=1))
    layout = lay_out_buffer(sizes, bucket_size=bucket_size, shared=shared)
    starts = [slot.start for slot in layout.slots]
    assert discover(sizes, layout.n_elements, lambda place, start: start == starts[place]) == [
        starts
    ]
    assert fit_buckets(sizes, layout.buckets) == layout
    for slot, size in zip(layout.slots, sizes, strict=True):
        offset = slot.start - sum(layout.buckets[: slot.bucket])
        assert offset % 64 == 0 and offset + size <= layout.buckets[slot.bucket]


def test_parameters_do_not_overlap_and_the_last_comes_first() -> None:
    layout = lay_out_buffer([10, 64, 5], bucket_size=None)
    assert [slot.start for slot in layout.slots] == [128, 64, 0]
    assert layout.buckets == (138,)


def test_a_shared_embedding_is_a_bucket_of_its_own_and_the_gap_before_it_counts() -> None:
    layout = lay_out_buffer([10, 64, 5], bucket_size=None, shared=frozenset({1}))
    assert layout.buckets == (64, 64, 10)
    assert layout.slots == (Slot(2, 128), Slot(1, 64), Slot(0, 0))


def test_a_buffer_that_is_padded_otherwise_before_an_embedding_is_discovered() -> None:
    starts = {2: 0, 1: 384, 0: 394}
    offsets = discover(
        [3, 10, 70], 397, lambda place, start: starts[place] == start, divisors=(384,)
    )
    assert offsets == [[394, 384, 0]]


def test_all_possibilities_are_told_where_the_values_do_not_tell() -> None:
    offsets = discover([1, 3, 3, 5], 64 + 64 + 3 + 1, lambda place, start: True)
    assert sorted(offsets) == [[131, 67, 64, 0], [131, 128, 64, 0]]
    assert discover([1, 3, 3, 5], 132, lambda place, start: start != 67) == [[131, 128, 64, 0]]
    assert discover([3] * 40, 39 * 64 + 3, lambda place, start: True) == []


def test_buckets_of_known_sizes_that_do_not_fit() -> None:
    assert fit_buckets([10, 10], [74]) is not None
    assert fit_buckets([10, 10], [75]) is None
    assert fit_buckets([10, 10], [20]) is None
    assert fit_buckets([10, 10], [20], step=1) == BufferLayout((Slot(0, 10), Slot(0, 0)), (20,))
    assert fit_buckets([10, 10], [10, 10, 64]) is None
    assert fit_buckets([], []) == BufferLayout((), ())


def test_what_arguments_say_about_buckets() -> None:
    fields: dict[str, object] = {
        "overlap_grad_reduce": True,
        "data_parallel_size": 64,
        "context_parallel_size": 2,
    }
    bucketing = bucketing_of(fields)
    assert bucketing.bucket_sizes((0, 0), n_params=9) == [128_000_000]
    assert bucketing.bucket_sizes((0, 1), n_params=9) == [None]
    assert bucketing.bucket_sizes((1, 0), n_params=9) == [None]
    for argument, sizes in (
        ({"ddp_num_buckets": 4}, [2]),
        ({"ddp_bucket_size": 7}, [7]),
        ({"overlap_grad_reduce": False}, [None]),
        ({"overlap_grad_reduce": None, "ddp_bucket_size": 7}, [None, 7]),
    ):
        assert bucketing_of(fields | argument).bucket_sizes((0, 0), n_params=9) == sizes
    assert bucketing_of({}).has_buckets is None
    with pytest.raises(CorruptError, match="ddp_bucket_size is '7'"):
        bucketing_of({"ddp_bucket_size": "7"})
    with pytest.raises(UnsupportedError, match="Megatron-FSDP"):
        bucketing_of({"use_megatron_fsdp": True})
