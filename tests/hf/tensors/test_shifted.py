"""A norm that Megatron stores minus one, against torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.hf.config_json.config import build_arguments
from core.hf.family import families
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from tests.hf.models import arguments, catalog_of, config_of, contents, saved, tensor_of

_KEY = "model.layers.0.linear_attn.norm.weight"
_NAME = "decoder.layers.0.self_attention.out_norm.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_weight_minus_one_is_torchs_and_comes_back_unless_it_is_small(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = saved("qwen3_5", tmp_path / "model", dtype=dtype)
    weights = load_file(folder / "model.safetensors")
    key = _KEY.replace("layers.0", "layers.1")
    weight = torch.tensor([0.5, 0.7, 0.9, 1.0, 1.1, 1.7, 3.3, 77.7, -0.3, 0.001], dtype=dtype)
    save_file(weights | {key: weight}, folder / "model.safetensors", metadata={"format": "pt"})
    store, source = catalog_of(folder)
    middle = to_megatron(source, config_of(folder))
    note = next(note for note in middle.notes if "minus 1" in note)
    assert note.startswith(f"{key}: Megatron stores this weight minus 1")
    name, torch_name = _NAME.replace("layers.0", "layers.1"), str(dtype).removeprefix("torch.")
    assert torch.equal(tensor_of(contents(middle, store)[name], torch_name), weight - 1)
    back = tensor_of(contents(to_hf(middle), store)[key], torch_name)
    assert torch.equal(back, (weight - 1) + 1)
    assert torch.equal(back[:8], weight[:8])
    assert not torch.equal(back[8:], weight[8:])


def test_layers_are_those_of_the_interval_where_the_configuration_does_not_list_them(
    tmp_path: Path,
) -> None:
    folder = saved("qwen3_next", tmp_path / "model")
    config = config_of(folder) | {"num_hidden_layers": 6}
    options = {
        "dtype": "bfloat16",
        "transformer_impl": None,
        "divisible_by": 1,
        "iteration": 1,
        "n_mtp": 0,
    }

    def frequency(**changes: object) -> object:
        fields = build_arguments(config | changes, families()["qwen3_next"], **options)  # type: ignore[arg-type]
        return fields["linear_attention_freq"]

    types = {"l": "linear_attention", "f": "full_attention"}
    assert frequency(layer_types=None) == 4
    assert frequency(layer_types=None, full_attention_interval=3) == 3
    assert frequency(layer_types=[types[kind] for kind in "llflfl"]) == [1, 1, 0, 1, 0, 1]
    assert frequency(layer_types=[types[kind] for kind in "llfllf"]) == 3
    assert frequency(layer_types=["linear_attention"] * 6) == 7


def test_a_run_of_a_later_megatron_calls_the_layers_gdn(tmp_path: Path) -> None:
    from core.hf.values import ARGUMENT
    from core.pickle.inert import make_namespace

    folder = saved("qwen3_5", tmp_path / "model")
    _, source = catalog_of(folder)
    middle = to_megatron(source, config_of(folder))
    fields = arguments(middle) | {"experimental_attention_variant": "gdn", ARGUMENT: None}
    model = to_hf(replace(middle, args=make_namespace(fields)))
    assert b'"qwen3_5_text"' in model.documents["config.json"]
