"""Differences by layer and module, for the names of Megatron, Hugging Face and others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from core.engine.catalog.tensor import Tensor
from core.engine.numbers.difference import ValueDifference, compare_elements
from core.verbs.diff.result import TensorDiff
from core.verbs.diff.run import DiffJob, diff
from core.verbs.pictures.heat import HeatMap, HeatScale, heat_maps, scale_heat


def tensor(key: str, kind: str = "equal", *, relative: float = 0, n_nan: int = 0) -> TensorDiff:
    values = None
    if kind == "values":
        values = ValueDifference(
            n_elements=9, n_differing=3, n_nan=n_nan, square_a=1.0, square_delta=relative**2
        )
    return TensorDiff(key=key, kind=kind, a=Tensor("uint8", (9,)), values=values)


def maps_of(*tensors: TensorDiff | str) -> dict[str, HeatMap]:
    """Return the maps of tensors; a bare key stands for an equal one."""
    members = [tensor(item) if isinstance(item, str) else item for item in tensors]
    return {heat.part: heat for heat in heat_maps(members)}


@pytest.mark.parametrize(
    ("start", "stack"),
    [
        ("decoder.layers.", "layers"),  # Megatron
        ("model.layers.", "layers"),  # Hugging Face: Llama
        ("h.", "h"),  # GPT-2
        ("transformer.h.", "h"),
        ("blocks.", "blocks"),
        ("module.gpt_neox.layers.", "layers"),
        ("", "layer"),  # torch.nn.Sequential
    ],
)
def test_layers_are_rows_whatever_their_list_is_called(start: str, stack: str) -> None:
    names = ("attn.q.weight", "norm")
    keys = [f"{start}{layer}.{name}" for layer in (0, 2, 10) for name in names]
    heat = maps_of(*reversed(keys), "embed.weight")["model"]
    assert (heat.stack, heat.layers, heat.modules) == (stack, (0, 2, 10), names)
    assert [[cell and cell.keys for cell in row] for row in heat.cells] == [
        [(f"{start}{layer}.{name}",) for name in names] for layer in (0, 2, 10)
    ]
    assert [cell.keys for cell in heat.outside] == [("embed.weight",)]


def test_optimizer_states_are_apart_from_the_weights() -> None:
    weights = [f"decoder.layers.{n}.mlp.w" for n in range(2)]
    states = [f"optimizer.state.{name}.{key}" for name in ("exp_avg", "fp32") for key in weights]
    maps = maps_of(*weights, *states, "optimizer.state.exp_avg.embed", "embed")
    assert maps["model"].modules == ("mlp.w",)
    assert maps["optimizer"].modules == ("exp_avg.mlp.w", "fp32.mlp.w")
    assert maps["optimizer"].layers == maps["model"].layers == (0, 1)
    assert [cell.keys for cell in maps["optimizer"].outside] == [("optimizer.state.exp_avg.embed",)]
    # FSDP puts the state behind the parameter, torch optimizers number their parameters.
    maps = maps_of("optim.state.layers.0.w.exp_avg", "optim.state.layers.0.w.exp_avg_sq")
    assert maps["optimizer"].modules == ("w.exp_avg", "w.exp_avg_sq")
    maps = maps_of("optimizer.state.0.exp_avg", "optimizer.state.1.exp_avg")
    assert (maps["optimizer"].stack, maps["optimizer"].modules) == ("state", ("exp_avg",))


def test_encoder_and_decoder_have_columns_of_their_own() -> None:
    keys = [f"model.{side}.layers.{n}.fc.w" for side in ("encoder", "decoder") for n in range(2)]
    heat = maps_of(*keys[:3])["model"]
    assert heat.modules == ("decoder.fc.w", "encoder.fc.w")
    assert [[cell is not None for cell in row] for row in heat.cells] == [
        [True, True],
        [False, True],
    ]


def test_experts_are_folded_and_few_numbers_are_not() -> None:
    keys = [
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
        for layer in (1, 2)
        for expert in range(layer, 8)
        for name in ("w1", "w2")
    ]
    gates = [f"model.layers.{layer}.gate.{number}.weight" for layer in (1, 2) for number in (0, 2)]
    heat = maps_of(*keys, *gates)["model"]
    assert heat.modules == (
        "gate.0.weight", "gate.2.weight", "mlp.experts.[1-7].w1.weight",
        "mlp.experts.[1-7].w2.weight",
    )  # fmt: skip
    cell = heat.cells[0][2]
    assert cell is not None and len(cell.keys) == 7


def test_a_cell_has_the_most_serious_result_of_its_tensors() -> None:
    experts = [
        tensor("layers.0.e.0.w", "values", relative=0.25),
        tensor("layers.0.e.1.w", "values", relative=0.5, n_nan=2),
        tensor("layers.0.e.2.w", "equal"),
        tensor("layers.0.e.3.w", "close"),
    ]
    ((cell,),) = maps_of(*experts)["model"].cells
    assert cell is not None
    assert (cell.kind, cell.relative, cell.n_different, cell.n_nan) == ("values", 0.5, 6, 2)
    ((cell,),) = maps_of(*experts[:3], tensor("layers.0.e.3.w", "shape"))["model"].cells
    assert cell is not None and (cell.kind, cell.relative) == ("shape", 0.5)


def test_tensors_outside_layers_are_sorted_by_difference() -> None:
    heat = maps_of(
        "a",
        tensor("b", "values", relative=0.1),
        tensor("c", "values", relative=0.2),
        tensor("d", "values", relative=0.05, n_nan=1),
        tensor("e", "only_b"),
    )["model"]
    assert heat.layers == heat.modules == heat.cells == ()
    assert "".join(cell.keys[0] for cell in heat.outside) == "edcba"


def test_keys_that_are_only_numbers_have_a_name() -> None:
    heat = maps_of("0", "1", f"w.{'7' * 5000}.x")["model"]
    assert (heat.layers, heat.modules) == ((0, 1), ("tensor",))
    assert maps_of("params.0")["model"].modules == ("params",)


@pytest.mark.parametrize(
    ("name", "n_layers"),
    [
        ("mcore_legacy/moe_seq/tp2_pp1_ep2", 4),
        ("mcore_torch_dist/dense_gqa/tp2_pp2_optim", 4),
        ("hf/llama/safetensors_sharded", 3),
        ("torch_dcp/fsdp2_dp2", 2),
    ],
)
def test_every_tensor_of_a_checkpoint_is_in_one_cell(
    name: str, n_layers: int, golden: Path
) -> None:
    result = diff(DiffJob(a=golden / name, b=golden / name, reads=False))
    maps = heat_maps(result.tensors)
    cells = [cell for heat in maps for row in (*heat.cells, heat.outside) for cell in row if cell]
    keys = [key for cell in cells for key in cell.keys]
    assert sorted(keys) == sorted(tensor.key for tensor in result.tensors)
    for heat in maps:
        assert heat.layers == tuple(range(n_layers)) and heat.stack == "layers"
        assert len(set(heat.modules)) == len(heat.modules)
        assert not any("layers" in module for module in heat.modules)


@pytest.mark.parametrize(
    ("differences", "step", "levels"),
    [
        ((0.4, 0.2, 0.05), 2, [9, 8, 6]),
        ((1.0, 1e-4), 4, [9, 2]),
        ((1e6, 1e-3), 10, [9, 0]),
        ((1e-3, 1e-30, 0.0, float("inf")), 10, [9, 0, 0, 9]),
        ((), 2, []),
    ],
)
def test_a_scale_ends_at_the_largest_difference(
    differences: tuple[float, ...], step: int, levels: list[int]
) -> None:
    tensors = [
        tensor(f"layers.{n}.w", "values", relative=relative)
        for n, relative in enumerate(differences)
    ]
    scale = scale_heat(heat_maps(tensors))
    assert (scale.step, [scale.level(relative) for relative in differences]) == (step, levels)


def test_the_difference_of_a_level_has_that_level() -> None:
    scale = HeatScale(0.03, 4)
    assert [scale.level(scale.difference(level)) for level in range(10)] == list(range(10))


def test_differences_beyond_any_quotient_have_levels() -> None:
    scale = HeatScale(1e154, 10)
    assert scale.level(1e-160) == 0 and scale.level(1e154) == 9


def test_sums_beyond_any_number_are_an_infinite_difference() -> None:
    data = [np.array([value, 1.0]).tobytes() for value in (1e200, 2e200)]
    difference = compare_elements(*map(memoryview, data), dtypes=("float64", "float64"))
    assert difference.relative == float("inf")
