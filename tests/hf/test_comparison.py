"""Which tensors a model of transformers has, against what transformers itself builds, saves and
loads.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.engine.catalog.tensor import Tensor
from core.errors import UnknownTensorError
from core.hf.family import families
from core.hf.proof.comparison import find_differences
from core.hf.proof.problem import Problem
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.verbs.convert.run import Job, run
from tests.hf.models import (
    COMMON,
    DEEPSEEK,
    FAMILIES,
    MODELS,
    MOE,
    assert_same,
    catalog_of,
    config_of,
    loaded_model,
    quietly,
    saved,
    tensors,
)
from tests.support.covering import every_third

Tensors = dict[str, Tensor]
EVERY_FAMILY = (
    "llama_biased",
    "llama_tied",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe_mixed",
    "deepseek_v3",
)


def meta_of(key: str, dtype: str, *shape: int) -> tuple[str, Tensor]:
    return key, Tensor(dtype, shape)


def state_of(model: Any) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the configuration that ``save_pretrained`` would write of a model."""
    metas = {
        key: Tensor(str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for key, value in model.state_dict().items()
    }
    stated = json.loads(json.dumps(model.config.to_diff_dict()))
    return metas, {**stated, "architectures": [type(model).__name__]}


def built(name: str, auto_class: str = "AutoModelForCausalLM", **changes: Any) -> Any:
    """A model without memory for its weights."""
    import transformers

    quietly()
    model_type, differing = MODELS.get(name, (name, {}))
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **differing, **changes})
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, auto_class).from_config(config)


def changed(tensors: Tensors, *without: str, **more: tuple[str, Tensor]) -> Tensors:
    return {key: meta for key, meta in tensors.items() if key not in without} | dict(more.values())


def kinds(problems: tuple[Problem, ...]) -> list[str]:
    return [problem.kind for problem in problems]


@pytest.fixture(scope="module")
def llama() -> tuple[Tensors, dict[str, Any]]:
    return state_of(built("llama"))


@pytest.mark.parametrize("name", every_third(FAMILIES, start=2))
def test_what_transformers_saves_fits_its_configuration(name: str, tmp_path: Path) -> None:
    for options in ({}, {"save_original_format": False}) if name in MOE else ({},):
        folder = saved(name, tmp_path / f"model{len(options)}", **options)
        source, config = catalog_of(folder)[1], config_of(folder)
        assert find_differences(source.tensors, config) == ()
        back = to_hf(to_megatron(source, config))
        assert find_differences(back.tensors, json.loads(back.documents["config.json"])) == ()


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_a_model_out_of_a_checkpoint_without_a_configuration_is_what_transformers_loads(
    name: str, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path / "model")
    run(Job(src=folder, dst=tmp_path / "dcp", to="dcp", fsync=False))
    run(
        Job(
            src=tmp_path / "dcp",
            dst=tmp_path / "out",
            to="hf",
            config=folder / "config.json",
            fsync=False,
        )
    )
    assert_same(tensors(tmp_path / "out"), tensors(folder))
    loaded_model(tmp_path / "out")


HEADS = (
    "",
    "ForCausalLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
CLASSES = [
    (name, f"AutoModel{head}")
    for name in ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
    for head in HEADS
    if (name, head) != ("deepseek_v3", "ForQuestionAnswering")  # transformers has no such class
]


@pytest.mark.each_value
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"mlp_bias": True}], ids=str)
@pytest.mark.parametrize(("name", "auto_class"), CLASSES)
def test_other_heads_and_biases_fit(name: str, auto_class: str, changes: dict[str, Any]) -> None:
    assert find_differences(*state_of(built(name, auto_class, **changes))) == ()


@pytest.mark.each_value
@pytest.mark.parametrize("name", families())
@pytest.mark.parametrize(
    "head", ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
)
def test_another_head_that_transformers_saves_fits_and_its_labels_are_counted(
    name: str, head: str, tmp_path: Path
) -> None:
    import transformers

    changes = next((item for model_type, item in MODELS.values() if model_type == name), None)
    if changes is None:
        pytest.skip("transformers has no such model")
    quietly()
    labels = {} if head == "ForQuestionAnswering" else {"num_labels": 5}
    values = {**COMMON, **changes, **labels}
    stated_values = {key: value for key, value in values.items() if value is not ...}
    config = transformers.AutoConfig.for_model(name, **stated_values)
    auto = getattr(transformers, f"AutoModel{head}")
    model_class = auto._model_mapping.get(type(config), None)
    stem = families()[name].architecture.removesuffix("ForCausalLM")
    if model_class is None or model_class.__name__ != stem + head:
        pytest.skip("transformers has no such class")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        auto.from_config(config).save_pretrained(tmp_path)
    metas, stated = dict(catalog_of(tmp_path)[1].tensors), config_of(tmp_path)
    assert find_differences(metas, stated) == ()
    own = [key for key in metas if key.startswith(("score.", "qa_outputs.", "classifier."))]
    assert own
    for key in own:
        (problem,) = find_differences(changed(metas, key), stated)
        assert (problem.kind, problem.key, problem.is_lack) == ("missing", key, True)
    body = next(
        key for key in metas if ".2." in key and key.endswith(("_proj.weight", ".dense.weight"))
    )
    (problem,) = find_differences(changed(metas, body), stated)
    assert (problem.kind, problem.key) == ("missing", body)
    if labels:
        for other in (
            {"id2label": {"0": "a", "1": "b", "2": "c"}},
            {"id2label": None, "num_labels": 3},
        ):
            problems = find_differences(metas, {**stated, **other})
            assert [(problem.kind, problem.key) for problem in problems] == [
                ("shape", key) for key in sorted(own)[::-1]
            ]
    else:
        wide = meta_of("qa_outputs.weight", "float32", 3, 32)
        assert kinds(find_differences(changed(metas, x=wide), stated)) == ["shape"]


def test_only_a_model_that_answers_questions_may_be_called_a_transformer(
    llama: tuple[Tensors, dict[str, Any]],
) -> None:
    """Of a language model, transformers reads no such names and starts from random weights."""
    metas, config = llama
    renamed = {key.replace("model.", "transformer.", 1): meta for key, meta in metas.items()}
    assert kinds(find_differences(renamed, config)) == ["missing"]


@pytest.mark.parametrize(
    "name",
    every_third(
        sorted(
            set(families())
            - {"bailing_moe_v2", "mimo", "nemotron-nas", "sarvam_mla", "sarvam_moe", "step3p5"}
        )
    ),
)
def test_what_a_configuration_leaves_out_is_what_transformers_takes_for_it(name: str) -> None:
    import transformers

    quietly()
    sizes: dict[str, Any] = {
        "num_hidden_layers": 5,
        "num_attention_heads": 128,
        "hidden_size": 1280,
        "vocab_size": 9,
        "pad_token_id": None,
    }
    # Values without which transformers cannot build the model, though it has them as defaults.
    if name == "nemotron":
        sizes["num_key_value_heads"] = 128
    if name == "ministral":
        sizes["head_dim"] = 10
    if name == "mamba2":
        sizes["num_heads"] = 40
    if name == "dots1":
        sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    if name == "helium":  # its output projection is square
        sizes["hidden_size"] = 128 * 128
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(name, **sizes)
        metas, stated = state_of(transformers.AutoModelForCausalLM.from_config(config))
    for absent in (
        "num_key_value_heads",
        "head_dim",
        "q_lora_rank",
        "first_k_dense_replace",
        "tie_word_embeddings",
    ):
        stated.pop(absent, None)
    assert find_differences(metas, stated) == ()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda t: changed(t, "model.layers.1.mlp.up_proj.weight"), "missing"),
        (lambda t: changed(t, "lm_head.weight"), "ties"),
        (lambda t: changed(t, *(key for key in t if ".layers.2." in key)), "layers"),
        (
            lambda t: changed(
                t, x=meta_of("model.layers.3.mlp.up_proj.weight", "bfloat16", 48, 32)
            ),
            "layers",
        ),
        (lambda t: changed(t, x=meta_of("model.norm.weight", "bfloat16", 33)), "shape"),
        (lambda t: changed(t, x=meta_of("model.norm.weight", "int64", 32)), "dtype"),
        (lambda t: changed(t, x=meta_of("model.norm.bias", "bfloat16", 32)), "unexpected"),
        (
            lambda t: changed(t, x=meta_of("model.layers.1.mlp.up_proj.SCB", "float32", 48)),
            "quantization",
        ),
    ],
)
def test_one_difference_is_one_problem(
    change: Callable[[Tensors], Tensors], kind: str, llama: tuple[Tensors, dict[str, Any]]
) -> None:
    metas, config = llama
    (problem,) = find_differences(change(metas), config)
    assert problem.kind == kind
    assert problem.key


def test_a_layer_that_is_lost_in_the_middle_is_missing_tensor_by_tensor(
    llama: tuple[Tensors, dict[str, Any]],
) -> None:
    metas, config = llama
    problems = find_differences(
        changed(metas, *(key for key in metas if ".layers.1." in key)), config
    )
    assert kinds(problems) == ["missing"] * 9


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_another_number_of_experts_is_one_problem(name: str, stacked: bool, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "model", save_original_format=not stacked)
    metas, config = catalog_of(folder)[1].tensors, config_of(folder)
    (stated,) = (n for n in ("num_local_experts", "num_experts", "n_routed_experts") if n in config)
    for count in (3, 6):
        (problem,) = find_differences(metas, {**config, stated: count})
        assert (problem.kind, problem.expected, problem.found) == (
            "experts",
            f"{count} experts",
            "4",
        )


def test_layers_that_are_all_dense_have_no_experts_to_count(tmp_path: Path) -> None:
    for count in (3, 8):
        metas, config = state_of(built("deepseek_v3", first_k_dense_replace=count))
        assert config["n_routed_experts"] == 4
        assert find_differences(metas, config) == ()


def test_an_expert_that_is_lost_is_found(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path / "model")
    metas, config = dict(catalog_of(folder)[1].tensors), config_of(folder)
    last = [key for key in metas if ".experts.3." in key]
    assert kinds(find_differences(changed(metas, *last), config)) == ["experts"]
    assert kinds(find_differences(changed(metas, last[0]), config)) == ["missing"]


def test_layers_for_drafts_may_be_there_and_are_then_complete(tmp_path: Path) -> None:
    """transformers leaves DeepSeek's multi-token prediction out, whatever the configuration
    says.
    """
    folder = saved("deepseek_v3", tmp_path / "model")
    metas, config = dict(catalog_of(folder)[1].tensors), config_of(folder)
    assert find_differences(metas, {**config, "num_nextn_predict_layers": 1}) == ()
    body = {
        key.replace(".2.", ".3.", 1): tensor
        for key, tensor in metas.items()
        if key.startswith("model.layers.2.")
    }
    added = {key: Tensor(tensor.dtype, tensor.shape) for key, tensor in body.items()}
    own = (("enorm", (32,)), ("hnorm", (32,)), ("eh_proj", (32, 64)), ("shared_head.norm", (32,)))
    added |= {key: Tensor("bfloat16", s) for n, s in own for key in [f"model.layers.3.{n}.weight"]}
    assert find_differences(metas | added, config) == ()
    del added["model.layers.3.hnorm.weight"]
    assert kinds(find_differences(metas | added, config)) == ["missing"]


def test_buffers_of_old_models_and_stored_tied_heads_are_no_problem() -> None:
    metas, config = state_of(built("llama_tied"))
    inv_freq = [
        meta_of(f"model.layers.{n}.self_attn.rotary_emb.inv_freq", "float32", 2) for n in range(3)
    ]
    extra = dict(inv_freq)
    head = {"lm_head.weight": Tensor("bfloat16", (130, 32))}
    assert find_differences(metas | extra | head, config) == ()
    assert find_differences(changed(metas | extra, "lm_head.weight"), config) == ()


def test_a_configuration_that_asks_for_a_giant_is_answered_at_once(
    llama: tuple[Tensors, dict[str, Any]],
) -> None:
    metas, config = llama
    assert kinds(find_differences(metas, {**config, "num_hidden_layers": 1 << 30})) == ["layers"]
    metas, config = state_of(built("mixtral"))
    assert "experts" in kinds(find_differences(metas, {**config, "num_local_experts": 1 << 30}))


# --- quantized weights, under the names that each tool writes
# -------------------------------------------------------


def _linear(metas: Tensors) -> Tensors:
    return {key: meta for key, meta in metas.items() if key.endswith("_proj.weight")}


def _quantized(
    metas: Tensors, parts: Callable[[str, int, int], Mapping[str, tuple[str, tuple[int, ...]]]]
) -> Tensors:
    """The tensors with every linear weight replaced by what a tool writes: name behind the module's
    → dtype, shape.
    """
    quantized = dict(metas)
    for key, tensor in _linear(metas).items():
        del quantized[key]
        module = key.removesuffix(".weight")
        for name, (dtype, shape) in parts(module, *tensor.shape).items():
            quantized[f"{module}.{name}"] = Tensor(dtype, shape)
    return quantized


def _gptq(_: str, rows: int, columns: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    return {
        "qweight": ("int32", (columns // 8, rows)),
        "qzeros": ("int32", (1, rows // 8)),
        "scales": ("float16", (1, rows)),
        "g_idx": ("int32", (columns,)),
    }


def _awq(_: str, rows: int, columns: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    return {
        "qweight": ("int32", (columns, rows // 8)),
        "qzeros": ("int32", (1, rows // 8)),
        "scales": ("float16", (1, rows)),
    }


def _int8(_: str, rows: int, columns: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    return {
        "weight": ("int8", (rows, columns)),
        "SCB": ("float32", (rows,)),
        "weight_format": ("uint8", ()),
    }


def _nf4(_: str, rows: int, columns: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    return {
        "weight": ("uint8", (rows * columns // 2, 1)),
        "weight.absmax": ("uint8", (rows * columns // 64,)),
        "weight.quant_map": ("float32", (16,)),
        "weight.nested_absmax": ("float32", (1,)),
        "weight.nested_quant_map": ("float32", (256,)),
        "weight.quant_state.bitsandbytes__nf4": ("uint8", (90,)),
    }


def _fp8(_: str, rows: int, columns: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    blocks = (-(-rows // 32), -(-columns // 32))
    return {"weight": ("float8_e4m3fn", (rows, columns)), "weight_scale_inv": ("float32", blocks)}


def _packed(_: str, rows: int, columns: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    return {
        "weight_packed": ("int32", (rows, columns // 8)),
        "weight_scale": ("bfloat16", (rows, 1)),
        "weight_shape": ("int64", (2,)),
    }


SCHEMES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4}),
    "bitsandbytes int8": (_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "bitsandbytes nf4": (_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "fp8": (_fp8, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "compressed-tensors": (_packed, {"quant_method": "compressed-tensors", "config_groups": {}}),
}


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_weights_fit_a_configuration_that_names_their_method(
    name: str, scheme: str, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path / "model")
    parts, stated = SCHEMES[scheme]
    metas, config = _quantized(dict(catalog_of(folder)[1].tensors), parts), config_of(folder)
    assert find_differences(metas, {**config, "quantization_config": stated}) == ()
    if scheme == "compressed-tensors":
        assert find_differences(metas, {**config, "compression_config": stated}) == ()
    assert kinds(find_differences(metas, config)) == ["quantization"]
    assert find_differences(metas, config, files=["config.json", "quantize_config.json"]) == ()


def test_scales_of_cached_keys_and_values_are_no_problem(
    llama: tuple[Tensors, dict[str, Any]],
) -> None:
    metas, config = llama
    scales = [
        meta_of(f"model.layers.{n}.self_attn.{part}_scale", "float32", 1)
        for n in range(3)
        for part in "kv"
    ]
    config = {
        **config,
        "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {}},
    }
    assert find_differences(metas | dict(scales), config) == ()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: changed(t, "model.layers.1.mlp.up_proj.weight_scale_inv"), "has no scales"),
        (
            lambda t: changed(
                t, x=meta_of("model.layers.1.mlp.up_proj.weight_scale_inv", "float32", 3, 1)
            ),
            r"scales have shape \(3, 1\), which does not fit a weight of shape \(48, 32\)",
        ),
    ],
)
def test_scales_that_do_not_fit_their_weight_are_found(
    change: Callable[[Tensors], Tensors], text: str, llama: tuple[Tensors, dict[str, Any]]
) -> None:
    metas, config = llama
    (problem,) = find_differences(
        change(_quantized(metas, _fp8)), {**config, "quantization_config": SCHEMES["fp8"][1]}
    )
    assert problem.kind == "quantization"
    assert re.search(text, problem.message)


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq"])
def test_wide_weights_under_a_method_that_they_do_not_have_are_found(
    method: str, llama: tuple[Tensors, dict[str, Any]]
) -> None:
    metas, config = llama
    config = {**config, "quantization_config": {"quant_method": method}}
    assert kinds(find_differences(metas, config)) == ["quantization"]


# --- families whose names are not known
# -------------------------------------------------------------------------------


UNKNOWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4},
    "gemma2": {"num_hidden_layers": 3},
    "opt": {"word_embed_proj_dim": 16, "num_hidden_layers": 3},
    "t5": {"num_layers": 3},
    "bert": {},
    "falcon": {},
    "mamba": {},
    "llava": {},
    "qwen2_vl": {},
    "mllama": {},
    "moshi": {},
    "whisper": {},
    "albert": {"embedding_size": 16},
    "gpt_neox": {},
}


@pytest.mark.parametrize("model_type", every_third(UNKNOWN, start=0))
def test_families_that_are_not_known_raise_no_alarm(model_type: str) -> None:
    import transformers

    quietly()
    config = transformers.AutoConfig.for_model(model_type, **UNKNOWN[model_type])
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModel.from_config(config)
    assert find_differences(*state_of(model)) == ()


@pytest.mark.parametrize(
    ("model_type", "changes", "kind"),
    [
        ("gemma2", {"num_hidden_layers": 9, "layer_types": ["full_attention"] * 9}, "layers"),
        ("falcon", {"num_hidden_layers": 7}, "layers"),
        ("falcon", {"vocab_size": 777}, None),
        ("gemma2", {"vocab_size": 777777}, "shape"),
        ("falcon", {"hidden_size": 1234}, "shape"),
    ],
)
def test_sizes_that_every_configuration_states_are_compared(
    model_type: str, changes: dict[str, Any], kind: str | None
) -> None:
    import transformers

    quietly()
    config = transformers.AutoConfig.for_model(model_type)
    with torch.device("meta"):
        metas, stated = state_of(transformers.AutoModel.from_config(config))
    assert kinds(find_differences(metas, {**stated, **changes})) == ([] if kind is None else [kind])


@pytest.mark.parametrize("wrapper", ["state_dict.", "module.", "_orig_mod."])
def test_what_a_framework_puts_before_all_names_is_refused_for_every_family(
    wrapper: str, tmp_path: Path
) -> None:
    """transformers would start from random weights; no table of the family is needed to know
    that.
    """
    config = {"model_type": "new_model", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1}
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight")
    torch.save({wrapper + name: torch.ones(8, 4) for name in names}, tmp_path / "x.pt")
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = Job(
        src=tmp_path / "x.pt",
        dst=tmp_path / "out",
        to="hf",
        config=tmp_path / "config.json",
        fsync=False,
    )
    with pytest.raises(UnknownTensorError, match=f"all names begin with '{wrapper}'") as refusal:
        run(job)
    assert refusal.value.hint == f"remove the prefix with --strip-prefix {wrapper}"
    run(replace(job, strip_prefix=(wrapper,)))


def test_layers_for_drafts_of_families_that_are_not_known_are_no_problem() -> None:
    """Many have them behind the others, as DeepSeek-V3 does."""
    metas = {f"model.layers.{n}.w": Tensor("bfloat16", (4,)) for n in range(47)}
    config = {
        "model_type": "new_moe",
        "vocab_size": 9,
        "num_hidden_layers": 46,
        "num_nextn_predict_layers": 1,
    }
    assert find_differences(metas, config) == ()
    assert kinds(find_differences(metas, {**config, "num_hidden_layers": 44})) == ["layers"]


def test_deepseek_is_compared_where_remote_code_is_named() -> None:
    """The published models name code of their own beside the class."""
    metas, config = state_of(built("deepseek_v3", **{**DEEPSEEK, "num_hidden_layers": 2}))
    stated = {
        **config,
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    }
    assert find_differences(metas, stated) == ()
    assert kinds(find_differences(metas, {**stated, "num_hidden_layers": 3})) == ["layers"]
