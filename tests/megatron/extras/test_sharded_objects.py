"""core.megatron.extras.sharded_objects: keys of ShardedObjects."""

from __future__ import annotations

import pytest

from core.megatron.extras.sharded_objects import is_sharded_object, sharded_object


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
