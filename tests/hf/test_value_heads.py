"""Critics and reward models: a value head of one row in the place of the output layer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto

import core
from core.engine.catalog.catalog import Catalog
from core.errors import UnsupportedError
from core.hf.family import families
from core.hf.proof.comparison import find_differences
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.pickle.inert import make_namespace
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from tests.hf.composites import saved_composite
from tests.hf.models import (
    MODELS,
    arguments,
    assert_same,
    built,
    catalog_of,
    config_of,
    contents,
    loaded_model,
    logits,
    quietly,
    saved,
    tensors,
    written,
)
from tests.support.covering import every_third
from tests.support.rank_files import load_rank_file

SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"
FIRST_OF_TYPE = {model_type: name for name, (model_type, _) in reversed(MODELS.items())}
CLASSIFIERS = [
    (FIRST_OF_TYPE[family.model_type], kind)
    for family in families().values()
    if family.model_type in FIRST_OF_TYPE
    for kind in (SEQUENCE, TOKEN)
    if any(name.endswith(kind) for name in family.classifiers)
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quietly()


def critic(name: str, folder: Path, *, kind: str = SEQUENCE) -> Path:
    """The files of a classifier with one label."""
    built(name, kind=kind, num_labels=1, pad_token_id=1).save_pretrained(folder)
    return folder


def without_origin(middle: Catalog) -> Catalog:
    """A model whose arguments are Megatron's own, without the text of a ``config.json``."""
    fields = {**arguments(middle), "huggingface_config": None}
    return replace(middle, args=make_namespace(fields), common={**(middle.common or {})})


def test_the_tables_name_the_classifiers_of_transformers() -> None:
    names = (
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    )
    for model_type, family in families().items():
        expected = [each[model_type] for each in names if model_type in each]
        assert list(family.classifiers) == expected, model_type


@pytest.mark.first(6)
@pytest.mark.parametrize(
    ("name", "kind"), every_third((pytest.param(*case) for case in CLASSIFIERS), start=2)
)
def test_a_classifier_with_one_label_comes_back_bit_for_bit(
    name: str, kind: str, tmp_path: Path
) -> None:
    folder = critic(name, tmp_path / "model", kind=kind)
    text, config = (folder / "config.json").read_bytes(), config_of(folder)
    store, source = catalog_of(folder)
    source = replace(source, files={"config.json": text})
    assert not find_differences(source.tensors, config)
    middle = to_megatron(source, config)
    assert middle.tensors["output_layer.weight"].shape == (1, 32)
    assert not any(key.startswith("output_layer") for key in middle.objects)
    assert any("value head" in note for note in middle.notes)
    back = to_hf(middle)
    assert_same(contents(back, store), tensors(folder))
    assert back.documents["config.json"] == text

    # Arguments alone describe a class that has the head, too.
    alone = to_hf(without_origin(middle), model_type=MODELS[name][0])
    config = json.loads(alone.documents["config.json"])
    assert not find_differences(alone.tensors, config)
    has_bias = "output_layer.bias" in middle.tensors
    written_kind = TOKEN if has_bias else SEQUENCE
    assert config["architectures"][0].endswith(written_kind)
    if name != "ministral3":  # whose arguments do not say all of its rotary embeddings
        config["pad_token_id"] = 1
        files = {"config.json": json.dumps(config).encode()}
        ours = written(replace(alone, files=files), store, tmp_path / "ours")
        assert torch.equal(
            logits(loaded_model(ours, written_kind)), logits(loaded_model(folder, kind))
        )


@pytest.mark.parametrize("name", ["llama_tied", "qwen2"])
@pytest.mark.parametrize("kind", [SEQUENCE, TOKEN])
def test_either_class_loads_a_head_without_a_bias(name: str, kind: str, tmp_path: Path) -> None:
    store, source = catalog_of(critic(name, tmp_path / "model"))
    config = config_of(tmp_path / "model")
    stem = config["architectures"][0].removesuffix(SEQUENCE)
    # The configuration of a critic that a framework trained states its base model, or a class.
    for stated in ("ForCausalLM", kind):
        origin = {**config, "architectures": [stem + stated]}
        del origin["id2label"], origin["label2id"]
        back = to_hf(to_megatron(source, origin))
        config_of_ours = json.loads(back.documents["config.json"])
        expected = SEQUENCE if stated == "ForCausalLM" else kind
        assert config_of_ours["architectures"] == [stem + expected]
        assert config_of_ours["tie_word_embeddings"] is config["tie_word_embeddings"]
        ours = written(back, store, tmp_path / stated)
        model = loaded_model(ours, expected)
        assert model.num_labels == 1
        assert torch.equal(
            model.score.weight, load_file(ours / "model.safetensors")["score.weight"]
        )


@pytest.mark.parametrize("other", ["lm_head.weight", "reward_head.weight"])
def test_the_names_that_frameworks_write_are_read(other: str, tmp_path: Path) -> None:
    folder = saved("qwen2", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    head = torch.randn(1, 32).bfloat16()
    save_file({**weights, other: head}, folder / "model.safetensors")
    store, source = catalog_of(folder)
    back = to_hf(to_megatron(source, config_of(folder)))
    ours = written(back, store, tmp_path / "ours")
    assert torch.equal(loaded_model(ours, SEQUENCE).score.weight, head)


def test_a_family_without_such_a_class_is_refused(tmp_path: Path) -> None:
    folder = saved("olmoe", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(
        {**weights, "score.weight": torch.zeros(1, 32).bfloat16()}, folder / "model.safetensors"
    )
    _, source = catalog_of(folder)
    middle = to_megatron(source, config_of(folder))
    assert middle.tensors["output_layer.weight"].shape == (1, 32)
    with pytest.raises(UnsupportedError, match="no olmoe model with such a head") as caught:
        to_hf(middle)
    assert "--to safetensors" in (caught.value.hint or "")


def test_a_head_beside_towers_keeps_megatron_s_names(tmp_path: Path) -> None:
    folder = saved_composite("qwen2_5_vl", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][:1].clone()
    save_file(weights, folder / "model.safetensors")
    _, source = catalog_of(folder)
    middle = to_megatron(source, config_of(folder))
    assert middle.tensors["output_layer.weight"].shape[0] == 1
    with pytest.raises(UnsupportedError, match="no qwen2_5_vl model with such a head"):
        to_hf(middle)


def test_a_bias_is_whole_on_every_rank_and_comes_back(tmp_path: Path) -> None:
    folder = critic("qwen2_tied", tmp_path / "model", kind=TOKEN)
    topology = TopologyChange(tp=2, pp=3)
    run(Job(src=folder, dst=tmp_path / "ranks", to="megatron", topology=topology, fsync=False))
    weights = load_file(folder / "model.safetensors")
    for rank in (tmp_path / "ranks/iter_0000001").glob("mp_rank_*_002"):  # the last stage
        model = load_rank_file(rank / "model_optim_rng.pt")["model"]
        assert torch.equal(model["output_layer.weight"], weights["score.weight"])
        assert torch.equal(model["output_layer.bias"], weights["score.bias"])
        assert "output_layer._extra_state" not in model
    core.convert(tmp_path / "ranks", tmp_path / "dist", to="torch_dist")
    core.convert(tmp_path / "dist", tmp_path / "back", to="hf")
    assert_same(tensors(tmp_path / "back"), tensors(folder))
    assert config_of(tmp_path / "back") == config_of(folder)


def test_several_labels_are_no_value_head(tmp_path: Path) -> None:
    built("qwen2", kind=SEQUENCE, num_labels=3).save_pretrained(tmp_path / "model")
    _, source = catalog_of(tmp_path / "model")
    with pytest.raises(UnsupportedError, match="the head has 3 rows") as caught:
        to_megatron(source, config_of(tmp_path / "model"))
    assert caught.value.key == "score.weight"
    core.convert(tmp_path / "model", tmp_path / "kept", to="dcp")
