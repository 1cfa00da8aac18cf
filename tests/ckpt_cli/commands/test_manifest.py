"""``ckpt manifest``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckpt_cli.app import main


@pytest.fixture
def checkpoint(golden: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "copy"
    shutil.copytree(golden / "mcore_legacy/dense_gelu/tp2_pp2", copied)
    return copied


def test_manifest_writes_into_the_checkpoint_and_says_so(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["manifest", str(checkpoint)]) == 0
    captured = capsys.readouterr()
    manifest_path = checkpoint / "iter_0000010/ckpt-manifest.json"
    assert str(manifest_path) in captured.out and captured.err == ""
    assert json.loads(manifest_path.read_text())["version"] == 2
    assert main(["manifest", str(checkpoint)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["manifest", "--force", "-q", str(checkpoint)]) == 0
    assert capsys.readouterr().out == ""
    assert main(["validate", "--deep", str(checkpoint), "--against", str(manifest_path)]) == 0


def test_its_report_is_one_json_object(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "manifest",
        "--json",
        "--no-fingerprints",
        "-o",
        str(tmp_path / "m.json"),
        str(checkpoint),
    ]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "ckpt.manifest-report/1" and report["manifest"] == str(
        tmp_path / "m.json"
    )
    assert (report["n_files"], report["n_fingerprints"], report["format"]) == (4, 0, "megatron")
    assert "fingerprints" not in json.loads((tmp_path / "m.json").read_text())


def test_a_single_file_gets_its_manifest_beside_it(golden: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    shutil.copyfile(golden / "hf/llama/torch_single/model_zip.pt", file)
    assert main(["manifest", "-q", str(file)]) == 0
    assert (tmp_path / "model.pt.ckpt-manifest.json").exists()
    assert main(["validate", "--deep", "-q", str(file)]) == 0


def test_what_is_missing_is_said_before_anything_is_read(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["manifest", str(tmp_path / "nothing")]) == 2
    assert main(["manifest", "-o", str(tmp_path / "no/such/m.json"), str(checkpoint)]) == 2
    assert "directory not found" in capsys.readouterr().err
    assert main(["manifest", "--rules", str(tmp_path / "no.toml"), str(checkpoint)]) == 2
    assert "--rules: file not found" in capsys.readouterr().err
