"""A sharded state that megatron-core 0.12.1 and this project both save and load as zarr, and
0.12.1's side of that.

``python -m tests.real_megatron.zarr_state save|load FOLDER WORLD`` runs in a Python that has
megatron-core 0.12.1, which is another one than this project's: it forks WORLD processes, which save
the state, or load it and compare every bit. Needs torch and megatron-core only.

Left out is what 0.12.1 cannot save: scalars, whose arrays it never creates.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

CUTS = {1: (0, 48), 2: (0, 17, 48), 3: (0, 5, 17, 48), 4: (0, 5, 17, 30, 48)}
"""Where the flattened moment is cut, by ranks."""


def values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A global tensor, the same everywhere."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (
        numbers > 0
        if dtype == torch.bool
        else (numbers * 1000 if dtype == torch.int64 else numbers).to(dtype)
    )


def state(mapping: Any, rank: int, world: int, *, is_filled: bool = True) -> dict[str, Any]:
    """What a rank holds.

    Args:
        mapping: the module with ShardedTensor and ShardedObject.
        is_filled: with its values, else zeros and nothing.
    """
    part_of = mapping.ShardedTensor.from_rank_offsets

    def part(
        key: str,
        seed: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        axis: int | None,
        **options: Any,
    ) -> Any:
        full = values(seed, shape, dtype)
        local = full if axis is None else full.chunk(world, axis)[rank].clone()
        cuts = () if axis is None else ((axis, rank, world),)
        return part_of(key, local if is_filled else torch.zeros_like(local), *cuts, **options)

    def layer(number: int) -> Any:
        local = values(10 + number, (12, 6), torch.bfloat16).chunk(world, 0)[rank].clone()
        cuts = ((0, number, 3), (1, rank, world))
        data = local if is_filled else torch.zeros_like(local)
        return part_of("decoder.layers.mlp.weight", data, *cuts, prepend_axis_num=1)

    start, stop = CUTS[world][rank : rank + 2]
    moment = values(5, (8, 6), torch.float32).flatten()[start:stop].clone()
    return {
        "iteration": 7,
        "args": {"lr": 0.125, "names": ["a", "b"]},
        "model": {
            "embedding": part(
                "embedding.weight", 1, (12, 8), torch.bfloat16, 0, allow_shape_mismatch=True
            ),
            "proj": part("proj.weight", 2, (4, 24), torch.float32, 1),
            "layers": [layer(number) for number in range(3)],
            "norm": part("norm.weight", 3, (6,), torch.float16, None, replica_id=rank),
            "mask": part("mask", 4, (12,), torch.bool, 0),
            "counts": part("counts", 6, (12, 2), torch.int64, 0),
        },
        "optimizer": {
            "exp_avg": mapping.ShardedTensor.from_rank_offsets_flat(
                "optimizer.state.exp_avg.weight",
                moment if is_filled else torch.zeros_like(moment),
                (8, 6),
                flattened_range=slice(start, stop),
            )
        },
        "rng_state": mapping.ShardedObject(
            "rng_state", {"seed": [3, 4]} if is_filled else None, (1,), (0,), rank
        ),
    }


def wrong(loaded: dict[str, Any], mapping: Any, rank: int, world: int) -> list[str]:
    """Which parts of a loaded state are not what was saved."""
    expected = _leaves(state(mapping, rank, world), "")
    actual = _leaves(loaded, "")
    return sorted(
        name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name)
    )


def _leaves(tree: Any, name: str) -> dict[str, object]:
    """Name → comparable value."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {
            path: leaf
            for key, value in items
            for path, leaf in _leaves(value, f"{name}/{key}").items()
        }
    if hasattr(tree, "replica_id"):
        return _leaves(tree.data, name)
    if torch.is_tensor(tree):
        raw = tree.detach().contiguous().reshape(-1).view(torch.uint8)
        return {name: (str(tree.dtype), tuple(tree.shape), bytes(raw.tolist()))}
    return {name: tree}


def _rank(doing: str, folder: str, rank: int, world: int, meeting: str) -> None:
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import mapping

    torch.cuda.synchronize = lambda *args, **kwargs: None  # 0.12.1 waits for a GPU before it writes
    dist.init_process_group(
        "gloo", store=dist.FileStore(meeting, world), rank=rank, world_size=world
    )
    if doing == "save":
        dist_checkpointing.save(state(mapping, rank, world), folder, ("zarr", 1))
    else:
        loaded = dist_checkpointing.load(state(mapping, rank, world, is_filled=False), folder)
        assert not wrong(loaded, mapping, rank, world), wrong(loaded, mapping, rank, world)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # nothing of it waits for what 0.12.1 left running


def main(doing: str, folder: str, world: int) -> int:
    """Forks the ranks; the number of those that failed."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as place:
        meeting = str(Path(place, "store"))
        ranks = [
            context.Process(target=_rank, args=(doing, folder, rank, world, meeting))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return sum(process.exitcode != 0 for process in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
