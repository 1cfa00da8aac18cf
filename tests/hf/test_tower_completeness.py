"""What a composite model's towers lack is found, and nothing in complete ones.

The checkpoints were written by Megatron-Bridge and transformers (tests/golden).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from core.errors import CheckpointingException
from core.hf.towers.completeness import find_missing_megatron_tensors
from core.hf.towers.models import composite_models
from core.megatron.rules.tables import load_rules
from core.opening.open import open_checkpoint
from core.verbs.checks.check import Level, Severity
from core.verbs.convert.run import Job, run
from core.verbs.validate.run import validate
from tests.hf.composites import COMPOSITES
from tests.hf.models import config_of
from tests.support.archives import unpacked
from tests.support.covering import every_third
from tests.support.edited import lose_tensors


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bridge")
    for name in ("megatron_towers", "megatron_omni_towers", "megatron_rebuilt_towers"):
        unpacked(name, folder)
    return folder


def codes(path: Path, level: Level = Level.METADATA) -> set[tuple[str, str | None]]:
    findings = validate(path, level=level).findings
    return {(item.code, item.key) for item in findings if item.severity > Severity.NOTE}


def names_in(path: Path) -> list[str]:
    """The tensors of towers, as validate takes them."""
    keys = open_checkpoint(path).catalog.tensors
    return [key for key in keys if key.startswith(load_rules().towers)]


@pytest.mark.each_value
@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("name", COMPOSITES)
def test_complete_towers_raise_no_alarm(name: str, level: Level, bridge: Path) -> None:
    assert not codes(bridge / name / "megatron", level)
    assert not codes(bridge / name / "hf", level)


@pytest.mark.parametrize("name", every_third(COMPOSITES, start=2))
def test_every_tensor_that_a_tower_loses_is_found(name: str, bridge: Path) -> None:
    names = names_in(bridge / name / "megatron")
    config = config_of(bridge / name / "hf")
    optional = {
        tensor.megatron
        for tower in composite_models()[name].towers
        for tensor in tower.tensors(config, "")
        if tensor.is_optional
    }
    assert not [*find_missing_megatron_tensors(names, None)]
    assert not [*find_missing_megatron_tensors(names, config)]
    for lost in set(names) - optional:
        remaining = {key for key in names if key != lost}
        assert [*find_missing_megatron_tensors(remaining, None)] == [lost]
        assert [*find_missing_megatron_tensors(remaining, config)] == [lost]


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("gemma3", "multi_modal_projector.proj.weight"),
        ("qwen2_5_vl", "visual.merger.mlp.2.bias"),
        ("qwen3_vl", "vision_model.decoder.layers.mlp.linear_fc1.layer_norm_bias"),
        ("glm4v_moe", "visual.blocks.0.norm1.weight"),
        ("qwen3_omni_moe", "thinker.audio_model.layers.1.fc2.bias"),
    ],
)
def test_validate_names_a_tensor_that_bridge_did_not_save(
    name: str, lost: str, bridge: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(bridge / name / "megatron", tmp_path / "model")
    lose_tensors(folder / "iter_0000000", f"*{lost}")
    assert codes(folder) == {("CK311", lost)}


@pytest.mark.parametrize("lost", ["layers.0.", "layers.1.", "multi_modal_projector."])
def test_validate_and_conversions_name_what_a_hugging_face_model_lacks(
    lost: str, bridge: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(bridge / "gemma3/hf", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    gone = {key for key in tensors if lost in key and "language_model" not in key}
    assert gone
    save_file(
        {key: value for key, value in tensors.items() if key not in gone},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert codes(folder) == {("CK530", key) for key in gone}
    with pytest.raises(CheckpointingException) as caught:
        run(Job(src=folder, dst=tmp_path / "out", to="hf", fsync=False))
    assert caught.value.key in gone
