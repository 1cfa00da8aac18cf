"""The registry of default strategies, and what the bases do for strategies that leave something
out.
"""

from __future__ import annotations

import sys
from inspect import isabstract
from pathlib import Path

import pytest

from core.dist_checkpointing.strategies import base
from core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from core.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    SaveStrategyBase,
    StrategyAction,
    get_default_strategy,
    register_default_strategy,
    require_backend,
    require_version,
)
from core.errors import CheckpointingException


class Saves(SaveShardedStrategy):
    def save(self, sharded_state_dict, checkpoint_dir):
        pass


class Loads(LoadShardedStrategy):
    def load(self, sharded_state_dict, checkpoint_dir):
        return {}

    def load_tensors_metadata(self, checkpoint_dir):
        return {"w": 1}

    def check_backend_compatibility(self, loaded_backend):
        require_backend(self, loaded_backend, "mine")

    def check_version_compatibility(self, loaded_version):
        require_version(self, loaded_version, (1, 2))


@pytest.fixture
def registry(monkeypatch):
    """The registry, empty for the test."""
    empty = type(base.default_strategies)(dict)
    monkeypatch.setattr(base, "default_strategies", empty)
    return empty


def test_a_registered_strategy_is_found_under_its_action_backend_and_version(registry):
    strategy = Saves("mine", 3)
    register_default_strategy(StrategyAction.SAVE_SHARDED, "mine", 3, strategy)
    assert get_default_strategy(StrategyAction.SAVE_SHARDED, "mine", 3) is strategy
    assert registry["save_sharded"] == {("mine", 3): strategy}
    with pytest.raises(
        CheckpointingException, match="backend 'mine' and version 4.*versions of mine: 3"
    ):
        get_default_strategy(StrategyAction.SAVE_SHARDED, "mine", 4)
    with pytest.raises(CheckpointingException, match="load_sharded with backend 'mine'"):
        get_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 3)


def test_an_unknown_backend_is_refused_with_the_names_that_exist(registry):
    with pytest.raises(
        CheckpointingException,
        match="backend 'tar' and version 1.*Supported backends: torch, torch_dist",
    ):
        get_default_strategy(StrategyAction.LOAD_COMMON, "tar", 1)


@pytest.mark.parametrize(
    ("backend", "module", "package"), [("torch_dist", "torch", "torch"), ("zarr", "zarr", "zarr")]
)
def test_a_package_that_is_not_installed_is_named(registry, monkeypatch, backend, module, package):
    monkeypatch.setitem(sys.modules, f"core.dist_checkpointing.strategies.{module}", None)
    with pytest.raises(
        CheckpointingException,
        match=f"save_sharded with backend '{backend}'.*Install.*`{package}>=",
    ):
        get_default_strategy(StrategyAction.SAVE_SHARDED, backend, 1)


def test_a_strategy_of_the_user_stays_the_default_when_the_backend_registers_its_own(
    registry, monkeypatch
):
    own = Saves("torch_dist", 1)
    module = type(sys)("core.dist_checkpointing.strategies.torch")
    module.register_default_torch_strategies = lambda: [
        register_default_strategy(
            StrategyAction.SAVE_SHARDED, "torch_dist", 1, Saves("torch_dist", 1)
        ),
        register_default_strategy(StrategyAction.LOAD_SHARDED, "torch_dist", 1, Loads()),
    ]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    register_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1, own)
    assert isinstance(get_default_strategy(StrategyAction.LOAD_SHARDED, "torch_dist", 1), Loads)
    assert get_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1) is own


def test_backends_and_versions_are_compared():
    strategy = Loads()
    strategy.check_backend_compatibility("mine")
    strategy.check_version_compatibility(2)
    with pytest.raises(
        CheckpointingException,
        match="Loads reads backend 'mine', but the checkpoint has backend 'zarr'",
    ):
        strategy.check_backend_compatibility("zarr")
    for version in (3, "1", True, None):
        with pytest.raises(CheckpointingException, match="reads version 1 or 2 of its backend"):
            strategy.check_version_compatibility(version)


def test_a_strategy_handles_no_sharded_objects_unless_it_says_so():
    assert not Loads().can_handle_sharded_objects
    assert not Saves("mine", 3).can_handle_sharded_objects
    assert Loads().load_sharded_metadata("anywhere") == {"w": 1}
    assert str(Saves("mine", 3)) == "Saves(mine, 3)"


def test_what_a_strategy_leaves_out_is_an_error_of_both_trees():
    class LoadsAll(Loads):
        can_handle_sharded_objects = True

    class SavesCommon(SaveCommonStrategy):
        def save_common(self, common_state_dict, checkpoint_dir):
            pass

    for call in (
        lambda: Loads().remove_sharded_tensors("anywhere", "optimizer"),
        lambda: LoadsAll().load_sharded_metadata("anywhere"),
        lambda: SavesCommon("torch", 1).save_sharded_objects({}, "anywhere"),
    ):
        with pytest.raises(CheckpointingException, match="Loads|SavesCommon"):
            call()
        with pytest.raises(NotImplementedError):
            call()


@pytest.mark.parametrize(
    "kind",
    [
        LoadCommonStrategy,
        LoadShardedStrategy,
        SaveCommonStrategy,
        SaveShardedStrategy,
        AsyncSaveShardedStrategy,
    ],
)
def test_a_base_cannot_be_used_by_itself(kind):
    assert isabstract(kind)
    with pytest.raises(TypeError):
        kind("mine", 1) if issubclass(kind, SaveStrategyBase) else kind()


def test_saving_with_an_asynchronous_strategy_does_all_of_its_work_at_once(tmp_path: Path):
    done = []

    class Later(AsyncSaveShardedStrategy):
        def async_save(self, sharded_state_dict, checkpoint_dir):
            return AsyncRequest(done.append, ("written",), [lambda: done.append("final")])

    Later("mine", 1).save({}, tmp_path)
    assert done == ["written", "final"]


@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
def test_the_backends_bring_strategies_that_read_what_they_write(registry, backend):
    saves = get_default_strategy(StrategyAction.SAVE_SHARDED, backend, 1)
    loads = get_default_strategy(StrategyAction.LOAD_SHARDED, backend, 1)
    assert (saves.backend, saves.version) == (backend, 1)
    loads.check_backend_compatibility(saves.backend)
    loads.check_version_compatibility(saves.version)
    # Every call returns one of its own, without the settings that a script has made.
    saves.thread_count = 7
    again = get_default_strategy(StrategyAction.SAVE_SHARDED, backend, 1)
    assert type(again) is type(saves) and getattr(again, "thread_count", 2) == 2
    with pytest.raises(CheckpointingException, match=f"versions of {backend}: 1"):
        get_default_strategy(StrategyAction.LOAD_SHARDED, backend, 2)


def test_common_state_has_default_strategies(registry):
    saves = get_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1)
    loads = get_default_strategy(StrategyAction.LOAD_COMMON, "torch", 1)
    loads.check_backend_compatibility(saves.backend)
    loads.check_version_compatibility(saves.version)


def test_there_is_one_queue_for_asynchronous_calls():
    assert isinstance(base.async_calls, AsyncCallsQueue)
