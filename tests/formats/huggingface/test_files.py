"""Small files next to the weights: which are carried, byte for byte, and the configuration within
bounds.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.tensor import Tensor
from core.errors import CorruptError, StorageError, UnsupportedError
from core.files.json_object import MAX_VALUES
from core.files.store import LocalStore, MemoryStore, override
from core.formats.huggingface.files import (
    carried_files,
    config_number,
    file_images,
    read_config_json,
    with_carried,
)
from core.opening.target import partitioned
from tests.support.materialize import materialized

CARRIED = tuple(
    """
    config.json generation_config.json tokenizer.json tokenizer_config.json tokenizer.model
    tokenizer.tiktoken special_tokens_map.json vocab.json vocab.txt vocab.bpe merges.txt
    spm.model preprocessor_config.json chat_template.json chat_template.jinja extra.jinja
    added_tokens.json README.md LICENSE LICENSE.txt NOTICE modeling_llama.py
    configuration_x.py adapter_config.json model_index.json qwen.tiktoken USE_POLICY.md
    größe.json
    """.split()
)
LEFT = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "x.safetensors.index.fp16.json",
    "ckpt-manifest.json",
    "model.safetensors.ckpt-manifest.json",
    "ckpt-objects.pt",
    "tokenizer.pt",
    "vocab.npy",
    "metadata.json",
    "zarr.json",
    ".gitattributes",
    ".hidden.json",
    "training_args.bin",
    "events.out",
    "optimizer.pt",
    "notes.txt",
    "back\\slash.json",
    "model.gguf",
    "line\nbreak.json",
)


def empty() -> Catalog:
    return Catalog("fake", None, {})


def test_what_transformers_needs_is_carried_and_weights_are_not() -> None:
    store = MemoryStore({name: name.encode() for name in (*CARRIED, *LEFT, "folder/config.json")})
    assert carried_files(store) == {name: len(name.encode()) for name in sorted(CARRIED)}


def test_carried_files_come_out_byte_for_byte() -> None:
    files = {"config.json": b'{"a": 1}', "merges.txt": bytes(range(256)), "README.md": b""}
    store = MemoryStore(files)
    source = with_carried(empty(), store)
    assert list(source.files) == sorted(files)
    assert source.files["merges.txt"] == source.tensor("file:merges.txt") == Tensor("uint8", (256,))
    both = replace(source, files={**source.files, "new.json": b"{}"})
    target = partitioned(both, format="fake", by="whole")
    contents = materialized(file_images(target), target=target, source=source, store=store)
    assert contents == {**files, "new.json": b"{}"}


def test_a_tensor_with_the_key_of_a_file_is_refused() -> None:
    taken = Catalog("fake", None, {"file:config.json": Tensor("uint8", (1,))})
    assert with_carried(taken, MemoryStore({"README.md": b""})).files
    with pytest.raises(UnsupportedError, match="key is reserved for a sidecar file") as caught:
        with_carried(taken, MemoryStore({"config.json": b"{}"}))
    assert caught.value.key == "file:config.json"


def test_a_directory_without_such_files_stays_as_it_is() -> None:
    catalog = empty()
    assert with_carried(catalog, MemoryStore({"model.safetensors": b""})) is catalog
    assert file_images(catalog) == []


def test_links_as_in_the_hugging_face_cache_are_carried(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_bytes(b"{}")
    (tmp_path / "snapshot").mkdir()
    os.symlink("../blobs/abc", tmp_path / "snapshot" / "config.json")
    assert carried_files(LocalStore(tmp_path / "snapshot")) == {"config.json": 2}


def test_the_catalog_lists_the_copied_files_among_its_tensors_and_the_made_ones_apart() -> None:
    source = with_carried(empty(), MemoryStore({"config.json": b"{}", "README.md": b"x"}))
    changed = replace(source, files={**source.files, "config.json": b'{"new": 1}', "b": b"2"})
    assert [key for key, _ in source.all_tensors()] == ["file:README.md", "file:config.json"]
    assert [key for key, _ in changed.all_tensors()] == ["file:README.md"]
    assert changed.find("file:config.json") is None
    assert changed.documents == {"config.json": b'{"new": 1}', "b": b"2"}


def test_the_configuration_is_parsed(golden: Path) -> None:
    path = golden / "hf" / "llama" / "safetensors_single"
    assert read_config_json(LocalStore(path)) == json.loads((path / "config.json").read_text())
    assert read_config_json(MemoryStore()) is None
    assert read_config_json(MemoryStore({"config.json": b'\xef\xbb\xbf{"a": 1}'})) == {"a": 1}


BROKEN = {
    "empty": (b"", "is not valid JSON"),
    "a list": (b"[]", "top level of the JSON file is not an object"),
    "cut": (b'{"a": 1', "is not valid JSON"),
    "no UTF-8": (b'{"a": "\xff"}', "is not valid JSON"),
    "a key twice": (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
    "not a number": (b'{"a": nan}', "is not valid JSON"),
    "too deep": (b'{"a":' + b"[" * 100_000, "is not valid JSON"),
    "too many digits": (b'{"a":' + b"9" * 100_000 + b"}", "is not valid JSON"),
    "too many values": (
        b'{"a":[' + b"[]," * (MAX_VALUES // 2 + 10) + b"1]}",
        "JSON values; the limit is",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_configuration_is_refused_with_its_file(case: str) -> None:
    data, message = BROKEN[case]
    with pytest.raises(CorruptError) as caught:
        read_config_json(MemoryStore({"config.json": data}))
    assert message in caught.value.message and caught.value.file == "config.json"


def test_numbers_may_stand_in_the_text_part() -> None:
    assert config_number({"vocab_size": 5}, "vocab_size") == 5
    assert config_number({"text_config": {"vocab_size": 7}}, "vocab_size") == 7
    assert config_number({"text_config": 3}, "vocab_size") is None
    for odd in (0, -1, 1.5, "3", True, [1]):
        with pytest.raises(CorruptError, match="not a positive integer"):
            config_number({"vocab_size": odd}, "vocab_size")


class LockedFolder(MemoryStore):
    """A store in which one directory cannot be listed."""

    @override
    def files(self, under: str = "") -> list[str]:
        if under == "extra/locked":
            raise StorageError("permission denied", file=under)
        return super().files(under)


def test_a_folder_that_is_not_carried_says_why() -> None:
    contents = {"config.json": b"{}", "code/a.py": b"1", "extra/a.py": b"1", "extra/locked/b": b""}
    contents |= {f"large/{number}.json": b"" for number in range(10_001)}
    empty = Catalog("fake", None, {})
    catalog = with_carried(empty, LockedFolder(contents))
    assert set(catalog.files) == {"config.json", "code/a.py"}
    assert catalog.notes == (
        "extra/ is not copied: extra/locked: permission denied",
        "large/ is not copied: the directory has more than 10,000 files",
    )
