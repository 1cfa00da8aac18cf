"""save and load: in one process and on several ranks, with the real strategies and with somebody
else's.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from core.dist_checkpointing._directory.sums import STAGE
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.core import check_is_distributed_checkpoint, maybe_load_config
from core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject
from core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_common_strategy,
    get_default_save_sharded_strategy,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)
from core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    UnsupportedError,
    UsageError,
)
from tests.dist_checkpointing import own_strategies
from tests.dist_checkpointing.own_strategies import OWN, OwnAsyncSave, OwnCommonSave, OwnSave
from tests.dist_checkpointing.ranks import run_ranks
from tests.dist_checkpointing.sharded import flat_part_of, global_tensor, part_of
from tests.dist_checkpointing.test_state_dict_utils import halves

own_strategies.register()

BACKENDS: dict[str, dict[str, Any]] = {
    "own": OWN,
    "torch_dist": {},
    "zarr": {"sharded_strategy": ("zarr", 1)},
}
"""Arguments of ``save``."""


def _state(rank: int = 0, world: int = 1, *, is_filled: bool = True) -> dict[str, Any]:
    """A state dict of everything, its tensors cut along the first axis."""
    state = {
        "model": {
            "w": part_of("model.w", (8, 4), (0, rank, world), is_filled=is_filled),
            "layers": [
                part_of(
                    "model.b", (8,), (0, rank, world), dtype=torch.bfloat16, is_filled=is_filled
                )
            ],
        },
        "flat": flat_part_of(
            "flat", (4, 4), 16 * rank // world, 16 * (rank + 1) // world, is_filled=is_filled
        ),
        "rng": ShardedObject(
            "rng", {"seed": rank, "state": [1, 2.5, "x"]} if is_filled else None, (world,), (rank,)
        ),
        "local": LocalNonpersistentObject(("of rank", rank, is_filled)),
        "iteration": 7,
        "args": {"lr": 0.5, "betas": [0.9, 0.95]},
    }
    if rank == 0:
        state["fused"] = halves("fused", torch.arange(8.0) if is_filled else torch.zeros(8))
    if world == 4:
        state["stacked"] = part_of(
            "stacked", (4, 3), (0, rank, 4), prepended=1, is_filled=is_filled
        )
    return state


def _asked(rank: int = 0, world: int = 1) -> dict[str, Any]:
    """The same for a load: without values, and with no common state."""
    state = _state(rank, world, is_filled=False)
    del state["iteration"], state["args"]
    return state


def _plain(value: Any) -> Any:
    """With lists in place of tensors, for comparison."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value


def _expected(rank: int = 0, world: int = 1) -> dict[str, Any]:
    """What a load of ``_asked`` has to return."""
    state = _state(rank, world)
    expected = {
        "model": {"w": state["model"]["w"].data, "layers": [state["model"]["layers"][0].data]},
        "flat": state["flat"].data,
        "rng": state["rng"].data,
        "local": ("of rank", rank, False),
        "iteration": 7,
        "args": state["args"],
    }
    if rank == 0:
        expected["fused"] = torch.arange(8.0)
    if world == 4:
        expected["stacked"] = state["stacked"].data
    return _plain(expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_dict_comes_back_in_one_process(tmp_path, backend):
    state = _state()
    before = _plain(state["model"]["w"].data)
    assert save(state, tmp_path, **BACKENDS[backend]) is None
    assert state["fused"].key == "fused" and "content_metadata" not in state
    assert _plain(state["model"]["w"].data) == before
    asked = _asked()
    assert _plain(load(asked, str(tmp_path))) == _expected()
    assert isinstance(asked["local"], LocalNonpersistentObject) and asked["fused"].key == "fused"
    assert STAGE not in os.listdir(tmp_path)


def test_the_metadata_file_names_the_strategies_that_wrote(tmp_path):
    save(_state(), tmp_path, **OWN)
    assert json.loads((tmp_path / "metadata.json").read_text()) == {
        "sharded_backend": "own",
        "sharded_backend_version": 3,
        "common_backend": "own_common",
        "common_backend_version": 5,
    }
    assert type(get_default_load_sharded_strategy(tmp_path)).__name__ == "OwnLoad"


def test_strategies_may_be_given_as_objects_or_as_backend_and_version(tmp_path):
    for number, given in enumerate(
        (
            {"sharded_strategy": OwnSave(), "common_strategy": OwnCommonSave()},
            OWN,
            {"sharded_strategy": OwnSave()},
        )
    ):
        target = tmp_path / str(number)
        target.mkdir()
        save({"w": part_of("w", (4,))}, target, **given)
        loaded = load({"w": part_of("w", (4,), is_filled=False)}, target, own_strategies.OwnLoad())
        assert _plain(loaded) == {"w": _plain(global_tensor("w", (4,)))}


def test_things_that_are_no_strategies_are_refused(tmp_path):
    for wrong in (
        {"sharded_strategy": "torch_dist"},
        {"common_strategy": 5},
        {"sharded_strategy": OwnCommonSave()},
    ):
        with pytest.raises(ValueError, match="is a (str|int|OwnCommonSave), not a Save"):
            save({}, tmp_path, **wrong)
    with pytest.raises(
        UnsupportedError, match="no default strategy for save_sharded with backend 'none'"
    ):
        save({}, tmp_path, ("none", 1))
    with pytest.raises(UnsupportedError, match=r"OwnSave\(own, 3\) cannot save asynchronously"):
        save({}, tmp_path, **OWN, async_sharded_save=True)
    assert os.listdir(tmp_path) == []


def test_a_strategy_that_does_not_read_this_checkpoint_is_refused(tmp_path):
    save({"w": part_of("w", (4,))}, tmp_path, **OWN)
    with pytest.raises(UnsupportedError, match="torch_dist"):
        load({}, tmp_path, sharded_strategy=("torch_dist", 1))
    with pytest.raises(UnsupportedError, match="torch"):
        load({}, tmp_path, common_strategy=("torch", 1))


def test_default_strategies_are_those_of_torch_dist(tmp_path):
    assert str(get_default_save_sharded_strategy()) == "TorchDistSaveShardedStrategy(torch_dist, 1)"
    assert str(get_default_save_common_strategy()) == "TorchCommonSaveStrategy(torch, 1)"
    with pytest.raises(UnsupportedError):
        get_default_save_sharded_strategy("torch_dist", 99)


@pytest.mark.parametrize("backend", BACKENDS)
def test_content_metadata_is_kept_without_process_groups(tmp_path, backend):
    class ProcessGroup:
        pass

    state: dict[str, Any] = {"w": part_of("w", (4,)), "step": 3}
    save(
        state,
        tmp_path,
        **BACKENDS[backend],
        content_metadata={"kind": "full", "dp_cp_group": ProcessGroup()},
    )
    assert load_content_metadata(tmp_path) == {"kind": "full"} and "content_metadata" not in state
    assert load_content_metadata(preloaded_state_dict=load_common_state_dict(tmp_path)) == {
        "kind": "full"
    }
    assert load_content_metadata(preloaded_state_dict={}) is None
    with pytest.raises(ValueError, match="checkpoint_dir or preloaded_state_dict"):
        load_content_metadata()


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_a_checkpoint_can_be_read_alone(tmp_path, backend):
    save(_state(), tmp_path, **BACKENDS[backend])
    assert load_common_state_dict(str(tmp_path)) == {
        "iteration": 7,
        "args": {"lr": 0.5, "betas": [0.9, 0.95]},
    }
    tensors = load_tensors_metadata(tmp_path)
    shapes = {"model.w": (8, 4), "model.b": (8,), "flat": (4, 4), "fused.1": (4,), "fused.2": (4,)}
    assert {key: tuple(tensor.global_shape) for key, tensor in tensors.items()} == shapes
    assert tensors["model.b"].dtype == torch.bfloat16 and all(
        tensor.data is None for tensor in tensors.values()
    )
    everything = load_sharded_metadata(tmp_path)
    assert set(everything) == {*shapes, "rng/shard_0_1"} and isinstance(
        everything["rng/shard_0_1"], ShardedObject
    )
    plain = load_plain_tensors(tmp_path)
    assert set(plain) == set(shapes) and _plain(plain["model.w"]) == _plain(
        global_tensor("model.w", (8, 4))
    )
    assert _plain(plain["model.b"]) == _plain(global_tensor("model.b", (8,), torch.bfloat16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_can_be_removed_from_a_checkpoint(tmp_path, backend):
    save(
        {"a": part_of("optimizer.a", (4,)), "w": part_of("w", (4,)), "step": 1},
        tmp_path,
        **BACKENDS[backend],
    )
    remove_sharded_tensors(tmp_path, "optimizer.")
    assert set(load_tensors_metadata(tmp_path)) == {"w"}
    loaded = load({"w": part_of("w", (4,), is_filled=False)}, tmp_path, strict="raise_all")
    assert _plain(loaded) == {"step": 1, "w": _plain(global_tensor("w", (4,)))}


# -- strictness


STRICT: dict[str, Any] = {
    "assume_ok_unexpected": "raises",
    "log_unexpected": ({"new"}, set()),
    "log_all": ({"new"}, {"b", "old"}),
    "raise_unexpected": "raises",
    "raise_all": "raises",
    "return_unexpected": (set(), {"new"}),
    "return_all": ({"b", "old"}, {"new"}),
    "ignore_all": None,
}


@pytest.mark.each_value
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("strict", STRICT)
def test_every_strictness_does_what_it_says(tmp_path, caplog, backend, validate, strict):
    stored = {key: part_of(key, (4,)) for key in ("a", "b")} | {
        "o": ShardedObject("old", 1, (1,), (0,)),
        "c": 5,
    }
    save(stored, tmp_path, **BACKENDS[backend])
    asked = {
        "a": part_of("a", (4,), is_filled=False),
        "new": {"x": part_of("new", (4,)), "f": halves("new")},
    }
    asked["new"]["f"].build_fn = lambda *_: {"first": part_of("new", (4,)), "second": []}
    del asked["new"]["x"]
    expected = {"a": _plain(global_tensor("a", (4,))), "c": 5}
    with caplog.at_level(logging.WARNING, "core.dist_checkpointing.validation"):
        if STRICT[strict] == "raises":
            with pytest.raises((CheckpointingException, KeyError), match="new"):
                load(asked, tmp_path, strict=strict, validate_access_integrity=validate)
            return
        loaded = load(asked, tmp_path, strict=strict, validate_access_integrity=validate)
    if strict.startswith("return"):
        assert (_plain(loaded[0]), loaded[1], loaded[2]) == (expected, *STRICT[strict])
    else:
        assert _plain(loaded) == expected
    logged = STRICT[strict] if strict.startswith("log") else (set(), set())
    text = " ".join(record.getMessage() for record in caplog.records)
    assert ("new" in text) == bool(logged[0]) and ("Missing keys" in text) == bool(logged[1])


@pytest.mark.parametrize("strict", [flag for flag in STRICT if flag != "assume_ok_unexpected"])
def test_equal_keys_satisfy_every_strictness(tmp_path, strict):
    save(_state(), tmp_path)
    loaded = load(_asked(), tmp_path, strict=strict)
    assert _plain(loaded[0] if strict.startswith("return") else loaded) == _expected()
    assert not strict.startswith("return") or loaded[1:] == (set(), set())
    with pytest.raises(ValueError, match="strict is 'very'"):
        load(_asked(), tmp_path, strict="very")


# -- what cannot be loaded


def test_a_path_that_is_no_checkpoint_is_named_with_what_to_do(tmp_path):
    calls = (
        lambda path: load({}, path),
        load_common_state_dict,
        load_tensors_metadata,
        load_plain_tensors,
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "file").write_text("x")
    for call in calls:
        with pytest.raises(UsageError, match="the checkpoint directory .*missing does not exist"):
            call(tmp_path / "missing")
        with pytest.raises(
            UsageError, match="file is a file, not the directory of a distributed checkpoint"
        ):
            call(tmp_path / "file")
        with pytest.raises(
            UnsupportedError,
            match="empty is not a distributed checkpoint: metadata.json is missing",
        ):
            call(empty)
        with pytest.raises(UsageError, match="no checkpoint directory was given"):
            call("")
    assert not check_is_distributed_checkpoint(empty)


def test_a_checkpoint_of_another_format_is_named_with_the_command_that_converts_it(tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    with pytest.raises(
        UnsupportedError,
        match=r"a checkpoint in the format dcp, not .* "
        r"Convert it: ckpt convert .*dcp --to torch_dist",
    ):
        load({}, tmp_path / "dcp")


def test_a_training_root_is_named_with_the_iteration_in_it(tmp_path):
    (tmp_path / "iter_0000005").mkdir()
    save({"w": part_of("w", (4,))}, tmp_path / "iter_0000005")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(UsageError, match=r"but contains one: iter_0000005.*[Ll]oad .*iter_0000005"):
        load({}, tmp_path)


def test_a_save_that_did_not_finish_is_no_checkpoint(tmp_path):
    request = save({"w": part_of("w", (4,))}, tmp_path, async_sharded_save=True)
    with pytest.raises(
        MissingShardError, match=r"the save to this directory has not finished.*\.ckpt-stage"
    ):
        load({}, tmp_path)
    request.execute_sync()
    assert _plain(load({}, tmp_path)) == {}
    (tmp_path / "metadata.json").unlink()
    with pytest.raises(MissingShardError, match="metadata.json is missing; it is written last"):
        load({}, tmp_path)


def test_a_damaged_metadata_file_is_named(tmp_path):
    save({"w": part_of("w", (4,))}, tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": 3')
    with pytest.raises(CorruptError, match="not valid JSON"):
        load({}, tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "arrow"}')
    with pytest.raises(
        UnsupportedError, match="no default strategy for load_sharded with backend 'arrow'"
    ):
        load({}, tmp_path)


def test_a_tensor_and_common_state_at_one_place_are_refused(tmp_path):
    save({"w": 5}, tmp_path)
    with pytest.raises(CheckpointingException, match="w"):
        load({"w": part_of("w", (4,))}, tmp_path)


# -- asynchronous


@pytest.mark.parametrize("strategy", ["torch_dist", "own"])
def test_an_asynchronous_save_publishes_when_it_is_finalized(tmp_path, strategy):
    queue = AsyncCallsQueue()
    given = OwnAsyncSave() if strategy == "own" else None
    state = {"w": part_of("w", (4,)), "step": 1}
    queue.schedule_async_request(save(state, tmp_path, given, async_sharded_save=True))
    state["w"].data.zero_()
    assert maybe_load_config(tmp_path) is None
    queue.maybe_finalize_async_calls(blocking=True)
    loaded = load({"w": part_of("w", (4,), is_filled=False)}, tmp_path)
    assert _plain(loaded) == {
        "w": _plain(global_tensor("w", (4,))),
        "step": 1,
    } and STAGE not in os.listdir(tmp_path)
    queue.close()


class _FailingAsync(OwnAsyncSave):
    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        shutil.rmtree(checkpoint_dir)
        return super().async_save(sharded_state_dict, checkpoint_dir)


def test_an_asynchronous_save_that_fails_or_is_dropped_leaves_nothing(tmp_path):
    request = save({"w": part_of("w", (4,))}, tmp_path, OwnAsyncSave(), async_sharded_save=True)
    assert os.listdir(tmp_path) == [STAGE]
    del request
    assert os.listdir(tmp_path) == []
    request = save({"w": part_of("w", (4,))}, tmp_path, _FailingAsync(), async_sharded_save=True)
    with pytest.raises(RuntimeError):
        request.execute_sync()
    assert os.listdir(tmp_path) == []


# -- directories


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_is_replaced_only_when_told(tmp_path, backend):
    save({"old": part_of("old", (4,)), "w": part_of("w", (8,))}, tmp_path, **BACKENDS[backend])
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="already contains a checkpoint"):
        save({"w": part_of("w", (4,))}, tmp_path, **BACKENDS[backend])
    assert set(load_tensors_metadata(tmp_path)) == {"old", "w"}
    save({"w": part_of("w", (4,))}, tmp_path, **BACKENDS[backend], overwrite=True)
    assert {
        key: tensor.global_shape for key, tensor in load_tensors_metadata(tmp_path).items()
    } == {"w": (4,)}
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_directory_that_is_missing_is_not_made(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        save({}, tmp_path / "missing")
    assert os.listdir(tmp_path) == []


# -- several ranks


def _moved(rank: int, world: int, target: str, backend: str) -> list[Any]:
    """Saves cut into ``world`` parts along the first axis, loads along the second, or whole."""
    own_strategies.register()
    if rank == 0:
        os.mkdir(target)
    comm.barrier()
    save(_state(rank, world), target, **BACKENDS[backend])
    same = _plain(load(_asked(rank, world), target))
    asked = {
        "w": part_of("model.w", (8, 4), (1, rank, world), is_filled=False),
        "b": part_of("model.b", (8,), dtype=torch.bfloat16, is_filled=False, replica_id=rank),
        "flat": part_of("flat", (4, 4), (1, rank, world), is_filled=False),
        "others": ShardedObject("rng", None, (world,), ((rank + 1) % world,)),
    }
    return [same, _plain(load(asked, target))]


@pytest.mark.dist
@pytest.mark.each_value
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [2, 4])
def test_what_several_ranks_save_is_loaded_by_them_in_any_cut(tmp_path, world, backend):
    results = run_ranks(world, _moved, str(tmp_path / "checkpoint"), backend)
    width = 4 // world
    for rank, (same, moved) in enumerate(results):
        assert same == _expected(rank, world)
        assert moved.pop("iteration") == 7 and moved.pop("args")["lr"] == 0.5
        assert moved == _plain(
            {
                "w": global_tensor("model.w", (8, 4))[:, rank * width : (rank + 1) * width],
                "b": global_tensor("model.b", (8,), torch.bfloat16),
                "flat": global_tensor("flat", (4, 4))[:, rank * width : (rank + 1) * width],
                "others": {"seed": (rank + 1) % world, "state": [1, 2.5, "x"]},
            }
        )
    parts = {
        "w": part_of("model.w", (8, 4), is_filled=False),
        "flat": flat_part_of("flat", (4, 4), 3, 9, is_filled=False),
    }
    alone = load(parts, tmp_path / "checkpoint", validate_access_integrity=False)
    assert _plain(alone["w"]) == _plain(global_tensor("model.w", (8, 4)))
    assert _plain(alone["flat"]) == _plain(global_tensor("flat", (4, 4)).flatten()[3:9])


def _attempt(work: Any) -> str:
    try:
        return f"returned {work()!r}"
    except Exception as err:
        return f"{type(err).__name__}: {err}"


class _RefusingCommon(OwnCommonSave):
    def save_common(self, common_state_dict: Any, checkpoint_dir: Any) -> None:
        super().save_common(common_state_dict, checkpoint_dir)
        if comm.rank() == 0:
            raise OSError("common is broken")


def _fail(rank: int) -> None:
    if rank == 1:
        raise OSError("disk is gone")


def _failing(rank: int, world: int, folder: str) -> dict[str, tuple[str, list[str]]]:
    """What becomes of saves that fail: the outcome on this rank, and what is left in the
    directory.
    """
    own_strategies.register()
    state = {"w": part_of("w", (8,), (0, rank, world)), "step": 3}
    cases: dict[str, Any] = {
        "before": lambda at: save(state, at, OwnSave(before=_fail), OwnCommonSave()),
        "amid": lambda at: save(state, at, OwnSave(amid=_fail), OwnCommonSave()),
        "common": lambda at: save(state, at, OwnSave(), _RefusingCommon()),
        "integrity": lambda at: save({"w": part_of("w", (8,))}, at, **OWN),
        "dtype": lambda at: save(
            {
                "w": part_of(
                    "w", (8,), (0, rank, world), dtype=[torch.float32, torch.int64][rank % 2]
                )
            },
            at,
        ),
        "one rank's argument": lambda at: save(
            state, at, ("own", 3 + (rank == 1)), ("own_common", 5)
        ),
        "missing": lambda at: save(state, at + "x", **OWN),
        **{
            f"no data, {backend}": lambda at, backend=backend: save(
                {"w": state["w"] if rank != 1 else state["w"].without_data()}, at, (backend, 1)
            )
            for backend in ("torch_dist", "zarr")
        },
        "unpicklable": lambda at: save(
            {"w": state["w"], "f": lambda: 0}, at, validate_access_integrity=False
        ),
        "callback": lambda at: save(
            state, at, **OWN, preprocess_common_before_consistancy_check=lambda _: _fail(rank)
        ),
        "unchecked": lambda at: save(
            {"w": part_of("w", (8,), (0, rank, world)), "r": rank}, at, **OWN
        ),
    }
    outcomes = {}
    for name, work in cases.items():
        at = f"{folder}/{name}"
        if rank == 0:
            os.mkdir(at)
        comm.barrier()
        outcome = _attempt(lambda work=work, at=at: work(at))
        comm.barrier()
        outcomes[name] = outcome, sorted(os.listdir(at))
        comm.barrier()
    return outcomes


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path, world):
    ranks = run_ranks(world, _failing, str(tmp_path))
    messages = {
        "before": "OSError: disk is gone",
        "amid": "OSError: disk is gone",
        "common": "OSError: common is broken",
        "integrity": "main replicas, on ranks 0, 1",
        "dtype": "ranks disagree on the dtype",
        "one rank's argument": "there is no default strategy for save_sharded with backend "
        "'own' and version 4",
        "missing": "the target directory does not exist",
        "no data, torch_dist": "no data",
        "no data, zarr": "no data",
        "unpicklable": "",
        "callback": "OSError: disk is gone",
    }
    for rank, outcomes in enumerate(ranks):
        for name, text in messages.items():
            outcome, remaining = outcomes[name]
            assert not outcome.startswith("returned") and text in outcome, (rank, name, outcome)
            assert remaining == [], (rank, name, remaining)
        assert (
            outcomes["unchecked"][0] == "returned None"
            and "metadata.json" in outcomes["unchecked"][1]
        )
    assert ranks[0]["amid"][0].startswith("WorkerError: rank 1 failed") and ranks[1]["amid"][
        0
    ].startswith("OSError")


def _failing_loads(rank: int, world: int, folder: str) -> dict[str, str]:
    own_strategies.register()
    at = f"{folder}/saved"
    if rank == 0:
        os.mkdir(at)
    comm.barrier()
    save({"w": part_of("w", (8,), (0, rank, world)), "step": 3}, at, **OWN)
    part = part_of("w", (8,), (0, rank, world))
    extra = {"n": part_of("new", (8,), is_filled=False)} if rank == 1 else {}
    outcomes = {
        "integrity": _attempt(lambda: load({"w": part_of("w", (8,))}, at)),
        "not checked": _attempt(
            lambda: load({"w": part_of("w", (8,))}, at, validate_access_integrity=False)["step"]
        ),
        "strategy": _attempt(lambda: load({"w": part, **extra}, at)),
        "raise_unexpected": _attempt(
            lambda: load({"w": part, **extra}, at, strict="raise_unexpected")
        ),
        "raise_all": _attempt(
            lambda: load({"n": part_of("n", (8,), (0, rank, world))}, at, strict="raise_all")
        ),
        "missing": _attempt(lambda: load({}, at + "x")),
        "one rank": _attempt(lambda: load({}, at + "x" * (rank == 1))),
        "return_all": _attempt(lambda: load(extra, at, strict="return_all")[1:]),
        "return_unexpected": _attempt(lambda: load(extra, at, strict="return_unexpected")[1:]),
    }
    comm.barrier()
    return outcomes


@pytest.mark.dist
def test_a_load_that_fails_on_one_rank_fails_on_all():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        first, second = run_ranks(2, _failing_loads, folder)
    for outcomes in (first, second):
        assert (
            "2 main replicas, on ranks 0, 1" in outcomes["integrity"]
            and outcomes["not checked"] == "returned 3"
        )
        assert "new" in outcomes["strategy"] and "new" in outcomes["raise_unexpected"]
        assert all(
            name in outcomes["raise_all"]
            for name in ("not requested by any rank): w", "not in the checkpoint): n")
        )
        assert "does not exist" in outcomes["missing"] and "does not exist" in outcomes["one rank"]
    assert first["raise_unexpected"].startswith("MissingShardError: rank 1 failed")
    assert second["raise_unexpected"].startswith("MissingShardError: ")
    assert first["one rank"].startswith("UsageError: rank 1 failed")
    assert second["one rank"].startswith("UsageError: ") and "failed" not in second["one rank"]
    assert (
        first["return_all"] == "returned ({'w'}, set())"
        and second["return_all"] == "returned ({'w'}, {'new'})"
    )
    assert (first["return_unexpected"], second["return_unexpected"]) == (
        "returned (set(), set())",
        "returned (set(), {'new'})",
    )


def _logged(rank: int, world: int, target: str) -> list[str]:
    own_strategies.register()
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("core.dist_checkpointing.validation").addHandler(handler)
    for number, callback in enumerate(
        (None, lambda common: {key: common[key] for key in common if key != "rank"})
    ):
        if rank == 0:
            os.mkdir(f"{target}/{number}")
        comm.barrier()
        state = {"w": part_of("w", (8,), (0, rank, world)), "rank": rank, "same": 1}
        save(
            state, f"{target}/{number}", **OWN, preprocess_common_before_consistancy_check=callback
        )
        assert load({}, f"{target}/{number}", validate_access_integrity=False) == {
            "rank": 0,
            "same": 1,
        }
    return texts


@pytest.mark.dist
def test_a_common_state_that_differs_is_logged_unless_the_callback_removes_it(tmp_path):
    first, second = run_ranks(2, _logged, str(tmp_path))
    assert (
        first == []
        and len(second) == 1
        and second[0].startswith("Rank 1 common state")
        and "('rank',)" in second[0]
    )


# -- killed


def _wait_to_be_killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)


def _killed_save(rank: int, world: int, target: str, queue: Any) -> None:
    outcome = _attempt(
        lambda: save(
            {"w": part_of("w", (8,), (0, rank, world))},
            target,
            OwnSave(amid=_wait_to_be_killed),
            OwnCommonSave(),
        )
    )
    Path(target).with_suffix(".outcome").write_text(outcome)
    os._exit(0)


@pytest.mark.dist
def test_a_rank_that_is_killed_while_it_writes_leaves_no_checkpoint_and_the_others_an_error(
    tmp_path,
):
    target = tmp_path / "checkpoint"
    target.mkdir()
    with pytest.raises(AssertionError, match="died or hung"):
        run_ranks(2, _killed_save, str(target), None)
    assert (
        target.with_suffix(".outcome")
        .read_text()
        .startswith("WorkerError: lost contact with another rank")
    )
    assert os.listdir(target) == []
    save({"w": part_of("w", (8,))}, target, **OWN)
    assert _plain(load({"w": part_of("w", (8,), is_filled=False)}, target)["w"]) == _plain(
        global_tensor("w", (8,))
    )


def _coordinator_killed(rank: int, world: int, target: str) -> None:
    def kill(number: int) -> None:
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    save({"w": part_of("w", (8,), (0, rank, world))}, target, OwnSave(amid=kill), OwnCommonSave())


@pytest.mark.dist
def test_a_coordinator_that_is_killed_leaves_a_hidden_stage_that_the_next_save_removes(tmp_path):
    with pytest.raises(AssertionError, match="lost contact with another rank"):
        run_ranks(2, _coordinator_killed, str(tmp_path))
    assert os.listdir(tmp_path) == [STAGE] and not check_is_distributed_checkpoint(tmp_path)
    with pytest.raises(MissingShardError, match="has not finished"):
        load({}, tmp_path)
    save({"w": part_of("w", (8,))}, tmp_path)
    assert check_is_distributed_checkpoint(tmp_path) and STAGE not in os.listdir(tmp_path)


# -- other software


GOLDEN = (
    "mcore0121_torch_dist",
    "mcore0121_zarr",
    pytest.param("mcore0161_torch_dist", marks=pytest.mark.long),
    "mcore_torch_dist",
)
"""megatron-core 0.12.1, 0.16.1 and HEAD, which keeps its common state in an object."""


@pytest.mark.parametrize("family", GOLDEN)
def test_checkpoints_of_every_megatron_core_are_loaded(golden, family):
    target = golden / family / "dense_gqa" / "tp2_pp2_optim" / "iter_0000010"
    common = load_common_state_dict(target)
    assert common["iteration"] == 10 and common["args"].num_layers == 4 and "optimizer" in common
    asked: dict[str, Any] = dict(load_sharded_metadata(target))
    tensors = load_tensors_metadata(target)
    assert set(tensors) < set(asked) and not any(key.startswith("common_state") for key in asked)
    loaded, missing, unexpected = load(dict(asked), target, strict="return_all")
    assert (missing, unexpected) == (set(), set()) and set(loaded) == set(asked) | set(common)
    plain = load_plain_tensors(target)
    assert set(plain) == set(tensors) and all(torch.equal(plain[key], loaded[key]) for key in plain)
    other = golden / "mcore0121_torch_dist" / "dense_gqa" / "tp2_pp2_optim" / "iter_0000010"
    for key in ("decoder.layers.mlp.linear_fc1.weight", "embedding.word_embeddings.weight"):
        assert torch.equal(plain[key], load_plain_tensors(other)[key])


@pytest.mark.parametrize("family", GOLDEN)
def test_what_is_missing_in_a_checkpoint_of_megatron_core_is_told(golden, family):
    target = golden / family / "dense_gqa" / "tp2_pp2_optim" / "iter_0000010"
    asked = dict(load_sharded_metadata(target))
    norm_keys = [key for key in asked if key.startswith("decoder.final_layernorm")]
    asked = {key: item for key, item in asked.items() if key not in norm_keys} | {
        "x": part_of("x", (4,))
    }
    _, missing, unexpected = load(asked, target, strict="return_all")
    assert (missing, unexpected) == ({key.split("/")[0] for key in norm_keys}, {"x"}) and norm_keys


def _megatron_state(rank: int, world: int, kinds: Any, *, is_filled: bool = True) -> dict[str, Any]:
    """Tensors, objects and common state, as classes of ours or of megatron-core."""
    full = torch.arange(32.0).reshape(8, 4)
    data = (
        full[rank * 8 // world : (rank + 1) * 8 // world].clone()
        if is_filled
        else torch.zeros(8 // world, 4)
    )
    return {
        "w": kinds.ShardedTensor.from_rank_offsets("w", data, (0, rank, world)),
        "rng": kinds.ShardedObject("rng", {"rank": rank} if is_filled else None, (world,), (rank,)),
        "local": kinds.LocalNonpersistentObject(rank),
        **({"step": 5, "args": {"lr": 0.1}} if is_filled else {}),
    }


@pytest.fixture(scope="module")
def with_megatron(tmp_path_factory) -> list[dict[str, Any]]:
    """By rank, what this package and megatron-core made of the same; in one start, as importing it
    takes seconds.
    """
    pytest.importorskip("megatron.core")
    return run_ranks(2, _with_megatron, str(tmp_path_factory.mktemp("with_megatron")))


def _with_megatron(rank: int, world: int, folder: str) -> dict[str, Any]:
    import warnings

    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing as theirs
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Its own comes from a process that imports torch.
    filesystem_async._results_queue = queue.Queue()
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    return {
        "both ways": _both_ways(rank, world, folder, theirs),
        "strictness": _strictness(rank, world, f"{folder}/strict", theirs),
    }


def _both_ways(rank: int, world: int, folder: str, theirs: Any) -> list[Any]:
    import core.dist_checkpointing.mapping as ours

    for name in ("ours", "theirs"):
        if rank == 0:
            os.mkdir(f"{folder}/{name}")
    comm.barrier()
    save(_megatron_state(rank, world, ours), f"{folder}/ours", content_metadata={"kind": 1})
    theirs.save(
        _megatron_state(rank, world, theirs), f"{folder}/theirs", content_metadata={"kind": 1}
    )
    answers = []
    for name in ("ours", "theirs"):
        for module, loader in ((ours, load), (theirs, theirs.load)):
            asked = _megatron_state(rank, world, module, is_filled=False)
            state, *differences = loader(asked, f"{folder}/{name}", strict="return_all")
            answers.append((_plain(state), *differences))
        answers.append(load_content_metadata(f"{folder}/{name}"))
        answers.append(theirs.load_content_metadata(f"{folder}/{name}"))
    return answers


@pytest.mark.dist
def test_megatron_core_loads_what_is_saved_here_and_the_other_way_round(with_megatron):
    for rank, answers in enumerate(of_rank["both ways"] for of_rank in with_megatron):
        state = {
            "w": _plain(torch.arange(32.0).reshape(8, 4)[rank * 4 : rank * 4 + 4]),
            "rng": {"rank": rank},
            "local": rank,
            "step": 5,
            "args": {"lr": 0.1},
            "content_metadata": {"kind": 1},
        }
        assert [answers[index][0] if index % 4 < 2 else answers[index] for index in range(8)] == [
            state,
            state,
            {"kind": 1},
            {"kind": 1},
        ] * 2
        assert all(answers[index][1:] == (set(), set()) for index in (0, 1, 4, 5))


def _strictness(rank: int, world: int, folder: str, theirs: Any) -> list[Any]:
    """By strictness, what each of the two loaders answers to a request that does not fit."""
    import core.dist_checkpointing.mapping as ours

    if rank == 0:
        os.mkdir(folder)
    comm.barrier()
    stored = _megatron_state(rank, world, ours) | {"b": part_of("b", (8,), (0, rank, world))}
    save(stored, folder)

    def answer(kinds: Any, loader: Any, strict: str) -> Any:
        asked = {
            "w": _megatron_state(rank, world, kinds, is_filled=False)["w"],
            "local": kinds.LocalNonpersistentObject(1),
        }
        if rank == 1:
            asked["new"] = {"x": kinds.ShardedTensor.from_rank_offsets("new", torch.zeros(3))}
        try:
            loaded = loader(asked, folder, strict=strict)
            return [_plain(part) for part in (loaded if isinstance(loaded, tuple) else (loaded,))]
        except BaseException:  # so is torch's CheckpointException
            return "raised"

    return [
        (flag, answer(ours, load, flag), answer(theirs, theirs.load, flag))
        for flag in STRICT
        if "raise" not in flag
    ]


@pytest.mark.dist
def test_strictness_is_that_of_megatron_core(with_megatron):
    first, second = (of_rank["strictness"] for of_rank in with_megatron)
    for flag, ours, theirs in (*first, *second):
        assert ours == theirs, flag
    answers = {flag: answer for flag, answer, _ in second}
    assert answers["return_all"][1:] == [{"b", "rng"}, {"new"}] and answers["return_unexpected"][
        1:
    ] == [set(), {"new"}]
    assert answers["assume_ok_unexpected"] == "raised" and len(answers["log_all"]) == 1


def _called_differently(rank: int, world: int, folder: str) -> dict[str, str]:
    """What is raised when rank 1 gives other arguments than rank 0."""
    target = Path(folder, "saved")
    if rank == 0:
        target.mkdir()
    comm.barrier()
    asked = {"w": part_of("w", (8, 2), (0, rank, world), is_filled=False)}
    outcomes = {
        name: _attempt(
            lambda given=given: save(
                {"w": part_of("w", (8, 2), (0, rank, world))}, target, **given[rank]
            )
        )
        for name, given in {
            "validate_access_integrity": ({}, {"validate_access_integrity": False}),
            "async_sharded_save": ({}, {"async_sharded_save": True}),
            "sharded_strategy": ({}, {"sharded_strategy": ("zarr", 1)}),
            "content_metadata": ({}, {"content_metadata": 5}),
        }.items()
    }
    save({"w": part_of("w", (8, 2), (0, rank, world))}, target)
    outcomes["strict"] = _attempt(
        lambda: load(asked, target, strict="raise_all" if rank else "log_all")
    )
    outcomes["no strict"] = _attempt(
        lambda: load(asked, target, strict="nonsense" if rank else "log_all")
    )
    assert torch.equal(load(asked, target)["w"], part_of("w", (8, 2), (0, rank, world)).data)
    return outcomes


@pytest.mark.dist
def test_ranks_that_are_called_with_different_arguments_say_so_and_stay_in_step(tmp_path):
    for rank, outcomes in enumerate(run_ranks(2, _called_differently, str(tmp_path))):
        for name in (
            "validate_access_integrity",
            "async_sharded_save",
            "sharded_strategy",
            "strict",
        ):
            assert f"different arguments: {name} is" in outcomes[name], (rank, outcomes)
        assert (
            "items" in outcomes["content_metadata"]
            and "strict is 'nonsense'" in outcomes["no strict"]
        )
