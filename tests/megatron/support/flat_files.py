"""A distributed optimizer's flat buffers for the synthetic models, made step by step as a run
would.

Shares no code with ``core.megatron.optimizer.flat.buffers``: buffers are laid out in memory, with
all padding, and what files leave out is then cut away. What stands between parameters is NaN, so
that nobody takes it for a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from core.engine.catalog.catalog import Catalog, catalog_of_arrays
from core.engine.catalog.facets import RankFacts
from core.engine.catalog.stored import Coords, Extent, StoredArray
from core.files.store import MemoryStore
from core.megatron.model.topology import Rank, Topology, rank_dir
from core.pickle.inert import Global, TensorLeaf, make_namespace, make_ordered_dict
from tests.megatron.support.synthetic import Model

STATES = {"param": 1.0, "exp_avg": -1.0, "exp_avg_sq": 0.5}
"""State → what the weight is multiplied with."""

GROUP = {
    "wd_mult": 1.0,
    "lr_mult": 1.0,
    "is_expert_parallel": False,
    "is_decoupled_lr": False,
    "lr": 0.1,
    "step": 3,
}


@dataclass(frozen=True)
class Run:
    """How a run lays its buffers out."""

    bucket_size: int | None = None
    dp: int = 2
    align: int = 64
    is_listed: bool = False
    """Buckets are listed, as before 2024-02."""
    is_chunk_alone: bool = False
    """The first model chunk has an optimizer of its own."""


def flat(
    arrays: Sequence[tuple[np.ndarray, bool]], run: Run, *, bucket_size: int | None
) -> list[np.ndarray]:
    """The buckets of a buffer as a file has them.

    Args:
        arrays: in the model's order, each with whether it is a shared embedding.
    """
    buckets: list[np.ndarray] = []
    bucket = np.zeros(0, np.float32)
    at = begin = 0  # in memory

    def close() -> None:
        nonlocal bucket, at, begin
        buckets.append(bucket)
        step = lcm(run.dp, 128)
        at = (at + step - 1) // step * step
        begin, bucket = at, np.zeros(0, np.float32)

    for array, is_shared in reversed(arrays):
        start = (at + run.align - 1) // run.align * run.align
        bucket = np.concatenate([bucket, np.full(start - at, np.nan, np.float32)])
        at = start
        if is_shared and at > begin:
            close()
        bucket = np.concatenate([bucket, array.reshape(-1)])
        at += array.size
        if is_shared or (bucket_size is not None and at - begin >= bucket_size):
            close()
    if at > begin:
        close()
    return buckets


def members(model: Model, rank: Rank, topology: Topology, run: Run) -> list[list[list[np.ndarray]]]:
    """Optimizer → buffer → buckets of the masters."""
    members_of_chunks: list[list[list[np.ndarray]]] = []
    chunks = list(enumerate(model.held(rank, topology).values()))
    dense = [(False, chunks[:1]), (False, chunks[1:])] if run.is_chunk_alone else [(False, chunks)]
    for is_expert, part in [*dense, *([(True, chunks)] if topology.ep > 1 else [])]:
        buffers = []
        for vp_rank, chunk in part:
            params = [
                (array, _is_shared(name, model, topology))
                for name, array in chunk.items()
                if not name.endswith(("_extra_state", "expert_bias"))
                and (topology.ep > 1 and ".experts." in name) == is_expert
            ]
            if params:
                is_cut = rank.pp == 0 and vp_rank == 0 and not run.is_chunk_alone
                size = run.bucket_size if is_cut else None
                buffers.append(flat(params, run, bucket_size=size))
        members_of_chunks.append(buffers)
    return members_of_chunks


def _is_shared(name: str, model: Model, topology: Topology) -> bool:
    return (
        model.is_tied
        and topology.pp > 1
        and ("word_embeddings" in name or name.startswith("output_layer"))
    )


def with_optimizer(
    model: Model,
    topology: Topology,
    run: Run,
    *,
    absent: Mapping[str, Sequence[int]] | None = None,
    args: Mapping[str, object] | None = None,
) -> tuple[MemoryStore, Catalog]:
    """The rank catalog of a model that was trained with the distributed optimizer.

    Args:
        absent: rank directory → numbers of the optimizers that its file does not have.
        args: training arguments about the optimizer.
    """
    model = replace(model, more_args={**_sizes(topology, run), **model.more_args, **(args or {})})
    contents: dict[str, bytes | bytearray] = {}
    arrays: dict[str, StoredArray] = {}

    def leaf(key: str, array: np.ndarray, rank: Rank) -> TensorLeaf:
        contents[key.replace(":", "/")] = array.tobytes()
        extent = Extent(key.replace(":", "/"), 0)
        arrays[key] = StoredArray(key, array.dtype.name, array.shape, extent, topology.coords(rank))
        return TensorLeaf(key)

    settings = make_namespace(model.args(topology))
    ranks: dict[Coords, tuple[str, object]] = {}
    optim_files = {}
    for rank in topology.ranks():
        folder, coords = rank_dir(topology, rank), topology.coords(rank)
        root: dict[object, object] = {"args": settings, "checkpoint_version": 3.0, "iteration": 7}
        for chunk, params in model.held(rank, topology).items():
            names = {
                name: leaf(f"{folder}:{chunk}.{name}", array, rank)
                for name, array in params.items()
            }
            root[chunk] = make_ordered_dict(dict(names))
        optimizers: list[object] = []
        entries: list[object] = []
        for number, buffers in enumerate(members(model, rank, topology, run)):
            is_expert = topology.ep > 1 and number > 0
            groups = [{**GROUP, "is_expert_parallel": is_expert}, {**GROUP, "wd_mult": 0.0}][
                : 2 - is_expert
            ]
            scale = leaf(
                f"{folder}:optimizer.{number}.grad_scaler.scale", np.array([1024], np.float32), rank
            )
            scaler = {"scale": scale, "growth_tracker": 3}
            entries.append({"optimizer": {"param_groups": groups}, "grad_scaler": scaler})
            if number in (absent or {}).get(folder, ()):
                optimizers.append(None)
                continue
            entry: dict[object, object] = {} if run.is_listed else {"buckets_coalesced": True}
            for n, buckets in enumerate(buffers):
                states: dict[str, object] = {}
                for state, factor in STATES.items():
                    pieces = [bucket * np.float32(factor) for bucket in buckets]
                    pieces = pieces if run.is_listed else [np.concatenate(pieces)]
                    keys = [
                        f"{folder}:distrib_optim.{number}.{n}.{state}.{i}"
                        for i in range(len(pieces))
                    ]
                    leaves = [
                        leaf(key, piece, rank) for key, piece in zip(keys, pieces, strict=True)
                    ]
                    states[state] = leaves if run.is_listed else leaves[0]
                dtype = Global("torch", "float32")
                if not run.is_listed:
                    states["numel_unpadded"] = sum(bucket.size for bucket in buckets)
                entry[n] = {dtype if run.is_listed else (dtype, dtype): states}
            optimizers.append(entry)
        optim_files[coords] = optimizers[0] if len(optimizers) == 1 else optimizers
        root["optimizer"] = entries[0] if len(entries) == 1 else entries
        ranks[coords] = (folder, root)
    catalog = replace(
        catalog_of_arrays(format="megatron", version="3.0", arrays=arrays),
        iteration=7,
        args=settings,
        facets={
            RankFacts: RankFacts(ranks, optim_files=optim_files, optimizer_kind="distributed"),
            Topology: topology,
        },
    )
    return MemoryStore(contents), catalog


def _sizes(topology: Topology, run: Run) -> dict[str, object]:
    """Arguments about parallel sizes and buffers."""
    return {
        "virtual_pipeline_model_parallel_size": topology.vpp if topology.vpp > 1 else None,
        "data_parallel_size": run.dp,
        "overlap_grad_reduce": run.bucket_size is not None,
        "ddp_bucket_size": run.bucket_size,
        "use_distributed_optimizer": True,
        "overlap_param_gather_with_optimizer_step": run.is_chunk_alone,
    }
