"""Saving and loading as Megatron's training script does it, which megatron-core's wheels do not
contain.

Rank files are put together like ``generate_state_dict`` and ``save_checkpoint`` do it, and loaded
strictly. Source: Megatron-LM d98e8a64 ``training/checkpointing.py``.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.validation import StrictHandling

from tests.real_megatron.cpu import called, sharded_state, start_results
from tests.real_megatron.ours import is_in_place
from tests.real_megatron.setting import ITERATION, arguments
from tests.real_megatron.training import Training


def rank_dir(folder: Path, training: Training) -> Path:
    """The directory of this rank's files."""
    layout = training.run.layout
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if layout.pp > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if layout.ep > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return folder / f"iter_{ITERATION:07d}" / name


def save_rank_files(training: Training, folder: Path) -> None:
    """``--ckpt-format torch``: one file per model parallel rank, one of the distributed optimizer,
    and of Muon by layers one per data parallel rank.
    """
    place = rank_dir(folder, training)
    place.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {
        "args": arguments(training.run),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "num_floating_point_operations_so_far": 1,
    }
    for number, chunk in enumerate(training.chunks):
        name = "model" if len(training.chunks) == 1 else f"model{number}"
        state[name] = chunk.state_dict_for_save_checkpoint()
    state["optimizer"] = training.optimizer.state_dict()
    state["opt_param_scheduler"] = training.scheduler.state_dict()
    state["rng_state"] = [_random_states()]
    if training.run.optimizer.kind == "distributed":
        training.optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
    if training.run.optimizer.name == "dist_muon":
        number = parallel_state.get_data_parallel_rank()
        training.optimizer.save_state_dict_to_file(str(place / f"layer_wise_optimizer_{number}.pt"))
    is_writer = parallel_state.get_data_parallel_rank() == 0
    if is_writer or parallel_state.get_expert_data_parallel_rank() == 0:
        torch.save(state, place / "model_optim_rng.pt")
    dist.barrier()
    _track(folder)


def load_rank_files(training: Training, folder: Path, *, optim: bool) -> None:
    """Loads what ``save_rank_files`` saves, strictly: keys, shapes, parameter groups and buffer
    sizes must fit.

    Without ``optim`` the optimizer starts anew, as with ``--no-load-optim``.
    """
    place = rank_dir(folder, training)
    state = torch.load(place / "model_optim_rng.pt", weights_only=False)
    _check_args(state["args"], training)
    for number, chunk in enumerate(training.chunks):
        chunk.load_state_dict(
            state["model" if len(training.chunks) == 1 else f"model{number}"], strict=True
        )
    if not optim:
        training.optimizer.reload_model_params()
        return
    training.optimizer.load_state_dict(state["optimizer"])
    if training.run.optimizer.kind == "distributed":
        training.optimizer.load_parameter_state(str(place / "distrib_optim.pt"))
    training.scheduler.load_state_dict(state["opt_param_scheduler"])


def _check_args(stored: Any, training: Training) -> None:
    """The stored arguments are those of this run: what ``check_checkpoint_args`` compares, and the
    layout.
    """
    wanted = arguments(training.run)
    names = tuple(
        """
        num_layers hidden_size num_attention_heads padded_vocab_size
        tensor_model_parallel_size pipeline_model_parallel_size
        virtual_pipeline_model_parallel_size expert_model_parallel_size
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        pipeline_model_parallel_layout
        """.split()
    )
    for name in names:
        actual, expected = getattr(stored, name), getattr(wanted, name)
        assert actual == expected or (
            name.startswith("virtual") and {actual, expected} <= {None, 1}
        ), f"argument {name} is {actual!r}, not {expected!r}"


def save_distributed(
    training: Training,
    folder: Path,
    *,
    sharding: str | None,
    backend: str = "torch_dist",
    way: str = "plain",
) -> None:
    """``--ckpt-format torch_dist`` (or ``zarr``, megatron-core 0.12).

    Args:
        training: what is saved.
        folder: where the iteration's directory goes.
        sharding: how the distributed optimizer's state is stored (``distrib_optim_sharding_type``).
        backend: the format.
        way: see ``Form``.
    """
    place = folder / f"iter_{ITERATION:07d}"
    place.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _sharded_state(training, sharding=sharding, is_loading=False)
    strategy: Any = (backend, 1)
    if way != "plain":
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy(backend), _replicas(), do_cache_distribution=True
        )
    is_async = way in ("async", "persistent")
    if is_async:
        start_results()
    request = called(
        dist_checkpointing.save,
        state,
        str(place),
        strategy,
        async_sharded_save=is_async,
        content_metadata=_content_metadata(sharding),
    )
    if is_async:
        _finish(
            request, is_persistent=way == "persistent" and is_in_place()
        )  # its own starts where no GPU is made up
    dist.barrier()
    _track(folder)


def _finish(request: Any, *, is_persistent: bool) -> None:
    queue = AsyncCallsQueue(persistent=is_persistent)
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    assert queue.get_num_unfinalized_calls() == 0
    queue.close()


def _replicas() -> Any:
    """The ranks that hold the same parameters."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def load_distributed(
    training: Training, folder: Path, *, sharding: str | None, optim: bool, way: str = "plain"
) -> None:
    """Loads strictly: a key that is missing or left over is an error, save random states of another
    grid of ranks.

    Without ``optim`` the optimizer starts anew, as with ``--no-load-optim``.
    """
    place = folder / f"iter_{ITERATION:07d}"
    state = _sharded_state(training, sharding=sharding, is_loading=True, optim=optim)
    strategy = None
    if way != "plain":
        strategy = FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(str(place)), _replicas()
        )
    loaded, unexpected, absent = dist_checkpointing.load(
        state, str(place), strategy, strict=StrictHandling.RETURN_ALL
    )
    unexpected = {key for key in unexpected if key != "rng_state"}
    assert not unexpected and not absent, (
        f"not asked for: {sorted(unexpected)[:6]}, not stored: {sorted(absent)[:6]}"
    )
    for number, chunk in enumerate(training.chunks):
        chunk.load_state_dict(
            loaded["model" if len(training.chunks) == 1 else f"model{number}"], strict=True
        )
    if not optim:
        training.optimizer.reload_model_params()
        return
    training.optimizer.load_state_dict(loaded["optimizer"])
    training.scheduler.load_state_dict(loaded["opt_param_scheduler"])


def _content_metadata(sharding: str | None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return metadata if sharding is None else {**metadata, "distrib_optim_sharding_type": sharding}


def _sharded_state(
    training: Training, *, sharding: str | None, is_loading: bool, optim: bool = True
) -> dict[str, Any]:
    """What ``generate_state_dict`` makes for the distributed formats."""
    metadata = _content_metadata(sharding)
    state: dict[str, Any] = {
        "args": arguments(training.run),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
    }
    models: dict[str, Any] = {}
    for number, model in enumerate(training.models):
        if training.run.layout.vpp and not hasattr(model, "vp_stage"):
            parallel_state.set_virtual_pipeline_model_parallel_rank(number)
        name = "model" if len(training.chunks) == 1 else f"model{number}"
        models[name] = sharded_state(model, **metadata)
    state |= models
    if optim:
        options: dict[str, Any] = {"metadata": metadata}
        if _takes_sharding_type():
            options = {} if sharding is None else {"sharding_type": sharding}
        state["optimizer"] = called(
            training.optimizer.sharded_state_dict, models, is_loading, **options
        )
    state["opt_param_scheduler"] = training.scheduler.state_dict()
    tp, pp = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    layout = training.run.layout
    if not is_loading:
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        states = [_random_states()]
        state["rng_state"] = ShardedObject(
            "rng_state", states, (layout.pp, layout.tp), (pp, tp), replica_id=replica
        )
    return state


def _takes_sharding_type() -> bool:
    """Whether this megatron-core asks for the optimizer's sharding by an argument (before 0.14)."""
    import inspect

    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return "metadata" not in inspect.signature(DistributedOptimizer.sharded_state_dict).parameters


def _random_states() -> dict[str, Any]:
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _track(folder: Path) -> None:
    if dist.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
