"""Pipelines of diffusers: all components are one checkpoint, and become a pipeline again."""

from __future__ import annotations

import filecmp
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.errors import MissingShardError, UnsafeError, UnsupportedError
from core.opening.open import open_checkpoint
from core.opening.source_files import unread_files
from core.verbs.checks.finding import Level
from core.verbs.convert.prepare import prepare as prepared
from core.verbs.convert.run import Job, run
from core.verbs.diff.run import DiffJob, diff
from core.verbs.validate.run import validate

MODELS = {"unet", "vae", "text_encoder"}


@pytest.fixture
def copy(pipelines: Path, tmp_path: Path) -> Path:
    """A writable copy."""
    return Path(shutil.copytree(pipelines / "pipeline", tmp_path / "copy"))


def files_in(folder: Path) -> list[str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of all weight files below a folder, by directory and name."""
    return {
        f"{path.parent.name}.{key}": tensor
        for path in folder.rglob("*.safetensors")
        for key, tensor in load_file(path).items()
    }


def test_a_pipeline_becomes_the_same_files_again(pipelines: Path, tmp_path: Path) -> None:
    source = pipelines / "pipeline"
    run(Job(src=source, dst=tmp_path / "out", to="safetensors"))
    names = files_in(source)
    assert [name for name in files_in(tmp_path / "out") if "manifest" not in name] == names
    same, *rest = filecmp.cmpfiles(source, tmp_path / "out", names, shallow=False)
    assert (len(same), rest) == (10, [[], []])


def test_every_component_is_cast_and_split_into_files_of_its_own(
    pipelines: Path, tmp_path: Path
) -> None:
    job = Job(
        src=pipelines / "pipeline",
        dst=tmp_path / "out",
        to="safetensors",
        dtype=((None, "bfloat16"),),
        max_shard_size=20_000,
    )
    run(job)
    assert "unet/diffusion_pytorch_model.safetensors.index.json" in files_in(tmp_path / "out")
    assert "vae/diffusion_pytorch_model.safetensors" in files_in(tmp_path / "out")
    before, after = weights_of(pipelines / "pipeline"), weights_of(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor.bfloat16()), key


def test_a_variant_is_written_under_the_names_that_need_no_option(
    pipelines: Path, tmp_path: Path
) -> None:
    run(Job(src=pipelines / "fp16", dst=tmp_path / "out", to="safetensors"))
    assert files_in(pipelines / "pipeline") == [
        name for name in files_in(tmp_path / "out") if "manifest" not in name
    ]


def test_other_formats_hold_the_tensors_under_the_names_of_their_components(
    pipelines: Path, tmp_path: Path
) -> None:
    report = run(Job(src=pipelines / "pipeline", dst=tmp_path / "dcp", to="dcp"))
    assert any("scheduler/scheduler_config.json" in line for line in report.dropped)
    result = diff(DiffJob(a=pipelines / "pipeline", b=tmp_path / "dcp"))
    assert result.same and len(result.tensors) > 200


def test_weights_of_torch_files_are_read_as_well(copy: Path, tmp_path: Path) -> None:
    weights = load_file(copy / "vae/diffusion_pytorch_model.safetensors")
    (copy / "vae/diffusion_pytorch_model.safetensors").unlink()
    torch.save(weights, copy / "vae/diffusion_pytorch_model.bin")
    run(Job(src=copy, dst=tmp_path / "out", to="safetensors"))
    after = load_file(tmp_path / "out/vae/diffusion_pytorch_model.safetensors")
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[key], weights[key]) for key in weights)


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_objects_of_a_component_are_listed(to: str, copy: Path, tmp_path: Path) -> None:
    weights = load_file(copy / "vae/diffusion_pytorch_model.safetensors")
    (copy / "vae/diffusion_pytorch_model.safetensors").unlink()
    state = {"epoch": 3, "seen": [{"key"}, {"mean": torch.ones(3)}], "fn": torch.nn.Identity}
    torch.save({**weights, **state}, copy / "vae/diffusion_pytorch_model.bin")
    job = Job(src=copy, dst=tmp_path / "out", to=to, fsync=False)
    with prepared(job) as result:
        names = {name for entries in result.dropped_entries for name in entries.names}
        assert {"vae.epoch", "vae.seen.0", "vae.fn"} <= names
        assert set(result.form.tensors) >= {f"vae.{key}" for key in (*weights, "seen.1.mean")}


def test_a_complete_pipeline_is_valid_and_damage_names_the_component(copy: Path) -> None:
    assert not validate(copy, level=Level.HEADERS).findings
    weights = copy / "unet/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    files = [finding.file for finding in validate(copy, level=Level.HEADERS).findings]
    assert files and set(files) == {"unet/diffusion_pytorch_model.safetensors"}


@pytest.mark.parametrize("missing", ["vae", "scheduler"])
def test_a_missing_component_is_reported(copy: Path, missing: str) -> None:
    shutil.rmtree(copy / missing)
    with pytest.raises(MissingShardError, match=f"lists the component {missing}"):
        open_checkpoint(copy)


def test_a_model_without_weights_is_reported(copy: Path) -> None:
    (copy / "unet/diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(MissingShardError, match="lists the model unet, but its weights"):
        open_checkpoint(copy)


def test_a_directory_that_the_index_does_not_list_is_a_separate_checkpoint(copy: Path) -> None:
    shutil.copytree(copy / "vae", copy / "other_vae")
    opened = open_checkpoint(copy)
    opened.store.close()
    assert opened.below == ("other_vae",)
    assert {key.partition(".")[0] for key in opened.catalog.tensors} == MODELS


def test_single_file_copies_of_the_pipeline_beside_it_are_not_read(copy: Path) -> None:
    for name in ("v1-5.safetensors", "v1-5-pruned.safetensors"):
        shutil.copy(copy / "vae/diffusion_pytorch_model.safetensors", copy / name)
    opened = open_checkpoint(copy)
    opened.store.close()
    assert {key.partition(".")[0] for key in opened.catalog.tensors} == MODELS
    assert "v1-5.safetensors" in unread_files(opened)


def test_a_part_of_a_pipeline_is_refused(pipelines: Path, tmp_path: Path) -> None:
    job = Job(src=pipelines / "pipeline", dst=tmp_path / "o", to="safetensors", include=("unet.*",))
    with pytest.raises(UnsupportedError, match="would have no weights for text_encoder"):
        run(job)


def test_a_component_outside_of_the_directory_is_refused(copy: Path) -> None:
    text = (copy / "model_index.json").read_text().replace('"vae"', '"../vae"')
    (copy / "model_index.json").write_text(text)
    with pytest.raises(UnsafeError):
        open_checkpoint(copy)
