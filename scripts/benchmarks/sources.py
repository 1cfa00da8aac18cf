"""Makes the checkpoints that scripts/bench measures; run as a program, so that the measuring
process stays small.

    python -m scripts.benchmarks.sources KIND DIR --bytes N

A dense Llama-like model in bf16 with Megatron's names: 18 layers of hidden 4096 for 4 GiB. The
feed-forward size is chosen so that row-parallel weights (attention output, second feed-forward
matrix) are 36 % of the bytes of a layer: those are the ones whose resharding cuts rows. KIND is one
of

- ``megatron-tpN``: N rank files as Megatron-LM lays them out, by torch.save
- ``megatron-tpN-optim``: the same with a Float16 optimizer, fp32 masters and moments
- ``ranks-N``: N rank files of a small model at TP 8, so PP N / 8, of ``--bytes`` each at least
- ``torch``: one .pt, by torch.save
- ``dcp-1``: DCP by dcp.save in one process, one file
- ``dcp-4``: DCP by dcp.save in four processes, DTensors sharded as tensor parallelism shards them
- ``safetensors``: two shards and their index, by safetensors
- ``zarr3``, ``zarr3-zstd``: one array a tensor in row chunks of about 16 MiB, by tensorstore; plain
  or compressed
- ``orbax``: zarr arrays without compression in an OCDBT database, by tensorstore
- ``chunks``: a DCP directory of ``--bytes`` chunks (64 to a tensor), its metadata torch's own, its
  data a hole
- ``tiny``: a DCP directory of one tensor
- ``shards``: ``--bytes`` safetensors files of one small tensor each, and their index
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import socket
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

HIDDEN = 4096
FFN = 6144
N_HEADS = 32
N_GROUPS = 8
VOCAB = 2048
KV = HIDDEN // N_HEADS * N_GROUPS
LAYER_BYTES = 2 * (HIDDEN * (HIDDEN + 2 * KV) + HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
CHUNKS_PER_TENSOR = 64
ITERATION = 100


@dataclass(frozen=True)
class Weight:
    """A global tensor: its axis to split (None: on every rank) and in how many consecutive
    parts.
    """

    key: str
    shape: tuple[int, ...]
    axis: int | None = None
    n_parts: int = 1


def n_layers_for(n_bytes: int) -> int:
    return max(1, round(n_bytes / LAYER_BYTES))


def weights(n_layers: int) -> Iterator[Weight]:
    """The model's tensors in Megatron's order."""
    yield Weight("embedding.word_embeddings.weight", (VOCAB, HIDDEN), 0)
    for i in range(n_layers):
        at = f"decoder.layers.{i}"
        yield Weight(f"{at}.input_layernorm.weight", (HIDDEN,))
        yield Weight(f"{at}.self_attention.linear_proj.weight", (HIDDEN, HIDDEN), 1)
        yield Weight(f"{at}.self_attention.linear_qkv.weight", (HIDDEN + 2 * KV, HIDDEN), 0)
        yield Weight(f"{at}.pre_mlp_layernorm.weight", (HIDDEN,))
        yield Weight(f"{at}.mlp.linear_fc1.weight", (2 * FFN, HIDDEN), 0, 2)
        yield Weight(f"{at}.mlp.linear_fc2.weight", (HIDDEN, FFN), 1)
    yield Weight("decoder.final_layernorm.weight", (HIDDEN,))
    yield Weight("output_layer.weight", (VOCAB, HIDDEN), 0)


class Values:
    """Bits for any tensor, different for every key, without generating gigabytes."""

    _N_OFFSETS = 1 << 20
    are_normal = False
    """Normal numbers, as weights are, in place of any bits, of which some are NaN."""

    def __init__(self) -> None:
        n = 2 * FFN * HIDDEN + self._N_OFFSETS
        rng = np.random.default_rng(7)
        if self.are_normal:
            bits = (
                (rng.standard_normal(n, dtype=np.float32).view(np.uint32) >> 16)
                .astype(np.uint16)
                .view(np.int16)
            )
        else:
            bits = np.frombuffer(rng.bytes(2 * n), dtype=np.int16)
        self._bits = torch.from_numpy(bits.copy())

    def of(self, weight: Weight) -> torch.Tensor:
        start = zlib.crc32(weight.key.encode()) % self._N_OFFSETS
        n = int(np.prod(weight.shape))
        return self._bits[start : start + n].view(torch.bfloat16).reshape(weight.shape)

    def shard(self, weight: Weight, rank: int, n_ranks: int) -> torch.Tensor:
        """What one tensor-parallel rank holds; a tensor of its own storage."""
        whole = self.of(weight)
        if weight.axis is None:
            return whole.clone()
        parts = whole.chunk(weight.n_parts, weight.axis)
        return torch.cat(
            [part.chunk(n_ranks, weight.axis)[rank] for part in parts], weight.axis
        ).contiguous()


def args_for(n_layers: int, tp: int) -> argparse.Namespace:
    """What Megatron keeps as ``args``, as far as the layout of the weights depends on it."""
    return argparse.Namespace(
        add_bias_linear=False,
        add_qkv_bias=False,
        bf16=True,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=tp,
        ffn_hidden_size=FFN,
        group_query_attention=True,
        hidden_size=HIDDEN,
        iteration=ITERATION,
        kv_channels=HIDDEN // N_HEADS,
        make_vocab_size_divisible_by=128,
        num_attention_heads=N_HEADS,
        num_experts=None,
        num_layers=n_layers,
        num_query_groups=N_GROUPS,
        normalization="RMSNorm",
        padded_vocab_size=VOCAB,
        params_dtype=torch.bfloat16,
        pipeline_model_parallel_size=1,
        position_embedding_type="rope",
        qk_layernorm=False,
        sequence_parallel=False,
        swiglu=True,
        tensor_model_parallel_size=tp,
        transformer_impl="local",
        untie_embeddings_and_output_weights=True,
        virtual_pipeline_model_parallel_size=None,
        vocab_size=VOCAB,
        world_size=tp,
    )


def _rng_state() -> list[dict[str, Any]]:
    return [
        {
            "random_rng_state": random.Random(1).getstate(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.zeros(16, dtype=torch.uint8),
            "rng_tracker_states": {},
        }
    ]


def rank_dict(n_layers: int, tp: int, rank: int) -> dict[str, Any]:
    """The content of one rank file."""
    values = Values()
    model: dict[str, Any] = {}
    for weight in weights(n_layers):
        model[weight.key] = values.shard(weight, rank, tp)
        if ".linear_" in weight.key or weight.key.startswith("output_layer"):
            model[weight.key.removesuffix("weight") + "_extra_state"] = None
    return {
        "args": args_for(n_layers, tp),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "model": model,
        "rng_state": _rng_state(),
        "num_floating_point_operations_so_far": 1e18,
    }


STATE_BYTES = 7
"""How many times the bytes of bf16 weights a checkpoint with its optimizer has: weight, master and
two moments.
"""


def optimizer_dict(model: dict[str, Any]) -> dict[str, Any]:
    """What Megatron's Float16 optimizer keeps for a rank: two groups, numbered parameters, fp32
    masters.
    """
    params = [value for value in model.values() if isinstance(value, torch.Tensor)]
    groups: list[dict[str, Any]] = []
    masters, state = [], {}
    for decays in (True, False):
        mine = [param for param in params if (param.ndim > 1) == decays]
        first = len(state)
        for param in mine:
            state[len(state)] = {"exp_avg": param.float() * 2, "exp_avg_sq": param.float() ** 2}
        masters.append([param.float() for param in mine])
        settings = {
            "lr": 1e-4,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": 0.1 * decays,
            "step": ITERATION,
        }
        known = {
            "wd_mult": float(decays),
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
        }
        groups.append({**known, **settings, "params": list(range(first, len(state)))})
    return {"optimizer": {"state": state, "param_groups": groups}, "fp32_from_fp16_params": masters}


def make_megatron(folder: Path, n_bytes: int, tp: int, *, has_optimizer: bool = False) -> None:
    n_layers = n_layers_for(n_bytes // STATE_BYTES if has_optimizer else n_bytes)
    for rank in range(tp):
        rank_dir = folder / f"iter_{ITERATION:07d}" / f"mp_rank_{rank:02d}"
        rank_dir.mkdir(parents=True)
        content = rank_dict(n_layers, tp, rank)
        if has_optimizer:
            content["optimizer"] = optimizer_dict(content["model"])
        torch.save(content, rank_dir / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def make_ranks(folder: Path, n_bytes: int, n_ranks: int) -> None:
    """Write the rank files of a model with a layer in each pipeline stage."""
    tp, hidden = 8, 256
    pp = n_ranks // tp
    sizes = {
        "ffn_hidden_size": hidden,
        "hidden_size": hidden,
        "kv_channels": hidden // N_HEADS,
        "num_layers": pp,
        "padded_vocab_size": hidden,
        "pipeline_model_parallel_size": pp,
        "vocab_size": hidden,
        "world_size": n_ranks,
    }
    args = argparse.Namespace(**vars(args_for(pp, tp)) | sizes)
    kv = hidden // N_HEADS * N_GROUPS
    layer = {
        "input_layernorm": (hidden,),
        "self_attention.linear_proj": (hidden, hidden // tp),
        "self_attention.linear_qkv": ((hidden + 2 * kv) // tp, hidden),
        "pre_mlp_layernorm": (hidden,),
        "mlp.linear_fc1": (2 * hidden // tp, hidden),
        "mlp.linear_fc2": (hidden, hidden // tp),
    }
    for rank in range(n_ranks):
        pp_rank, tp_rank = divmod(rank, tp)
        shapes = {f"decoder.layers.0.{name}.weight": shape for name, shape in layer.items()}
        if pp_rank == 0:
            shapes["embedding.word_embeddings.weight"] = (hidden // tp, hidden)
        if pp_rank == pp - 1:
            shapes["decoder.final_layernorm.weight"] = (hidden,)
            shapes["output_layer.weight"] = (hidden // tp, hidden)
        content = {
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
            "model": {
                key: torch.full(shape, float(rank), dtype=torch.bfloat16)
                for key, shape in shapes.items()
            },
            "rng_state": [{**_rng_state()[0], "padding": torch.zeros(n_bytes, dtype=torch.uint8)}],
        }
        rank_dir = folder / f"iter_{ITERATION:07d}" / f"mp_rank_{tp_rank:02d}_{pp_rank:03d}"
        rank_dir.mkdir(parents=True)
        torch.save(content, rank_dir / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def make_torch(folder: Path, n_bytes: int) -> None:
    folder.mkdir(parents=True)
    state = rank_dict(n_layers_for(n_bytes), 1, 0)
    del state["rng_state"]
    torch.save(state, folder / "model.pt")


def _dcp_state(n_layers: int, model: dict[str, Any]) -> dict[str, Any]:
    return {
        "args": args_for(n_layers, 1),
        "iteration": ITERATION,
        "checkpoint_version": 3.0,
        "model": model,
    }


def make_dcp_1(folder: Path, n_bytes: int) -> None:
    n_layers = n_layers_for(n_bytes)
    values = Values()
    model = {weight.key: values.of(weight) for weight in weights(n_layers)}
    dcp.save(
        _dcp_state(n_layers, model),
        storage_writer=filesystem.FileSystemWriter(folder),
        no_dist=True,
    )


def make_dcp_4(folder: Path, n_bytes: int) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_save_shards, (folder, n_bytes, port), nprocs=4)


def _save_shards(rank: int, folder: Path, n_bytes: int, port: int) -> None:
    from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=4)
    mesh = DeviceMesh("cpu", list(range(4)))
    n_layers = n_layers_for(n_bytes)
    values = Values()
    model = {}
    for weight in weights(n_layers):
        whole = values.of(weight)
        axis = weight.axis
        local = whole if axis is None else whole.chunk(4, axis)[rank].contiguous()
        model[weight.key] = DTensor.from_local(
            local, mesh, [Replicate() if axis is None else Shard(axis)], run_check=False
        )
    dcp.save(_dcp_state(n_layers, model), storage_writer=filesystem.FileSystemWriter(folder))
    dist.destroy_process_group()


def make_safetensors(folder: Path, n_bytes: int) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    every = list(weights(n_layers_for(n_bytes)))
    values = Values()
    weight_map = {}
    for number, part in enumerate((every[: len(every) // 2], every[len(every) // 2 :]), start=1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file(
            {weight.key: values.of(weight).clone() for weight in part},
            folder / name,
            metadata={"format": "pt"},
        )
        weight_map |= {weight.key: name for weight in part}
    index = {
        "metadata": {"total_size": sum(2 * int(np.prod(w.shape)) for w in every)},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _make_tensorstore(
    folder: Path, n_bytes: int, spec_of: Callable[[str, list[int]], dict[str, Any]]
) -> None:
    import ml_dtypes
    import tensorstore as ts

    folder.mkdir(parents=True)
    values = Values()
    for weight in weights(n_layers_for(n_bytes)):
        row_bytes = 2 * int(np.prod(weight.shape[1:]))
        rows = min(weight.shape[0], max(1, (16 << 20) // row_bytes))
        chunk = [rows, *weight.shape[1:]]
        data = values.of(weight).view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        store = ts.open(
            spec_of(weight.key, chunk), create=True, shape=list(weight.shape), dtype=ts.bfloat16
        ).result()
        store.write(data).result()


def make_zarr3(folder: Path, n_bytes: int, *, compresses: bool) -> None:
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    codecs += [{"name": "zstd", "configuration": {"level": 1}}] if compresses else []

    def spec_of(key: str, chunk: list[int]) -> dict[str, Any]:
        grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
        return {
            "driver": "zarr3",
            "kvstore": f"file://{folder}/{key}/",
            "metadata": {"chunk_grid": grid, "codecs": codecs, "data_type": "bfloat16"},
        }

    _make_tensorstore(folder, n_bytes, spec_of)
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    (folder / "zarr.json").write_text(json.dumps(group))


def make_orbax(folder: Path, n_bytes: int) -> None:
    def spec_of(key: str, chunk: list[int]) -> dict[str, Any]:
        return {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{key}/"},
            "metadata": {"chunks": chunk, "compressor": None, "dtype": "bfloat16"},
        }

    _make_tensorstore(folder, n_bytes, spec_of)


def make_chunks(folder: Path, n_chunks: int) -> None:
    """Metadata as torch writes it, for tensors of 64 row blocks in 16 files; the files are holes of
    the right size.
    """
    folder.mkdir(parents=True)
    properties = metadata.TensorProperties(dtype=torch.bfloat16)
    n_files, item_bytes = 16, 1 << 17
    ends = [0] * n_files
    state: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for i in range(n_chunks // CHUNKS_PER_TENSOR):
        key = f"model.layers.{i // 8}.block_{i % 8}.weight"
        chunks = []
        for j in range(CHUNKS_PER_TENSOR):
            offsets, sizes = torch.Size([j * 64, 0]), torch.Size([64, 1024])
            chunks.append(metadata.ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            n = j % n_files
            info = filesystem._StorageInfo(f"__{n}_0.distcp", ends[n], item_bytes + 1024)
            ends[n] += info.length
            storage[metadata.MetadataIndex(key, offsets, j)] = info
        size = torch.Size([64 * CHUNKS_PER_TENSOR, 1024])
        state[key] = metadata.TensorStorageMetadata(properties=properties, size=size, chunks=chunks)
    planner_data = {key: (key,) for key in state}
    whole = metadata.Metadata(
        state_dict_metadata=state, planner_data=planner_data, storage_data=storage
    )
    whole.storage_meta = metadata.StorageMeta()
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    for n, end in enumerate(ends):
        with (folder / f"__{n}_0.distcp").open("wb") as file:
            file.truncate(end)


def make_tiny(folder: Path) -> None:
    dcp.save({"weight": torch.arange(16.0)}, checkpoint_id=folder, no_dist=True)


def make_shards(folder: Path, n_files: int) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    names = {
        f"model.layers.{n}.weight": f"model-{n + 1:05}-of-{n_files:05}.safetensors"
        for n in range(n_files)
    }
    for n, (key, name) in enumerate(names.items()):
        save_file({key: torch.full((8, 8), float(n))}, folder / name)
    index = {"metadata": {"total_size": 256 * n_files}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes one synthetic checkpoint.")
    parser.add_argument("kind")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--bytes", type=int, default=4 << 30, help="size of the weights (of 'chunks': how many)"
    )
    parser.add_argument("--normal", action="store_true", help="normal numbers in place of any bits")
    options = parser.parse_args()
    Values.are_normal = options.normal
    if options.kind.startswith("megatron-tp"):
        tp, _, rest = options.kind.removeprefix("megatron-tp").partition("-")
        make_megatron(options.folder, options.bytes, int(tp), has_optimizer=rest == "optim")
    elif options.kind.startswith("ranks-"):
        make_ranks(options.folder, options.bytes, int(options.kind.removeprefix("ranks-")))
    elif options.kind == "tiny":
        make_tiny(options.folder)
    else:
        makers = {
            "torch": make_torch,
            "dcp-1": make_dcp_1,
            "dcp-4": make_dcp_4,
            "safetensors": make_safetensors,
            "zarr3": partial(make_zarr3, compresses=False),
            "zarr3-zstd": partial(make_zarr3, compresses=True),
            "orbax": make_orbax,
            "chunks": make_chunks,
            "shards": make_shards,
        }
        makers[options.kind](options.folder, options.bytes)


if __name__ == "__main__":
    main()
