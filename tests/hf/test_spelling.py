"""Names of one tensor in the files and modules of different versions of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import UnsupportedError
from core.hf.family import family_of
from core.hf.tensors.spelling import match_names
from core.hf.ties import find_tie_pair
from core.verbs.diff.run import DiffJob, diff
from tests.support.rank_files import assert_same_bits
from tests.verbs.merge.test_adapter import fold
from tests.verbs.merge.test_merge import merge

LAYER = "layers.0.self_attn.q_proj.weight"
SPELLINGS = [
    ("model.language_model." + LAYER, "model." + LAYER),
    ("model.language_model." + LAYER, "language_model.model." + LAYER),
    ("model." + LAYER, LAYER),
    ("lm_head.weight", "language_model.lm_head.weight"),
    ("lm_head.weight", "embed_out.weight"),
    ("model.visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight"),
    ("model.vision_tower.encoder.fc1.weight", "vision_tower.vision_model.encoder.fc1.weight"),
    ("model.multi_modal_projector.linear_1.weight", "multi_modal_projector.linear_1.weight"),
    ("transformer.h.0.attn.c_attn.weight", "h.0.attn.c_attn.weight"),
    ("bert.encoder.layer.0.output.dense.weight", "encoder.layer.0.output.dense.weight"),
]


@pytest.mark.parametrize(("a", "b"), [*SPELLINGS, *((b, a) for a, b in SPELLINGS)])
def test_names_of_one_tensor_match_both_ways(a: str, b: str) -> None:
    assert match_names([a], [b, "model.other.norm.weight"]) == {a: b}


def test_names_that_could_be_several_tensors_match_none() -> None:
    towers = ["vision_model.model.layers.0.fc1.weight", "text_model.layers.0.fc1.weight"]
    assert match_names(["layers.0.fc1.weight"], ["model.layers.0.fc1.weight", *towers]) == {
        "layers.0.fc1.weight": "model.layers.0.fc1.weight"
    }
    both = ["model.layers.0.fc1.weight", "language_model.model.layers.0.fc1.weight"]
    assert match_names(["layers.0.fc1.weight"], both) == {}
    assert match_names(both, ["layers.0.fc1.weight"]) == {}
    assert match_names(["model.layers.1.fc1.weight"], ["model.layers.0.fc1.weight"]) == {}


def _save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "some_model"}))
    return folder


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("keys", "config", "embedding", "head"),
    [
        (["model.embed_tokens.weight"], None, 0, "lm_head.weight"),
        (["language_model.model.embed_tokens.weight"], None, 0, "language_model.lm_head.weight"),
        (["model.language_model.embed_tokens.weight"], None, 0, "lm_head.weight"),
        (["thinker.model.embed_tokens.weight"], None, 0, "thinker.lm_head.weight"),
        (["wte.weight", "h.0.ln_1.weight"], "gpt2", 0, "lm_head.weight"),
        (["gpt_neox.embed_in.weight"], "gpt_neox", 0, "embed_out.weight"),
        (["backbone.embeddings.weight"], "mamba2", 0, "lm_head.weight"),
        (["model.layers.1.embed_tokens.weight", "model.embed_tokens.weight"], None, 1, ...),
        (["lm_head.weight"], "llama", "model.embed_tokens.weight", "lm_head.weight"),
    ],
)
def test_embedding_and_output_layer_are_found_in_every_spelling(
    keys: list[str], config: str | None, embedding: int | str, head: object
) -> None:
    pair = find_tie_pair(keys, None if config is None else _config(config))
    assert pair is not None
    assert pair.embedding == (keys[embedding] if isinstance(embedding, int) else embedding)
    assert pair.head == ("lm_head.weight" if head is ... else head)


def _config(model_type: str) -> dict[str, object]:
    return {"model_type": model_type, "architectures": [family_of(model_type).architecture]}


@pytest.mark.parametrize(("module", "stored"), SPELLINGS)
def test_adapters_have_the_names_of_modules_and_bases_those_of_files(
    module: str, stored: str, tmp_path: Path
) -> None:
    weight, a, b = _random(1, 6, 4), _random(2, 1, 4), _random(3, 6, 1)
    base = _save(tmp_path / "base", {stored: weight, "other.norm.weight": torch.ones(4)})
    (tmp_path / "adapter").mkdir()
    config = {"r": 1, "lora_alpha": 1, "peft_type": "LORA"}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model." + module.removesuffix(".weight")
    # peft saves the base layers of adapted embeddings and output layers too.
    matrices = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    matrices[f"{name}.base_layer.weight"] = weight
    save_file(matrices, tmp_path / "adapter/adapter_model.safetensors")
    result = load_file(fold(base, tmp_path / "adapter", tmp_path / "out") / "model.safetensors")
    assert_same_bits(result[stored], weight + (b.double() @ a.double()).float(), stored)


def test_models_of_two_versions_are_merged_and_compared(tmp_path: Path) -> None:
    first, second = (
        {names[side]: _random(10 * side + n, 6, 4) for n, names in enumerate(SPELLINGS[:1])}
        | {"lm_head.weight": _random(50 + side, 5, 4)}
        for side in (0, 1)
    )
    a, b = _save(tmp_path / "a", first), _save(tmp_path / "b", second)
    result = load_file(merge([a, b], tmp_path / "out", "average") / "model.safetensors")
    for key, other in zip(first, second, strict=True):
        assert_same_bits(result[key], (first[key] + second[other]) / 2, key)
    same = dict(zip(second, first.values(), strict=True))
    comparison = diff(DiffJob(a=a, b=_save(tmp_path / "same", same)))
    assert all(tensor.is_same for tensor in comparison.tensors)
    assert len(comparison.tensors) == 2
    assert any("a different transformers version" in note for note in comparison.notes)
    assert not all(tensor.is_same for tensor in diff(DiffJob(a=a, b=b)).tensors)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("base_model.model.model.layers.7.up_proj", "is this the adapter's base model, 'the/base'"),
        ("base_model.model.model.layers.0.up_proj", "merge the adapter with peft"),
    ],
)
def test_only_an_adapter_none_of_whose_names_fit_is_called_one_of_another_base(
    name: str, hint: str, tmp_path: Path
) -> None:
    base = _save(tmp_path / "base", {"model.layers.0.q_proj.weight": _random(1, 6, 4)})
    (tmp_path / "adapter").mkdir()
    config = {"r": 1, "lora_alpha": 1, "peft_type": "LORA", "base_model_name_or_path": "the/base"}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    names = {name, *(["base_model.model.model.layers.0.q_proj"] if "0" in name else [])}
    matrices = {f"{each}.lora_A.weight": _random(2, 1, 4) for each in names}
    matrices |= {f"{each}.lora_B.weight": _random(3, 6, 1) for each in names}
    save_file(matrices, tmp_path / "adapter/adapter_model.safetensors")
    with pytest.raises(UnsupportedError, match="tensor that the base does not have") as failure:
        fold(base, tmp_path / "adapter", tmp_path / "out")
    assert failure.value.hint is not None
    assert failure.value.hint.startswith(hint)
