"""The notes on what Megatron's versions do with a model, in both directions."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from tests.hf.models import LLAMA3, catalog_of, config_of, saved


@pytest.mark.parametrize(
    ("name", "scaling", "message"),
    [
        (
            "llama_rope_scaling",
            {**LLAMA3, "factor": 32.0},
            "rope_scaling_factor is 32.0, .* with 8",
        ),
        ("cwm", {**LLAMA3, "factor": 16.0}, "rope_scaling_factor is 16.0, .* with 8"),
        ("llama_linear_scaling", None, "interpolation_factor is 2.5, .* before megatron-core 0.19"),
        ("qwen3_yarn", None, "YaRN .* only in megatron-core 0.19 and later"),
    ],
)
def test_scaling_that_not_every_version_applies_is_noted_both_ways(
    name: str, scaling: dict[str, object] | None, message: str, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path / "model")
    config = config_of(folder)
    if scaling is not None:
        config["rope_parameters"] = {**scaling, "rope_theta": 5e5}
    middle = to_megatron(catalog_of(folder)[1], config)
    for result in (middle, to_hf(replace(middle, notes=()))):
        notes = [note for note in result.notes if "Megatron's training script" in note]
        (note,) = notes
        assert re.search(message, note), note
        assert "Megatron-Bridge" in note


@pytest.mark.parametrize("name", ["llama", "llama_rope_scaling", "deepseek_v3_yarn", "gemma3"])
def test_scaling_that_every_version_applies_is_not_noted(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "model")
    middle = to_megatron(catalog_of(folder)[1], config_of(folder))
    assert "GPTModelProvider supports it" not in " ".join(middle.notes)
