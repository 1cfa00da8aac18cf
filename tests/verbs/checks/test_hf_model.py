"""A model of transformers against its configuration: what validate finds, and what a conversion
refuses.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.engine.changes.tie import INPUT
from core.errors import CheckpointingException, CorruptError, UnknownTensorError, UnsupportedError
from core.verbs.checks.finding import Finding, Level, Severity, codes
from core.verbs.convert.run import Job, run
from core.verbs.validate.run import validate
from tests.hf.models import loaded_model, logits, saved
from tests.support.damages import MODELS, ONE, TIED, Row, config_changed, prefixed, tensors_changed
from tests.support.rank_files import assert_same_bits

APP = "torch_dcp/fsdp2_dp2"
"""Written by FSDP2 with the layout of torchtitan's top level: the model's keys begin with
``app.model.``; 2 layers.
"""


def copied(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "checkpoint", copy_function=shutil.copyfile))


def own(findings: tuple[Finding, ...]) -> list[tuple[str, str | None]]:
    """Code and file of what these checks found."""
    own_codes = [name for name in codes() if "CK530" <= name <= "CK540"]
    return sorted(
        {(finding.code, finding.file) for finding in findings if finding.code in own_codes}
    )


def config_of_two_layers(golden: Path, folder: Path) -> Path:
    """The ``config.json`` of the model in ``APP``."""
    shutil.copyfile(golden / ONE / "config.json", folder / "config.json")
    config_changed(folder, num_hidden_layers=2, dtype="float32")
    return folder / "config.json"


@pytest.mark.parametrize(
    "row", MODELS, ids=lambda row: f"{row.source}-{row.what}".replace(" ", "_").replace("/", "_")
)
def test_what_validate_finds_a_conversion_to_hugging_face_refuses(
    row: Row, golden: Path, tmp_path: Path
) -> None:
    path = copied(golden / row.source, tmp_path)
    assert own(validate(path).findings) == []
    row.breaks(path)
    for level in Level:
        findings = validate(path, level=level).findings
        assert own(findings) == (sorted(row.found) if level >= row.level else [])
        assert all(finding.hint for finding in findings)
    job = Job(src=path, dst=tmp_path / "out", to="hf", fsync=False)
    if any(finding.severity == Severity.ERROR for finding in findings):
        with pytest.raises(CheckpointingException) as refusal:
            run(job)
        assert refusal.value.hint
        assert not (tmp_path / "out").exists()
    else:
        notes = run(job).notes
        assert row.found[0][0] == "CK539" or any("do not have v_head" in note for note in notes)


def test_a_tied_output_layer_that_is_stored_as_well_is_no_problem(
    golden: Path, tmp_path: Path
) -> None:
    path = copied(golden / TIED, tmp_path)
    tensors_changed(
        path,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    assert own(validate(path, level=Level.DEEP).findings) == []


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "gemma", "mamba2_tied"])
def test_a_tied_model_may_store_only_its_output_layer(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(saved(name, tmp_path / "saved"), path)
    expected = logits(loaded_model(path))
    tensors = load_file(path / "model.safetensors")
    (embedding,) = (
        key for key in tensors if INPUT.search(key) or key.endswith("embeddings.weight")
    )
    tensors_changed(path, lambda each: each.update({"lm_head.weight": each.pop(embedding)}))
    assert torch.equal(logits(loaded_model(path)), expected)
    assert own(validate(path, level=Level.DEEP).findings) == []
    run(Job(src=path, dst=tmp_path / "ranks", to="megatron", fsync=False))
    run(Job(src=tmp_path / "ranks", dst=tmp_path / "back", to="hf", fsync=False))
    assert_same_bits(
        load_file(tmp_path / "back/model.safetensors")[embedding], tensors[embedding], embedding
    )


def test_every_code_has_a_damage() -> None:
    assert {code for row in MODELS for code, _ in row.found} == {
        name for name in codes() if "CK530" <= name <= "CK540"
    }


def test_a_prefix_and_a_configuration_of_another_model_are_refused_with_the_prefix(
    golden: Path, tmp_path: Path
) -> None:
    config = golden / ONE / "config.json"
    with pytest.raises(
        UnknownTensorError, match=r"begin with 'app\.model\.'.* declares 3 layers, .* for 2"
    ) as refusal:
        run(Job(src=golden / APP, dst=tmp_path / "out", to="hf", config=config, fsync=False))
    assert "remove the prefix with --strip-prefix app.model., " in str(refusal.value.hint)
    stripped = ("app.model.",)
    with pytest.raises(
        CorruptError, match="declares 3 layers, but the checkpoint has tensors for 2"
    ):
        run(
            Job(
                src=golden / APP,
                dst=tmp_path / "out",
                to="hf",
                config=config,
                strip_prefix=stripped,
                optim="drop",
            )
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["hf", "megatron", "safetensors"])
def test_the_refusals_options_lead_to_a_model_that_transformers_loads(
    to: str, golden: Path, tmp_path: Path
) -> None:
    config = config_of_two_layers(golden, tmp_path)
    job = Job(src=golden / APP, dst=tmp_path / "out", to=to, config=config, fsync=False)
    with pytest.raises(UnknownTensorError, match=r"begin with 'app\.model\.'") as refusal:
        run(job)
    # A Hugging Face directory has no optimizer anyway; Megatron has one.
    options = {"hf": "", "megatron": r" --rename '^app\.optim\.=optimizer.'"}.get(to, " --no-optim")
    assert refusal.value.hint == f"remove the prefix with --strip-prefix app.model.{options}"
    again = Job(
        src=job.src,
        dst=job.dst,
        to=to,
        config=config,
        strip_prefix=("app.model.",),
        optim="drop",
        fsync=False,
    )
    assert run(again).n_tensors > 0
    if to != "megatron":
        loaded_model(tmp_path / "out")
    assert not own(validate(tmp_path / "out", level=Level.DEEP).findings)


def test_optimizer_state_is_refused_beside_a_model(golden: Path, tmp_path: Path) -> None:
    config = config_of_two_layers(golden, tmp_path)
    with pytest.raises(UnsupportedError, match="cannot store optimizer state") as refusal:
        run(
            Job(
                src=golden / APP,
                dst=tmp_path / "out",
                to="hf",
                config=config,
                strip_prefix=("app.model.",),
                optim="carry",
            )
        )
    assert refusal.value.hint == "drop it with --no-optim"


def test_a_tensor_too_many_is_refused_where_the_user_names_the_configuration(
    golden: Path, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    tensors = load_file(golden / ONE / "model.safetensors")
    save_file(
        {**tensors, "v_head.weight": torch.ones(3)}, tmp_path / "source" / "model.safetensors"
    )
    job = Job(
        src=tmp_path / "source",
        dst=tmp_path / "out",
        to="hf",
        config=golden / ONE / "config.json",
        fsync=False,
    )
    with pytest.raises(UnknownTensorError, match="no such tensor") as refusal:
        run(job)
    assert refusal.value.key == "v_head.weight"


def test_what_was_written_under_a_prefix_is_found_and_the_prefix_named(
    golden: Path, tmp_path: Path
) -> None:
    path = copied(golden / ONE, tmp_path)
    tensors_changed(path, prefixed)
    config_changed(path, num_hidden_layers=2)
    (finding,) = [
        problem for problem in validate(path).findings if problem.severity == Severity.ERROR
    ]
    assert (finding.code, finding.key) == ("CK530", "model.embed_tokens.weight")
    assert finding.hint == "convert it again with --strip-prefix app.model."


def test_the_file_of_a_whole_model_alone_is_compared_with_its_configuration(
    golden: Path, tmp_path: Path
) -> None:
    path = copied(golden / ONE, tmp_path)
    assert own(validate(path / "model.safetensors").findings) == []
    config_changed(path, num_hidden_layers=5)
    assert own(validate(path / "model.safetensors").findings) == [("CK533", "config.json")]


@pytest.mark.parametrize(
    "name", ["model-00001-of-00003.safetensors", "weights.safetensors", "adapter_model.safetensors"]
)
def test_a_file_that_is_no_whole_model_is_not_judged(
    name: str, golden: Path, tmp_path: Path
) -> None:
    path = copied(golden / ONE, tmp_path)
    tensors_changed(path, lambda tensors: tensors.pop("model.norm.weight"))
    (path / "model.safetensors").rename(path / name)
    assert own(validate(path / name).findings) == []


@pytest.mark.parametrize(
    "config",
    [
        {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30", "sample_size": 64},
        {"architecture": "resnet50", "num_classes": 1000},
        {"dim": 4096, "n_layers": 32, "vocab_size": 32000},
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
        },
    ],
    ids=["diffusers", "timm", "mistral", "eagle"],
)
def test_configurations_of_other_software_are_not_held_against_weights(
    config: dict[str, object], golden: Path, tmp_path: Path
) -> None:
    path = copied(golden / ONE, tmp_path)
    (path / "config.json").write_text(json.dumps(config))
    assert own(validate(path).findings) == []


def test_weights_that_mlx_wrote_are_not_judged(golden: Path, tmp_path: Path) -> None:
    """MLX keeps experts of a layer in one tensor and packs quantized weights, under names of its
    own.
    """
    path = copied(golden / ONE, tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.scales"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "mlx"})
    assert own(validate(path).findings) == []


def test_an_adapter_beside_the_configuration_of_its_model_is_not_judged(
    golden: Path, tmp_path: Path
) -> None:
    path = copied(golden / ONE, tmp_path)
    (path / "model.safetensors").unlink()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(
        {key: torch.ones(2, 32)}, path / "adapter_model.safetensors", metadata={"format": "pt"}
    )
    assert own(validate(path).findings) == []
