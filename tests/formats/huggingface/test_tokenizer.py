"""``--tokenizer DIR``: DIR's tokenizer files become part of a Hugging Face directory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import core
from core.errors import UsageError
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import Job, run

_MODEL = "mcore_legacy/dense_gqa/tp2_pp1_optim"
_FILES = {"tokenizer.json": b"{}", "tokenizer_config.json": b'{"a": 1}', "merges.txt": b"a b"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with tokenizer files, and others."""
    path = tmp_path / "tokenizer"
    path.mkdir()
    for name, data in _FILES.items():
        (path / name).write_bytes(data)
    for name in ("config.json", "generation_config.json", "model.safetensors", "README.md"):
        (path / name).write_bytes(b"other")
    return path


def test_only_tokenizer_files_are_copied_and_recorded(
    golden: Path, tmp_path: Path, folder: Path
) -> None:
    out = tmp_path / "out"
    report = core.convert(golden / _MODEL, out, to="hf", tokenizer=folder)
    assert {name: (out / name).read_bytes() for name in _FILES} == _FILES
    assert set(report.files) == {"model.safetensors", "config.json", *_FILES}
    manifest = json.loads((out / "ckpt-manifest.json").read_text())
    assert set(_FILES) <= {file["path"] for file in manifest["files"]}
    assert not any("tokenizer" in note for note in report.notes)


def test_the_plan_lists_the_files(golden: Path, tmp_path: Path, folder: Path) -> None:
    job = Job(src=golden / _MODEL, dst=tmp_path / "out", to="hf", tokenizer=folder)
    with prepare(job) as prepared:
        sizes = dict(prepared.files)
    assert {name: sizes[name] for name in _FILES} == {
        name: len(data) for name, data in _FILES.items()
    }
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("to", "name"),
    [("hf", "out"), ("hf", "a.safetensors"), ("dcp", "out"), ("torch", "a.pt")],
)
def test_the_option_is_named_where_it_adds_tokenizer_files(
    to: str, name: str, folder: Path, golden: Path, tmp_path: Path
) -> None:
    job = Job(src=golden / _MODEL, dst=tmp_path / name, to=to, names="hf", optim="drop")
    with prepare(job) as result:
        is_named = any("--tokenizer" in note for note in result.notes)
    try:
        with prepare(replace(job, tokenizer=folder)):
            assert is_named
    except UsageError:
        assert not is_named


@pytest.mark.parametrize("to", ["dcp", "megatron", "safetensors"])
def test_other_destinations_refuse_the_option(
    golden: Path, tmp_path: Path, folder: Path, to: str
) -> None:
    with pytest.raises(UsageError, match="not a Hugging Face directory"):
        run(Job(src=golden / _MODEL, dst=tmp_path / "out", to=to, optim="drop", tokenizer=folder))
    assert not (tmp_path / "out").exists()


def test_one_file_is_no_directory(golden: Path, tmp_path: Path, folder: Path) -> None:
    source = golden / "hf/llama/safetensors_single"
    with pytest.raises(UsageError, match="not a Hugging Face directory"):
        run(Job(src=source, dst=tmp_path / "a.safetensors", to="hf", tokenizer=folder))


def test_a_directory_without_tokenizer_files_is_refused(golden: Path, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UsageError, match="--tokenizer"):
            run(Job(src=golden / _MODEL, dst=tmp_path / "out", to="hf", tokenizer=path))


def test_a_file_that_the_source_has_too_is_refused(
    golden: Path, tmp_path: Path, folder: Path
) -> None:
    first = tmp_path / "first"
    run(Job(src=golden / _MODEL, dst=first, to="hf", tokenizer=folder, fsync=False))
    with pytest.raises(UsageError, match="SRC already has"):
        run(Job(src=first, dst=tmp_path / "out", to="hf", tokenizer=folder))
