"""verbs.convert.apply_changes: everything a job changes, in its order, and through the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.arrays.box import Box
from core.engine.catalog.catalog import Catalog, catalog_of_arrays
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment, whole_tensor
from core.errors import CorruptError, UsageError
from core.files.store import MemoryStore
from core.verbs.convert.apply_changes import apply_changes
from core.verbs.convert.job import Job
from tests.support.fragments import with_fragments
from tests.support.moved import moved

E4M3 = torch.float8_e4m3fn
FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def numbered(key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that no other tensor and no other place has."""
    n = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(sum(key.encode()))
    return (
        (torch.randperm(max(n, 1), generator=generator)[:n].float() / max(n, 1) * 400 - 200)
        .reshape(shape)
        .to(dtype)
    )


def stored(
    tensors: dict[str, torch.Tensor], *, config: dict[str, Any] | None = None
) -> tuple[Catalog, MemoryStore]:
    """Every tensor in a file of its own, and a configuration beside them."""
    arrays = {
        key: StoredArray(
            key, str(value.dtype).removeprefix("torch."), tuple(value.shape), Extent(f"t-{key}", 0)
        )
        for key, value in tensors.items()
    }
    files = {f"t-{key}": raw(value) for key, value in tensors.items()}
    catalog = catalog_of_arrays(format="test", arrays=arrays)
    if config is not None:
        data = json.dumps(config).encode()
        files["config.json"] = data
        array = StoredArray("file:config.json", "uint8", (len(data),), Extent("config.json", 0))
        catalog = replace(catalog, files={"config.json": whole_tensor(array)})
    return catalog, MemoryStore(files)


def job(**options: Any) -> Job:
    return Job(src=Path("x"), **options)


def test_a_job_without_changes_changes_nothing() -> None:
    catalog, _ = stored({"a": numbered("a", (2, 3))}, config={"dtype": "float32"})
    result = apply_changes(catalog, job(), config={"dtype": "float32"})
    assert result.catalog.tensors == catalog.tensors
    assert result.catalog.files == catalog.files
    assert (result.renamed, result.excluded, result.notes) == ((), (), ())


def test_all_changes_apply_in_their_order_and_each_sees_the_names_before_it() -> None:
    tensors = {
        "model.embed_tokens.weight": numbered("e", (40, 256)),
        "lm_head.weight": numbered("e", (40, 256)),
        "model.vision.weight": numbered("v", (3, 3)),
        "model.norm.weight": numbered("n", (256,)),
    }
    for n in range(3):
        tensors[f"model.layers.{n}.up.weight"] = numbered(f"u{n}", (200, 256)).to(E4M3)
        tensors[f"model.layers.{n}.up.weight_scale_inv"] = numbered(f"s{n}", (2, 2)).abs() + 1
    catalog, store = stored(tensors)
    result = apply_changes(
        catalog,
        job(
            dequantize="fp32",
            exclude=("model.vision",),  # named as the source has it
            strip_prefix=("model.",),
            add_prefix="m.",
            rename=(("embed_tokens", "emb"), ("lm_head", "head")),
            tie=(("m.head.weight", "m.emb.weight"),),
            untie=(("m.tail.weight", "m.norm.weight"),),
            stack_layers=True,
            dtype=((None, "bf16"), ("m.norm.weight", "fp32")),
            quantize=(("m.emb.*", "block"),),
        ),
    )
    assert {
        key: (tensor.dtype, tensor.shape) for key, tensor in result.catalog.tensors.items()
    } == {
        "m.emb.weight": ("float8_e4m3fn", (40, 256)),
        "m.emb.weight_scale_inv": ("float32", (1, 2)),
        "m.norm.weight": ("float32", (256,)),
        "m.layers.up.weight": ("bfloat16", (3, 200, 256)),
        "m.tail.weight": ("bfloat16", (256,)),
    }
    assert result.renamed == (
        ("model.embed_tokens.weight", "m.emb.weight"),
        ("lm_head.weight", "m.head.weight"),
        ("model.norm.weight", "m.norm.weight"),
        *((f"model.layers.{n}.up.weight", f"m.layers.{n}.up.weight") for n in range(3)),
    )
    assert result.excluded == ("model.vision.weight", "m.head.weight")
    assert len(result.notes) == 6
    files = moved(result.catalog, store)
    layers = []
    for n in range(3):
        scale = (
            tensors[f"model.layers.{n}.up.weight_scale_inv"]
            .repeat_interleave(128, 0)
            .repeat_interleave(128, 1)
        )
        layers.append(
            (tensors[f"model.layers.{n}.up.weight"].float() * scale[:200, :256]).to(torch.bfloat16)
        )
    assert files["m.layers.up.weight"] == raw(torch.stack(layers))
    assert files["m.norm.weight"] == raw(tensors["model.norm.weight"])
    assert files["m.tail.weight"] == raw(tensors["model.norm.weight"].to(torch.bfloat16))
    emb = tensors["model.embed_tokens.weight"].to(torch.bfloat16).float()
    scales = torch.stack([emb[:, :128].abs().max(), emb[:, 128:].abs().max()]) / 448
    assert files["m.emb.weight_scale_inv"] == raw(scales)
    assert files["m.emb.weight"] == raw(
        (emb / scales.repeat_interleave(128)).clamp(-448, 448).to(E4M3)
    )


def test_layers_are_taken_apart_by_the_usual_names_or_by_globs() -> None:
    catalog, _ = stored({"d.layers.a": numbered("a", (2, 3)), "v.h.b": numbered("b", (3, 3))})
    assert list(apply_changes(catalog, job(unstack_layers=())).catalog.tensors) == [
        "d.layers.0.a",
        "d.layers.1.a",
        "v.h.b",
    ]
    changed = apply_changes(catalog, job(unstack_layers=("v.*",))).catalog
    assert list(changed.tensors) == ["d.layers.a", "v.h.0.b", "v.h.1.b", "v.h.2.b"]
    with pytest.raises(UsageError, match="cannot be combined"):
        apply_changes(catalog, job(unstack_layers=(), stack_layers=True))


def test_the_same_bytes_come_out_whatever_the_threads_and_the_cut() -> None:
    weight = numbered("w", (700, 600), torch.bfloat16)
    catalog, store = stored({"a.weight": weight})
    plain = apply_changes(catalog, job(quantize=((None, "block"),))).catalog
    first_array, right = (
        StoredArray(f"c{n}", "bfloat16", (700, 300), Extent(f"c{n}", 0)) for n in range(2)
    )
    cut = Catalog(
        "test",
        None,
        with_fragments(
            catalog.tensors,
            lambda key: [
                Fragment(Box((0, 0), (700, 300)), first_array, (0, 0)),
                Fragment(Box((0, 300), (700, 300)), right, (0, 0)),
            ],
        ),
    )
    halves = MemoryStore({"c0": raw(weight[:, :300]), "c1": raw(weight[:, 300:])})
    first = moved(plain, store, threads=1)
    second = moved(apply_changes(cut, job(quantize=((None, "block"),))).catalog, halves, threads=4)
    assert first == second


def test_a_configuration_loses_its_scales_when_they_are_multiplied_in() -> None:
    config = {
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "quantization_config": FP8,
        "note": None,
    }
    weight = torch.ones(2, 2).to(E4M3)
    catalog, _ = stored({"a.weight": weight, "a.weight_scale_inv": torch.ones(1, 1)}, config=config)
    changed = apply_changes(catalog, job(dequantize="bf16"), config=config).catalog
    assert json.loads(changed.documents["config.json"]) == {
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "note": None,
    }


def test_the_stated_block_size_counts() -> None:
    weight = torch.ones(40, 40).to(E4M3)
    tensors = {"a.weight": weight, "a.weight_scale_inv": torch.ones(2, 5)}
    config = {"quantization_config": {**FP8, "weight_block_size": [32, 8]}}
    catalog, _ = stored(tensors, config=config)
    assert (
        apply_changes(catalog, job(dequantize="bf16"), config=config)
        .catalog.tensors["a.weight"]
        .dtype
        == "bfloat16"
    )
    with pytest.raises(CorruptError, match="128 × 128"):
        apply_changes(catalog, job(dequantize="bf16"))
    for size in ([32], [0, 8], "32", [1.5, 2], [True, 2]):
        wrong = {"quantization_config": {**FP8, "weight_block_size": size}}
        with pytest.raises(CorruptError, match="weight_block_size"):
            apply_changes(catalog, job(dequantize="bf16"), config=wrong)


def test_a_configuration_states_new_scales_and_what_has_none() -> None:
    config = {"model_type": "llama", "dtype": "float32"}
    tensors = {key: torch.ones(2, 2) for key in ("model.l.up_proj.weight", "lm_head.weight")}
    catalog, _ = stored({**tensors, "norm.weight": torch.ones(2)}, config=config)
    wanted = job(dtype=((None, "bf16"),), quantize=((None, "block"),))
    result = apply_changes(catalog, wanted, config=config)
    assert json.loads(result.catalog.documents["config.json"]) == {
        "model_type": "llama",
        "dtype": "bfloat16",
        "quantization_config": {**FP8, "modules_to_not_convert": ["lm_head"]},
    }
    assert result.config_notes == ("config.json: dtype is now bfloat16, quantization_config added",)


def test_one_scale_per_tensor_is_described_as_vllm_and_transformers_read_it() -> None:
    config = {"model_type": "llama"}
    catalog, store = stored({"model.l.up_proj.weight": torch.ones(2, 2)}, config=config)
    changed = apply_changes(catalog, job(quantize=((None, "tensor"),)), config=config).catalog
    assert list(changed.tensors) == ["model.l.up_proj.weight", "model.l.up_proj.weight_scale"]
    stated = json.loads(changed.documents["config.json"])
    quantization = stated["quantization_config"]
    assert (quantization["quant_method"], quantization["format"]) == (
        "compressed-tensors",
        "float-quantized",
    )
    assert quantization["config_groups"]["group_0"]["weights"]["strategy"] == "tensor"
    # Tied to the embedding, the output layer has no tensor, but is a linear layer all the same.
    assert quantization["ignore"] == ["lm_head"]
    wide = apply_changes(changed, job(dequantize="bf16"), config=stated)
    assert list(wide.catalog.tensors) == ["model.l.up_proj.weight"]
    assert moved(wide.catalog, store)["model.l.up_proj.weight"] == raw(
        torch.ones(2, 2, dtype=torch.bfloat16)
    )
    assert "quantization_config" not in json.loads(wide.catalog.documents["config.json"])


def test_two_kinds_of_scales_are_told_of() -> None:
    config = {"model_type": "llama"}
    catalog, _ = stored({"a.weight": torch.ones(2, 2), "b.weight": torch.ones(2, 2)}, config=config)
    result = apply_changes(
        catalog, job(quantize=(("a.*", "block"), ("b.*", "tensor"))), config=config
    )
    assert any("vLLM and SGLang expect only one kind" in note for note in result.notes)
    assert {key for key in result.catalog.tensors if "scale" in key} == {
        "a.weight_scale_inv",
        "b.weight_scale_inv",
    }


def test_a_configuration_that_was_made_already_counts_instead_of_the_carried_one() -> None:
    catalog, _ = stored({"a.weight": torch.ones(2, 2)}, config={"old": 1})
    catalog = replace(catalog, files={"config.json": b'{"dtype": "float32", "new": 2}', "x": b"y"})
    changed = apply_changes(catalog, job(dtype=((None, "fp16"),)), config={"old": 1}).catalog
    documents = changed.documents
    assert json.loads(documents["config.json"]) == {"dtype": "float16", "new": 2}
    assert documents["x"] == b"y"


def test_a_configuration_that_nobody_read_is_told_of() -> None:
    catalog, _ = stored({"a.weight": torch.ones(2, 2)}, config={"old": 1})
    result = apply_changes(catalog, job(quantize=((None, "block"),)))
    assert result.config_notes == (
        "config.json is unchanged, although quantization_config changed",
    )
    assert result.catalog.files == catalog.files


def test_float8_without_scales_stays_and_is_told_of() -> None:
    catalog, _ = stored({"a": torch.ones(2).to(E4M3), "b": torch.ones(2)})
    result = apply_changes(catalog, job(dtype=((None, "bf16"),)))
    assert {key: tensor.dtype for key, tensor in result.catalog.tensors.items()} == {
        "a": "float8_e4m3fn",
        "b": "bfloat16",
    }
    assert result.notes == ("1 float8 tensor not cast (to cast them: --dtype GLOB=DTYPE)",)
    assert apply_changes(catalog, job(dtype=(("*", "bf16"),))).notes == ()


@pytest.mark.parametrize(("option", "is_tied"), [("tie", True), ("untie", False)])
def test_a_configuration_says_whether_the_output_layer_is_tied(option: str, is_tied: bool) -> None:
    config = {"model_type": "llama", "tie_word_embeddings": not is_tied}
    pair = ("lm_head.weight", "model.embed_tokens.weight")
    tensors = dict.fromkeys(pair if is_tied else pair[1:], torch.ones(2, 2))
    catalog, _ = stored({**tensors, "a": torch.ones(2), "b": torch.ones(2)}, config=config)
    result = apply_changes(catalog, job(**{option: (pair,)}), config=config)
    assert json.loads(result.catalog.documents["config.json"])["tie_word_embeddings"] is is_tied
    assert result.config_notes == (
        f"config.json: tie_word_embeddings is now {str(is_tied).lower()}",
    )
    assert apply_changes(catalog, job(tie=(("a", "b"),)), config=config).config_notes == ()
