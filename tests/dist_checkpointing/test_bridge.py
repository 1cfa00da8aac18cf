"""ShardedTensors on the engine: saved by several ranks, loaded by others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing._engine.prepared_save import prepare_save
from core.dist_checkpointing._engine.torch_dtypes import dtype_name, torch_dtype
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from core.engine.catalog.facets import TorchDistFacts
from core.errors import CorruptError, MissingShardError, UnsupportedError, UsageError
from tests.dist_checkpointing.ranks import run_ranks
from tests.support.facets import facet_of

VALUES = torch.arange(6 * 8, dtype=torch.float32).reshape(6, 8) + 0.25


def _write(tensors: list[ShardedTensor], root: str, *, format: str) -> None:
    work = prepare_save(tensors, (), root, format=format)
    comm.together(work.write)
    if comm.rank() == 0:
        work.finish()
    comm.barrier()


def _save_columns(rank: int, world: int, root: str, format: str) -> None:
    width = 8 // world
    local = VALUES[:, rank * width : (rank + 1) * width]  # a view: it is not contiguous
    stacked = torch.full((3,), float(rank), dtype=torch.bfloat16)
    _write(
        [
            ShardedTensor.from_rank_offsets("w", local, (1, rank, world)),
            ShardedTensor.from_rank_offsets(
                "layers.w", stacked, (0, rank, world), prepend_axis_num=1
            ),
        ],
        root,
        format=format,
    )


def _loaded(root: Path, tensor: ShardedTensor) -> torch.Tensor:
    if tensor.data is None:
        tensor.init_data("cpu")
    bridge.load_tensors([tensor], root)
    return tensor.data


@pytest.mark.dist
@pytest.mark.parametrize("format", ["torch_dist", "zarr", "dcp"])
def test_what_ranks_save_is_loaded_in_another_layout(tmp_path, format):
    run_ranks(2, _save_columns, str(tmp_path), format)
    if format != "dcp":
        _complete(tmp_path, format)
    for row in range(2):
        tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(3, 8), (0, row, 2))
        assert torch.equal(_loaded(tmp_path, tensor), VALUES[3 * row : 3 * row + 3])
    flat = ShardedTensor(
        "w", None, torch.float32, (6, 4), (6, 8), (0, 4), (1, 2), flattened_range=slice(3, 17)
    )
    assert torch.equal(_loaded(tmp_path, flat), VALUES[:, 4:].reshape(-1)[3:17])
    strided = torch.zeros(8, 6).t()
    assert torch.equal(_loaded(tmp_path, ShardedTensor.from_rank_offsets("w", strided)), VALUES)
    layer = ShardedTensor.from_rank_offsets(
        "layers.w", torch.zeros(3), (0, 1, 2), prepend_axis_num=1
    )
    assert torch.equal(_loaded(tmp_path, layer), torch.ones(3)), "cast from bfloat16"


def _complete(root: Path, backend: str) -> None:
    """What the common strategy and ``save`` write."""
    torch.save({"iteration": 3}, root / "common.pt")
    (root / "metadata.json").write_text(
        f'{{"sharded_backend": "{backend}", "sharded_backend_version": 1}}'
    )


def test_odd_views_are_saved_as_they_read(tmp_path):
    base = torch.arange(24, dtype=torch.float32)
    views = {
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "strided": base[::3],
        "offset": base[5:17].view(3, 4)[:, 1:3],
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    }
    flat = ShardedTensor(
        "flat",
        base[::4],
        torch.float32,
        (2, 5),
        (2, 5),
        (0, 0),
        (1, 1),
        flattened_range=slice(2, 8),
    )
    rest = [slice(0, 2), slice(8, 10)]
    flat_parts = [
        ShardedTensor(
            "flat", torch.zeros(2), torch.float32, (2, 5), (2, 5), (0, 0), (1, 1), flattened_range=r
        )
        for r in rest
    ]
    _write(
        [*(ShardedTensor.from_rank_offsets(k, v) for k, v in views.items()), flat, *flat_parts],
        str(tmp_path),
        format="dcp",
    )
    for key, view in views.items():
        assert torch.equal(
            _loaded(tmp_path, ShardedTensor.from_rank_offsets(key, torch.zeros_like(view))), view
        ), key
    full = _loaded(tmp_path, ShardedTensor.from_rank_offsets("flat", torch.ones(2, 5)))
    assert full.reshape(-1).tolist() == [0, 0, *base[::4].tolist(), 0, 0]


def test_metadata_tells_global_shapes(tmp_path):
    _save_columns(0, 1, str(tmp_path), "torch_dist")
    _complete(tmp_path, "torch_dist")
    metadata = bridge.sharded_metadata(tmp_path)
    assert {key: (item.global_shape, item.dtype) for key, item in metadata.items()} == {
        "w": ((6, 8), torch.float32),
        "layers.w": ((1, 3), torch.bfloat16),
    }
    assert bridge.load_common(tmp_path) == {"iteration": 3}


def test_a_missing_tensor_and_another_shape_are_named(tmp_path):
    _save_columns(0, 1, str(tmp_path), "dcp")
    with pytest.raises(MissingShardError, match="v"):
        _loaded(tmp_path, ShardedTensor.from_rank_offsets("v", torch.zeros(6, 8)))
    with pytest.raises(CorruptError, match=r"\(6, 8\).*\(7, 8\)"):
        _loaded(tmp_path, ShardedTensor.from_rank_offsets("w", torch.zeros(7, 8)))


@pytest.mark.each_value
@pytest.mark.parametrize("target", [torch.float32, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("stored", [torch.int64, torch.float32, torch.bool, torch.complex64])
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_values_are_those_of_copy(tmp_path, stored, target):
    values = torch.tensor([[0, 1, -3, 2**40 + 1], [7, 0, 255, 256]]).to(stored)
    if stored.is_floating_point:
        values = values / 2
    work = prepare_save(
        [ShardedTensor.from_rank_offsets("w", values)], (), tmp_path, format="torch_dist"
    )
    work.write()
    work.finish()
    _complete(tmp_path, "torch_dist")
    expected = torch.empty(2, 4, dtype=target).copy_(values)
    # Complete, with other strides, a flattened range, and larger than what is stored.
    part = ShardedTensor.from_rank_offsets("w", torch.ones(2, 4, dtype=target))
    assert torch.equal(_loaded(tmp_path, part), expected)
    turned = ShardedTensor.from_rank_offsets("w", torch.ones(4, 2, dtype=target).T)
    assert torch.equal(_loaded(tmp_path, turned), expected)
    flat = ShardedTensor.from_rank_offsets_flat(
        "w", torch.ones(4, dtype=target), (2, 4), flattened_range=slice(2, 6)
    )
    assert torch.equal(_loaded(tmp_path, flat), expected.flatten()[2:6])
    larger = ShardedTensor.from_rank_offsets(
        "w", torch.ones(3, 4, dtype=target), allow_shape_mismatch=True
    )
    zeros = torch.zeros(1, 4, dtype=target)
    assert torch.equal(_loaded(tmp_path, larger), torch.cat([expected, zeros]))


def test_packed_values_are_not_cast(tmp_path):
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    work = prepare_save(
        [ShardedTensor.from_rank_offsets("w", packed)], (), tmp_path, format="torch_dist"
    )
    work.write()
    work.finish()
    _complete(tmp_path, "torch_dist")
    with pytest.raises(UnsupportedError, match="float4_e2m1fn_x2 data into a float32 tensor"):
        _loaded(tmp_path, ShardedTensor.from_rank_offsets("w", torch.zeros(4)))


def test_objects_come_back(tmp_path):
    item = ShardedObject("rng", {"seed": [1, 2]}, (2,), (1,))
    work = prepare_save((), (item,), tmp_path, format="torch_dist")
    work.write()
    work.finish()
    _complete(tmp_path, "torch_dist")
    assert bridge.load_objects([item.without_data()], tmp_path) == {
        "rng/shard_1_2": {"seed": [1, 2]}
    }
    with pytest.raises(MissingShardError, match=r"these shards of rng: rng/shard_1_2"):
        bridge.load_objects([ShardedObject("rng", None, (2,), (0,))], tmp_path)


def _disagreeing(rank: int, world: int, root: str) -> str:
    tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 4 + rank), (0, rank, world))
    try:
        prepare_save([tensor], (), root, format="dcp")
    except UsageError as err:
        return str(err)
    return ""


@pytest.mark.dist
def test_ranks_that_disagree_hear_of_it(tmp_path):
    assert all(
        "(4, 4)" in text and "(4, 5)" in text for text in run_ranks(2, _disagreeing, str(tmp_path))
    )


def test_what_cannot_be_stored_is_named():
    with pytest.raises(UnsupportedError, match="qint8"):
        dtype_name(torch.qint8, key="w")


def test_flattened_optimizer_states_of_old_versions_are_loaded_by_their_true_shapes(golden):
    root = golden / "mcore0121_torch_dist"
    for path in sorted(root.rglob(".metadata")):
        with bridge.open_catalog(path.parent) as (catalog, store):
            stored = store.root
        facts = facet_of(catalog, TorchDistFacts).mcore_data or {}
        old = [key for key, fact in facts.items() if "nd_reformulated_orig_global_shape" in fact]
        if old:
            break
    key = old[0]
    meta = catalog.tensors[key]
    tensor = bridge.build_whole_tensor(key, torch_dtype(meta.dtype), meta.shape)
    assert tensor.global_shape == facts[key]["nd_reformulated_orig_global_shape"]
    assert _loaded(stored, tensor).abs().sum() > 0


def test_a_part_that_is_loaded_twice_does_not_pass_for_the_whole_record(tmp_path):
    """Its bytes read twice are as many as the record has, and their CRC-32 is not that of the
    record.
    """
    _write([ShardedTensor.from_rank_offsets("w", VALUES)], str(tmp_path), format="torch_dist")
    _complete(tmp_path, "torch_dist")
    half = [ShardedTensor.from_rank_offsets("w", torch.zeros(3, 8), (0, 0, 2)) for _ in range(2)]
    bridge.load_tensors(half, tmp_path)
    assert all(torch.equal(tensor.data, VALUES[:3]) for tensor in half)


def test_damage_is_noticed_where_a_record_is_read_in_parts_and_some_of_them_twice(tmp_path):
    _write([ShardedTensor.from_rank_offsets("w", VALUES)], str(tmp_path), format="torch_dist")
    _complete(tmp_path, "torch_dist")
    file = tmp_path / "__0_0.distcp"
    raw = file.read_bytes()
    file.write_bytes(raw.replace(VALUES[5].numpy().tobytes(), bytes(32)))
    parts = [
        ShardedTensor.from_rank_offsets("w", torch.zeros(3, 8), (0, half, 2)) for half in (0, 0, 1)
    ]
    with pytest.raises(CorruptError, match="CRC-32"):
        bridge.load_tensors(parts, tmp_path)
