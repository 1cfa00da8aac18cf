"""Kinds of leaves, prefixes of keys, and log messages."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import pytest
import torch

from core.dist_checkpointing import mapping, utils
from core.dist_checkpointing._engine.torch_dtypes import is_float8tensor
from core.dist_checkpointing.dict_utils import nested_values

EXTRACTIONS = [
    "extract_sharded_tensors",
    "extract_sharded_tensors_and_factories",
    "extract_sharded_tensors_or_nonpersistent",
    "extract_sharded_base",
    "extract_nonpersistent",
]


def tree(module: ModuleType) -> Any:
    return {
        "t": [module.ShardedTensor.from_rank_offsets("a.t", torch.zeros(2)), 1],
        "o": {"x": module.ShardedObject("a.o", b"", (1,), (0,)), "y": "z"},
        "f": module.ShardedTensorFactory(
            "a.f", torch.zeros(2), lambda *args: {}, lambda loaded: torch.zeros(0)
        ),
        "l": module.LocalNonpersistentObject(5),
        "e": {},
        "s": torch.zeros(1),
    }


def shown(item: Any) -> Any:
    """Types and keys of the leaves, in their nesting."""
    if isinstance(item, dict):
        return {key: shown(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [shown(value) for value in item]
    return type(item).__name__, getattr(item, "key", None)


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    """megatron-core's module of the same name."""
    pytest.importorskip("megatron.core")
    return pytest.importorskip("megatron.core.dist_checkpointing.utils")


@pytest.mark.parametrize("function", EXTRACTIONS)
def test_leaves_are_told_apart_by_kind(theirs: ModuleType, function: str) -> None:
    from megatron.core.dist_checkpointing import mapping as their_mapping

    assert shown(getattr(utils, function)(tree(mapping))) == shown(
        getattr(theirs, function)(tree(their_mapping))
    )


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("add_prefix_for_sharding", ("p.",)),
        ("replace_prefix_for_sharding", ("a.", "")),
        ("replace_prefix_for_sharding", ("", "q")),
        ("apply_prefix_mapping", ({"a.t": "1", "a.": "2", "a.o": "3"},)),
        ("apply_prefix_mapping", ({"x": "1"},)),
    ],
)
def test_prefixes_of_keys_are_changed_in_place(
    theirs: ModuleType, function: str, args: Any
) -> None:
    from megatron.core.dist_checkpointing import mapping as their_mapping

    ours, other = tree(mapping), tree(their_mapping)
    assert getattr(utils, function)(ours, *args) is getattr(theirs, function)(other, *args) is None
    assert shown(ours) == shown(other)


def test_a_key_without_the_prefix_to_be_replaced_is_a_wrong_argument() -> None:
    with pytest.raises(ValueError, match=r"'a\.t' does not begin with 'b'"):
        utils.replace_prefix_for_sharding(tree(mapping), "b", "c")


def test_iterables_of_unequal_lengths_are_not_zipped() -> None:
    assert list(utils.zip_strict([1, 2], iter("ab"))) == [(1, "a"), (2, "b")]
    with pytest.raises(ValueError, match="different lengths: 2, 3"):
        utils.zip_strict([1, 2], "abc")


def test_shards_are_identified_as_megatron_core_does(theirs: ModuleType) -> None:
    from megatron.core.dist_checkpointing import mapping as their_mapping

    ids = []
    for names, module in ((utils, mapping), (theirs, their_mapping)):
        tensor = module.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 2))
        sharded_object = module.ShardedObject("o", None, (3,), (1,))
        ids.append(
            (names._sharded_tensor_shard_id(tensor), names._sharded_object_id(sharded_object))
        )
    assert ids[0] == ids[1]
    flat = mapping.ShardedTensor.from_rank_offsets_flat(
        "w", torch.zeros(2), (2, 2), flattened_range=slice(1, 3)
    )
    assert utils._sharded_tensor_shard_id(flat) == ("w", (0, 0), (1, 3))


def float8_class() -> type:
    """A tensor class that looks like Transformer Engine's, which is not installed."""
    base = type("Float8Tensor", (torch.Tensor,), {"dequantize": lambda self: torch.full((2,), 7.0)})
    base.__module__ = "transformer_engine.pytorch.float8_tensor"
    return type("ScaledTensor", (base,), {})


def test_eight_bit_tensors_are_replaced_by_ordinary_ones() -> None:
    scaled = torch.zeros(2).as_subclass(float8_class())
    assert (
        is_float8tensor(scaled) and not is_float8tensor(torch.zeros(2)) and not is_float8tensor("x")
    )
    state = {"a": [mapping.ShardedTensor.from_rank_offsets("a", scaled)], "b": tree(mapping)}
    before = [
        leaf.data for leaf in nested_values(state["b"]) if isinstance(leaf, mapping.ShardedBase)
    ]
    utils.force_all_tensors_to_non_fp8(state)
    assert type(state["a"][0].data) is torch.Tensor and state["a"][0].data.tolist() == [7, 7]
    after = [
        leaf.data for leaf in nested_values(state["b"]) if isinstance(leaf, mapping.ShardedBase)
    ]
    assert all(tensor is other for tensor, other in zip(before, after, strict=True))


def test_messages_carry_the_names_of_the_blocks_around_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    logger = logging.getLogger("somewhere")
    with utils.logger_stack("outer", logger) as (names, current):
        assert (names, current) == ("outer", logger)
        with utils.logger_stack("inner"), utils.debug_time("timed"):
            utils.debug_msg("hello")
    with utils.logger_stack() as (names, current):
        assert (names, current) == ("", utils.fallback_logger)
    first, second = caplog.records
    assert (first.getMessage(), first.name, first.levelname) == (
        "outer.inner.timed hello",
        "somewhere",
        "DEBUG",
    )
    assert second.getMessage().startswith("outer.inner.timed took ")


def test_only_blocks_above_the_threshold_are_logged_and_errors_pass_through(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(KeyError), utils.debug_time("short", threshold=1e9):
        raise KeyError("mine")
    assert caplog.records == []
    with utils.debug_time("long", threshold=0):
        pass
    assert [record.levelname for record in caplog.records] == ["WARNING"]
