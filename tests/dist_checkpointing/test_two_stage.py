"""One rank of a data parallel group reads, the others receive."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.dist_checkpointing.mapping import ShardedTensor
from core.dist_checkpointing.strategies import two_stage
from core.dist_checkpointing.strategies.two_stage import (
    TwoStageDataParallelLoadShardedStrategy,
    _ShardedTensorMetadata,
    sharded_tensor_chunk_id,
    timed,
)
from core.errors import CheckpointingException, MissingShardError, UnsupportedError, UsageError
from tests.dist_checkpointing.ranks import run_ranks
from tests.dist_checkpointing.sharded import flat_part_of, global_tensor, part_of
from tests.dist_checkpointing.zarr_states import SHAPES, check_loaded, save, save_columns, state


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """One tensor ``w`` of shape (6, 8), in two chunks of columns."""
    save_columns(tmp_path)
    return tmp_path


def _group(rank: int, world: int, size: int) -> Any:
    """The data parallel group of a rank: ``size`` ranks, the others' numbers apart by the number of
    groups.
    """
    n_groups = world // size
    groups = [dist.new_group(list(range(first, world, n_groups))) for first in range(n_groups)]
    return groups[rank % n_groups]


def _load(rank: int, world: int, root: str, dp: int) -> tuple[int, list[str]]:
    """Loads the state of a world of ``world / dp`` model parallel ranks, each ``dp`` times."""
    strategy = TwoStageDataParallelLoadShardedStrategy(_group(rank, world, dp))
    read: list[str] = []
    by_tensorstore = two_stage._load_from_array

    def recorded(tensor: ShardedTensor, *args: Any, **options: Any) -> torch.Tensor:
        read.append(tensor.key)
        return by_tensorstore(tensor, *args, **options)

    two_stage._load_from_array = recorded
    n_models = world // dp
    for _ in range(2):  # the gloo groups are made once
        check_loaded(
            strategy.load(state(rank % n_models, n_models, is_filled=False), root),
            rank % n_models,
            n_models,
        )
    strategy.summarize_load_times()
    assert strategy.dp_group_ranks == tuple(range(rank % n_models, world, n_models))
    return strategy.dp_group_rank, read


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "dp"),
    [
        (4, 2),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(1, 1), (2, 2), (4, 4), (4, 1)]),
    ],
)
def test_the_lowest_rank_reads_and_all_have_every_tensor(
    tmp_path: Path, world: int, dp: int
) -> None:
    run_ranks(2, save, str(tmp_path))
    for dp_rank, read in run_ranks(world, _load, str(tmp_path), dp):
        if dp_rank:
            assert read == []
        else:
            assert set(read) == set(SHAPES)


def _load_pieces(rank: int, world: int, root: str) -> None:
    """A distributed optimizer: ranks of one group hold different ranges of one shard."""
    strategy = TwoStageDataParallelLoadShardedStrategy(dist.group.WORLD)
    wanted = flat_part_of("w", (6, 8), *((0, 17) if rank == 0 else (17, 48)), is_filled=False)
    data = wanted.data
    loaded = strategy.load({"moment": [wanted], "copy": wanted.without_data()}, root)
    expected = (
        global_tensor("w", (6, 8)).flatten()[:17]
        if rank == 0
        else global_tensor("w", (6, 8)).flatten()[17:]
    )
    assert loaded["moment"][0] is data
    assert torch.equal(data, expected) and torch.equal(loaded["copy"], expected)


@pytest.mark.dist
def test_ranks_take_their_ranges_of_a_chunk_that_is_read_once(small: Path) -> None:
    run_ranks(2, _load_pieces, str(small))


def test_one_process_needs_no_process_group(small: Path) -> None:
    strategy = TwoStageDataParallelLoadShardedStrategy(None)
    loaded = strategy.load({"w": part_of("w", (6, 8), is_filled=False)}, small)
    assert torch.equal(loaded["w"], global_tensor("w", (6, 8)))
    assert (strategy.dp_group_ranks, strategy.dp_group_rank, strategy.global_rank) == ((0,), 0, 0)
    strategy.summarize_load_times()


def _fails(rank: int, world: int, root: str, case: str) -> str:
    """Loads in two groups, {0, 2} and {1, 3}; only the first meets what is wrong."""
    strategy = TwoStageDataParallelLoadShardedStrategy(_group(rank, world, 2))
    part = part_of("w", (6, 8), (1, rank % 2, 2), is_filled=False)
    if case == "different shards" and rank == 0:
        part = part_of("w", (6, 8), is_filled=False)
    try:
        strategy.load({"w": part} if case != "not a tensor" or rank else {"w": [3]}, root)
    except CheckpointingException as err:
        return f"{type(err).__name__}: {err}"
    return "nothing"


@pytest.mark.dist
def test_a_chunk_that_cannot_be_read_is_an_error_on_every_rank(small: Path) -> None:
    (small / "w/0.0").unlink()
    texts = run_ranks(4, _fails, str(small), "missing")
    assert texts[0].startswith("MissingShardError") and "w/0.0" in texts[0]
    assert all(text.startswith("MissingShardError: rank") and "w/0.0" in text for text in texts[1:])


@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "message"),
    [("different shards", "request different"), ("not a tensor", "ShardedTensors")],
)
def test_what_a_group_cannot_share_is_an_error_on_every_rank(
    small: Path, case: str, message: str
) -> None:
    assert all(message in text for text in run_ranks(4, _fails, str(small), case))


def _meta(rank: int, *offsets: tuple[int, int, int], **options: Any) -> _ShardedTensorMetadata:
    return _ShardedTensorMetadata(
        rank + 10, part_of("w", (6, 8), *offsets, **options).without_data(), rank, (10, 11, 12)
    )


def test_chunks_that_several_ranks_want_are_read_by_the_lowest_of_them() -> None:
    strategy = TwoStageDataParallelLoadShardedStrategy(None)
    left_box, right = (1, 0, 2), (1, 1, 2)
    deduplicated = strategy.deduplicate_chunks(
        [_meta(2, right), _meta(1, right), _meta(1, left_box), _meta(2, left_box)]
    )
    chunks = [
        (sharded_tensor_chunk_id(meta.sharded_tensor_no_data), meta.dist_group_rank)
        for meta in deduplicated
    ]
    assert chunks == [(("w", (0, 0)), 1), (("w", (0, 4)), 1)]
    with pytest.raises(UsageError, match=r"ranks 11 and 12.*offset \(0, 0\)"):
        strategy.deduplicate_chunks([_meta(1, left_box), _meta(2, (0, 0, 2))])


def test_calls_are_timed(caplog: pytest.LogCaptureFixture) -> None:
    @timed()
    def add(a: int, b: int) -> int:
        return a + b

    before = len(two_stage.timers["add"])
    with caplog.at_level(logging.DEBUG, logger=two_stage.__name__):
        assert add(1, b=2) == 3
    assert len(two_stage.timers["add"]) == before + 1
    assert [record.getMessage().split(" ")[:2] for record in caplog.records] == [
        ["add", "begins"],
        ["add", "took"],
    ]
    with caplog.at_level(logging.INFO, logger=two_stage.__name__):
        TwoStageDataParallelLoadShardedStrategy(None).summarize_load_times()
    assert any(record.getMessage().startswith("add: max") for record in caplog.records)


def test_metadata_and_compatibility_are_those_of_the_backend(small: Path) -> None:
    strategy = TwoStageDataParallelLoadShardedStrategy(None)
    assert strategy.load_tensors_metadata(small)["w"].global_shape == (6, 8)
    strategy.check_backend_compatibility("zarr")
    strategy.check_version_compatibility(1)
    with pytest.raises(UnsupportedError, match="torch_dist"):
        strategy.check_backend_compatibility("torch_dist")
    with pytest.raises(MissingShardError, match="v"):
        strategy.load({"v": part_of("v", (2,))}, small)
