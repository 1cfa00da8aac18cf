"""Tensors are taken out of a state dict and put back, and ranks that keep a part each get the whole
again.
"""

from __future__ import annotations

import pickle
from copy import copy
from typing import Any

import pytest
import torch

from core.dist_checkpointing.dict_utils import diff
from core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from core.errors import MissingShardError, UsageError
from tests.dist_checkpointing.ranks import run_ranks


def state(rank: int = 0, *, is_filled: bool = True) -> dict[str, Any]:
    """Six replicated tensors, an object and common state."""
    state_dict: dict[str, Any] = {"step": 3} if is_filled else {}
    data = [torch.arange(4.0 * (index + 1)) + 100 * index for index in range(6)]
    state_dict["layers"] = [
        ShardedTensor.from_rank_offsets(
            f"w{index}", part if is_filled else torch.zeros_like(part), replica_id=rank
        )
        for index, part in enumerate(data)
    ]
    state_dict["rng"] = ShardedObject(
        "rng", [1, 2] if is_filled else None, (1,), (0,), replica_id=rank
    )
    state_dict["local"] = LocalNonpersistentObject(rank)
    return state_dict


def is_whole(loaded: Any, rank: int = 0) -> bool:
    tensors = [leaf.data for leaf in state()["layers"]]
    rest = {key: value for key, value in loaded.items() if key != "layers"}
    return rest == {"step": 3, "rng": [1, 2], "local": rank} and all(
        map(torch.equal, loaded["layers"], tensors)
    )


def test_a_state_dict_taken_apart_makes_the_plain_one():
    state_dict = state()
    apart, distribution = MCoreTensorAwareStateDict.from_state_dict(state_dict)
    assert distribution is None and apart.common_state_dict == {"step": 3}
    assert [a is b.data for a, b in zip(apart.tensors, state_dict["layers"], strict=True)] == [
        True
    ] * 6
    for algo in ("atomic", "fully_parallel"):
        assert is_whole(apart.to_state_dict(state(is_filled=False), algo=algo))
    assert apart.to_state_dict({}) == {"step": 3}


def test_tensors_are_popped_pickled_apart_and_put_back():
    apart, _ = MCoreTensorAwareStateDict.from_state_dict(state())
    tensors = apart.pop_tensors()
    assert apart.is_hollow and len(tensors) == 6
    copied = pickle.loads(pickle.dumps(apart))
    for hollow in (
        lambda: apart.tensors,
        apart.pop_tensors,
        apart.copy_tensors_to_cpu,
        apart.restore_tensor_device,
    ):
        with pytest.raises(UsageError, match="removed from the state dict"):
            hollow()
    with pytest.raises(UsageError, match="removed from the state dict"):
        apart.to_state_dict(state(is_filled=False))
    with pytest.raises(ValueError, match="6, 5"):
        copied.insert_tensors(tensors[:5])
    with pytest.raises(UsageError, match="torch.float64.*tensor w5"):
        copied.insert_tensors([*tensors[:5], tensors[5].double()])
    copied.insert_tensors(tensors)
    assert not copied.is_hollow and is_whole(copied.to_state_dict(state(is_filled=False)))
    with pytest.raises(UsageError, match="still in the state dict"):
        copied.insert_tensors(tensors)


def test_uninitialised_tensors_have_the_dtypes_and_shapes_of_the_popped_ones():
    apart, _ = MCoreTensorAwareStateDict.from_state_dict(state())
    tensors = apart.pop_tensors()
    apart.init_tensors()
    assert [(t.dtype, t.shape, t.device) for t in apart.tensors] == [
        (t.dtype, t.shape, t.device) for t in tensors
    ]
    with pytest.raises(UsageError, match="still in the state dict"):
        apart.init_tensors()


def test_copies_in_host_memory_are_made_once_and_do_not_follow_the_originals():
    state_dict = state()
    apart, _ = MCoreTensorAwareStateDict.from_state_dict(state_dict)
    apart.copy_tensors_to_cpu()
    first = list(apart.tensors)
    apart.copy_tensors_to_cpu()
    assert all(a is b for a, b in zip(first, apart.tensors, strict=True))
    for tensor in state_dict["layers"]:
        tensor.data.zero_()
    apart.restore_tensor_device()
    assert is_whole(apart.to_state_dict(state(is_filled=False)))


def test_two_are_compared_by_their_tensors_and_common_state():
    apart, _ = MCoreTensorAwareStateDict.from_state_dict(state())
    other, _ = MCoreTensorAwareStateDict.from_state_dict({**state(), "step": 4})
    other.copy_tensors_to_cpu()
    next(other.tensors)[1] = -1
    only_left, only_right, mismatches = diff(apart, other)
    assert (only_left, only_right) == ([], [])
    assert [path for path, *_ in mismatches] == [
        ("common", "step"),
        ("sharded_state_dict", "layers", 0, ShardedTensor),
    ]
    assert diff(apart, copy(apart)) == ([], [], [])
    # Scripts search the state dict by its values, as nvidia-resiliency-ext's classes allow.
    assert apart.common in list(apart.values())


def test_what_megatron_core_pickled_is_restored():
    apart, _ = MCoreTensorAwareStateDict.from_state_dict(state())
    del apart.sharded_state_dict["layers"][5]
    # Its attributes while the tensors are elsewhere; another rank keeps the last shard.
    leaves = apart.sharded_state_dict["layers"]
    for leaf in leaves:
        leaf.data = None
    for leaf in leaves[:-1]:
        leaf.orig_device = "cpu"
    apart._is_hollow = True
    restored = pickle.loads(pickle.dumps(apart))
    restored.insert_tensors([leaf.data for leaf in state()["layers"][:4]])
    assert len(list(restored.tensors)) == 4 and not hasattr(
        restored.sharded_state_dict["layers"][0], "orig_device"
    )


def test_keys_that_differ_are_treated_as_strict_says(caplog):
    apart, _ = MCoreTensorAwareStateDict.from_state_dict(state())
    wanted = {
        **state(is_filled=False),
        "more": ShardedTensor.from_rank_offsets("more", torch.zeros(2)),
    }
    del wanted["rng"]
    with pytest.raises(MissingShardError, match="more") as caught:
        apart.to_state_dict(wanted, strict="raise_unexpected")
    assert not isinstance(caught.value, AssertionError)
    # No reaction makes up for a shard that is not kept; scripts expect an AssertionError.
    for strict in ("assume_ok_unexpected", "log_all", "return_all", "ignore_all"):
        for kind in (MissingShardError, AssertionError):
            with pytest.raises(kind, match="tensor more"):
                apart.to_state_dict(wanted, strict=strict)
    assert "Unexpected keys" in caplog.text and "Missing keys" in caplog.text
    del wanted["more"]
    loaded, missing, unexpected = apart.to_state_dict(
        wanted, strict="return_all", return_mismatch_keys=True
    )
    assert (missing, unexpected) == ({"rng"}, set()) and "rng" not in loaded


def test_unknown_algorithms_are_refused():
    apart, _ = MCoreTensorAwareStateDict.from_state_dict(state())
    with pytest.raises(ValueError, match="atomic, fully_parallel, got 'fast'"):
        MCoreTensorAwareStateDict.from_state_dict(state(), algo="fast")
    with pytest.raises(ValueError, match="atomic, fully_parallel, got 'fast'"):
        apart.to_state_dict(state(), algo="fast")


def _kept_in_parts(rank: int, world: int) -> Any:
    state_dict = state(rank)
    apart, distribution = MCoreTensorAwareStateDict.from_state_dict(state_dict)
    again, same = MCoreTensorAwareStateDict.from_state_dict(
        state_dict, cached_metadata=distribution
    )
    assert same is distribution and all(
        a is b for a, b in zip(apart.tensors, again.tensors, strict=True)
    )
    extra = {"more": ShardedTensor.from_rank_offsets("more", torch.zeros(2), replica_id=rank)}
    more = {**state_dict, **extra}
    with pytest.raises(ValueError, match="different state dict and lacks more"):
        MCoreTensorAwareStateDict.from_state_dict(more, cached_metadata=distribution)
    assert all(leaf.data is not None for leaf in state_dict["layers"])
    n_bytes = sum(tensor.nbytes for tensor in apart.tensors)
    tensors = pickle.loads(pickle.dumps(apart.pop_tensors()))
    back = pickle.loads(pickle.dumps(apart))
    back.insert_tensors(tensors)
    for exchange_algo in ("broadcast", "gather_rounds", "gather_object"):
        loaded = back.to_state_dict(
            state(rank, is_filled=False), algo="fully_parallel", exchange_algo=exchange_algo
        )
        assert is_whole(loaded, rank)
    with pytest.raises(MissingShardError, match="the shard at offset"):
        back.to_state_dict(state(rank, is_filled=False), algo="atomic")
    wanted = {**state(rank, is_filled=False), **extra}
    with pytest.raises(MissingShardError, match="no rank holds the shard"):
        back.to_state_dict(wanted, algo="fully_parallel")
    return n_bytes


@pytest.mark.dist
def test_ranks_keep_a_part_each_and_exchange_them_for_the_whole():
    assert run_ranks(3, _kept_in_parts) == [112, 112, 112]
