"""Local checkpoints: each rank saves its state on its own disk, with replicas on other ranks.

With nvidia-resiliency-ext where it is installed, else with the calls that it makes. A rank loses
its directory and gets its copy from another rank; all ranks together have the complete state again.
"""

from __future__ import annotations

import shutil
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from core.opening.open import open_checkpoint
from core.pickle.names import is_foreign
from core.verbs.diff.run import DiffJob, diff
from tests.dist_checkpointing.ranks import run_ranks

EXCHANGES = ("broadcast", "gather_rounds", "gather_object")


def state(rank: int, world: int, *, is_filled: bool = True) -> dict[str, Any]:
    """As many replicated weights as ranks, a tensor of one shard per rank, an object per rank."""
    scale = 1.0 if is_filled else 0.0
    return {
        "iteration": 5,
        "model": {
            f"w{index}": ShardedTensor.from_rank_offsets(
                f"w{index}", (torch.arange(6.0) + 10 * index) * scale, replica_id=rank
            )
            for index in range(world)
        },
        "cut": ShardedTensor.from_rank_offsets(
            "cut", (torch.arange(4.0) + rank).to(torch.bfloat16) * scale, (0, rank, world)
        ),
        "rng": ShardedObject("rng", [rank] if is_filled else None, (world,), (rank,)),
    }


def check_restored(restored: MCoreTensorAwareStateDict, rank: int, world: int, algo: str) -> None:
    """Check that all ranks have all of their state again, by each exchange."""
    for exchange in EXCHANGES:
        loaded = restored.to_state_dict(
            state(rank, world, is_filled=False), algo=algo, exchange_algo=exchange
        )
        expected = state(rank, world)
        assert loaded["iteration"] == 5 and loaded["rng"] == [rank]
        assert torch.equal(loaded["cut"], expected["cut"].data)
        for key, leaf in expected["model"].items():
            assert torch.equal(loaded["model"][key], leaf.data)


def file_of(folder: Path, rank: int, of: int) -> Path:
    return folder / str(rank) / f"iter_0000005_{of}_local.pt"


def _replicate(own: MCoreTensorAwareStateDict, world: int) -> list[MCoreTensorAwareStateDict]:
    """Give every rank the state of all: hollow as objects, the tensors one by one."""
    tensors = own.pop_tensors()
    hollow: list[Any] = [None] * world
    dist.all_gather_object(hollow, own)
    shapes: list[Any] = [None] * world
    dist.all_gather_object(shapes, [(tensor.shape, tensor.dtype) for tensor in tensors])
    for rank, replica in enumerate(hollow):
        assert replica.is_hollow
        received = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes[rank]]
        if rank == dist.get_rank():
            received = tensors
        for tensor in received:
            dist.broadcast(tensor, src=rank)
        replica.insert_tensors(received)
    return hollow


def _send(replica: MCoreTensorAwareStateDict, to: int) -> None:
    tensors = replica.pop_tensors()
    dist.send_object_list([replica], to)
    for tensor in tensors:
        dist.send(tensor, to)
    replica.insert_tensors(tensors)


def _receive(source: int) -> MCoreTensorAwareStateDict:
    box: list[Any] = [None]
    dist.recv_object_list(box, source)
    box[0].init_tensors()
    for tensor in box[0].tensors:
        dist.recv(tensor, source)
    restored: MCoreTensorAwareStateDict = box[0]
    return restored


def _lose_a_rank(rank: int, world: int, folder: Path, algo: str) -> None:
    own, _ = MCoreTensorAwareStateDict.from_state_dict(state(rank, world), algo=algo)
    for of, replica in enumerate(_replicate(own, world)):
        replica.copy_tensors_to_cpu(non_blocking=True)
        file_of(folder, rank, of).parent.mkdir(exist_ok=True)
        torch.save(replica, file_of(folder, rank, of))
    dist.barrier()
    # Rank 1's node is replaced; the next rank has a replica.
    if rank == 1:
        shutil.rmtree(folder / "1")
        restored = _receive(2 % world)
    else:
        restored = torch.load(file_of(folder, rank, rank), weights_only=False)
        restored.restore_tensor_device(non_blocking=False)
        if rank == 2 % world:
            replica = torch.load(file_of(folder, rank, 1), weights_only=False)
            replica.restore_tensor_device(non_blocking=False)
            _send(replica, 1)
    check_restored(restored, rank, world, algo)


@pytest.mark.dist
@pytest.mark.parametrize("algo", ["atomic", "fully_parallel"])
def test_a_rank_that_lost_its_files_gets_them_from_a_replica(tmp_path: Path, algo: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run_ranks(3, _lose_a_rank, tmp_path / name, algo)
    # What is left, rank 1's replicas among it, is a complete checkpoint to the command line.
    checkpoint = open_checkpoint(tmp_path / "a")
    catalog = checkpoint.catalog
    assert catalog.iteration == 5 and not catalog.notes
    assert not any(is_foreign(use) for use in checkpoint.uses)
    assert {key: tensor.shape for key, tensor in catalog.tensors.items()} == {
        "w0": (6,),
        "w1": (6,),
        "w2": (6,),
        "cut": (12,),
    }
    assert diff(DiffJob(a=tmp_path / "a", b=tmp_path / "b")).same


def _without_gpu() -> Any:
    """Replace what nvidia-resiliency-ext does with GPUs only."""
    empty_like = torch.empty_like
    return (
        patch.multiple(torch, empty_like=lambda tensor, **options: empty_like(tensor)),
        patch.multiple(torch.Tensor, cuda=lambda tensor: tensor),
        patch.multiple(torch.cuda, synchronize=lambda: None),
    )


def _with_manager(rank: int, world: int, folder: Path, is_async: bool) -> str:
    from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import base_manager, local_manager
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
        CliqueReplicationStrategy,
    )

    def manager(**options: Any) -> Any:
        return local_manager.LocalCheckpointManager(folder, **options)

    def replication() -> Any:
        return CliqueReplicationStrategy.from_replication_params(1, 2)

    empty_like, on_tensors, on_cuda = _without_gpu()
    with empty_like, on_tensors, on_cuda:
        # Save, and lose rank 1's files.
        own, _ = MCoreTensorAwareStateDict.from_state_dict(state(rank, world))
        assert isinstance(own, TensorAwareStateDict)
        request, queue = (
            manager(repl_strategy=replication()).save(own, 5, is_async=is_async),
            AsyncCallsQueue(),
        )
        if is_async:
            if rank == 0:
                request.add_finalize_fn(lambda: (folder / "tracker").touch())
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
        if rank == 1:
            shutil.rmtree(folder / "1")
        dist.barrier()
        # Restore.
        restarted = manager(repl_strategy=replication())
        assert restarted.find_latest() == 5
        restored, _ = restarted.load()
        check_restored(restored, rank, world, "fully_parallel")
        if not is_async:
            return ""

        # Rank 1 fails to write the next iteration. Without replicas, the manager removes it from
        # all ranks; with them, it is complete.
        def fail(*args: Any) -> None:
            raise OSError("the disk is full")

        unreplicated = manager()
        unreplicated._save = fail if rank == 1 else unreplicated._save
        queue.schedule_async_request(unreplicated.save(copy(restored), 6, is_async=True))
        with pytest.raises(base_manager.CheckpointingException, match="iteration 6"):
            queue.maybe_finalize_async_calls(blocking=True)
        restarted._save = fail if rank == 1 else restarted._save
        queue.schedule_async_request(restarted.save(restored, 7, is_async=True))
        queue.maybe_finalize_async_calls(blocking=True)
        return f"iteration {restarted.find_latest()}"


@pytest.mark.dist
@pytest.mark.skipif(find_spec("nvidia_resiliency_ext") is None, reason="nvidia-resiliency-ext")
@pytest.mark.parametrize("is_async", [False, True])
def test_nvidia_resiliency_ext_saves_and_restores(tmp_path: Path, is_async: bool) -> None:
    latest = run_ranks(2, _with_manager, tmp_path, is_async)
    assert latest == (["iteration 7"] * 2 if is_async else ["", ""])
    assert (tmp_path / "tracker").exists() == is_async
    assert set(open_checkpoint(tmp_path).catalog.tensors) == {"w0", "w1", "cut"}
