"""State dicts are taken apart for a save and for a load without a change to the caller's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from core.dist_checkpointing.state_dict_utils import (
    filter_out_empty_flatten_tensor,
    load_preprocess,
    remaining_factories,
    save_preprocess,
)
from core.errors import MissingShardError, UsageError
from tests.dist_checkpointing.ranks import run_ranks


def _whole(key: str, data: torch.Tensor | None = None) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.arange(4.0) if data is None else data)


def _flat(start: int, stop: int) -> ShardedTensor:
    data = torch.arange(float(stop - start))
    return ShardedTensor.from_rank_offsets_flat(
        "flat", data, (4,), flattened_range=slice(start, stop)
    )


def halves(key: str = "f", data: torch.Tensor | None = None) -> ShardedTensorFactory:
    """A tensor stored as two."""

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        first, second = data.chunk(2)
        return {"first": _whole(f"{key}.1", first), "second": [_whole(f"{key}.2", second)]}

    def merge(parts: Any) -> torch.Tensor:
        return torch.cat([parts["first"], *parts["second"]])

    return ShardedTensorFactory(key, torch.arange(4.0) if data is None else data, build, merge)


def _state() -> dict[str, Any]:
    return {
        "model": {"w": _whole("w"), "fused": halves()},
        "list": [_whole("l"), 3, halves("g")],
        "flat": [_flat(0, 4), _flat(4, 4)],
        "rng": ShardedObject("rng", [1], (1,), (0,)),
        "local": LocalNonpersistentObject("here"),
        "args": {"lr": 0.1, "none": None},
        "empty": {},
    }


def _keys(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _keys(value) for key, value in tree.items()}
    return (
        [_keys(value) for value in tree] if isinstance(tree, list) else getattr(tree, "key", tree)
    )


FUSED = {"first": "f.1", "second": ["f.2"]}
OTHER = {"first": "g.1", "second": ["g.2"]}
SHARDED = {
    "model": {"w": "w", "fused": FUSED},
    "list": ["l", OTHER],
    "flat": ["flat"],
    "rng": "rng",
}


@pytest.mark.parametrize("validate", [True, False])
def test_a_state_dict_to_save_becomes_a_sharded_and_a_common_part(validate):
    state = _state()
    sharded, common = save_preprocess(state, validate)
    assert _keys(sharded) == SHARDED
    assert common == {"list": [3], "args": {"lr": 0.1, "none": None}, "empty": {}}
    assert isinstance(state["model"]["fused"], ShardedTensorFactory) and len(state["flat"]) == 2


def test_shards_that_do_not_fit_are_refused_if_that_is_asked_for():
    doubled = {"a": _whole("w"), "b": _whole("w")}
    with pytest.raises(UsageError, match="2 main replicas"):
        save_preprocess(doubled)
    assert _keys(save_preprocess(doubled, validate_access_integrity=False)[0]) == {
        "a": "w",
        "b": "w",
    }


def test_a_save_looks_at_shards_without_a_grid_too():
    part = ShardedTensor("u", torch.zeros(3), torch.float32, (3,), (5,), (0,), None)
    with pytest.raises(UsageError, match="holds 2 of the 5 elements"):
        save_preprocess({"u": part})


def test_the_callback_sees_the_common_state_only_where_it_is_compared():
    states: list[Any] = []
    save_preprocess(_state(), False, states.append)
    assert states == []
    _, common = save_preprocess(_state(), True, lambda common: states.append(common) or {})
    assert states == [common]


def test_a_state_dict_to_load_loses_what_is_local_and_remembers_its_factories():
    state = _state()
    wanted, local, factories = load_preprocess(state)
    assert _keys(wanted) == SHARDED | {"list": ["l", 3, OTHER], "args": {"lr": 0.1, "none": None}}
    assert local == {"local": "here"}
    assert _keys(factories) == {"model": {"fused": "f"}, "list": {2: "g"}}
    assert factories["model"]["fused"].data is None and state["model"]["fused"].data is not None
    assert isinstance(state["local"], LocalNonpersistentObject) and len(state["flat"]) == 2


def test_empty_flattened_tensors_are_left_out():
    assert _keys(filter_out_empty_flatten_tensor([_flat(0, 1), {"a": _flat(2, 2)}, 5])) == [
        "flat",
        5,
    ]


def _without(tree: Any, *keys: str) -> Any:
    if isinstance(tree, dict):
        return {
            name: reduced
            for name, value in tree.items()
            if (reduced := _without(value, *keys)) not in (None, {}, [])
        }
    if isinstance(tree, list):
        return [
            reduced for value in tree if (reduced := _without(value, *keys)) not in (None, {}, [])
        ]
    return None if tree.key in keys else tree


def test_factories_whose_tensors_were_not_loaded_are_not_merged_and_the_others_keep_their_places():
    wanted, _, factories = load_preprocess(
        {"a": [halves("f"), _whole("w"), halves("g")], "b": halves("h")}
    )
    assert remaining_factories(factories, wanted, wanted) is factories
    remaining = remaining_factories(factories, wanted, _without(wanted, "f.1", "f.2", "h.1", "h.2"))
    assert _keys(remaining) == {"a": {1: "g"}}
    assert remaining_factories(factories, wanted, {}) == {}


def test_a_factory_of_which_a_part_was_loaded_is_refused():
    wanted, _, factories = load_preprocess({"a": halves("f")})
    with pytest.raises(
        MissingShardError, match=r"only 1 of the 2 shards that this ShardedTensorFactory.*tensor f"
    ):
        remaining_factories(factories, wanted, _without(wanted, "f.2"))


def _failing(rank: int, world: int) -> list[str]:
    def refuse(common: Any) -> Any:
        if rank == 1:
            raise KeyError("not here")
        return common

    errors = []
    part = ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, rank, world))
    for state, callback in (({"w": part}, refuse), ({"w": part if rank else _whole("w")}, None)):
        try:
            save_preprocess(state, True, callback)
        except Exception as err:
            errors.append(f"{type(err).__name__}: {err}")
    return errors


@pytest.mark.dist
def test_what_fails_on_one_rank_is_raised_on_all():
    first, second = run_ranks(2, _failing)
    assert (
        first[0] == "WorkerError: rank 1 failed: KeyError: 'not here' (rank 1)"
        and second[0] == "KeyError: 'not here'"
    )
    assert first[1] == second[1] and "ranks disagree on the" in first[1]
