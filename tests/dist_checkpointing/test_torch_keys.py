"""State dicts under the names of their checkpoint and back, as scripts do it around torch's own
dcp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from core.dist_checkpointing import ShardedObject, ShardedTensor, load
from core.dist_checkpointing.core import CheckpointingConfig, save_config
from core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from core.dist_checkpointing.utils import _clean_metadata_for_serialization
from core.errors import UsageError


def state(fill: float) -> dict[str, Any]:
    """Two halves of one tensor, a prepended axis, an object, and keys that are numbers."""
    half = [
        ShardedTensor.from_rank_offsets("w", torch.arange(6.0) + 10 * n + fill, (0, n, 2))
        for n in range(2)
    ]
    layer = ShardedTensor.from_rank_offsets(
        "l", torch.full((2, 3), fill), (0, 0, 1), prepend_axis_num=1
    )
    return {
        "model": {0: half, 1: {"l": layer}},
        "rng": ShardedObject("rng", {"seed": fill}, (1,), (0,)),
    }


def test_what_torch_saves_by_these_names_loads_here_and_there(tmp_path: Path) -> None:
    leaves, _, _ = _replace_state_dict_keys_with_sharded_keys(state(1.0), True)
    planner = MCoreSavePlanner(flatten_state_dict=False)
    dcp.save(
        mcore_to_pyt_state_dict(leaves),
        storage_writer=dcp.FileSystemWriter(tmp_path),
        planner=planner,
    )
    asked = state(0.0)
    leaves, paths, names = _replace_state_dict_keys_with_sharded_keys(asked)
    stored = mcore_to_pyt_state_dict(leaves, True)
    planner = MCoreLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(stored, storage_reader=dcp.FileSystemReader(tmp_path), planner=planner)
    loaded = {key: _unwrap_pyt_sharded_tensor(value) for key, value in stored.items()}
    nested = _replace_sharded_keys_with_state_dict_keys(loaded, paths, names)
    _restore_dict_types(nested, asked)
    assert_is(nested, 1.0)
    torch.save({}, tmp_path / "common.pt")
    save_config(CheckpointingConfig("torch_dist", 1, "torch", 1), tmp_path)
    assert_is(load(state(0.0), tmp_path), 1.0)


def assert_is(loaded: dict[str, Any], fill: float) -> None:
    """It is what ``state(fill)`` holds."""
    assert loaded["rng"] == {"seed": fill}
    assert set(loaded["model"]) == {0, 1}
    for number, half in enumerate(loaded["model"][0]):
        assert torch.equal(half, torch.arange(6.0) + 10 * number + fill)
    assert torch.equal(loaded["model"][1]["l"], torch.full((2, 3), fill))


def test_only_main_replicas_are_kept_if_that_is_asked_for() -> None:
    replica = ShardedTensor.from_rank_offsets("w", torch.zeros(2), replica_id=1)
    assert _replace_state_dict_keys_with_sharded_keys({"w": replica}, True)[0] == {}
    assert _replace_state_dict_keys_with_sharded_keys({"w": replica})[0] == {"w": [replica]}


def test_values_that_are_too_few_are_refused() -> None:
    with pytest.raises(UsageError, match="1 values were loaded for 2 leaves"):
        _replace_sharded_keys_with_state_dict_keys(
            {"w": [1]}, {"a": ("a",), "b": ("b",)}, {"w": ["a", "b"]}
        )


@pytest.mark.parametrize(
    ("nested", "template", "message"),
    [
        ([], {1: 0}, "has a list at its root, where the template has a dict"),
        ({"a": [{}, []]}, {"a": [{}, {1: 0}]}, "has a list at a/1, where the template has a dict"),
        ({"a": {"2": 0}}, {"a": {1: 0}}, "the key a/1 is missing"),
    ],
)
def test_another_nesting_is_refused(nested: Any, template: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _restore_dict_types(nested, template)


def test_metadata_are_stored_without_process_groups() -> None:
    assert _clean_metadata_for_serialization(None) is None
    assert _clean_metadata_for_serialization({"dp_cp_group": 1, "kind": "x"}) == {"kind": "x"}
