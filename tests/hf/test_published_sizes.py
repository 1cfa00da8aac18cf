"""Published models at their own widths: what tiny models with handy numbers do not show.

``published_configs.json`` has the numbers of published ``config.json`` files that decide names and
shapes, as NVIDIA's aiconfigurator and ByteDance's VeOmni collected them, for the first layers and
at most 16 experts. transformers says which tensors such a model has; the files are sparse.
"""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from core.files.store import LocalStore
from core.formats.safetensors import format as safetensors
from core.hf.family import families
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from tests.hf.models import config_of, quietly
from tests.support.covering import every_third

_PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "published_configs.json").read_text()
)
_SAME_NAMES = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Type that transformers 5.23.0 does not have → one of the same names."""
_UNUSUAL = set(
    """
    bailing_moe_v2 mimo nemotron-nas sarvam_mla sarvam_moe step3p5 deepseek_v2 dots1
    gpt_neox ministral nemotron
    """.split()
)
"""Families without a class that builds a language model, and those whose class has defaults that
are no model of Megatron's or none at all."""

_N_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that ``save_pretrained`` writes, by name."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    quietly()
    kind = _SAME_NAMES.get(config["model_type"], config["model_type"])
    loaded = AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loaded)
    tied = model._tied_weights_keys if loaded.tie_word_embeddings else ()
    state = {name: value for name, value in model.state_dict().items() if name not in (tied or ())}
    saved = revert_weight_conversion(model, state)
    return {name: tuple(value.shape) for name, value in saved.items()}


def _write_sparse(folder: Path, shapes: dict[str, tuple[int, ...]], config: dict[str, Any]) -> None:
    """Write a model whose file has a header and a hole in place of its tensors."""
    folder.mkdir()
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config))


def _check_both_ways(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    config = config_of(folder)
    middle = to_megatron(safetensors.read(LocalStore(folder)), config)
    back = to_hf(middle)
    assert {name: tensor.shape for name, tensor in back.tensors.items()} == shapes
    assert json.loads(back.documents["config.json"]) == config
    # Every fragment is found: rows that are interleaved by group or by head divide.
    for key, tensor in middle.tensors.items():
        n_elements = sum(prod(fragment.box.shape) for fragment in middle.fragments(key))
        assert n_elements == prod(tensor.shape), key


@pytest.mark.parametrize("name", every_third(_PUBLISHED))
def test_a_published_model_goes_both_ways_at_its_own_widths(name: str, tmp_path: Path) -> None:
    config = _PUBLISHED[name]
    shapes = _shapes(config)
    _write_sparse(tmp_path / "model", shapes, config)
    _check_both_ways(tmp_path / "model", shapes)


@pytest.mark.parametrize("name", every_third(sorted(set(families()) - _UNUSUAL), start=1))
def test_the_usual_model_of_a_family_goes_both_ways_at_its_own_widths(
    name: str, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    counts = {
        "n_layer" if name.startswith("gpt_bigcode") or name == "gpt2" else "num_hidden_layers": 8
    }
    usual = AutoConfig.for_model(name, **counts)
    counts |= {key: min(n, 16) for key in _N_EXPERTS if (n := getattr(usual, key, None))}
    usual = AutoConfig.for_model(name, **counts)
    config = json.loads(usual.to_json_string(use_diff=False))
    shapes = _shapes({"model_type": name, **counts})
    _write_sparse(tmp_path / "model", shapes, config)
    _check_both_ways(tmp_path / "model", shapes)
