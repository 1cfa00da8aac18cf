"""Small models of other kinds than GPT's usual ones, as megatron-core itself cuts them: see
``kinds_oracle.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import RankFacts
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import tensors_of
from core.files.store import MemoryStore
from core.megatron.model.pipeline import Pipeline, parse_layout
from core.megatron.model.topology import Topology, rank_dir
from core.pickle.inert import TensorLeaf, make_namespace, make_ordered_dict
from tests.support.asked import told
from tests.support.made_once import made_once

Arrays = dict[str, np.ndarray]
SCRIPT = Path(__file__).with_name("kinds_oracle.py")
_BASE = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 24,
    "gated_linear_unit": True,
}


@dataclass(frozen=True)
class Kind:
    """A model.

    Args:
        config: fields of its configuration, beside the usual ones.
        pattern: of a hybrid model.
        args: training arguments that are no fields of the configuration.
        pipelines: pipeline layouts by the number of stages.
    """

    config: Mapping[str, object] = field(default_factory=dict)
    pattern: str | None = None
    is_tied: bool = False
    args: Mapping[str, object] = field(default_factory=dict)
    pipelines: Mapping[int, str] = field(default_factory=dict)
    layouts: tuple[tuple[int, int, int], ...] = (
        (1, 1, 1),
        (2, 1, 1),
        (4, 1, 1),
        (1, 2, 1),
        (2, 2, 1),
    )

    def case(self, name: str, sizes: tuple[int, int, int]) -> dict[str, object]:
        """What the script is asked for."""
        args = {
            "vocab_size": 64,
            "is_tied": self.is_tied,
            "config": {**_BASE, **self.config, **self.pipeline(sizes[1])},
            "pattern": self.pattern,
            "multi_latent_attention": bool(self.args.get("multi_latent_attention")),
        }
        return {"name": f"{name}.{'.'.join(map(str, sizes))}", "sizes": sizes, "args": args}

    def pipeline(self, pp: int) -> dict[str, object]:
        """The argument for the pipeline layout, where there is one."""
        return (
            {"pipeline_model_parallel_layout": self.pipelines[pp]} if pp in self.pipelines else {}
        )

    def arguments(self, topology: Topology) -> dict[str, object]:
        """Its training arguments."""
        config = {**_BASE, **self.config}
        return {
            **config,
            "tensor_model_parallel_size": topology.tp,
            "pipeline_model_parallel_size": topology.pp,
            "expert_model_parallel_size": topology.ep,
            "num_experts": config.get("num_moe_experts"),
            "group_query_attention": True,
            "swiglu": True,
            "untie_embeddings_and_output_weights": not self.is_tied,
            "transformer_impl": "local",
            "vocab_size": 64,
            "make_vocab_size_divisible_by": 16,
            "padded_vocab_size": 64,
            "hybrid_override_pattern": self.pattern,
            **self.pipeline(topology.pp),
            **self.args,
        }


_USUAL, _LINEAR, _NONE = {"no_op": False}, {"replace_with_linear": True}, {"no_op": True}
_BLOCKS = [
    {"attention": {**_USUAL, "num_query_groups": 4}, "ffn": {**_USUAL, "ffn_hidden_size": 24}},
    {"attention": {**_LINEAR, "num_query_groups": None}, "ffn": {"ffn_hidden_size": 8}},
    {"attention": {**_NONE, "num_query_groups": None}, "ffn": {**_NONE, "ffn_hidden_size": None}},
    {"attention": {"num_query_groups": 2}, "ffn": {**_LINEAR, "ffn_hidden_size": None}},
]
_MAMBA = {"mamba_state_dim": 4, "mamba_head_dim": 4, "mamba_num_groups": 4}
_TE = {"transformer_impl": "transformer_engine"}
KINDS = {
    "prediction": Kind({"mtp_num_layers": 2}),
    "prediction, tied": Kind(
        {"mtp_num_layers": 1}, is_tied=True, layouts=((1, 1, 1), (2, 1, 1), (4, 1, 1))
    ),
    "prediction, experts": Kind(
        {
            "mtp_num_layers": 1,
            "num_moe_experts": 4,
            "moe_layer_freq": [0, 1, 1, 1],
            "moe_ffn_hidden_size": 8,
        },
        layouts=((1, 1, 1), (2, 1, 1), (1, 2, 2), (1, 1, 4)),
    ),
    "prediction, apart": Kind(
        {"mtp_num_layers": 1},
        pipelines={2: "Ettt|tmL", 4: "Et|tt|tm|L"},
        layouts=((1, 1, 1), (2, 2, 1), (1, 4, 1)),
    ),
    "heterogeneous": Kind(
        {"heterogeneous_layers_config_encoded_json": json.dumps({"block_configs": _BLOCKS})}
    ),
    "hybrid": Kind(_MAMBA, pattern="M*-M", args=_TE),
    "Mamba": Kind({**_MAMBA, "mamba_num_heads": 4}, pattern="MMMM", args=_TE),
    "linear attention": Kind(
        {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": 2,
            "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 2,
            "linear_value_head_dim": 4,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
        },
        args=_TE,
    ),
    "latent attention": Kind(
        {
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_head_dim": 4,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 4,
            "kv_channels": 4,
        },
        args={"multi_latent_attention": True},
    ),
}
PAIRS = [(name, a, b) for name, kind in KINDS.items() for a in kind.layouts for b in kind.layouts]


def built(
    folder: Path, names: Iterable[str] = tuple(KINDS), *, kinds: Mapping[str, Kind] = KINDS
) -> None:
    """Lets megatron-core build kinds in every layout."""
    cases = [kinds[name].case(name, sizes) for name in names for sizes in kinds[name].layouts]
    told(SCRIPT, folder, question=cases, timeout=600)


def all_built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of all kinds in every layout; to be read only."""
    return made_once("kinds", built, tmp_path_factory)


def topology_of(sizes: tuple[int, int, int], name: str | None = None) -> Topology:
    """The sizes, with the pipeline layout that a kind has at them."""
    tp, pp, ep = sizes
    layout = None if name is None else KINDS[name].pipelines.get(pp)
    return Topology(
        tp=tp,
        pp=pp,
        ep=ep,
        pipeline=None if layout is None else Pipeline(layout=parse_layout(layout)),
    )


@cache
def files(
    folder: Path, name: str, sizes: tuple[int, int, int]
) -> dict[str, dict[str, np.ndarray | None]]:
    """Rank directory → name in the file → array, or None for an empty extra state."""
    from safetensors.numpy import load_file

    case = f"{name}.{'.'.join(map(str, sizes))}"
    topology = topology_of(sizes)
    files_of_ranks = {}
    for number, rank in enumerate(json.loads((folder / f"{case}.json").read_text())):
        arrays = load_file(folder / f"{case}.{number}.safetensors")
        coords = tuple((key, rank[key]) for key in ("tp", "pp", "ep"))
        files_of_ranks[rank_dir(topology, topology.rank_at(coords))] = {
            key: arrays[key] if has_value else None for key, has_value in rank["names"]
        }
    return files_of_ranks


@cache
def dist_tensors(folder: Path, name: str, sizes: tuple[int, int, int]) -> Arrays:
    """The tensors of torch_dist."""
    from safetensors.numpy import load_file

    return load_file(folder / f"{name}.{'.'.join(map(str, sizes))}.dist.safetensors")


def catalog_of(
    args: Mapping[str, object],
    topology: Topology,
    arrays_of_ranks: Mapping[str, Mapping[str, np.ndarray | None]],
) -> tuple[MemoryStore, Catalog]:
    """The catalog of rank files, and the store that holds their bytes."""
    contents: dict[str, bytes | bytearray] = {}
    arrays: dict[str, StoredArray] = {}
    ranks = {}
    space = make_namespace(dict(args))
    for rank in topology.ranks():
        coords, folder = topology.coords(rank), rank_dir(topology, rank)
        entries: dict[object, object] = {}
        for name, array in arrays_of_ranks[folder].items():
            key = f"{folder}:model.{name}"
            entries[name] = None
            if array is not None:
                arrays[key] = _stored(key, array, contents, coords)
                entries[name] = TensorLeaf(key)
        root = {
            "args": space,
            "checkpoint_version": 3.0,
            "iteration": 7,
            "model": make_ordered_dict(entries),
        }
        ranks[coords] = (folder, root)
    catalog = replace(_catalog("megatron", arrays), args=space, iteration=7)
    return MemoryStore(contents), catalog.with_facet(RankFacts(ranks)).with_facet(topology)


def dist_catalog(args: Mapping[str, object], tensors: Arrays) -> tuple[MemoryStore, Catalog]:
    """The catalog of a torch_dist checkpoint, and the store that holds its bytes."""
    contents: dict[str, bytes | bytearray] = {}
    arrays = {key: _stored(key, array, contents, ()) for key, array in tensors.items()}
    common: dict[object, object] = {
        "args": make_namespace(dict(args)),
        "checkpoint_version": 3.0,
        "iteration": 7,
    }
    return MemoryStore(contents), replace(_catalog("torch_dist", arrays), common=common)


def _stored(
    key: str,
    array: np.ndarray,
    contents: dict[str, bytes | bytearray],
    coords: tuple[tuple[str, int], ...],
) -> StoredArray:
    file = key.replace(":", "/")
    contents[file] = array.tobytes()
    return StoredArray(key, array.dtype.name, array.shape, Extent(file, 0), coords)


def _catalog(name: str, arrays: Mapping[str, StoredArray]) -> Catalog:
    return Catalog(format=name, version=None, tensors=tensors_of(arrays))
