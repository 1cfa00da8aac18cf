"""Sharded optimizer states: like megatron-core's, for tensors and for factories."""

from __future__ import annotations

import logging
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from core.dist_checkpointing import optimizer
from core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor
from core.errors import CheckpointingException


def stepped() -> tuple[Any, Any]:
    """A model of two layers and its optimizer after a step."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    adam.step()
    return model, adam


def sharded(module: ModuleType, model: Any) -> Any:
    """Its state: column and row parallel, the last bias through a factory."""
    state = model.state_dict(keep_vars=True)

    def build(key: str, tensor: Any, replica_id: Any, flattened_range: Any) -> Any:
        return {
            "half": [
                module.ShardedTensor.from_rank_offsets(f"{key}.{i}", tensor[i : i + 1])
                for i in range(2)
            ]
        }

    tensor = module.ShardedTensor.from_rank_offsets
    return {
        "first": [
            tensor("0.weight", state["0.weight"], (0, 1, 2)),
            tensor("0.bias", state["0.bias"], (0, 1, 2), replica_id=1),
        ],
        "second": tensor("1.weight", state["1.weight"], (1, 0, 2), (0, 2, 3), prepend_axis_num=1),
        "third": module.ShardedTensorFactory(
            "1.bias", state["1.bias"], build, lambda loaded: torch.cat(loaded["half"])
        ),
        "other": {"not_trained": tensor("table", torch.zeros(3)), "common": 5},
    }


def attributes(leaf: Any) -> Any:
    """What a leaf consists of, its data as lists."""
    if type(leaf).__name__ == "LocalNonpersistentObject":
        return leaf.unwrap()
    fields = {
        name: value
        for name, value in vars(leaf).items()
        if name not in ("build_fn", "merge_fn", "data")
    }
    return type(leaf).__name__, fields, leaf.data.tolist()


def states(package: str, exclude: tuple[str, ...]) -> Any:
    """Maps and sharded optimizer state that a package makes of the same model."""
    model, adam = stepped()
    module, mapping = import_module(f"{package}.optimizer"), import_module(f"{package}.mapping")
    model_state = sharded(mapping, model)
    numbers = module.get_param_id_to_sharded_param_map(model_state, model.parameters())
    ids = module.get_optim_param_to_id_map([*model.parameters(), next(model.parameters())])
    state = adam.state_dict()
    params = state["param_groups"][0]["params"]
    assert module.optim_state_to_sharding_state(state, numbers, exclude) is None
    assert params == [0, 1, 2, 3] == adam.state_dict()["param_groups"][0]["params"]
    return (
        sorted(ids.values()),
        {number: leaf.key for number, leaf in numbers.items()},
        {
            number: {name: attributes(leaf) for name, leaf in values.items()}
            for number, values in state["state"].items()
        },
        [
            {name: attributes(v) if name == "params" else v for name, v in group.items()}
            for group in state["param_groups"]
        ],
    )


@pytest.mark.parametrize("exclude", [("step",), ("step", "exp_avg")])
def test_an_optimizer_is_sharded_as_megatron_core_does(exclude: tuple[str, ...]) -> None:
    pytest.importorskip("megatron.core")
    ours = states("core.dist_checkpointing", exclude)
    assert ours == states("megatron.core.dist_checkpointing", exclude)
    assert ours[1] == {0: "0.weight", 1: "0.bias", 2: "1.weight", 3: "1.bias"}
    assert ours[2][1]["exp_avg_sq"][1]["key"] == "optimizer.state.exp_avg_sq.0.bias"
    assert set(ours[2][0]) == {"exp_avg", "exp_avg_sq"} - set(exclude)


def test_a_moment_of_another_shape_is_refused() -> None:
    param = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))
    with pytest.raises(
        CheckpointingException, match=r"shape \(6,\), but its parameter has shape \(2, 3\)"
    ) as caught:
        optimizer.make_sharded_optimizer_tensor(param, torch.zeros(6), "optimizer.state.exp_avg")
    assert caught.value.key == "optimizer.state.exp_avg.w"


def test_a_moment_may_have_a_dtype_of_its_own() -> None:
    param = ShardedTensor.from_rank_offsets(
        "w", torch.zeros(2, 3, dtype=torch.bfloat16), (0, 1, 2), replica_id=(0, 1)
    )
    moment = optimizer.make_sharded_optimizer_tensor(param, torch.ones(2, 3), "p")
    assert (moment.key, moment.dtype, moment.global_offset, moment.replica_id) == (
        "p.w",
        torch.float32,
        (2, 0),
        (0, 1),
    )
    assert param.key == "w" and param.dtype == torch.bfloat16


def test_a_flattened_parameter_has_flattened_moments() -> None:
    param = ShardedTensor.from_rank_offsets_flat(
        "w", torch.zeros(4), (2, 3), flattened_range=slice(1, 5)
    )
    moment = optimizer.make_sharded_optimizer_tensor(param, torch.ones(4), "p")
    assert (moment.flattened_range, moment.local_shape) == (slice(1, 5), (2, 3))


def test_a_state_without_a_parameter_is_a_wrong_argument_and_changes_nothing() -> None:
    state = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"params": [0]}]}
    with pytest.raises(ValueError, match="parameter 0"):
        optimizer.optim_state_to_sharding_state(state, {})
    assert torch.is_tensor(state["state"][0]["exp_avg"]) and state["param_groups"] == [
        {"params": [0]}
    ]


def test_the_caller_keeps_the_param_groups() -> None:
    groups = [{"params": [0], "lr": 0.1}]
    state = {"state": {}, "param_groups": groups}
    optimizer.optim_state_to_sharding_state(state, {})
    assert isinstance(state["param_groups"][0]["params"], LocalNonpersistentObject)
    assert groups == [{"params": [0], "lr": 0.1}]


def test_a_state_dict_of_copies_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}
    assert (
        optimizer.get_param_id_to_sharded_param_map(model, [torch.nn.Parameter(torch.zeros(2))])
        == {}
    )
    assert "keep_vars=True" in caplog.text
