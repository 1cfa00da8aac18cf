"""core.opening.open: from what the user points at to a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from core.engine.catalog.facets import RankFacts
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from core.opening.open import open_checkpoint
from core.verbs.diff.run import DiffJob, diff
from tests.support.facets import facet_of


def test_a_root_an_iteration_a_file_and_a_rank_directory_open(golden: Path) -> None:
    root = golden / "mcore_legacy/dense_gqa/tp2_pp2"
    for path in (root, root / "iter_0000010"):
        checkpoint = open_checkpoint(path)
        assert (checkpoint.format.name, checkpoint.iteration) == ("megatron", 10)
        assert checkpoint.path.name == "iter_0000010"
    single = open_checkpoint(root / "iter_0000010/mp_rank_00_001/model_optim_rng.pt")
    assert facet_of(single.catalog, RankFacts).is_single_rank
    assert open_checkpoint(golden / "torch_dcp/fsdp2_dp2/.metadata").format.name == "dcp"
    assert open_checkpoint(golden / "hf/llama/torch_single/model_zip.pt").format.name == "torch"


def test_the_tracker_chooses_and_iteration_overrides_it(golden: Path, tmp_path: Path) -> None:
    source = golden / "mcore_torch_dist/dense_gqa/tp2_pp2/iter_0000010"
    for number in (20, 30):
        shutil.copytree(source, tmp_path / f"iter_{number:07d}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20\n")
    assert open_checkpoint(tmp_path).path.name == "iter_0000020"
    with pytest.raises(UsageError, match="iteration 25 not found") as caught:
        open_checkpoint(tmp_path, iteration=25)
    assert "20, 30" in str(caught.value)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    newest = open_checkpoint(tmp_path)
    assert newest.path.name == "iter_0000030"
    assert "no tracker" in newest.notes[0]


@pytest.mark.parametrize("named", ["", "iter_0000010"])
def test_an_error_names_the_file_below_the_path_that_was_given(
    golden: Path, tmp_path: Path, named: str
) -> None:
    root = Path(shutil.copytree(golden / "mcore_legacy/dense_gqa/tp2_pp2", tmp_path / "run"))
    damaged = root / "iter_0000010/mp_rank_01_000/model_optim_rng.pt"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(CheckpointingException) as caught:
        open_checkpoint(root / named)
    assert caught.value.file == damaged.relative_to(root / named).as_posix()
    with pytest.raises(CheckpointingException) as caught:
        diff(DiffJob(a=root / named, b=golden / "mcore_legacy/dense_gqa/tp2_pp2"))
    assert caught.value.file == str(damaged)


def test_an_error_names_a_file_that_begins_with_a_dot_below_the_current_directory(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(shutil.copytree(golden / "mcore_torch_dist/dense_gqa/tp2_pp2", tmp_path / "run"))
    (root / "iter_0000010/.metadata").write_bytes(b"")
    monkeypatch.chdir(root)
    with pytest.raises(CheckpointingException) as caught:
        open_checkpoint(Path())
    assert caught.value.file == "iter_0000010/.metadata"


def test_a_release_directory_is_found(golden: Path, tmp_path: Path) -> None:
    shutil.copytree(golden / "mcore_legacy/dense_gqa/tp1_pp1/iter_0000010", tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert open_checkpoint(tmp_path).path.name == "release"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("99", MissingShardError),
        ("soon", CorruptError),
        ("../../etc", CorruptError),
        ("", CorruptError),
    ],
)
def test_a_tracker_that_leads_nowhere_is_an_error_that_names_it(
    tmp_path: Path, text: str, error: type[CheckpointingException]
) -> None:
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(error, match="tracker") as caught:
        open_checkpoint(tmp_path)
    assert "latest_checkpointed_iteration.txt" in str(caught.value)


def test_nothing_and_emptiness_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(UnsupportedError, match="empty"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UnsupportedError, match="known format"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("model.gguf", "a GGUF file"),
        ("model.nemo", "a NeMo archive"),
    ],
)
def test_the_usual_formats_that_are_not_read_are_named(
    tmp_path: Path, name: str, title: str
) -> None:
    (tmp_path / name).write_bytes(b"GGUF\3\0\0\0" + bytes(64))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UnsupportedError, match=f"ckpt cannot read {title}") as refusal:
            open_checkpoint(path)
        assert "safetensors" in str(refusal.value.hint)


def test_deepspeeds_trackers_lead_to_the_directory_that_they_name(
    golden: Path, tmp_path: Path
) -> None:
    opened = open_checkpoint(golden / "deepspeed/zero1_dp2_bf16")
    assert (opened.format.name, opened.path.name, opened.iteration) == (
        "deepspeed",
        "global_step10",
        10,
    )
    opened = open_checkpoint(golden / "deepspeed_universal/zero1_dp2_bf16")
    assert (opened.format.name, opened.path.name) == (
        "deepspeed_universal",
        "global_step10_universal",
    )
    (tmp_path / "latest").write_text("global_step7")
    missing = "the tracker names global_step7, which is missing"
    with pytest.raises(MissingShardError, match=missing) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint == "pass the checkpoint's own directory"
    (tmp_path / "global_step6").mkdir()
    with pytest.raises(MissingShardError, match=missing) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint == f"pass one of the iteration directories: {tmp_path}/global_step6"
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(UnsafeError):
        open_checkpoint(tmp_path)


def test_a_checkpoint_with_directories_that_are_called_like_steps_is_read_itself(
    golden: Path, tmp_path: Path
) -> None:
    for name in (".", "checkpoint-10"):
        shutil.copytree(golden / "hf/llama/safetensors_single", tmp_path / name, dirs_exist_ok=True)
    assert open_checkpoint(tmp_path).path == tmp_path
    assert open_checkpoint(tmp_path, iteration=10).path == tmp_path / "checkpoint-10"


def test_a_folder_of_checkpoints_names_those_below_it(golden: Path) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        open_checkpoint(golden / "mcore_legacy/dense_gqa")
    assert "dense_gqa/tp1_pp1_dp2_distopt, " in str(refusal.value.hint)


@pytest.mark.parametrize(
    "path",
    [
        "hf/llama/safetensors_sharded/model.safetensors.index.json",
        "hf/llama/safetensors_sharded/config.json",
    ],
)
def test_an_index_stands_for_its_directory(golden: Path, path: str) -> None:
    opened = open_checkpoint(golden / path)
    assert opened.format.name == "safetensors"
    assert opened.path == (golden / path).parent


def test_a_wrong_iteration_beside_one_checkpoint_is_refused(golden: Path) -> None:
    with pytest.raises(UsageError, match="iteration 10"):
        open_checkpoint(golden / "mcore_legacy/dense_gqa/tp1_pp1/iter_0000010", iteration=11)


def test_a_manifest_stands_for_its_checkpoint(golden: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(golden / "hf/llama/safetensors_single", folder)
    (folder / "ckpt-manifest.json").write_text("{}")
    assert open_checkpoint(folder / "ckpt-manifest.json").path == folder
