"""Makes checkpoints of the size of real models as sparse files: true names, shapes, pickles and zip
headers, no data.

    python -m scripts.benchmarks.scale_sources MODEL DIR [--optimizer float16 | distributed]
    [--layers N] [--torch-dist]

Models: ``llama-405b`` (TP8 PP16, 128 rank files), ``deepseek-v3`` (PP16 EP64, 1024) and ``kimi-k2``
(PP16 EP16, 256), as Megatron-LM saves them with Transformer Engine's names. Arguments, random
states and settings of the optimizer are those of a checkpoint in tests/golden, with the model's
sizes. Ranks of a stage differ by their numbers in the arguments, as in real checkpoints. CRCs are
0, "not computed".

``--torch-dist`` writes the weights in one directory of torch_dist instead, by this project's own
layout.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from core.engine.catalog.file_image import FileImage, Literal
from core.engine.catalog.stored import PlannedArray, StoredArray
from core.files.store import LocalStore
from core.formats.torch.format import parse
from core.formats.torch.zip.tree_layout import TreePlan, plan_tree
from core.megatron.model.args import fields_of, parse_facts, topology_of
from core.megatron.model.pipeline import Stages
from core.megatron.model.topology import Rank, Topology, rank_dir
from core.pickle.inert import Global, Inert, TensorLeaf, as_mapping, make_ordered_dict
from core.verbs.convert.job import Job
from core.verbs.convert.prepare import prepare

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden" / "golden.tar.xz"
GOLDEN_FILE = "mcore_legacy/dense_gqa/tp2_pp1_optim/iter_0000010/mp_rank_00/model_optim_rng.pt"
MODEL_FILE, OPTIM_FILE, TRACKER = (
    "model_optim_rng.pt",
    "distrib_optim.pt",
    "latest_checkpointed_iteration.txt",
)
ITERATION = 10
OPTIMIZERS = ("none", "float16", "distributed")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """A model and how it is cut.

    Args:
        args: training arguments that differ from those of the golden checkpoint.
        dense_layers: first layers that have no experts; all of them without experts.
    """

    topology: Topology
    args: Mapping[str, object]
    dense_layers: int = 1 << 30

    def size(self, name: str) -> int:
        value = self.args[name]
        assert isinstance(value, int)
        return value


_COMMON: Mapping[str, object] = {
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": True,
    "transformer_impl": "transformer_engine",
    "make_vocab_size_divisible_by": 128,
    "overlap_grad_reduce": False,
    "qk_layernorm": False,
}


def _latent_moe(topology: Topology, *, dense_layers: int, **sizes: object) -> Model:
    """A model of DeepSeek's family: multi-latent attention, experts after some dense layers."""
    args: dict[str, object] = {
        **_COMMON,
        "num_layers": 61,
        "hidden_size": 7168,
        "ffn_hidden_size": 18432,
        "group_query_attention": False,
        "kv_channels": 128,
        "multi_latent_attention": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "moe_ffn_hidden_size": 2048,
        "moe_shared_expert_intermediate_size": 2048,
        "moe_grouped_gemm": True,
        "moe_router_enable_expert_bias": True,
        "decoder_first_pipeline_num_layers": 3,
        "decoder_last_pipeline_num_layers": 2,
        "moe_layer_freq": [int(layer >= dense_layers) for layer in range(61)],
        **sizes,
    }
    return Model(topology, args, dense_layers)


MODELS = {
    "llama-405b": Model(
        Topology(tp=8, pp=16),
        {
            **_COMMON,
            "num_layers": 126,
            "hidden_size": 16384,
            "ffn_hidden_size": 53248,
            "num_attention_heads": 128,
            "group_query_attention": True,
            "num_query_groups": 8,
            "kv_channels": 128,
            "vocab_size": 128256,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
    ),
    "deepseek-v3": _latent_moe(
        Topology(tp=1, pp=16, ep=64),
        dense_layers=3,
        num_attention_heads=128,
        num_experts=256,
        vocab_size=129280,
    ),
    "kimi-k2": _latent_moe(
        Topology(tp=1, pp=16, ep=16),
        dense_layers=1,
        num_attention_heads=64,
        num_experts=384,
        vocab_size=163840,
    ),
    "tiny": _latent_moe(
        Topology(tp=1, pp=4, ep=2),
        dense_layers=1,
        num_layers=8,
        moe_layer_freq=[0, *[1] * 7],
        decoder_first_pipeline_num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=32,
        num_attention_heads=4,
        num_experts=8,
        vocab_size=512,
    ),
}
"""``tiny`` is the scripts' own test."""


@dataclass
class Held:
    """The tensors of one chunk of a rank: name → (dtype, shape), in the order of the file."""

    tensors: dict[str, tuple[str, Shape]] = field(default_factory=dict)

    def add(self, name: str, *shape: int, dtype: str = "bfloat16") -> None:
        self.tensors[name] = (dtype, shape)

    def module(self, name: str, *shape: int, norm: int | None = None) -> None:
        """A linear module of Transformer Engine, with the norm that it may have swallowed."""
        if norm is not None:
            self.add(f"{name}.layer_norm_weight", norm)
        self.add(f"{name}.weight", *shape)
        self.add(f"{name}._extra_state", 0, dtype="uint8")

    @property
    def params(self) -> dict[str, Shape]:
        """The tensors that are trained."""
        return {
            name: shape
            for name, (_, shape) in self.tensors.items()
            if not name.endswith(("_extra_state", "expert_bias"))
        }


def held_by(model: Model, stages: Stages, pp_rank: int) -> Held:
    """What every rank of a stage holds; shards of all its ranks have equal shapes."""
    size, tp = model.size, model.topology.tp
    h = size("hidden_size")
    rows = -(-size("vocab_size") // (128 * tp)) * 128
    held = Held()
    if pp_rank == 0:
        held.add("embedding.word_embeddings.weight", rows, h)
    first = stages.offset("decoder.layers.", 0, pp_rank)
    for number in range(stages.count("decoder.layers.", 0, pp_rank)):
        start = f"decoder.layers.{number}."
        if model.args.get("multi_latent_attention"):
            _latent_attention(held, start, model)
        else:
            heads = size("num_attention_heads") + 2 * size("num_query_groups")
            width = size("kv_channels")
            held.module(
                f"{start}self_attention.linear_proj", h, size("num_attention_heads") * width // tp
            )
            held.module(f"{start}self_attention.linear_qkv", heads * width // tp, h, norm=h)
            held.add(f"{start}self_attention.core_attention._extra_state", 0, dtype="uint8")
        if first + number < model.dense_layers:
            ffn = size("ffn_hidden_size")
            held.module(f"{start}mlp.linear_fc1", 2 * ffn // tp, h, norm=h)
            held.module(f"{start}mlp.linear_fc2", h, ffn // tp)
        else:
            _experts(held, start, model)
    if pp_rank == model.topology.pp - 1:
        held.add("decoder.final_layernorm.weight", h)
        held.module("output_layer", rows, h)
    return held


def _latent_attention(held: Held, start: str, model: Model) -> None:
    size = model.size
    h, heads, q_rank, kv_rank = (
        size(n) for n in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    queries = size("qk_head_dim") + size("qk_pos_emb_head_dim")
    at = f"{start}self_attention."
    held.add(f"{start}input_layernorm.weight", h)
    held.module(f"{at}linear_proj", h, heads * size("v_head_dim"))
    held.add(f"{at}core_attention._extra_state", 0, dtype="uint8")
    held.module(f"{at}linear_q_down_proj", q_rank, h)
    held.module(f"{at}linear_q_up_proj", heads * queries, q_rank, norm=q_rank)
    held.module(f"{at}linear_kv_down_proj", kv_rank + size("qk_pos_emb_head_dim"), h)
    held.module(
        f"{at}linear_kv_up_proj",
        heads * (size("qk_head_dim") + size("v_head_dim")),
        kv_rank,
        norm=kv_rank,
    )


def _experts(held: Held, start: str, model: Model) -> None:
    size = model.size
    h, ffn, shared = (
        size(n)
        for n in ("hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    )
    n_local = size("num_experts") // model.topology.ep
    held.add(f"{start}pre_mlp_layernorm.weight", h)
    held.add(f"{start}mlp.router.weight", size("num_experts"), h)
    held.add(f"{start}mlp.router.expert_bias", size("num_experts"), dtype="float32")
    for linear, shape in (("linear_fc1", (2 * ffn, h)), ("linear_fc2", (h, ffn))):
        for expert in range(n_local):
            held.add(f"{start}mlp.experts.{linear}.weight{expert}", *shape)
        held.add(f"{start}mlp.experts.{linear}._extra_state", 0, dtype="uint8")
    held.module(f"{start}mlp.shared_experts.linear_fc1", 2 * shared, h)
    held.module(f"{start}mlp.shared_experts.linear_fc2", h, shared)


class Tree:
    """The content of one rank's file, and its arrays."""

    def __init__(self) -> None:
        self.arrays: dict[str, PlannedArray] = {}

    def leaf(self, dtype: str, *shape: int) -> TensorLeaf:
        name = str(len(self.arrays))
        self.arrays[name] = PlannedArray(name, dtype, shape)
        return TensorLeaf(name)

    def plan(self, root: object, file: str) -> TreePlan:
        return plan_tree(root, self.arrays.__getitem__, prefix=Path(file).stem)


@dataclass(frozen=True)
class Golden:
    """What is taken from the golden checkpoint: its entries, whose tensors keep their shapes."""

    root: Mapping[object, object]
    arrays: Mapping[str, StoredArray]

    def copied(self, tree: Tree, value: object) -> object:
        """An entry with its tensors in another tree."""
        if isinstance(value, TensorLeaf):
            array = self.arrays[value.key]
            return tree.leaf(array.dtype, *array.shape)
        if isinstance(value, dict):
            return {key: self.copied(tree, item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.copied(tree, item) for item in value]
        return value


def golden() -> Golden:
    """The file out of the archive of the tests."""
    with tarfile.open(GOLDEN) as archive, tempfile.TemporaryDirectory() as scratch:
        found = next(member for member in archive if member.name.removeprefix("./") == GOLDEN_FILE)
        source = archive.extractfile(found)
        assert source is not None
        (Path(scratch) / MODEL_FILE).write_bytes(source.read())
        store = LocalStore(Path(scratch))
        tree = parse(store, MODEL_FILE)
        store.close()
    return Golden(as_mapping(tree.value) or {}, tree.arrays)


def args_of(model: Model, found: Golden) -> Inert:
    """The training arguments of the first rank."""
    topology = model.topology
    args = found.root["args"]
    assert isinstance(args, Inert)
    rows = -(-model.size("vocab_size") // (128 * topology.tp)) * 128 * topology.tp
    fields = {
        **fields_of(args),
        "num_experts": None,
        "multi_latent_attention": False,
        **model.args,
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.tp,
        "world_size": topology.tp * topology.pp * topology.ep,
        "data_parallel_size": topology.ep,
        "padded_vocab_size": rows,
        "rank": 0,
        "local_rank": 0,
    }
    copy = Inert(args.how, args.fn, args.args, kwargs=args.kwargs, state=fields)
    copy.items, copy.entries = list(args.items), list(args.entries)
    return copy


def groups_of(model: Model, held: Held) -> list[list[tuple[bool, bool, dict[str, Shape]]]]:
    """For each of the chained optimizers its groups: (is decayed, is expert, parameters)."""
    dense: dict[bool, dict[str, Shape]] = {True: {}, False: {}}
    experts: dict[str, Shape] = {}
    for name, shape in held.params.items():
        if ".experts." in name and model.topology.ep > 1:
            experts[name] = shape
        else:
            dense[len(shape) > 1][name] = shape
    chained = [[(decayed, False, params) for decayed, params in dense.items() if params]]
    return [*chained, [(True, True, experts)]] if experts else chained


def optimizer_of(tree: Tree, model: Model, held: Held, found: Golden, *, kind: str) -> object:
    """The entry ``optimizer`` of a rank file."""
    entry = found.root["optimizer"]
    settings = entry["optimizer"]["param_groups"]  # type: ignore[index]
    made = []
    for groups in groups_of(model, held):
        param_groups, masters = [], []
        state: dict[object, object] = {}
        number = 0
        for is_decayed, is_expert, params in groups:
            group = dict(settings[0 if is_decayed else 1])
            group["is_expert_parallel"] = is_expert
            group["params"] = list(range(number, number + len(params)))
            if kind == "distributed":
                del group["params"]
            param_groups.append(group)
            for shape in params.values() if kind == "float16" else ():
                state[number] = {
                    name: tree.leaf("float32", *shape) for name in ("exp_avg", "exp_avg_sq")
                }
                number += 1
            masters.append(
                [tree.leaf("float32", *shape) for shape in params.values()]
                if kind == "float16"
                else []
            )
        if kind == "distributed":
            made.append({"optimizer": {"param_groups": param_groups}})
        else:
            inner = {"state": state, "param_groups": param_groups}
            made.append({"optimizer": inner, "fp32_from_fp16_params": masters})
    return made if len(made) > 1 else made[0]


def buffers_of(tree: Tree, model: Model, held: Held, *, ep_rank: int) -> object:
    """The content of distrib_optim.pt: one bucket a buffer, parameters from last to first, each at
    a multiple of 64.
    """
    made: list[object] = []
    for groups in groups_of(model, held):
        if ep_rank and not groups[0][1]:
            made.append(None)  # dense parameters: saved by the first of the data parallel ranks
            continue
        names = {name: shape for _, _, params in groups for name, shape in params.items()}
        n = 0
        for name in reversed(list(held.params)):
            if name in names:
                n = -(-n // 64) * 64 + prod(names[name])
        states: dict[object, object] = {
            state: tree.leaf("float32", n) for state in ("param", "exp_avg", "exp_avg_sq")
        }
        dtypes = (Global("torch", "bfloat16"), Global("torch", "float32"))
        made.append({"buckets_coalesced": True, 0: {dtypes: {**states, "numel_unpadded": n}}})
    return made if len(made) > 1 else made[0]


def write_sparse(path: Path, size: int, literals: Iterable[Literal]) -> None:
    """A file of holes but for its literals."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.ftruncate(fd, size)
        for offset, data in literals:
            os.pwrite(fd, data, offset)
    finally:
        os.close(fd)


def _no_crc(name: str) -> int:
    return 0


class Stage:
    """The files of one pipeline stage; they differ by a few numbers in the arguments."""

    def __init__(self, model: Model, found: Golden, args: Inert, held: Held, kind: str) -> None:
        self._model, self._found, self._args, self._held, self._kind = (
            model,
            found,
            args,
            held,
            kind,
        )
        self._patterns: dict[int, tuple[TreePlan, list[int]]] = {}
        self._buffers: dict[bool, TreePlan] = {}

    def write(self, folder: Path, number: int, rank: Rank) -> None:
        """The files of one rank."""
        plan = self._plan(number)
        write_sparse(folder / MODEL_FILE, plan.size, plan.literals(_no_crc))
        if self._kind == "distributed":
            is_first = rank.ep == 0
            if is_first not in self._buffers:
                tree = Tree()
                content = buffers_of(tree, self._model, self._held, ep_rank=rank.ep)
                self._buffers[is_first] = tree.plan(content, OPTIM_FILE)
            plan = self._buffers[is_first]
            write_sparse(folder / OPTIM_FILE, plan.size, plan.literals(_no_crc))

    def _plan(self, number: int) -> TreePlan:
        """The plan of a rank's file: that of another one whose number takes as many bytes, with the
        numbers changed.
        """
        width, base, other = (1, 200, 209) if number < 256 else (2, 512, 521)
        if width not in self._patterns:
            plan = self._planned(base)
            one, two = plan.pickle, self._planned(other).pickle
            differing = [place for place, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
            names = list(fields_of(self._args))
            assert len(differing) == 2 and names.index("local_rank") < names.index("rank")
            self._patterns[width] = plan, differing
        plan, (local_at, rank_at) = self._patterns[width]
        pickle = bytearray(plan.pickle)
        pickle[local_at] = number % 8
        pickle[rank_at : rank_at + width] = number.to_bytes(width, "little")
        return replace(plan, pickle=bytes(pickle))

    def _planned(self, number: int) -> TreePlan:
        tree = Tree()
        args = Inert(
            self._args.how, self._args.fn, self._args.args, state={**fields_of(self._args)}
        )
        fields_of(args).update(rank=number, local_rank=number % 8)
        entries = {
            name: tree.leaf(dtype, *shape) for name, (dtype, shape) in self._held.tensors.items()
        }
        root: dict[object, object] = {}
        for name, value in self._found.root.items():
            if name == "args":
                root[name] = args
            elif name == "model":
                root[name] = make_ordered_dict(dict(entries))
            elif name != "optimizer":
                root[name] = self._found.copied(tree, value)
            elif self._kind != "none":
                root[name] = optimizer_of(
                    tree, self._model, self._held, self._found, kind=self._kind
                )
        return tree.plan(root, MODEL_FILE)


def make(model: Model, root: Path, *, optimizer: str = "none") -> None:
    """The rank files of a training root."""
    found = golden()
    args = args_of(model, found)
    facts = parse_facts(args)
    topology = topology_of(args)
    stages = facts.stages(topology.pp)
    iteration_dir = root / f"iter_{ITERATION:07d}"
    iteration_dir.mkdir(parents=True)
    of_stage = [
        Stage(model, found, args, held_by(model, stages, pp_rank), optimizer)
        for pp_rank in range(topology.pp)
    ]
    for number, rank in enumerate(topology.ranks()):
        folder = iteration_dir / rank_dir(topology, rank)
        folder.mkdir()
        of_stage[rank.pp].write(folder, number, rank)
    (root / TRACKER).write_text(str(ITERATION))


def make_torch_dist(ranks: Path, root: Path) -> None:
    """The same weights as torch_dist, by this project's own layout."""
    with prepare(
        Job(src=ranks, dst=root, to="torch_dist", optim="drop", memory_bytes=1 << 40)
    ) as prepared:
        write_images(root, prepared.images)


def write_images(root: Path, images: Sequence[FileImage]) -> None:
    """Every image without its arrays."""
    for image in images:
        path = root / image.path
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sparse(path, image.size, _placed(image))


def _placed(image: FileImage) -> Iterator[Literal]:
    yield from image.literals(_no_crc)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="none")
    parser.add_argument("--torch-dist", action="store_true")
    options = parser.parse_args()
    if not options.torch_dist:
        make(MODELS[options.model], options.dir, optimizer=options.optimizer)
        return 0
    with tempfile.TemporaryDirectory(dir=options.dir.parent) as scratch:
        make(MODELS[options.model], Path(scratch))
        make_torch_dist(Path(scratch), options.dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
