"""core.megatron.extras.sharded_objects: keys of ShardedObjects."""

from __future__ import annotations

import pytest

from core.megatron.extras.sharded_objects import is_sharded_object, shard_grids, sharded_object


def test_a_key_is_split_into_name_offset_and_shape() -> None:
    assert sharded_object("rng_state/shard_0.1_2.4") == ("rng_state", (0, 1), (2, 4))


@pytest.mark.parametrize(
    "key", ["rng_state/shard_0_-1", "a/shard_0_0", "a/shard_0.0_2", "a/shard_5_2"]
)
def test_numbers_that_no_grid_can_have_are_no_shard_of_one(key: str) -> None:
    assert sharded_object(key) is None and is_sharded_object(key)


@pytest.mark.parametrize("key", ["rng_state", "a/shard_0_1\n", "a/shard__1", "/shard_0_1"])
def test_other_keys_are_no_shards(key: str) -> None:
    assert sharded_object(key) is None and not is_sharded_object(key)


def test_missing_shards_are_named_in_the_order_of_the_grid() -> None:
    (grid,) = shard_grids(["a/shard_0.0_2.3", "a/shard_1.1_2.3", "b"])
    missing = [f"a/shard_{offset}_2.3" for offset in ("0.1", "0.2", "1.0", "1.2")]
    assert list(grid.absent_keys(9)) == missing
    assert list(grid.absent_keys(2)) == missing[:2]
    assert not list(shard_grids(["c/shard_0_1"])[0].absent_keys(9))


def test_a_grid_that_no_disk_could_hold_is_not_listed() -> None:
    (grid,) = shard_grids([f"a/shard_0.0_{10**30}.{10**30}"])
    assert list(grid.absent_keys(1)) == [f"a/shard_0.1_{10**30}.{10**30}"]
