"""float8 with scales, both ways, against torch bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from core.arrays.box import Box, full_box
from core.engine.catalog.catalog import Catalog, StoredObject, catalog_of_arrays
from core.engine.catalog.decoded import DecodedStore
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment, Tensor
from core.engine.changes.quantize import dequantize, quantize
from core.engine.quantize.source import source_of
from core.errors import (
    CorruptError,
    MissingShardError,
    ReplicaMismatchError,
    TruncatedError,
    UnsupportedError,
    UsageError,
)
from core.files.store import MemoryStore
from core.pickle.inert import TensorLeaf
from tests.support.fragments import with_fragments
from tests.support.late_items import ItemAt
from tests.support.ties import tied

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(1, 1), (128, 128), (129, 127), (5, 300), (300, 5), (257, 384), (128, 1000)]


def seeded(key: str) -> torch.Generator:
    return torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "little")
    )


def weights(key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values of widely different size, zeros among them."""
    generator = seeded(key)
    values = torch.randn(shape, generator=generator) * torch.exp(
        4 * torch.randn(shape, generator=generator)
    )
    return torch.where(torch.rand(shape, generator=generator) < 0.05, 0.0, values).to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stored(tensors: Mapping[str, torch.Tensor], **more: object) -> tuple[Catalog, MemoryStore]:
    """Every tensor in a file of its own, behind 3 other bytes."""
    arrays = {
        key: StoredArray(key, name_of(value.dtype), tuple(value.shape), Extent(f"f/{key}", 3))
        for key, value in tensors.items()
    }
    store = MemoryStore({f"f/{key}": b"abc" + raw(value) for key, value in tensors.items()})
    return catalog_of_arrays(format="test", arrays=arrays, **more), store  # type: ignore[arg-type]


def content(catalog: Catalog, store: MemoryStore, key: str) -> bytes:
    """The dense bytes of a tensor that is one array, read through the engine's own store."""
    (fragment,) = catalog.fragments(key)
    assert fragment.array is not None
    assert fragment.box == full_box(catalog.tensors[key].shape)
    assert (fragment.array.dtype, fragment.array.shape) == (
        catalog.tensors[key].dtype,
        catalog.tensors[key].shape,
    )
    decoded = DecodedStore(store)
    array = decoded.placed(fragment.array.locate(store))
    return decoded.read(array.extent.file, array.extent.offset, array.n_bytes)


def expanded(
    scale: torch.Tensor, shape: Sequence[int], block: tuple[int, int] = (128, 128)
) -> torch.Tensor:
    """The scales of blocks, one for each element."""
    wide = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return wide[..., : shape[-2], : shape[-1]]


def reference_quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of core.engine.quantize.to_float8, written in torch."""
    wide = weight.float()
    rows, columns = (-(-n // 128) for n in weight.shape)
    scale = torch.empty(rows, columns)
    out = torch.empty(weight.shape)
    for i in range(rows):
        for j in range(columns):
            part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale_of_block = wide[part].abs().max() / torch.tensor(448.0)
            scale[i, j] = scale_of_block if scale_of_block != 0 else 1.0
            out[part] = (wide[part] / scale[i, j]).clamp(-448, 448)
    return out.to(E4M3), scale


# --- dequantize
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_blocks_are_multiplied_out_as_torch_does_it(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = weights("w", shape, torch.float32).clamp(-448, 448).to(E4M3)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=seeded("s")) * 3
    catalog, store = stored({"a.weight": weight, "a.weight_scale_inv": scale, "b": torch.ones(2)})
    result = dequantize(catalog, name_of(dtype))
    assert result.keys == ("a.weight",)
    assert list(result.catalog.tensors) == ["a.weight", "b"]
    wanted = (weight.float() * expanded(scale, shape)).to(dtype)
    assert content(result.catalog, store, "a.weight") == raw(wanted)
    assert result.catalog.fragments("b") == catalog.fragments("b")


@pytest.mark.parametrize(
    ("suffix", "scale_shape"),
    [
        ("_scale_inv", ()),
        ("_scale_inv", (1,)),
        ("_scale", (1,)),
        ("_scale", (1, 1)),
        ("_scale", (300, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_scale_a_tensor_or_a_row(
    suffix: str, scale_shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = weights("w", (300, 200), torch.float32).clamp(-448, 448).to(E4M3)
    scale = (torch.rand(scale_shape, generator=seeded("s")) + 0.1).to(dtype)
    catalog, store = stored({"a.weight": weight, f"a.weight{suffix}": scale})
    changed = dequantize(catalog).catalog
    assert content(changed, store, "a.weight") == raw(
        (weight.float() * scale.float()).to(torch.bfloat16)
    )


def test_every_pattern_of_float8_comes_out_right() -> None:
    for kind in (E4M3, E5M2):
        weight = torch.arange(256, dtype=torch.uint8).view(kind).reshape(2, 128)
        scale = torch.tensor([[0.37]])
        catalog, store = stored({"w": weight, "w_scale_inv": scale})
        values = torch.frombuffer(
            bytearray(content(dequantize(catalog).catalog, store, "w")), dtype=torch.bfloat16
        )
        wanted = (weight.float() * scale).to(torch.bfloat16).reshape(-1)
        assert torch.equal(values.isnan(), wanted.isnan())
        assert torch.equal(values[~values.isnan()], wanted[~wanted.isnan()])


def test_stacked_experts_have_blocks_of_their_own_and_units_may_end_inside_one() -> None:
    weight = (
        weights("w", (3, 200, 4096), torch.float32).clamp(-448, 448).to(E4M3)
    )  # a unit is 512 rows
    scale = torch.rand(3, 2, 32, generator=seeded("s"))
    catalog, store = stored({"w": weight, "w_scale_inv": scale})
    wanted = (weight.float() * expanded(scale, weight.shape)).to(torch.bfloat16)
    assert content(dequantize(catalog).catalog, store, "w") == raw(wanted)


def test_scales_that_are_powers_of_two_in_eight_bits() -> None:
    weight = weights("w", (130, 130), torch.float32).clamp(-448, 448).to(E4M3)
    scale = torch.tensor([[120, 127], [128, 130]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    catalog, store = stored({"w": weight, "w_scale_inv": scale})
    wanted = (weight.float() * expanded(scale, weight.shape)).to(torch.bfloat16)
    assert content(dequantize(catalog).catalog, store, "w") == raw(wanted)


def test_other_blocks_are_taken_when_they_are_stated() -> None:
    weight = weights("w", (100, 70), torch.float32).clamp(-448, 448).to(E4M3)
    scale = torch.rand(4, 2, generator=seeded("s"))
    catalog, store = stored({"w": weight, "w_scale_inv": scale})
    with pytest.raises(CorruptError, match="128 × 128"):
        dequantize(catalog)
    values = content(dequantize(catalog, "float32", block=(32, 64)).catalog, store, "w")
    assert values == raw(weight.float() * expanded(scale, weight.shape, (32, 64)))


@pytest.mark.parametrize("shape", [(0, 128), (128, 0)])
def test_empty_tensors_stay_empty(shape: tuple[int, int]) -> None:
    scale = torch.ones(tuple(-(-n // 128) for n in shape))
    catalog, store = stored({"w": torch.empty(shape).to(E4M3), "w_scale_inv": scale})
    assert content(dequantize(catalog).catalog, store, "w") == b""


def test_float8_without_scales_is_left_alone_and_told() -> None:
    w = torch.ones(2, 2).to(E4M3)
    catalog, _ = stored(
        {
            "a": w,
            "a_scale_inv": torch.ones(()),
            "b": w,
            "c.weight": w,
            "c.input_scale": torch.ones(()),
        }
    )
    result = dequantize(catalog)
    assert result.remaining == ("b", "c.weight")
    assert result.catalog.tensors["b"].dtype == "float8_e4m3fn"
    assert any("b and 1 more" in note for note in result.notes)
    assert any("c.input_scale" in note for note in result.notes)


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        ("mlp.up_proj.weight", "mlp.up_proj.input_scale"),
        ("mlp.up_proj.weight", "mlp.up_proj.activation_scale"),
        ("mlp.experts.down_proj", "mlp.experts.down_proj_activation_scale"),
        ("mlp.experts.down_proj", "mlp.experts.down_proj_input_scale"),
        ("mlp.experts.w13_weight", "mlp.experts.w13_input_scale"),
        ("weight", "input_scale"),
    ],
)
def test_scales_of_activations_leave_with_those_of_the_weights(weight: str, scale: str) -> None:
    numbers, unit = torch.ones(2, 2).to(E4M3), torch.ones(())
    catalog, _ = stored({weight: numbers, f"{weight}_scale_inv": unit, scale: unit})
    result = dequantize(catalog)
    assert list(result.catalog.tensors) == [weight]
    assert f"{scale}: activation scales, dropped" in result.notes


@pytest.mark.parametrize("scale", ["own.input_scale", "own_input_scale", "alone.input_scale"])
def test_a_parameter_that_is_called_like_a_scale_stays_beside_other_weights(scale: str) -> None:
    tensors = {
        "w.weight": torch.ones(2, 2).to(E4M3),
        "w.weight_scale_inv": torch.ones(()),
        "own.weight": torch.ones(2, 2),
        "own": torch.ones(2),
        scale: torch.ones(2),
    }
    catalog, store = stored(tensors)
    result = dequantize(catalog)
    assert content(result.catalog, store, scale) == raw(tensors[scale])
    assert not any("activations" in note for note in result.notes)


@pytest.mark.parametrize(
    ("tensors", "error", "text"),
    [
        ({"w": torch.ones(2, 2)}, UsageError, "no float8, int8 or MXFP4 tensor"),
        (
            {"w": torch.ones(2, 2).to(E4M3)},
            UsageError,
            "no float8, int8 or MXFP4 tensor has scales",
        ),
        ({"w_scale_inv": torch.ones(1, 1)}, CorruptError, "is missing"),
        (
            {"w": torch.ones(2, 2).to(E4M3), "w_scale_inv": torch.ones(2, 2)},
            CorruptError,
            "do not fit",
        ),
        (
            {"w": torch.ones(130, 2).to(E4M3), "w_scale_inv": torch.ones(1, 2)},
            CorruptError,
            "do not fit",
        ),
        ({"w": torch.ones(130).to(E4M3), "w_scale_inv": torch.ones(2)}, CorruptError, "do not fit"),
        (
            {"w": torch.ones(2, 2).to(E4M3), "w_scale_inv": torch.ones(1, 1).int()},
            CorruptError,
            "not a valid dtype for scales",
        ),
        (
            {"w": torch.ones(2, 2).to(E4M3), "w_scale": torch.ones(1, 1).to(E4M3)},
            CorruptError,
            "not a valid dtype for scales",
        ),
    ],
)
def test_scales_that_do_not_fit_are_errors_by_name(
    tensors: dict[str, torch.Tensor], error: type[Exception], text: str
) -> None:
    catalog, _ = stored(tensors)
    with pytest.raises(error, match=text):
        dequantize(catalog)


@pytest.mark.parametrize(
    ("dtype", "error"), [("int32", UsageError), ("fp8", UsageError), ("f7", UsageError)]
)
def test_only_wider_floats_can_be_asked_for(dtype: str, error: type[Exception]) -> None:
    catalog, _ = stored({"w": torch.ones(2, 2).to(E4M3), "w_scale_inv": torch.ones(1, 1)})
    with pytest.raises(error):
        dequantize(catalog, dtype)


def test_scales_leave_the_skeleton_and_aliases_need_equal_scales() -> None:
    w, s = torch.ones(2, 2).to(E4M3), torch.ones(1, 1)
    tensors = {"a": w, "a_scale_inv": s, "b": w, "b_scale_inv": s, "c": w, "c_scale_inv": 2 * s}
    catalog, _ = stored(tensors, skeleton={key: TensorLeaf(key) for key in tensors})
    changed = dequantize(tied(catalog, {"b": "a", "c": "a", "b_scale_inv": "a_scale_inv"})).catalog
    assert changed.skeleton == {key: TensorLeaf(key) for key in "abc"}
    assert changed.ties == {"b": "a"}


# --- quantize
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *product(SHAPES, (torch.bfloat16, torch.float16, torch.float32, torch.float64)),
        ((700, 8500), torch.bfloat16),  # several units, and parts of a row of blocks
    ],
)
def test_blocks_are_made_as_the_definition_says(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = weights("w", shape, torch.float32).clamp(-6e4, 6e4).to(dtype)
    catalog, store = stored({"a.weight": weight, "a.bias": torch.ones(3)})
    result = quantize(catalog, [(None, "block")])
    assert list(result.catalog.tensors) == ["a.weight", "a.weight_scale_inv", "a.bias"]
    numbers, scale = reference_quantized(weight)
    assert content(result.catalog, store, "a.weight") == raw(numbers)
    assert content(result.catalog, store, "a.weight_scale_inv") == raw(scale)
    again = quantize(catalog, [(None, "block")]).catalog
    assert content(again, store, "a.weight_scale_inv") == raw(
        scale
    )  # without the numbers having been made before


@pytest.mark.parametrize("shape", [(1, 1), (129, 300), (700, 8500)])
def test_one_scale_for_a_tensor(shape: tuple[int, int]) -> None:
    weight = weights("w", shape)
    catalog, store = stored({"a.weight": weight})
    changed = quantize(catalog, [("a.weight", "tensor")]).catalog
    scale = weight.float().abs().max() / torch.tensor(448.0)
    assert changed.tensors["a.weight_scale"].shape == (1,)
    assert content(changed, store, "a.weight") == raw(
        (weight.float() / scale).clamp(-448, 448).to(E4M3)
    )
    assert content(changed, store, "a.weight_scale") == raw(scale)


def test_zeros_and_numbers_too_small_for_a_scale_have_scale_one() -> None:
    for value in (0.0, 1e-45, -3e-43):
        weight = torch.full((130, 5), value)
        numbers, scale = reference_quantized(weight)
        assert scale.unique().tolist() == [1.0]
        catalog, store = stored({"a.weight": weight})
        changed = quantize(catalog, [(None, "block")]).catalog
        assert content(changed, store, "a.weight") == raw(numbers)
        assert content(changed, store, "a.weight_scale_inv") == raw(scale)


def test_a_cast_before_it_counts() -> None:
    from core.opening.target import retyped

    weight = weights("w", (130, 140), torch.float32)
    catalog, store = stored({"a.weight": weight})
    changed = quantize(retyped(catalog, lambda key, tensor: "bfloat16"), [(None, "block")]).catalog
    numbers, scale = reference_quantized(weight.to(torch.bfloat16))
    assert content(changed, store, "a.weight") == raw(numbers)
    assert content(changed, store, "a.weight_scale_inv") == raw(scale)


@pytest.mark.parametrize("kind", ["block", "tensor"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused_by_name(value: float, kind: str) -> None:
    weight = weights("w", (300, 20))
    weight[200, 7] = value
    catalog, store = stored({"a.weight": weight})
    changed = quantize(catalog, [(None, kind)]).catalog
    for key in changed.tensors:
        with pytest.raises(UnsupportedError, match="not finite") as caught:
            content(changed, store, key)
        assert caught.value.key == "a.weight"


def test_what_is_quantised_and_dequantised_again_is_what_torch_makes_of_it() -> None:
    weight = weights("w", (300, 260))
    catalog, store = stored({"a.weight": weight})
    back = dequantize(quantize(catalog, [(None, "block")]).catalog).catalog
    numbers, scale = reference_quantized(weight)
    wanted = (numbers.float() * expanded(scale, weight.shape)).to(torch.bfloat16)
    assert content(back, store, "a.weight") == raw(wanted)


DEEPSEEK = [
    ("model.embed_tokens.weight", False),
    ("model.layers.0.self_attn.q_a_proj.weight", True),
    ("model.layers.0.self_attn.q_a_layernorm.weight", False),
    ("model.layers.0.self_attn.q_b_proj.weight", True),
    ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", True),
    ("model.layers.0.self_attn.kv_b_proj.weight", True),
    ("model.layers.0.self_attn.o_proj.weight", True),
    ("model.layers.0.mlp.gate_proj.weight", True),
    ("model.layers.3.mlp.gate.weight", False),
    ("model.layers.3.mlp.experts.0.down_proj.weight", True),
    ("model.layers.3.mlp.shared_experts.up_proj.weight", True),
    ("model.layers.61.eh_proj.weight", False),
    ("model.layers.61.shared_head.head.weight", False),
    ("lm_head.weight", False),
    ("embedding.word_embeddings.weight", False),
    ("embedding.position_embeddings.weight", False),
    ("decoder.layers.0.self_attention.linear_qkv.weight", True),
    ("decoder.layers.0.mlp.linear_fc1.weight", True),
    ("decoder.layers.0.mlp.router.weight", False),
    ("output_layer.weight", False),
    ("optimizer.state.model.layers.0.mlp.up_proj.weight.exp_avg", False),
    ("exp_avg.model.layers.0.mlp.up_proj.weight", False),
]


def test_by_default_what_deepseek_quantises_is_quantised() -> None:
    arrays = {key: StoredArray(key, "bfloat16", (2, 2), Extent("f", 0)) for key, _ in DEEPSEEK}
    arrays["model.layers.0.mlp.up_proj.bias"] = StoredArray("b", "bfloat16", (2,), Extent("f", 0))
    arrays["model.norm.weight"] = StoredArray("n", "bfloat16", (2,), Extent("f", 0))
    arrays["ids.weight"] = StoredArray("i", "int64", (2, 2), Extent("f", 0))
    result = quantize(catalog_of_arrays(format="test", arrays=arrays), [(None, "block")])
    assert result.keys == tuple(key for key, is_quantized in DEEPSEEK if is_quantized)
    assert "model.layers.3.mlp.gate.weight" in result.remaining
    assert not any("exp_avg" in key for key in result.remaining)


def test_later_rules_win_and_none_takes_out() -> None:
    arrays = {
        f"l.{n}.weight": StoredArray(f"{n}", "bfloat16", (2, 2), Extent("f", 0)) for n in range(4)
    }
    catalog = catalog_of_arrays(format="test", arrays=arrays)
    changed = quantize(
        catalog, [(None, "block"), ("l.[1-2]*", "tensor"), ("l.2.*", "none")]
    ).catalog
    shapes = {
        key: tensor.shape for key, tensor in changed.tensors.items() if key.endswith("_scale_inv")
    }
    assert shapes == {
        "l.0.weight_scale_inv": (1, 1),
        "l.1.weight_scale_inv": (),
        "l.3.weight_scale_inv": (1, 1),
    }


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ([("a*", "rows")], "not one of"),
        ([("nothing*", "block")], "nothing"),
        ([("norm", "block")], "no matrix"),
        ([("a.weight", "block")], "already"),
    ],
)
def test_rules_that_cannot_be_met_are_usage_errors(rules: list[tuple[str, str]], text: str) -> None:
    catalog, _ = stored(
        {"a.weight": torch.ones(2, 2), "a.weight_scale_inv": torch.ones(2), "norm": torch.ones(2)}
    )
    with pytest.raises(UsageError, match=text):
        quantize(catalog, rules)


def test_without_a_linear_weight_the_default_is_an_error() -> None:
    catalog, _ = stored({"lm_head.weight": torch.ones(2, 2), "conv.weight": torch.ones(2, 2, 2)})
    with pytest.raises(UsageError, match="weight of a linear layer"):
        quantize(catalog, [(None, "block")])
    assert quantize(catalog, [("conv.weight", "block")]).keys == ("conv.weight",)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "shape", [(3, 256, 130), (3, 200, 70), (2, 3, 129, 5), (9, 1000, 1100), (0, 4, 4), (2, 0, 4)]
)
@pytest.mark.parametrize("kind", ["block", "tensor"])
def test_stacked_layers_and_experts_are_many_matrices(shape: tuple[int, ...], kind: str) -> None:
    weight = weights("w", shape)
    catalog, store = stored({"model.layers.up.weight": weight})
    changed = quantize(catalog, [(None, kind)]).catalog
    parts = (
        [reference_quantized(matrix) for matrix in weight.reshape(-1, *shape[-2:])]
        if weight.numel()
        else []
    )
    if kind == "block":
        scale = b"".join(raw(part) for _, part in parts)
        numbers = b"".join(raw(part) for part, _ in parts)
    else:
        most = weight.float().abs().max() / 448 if parts else torch.tensor(1.0)
        scale, numbers = raw(most), raw((weight.float() / most).clamp(-448, 448).to(E4M3))
    scales_key = f"model.layers.up.weight_scale{'_inv' if kind == 'block' else ''}"
    assert content(changed, store, scales_key) == scale
    assert content(changed, store, "model.layers.up.weight") == numbers
    if parts and kind == "block":
        back = content(dequantize(changed).catalog, store, "model.layers.up.weight")
        wide = [(a.float() * expanded(s, a.shape)).to(torch.bfloat16) for a, s in parts]
        assert back == b"".join(map(raw, wide))


def test_scales_stand_beside_their_tensors_in_the_skeleton() -> None:
    catalog, _ = stored(
        {"model.a.weight": torch.ones(2, 2)},
        skeleton={"model": {"a.weight": TensorLeaf("model.a.weight")}, "note": "x"},
        objects={"note": StoredObject("note", value="x")},
    )
    changed = quantize(catalog, [(None, "block")]).catalog
    assert changed.skeleton == {
        "model": {
            "a.weight": TensorLeaf("model.a.weight"),
            "a.weight_scale_inv": TensorLeaf("model.a.weight_scale_inv"),
        },
        "note": "x",
    }


# --- where the source lies
# --------------------------------------------------------------------------------------------


def cut(
    tensor: torch.Tensor, boxes: Sequence[Box], *, key: str = "a.weight"
) -> tuple[Catalog, MemoryStore]:
    """A tensor in pieces: every second one transposed in its file, every third one late-bound."""
    fragments, files = [], {}
    for number, box in enumerate(boxes):
        part = tensor[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))]
        name = f"f{number}"
        strides = None
        data = raw(part)
        if number % 2:
            strides, data = (1, box.shape[0]), raw(part.t().contiguous())
        plain = StoredArray(name, name_of(tensor.dtype), box.shape, Extent(name, 7, strides))
        files[name] = bytes(7) + data
        array = plain
        if number % 3 == 2:
            array = replace(plain, extent=Extent(name, 0, item=ItemAt(plain.extent)))
        fragments.append(Fragment(box, array, (0, 0)))
    catalog = Catalog(
        "test",
        None,
        with_fragments(
            {key: Tensor(name_of(tensor.dtype), tuple(tensor.shape))}, lambda _: fragments
        ),
    )
    return catalog, MemoryStore(files)


GRID = [
    Box((r, c), (h, w))
    for r, h in ((0, 100), (100, 37), (137, 163))
    for c, w in ((0, 33), (33, 200), (233, 67))
]


@pytest.mark.parametrize("kind", ["block", "tensor"])
def test_pieces_strides_and_late_addresses_make_no_difference(kind: str) -> None:
    weight = weights("w", (300, 300))
    catalog, store = cut(weight, GRID)
    plain, plain_store = stored({"a.weight": weight})
    cut_up, whole = (quantize(each, [(None, kind)]).catalog for each in (catalog, plain))
    for key in cut_up.tensors:
        assert content(cut_up, store, key) == content(whole, plain_store, key)


def test_a_band_may_come_from_encoded_arrays() -> None:
    weight = weights("w", (300, 300), torch.float32).clamp(-448, 448).to(E4M3)
    scale = torch.rand(3, 3, generator=seeded("s"))
    catalog, store = stored({"a.weight": weight, "a.weight_scale_inv": scale})
    wide = dequantize(catalog, "float32").catalog
    numbers, scales = reference_quantized(weight.float() * expanded(scale, weight.shape))
    changed = quantize(wide, [(None, "block")]).catalog
    assert content(changed, store, "a.weight") == raw(numbers)
    assert content(changed, store, "a.weight_scale_inv") == raw(scales)


def test_a_hole_is_found_before_anything_is_read() -> None:
    catalog, _ = cut(weights("w", (300, 300)), GRID[:-1])
    changed = quantize(catalog, [(None, "block")]).catalog
    with pytest.raises(MissingShardError, match=r"\(137, 233\)"):
        changed.fragments("a.weight")


def test_replicas_are_compared() -> None:
    weight = weights("w", (300, 300))
    again = Box((90, 20), (60, 100))
    catalog, store = cut(weight, [*GRID, again])
    source = source_of(catalog, "a.weight")
    assert bytes(source.read(store, full_box((300, 300)))) == raw(weight)
    files = {name: bytearray(store.read(name, 0, store.size(name))) for name in store.files()}
    files[f"f{len(GRID)}"][-1] ^= 1
    broken = MemoryStore({name: bytes(data) for name, data in files.items()})
    with pytest.raises(ReplicaMismatchError) as caught:
        content(quantize(catalog, [(None, "block")]).catalog, broken, "a.weight")
    assert caught.value.key == "a.weight"


def test_zeros_by_rule_and_layers_of_a_stack_are_read() -> None:
    stack = weights("s", (3, 4, 5))
    array = StoredArray("s", "bfloat16", (3, 4, 5), Extent("s", 0))
    fragments = [
        Fragment(Box((0, 0), (4, 5)), array, (1, 0, 0)),
        Fragment(Box((4, 0), (2, 5)), None, ()),
    ]
    catalog = Catalog(
        "test", None, with_fragments({"w": Tensor("bfloat16", (6, 5))}, lambda _: fragments)
    )
    source = source_of(catalog, "w")
    data = source.read(MemoryStore({"s": raw(stack)}), Box((2, 1), (3, 4)))
    assert bytes(data) == raw(
        torch.cat([stack[1], torch.zeros(2, 5, dtype=torch.bfloat16)])[2:5, 1:5]
    )


@pytest.mark.parametrize(
    ("box", "at", "shape"),
    [
        (Box((0, 0), (2, 3)), (0, 0), (2, 2)),
        (Box((0, 0), (2, 2)), (1, 0), (2, 2)),
        (Box((1, 0), (2, 2)), (0, 0), (2, 2)),
        (Box((0,), (2,)), (0,), (2,)),
    ],
)
def test_pieces_that_lie_outside_are_corrupt(
    box: Box, at: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    fragment = Fragment(box, StoredArray("w", "bfloat16", shape, Extent("f", 0)), at)
    catalog = Catalog(
        "test", None, with_fragments({"w": Tensor("bfloat16", (2, 2))}, lambda _: [fragment])
    )
    with pytest.raises(CorruptError, match="does not fit"):
        source_of(catalog, "w")


def test_several_dtypes_and_short_files_are_errors() -> None:
    fragments = [
        Fragment(Box((n, 0), (1, 2)), StoredArray(f"w{n}", dtype, (1, 2), Extent("f", 0)), (0, 0))
        for n, dtype in enumerate(("bfloat16", "float16"))
    ]
    tensor = Tensor("bfloat16", (2, 2))
    with pytest.raises(CorruptError, match="stored partly as"):
        source_of(Catalog("test", None, with_fragments({"w": tensor}, lambda _: fragments)), "w")
    catalog, store = stored({"a.weight": weights("w", (200, 200))})
    short = MemoryStore({"f/a.weight": store.read("f/a.weight", 0, 50_000)})
    with pytest.raises(TruncatedError):
        content(quantize(catalog, [(None, "block")]).catalog, short, "a.weight")


def test_an_encoding_is_a_value_that_compares_by_what_it_holds() -> None:
    catalog, _ = stored({"a.weight": torch.ones(2, 2), "b.weight": torch.ones(2, 2)})
    first, again = (quantize(catalog, [(None, "block")]).catalog for _ in range(2))
    assert first.fragments("a.weight") == again.fragments("a.weight")
    assert first.fragments("a.weight") != first.fragments("b.weight")
    (fragment,) = first.fragments("a.weight")
    assert fragment.array is not None
    encoding = fragment.array.extent.encoding
    assert encoding is not None
    assert (encoding.name, encoding.unit_bytes % 128) == ("float8 blocks", 0)
    assert 0 < encoding.working_bytes < 32 << 20


@pytest.mark.parametrize("shape", [(1 << 20, 1 << 18), (2, (1 << 20) + 1, 1 << 18)])
def test_memory_stays_bounded_for_large_tensors(shape: tuple[int, ...]) -> None:
    arrays = {"layers.weight": StoredArray("a", "bfloat16", shape, Extent("f", 0))}
    changed = quantize(catalog_of_arrays(format="test", arrays=arrays), [(None, "block")]).catalog
    assert changed.tensors.keys() == {"layers.weight", "layers.weight_scale_inv"}
    for key in changed.tensors:
        (fragment,) = changed.fragments(key)
        assert fragment.array is not None
        encoding = fragment.array.extent.encoding
        assert encoding is not None
        assert encoding.unit_bytes <= 128 << 18
        assert encoding.working_bytes < 64 << 20


def test_torch_float8_rounding_agrees_with_ours_on_every_tie() -> None:
    """The definition leans on ml_dtypes for one step; here it is torch's for every float8 tie and
    its neighbours.
    """
    values = torch.arange(0x00, 0x7F, dtype=torch.uint8).view(E4M3).float()
    ties = (values[:-1] + values[1:]) / 2
    both = torch.cat(
        [ties, torch.nextafter(ties, torch.zeros(())), torch.nextafter(ties, torch.full((), 1e9))]
    )
    weight = torch.cat([both, -both, torch.full((1,), 448.0)]).reshape(1, -1)[:, -128:]
    weight[0, 0] = 448.0
    catalog, store = stored({"a.weight": weight})
    changed = quantize(catalog, [(None, "tensor")]).catalog
    assert np.frombuffer(content(changed, store, "a.weight_scale"), "f4").tolist() == [1.0]
    assert content(changed, store, "a.weight") == raw(weight.to(E4M3))
