"""Quantized weights of other software: known by their names, never cast, made wide or refused by
the scheme's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.engine.catalog.tensor import Tensor
from core.engine.changes.quantize import dequantize
from core.engine.quantize.schemes import quantized_weights, schemes
from core.errors import CorruptError, UnsupportedError, UsageError
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.verbs.convert.run import Job, run
from tests.engine.changes.test_quantize import content, name_of, raw, stored

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
I8, U8, I32 = torch.int8, torch.uint8, torch.int32
Spec = dict[str, tuple[torch.dtype, tuple[int, ...]]]

PACKED: Spec = {".qweight": (I32, (8, 16)), ".qzeros": (I32, (1, 2)), ".scales": (F16, (1, 16))}
EXAMPLES: dict[str, tuple[str, str | None, Spec]] = {
    "gptq": ("GPTQ", "gptq", {**PACKED, ".g_idx": (I32, (64,))}),
    "gptq without a config": ("GPTQ", None, {**PACKED, ".g_idx": (I32, (64,))}),
    "gptq without g_idx": ("GPTQ", "gptq", PACKED),
    "auto-round": ("GPTQ", "auto-round", PACKED),
    "awq": ("AWQ (or GPTQ without g_idx)", "awq", PACKED),
    "awq without a config": ("AWQ (or GPTQ without g_idx)", None, PACKED),
    "fp_quant": (
        "FP-Quant",
        None,
        {".qweight": (U8, (16, 8)), ".scales": (U8, (16, 2)), ".weight_global_scale": (F32, (1,))},
    ),
    "bitsandbytes int8": (
        "bitsandbytes int8",
        "bitsandbytes",
        {".weight": (I8, (16, 8)), ".SCB": (F32, (16,)), ".weight_format": (U8, ())},
    ),
    "bitsandbytes nf4": (
        "bitsandbytes 4-bit",
        "bitsandbytes",
        {
            ".weight": (U8, (64, 1)),
            ".weight.absmax": (U8, (2,)),
            ".weight.quant_map": (F32, (16,)),
            ".weight.nested_absmax": (F32, (1,)),
            ".weight.nested_quant_map": (F32, (256,)),
            ".weight.quant_state.bitsandbytes__nf4": (U8, (80,)),
        },
    ),
    "pack-quantized": (
        "compressed-tensors, packed",
        "compressed-tensors",
        {
            ".weight_packed": (I32, (16, 1)),
            ".weight_scale": (F16, (16, 1)),
            ".weight_shape": (I32, (2,)),
        },
    ),
    "int-quantized": (
        "compressed-tensors int8",
        "compressed-tensors",
        {".weight": (I8, (16, 8)), ".weight_scale": (F16, (16, 1)), ".input_scale": (F16, (1,))},
    ),
    "quark": (
        "integers with weight_scale (Quark, ModelOpt, BitNet or others)",
        None,
        {
            ".weight": (I8, (16, 8)),
            ".weight_scale": (F16, (16,)),
            ".weight_zero_point": (I8, (16,)),
        },
    ),
    "modelopt nvfp4": (
        "NVFP4 (or W4A8) of ModelOpt",
        "modelopt",
        {
            ".weight": (U8, (16, 4)),
            ".weight_scale": (torch.float8_e4m3fn, (16, 1)),
            ".weight_scale_2": (F32, ()),
            ".input_scale": (F32, ()),
        },
    ),
    "nvfp4": (
        "NVFP4",
        "nvfp4",
        {
            ".weight_sf_rowmajor": (U8, (16, 1)),
            ".weight_sf": (I32, (4,)),
            ".weight_global_scale": (F32, (1,)),
        },
    ),
    "eetq": ("EETQ", "eetq", {".weight": (I8, (8, 16)), ".weight_scales": (F16, (16,))}),
    "eetq of its own": ("EETQ", None, {".qweight": (I8, (8, 16)), ".weight_scales": (F16, (16,))}),
    "gemma": (
        "quantized embedding (Gemma)",
        "gemma",
        {".embedding_quantized": (I8, (16, 8)), ".embedding_scale": (F32, (16, 1))},
    ),
    "mxfp4": ("MXFP4", "mxfp4", {"_blocks": (U8, (2, 16, 1, 16)), "_scales": (U8, (2, 16, 1))}),
    "hqq": (
        "HQQ (or SINQ)",
        "hqq",
        {
            ".W_q": (U8, (8, 8)),
            ".scale": (F16, (16, 1)),
            ".zero": (F16, (16, 1)),
            ".nbits": (I32, ()),
        },
    ),
    "hqq of before 0.2": (
        "HQQ (or SINQ)",
        None,
        {".W_q": (U8, (8, 8)), ".meta.scale": (F16, (16, 1)), ".meta.zero": (F16, (16, 1))},
    ),
    "sinq": (
        "HQQ (or SINQ)",
        "sinq",
        {
            ".W_q": (U8, (8, 8)),
            ".meta.scale": (F16, (16, 1)),
            ".meta.scale2": (F16, (8,)),
            ".meta.zero": (F16, (16, 1)),
        },
    ),
    "sinq without a config": (
        "HQQ (or SINQ)",
        None,
        {
            ".W_q": (U8, (8, 8)),
            ".scale": (F16, (16, 1)),
            ".scale2": (F16, (8,)),
            ".zero": (F16, (16, 1)),
        },
    ),
    "sinq with quantized scales": (
        "HQQ (or SINQ)",
        None,
        {
            ".W_q": (U8, (8, 8)),
            ".meta.scale.x": (U8, (16, 1)),
            ".meta.scale.s": (F16, (1,)),
            ".meta.scale.m": (F16, (1,)),
            ".meta.scale2.x": (U8, (8,)),
            ".meta.scale2.s": (F16, (1,)),
            ".meta.scale2.m": (F16, (1,)),
            ".meta.zero": (F16, (16, 1)),
        },
    ),
    "marlin": ("Marlin", None, {".B": (I32, (4, 32)), ".s": (F16, (1, 16))}),
    "marlin with a config": (
        "Marlin",
        "marlin",
        {".B": (I32, (4, 32)), ".s": (F16, (1, 16)), ".workspace": (I32, (8,))},
    ),
    "marlin 2:4": (
        "Marlin 2:4",
        None,
        {
            ".B_24": (I32, (2, 32)),
            ".B_meta": (torch.int16, (2, 32)),
            ".s": (F16, (1, 16)),
            ".workspace": (I32, (8,)),
        },
    ),
    "qqq": (
        "QQQ",
        None,
        {".B": (I32, (4, 32)), ".s_channel": (F32, (1, 16)), ".s_group": (F16, (1, 16))},
    ),
    "exl2": (
        "EXL2",
        None,
        {
            ".q_weight": (I32, (8, 16)),
            ".q_scale": (I32, (1, 2)),
            ".q_scale_max": (F16, (1,)),
            ".q_groups": (I32, (2,)),
        },
    ),
    "exl3": (
        "EXL3",
        None,
        {".trellis": (torch.int16, (4, 1, 16)), ".suh": (F16, (64,)), ".svh": (F16, (16,))},
    ),
    "exl3 with packed signs": (
        "EXL3",
        None,
        {
            ".trellis": (torch.int16, (4, 1, 16)),
            ".su": (torch.int16, (4,)),
            ".sv": (torch.int16, (1,)),
        },
    ),
    "exl3 with packed signs and a scale": (
        "EXL3",
        "exl3",
        {
            ".trellis": (torch.int16, (4, 1, 16)),
            ".suh": (F16, (64,)),
            ".sv": (torch.int16, (1,)),
            ".scale": (F32, ()),
        },
    ),
    "quip": (
        "QuIP#",
        None,
        {
            ".Qidxs": (torch.int64, (16, 1)),
            ".SU": (F16, (8,)),
            ".SV": (F16, (16,)),
            ".Wscale": (F32, ()),
        },
    ),
    "quip with all of its buffers": (
        "QuIP#",
        None,
        {
            ".Qidxs": (torch.int64, (16, 1)),
            ".SU": (F16, (8,)),
            ".SV": (F16, (16,)),
            ".Wscale": (F32, ()),
            ".scaleWH": (F32, (8,)),
            ".codebook_id": (torch.int64, ()),
            ".ocs_dupe_inds": (torch.int64, (8,)),
            ".A": (F16, (16, 2)),
            ".B": (F16, (2, 8)),
            ".fuse_scales": (F32, (3,)),
        },
    ),
    "llm-awq": (
        "AWQ (or GPTQ without g_idx)",
        None,
        {
            ".qweight": (torch.int16, (4, 16)),
            ".scales": (F16, (1, 16)),
            ".scaled_zeros": (F16, (1, 16)),
        },
    ),
    "quanto": (
        "quanto",
        "quanto",
        {
            ".weight._data": (I8, (16, 8)),
            ".weight._scale": (F16, (16, 1)),
            ".weight._shift": (F16, (16, 1)),
        },
    ),
    "torchao": (
        "torchao",
        "torchao",
        {
            "._weight_qdata": (I8, (16, 8)),
            "._weight_scale": (BF16, (16, 1)),
            "._weight_zero_point": (I8, (16, 1)),
        },
    ),
    "aqlm": (
        "AQLM",
        "aqlm",
        {
            ".codes": (I8, (16, 1, 1)),
            ".codebooks": (F16, (1, 256, 1, 8)),
            ".scales": (F16, (16, 1, 1, 1)),
        },
    ),
    "vptq": (
        "VPTQ",
        "vptq",
        {
            ".indices": (I32, (1, 8)),
            ".centroids.weight": (F16, (1, 64)),
            ".weight_scale": (F16, (8,)),
        },
    ),
    "spqr": (
        "SpQR",
        "spqr",
        {
            ".dense_weights": (I32, (8,)),
            ".row_offsets": (I32, (17,)),
            ".col_vals": (I32, (4,)),
            ".in_perm": (I32, (8,)),
        },
    ),
    "higgs": (
        "HIGGS",
        "higgs",
        {
            ".weight": (U8, (16, 4)),
            ".scales": (F16, (16, 1)),
            ".tables": (F16, (16,)),
            ".tables2": (F32, (16, 16, 2)),
        },
    ),
    "mlx": (
        "MLX",
        None,
        {".weight": (torch.uint32, (16, 1)), ".scales": (F16, (16, 1)), ".biases": (F16, (16, 1))},
    ),
    "fp8": (
        "float8 with scales",
        "fp8",
        {
            ".weight": (torch.float8_e4m3fn, (16, 8)),
            ".weight_scale_inv": (F32, (1, 1)),
            ".activation_scale": (F32, ()),
        },
    ),
    "fp8 of experts": (
        "float8 with scales",
        None,
        {"_proj": (torch.float8_e4m3fn, (2, 16, 8)), "_proj_scale_inv": (F32, (2, 1, 1))},
    ),
    "fbgemm": (
        "float8 with scales",
        "fbgemm_fp8",
        {".weight": (torch.float8_e4m3fn, (16, 8)), ".weight_scale": (F32, (16, 1))},
    ),
    "fbgemm of experts": (
        "float8 with scales",
        "fbgemm_fp8",
        {"_proj": (torch.float8_e4m3fn, (2, 16, 8)), "_proj_scale": (F32, (2, 1, 8))},
    ),
}
"""What libraries save for one module: (the scheme, quant_method of the config or None, suffix →
dtype and shape).
"""


def model(spec: Spec, module: str = "model.layers.0.mlp.up") -> dict[str, torch.Tensor]:
    """The tensors of a module, and two plain ones beside them."""
    tensors = {}
    for number, (suffix, (dtype, shape)) in enumerate(spec.items()):
        n = torch.Size(shape).numel()
        values = torch.arange(1, n + 1).reshape(shape) % 97 + number
        tensors[module + suffix] = (values / 1.7 if dtype.is_floating_point else values).to(dtype)
    return {
        **tensors,
        f"{module}.bias": torch.arange(16) / F16.itemsize / 3,
        "model.norm.weight": torch.full((8,), 1 / 3),
    }


def metas(tensors: Mapping[str, torch.Tensor]) -> dict[str, Tensor]:
    return {key: Tensor(name_of(value.dtype), tuple(value.shape)) for key, value in tensors.items()}


def config_of(method: str | None) -> dict[str, object] | None:
    return None if method is None else {"quantization_config": {"quant_method": method}}


def folder_of(
    tensors: dict[str, torch.Tensor], folder: Path, config: Mapping[str, object] | None = None
) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_tensors_of_a_quantized_weight_are_known_by_their_names(example: str) -> None:
    scheme, method, spec = EXAMPLES[example]
    tensors = model(spec)
    (weight,) = quantized_weights(metas(tensors), config_of(method))
    assert weight.scheme.name == scheme
    assert {*weight.keys} == {*tensors} - {"model.layers.0.mlp.up.bias", "model.norm.weight"}
    assert weight.scales


def test_every_row_of_the_table_has_an_example() -> None:
    shown = {
        quantized_weights(metas(model(spec)), config_of(method))[0].scheme
        for _, method, spec in EXAMPLES.values()
    }
    assert {*schemes()} == shown
    assert all(row.source for row in schemes())


def test_plain_models_have_no_quantized_weights() -> None:
    floats = (
        ".weight",
        ".scale",
        "_scale",
        ".scales",
        ".s",
        ".B",
        ".scale2",
        ".SU",
        ".trellis",
        ".svh",
        ".W_q",
        ".codes",
        ".codebooks",
        ".indices",
        ".tables2",
        ".zero",
    )
    tensors = model(dict.fromkeys(floats, (BF16, (16, 8))))
    assert quantized_weights(metas(tensors)) == ()
    assert quantized_weights(metas(tensors), config_of("gptq")) == ()


CAST = {example: entry for example, entry in EXAMPLES.items() if entry[0] != "float8 with scales"}


@pytest.mark.each_value
@pytest.mark.parametrize("rule", [(None, "bf16"), ("model.*", "bf16")])
@pytest.mark.parametrize("example", CAST)
def test_a_cast_leaves_the_tensors_of_quantized_weights_as_they_are(
    example: str, rule: tuple[str | None, str], tmp_path: Path
) -> None:
    scheme, method, spec = CAST[example]
    tensors = model(spec)
    source = folder_of(tensors, tmp_path / "in", config_of(method))
    report = run(
        Job(src=source, dst=tmp_path / "out", to="safetensors", dtype=(rule,), fsync=False)
    )
    written = load_file(tmp_path / "out/model.safetensors")
    plain = {"model.layers.0.mlp.up.bias", "model.norm.weight"}
    for key, tensor in tensors.items():
        assert written[key].dtype == (BF16 if key in plain else tensor.dtype), key
        assert key in plain or raw(written[key]) == raw(tensor), key
    floats = [dtype for dtype, _ in spec.values() if dtype.is_floating_point and dtype != BF16]
    assert any(f"of {scheme} weights keep their dtype" in note for note in report.notes) == bool(
        floats
    )


def test_a_glob_that_names_scales_reaches_them(tmp_path: Path) -> None:
    tensors = model(EXAMPLES["gptq"][2])
    source = folder_of(tensors, tmp_path / "in")
    run(
        Job(
            src=source,
            dst=tmp_path / "out",
            to="safetensors",
            dtype=(("*.scales", "fp32"),),
            fsync=False,
        )
    )
    written = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(
        written["model.layers.0.mlp.up.scales"], tensors["model.layers.0.mlp.up.scales"].float()
    )


@pytest.mark.parametrize("options", [{"dtype": ((None, "bf16"),)}, {"dequantize": "bf16"}])
def test_a_scheme_that_nobody_knows_is_refused_by_its_name(
    options: dict[str, Any], tmp_path: Path
) -> None:
    source = folder_of({"a.weight": torch.ones(2, 2)}, tmp_path / "in", config_of("nf3"))
    with pytest.raises(UnsupportedError, match="quantization method 'nf3'"):
        run(Job(src=source, dst=tmp_path / "out", to="safetensors", **options))


@pytest.mark.parametrize(
    "example",
    [
        example
        for example, (scheme, *_) in CAST.items()
        if "int8" not in scheme and scheme != "MXFP4"
    ],
)
def test_what_cannot_be_dequantized_is_refused_by_its_scheme(example: str) -> None:
    scheme, method, spec = CAST[example]
    catalog, _ = stored(model(spec))
    with pytest.raises(UnsupportedError) as caught:
        dequantize(catalog, config=config_of(method))
    assert f"ckpt cannot dequantize {scheme} weights" in caught.value.message


# --- int8 → wide
# --------------------------------------------------------------------------------------------------


def by_bitsandbytes(weight: torch.Tensor, scb: torch.Tensor) -> torch.Tensor:
    """``int8_vectorwise_dequant`` of bitsandbytes 0.50.2, ``_ops.py``, word for word."""
    return weight * scb.view(-1, 1) * 7.874015718698502e-3


def int8_by_bitsandbytes(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``int8_vectorwise_quant`` of the same, without outliers."""
    scb = wide.float().abs().amax(1)
    return torch.round(wide.float() * (127.0 / scb).view(-1, 1)).to(I8), scb


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("shape", [(1, 1), (16, 8), (3, 1_500_000), (2049, 700)])
def test_bitsandbytes_int8_becomes_wide_bit_for_bit(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randint(-128, 128, shape, generator=generator, dtype=I8)
    scb = torch.rand(shape[0], generator=generator) * 7 + 1e-4
    tensors = {
        "a.weight": weight,
        "a.SCB": scb,
        "a.weight_format": torch.tensor(0, dtype=U8),
        "a.bias": torch.ones(3),
    }
    catalog, store = stored(tensors)
    result = dequantize(catalog, name_of(dtype))
    assert list(result.catalog.tensors) == ["a.weight", "a.bias"]
    assert content(result.catalog, store, "a.weight") == raw(by_bitsandbytes(weight, scb).to(dtype))


@pytest.mark.parametrize("scale_shape", [(16, 1), (1,)])
@pytest.mark.parametrize("scale_dtype", [BF16, F16, F32])
def test_int8_of_compressed_tensors_becomes_wide(
    scale_shape: tuple[int, ...], scale_dtype: torch.dtype
) -> None:
    weight = (torch.arange(16 * 40).reshape(16, 40) % 256 - 128).to(I8)
    scale = (
        (torch.arange(1, 1 + torch.Size(scale_shape).numel()) / 300)
        .reshape(scale_shape)
        .to(scale_dtype)
    )
    catalog, store = stored({"a.weight": weight, "a.weight_scale": scale})
    result = dequantize(catalog, name_of(scale_dtype), config=config_of("compressed-tensors"))
    # compressed_tensors 0.20.0, forward_helpers.py: x_q.to(scale.dtype) * scale
    assert content(result.catalog, store, "a.weight") == raw(weight.to(scale_dtype) * scale)


@pytest.mark.parametrize(
    "change",
    [
        {"a.weight_scale": torch.ones(16, 4)},
        {"a.weight_zero_point": torch.ones(16, 1, dtype=I8)},
        {"a.weight_g_idx": torch.ones(8, dtype=I32)},
    ],
)
def test_int8_of_groups_or_with_zero_points_is_refused(change: dict[str, torch.Tensor]) -> None:
    tensors = {
        "a.weight": torch.ones(16, 8, dtype=I8),
        "a.weight_scale": torch.ones(16, 1),
        **change,
    }
    with pytest.raises(UnsupportedError, match="cannot dequantize compressed-tensors int8 weights"):
        dequantize(stored(tensors)[0], config=config_of("compressed-tensors"))


def test_numbers_in_another_order_than_rows_are_refused() -> None:
    tensors = {**model(EXAMPLES["bitsandbytes int8"][2])}
    tensors["model.layers.0.mlp.up.weight_format"] = torch.tensor(2, dtype=U8)
    catalog, store = stored(tensors)
    changed = dequantize(catalog).catalog
    with pytest.raises(UnsupportedError, match="a layout other than row-major"):
        content(changed, store, "model.layers.0.mlp.up.weight")


@pytest.mark.parametrize("scb", [torch.ones(8), torch.ones(16, 1), torch.ones(16, dtype=I32)])
def test_scales_that_do_not_fit_int8_weights_are_corrupt(scb: torch.Tensor) -> None:
    tensors = {"a.weight": torch.ones(16, 8, dtype=I8), "a.SCB": scb}
    with pytest.raises(CorruptError, match="do not fit the bitsandbytes int8 weight"):
        dequantize(stored(tensors)[0])


# --- Megatron
# --------------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def llama() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model whose linear layers are bitsandbytes' int8, and the same made wide by its own
    arithmetic.
    """
    shapes = {
        "model.embed_tokens.weight": (64, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (64, 32),
    }
    linear = {}
    for layer in ("model.layers.0.", "model.layers.1."):
        linear |= {
            f"{layer}self_attn.{name}_proj": (32 if name in "qo" else 16, 32) for name in "qkvo"
        }
        linear |= {
            f"{layer}mlp.gate_proj": (48, 32),
            f"{layer}mlp.up_proj": (48, 32),
            f"{layer}mlp.down_proj": (32, 48),
        }
        shapes |= {f"{layer}{name}_layernorm.weight": (32,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        key: torch.randn(shape, generator=generator).to(BF16) for key, shape in shapes.items()
    }
    wide = dict(tensors)
    for name, shape in linear.items():
        weight, scb = int8_by_bitsandbytes(torch.randn(shape, generator=generator).to(BF16))
        tensors |= {
            f"{name}.weight": weight,
            f"{name}.SCB": scb,
            f"{name}.weight_format": torch.tensor(0, dtype=U8),
        }
        wide[f"{name}.weight"] = by_bitsandbytes(weight, scb).to(BF16)
    return tensors, wide


INT8 = {**LLAMA, "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}


def test_int8_becomes_megatrons_weights_by_dequantize_only(tmp_path: Path) -> None:
    tensors, wide = llama()
    source = folder_of(tensors, tmp_path / "int8", INT8)
    job = Job(src=source, dst=tmp_path / "out", to="megatron", fsync=False)
    with pytest.raises(UnsupportedError, match=r"bitsandbytes int8.*--dequantize bf16"):
        run(job)
    with pytest.raises(UsageError, match=r"keeps .* but drops its scales .*SCB.*--dequantize bf16"):
        run(replace(job, exclude=("*.SCB", "*.weight_format")))
    bare = {
        key: tensor
        for key, tensor in tensors.items()
        if not key.endswith((".SCB", ".weight_format"))
    }
    with pytest.raises(
        CorruptError, match="the tensor is int8, but config.json declares no quantization"
    ):
        run(replace(job, src=folder_of(bare, tmp_path / "bare", LLAMA)))
    assert not (tmp_path / "out").exists()
    run(replace(job, dequantize="bf16"))
    run(replace(job, src=folder_of(wide, tmp_path / "wide", LLAMA), dst=tmp_path / "wanted"))
    name = "iter_0000001/mp_rank_00/model_optim_rng.pt"
    ours, wanted = (
        torch.load(tmp_path / folder / name, weights_only=False) for folder in ("out", "wanted")
    )
    assert ours["model"].keys() == wanted["model"].keys()
    for key, tensor in wanted["model"].items():
        assert tensor is None or raw(tensor) == raw(ours["model"][key]), key


def test_int8_stays_as_it_is_under_its_own_names_or_becomes_wide_without_a_quantization_config(
    tmp_path: Path,
) -> None:
    tensors, wide = llama()
    source = folder_of(tensors, tmp_path / "int8", INT8)
    run(Job(src=source, dst=tmp_path / "same", to="hf", fsync=False))
    same = load_file(tmp_path / "same/model.safetensors")
    assert {key: raw(tensor) for key, tensor in same.items()} == {
        key: raw(tensor) for key, tensor in tensors.items()
    }
    run(
        Job(src=source, dst=tmp_path / "wide", to="hf", dequantize="bf16", verify=True, fsync=False)
    )
    written = load_file(tmp_path / "wide/model.safetensors")
    assert {key: raw(tensor) for key, tensor in written.items()} == {
        key: raw(tensor) for key, tensor in wide.items()
    }
    assert "quantization_config" not in json.loads((tmp_path / "wide/config.json").read_text())


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_numbers_without_scales_become_nobodys_weights(dtype: str) -> None:
    _, wide = llama()
    catalog, _ = stored(wide)
    model = to_megatron(catalog, LLAMA)
    key = next(key for key in model.tensors if key.endswith("linear_proj.weight"))
    narrow = replace(
        model, tensors={**model.tensors, key: replace(model.tensors[key], dtype=dtype)}
    )
    with pytest.raises(UnsupportedError, match=f"{dtype} values, which are meaningless"):
        to_hf(narrow, has_config=False)
