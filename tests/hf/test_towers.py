"""Composite models: towers go to Megatron and back under Megatron-Bridge's names, bit for bit.

The checkpoints in ``megatron_towers.tar.xz``, ``megatron_rebuilt_towers.tar.xz`` and
``megatron_omni_towers.tar.xz`` were written by Megatron-Bridge from the models beside them.
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from core.engine.catalog.catalog import catalog_of_arrays
from core.engine.catalog.stored import Extent, StoredArray
from core.errors import (
    CorruptError,
    MissingShardError,
    UnknownTensorError,
    UnsupportedError,
    UsageError,
)
from core.hf.to_megatron import to_megatron
from core.hf.towers.models import composite_models
from core.opening.open import open_checkpoint
from core.verbs.convert.job import TopologyChange
from core.verbs.convert.run import Job, run
from tests.hf.composites import COMPOSITES, saved_composite
from tests.hf.models import assert_same, config_of, quietly, tensors
from tests.hf.stored import stored_tensors
from tests.support.archives import unpacked
from tests.support.covering import every_third

_LOCAL = ("qwen2_5_vl", "gemma3", "mistral3", "qwen2_audio", "glm4v_moe")
"""Models that Megatron-Bridge saved with layers of the local implementation."""
_BEHIND = re.compile(r"^language_model\..*\.post_layernorm\.")


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bridge")
    unpacked("megatron_towers", folder)
    unpacked("megatron_omni_towers", folder)
    return unpacked("megatron_rebuilt_towers", folder)


def test_every_model_of_the_table_is_tried() -> None:
    assert composite_models().keys() == COMPOSITES.keys()


@pytest.mark.parametrize("name", every_third(COMPOSITES, start=0))
def test_the_complete_model_goes_to_megatron_as_bridge_writes_it_and_back(
    name: str, bridge: Path, tmp_path: Path
) -> None:
    import transformers

    model = bridge / name / "hf"
    first, second, back = tmp_path / "first", tmp_path / "second", tmp_path / "back"
    run(
        Job(
            src=model,
            dst=first,
            to="torch_dist",
            topology=TopologyChange(tp=2, pp=2),
            transformer_impl="local" if name in _LOCAL else "transformer_engine",
            fsync=False,
        )
    )
    # Its tensors are those that Megatron-Bridge wrote; the vocabulary may have padding.
    ours, theirs = stored_tensors(first), stored_tensors(bridge / name / "megatron")
    for key in ours:
        if key.endswith(("language_model.output_layer.weight", "word_embeddings.weight")):
            ours[key] = ours[key][:130]
    # A plain GPT model stood in for Gemma's, whose layers have two norms more.
    ours = {key: value for key, value in ours.items() if not _BEHIND.search(key)}
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key

    # Norms of Transformer Engine have extra states as well.
    if name == "gemma3" or (name.startswith("qwen3") and "omni" not in name):
        objects = open_checkpoint(first).catalog.objects
        assert any(re.search(r"(merger|projector)\..*norm\._extra_state", key) for key in objects)

    # Another layout, and back: the same tensors under the same names, the same configuration.
    run(
        Job(
            src=first, dst=second, to="torch_dist", topology=TopologyChange(tp=1, pp=1), fsync=False
        )
    )
    run(Job(src=second, dst=back, to="hf", fsync=False))
    assert_same(tensors(back), tensors(model))
    assert (back / "config.json").read_bytes() == (model / "config.json").read_bytes()
    quietly()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Qwen2.5-Omni's own method wants the voices of a talker, and cannot return the report.
        load: Any = transformers.PreTrainedModel.from_pretrained
        _, info = load.__func__(
            getattr(transformers, COMPOSITES[name][0]), back, output_loading_info=True
        )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_another_layout_keeps_every_entry_of_what_bridge_wrote(
    bridge: Path, tmp_path: Path
) -> None:
    saved, dst = bridge / "qwen3_vl/megatron", tmp_path / "dst"
    topology = TopologyChange(tp=2, pp=2)
    run(Job(src=saved, dst=dst, to="torch_dist", topology=topology, fsync=False))
    entries = [
        {
            key
            for key in dcp.FileSystemReader(next(folder.glob("iter_*")))
            .read_metadata()
            .state_dict_metadata
            if key.startswith(("vision_model.", "language_model."))
        }
        for folder in (saved, dst)
    ]
    # Its modules stood in for Transformer Engine's, of which some have further states.
    assert entries[0] <= entries[1]
    assert all("_extra_state" in key for key in entries[1] - entries[0])
    ours, theirs = stored_tensors(dst), stored_tensors(saved)
    for key, value in theirs.items():
        # Padding of the vocabulary apart.
        assert torch.equal(ours[key][: len(value)], value), key


@pytest.mark.parametrize(
    "name", every_third((name for name in COMPOSITES if name != "gemma3"), start=1)
)
def test_what_bridge_wrote_becomes_the_model_that_it_read(
    name: str, bridge: Path, tmp_path: Path
) -> None:
    model, saved = bridge / name / "hf", bridge / name / "megatron"
    with pytest.raises(UnsupportedError, match="its config.json is needed"):
        run(Job(src=saved, dst=tmp_path / "x", to="hf"))
    back = tmp_path / "back"
    run(Job(src=saved, dst=back, to="hf", config=model / "config.json", fsync=False))
    if name == "qwen3_vl_moe":  # experts as in published files, which transformers 5 reads as well
        model = _with_transposed_experts(model, tmp_path / "published")
    assert_same(tensors(back), tensors(model))


def test_changed_arguments_change_the_text_model_s_part_of_the_configuration(
    bridge: Path, tmp_path: Path
) -> None:
    model, first, back = bridge / "qwen2_5_vl/hf", tmp_path / "first", tmp_path / "back"
    run(Job(src=model, dst=first, to="torch_dist", fsync=False))
    run(Job(src=first, dst=back, to="hf", dtype=((None, "bfloat16"),), fsync=False))
    before, after = config_of(model), config_of(back)
    assert after["text_config"]["dtype"] == after["dtype"] == "bfloat16"
    assert after["vision_config"] == before["vision_config"]
    assert after["text_config"]["rope_parameters"] == before["text_config"]["rope_parameters"]


def test_files_with_other_names_get_these_back(bridge: Path, tmp_path: Path) -> None:
    # Published files of Gemma 3 have the tower one level deeper than transformers 5 writes it.
    model = saved_composite("gemma3", tmp_path / "model")
    weights = {
        key.replace("vision_tower.", "vision_tower.vision_model."): value
        for key, value in load_file(model / "model.safetensors").items()
    }
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    first, back = tmp_path / "first", tmp_path / "back"
    run(Job(src=model, dst=first, to="torch_dist", fsync=False))
    run(Job(src=first, dst=back, to="hf", fsync=False))
    assert tensors(back).keys() == weights.keys()


def test_names_survive_other_formats(bridge: Path, tmp_path: Path) -> None:
    model, first, back = bridge / "qwen2_5_vl/hf", tmp_path / "first", tmp_path / "back"
    run(Job(src=model, dst=first, to="dcp", names="megatron", fsync=False))
    keys = dcp.FileSystemReader(first).read_metadata().state_dict_metadata
    assert "model.visual.patch_embed.proj.weight" in keys
    assert "model.language_model.decoder.layers.0.mlp.linear_fc2.weight" in keys
    run(Job(src=first, dst=back, to="hf", fsync=False))
    assert_same(tensors(back), tensors(model))


def test_rank_files_and_unknown_towers_are_refused(bridge: Path, tmp_path: Path) -> None:
    model = bridge / "qwen2_5_vl/hf"
    with pytest.raises(UnsupportedError, match="does not load megatron checkpoints") as err:
        run(Job(src=model, dst=tmp_path / "x", to="megatron"))
    assert "--text-model" in str(err.value.hint)
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    for model_type, reason in (
        ("qwen2_vl", r"\(visual\), and Megatron-Bridge does not build such models"),
        ("unheard_of", "ckpt does not know the names of these parts in Megatron"),
    ):
        config = {**config_of(model), "model_type": model_type}
        (other / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedError, match=reason):
            run(Job(src=other, dst=tmp_path / "x", to="torch_dist"))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("visual.merger.ln_q.weight", None, MissingShardError),
        ("visual.merger.ln_q.weight", "visual.merger.ln_r.weight", MissingShardError),
        (None, "visual.blocks.0.attn.sinks", UnknownTensorError),
        (None, "model.visual.merger.ln_q.weight", UnknownTensorError),
        (None, "talker.weight", UnknownTensorError),
    ],
)
def test_tensors_that_are_missing_or_left_over_are_refused(
    old: str | None, new: str | None, error: type[Exception], bridge: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    weights = load_file(bridge / "qwen2_5_vl/hf/model.safetensors")
    value = torch.zeros(12) if old is None else weights.pop(old)
    if new is not None:
        weights[new] = value
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_bytes((bridge / "qwen2_5_vl/hf/config.json").read_bytes())
    with pytest.raises(error):
        run(Job(src=model, dst=tmp_path / "x", to="torch_dist"))
    assert not (tmp_path / "x").exists()


def test_what_speaks_is_left_out_only_on_request(bridge: Path, tmp_path: Path) -> None:
    model, config = tmp_path / "model", config_of(bridge / "qwen2_5_omni/hf")
    del config["enable_audio_output"]
    config["thinker_config"]["text_config"]["max_position_embeddings"] = 32
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    thinker = load_file(bridge / "qwen2_5_omni/hf/model.safetensors")
    speaking = {"talker.model.norm.weight": torch.ones(4), "token2wav.scale": torch.ones(2)}
    save_file({**thinker, **speaking}, model / "model.safetensors", metadata={"format": "pt"})

    job = Job(src=model, dst=tmp_path / "first", to="torch_dist", fsync=False)
    job = replace(job, transformer_impl="transformer_engine")
    with pytest.raises(UnsupportedError, match=r"no tensors talker\.\* or token2wav\.\*") as err:
        run(job)
    assert "--exclude 'talker.*' --exclude 'token2wav.*'" in str(err.value.hint)
    run(replace(job, exclude=("talker.*", "token2wav.*")))

    # What comes back is the thinker, with the configuration of the complete model, and says so.
    back = tmp_path / "back"
    dtype = ((None, "bfloat16"),)
    report = run(Job(src=tmp_path / "first", dst=back, to="hf", dtype=dtype, fsync=False))
    assert any("enable_audio_output=False" in note for note in report.notes)
    assert tensors(back).keys() == thinker.keys()
    after = config_of(back)
    assert after["dtype"] == after["thinker_config"]["text_config"]["dtype"] == "bfloat16"
    assert after["thinker_config"]["vision_config"] == config["thinker_config"]["vision_config"]
    assert after["talker_config"] == config["talker_config"]


def test_the_text_model_of_a_thinker_is_one_of_its_family(bridge: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    report = run(
        Job(src=bridge / "qwen3_omni_moe/hf", dst=text, to="hf", text_model=True, fsync=False)
    )
    assert config_of(text)["model_type"] == "qwen3_moe"
    assert {"thinker.audio_tower.*", "thinker.visual.*"} <= {
        item.partition(" ")[0] for item in report.dropped
    }


def test_a_refused_text_model_is_named_without_advice_that_does_not_help() -> None:
    key = "model.language_model.layers.0.self_attn.q_proj.weight"
    tower = "model.vision_tower.patch_embedder.input_proj.weight"
    config = {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}}
    for keys, parts in (((key,), "other parts, "), ((key, tower), "(model.vision_tower), ")):
        arrays = {name: StoredArray(name, "float32", (2,), Extent("a", 0)) for name in keys}
        source = catalog_of_arrays(format="safetensors", arrays=arrays)
        with pytest.raises(UnsupportedError) as caught:
            to_megatron(source, config)
        assert parts in caught.value.message
        assert "its text model (gemma4_text) is not supported either: " in caught.value.message
        assert caught.value.hint is None


def test_ernie_vl_is_refused_for_its_two_sets_of_experts(bridge: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    weights = (bridge / "qwen2_5_vl/hf/model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights)
    text = {"model_type": "ernie4_5_vl_moe_text"}
    (model / "config.json").write_text(
        json.dumps({"model_type": "ernie4_5_vl_moe", "text_config": text})
    )
    with pytest.raises(UnsupportedError, match="separate experts for text and images") as err:
        run(Job(src=model, dst=tmp_path / "x", to="torch_dist"))
    assert err.value.hint is None  # --text-model has no family for it


def test_experts_of_published_files_come_back_transposed(bridge: Path, tmp_path: Path) -> None:
    model = _with_transposed_experts(bridge / "qwen3_vl_moe/hf", tmp_path / "model")
    first, back = tmp_path / "first", tmp_path / "back"
    run(Job(src=model, dst=first, to="torch_dist", fsync=False))
    stored = stored_tensors(first)
    for key, value in stored_tensors(bridge / "qwen3_vl_moe/megatron").items():
        if ".experts." in key:
            assert torch.equal(stored[key], value), key
    run(Job(src=first, dst=back, to="hf", fsync=False))
    assert_same(tensors(back), tensors(model))


def _with_transposed_experts(model: Path, folder: Path) -> Path:
    """Return a copy of a Qwen3-VL with experts in which these lie as in published files."""
    folder.mkdir()
    weights = {
        key: value.mT.contiguous() if ".experts." in key else value
        for key, value in load_file(model / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize(
    ("key", "shape", "problem"),
    [
        ("blocks.1.attn.qkv.bias", (35,), "Megatron stores both in one tensor"),
        ("blocks.1.mlp.linear_fc2.weight", (12, 19), "Megatron stores both in one tensor"),
    ],
)
def test_layers_of_other_shapes_are_refused(
    key: str, shape: tuple[int, ...], problem: str, bridge: Path, tmp_path: Path
) -> None:
    model = _edited(bridge / "qwen3_vl/hf", tmp_path / "model", {key: shape})
    with pytest.raises(CorruptError, match=problem):
        run(Job(src=model, dst=tmp_path / "x", to="torch_dist"))


def test_rows_that_do_not_divide_into_heads_are_refused(bridge: Path, tmp_path: Path) -> None:
    shapes = {f"blocks.{number}.attn.qkv.bias": (35,) for number in range(3)}
    model = _edited(bridge / "qwen3_vl/hf", tmp_path / "model", shapes)
    with pytest.raises(CorruptError, match="35 rows cannot be divided evenly into the queries"):
        run(Job(src=model, dst=tmp_path / "x", to="torch_dist"))


def _edited(model: Path, folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """Return a copy of a Qwen3-VL in which tensors of the tower have other shapes."""
    folder.mkdir()
    weights = load_file(model / "model.safetensors")
    weights |= {f"model.visual.{key}": torch.zeros(shape) for key, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize("depth", [2, 4, 10**9, -1, "3"])
def test_another_number_of_layers_is_refused(depth: object, bridge: Path, tmp_path: Path) -> None:
    saved, config = bridge / "qwen3_vl/megatron", config_of(bridge / "qwen3_vl/hf")
    config["vision_config"]["depth"] = depth
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(CorruptError, match=r"on the first axis|not a positive integer"):
        run(Job(src=saved, dst=tmp_path / "x", to="hf", config=file))


def test_an_incomplete_tower_is_blamed_on_the_options(bridge: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave an incomplete Hugging Face model"):
        run(
            Job(
                src=bridge / "mistral3/hf",
                dst=tmp_path / "x",
                to="torch_dist",
                exclude=("vision_tower.*",),
            )
        )


def test_the_configuration_of_another_model_is_refused(bridge: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingShardError, match="not in the checkpoint"):
        run(
            Job(
                src=bridge / "qwen2_5_vl/megatron",
                dst=tmp_path / "x",
                to="hf",
                config=bridge / "mistral3/hf/config.json",
            )
        )
