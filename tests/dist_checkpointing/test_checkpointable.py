"""ShardedTensors go through torch's own dcp.save and dcp.load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from core.dist_checkpointing.mapping import ShardedTensor
from core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from core.errors import CheckpointingException
from core.opening.open import open_checkpoint
from tests.dist_checkpointing.ranks import run_ranks
from tests.dist_checkpointing.sharded import flat_part_of, global_tensor, part_of
from tests.support.materialize import tensor_bytes

wrap = CheckpointableShardedTensor.from_sh_ten

SHAPES = {
    "column": (8, 6),
    "row": (6, 8),
    "grid": (4, 8),
    "layers": (4, 3, 5),
    "two": (16, 3),
    "flat": (4, 6),
    "bias": (),
    "half": (8, 2),
}


def _contained(parts: list[ShardedTensor]) -> LocalShardsContainer:
    return LocalShardsContainer([wrap(part) for part in parts])


def _state(
    rank: int, world: int, *, is_filled: bool = True
) -> tuple[dict[str, object], list[ShardedTensor]]:
    """A state that is cut otherwise for every number of ranks."""
    n_cells = SHAPES["flat"][0] * SHAPES["flat"][1]
    start, stop = (round(n_cells * at / world) + (0 < at < world) for at in (rank, rank + 1))
    rows = 2 if world == 4 else 1
    layers = SHAPES["layers"][0] // world
    parts_by_key = {
        "column": [part_of("column", SHAPES["column"], (0, rank, world), is_filled=is_filled)],
        "row": [part_of("row", SHAPES["row"], (1, rank, world), is_filled=is_filled)],
        "grid": [
            part_of(
                "grid",
                SHAPES["grid"],
                (0, rank % rows, rows),
                (1, rank // rows, world // rows),
                is_filled=is_filled,
            )
        ],
        "layers": [
            part_of(
                "layers",
                SHAPES["layers"],
                (0, rank * layers + layer, 4),
                prepended=1,
                is_filled=is_filled,
            )
            for layer in range(layers)
        ],
        "two": [
            part_of("two", SHAPES["two"], (0, number, 2 * world), is_filled=is_filled)
            for number in (rank, 2 * world - 1 - rank)
        ],
        "flat": [flat_part_of("flat", SHAPES["flat"], start, stop, is_filled=is_filled)],
        "bias": [part_of("bias", (), is_filled=is_filled, replica_id=rank)],
        "half": [
            part_of(
                "half", SHAPES["half"], (0, rank, world), dtype=torch.bfloat16, is_filled=is_filled
            )
        ],
    }
    state = {
        key: _contained(parts) if len(parts) > 1 else wrap(parts[0])
        for key, parts in parts_by_key.items()
    }
    return {"model": state}, [part for parts in parts_by_key.values() for part in parts]


def _save(rank: int, world: int, folder: Path) -> None:
    dcp.save(_state(rank, world)[0], checkpoint_id=folder)


def _load(rank: int, world: int, folder: Path) -> list[str]:
    """Keys of what came back otherwise than it was saved."""
    state, parts = _state(rank, world, is_filled=False)
    dcp.load(state, checkpoint_id=folder)
    return [
        got.key
        for got, want in zip(parts, _state(rank, world)[1], strict=True)
        if not torch.equal(got.data, want.data)
    ]


def _on_ranks(n: int, function, folder: Path) -> list:
    return [function(0, 1, folder)] if n == 1 else run_ranks(n, function, folder)


@pytest.mark.dist
@pytest.mark.first(1)
@pytest.mark.parametrize("n_saved", [2, 1, 4])
def test_what_torch_saved_is_read_by_torch_at_any_number_of_ranks_and_by_the_engine(
    n_saved, tmp_path
):
    _on_ranks(n_saved, _save, tmp_path)
    for n_loaded in (1, 2, 4):
        assert _on_ranks(n_loaded, _load, tmp_path) == [[]] * n_loaded
    opened = open_checkpoint(tmp_path)
    assert opened.catalog.format == "dcp"
    for key, want in _wanted().items():
        tensor = opened.catalog.tensors[f"model.{key}"]
        assert (tensor.shape, tensor.dtype) == (
            tuple(want.shape),
            str(want.dtype).removeprefix("torch."),
        )
        data = tensor_bytes(opened.catalog, opened.store, f"model.{key}").tobytes()
        assert data == want.flatten().view(torch.uint8).numpy().tobytes(), key
    plain = {"model": {key: torch.zeros_like(want) for key, want in _wanted().items()}}
    dcp.load(plain, checkpoint_id=tmp_path)
    assert all(torch.equal(plain["model"][key], want) for key, want in _wanted().items())


def _wanted() -> dict[str, torch.Tensor]:
    return {
        key: global_tensor(key, shape, torch.bfloat16 if key == "half" else torch.float32)
        for key, shape in SHAPES.items()
    }


def _irregular(is_filled: bool = True) -> list[ShardedTensor]:
    """Rows 0–2 and 3–7 of a tensor, the second transposed in memory."""
    full = global_tensor("uneven", (8, 4))
    return [
        ShardedTensor(
            "uneven",
            data if is_filled else torch.full_like(data, -1),
            full.dtype,
            tuple(data.shape),
            (8, 4),
            (start, 0),
            None,
        )
        for start, data in ((0, full[:3].clone()), (3, full[3:].t().contiguous().t()))
    ]


def test_shards_of_different_sizes_and_any_strides_are_kept(tmp_path):
    dcp.save({"uneven": _contained(_irregular())}, checkpoint_id=tmp_path)
    parts = _irregular(is_filled=False)
    dcp.load({"uneven": _contained(parts)}, checkpoint_id=tmp_path)
    assert torch.equal(torch.cat([part.data for part in parts]), global_tensor("uneven", (8, 4)))


def test_copies_of_a_shard_in_one_container_are_written_once_and_all_loaded(tmp_path):
    dcp.save(
        {"w": _contained([part_of("w", (4,)), part_of("w", (4,), replica_id=1)])},
        checkpoint_id=tmp_path,
    )
    assert len(dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["w"].chunks) == 1
    parts = [part_of("w", (4,), is_filled=False) for _ in range(2)]
    dcp.load({"w": _contained(parts)}, checkpoint_id=tmp_path)
    assert all(torch.equal(part.data, global_tensor("w", (4,))) for part in parts)


def test_a_parameter_that_requires_gradients_is_loaded_in_place(tmp_path):
    dcp.save({"w": wrap(part_of("w", (4,)))}, checkpoint_id=tmp_path)
    weight = torch.nn.Parameter(torch.zeros(4))
    dcp.load({"w": wrap(ShardedTensor.from_rank_offsets("w", weight))}, checkpoint_id=tmp_path)
    assert torch.equal(weight.data, global_tensor("w", (4,)))


def test_an_empty_flattened_range_writes_and_loads_nothing(tmp_path):
    parts = [flat_part_of("w", (4, 3), 0, 0), flat_part_of("w", (4, 3), 0, 12)]
    assert wrap(parts[0]).__create_chunk_list__() == []
    dcp.save({"w": _contained(parts)}, checkpoint_id=tmp_path)
    loaded = [
        flat_part_of("w", (4, 3), 0, 0, is_filled=False),
        flat_part_of("w", (4, 3), 0, 12, is_filled=False),
    ]
    dcp.load({"w": _contained(loaded)}, checkpoint_id=tmp_path)
    assert torch.equal(loaded[1].data, parts[1].data)


def test_items_state_box_global_size_and_type():
    shard = wrap(part_of("w", (6, 8), (1, 1, 2), dtype=torch.float16))
    (item,) = shard.__create_write_items__("name", shard, 3)
    assert (item.index.fqn, item.index.offset, item.index.index) == ("name", torch.Size((0, 4)), 3)
    assert item.tensor_data.size == shard.size() == torch.Size((6, 8))
    assert item.tensor_data.chunk == shard.__create_chunk_list__()[0]
    assert (item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes) == ((0, 4), (6, 4))
    assert item.tensor_data.properties.dtype == shard.dtype == torch.float16
    assert shard.__create_write_items__("name", shard)[0].index.index is None


def test_a_chunk_is_found_by_its_offset_whatever_the_hint_says():
    parts = [part_of("w", (6,), (0, number, 3)) for number in (2, 0)]
    shards = _contained(parts)
    for offset, want in ((4, parts[0]), (0, parts[1])):
        for hint in (None, 0, 1, 7):
            tensor = shards.__get_tensor_shard__(MetadataIndex("w", torch.Size((offset,)), hint))
            assert tensor.data_ptr() == want.data.data_ptr()
    with pytest.raises(ValueError, match="no chunk at"):
        shards.__get_tensor_shard__(MetadataIndex("w", torch.Size((2,)), 0))
    with pytest.raises(ValueError, match="an offset is needed"):
        shards.__get_tensor_shard__(MetadataIndex("w", None, 0))
    assert (
        wrap(parts[0]).__get_tensor_shard__(MetadataIndex("w")).data_ptr()
        == parts[0].data.data_ptr()
    )


def test_no_operation_works_on_them():
    shard = wrap(part_of("w", (4,)))
    for sharded in (shard, LocalShardsContainer([shard])):
        assert sharded.size() == (4,)
        assert repr(sharded).startswith(f"{type(sharded).__name__}(")
        with pytest.raises(NotImplementedError, match=type(sharded).__name__):
            sharded + 1


def test_what_is_no_shard_is_refused():
    part = part_of("w", (4,))
    with pytest.raises(CheckpointingException, match="expected a ShardedTensor, found a Tensor"):
        wrap(part.data)
    with pytest.raises(CheckpointingException, match="no data.*init_data"):
        wrap(part.without_data())
    with pytest.raises(
        CheckpointingException, match=r"shape \(5,\), but the ShardedTensor declares \(4,\)"
    ):
        CheckpointableShardedTensor(torch.zeros(5), part)
    with pytest.raises(CheckpointingException, match="at least one"):
        LocalShardsContainer([])
    with pytest.raises(CheckpointingException, match="expected a CheckpointableShardedTensor"):
        LocalShardsContainer([part.data])
    with pytest.raises(
        CheckpointingException, match="belong to tensors with different global shapes"
    ):
        _contained([part, part_of("w", (8,), (0, 1, 2))])
