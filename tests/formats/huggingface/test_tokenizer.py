"""``--tokenizer DIR``: DIR's tokenizer files become part of a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
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


def _save_tokenizer(path: Path, n_tokens: int, **special: str) -> None:
    """Let transformers save a tokenizer of words, with special tokens at its end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(n_tokens - len(special))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)


_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


@pytest.mark.parametrize("is_in_checkpoint", [False, True])
def test_special_tokens_complete_the_configuration_as_transformers_reads_it(
    golden: Path, tmp_path: Path, is_in_checkpoint: bool
) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    src, out, tokenizer = golden / _MODEL, tmp_path / "out", tmp_path / "tokenizer"
    if is_in_checkpoint:
        src = tmp_path / "run"
        shutil.copytree(golden / _MODEL, src)
        tokenizer = next(src.glob("iter_*"), src) / "tokenizer"
    _save_tokenizer(tokenizer, 300, **_SPECIAL)
    report = core.convert(src, out, to="hf", tokenizer=None if is_in_checkpoint else tokenizer)
    saved = AutoTokenizer.from_pretrained(out)
    config, generation = AutoConfig.from_pretrained(out), GenerationConfig.from_pretrained(out)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(config, name) == getattr(generation, name) == getattr(saved, name)
    assert saved.eos_token_id in range(297, 300)
    assert sum("tokenizer" in note for note in report.notes) == 2


def test_a_generation_configuration_beside_the_tokenizer_is_taken(
    golden: Path, tmp_path: Path
) -> None:
    _save_tokenizer(tmp_path / "tokenizer", 300, **_SPECIAL)
    stated = b'{"eos_token_id": [298, 7], "temperature": 0.6}'
    (tmp_path / "tokenizer/generation_config.json").write_bytes(stated)
    core.convert(golden / _MODEL, tmp_path / "out", to="hf", tokenizer=tmp_path / "tokenizer")
    assert (tmp_path / "out/generation_config.json").read_bytes() == stated


def test_a_tokenizer_with_more_tokens_than_rows_is_refused_and_the_hint_leads_on(
    golden: Path, tmp_path: Path
) -> None:
    _save_tokenizer(tmp_path / "tokenizer", 302, **_SPECIAL)
    job = Job(src=golden / _MODEL, dst=tmp_path / "out", to="hf", tokenizer=tmp_path / "tokenizer")
    with pytest.raises(
        UsageError, match="IDs up to 301, but the model's vocabulary has only 300"
    ) as error:
        run(job)
    assert "--vocab-size 302" in (error.value.hint or "")
    run(replace(job, vocab_size=302))
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 302


def test_the_configuration_of_a_hugging_face_source_keeps_its_tokens(
    golden: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(golden / "hf/llama/safetensors_single", source)
    before = json.loads((source / "config.json").read_text())
    _save_tokenizer(tmp_path / "tokenizer", before["vocab_size"], **_SPECIAL)
    run(Job(src=source, dst=tmp_path / "out", to="hf", tokenizer=tmp_path / "tokenizer"))
    after = json.loads((tmp_path / "out/config.json").read_text())
    assert all(after[name] == value for name, value in before.items() if value is not None)


def test_what_a_configuration_states_stands_in_the_generation_configuration_too(
    golden: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(golden / "hf/llama/safetensors_single", source)
    (source / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": [7, 8]}
    (source / "config.json").write_text(json.dumps(config))
    _save_tokenizer(tmp_path / "tokenizer", config["vocab_size"], **_SPECIAL)
    run(Job(src=source, dst=tmp_path / "out", to="hf", tokenizer=tmp_path / "tokenizer"))
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation["eos_token_id"] == [7, 8]


def test_an_added_token_without_a_row_is_a_note(golden: Path, tmp_path: Path) -> None:
    _save_tokenizer(tmp_path / "tokenizer", 300, **_SPECIAL)
    (tmp_path / "tokenizer/added_tokens.json").write_text('{"<image>": 300}')
    job = Job(src=golden / _MODEL, dst=tmp_path / "out", to="hf", tokenizer=tmp_path / "tokenizer")
    assert any(
        "no rows for these tokens of its tokenizer: <image>" in note for note in run(job).notes
    )
