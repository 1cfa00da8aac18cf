"""Small models cut into rank catalogs by plain numpy, for layouts that no golden checkpoint has.

Every element has a unique value, so that a shifted or transposed piece cannot pass. The cutting shares no code with
``core.placement``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from core.box import whole
from core.catalog import Catalog, Extent, Fragment, StoredArray, TensorMeta
from core.inert import TensorLeaf, namespace, ordered_dict
from core.store import MemoryStore
from core.topology import Topology, rank_dir

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Model:
    """A dense GPT model.

    Args:
        is_fused: norms have Transformer Engine's names, and extra states are tensors.
        counts: layers per stage where they are uneven.
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
            **self.more_args,
        }

    def rows(self, tp: int) -> int:
        unit = self.divisible_by * tp
        return (self.vocab + unit - 1) // unit * unit

    def tensors(self) -> Arrays:
        """The global tensors, unpadded, in the order of a rank file."""
        h, qkv = self.hidden, (self.heads + 2 * self.groups) * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (self.vocab, h)}
        for layer in range(self.layers):
            start = f"decoder.layers.{layer}."
            if not self.is_fused:
                shapes[start + "input_layernorm.weight"] = (h,)
            shapes[start + "self_attention.linear_proj.weight"] = (h, self.heads * self.head_dim)
            shapes[start + "self_attention.linear_proj.bias"] = (h,)
            if self.is_fused:
                shapes[start + "self_attention.linear_qkv.layer_norm_weight"] = (h,)
            shapes[start + "self_attention.linear_qkv.weight"] = (qkv, h)
            shapes[start + "self_attention.linear_qkv.bias"] = (qkv,)
            if self.has_qk_norm:
                shapes[start + "self_attention.q_layernorm.weight"] = (self.head_dim,)
                shapes[start + "self_attention.k_layernorm.weight"] = (self.head_dim,)
            norm = "mlp.linear_fc1.layer_norm_weight" if self.is_fused else "pre_mlp_layernorm.weight"
            shapes[start + norm] = (h,)
            shapes[start + "mlp.linear_fc1.weight"] = (self.ffn * (1 + self.is_gated), h)
            shapes[start + "mlp.linear_fc2.weight"] = (h, self.ffn)
        shapes["decoder.final_layernorm.weight"] = (h,)
        if not self.is_tied:
            shapes["output_layer.weight"] = (self.vocab, h)
        found: Arrays = {}
        first = 1
        for name, shape in shapes.items():
            n = int(np.prod(shape))
            found[name] = np.arange(first, first + n, dtype=np.float32).reshape(shape)
            first += n
        return found

    def local(self, name: str, array: np.ndarray, *, tp_rank: int, tp: int) -> np.ndarray:
        """One rank's part of a global tensor."""
        if "embeddings" in name or name.startswith("output_layer"):
            padded = np.zeros((self.rows(tp), array.shape[1]), array.dtype)
            padded[: len(array)] = array
            return np.split(padded, tp)[tp_rank]
        if "norm" in name or name.endswith(("linear_proj.bias", "linear_fc2.bias")):
            return array
        if name.endswith("linear_fc1.weight") and self.is_gated:
            gate, up = np.split(array, 2)
            return np.concatenate([np.split(gate, tp)[tp_rank], np.split(up, tp)[tp_rank]])
        if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            return np.split(array, tp, axis=1)[tp_rank]
        return np.split(array, tp)[tp_rank]

    def stage(self, name: str, pp: int) -> tuple[int, str]:
        """(pipeline stage, name in its files) of a global tensor."""
        if not name.startswith("decoder.layers."):
            return (0 if name.startswith("embedding") else pp - 1), name
        number, sub = name.removeprefix("decoder.layers.").split(".", 1)
        counts = list(self.counts or [self.layers // pp] * pp)
        layer = int(number)
        for stage, count in enumerate(counts):
            if layer < count:
                return stage, f"decoder.layers.{layer}.{sub}"
            layer -= count
        raise AssertionError(name)

    def files(self, topology: Topology) -> dict[str, Arrays]:
        """Rank directory → name in the file → array."""
        found: dict[str, Arrays] = {}
        for rank in topology.ranks():
            held: Arrays = {}
            for name, array in self.tensors().items():
                stage, local = self.stage(name, topology.pp)
                if stage == rank.pp:
                    held[local] = self.local(name, array, tp_rank=rank.tp, tp=topology.tp)
                    if self.is_fused and local.endswith(("linear_fc1.weight", "linear_qkv.bias")):
                        held[local.rpartition(".")[0] + "._extra_state"] = np.arange(7, dtype=np.uint8)
            if self.is_tied and topology.pp > 1 and rank.pp == topology.pp - 1:
                name = "embedding.word_embeddings.weight"
                held["output_layer.weight"] = self.local(name, self.tensors()[name], tp_rank=rank.tp, tp=topology.tp)
            found[rank_dir(topology, rank)] = held
        return found

    def catalog(
        self, topology: Topology, *, files: dict[str, Arrays] | None = None, **top_level: object
    ) -> tuple[MemoryStore, Catalog]:
        """The rank catalog of the model, and the store that holds its bytes."""
        files = self.files(topology) if files is None else files
        contents: dict[str, bytes | bytearray] = {}
        arrays: dict[str, StoredArray] = {}
        ranks = {}
        args = namespace(self.args(topology))
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
                "model": ordered_dict(entries),
                **top_level,
            }
            ranks[coords] = (folder, root)

        def fragments_of(key: str) -> list[Fragment]:
            array = arrays[key]
            return [Fragment(key, whole(array.shape), array, (0,) * len(array.shape))]

        catalog = Catalog(
            format="megatron",
            version="3.0",
            tensors={key: TensorMeta(key, array.dtype, array.shape) for key, array in arrays.items()},
            fragments_of=fragments_of,
            attrs={"is_rank_local": True, "args": args, "topology": topology, "ranks": ranks, "iteration": 7},
        )
        return MemoryStore(contents), catalog
