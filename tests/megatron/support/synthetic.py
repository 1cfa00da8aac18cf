"""Small models cut into rank catalogs by plain numpy, for layouts and models that no golden
checkpoint has.

Every element has a unique value, so that a shifted or transposed piece cannot pass. The cutting
shares no code with ``core.arrays.sharding``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import RankFacts
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import tensors_of
from core.files.store import MemoryStore
from core.megatron.model.topology import Rank, Topology, rank_dir
from core.pickle.inert import TensorLeaf, make_namespace, make_ordered_dict

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-latent attention; ``q`` is None where queries are not compressed.

    Args:
        is_cut: the down projections are cut over TP, as older local implementations did.
        is_joined: there is one down projection, of queries and of keys and values.
    """

    q: int | None = 12
    kv: int = 8
    qk: int = 3
    rope: int = 4
    v: int = 5
    is_cut: bool = False
    is_joined: bool = False


@dataclass(frozen=True)
class Model:
    """A GPT model.

    Args:
        is_fused: norms have Transformer Engine's names, and extra states are tensors.
        counts: layers per stage where they are uneven.
        experts: routed experts of the layers in ``moe``, named as ``expert_names`` says.
        shared: width of the shared experts of those layers, 0 without.
        latent: multi-latent attention instead of the usual one.
    """

    layers: int = 4
    hidden: int = 12
    heads: int = 12
    groups: int = 12
    head_dim: int = 2
    ffn: int = 24
    vocab: int = 40
    divisible_by: int = 4
    is_gated: bool = True
    is_tied: bool = False
    is_fused: bool = False
    has_qk_norm: bool = True
    counts: tuple[int, ...] | None = None
    experts: int = 0
    moe: tuple[int, ...] = ()
    expert_names: str = "sequential"
    expert_ffn: int = 12
    shared: int = 0
    latent: Latent | None = None
    more_args: Mapping[str, object] = field(default_factory=dict)

    def args(self, topology: Topology) -> dict[str, object]:
        return {
            "tensor_model_parallel_size": topology.tp,
            "pipeline_model_parallel_size": topology.pp,
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "group_query_attention": self.groups != self.heads,
            "num_query_groups": self.groups,
            "kv_channels": self.head_dim,
            "swiglu": self.is_gated,
            "untie_embeddings_and_output_weights": not self.is_tied,
            "transformer_impl": "transformer_engine" if self.is_fused else "local",
            "vocab_size": self.vocab,
            "make_vocab_size_divisible_by": self.divisible_by,
            "padded_vocab_size": self.rows(topology.tp),
            **(self.moe_args(topology) if self.experts else {}),
            **(self.latent_args(self.latent) if self.latent else {}),
            **self.more_args,
        }

    def moe_args(self, topology: Topology) -> dict[str, object]:
        return {
            "num_experts": self.experts,
            "moe_layer_freq": [int(layer in self.moe) for layer in range(self.layers)],
            "moe_grouped_gemm": self.expert_names != "sequential",
            "expert_model_parallel_size": topology.ep,
            "expert_tensor_parallel_size": topology.etp,
        }

    def latent_args(self, latent: Latent) -> dict[str, object]:
        return {
            "multi_latent_attention": True,
            "q_lora_rank": latent.q,
            "kv_lora_rank": latent.kv,
            "qk_head_dim": latent.qk,
            "qk_pos_emb_head_dim": latent.rope,
            "v_head_dim": latent.v,
        }

    def rows(self, tp: int) -> int:
        unit = self.divisible_by * tp
        return (self.vocab + unit - 1) // unit * unit

    def tensors(self) -> Arrays:
        """The global tensors, unpadded, in the order of a rank file."""
        h = self.hidden
        shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (self.vocab, h)}
        for layer in range(self.layers):
            start = f"decoder.layers.{layer}."
            if not self.is_fused or self.latent:
                shapes[start + "input_layernorm.weight"] = (h,)
            attention = (
                self.attention(h) if self.latent is None else self.latent_attention(h, self.latent)
            )
            shapes |= {f"{start}self_attention.{name}": shape for name, shape in attention.items()}
            is_moe = layer in self.moe
            norm = (
                "mlp.linear_fc1.layer_norm_weight"
                if self.is_fused and not is_moe
                else "pre_mlp_layernorm.weight"
            )
            shapes[start + norm] = (h,)
            shapes |= {
                f"{start}mlp.{name}": shape
                for name, shape in (self.moe_mlp(h) if is_moe else self.mlp(h)).items()
            }
        shapes["decoder.final_layernorm.weight"] = (h,)
        if not self.is_tied:
            shapes["output_layer.weight"] = (self.vocab, h)
        arrays: Arrays = {}
        first = 1
        for name, shape in shapes.items():
            n = int(np.prod(shape))
            arrays[name] = np.arange(first, first + n, dtype=np.float32).reshape(shape)
            first += n
        return arrays

    def attention(self, h: int) -> dict[str, tuple[int, ...]]:
        qkv = (self.heads + 2 * self.groups) * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "linear_proj.weight": (h, self.heads * self.head_dim),
            "linear_proj.bias": (h,),
        }
        if self.is_fused:
            shapes["linear_qkv.layer_norm_weight"] = (h,)
        shapes |= {"linear_qkv.weight": (qkv, h), "linear_qkv.bias": (qkv,)}
        if self.has_qk_norm:
            shapes |= {
                "q_layernorm.weight": (self.head_dim,),
                "k_layernorm.weight": (self.head_dim,),
            }
        return shapes

    def latent_attention(self, h: int, latent: Latent) -> dict[str, tuple[int, ...]]:
        queries = self.heads * (latent.qk + latent.rope)
        shapes: dict[str, tuple[int, ...]] = {"linear_proj.weight": (h, self.heads * latent.v)}
        if latent.q is None:
            shapes["linear_q_proj.weight"] = (queries, h)
        else:
            name = (
                "linear_qkv_down_proj.weight" if latent.is_joined else "linear_q_down_proj.weight"
            )
            shapes[name] = (latent.q + (latent.kv + latent.rope) * latent.is_joined, h)
            if self.is_fused:
                shapes["linear_q_up_proj.layer_norm_weight"] = (latent.q,)
            shapes["linear_q_up_proj.weight"] = (queries, latent.q)
        if not latent.is_joined:
            shapes["linear_kv_down_proj.weight"] = (latent.kv + latent.rope, h)
        if self.is_fused:
            shapes["linear_kv_up_proj.layer_norm_weight"] = (latent.kv,)
        shapes["linear_kv_up_proj.weight"] = (self.heads * (latent.qk + latent.v), latent.kv)
        if not self.is_fused:
            shapes |= {} if latent.q is None else {"q_layernorm.weight": (latent.q,)}
            shapes["kv_layernorm.weight"] = (latent.kv,)
        return shapes

    def mlp(self, h: int, width: int | None = None) -> dict[str, tuple[int, ...]]:
        width = self.ffn if width is None else width
        return {
            "linear_fc1.weight": (width * (1 + self.is_gated), h),
            "linear_fc2.weight": (h, width),
        }

    def moe_mlp(self, h: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "router.weight": (self.experts, h),
            "router.expert_bias": (self.experts,),
        }
        for expert in range(self.experts):
            expert_mlp = self.mlp(h, self.expert_ffn)
            shapes |= {
                f"experts.local_experts.{expert}.{name}": shape
                for name, shape in expert_mlp.items()
            }
        if self.shared:
            shapes["shared_experts.gate_weight"] = (1, h)
            shapes |= {
                f"shared_experts.{name}": shape for name, shape in self.mlp(h, self.shared).items()
            }
        return shapes

    def local(self, name: str, array: np.ndarray, *, tp_rank: int, tp: int) -> np.ndarray:
        """One rank's part of a global tensor; for those of experts, among the ranks that cut
        experts.
        """
        if "embeddings" in name or name.startswith("output_layer"):
            padded = np.zeros((self.rows(tp), array.shape[1]), array.dtype)
            padded[: len(array)] = array
            return np.split(padded, tp)[tp_rank]
        if "norm" in name or name.endswith(("linear_proj.bias", "linear_fc2.bias")):
            return array
        if (
            "router." in name
            or "gate_weight" in name
            or ("down_proj" in name and not (self.latent or Latent()).is_cut)
        ):
            return array
        if name.endswith("linear_qkv_down_proj.weight") and self.latent and self.latent.q:
            queries, rest = np.split(array, [self.latent.q])
            return np.concatenate([np.split(queries, tp)[tp_rank], np.split(rest, tp)[tp_rank]])
        if name.endswith("linear_fc1.weight") and self.is_gated:
            gate, up = np.split(array, 2)
            return np.concatenate([np.split(gate, tp)[tp_rank], np.split(up, tp)[tp_rank]])
        if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            return np.split(array, tp, axis=1)[tp_rank]
        return np.split(array, tp)[tp_rank]

    def stage(self, name: str, pp: int, vpp: int = 1) -> tuple[int, int, str]:
        """(model chunk, pipeline stage, name in its files) of a global tensor."""
        if not name.startswith("decoder.layers."):
            return (0, 0, name) if name.startswith("embedding") else (vpp - 1, pp - 1, name)
        number, sub = name.removeprefix("decoder.layers.").split(".", 1)
        counts = list(self.counts or [self.layers // (pp * vpp)] * pp * vpp)
        layer = int(number)
        for place, count in enumerate(counts):
            if layer < count:
                return place // pp, place % pp, f"decoder.layers.{layer}.{sub}"
            layer -= count
        raise AssertionError(name)

    def held(self, rank: Rank, topology: Topology) -> dict[str, Arrays]:
        """Model chunk → name in the file of a rank → array, in the order of the file."""
        n_local = max(1, self.experts // topology.ep)
        arrays_by_chunk: dict[str, Arrays] = {
            "model" if topology.vpp == 1 else f"model{v}": {} for v in range(topology.vpp)
        }
        chunks = list(arrays_by_chunk.values())
        grouped: dict[str, Arrays] = {}
        into = chunks[0]
        for name, array in self.tensors().items():
            chunk, stage, local = self.stage(name, topology.pp, topology.vpp)
            if stage != rank.pp:
                continue
            if ".local_experts." not in name:
                into |= grouped.pop("linear_fc1", {}) | grouped.pop("linear_fc2", {})
                chunks[chunk][local] = self.local(name, array, tp_rank=rank.tp, tp=topology.tp)
                if self.is_fused and local.endswith(("mlp.linear_fc1.weight", "linear_qkv.bias")):
                    chunks[chunk][local.rpartition(".")[0] + "._extra_state"] = np.arange(
                        7, dtype=np.uint8
                    )
                continue
            before, _, rest = local.partition("local_experts.")
            expert, linear, field = rest.split(".")
            if int(expert) // n_local != rank.ep:
                continue
            part = self.local(name, array, tp_rank=rank.etp, tp=topology.expert_tp)
            number = int(expert) % n_local
            if self.expert_names == "sequential":
                chunks[chunk][f"{before}local_experts.{number}.{linear}.{field}"] = part
            else:
                into = chunks[chunk]
                grouped.setdefault(linear, {})[f"{before}{linear}.{field}{number}"] = part
        if self.is_tied and topology.pp > 1 and rank.pp == topology.pp - 1:
            name = "embedding.word_embeddings.weight"
            chunks[-1]["output_layer.weight"] = self.local(
                name, self.tensors()[name], tp_rank=rank.tp, tp=topology.tp
            )
        return arrays_by_chunk

    def files(self, topology: Topology) -> dict[str, Arrays]:
        """Rank directory → name in the file (without ``model.``) → array."""
        assert topology.vpp == 1
        return {
            rank_dir(topology, rank): self.held(rank, topology)["model"]
            for rank in topology.ranks()
        }

    def catalog(
        self, topology: Topology, *, files: dict[str, Arrays] | None = None, **top_level: object
    ) -> tuple[MemoryStore, Catalog]:
        """The rank catalog of the model, and the store that holds its bytes."""
        files = self.files(topology) if files is None else files
        contents: dict[str, bytes | bytearray] = {}
        arrays: dict[str, StoredArray] = {}
        ranks = {}
        args = make_namespace(self.args(topology))
        for rank in topology.ranks():
            coords = topology.coords(rank)
            folder = rank_dir(topology, rank)
            entries: dict[object, object] = {}
            for name, array in files[folder].items():
                key = f"{folder}:model.{name}"
                contents[key.replace(":", "/")] = array.tobytes()
                extent = Extent(key.replace(":", "/"), 0)
                arrays[key] = StoredArray(key, array.dtype.name, array.shape, extent, coords)
                entries[name] = TensorLeaf(key)
            root = {
                "args": args,
                "checkpoint_version": 3.0,
                "iteration": 7,
                "model": make_ordered_dict(entries),
                **top_level,
            }
            ranks[coords] = (folder, root)

        catalog = Catalog(
            format="megatron",
            version="3.0",
            tensors=tensors_of(arrays),
            iteration=7,
            args=args,
            facets={RankFacts: RankFacts(ranks), Topology: topology},
        )
        return MemoryStore(contents), catalog
