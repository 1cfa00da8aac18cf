"""Kinds of parameters that megatron-core 0.16.1 does not build on a CPU: Mamba-1, adapters, experts
in one parameter.

The reference is a table of which axis is cut in which parts, and numpy; patterns of hybrid models
and what is refused are here, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    UnknownTensorError,
    UnsupportedError,
    UsageError,
)
from core.megatron.model.args import fields_of, parse_facts
from core.megatron.model.topology import Topology, rank_dir
from core.megatron.model.version import parse_version
from core.megatron.reshard.to_ranks import shard
from core.megatron.reshard.to_torch_dist import to_torch_dist
from core.megatron.reshard.unshard import unshard
from core.megatron.rules.rules import Rules
from core.megatron.rules.tables import load_rules
from core.pickle.inert import as_mapping
from tests.megatron.support.kinds import catalog_of
from tests.megatron.support.megatron_gold import RULES, filled
from tests.support.facets import ranks_of
from tests.support.materialize import tensor_bytes

REPLICATED = (None, ())
Shape = tuple[int, ...]
Place = tuple[int | None, tuple[int, ...]]
"""The axis that is cut, and its parts; () for one."""


@dataclass(frozen=True)
class Made:
    """A model of a table: global name → (shape, place)."""

    tensors: Mapping[str, tuple[Shape, Place]]
    layers: int = 2
    args: Mapping[str, object] = field(default_factory=dict)
    counts: tuple[int, ...] | None = None

    def arrays(self) -> dict[str, np.ndarray]:
        starts = accumulate((int(np.prod(shape)) for shape, _ in self.tensors.values()), initial=1)
        return {
            name: np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)
            for (name, (shape, _)), start in zip(self.tensors.items(), starts, strict=False)
        }

    def files(self, topology: Topology) -> dict[str, dict[str, np.ndarray | None]]:
        arrays = self.arrays()
        counts = self.counts or (self.layers // topology.pp,) * topology.pp
        firsts = [0, *accumulate(counts)]
        files: dict[str, dict[str, np.ndarray | None]] = {}
        for rank in topology.ranks():
            arrays_of_rank = files[rank_dir(topology, rank)] = {}
            for name, (_, place) in self.tensors.items():
                local = name
                if name.startswith("decoder.layers."):
                    number, sub = name.removeprefix("decoder.layers.").split(".", 1)
                    if not firsts[rank.pp] <= int(number) < firsts[rank.pp + 1]:
                        continue
                    local = f"decoder.layers.{int(number) - firsts[rank.pp]}.{sub}"
                elif rank.pp != (0 if name.startswith("embedding") else topology.pp - 1):
                    if not self.has_predictions or rank.pp != topology.pp - 1:
                        continue  # multi-token prediction has a copy of the embedding
                arrays_of_rank[local] = cut(arrays[name], place, rank.tp, topology.tp)
        return files

    @property
    def has_predictions(self) -> bool:
        return any(name.startswith("mtp.") for name in self.tensors)

    def arguments(self, topology: Topology) -> dict[str, object]:
        return {
            "tensor_model_parallel_size": topology.tp,
            "pipeline_model_parallel_size": topology.pp,
            "num_layers": self.layers,
            "hidden_size": 8,
            "num_attention_heads": 8,
            "kv_channels": 2,
            "swiglu": True,
            "untie_embeddings_and_output_weights": True,
            "transformer_impl": "transformer_engine",
            "vocab_size": 16,
            "padded_vocab_size": 16,
            "make_vocab_size_divisible_by": 1,
            **self.args,
        }

    def check(self, a: Topology, b: Topology, *, rules: Rules = RULES) -> None:
        """Every layout's files are those of the table, from every other's."""
        store, catalog = catalog_of(self.arguments(a), a, self.files(a))
        source = unshard(catalog, rules=rules)
        for name, array in self.arrays().items():
            assert tensor_bytes(source, store, name).tobytes() == array.tobytes(), name
        target = shard(source, b, rules=rules)
        filled_arrays = filled(target, source, store)  # type: ignore[arg-type]
        wanted = replace(self, counts=None).files(b)
        assert set(filled_arrays) == {
            f"{folder}:model.{name}" for folder, contents in wanted.items() for name in contents
        }
        ranks = ranks_of(target)
        for rank in b.ranks():
            folder = rank_dir(b, rank)
            assert list(as_mapping(ranks[b.coords(rank)][1]["model"]) or {}) == list(wanted[folder])
            for name, array in wanted[folder].items():
                assert array is not None
                assert filled_arrays[f"{folder}:model.{name}"].tobytes() == array.tobytes(), (
                    folder,
                    name,
                )


def cut(array: np.ndarray, place: Place, tp_rank: int, tp: int) -> np.ndarray:
    """One rank's share."""
    axis, parts = place
    if axis is None:
        return array
    pieces = np.split(array, list(accumulate(parts))[:-1], axis=axis) if parts else [array]
    return np.concatenate([np.split(piece, tp, axis=axis)[tp_rank] for piece in pieces], axis=axis)


def model(
    layers: list[dict[str, tuple[Shape, Place]]], *, norm: str = "final_layernorm", **args: object
) -> Made:
    """Embedding, layers, last norm and output layer."""
    tensors: dict[str, tuple[Shape, Place]] = {
        "embedding.word_embeddings.weight": ((16, 8), (0, ()))
    }
    for number, layer in enumerate(layers):
        tensors |= {f"decoder.layers.{number}.{name}": entry for name, entry in layer.items()}
    tensors[f"decoder.{norm}.weight"] = ((8,), REPLICATED)
    tensors["output_layer.weight"] = ((16, 8), (0, ()))
    return Made(tensors, len(layers), args)


MAMBA_1: dict[str, tuple[Shape, Place]] = {
    "mixer.A_log": ((16, 4), (0, ())),
    "mixer.D": ((16,), (0, ())),
    "mixer.in_proj.layer_norm_weight": ((8,), REPLICATED),
    "mixer.in_proj.weight": ((32, 8), (0, (16, 16))),
    "mixer.conv1d.weight": ((16, 1, 4), (0, ())),
    "mixer.conv1d.bias": ((16,), (0, ())),
    "mixer.x_proj.weight": ((11, 16), (1, ())),
    "mixer.dt_proj.weight": ((16, 3), (0, ())),
    "mixer.dt_proj.bias": ((16,), (0, ())),
    "mixer.out_proj.weight": ((8, 16), (1, ())),
}
MAMBA_2: dict[str, tuple[Shape, Place]] = {
    "mixer.dt_bias": ((4,), (0, ())),
    "mixer.A_log": ((4,), (0, ())),
    "mixer.D": ((4,), (0, ())),
    "mixer.in_proj.layer_norm_weight": ((8,), REPLICATED),
    "mixer.in_proj.weight": ((52, 8), (0, (16, 16, 8, 8, 4))),
    "mixer.conv1d.weight": ((32, 1, 4), (0, (16, 8, 8))),
    "mixer.conv1d.bias": ((32,), (0, (16, 8, 8))),
    "mixer.norm.weight": ((16,), (0, ())),
    "mixer.out_proj.weight": ((8, 16), (1, ())),
}
MLP: dict[str, tuple[Shape, Place]] = {
    "mlp.linear_fc1.layer_norm_weight": ((8,), REPLICATED),
    "mlp.linear_fc1.weight": ((24, 8), (0, (12, 12))),
    "mlp.linear_fc2.weight": ((8, 12), (1, ())),
}
ATTENTION: dict[str, tuple[Shape, Place]] = {
    "self_attention.linear_proj.weight": ((8, 16), (1, ())),
    "self_attention.linear_qkv.layer_norm_weight": ((8,), REPLICATED),
    "self_attention.linear_qkv.weight": ((48, 8), (0, ())),
}
SIZES = {"mamba_num_groups": 2, "mamba_state_dim": 4, "mamba_head_dim": 4}
ADAPTERS: dict[str, tuple[Shape, Place]] = {
    "self_attention.linear_proj.adapter.linear_in.weight": ((4, 16), (1, ())),
    "self_attention.linear_proj.adapter.linear_out.weight": ((8, 4), (0, ())),
    "self_attention.linear_qkv.adapter.linear_in.weight": ((4, 8), (0, ())),
    "self_attention.linear_qkv.adapter.linear_out.weight": ((48, 4), (0, ())),
    "mlp.linear_fc1.adapter.linear_in.weight": ((4, 8), (0, ())),
    "mlp.linear_fc1.adapter.linear_out.weight": ((24, 4), (0, (12, 12))),
    "mlp.linear_fc2.adapter.linear_in.weight": ((4, 12), (1, ())),
    "mlp.linear_fc2.adapter.linear_out.weight": ((8, 4), (0, ())),
}
MAMBA_ADAPTERS: dict[str, tuple[Shape, Place]] = {
    "mixer.in_proj.adapter.linear_in.weight": ((4, 8), (0, ())),
    "mixer.in_proj.adapter.linear_out.weight": ((52, 4), (0, (16, 16, 8, 8, 4))),
    "mixer.out_proj.adapter.linear_in.weight": ((4, 16), (1, ())),
    "mixer.out_proj.adapter.linear_out.weight": ((8, 4), (0, ())),
}


def among(
    base: dict[str, tuple[Shape, Place]], adapters: dict[str, tuple[Shape, Place]]
) -> dict[str, tuple[Shape, Place]]:
    """A layer in which every module's adapter stands behind it."""
    placed: dict[str, tuple[Shape, Place]] = {}
    for name, place in base.items():
        placed[name] = place
        module = name.rpartition(".")[0]
        if name.endswith(".weight"):
            placed |= {
                other: at
                for other, at in adapters.items()
                if other.startswith(f"{module}.adapter.")
            }
    return placed


BLOCK = ATTENTION | MLP


def with_prediction(kind: Made, layers: dict[str, tuple[Shape, Place]], **args: object) -> Made:
    """A model with one multi-token prediction, whose own layers are in a layer called
    ``mtp_model_layer``.
    """
    own: dict[str, tuple[Shape, Place]] = {
        "enorm.weight": ((8,), REPLICATED),
        "hnorm.weight": ((8,), REPLICATED),
        "eh_proj.weight": ((8, 16), (0, ())),
        **{f"mtp_model_layer.{name}": place for name, place in layers.items()},
        "final_layernorm.weight": ((8,), REPLICATED),
    }
    tensors = dict(kind.tensors)
    output = tensors.pop("output_layer.weight")
    tensors |= {f"mtp.layers.0.{name}": place for name, place in own.items()}
    more = {"mtp_num_layers": 1, "mtp_hybrid_override_pattern": None, **args}
    return replace(
        kind, tensors={**tensors, "output_layer.weight": output}, args={**kind.args, **more}
    )


LINEAR: dict[str, tuple[Shape, Place]] = {
    "self_attention.dt_bias": ((4,), (0, ())),
    "self_attention.A_log": ((4,), (0, ())),
    "self_attention.in_proj.layer_norm_weight": ((8,), REPLICATED),
    "self_attention.in_proj.weight": ((48, 8), (0, (4, 4, 16, 16, 4, 4))),
    "self_attention.conv1d.weight": ((24, 1, 4), (0, (4, 4, 16))),
    "self_attention.out_norm.weight": ((4,), REPLICATED),
    "self_attention.out_proj.weight": ((8, 16), (1, ())),
}
GATED = ATTENTION | {"self_attention.linear_qkv.weight": ((64, 8), (0, ()))}
MODELS = {
    "linear attention by shapes, output gates": model(
        [LINEAR | MLP, GATED | MLP] * 2,
        linear_attention_freq=[1, 0, 1, 0],
        attention_output_gate=True,
    ),
    "Mamba-1": model([MAMBA_1] * 4, norm="final_norm"),
    "Mamba-2 by shapes": model([MAMBA_2] * 4, norm="final_norm"),
    "hybrid by shares": model(
        [MAMBA_2, ATTENTION, MLP, MAMBA_2],
        norm="final_norm",
        hybrid_attention_ratio=0.25,
        hybrid_mlp_ratio=0.25,
        **SIZES,
    ),
    "prediction": with_prediction(model([BLOCK] * 4), BLOCK),
    "hybrid with prediction": with_prediction(
        model([MAMBA_2, BLOCK] * 2, norm="final_norm"),
        {
            f"layers.{number}.{name}": at
            for number, layer in enumerate([MAMBA_2, MLP])
            for name, at in layer.items()
        },
        hybrid_override_pattern="M*M*/M-",
    ),
    "LoRA": model([among(BLOCK, ADAPTERS)] * 4),
    "LoRA of Mamba": model(
        [among(MAMBA_2, MAMBA_ADAPTERS), BLOCK] * 2, norm="final_norm", hybrid_attention_ratio=0.5
    ),
    "adapters alone": Made(
        {f"decoder.layers.{n}.{name}": place for n in range(4) for name, place in ADAPTERS.items()},
        layers=4,
    ),
    "Mamba's adapters alone": Made(
        {
            f"decoder.layers.{n}.{name}": place
            for n in range(4)
            for name, place in MAMBA_ADAPTERS.items()
        },
        layers=4,
        args={**SIZES, "mamba_num_heads": 4},
    ),
}
LAYOUTS = [Topology(), Topology(tp=2), Topology(tp=2, pp=2), Topology(pp=4)]


@pytest.mark.pairwise
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("a", LAYOUTS, ids=str)
@pytest.mark.parametrize("b", LAYOUTS, ids=str)
def test_any_layout_from_any_other(name: str, a: Topology, b: Topology) -> None:
    MODELS[name].check(a, b)


def test_torch_dist_has_the_parts_of_mamba_2_apart_and_mamba_1_whole() -> None:
    for name, parts in (("Mamba-1", []), ("Mamba-2 by shapes", ["B", "C", "dt", "x", "z"])):
        model_kind = MODELS[name]
        store, catalog = catalog_of(
            model_kind.arguments(Topology(tp=2)), Topology(tp=2), model_kind.files(Topology(tp=2))
        )
        stacked = to_torch_dist(unshard(catalog, rules=RULES), Topology(tp=2), rules=RULES)
        start = "decoder.layers.0.mixer.in_proj.weight"
        keys = sorted(key for key in stacked.target.tensors if key.startswith(start))
        assert keys == ([f"{start}.{part}" for part in parts] or [start])
        again = unshard(replace(stacked.source, format="torch_dist"), rules=RULES)
        for key, array in model_kind.arrays().items():
            assert tensor_bytes(again, store, key).tobytes() == array.tobytes(), key


def test_torch_dist_has_the_older_names_of_mamba_s_convolution() -> None:
    # As Megatron-LM d98e8a64 names it in rank files; its sharded_state_dict has the older names.
    newer = {name.replace("conv1d.", "conv1d_"): place for name, place in MAMBA_2.items()}
    mamba = model([newer] * 2, norm="final_norm")
    mamba.check(Topology(), Topology(tp=2))
    store, catalog = catalog_of(mamba.arguments(Topology()), Topology(), mamba.files(Topology()))
    stacked = to_torch_dist(unshard(catalog, rules=RULES), Topology(), rules=RULES)
    names = {key for key in stacked.target.tensors if "conv1d" in key}
    assert names and all(".mixer.conv1d." in key for key in names)
    again = unshard(replace(stacked.source, format="torch_dist"), rules=RULES)
    for key, array in mamba.arrays().items():
        older = key.replace("conv1d_", "conv1d.")
        assert tensor_bytes(again, store, older).tobytes() == array.tobytes(), key


@pytest.mark.parametrize("is_newer", [True, False])
def test_rank_files_whose_convolution_the_named_version_does_not_load_are_refused(
    is_newer: bool,
) -> None:
    names = {
        name.replace("conv1d.", "conv1d_" if is_newer else "conv1d."): at
        for name, at in MAMBA_2.items()
    }
    mamba = model([names] * 2, norm="final_norm")
    _, catalog = catalog_of(mamba.arguments(Topology()), Topology(), mamba.files(Topology()))
    source = unshard(catalog, rules=RULES)
    fitting, other = ("0.19", "0.18") if is_newer else ("0.18", "0.19")
    shard(source, Topology(tp=2), rules=RULES, version=parse_version(fitting))
    with pytest.raises(UnsupportedError, match=f"megatron-core {other} cannot load"):
        shard(source, Topology(tp=2), rules=RULES, version=parse_version(other))


def test_arguments_of_a_newer_megatron_give_a_note_on_mamba_s_convolution() -> None:
    mamba = model([MAMBA_2] * 2, norm="final_norm")
    args = {**mamba.arguments(Topology()), "mamba_training_ssm_states_dtype": None}
    for options, n_notes in ((args, 1), (mamba.arguments(Topology()), 0)):
        _, catalog = catalog_of(options, Topology(), mamba.files(Topology()))
        target = shard(unshard(catalog, rules=RULES), Topology(tp=2), rules=RULES)
        assert sum("cannot load Mamba's conv1d.weight" in note for note in target.notes) == n_notes


@pytest.mark.parametrize(
    ("name", "inner", "is_renamed"),
    [
        ("prediction", "transformer_layer.", True),
        ("hybrid with prediction", "mtp_model_layer.layers.0.", False),
    ],
)
def test_torch_dist_has_its_own_name_for_the_layer_of_a_prediction(
    name: str, inner: str, is_renamed: bool
) -> None:
    kind = MODELS[name]
    store, catalog = catalog_of(
        kind.arguments(Topology(pp=2)), Topology(pp=2), kind.files(Topology(pp=2))
    )
    stacked = to_torch_dist(unshard(catalog, rules=RULES), Topology(pp=2), rules=RULES)
    assert any(key.startswith(f"mtp.layers.0.{inner}") for key in stacked.target.tensors)
    assert not is_renamed or not any("mtp_model_layer" in key for key in stacked.target.tensors)
    again = unshard(replace(stacked.source, format="torch_dist"), rules=RULES)
    assert set(again.tensors) == set(kind.tensors)
    for key, array in kind.arrays().items():
        assert tensor_bytes(again, store, key).tobytes() == array.tobytes(), key


def test_a_part_that_is_missing_in_torch_dist_is_named() -> None:
    mamba = MODELS["Mamba-2 by shapes"]
    _, catalog = catalog_of(mamba.arguments(Topology()), Topology(), mamba.files(Topology()))
    source = to_torch_dist(unshard(catalog, rules=RULES), Topology(), rules=RULES).source
    tensors = {
        key: meta
        for key, meta in source.tensors.items()
        if key != "decoder.layers.1.mixer.conv1d.weight.C"
    }
    with pytest.raises(MissingShardError, match="this part of the parameter is missing") as caught:
        unshard(replace(source, format="torch_dist", tensors=tensors), rules=RULES)
    assert caught.value.key == "decoder.layers.1.mixer.conv1d.weight.C"


def refusal(
    kind: Made, a: Topology, b: Topology, *, rules: Rules = RULES
) -> CheckpointingException:
    """The error of a change of layout."""
    with pytest.raises(CheckpointingException) as caught:
        kind.check(a, b, rules=rules)
    return caught.value


def test_groups_of_mamba_limit_the_sizes() -> None:
    mamba = replace(MODELS["Mamba-2 by shapes"], args=SIZES)
    error = refusal(mamba, Topology(tp=2), Topology(tp=4))
    assert isinstance(error, UnsupportedError)
    assert error.message == "mamba_num_groups is 2, which is not divisible by TP 4"
    assert error.hint == "TP sizes that work: 1, 2"


def test_heads_of_linear_attention_limit_the_sizes() -> None:
    sizes = {"linear_num_key_heads": 2, "linear_key_head_dim": 2, "linear_value_head_dim": 4}
    kind = MODELS["linear attention by shapes, output gates"]
    error = refusal(replace(kind, args={**kind.args, **sizes}), Topology(tp=2), Topology(tp=4))
    assert isinstance(error, UnsupportedError)
    assert error.message == "linear_num_key_heads is 2, which is not divisible by TP 4"
    assert error.hint == "TP sizes that work: 1, 2"


def test_the_rank_of_adapters_limits_the_sizes() -> None:
    error = refusal(MODELS["LoRA"], Topology(tp=2), Topology(tp=8))
    assert isinstance(error, UnsupportedError)
    assert "4 elements of axis 0 are not divisible by TP 8" in error.message
    assert error.key is not None and error.key.endswith("linear_in.weight")
    assert error.hint == "TP sizes that work: 1, 2, 4"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({**SIZES, "mamba_state_dim": 8}, r"the tensor's 52 rows, but .* = 68; .* = 32"),
        (
            {**SIZES, "mamba_num_heads": 2},
            "mamba_num_heads is 4 according to this tensor, but 2 according to the arguments",
        ),
        (
            {**SIZES, "mamba_head_dim": 8},
            "mamba_inner is 16 according to this tensor, but 32 according to the arguments",
        ),
    ],
)
def test_sizes_that_contradict_the_shapes_are_corrupt(
    args: dict[str, object], message: str
) -> None:
    error = refusal(replace(MODELS["Mamba-2 by shapes"], args=args), Topology(), Topology(tp=2))
    assert isinstance(error, CorruptError)
    assert re.search(message, error.message), error.message


def test_parts_that_the_ranks_of_the_source_cannot_share_are_corrupt() -> None:
    odd: dict[str, tuple[Shape, Place]] = {**MAMBA_2, "mixer.in_proj.weight": ((54, 8), (0, ()))}
    error = refusal(model([odd] * 2, norm="final_norm"), Topology(tp=2), Topology())
    assert isinstance(error, CorruptError)
    assert (
        error.message
        == "the tensor's parts (16, 16, 9, 9, 4 rows) cannot be divided evenly among 2 ranks"
    )


# --- hybrid patterns ---

PATTERN = model(
    [MAMBA_2, ATTENTION, MLP, MAMBA_2], norm="final_norm", hybrid_override_pattern="M*-M"
)


def test_a_pattern_cuts_the_stages_and_is_cut_anew() -> None:
    uneven = replace(PATTERN, args={"hybrid_layer_pattern": "M|*-M"}, counts=(1, 3))
    a = Topology(pp=2)
    store, catalog = catalog_of(uneven.arguments(a), a, uneven.files(a))
    source = unshard(catalog, rules=RULES)
    for key, array in uneven.arrays().items():
        assert tensor_bytes(source, store, key).tobytes() == array.tobytes(), key
    patterns = {
        str(b): fields_of(shard(source, b, rules=RULES).args)["hybrid_layer_pattern"]
        for b in (Topology(), a, Topology(tp=2, pp=2), Topology(pp=4))
    }
    assert patterns == {
        "TP1 PP1": "M*-M",
        "TP1 PP2": "M|*-M",
        "TP2 PP2": "M|*-M",
        "TP1 PP4": "M|*|-|M",
    }


def test_a_pattern_without_cuts_is_kept() -> None:
    _, catalog = catalog_of(PATTERN.arguments(Topology()), Topology(), PATTERN.files(Topology()))
    target = shard(unshard(catalog, rules=RULES), Topology(pp=2), rules=RULES)
    assert fields_of(target.args)["hybrid_override_pattern"] == "M*-M"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "M-*M",
            (
                "according to the pattern M-*M, layer 1 should be of kind -, "
                "but it has no tensor mlp.linear_fc1.*"
            ),
        ),
        ("M*-", "argument hybrid_override_pattern has 3 layers, but num_layers is 4"),
        ("M*|-|M", "the layer pattern has 3 chunks, but PP 2 × VPP 1 requires 2 model chunks"),
    ],
)
def test_a_pattern_that_contradicts_the_layers_is_corrupt(pattern: str, message: str) -> None:
    changed = replace(PATTERN, args={"hybrid_override_pattern": pattern})
    error = refusal(changed, Topology(pp=2), Topology())
    assert isinstance(error, CorruptError)
    assert error.message == message


def test_predictions_of_a_pattern_are_counted() -> None:
    args = {**PATTERN.arguments(Topology()), "hybrid_override_pattern": "M*-M/ME/ME"}
    facts = parse_facts(args)
    assert (facts.n_layers, facts.n_predictions) == (4, 2)
    assert facts.has_experts("mtp.layers.", 0)
    assert facts.stages(2).chunk_of("mtp.layers.", 1) == (0, 1, 1)


# --- experts in one parameter ---


def test_experts_in_one_parameter_are_read_and_written_one_by_one() -> None:
    experts: dict[str, tuple[Shape, Place]] = {"mlp.router.weight": ((4, 8), REPLICATED)}
    experts |= {f"mlp.experts.linear_fc1.weight{e}": ((24, 8), (0, (12, 12))) for e in range(4)}
    experts |= {f"mlp.experts.linear_fc2.weight{e}": ((8, 12), (1, ())) for e in range(4)}
    norm = {"pre_mlp_layernorm.weight": ((8,), REPLICATED)}
    args = {"num_experts": 4, "moe_grouped_gemm": True, "moe_single_grouped_weight": True}
    grouped = model([ATTENTION | norm | experts] * 2, **args)
    a, b = Topology(tp=2), Topology(tp=4)
    files = grouped.files(a)
    for contents in files.values():
        for number in range(2):
            for linear in ("linear_fc1", "linear_fc2"):
                start = f"decoder.layers.{number}.mlp.experts.{linear}.weight"
                contents[start] = np.stack(
                    [array for e in range(4) if (array := contents.pop(f"{start}{e}")) is not None]
                )
    store, catalog = catalog_of(grouped.arguments(a), a, files)
    source = unshard(catalog, rules=RULES)
    target = shard(source, b, rules=RULES)
    arrays = filled(target, source, store)  # type: ignore[arg-type]
    for folder, contents in grouped.files(b).items():
        for name, array in contents.items():
            assert array is not None
            assert arrays[f"{folder}:model.{name}"].tobytes() == array.tobytes(), (folder, name)
    assert fields_of(target.args)["moe_single_grouped_weight"] is False


# --- rules of users ---

MIXED = model([ATTENTION | {"mlp.extra.weight": ((20, 3), (0, (12, 4, 4)))}] * 2)


@pytest.mark.parametrize(
    "parts",
    ["[12, 4, 4]", '["3 * my_heads", "my_heads", 4]', '[["my_heads"], [12, "other", "other"]]'],
)
def test_users_name_parts_by_numbers_arguments_and_what_is_left(tmp_path: Path, parts: str) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(
        f"[[rule]]\npattern = 'mlp.extra.weight$'\nrule = \"split\"\naxis = 0\nparts = {parts}\n"
    )
    changed = replace(MIXED, args={"my_heads": 4})
    changed.check(Topology(tp=2), Topology(tp=4), rules=load_rules(file))
    error = refusal(changed, Topology(tp=2), Topology(tp=8), rules=load_rules(file))
    assert error.hint == "TP sizes that work: 1, 2, 4"
    assert isinstance(refusal(changed, Topology(tp=2), Topology(tp=4)), UnknownTensorError)


def test_users_take_sizes_from_shapes(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(
        "[[size]]\nname = 'wide'\npattern = 'linear_fc2.weight$'\naxis = 1\n"
        '[[rule]]\npattern = \'mlp.extra.weight$\'\nrule = "split"\naxis = 0\nparts = ["wide", '
        '"rest", "rest"]\n'
    )
    sized = model([ATTENTION | MLP | {"mlp.extra.weight": ((20, 3), (0, (12, 4, 4)))}] * 2)
    sized.check(Topology(tp=2), Topology(tp=4), rules=load_rules(file))


def test_parts_that_nobody_knows_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(
        '[[rule]]\npattern = \'mlp.extra.weight$\'\nrule = "split"\naxis = 0\nparts = ["one", '
        '"two"]\n'
    )
    error = refusal(MIXED, Topology(tp=2), Topology(tp=4), rules=load_rules(file))
    assert isinstance(error, UnsupportedError)
    assert "do not specify the sizes one, two" in error.message


@pytest.mark.parametrize("parts", ['"halves"', "[]", "[0]", '["a b"]', "[[1], 2]", '["-4"]'])
def test_parts_that_make_no_sense_are_refused(tmp_path: Path, parts: str) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(f"[[rule]]\npattern = 'x'\nrule = \"split\"\naxis = 0\nparts = {parts}\n")
    with pytest.raises(UsageError, match=r"\[\[rule\]\] 1 has parts"):
        load_rules(file)
