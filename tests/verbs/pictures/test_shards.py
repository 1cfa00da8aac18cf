from __future__ import annotations

from pathlib import Path

import pytest

from core.opening.open import open_checkpoint
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import Job, TopologyChange
from core.verbs.pictures.shards import rank_moves, shard_map, shard_move

RANKS = "mcore_legacy/dense_gqa/tp2_pp2_optim"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


def test_the_boxes_of_a_tensor_cover_it(golden: Path) -> None:
    checkpoint = open_checkpoint(golden / "torch_dcp" / "fsdp2_dp4")
    for key, tensor in checkpoint.catalog.tensors.items():
        shards = shard_map(checkpoint.catalog, key).shards
        assert shards
        assert sum(shard.n_bytes for shard in shards) == tensor.n_bytes
        assert all(shard.files for shard in shards)
    checkpoint.store.close()


@pytest.mark.parametrize("to", ["megatron", "dcp", "safetensors"])
def test_moves_fill_every_box_of_the_target(golden: Path, tmp_path: Path, to: str) -> None:
    change = TopologyChange(tp=4, pp=1) if to == "megatron" else None
    job = Job(src=golden / RANKS, dst=tmp_path / "out", to=to, topology=change, is_reshard=True)
    with prepare(job) as prepared:
        key = next(key for key in prepared.plan.target.tensors if key.endswith(FC1))
        move = shard_move(prepared.plan, key)
        filled = [0] * len(move.after.shards)
        for part in move.moves:
            filled[part.target] += part.n_bytes
        assert filled == [shard.n_bytes for shard in move.after.shards]
        paths = {path for path, _ in prepared.files}
        assert {file for shard in move.after.shards for file in shard.files} <= paths


def test_the_bytes_between_ranks_are_those_that_are_read(golden: Path, tmp_path: Path) -> None:
    change = TopologyChange(tp=4, pp=1)
    job = Job(src=golden / RANKS, dst=tmp_path / "out", topology=change, is_reshard=True)
    with prepare(job) as prepared:
        moves = rank_moves(prepared.plan)
    assert moves.sources == ("tp0 pp0", "tp0 pp1", "tp1 pp0", "tp1 pp1")
    assert moves.targets == ("tp0 pp0", "tp1 pp0", "tp2 pp0", "tp3 pp0")
    # TP rank 0 is cut into ranks 0 and 1; rank 2 only gets replicated tensors from it.
    first = moves.n_bytes[0]
    assert first[0] > first[2] and first[1] > first[2]
    assert sum(map(sum, moves.n_bytes)) >= prepared.plan.least_read_bytes
