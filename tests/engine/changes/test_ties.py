"""Tensors that share their bytes, in formats whose files hold bytes once: what is there, what is
said, what loads.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from core.verbs.convert.job import Report
from core.verbs.convert.run import Job, run

INPUT, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def converted(src: Path, dst: Path, to: str, **options: Any) -> Report:
    return run(Job(src=src, dst=dst, to=to, fsync=False, **options))


def tied_file(path: Path) -> Path:
    weight = torch.arange(12.0).reshape(3, 4)
    torch.save({"a": weight, "b": weight, "c": {"d": weight}, "e": torch.ones(2)}, path)
    return path


def keys_of(file: Path) -> tuple[set[str], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata."""
    with safe_open(file, framework="pt") as opened:
        return set(opened.keys()), opened.metadata()


def test_names_without_bytes_are_told_and_not_counted(tmp_path: Path) -> None:
    report = converted(tied_file(tmp_path / "x.pt"), tmp_path / "out", "safetensors")
    keys, metadata = keys_of(tmp_path / "out/model.safetensors")
    assert keys == {"a", "e"} and report.n_tensors == 2
    assert metadata == {"format": "pt", "b": "a", "c.d": "a"}
    (note,) = [note for note in report.notes if "tied" in note]
    assert "b (a), c.d (a)" in note and "--untie b=a" in note


def test_the_option_that_the_note_proposes_writes_both(tmp_path: Path) -> None:
    ties = (("b", "a"), ("c.d", "a"))
    report = converted(tied_file(tmp_path / "x.pt"), tmp_path / "out", "safetensors", untie=ties)
    keys, metadata = keys_of(tmp_path / "out/model.safetensors")
    assert keys == {"a", "b", "c.d", "e"} and report.n_tensors == 4 and metadata == {"format": "pt"}
    assert not any("are stored once" in note for note in report.notes)


@pytest.mark.parametrize("to", ["dcp", "zarr3", "torch_dist"])
def test_formats_without_ties_say_that_tied_tensors_are_written_separately(
    to: str, tmp_path: Path
) -> None:
    report = converted(tied_file(tmp_path / "x.pt"), tmp_path / "out", to)
    assert report.n_tensors == 4
    assert "tied tensors are written separately: b (a), c.d (a)" in report.notes


def test_the_count_is_that_of_the_destination(tmp_path: Path) -> None:
    report = converted(tied_file(tmp_path / "x.pt"), tmp_path / "out", "dcp")
    entries = FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata.values()
    assert report.n_tensors == sum(isinstance(entry, TensorStorageMetadata) for entry in entries)


def qwen2(folder: Path, *, is_tied: bool) -> Any:
    """A tiny model as pytorch_model.bin, whose output layer comes first and shares the bytes of its
    input.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    config = Qwen2Config(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=20,
        tie_word_embeddings=is_tied,
    )
    model = Qwen2ForCausalLM(config)
    state = OrderedDict(model.state_dict())
    state[OUTPUT] = state[INPUT]
    state.move_to_end(OUTPUT, last=False)
    folder.mkdir()
    model.config.architectures = ["Qwen2ForCausalLM"]
    model.config.save_pretrained(folder)
    torch.save(state, folder / "pytorch_model.bin")
    return state


@pytest.mark.parametrize("is_tied", [True, False])
def test_transformers_finds_every_tied_weight(is_tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    state = qwen2(tmp_path / "in", is_tied=is_tied)
    config = json.loads((tmp_path / "in/config.json").read_text())
    config["tie_word_embeddings"] = is_tied
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    report = converted(tmp_path / "in", tmp_path / "out", "safetensors")
    keys, _ = keys_of(tmp_path / "out/model.safetensors")
    assert INPUT in keys and (OUTPUT in keys) is not is_tied and report.n_tensors == len(keys)
    assert any(OUTPUT in note for note in report.notes)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(model.lm_head.weight, state[OUTPUT])
