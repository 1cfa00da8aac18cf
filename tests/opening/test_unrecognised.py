"""What is no checkpoint is called what it is, with what to point at instead."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from shlex import quote

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckpt_cli.app import main
from core.errors import CheckpointingException, CorruptError, UnsupportedError
from core.files.store import MemoryStore
from core.files.substitute import substitute_of
from core.formats.huggingface.bin_format import read as read_bin_shards
from core.opening.open import open_checkpoint
from core.verbs.checks.finding import Level, Severity
from core.verbs.validate.run import validate

PAGE = (
    b"<!DOCTYPE html>\n<html lang='en'><head><title>Sign in</title></head><body></body></html>" * 40
)
BODY = b'{"error":"Repository not found","message":"Access to model org/gated is restricted"}'
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9976576152\n"
)
NOTHING = b"Entry not found"
INSTEAD = {
    "a page": (PAGE, "a web page"),
    "a message": (BODY, "JSON text, such as a server's error message"),
    "a pointer": (POINTER, "a Git LFS pointer"),
    "a sentence": (NOTHING, "text that begins with 'Entry not found'"),
    "a page of XML": (
        b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>',
        "a web page",
    ),
}


def saved(path: Path) -> Path:
    torch.save({"w": torch.arange(6.0)}, path)
    return path


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.pt", "pytorch_model.bin", "last.ckpt", "model.pth"]
)
@pytest.mark.parametrize("case", INSTEAD)
def test_what_was_saved_in_place_of_weights_is_told(case: str, name: str, tmp_path: Path) -> None:
    data, title = INSTEAD[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointingException, match=title) as refusal:
        open_checkpoint(tmp_path / name)
    assert refusal.value.hint
    assert ("git lfs pull" in refusal.value.hint) == (case == "a pointer")


@pytest.mark.parametrize("case", INSTEAD)
def test_text_under_the_name_of_another_kind_of_file_is_not_to_be_downloaded_again(
    case: str, tmp_path: Path
) -> None:
    data, title = INSTEAD[case]
    (tmp_path / "notes.txt").write_bytes(data)
    with pytest.raises(CheckpointingException, match=title) as refusal:
        open_checkpoint(tmp_path / "notes.txt")
    is_download = case in ("a page", "a page of XML")
    assert ("download the file again" in str(refusal.value.hint)) == is_download


@pytest.mark.parametrize("case", INSTEAD)
def test_a_directory_of_downloads_that_failed_is_told(case: str, tmp_path: Path) -> None:
    data, title = INSTEAD[case]
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes(data if name != "config.json" else b"{}")
    with pytest.raises(CorruptError, match=title):
        open_checkpoint(tmp_path)
    with pytest.raises(CorruptError, match=title):
        read_bin_shards(MemoryStore({"pytorch_model.bin": data}))


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("case", INSTEAD)
def test_validate_finds_what_was_saved_in_place_of_weights(
    case: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, title = INSTEAD[case]
    (tmp_path / name).write_bytes(data)
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / name):
        assert main(["validate", str(path), "--headers"]) == 1
        assert title in capsys.readouterr().out


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\0" * 64,
        b"PK\x03\x04rest",
        b"\x80\x02}q\0.",
        b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
        b'\x10\0\0\0\0\0\0\0{"a":1}',
    ],
)
def test_binary_formats_are_no_text(head: bytes) -> None:
    assert substitute_of(head) is None


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=lambda save: save.__name__)
@pytest.mark.parametrize("name", ["weights.npz", "weights.pt"])
def test_a_numpy_archive_is_called_one(
    save: Callable[..., None], name: str, tmp_path: Path
) -> None:
    stream = io.BytesIO()
    save(stream, **{"a": np.arange(3), "layers/0/w": np.ones((2, 2))})
    (tmp_path / name).write_bytes(stream.getvalue())
    with pytest.raises(UnsupportedError, match="a NumPy archive"):
        open_checkpoint(tmp_path / name)
    if name.endswith(".npz"):
        with pytest.raises(UnsupportedError, match="a NumPy archive"):
            open_checkpoint(tmp_path)


def test_a_numpy_array_is_called_one(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    with pytest.raises(UnsupportedError, match="a NumPy array"):
        open_checkpoint(tmp_path / "a.npy")


@pytest.mark.parametrize(
    "names", [["epoch=0-step=10.ckpt", "last.ckpt"], ["a.pt", "b.pth", "c.bin"]]
)
def test_several_torch_files_are_listed(names: list[str], tmp_path: Path) -> None:
    for name in names:
        saved(tmp_path / name)
    with pytest.raises(
        UnsupportedError, match=f"contains {len(names)} torch or safetensors files"
    ) as refusal:
        open_checkpoint(tmp_path)
    paths = ", ".join(quote(f"{tmp_path}/{name}") for name in names)
    assert refusal.value.hint == f"pass one of them: {paths}"


def test_what_tensorflow_wrote_is_called_so(tmp_path: Path) -> None:
    for name in ("checkpoint", "model.ckpt.index", "model.ckpt.data-00000-of-00001"):
        (tmp_path / name).write_bytes(bytes(100))
    with pytest.raises(UnsupportedError, match="ckpt cannot read a TensorFlow checkpoint"):
        open_checkpoint(tmp_path)


def test_a_ckpt_file_that_is_no_torch_file_is_not_called_tensorflows(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").write_bytes(bytes(100))
    for path in (tmp_path, tmp_path / "model.ckpt"):
        with pytest.raises(UnsupportedError, match="not a checkpoint in a known format"):
            open_checkpoint(path)


@pytest.mark.parametrize("name", ["last.ckpt", "weights.pt", "lora.safetensors"])
def test_the_only_loose_file_is_named_with_its_path(
    name: str, golden: Path, tmp_path: Path
) -> None:
    if name.endswith(".safetensors"):
        shutil.copy(golden / "hf/llama/safetensors_single/model.safetensors", tmp_path / name)
    else:
        saved(tmp_path / name)
    (tmp_path / "train.py").write_text("pass")
    with pytest.raises(
        UnsupportedError, match=f"contains one torch or safetensors file: {name}"
    ) as refusal:
        open_checkpoint(tmp_path)
    assert refusal.value.hint == f"pass {tmp_path / name}"
    open_checkpoint(tmp_path / name).store.close()


def test_checkpoints_some_levels_below_are_listed_and_hidden_ones_are_not(
    golden: Path, tmp_path: Path
) -> None:
    shutil.copytree(golden / "mcore_legacy/dense_gqa/tp1_pp1", tmp_path / "runs/one")
    shutil.copytree(golden / "torch_dcp/tp2_only", tmp_path / ".hidden/dcp")
    (tmp_path / "lightning_logs/version_0/checkpoints").mkdir(parents=True)
    saved(tmp_path / "lightning_logs/version_0/checkpoints/last.ckpt")
    with pytest.raises(UnsupportedError, match="contains checkpoints") as refusal:
        open_checkpoint(tmp_path)
    assert (
        refusal.value.hint == f"pass one of them: {tmp_path}/runs/one, "
        f"{tmp_path}/lightning_logs/version_0/checkpoints/last.ckpt"
    )


@pytest.mark.parametrize("verb", ["convert", "reshard", "diff", "manifest"])
def test_every_verb_wants_the_loose_file_named(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "last.ckpt")
    monkeypatch.chdir(tmp_path)
    words = {
        "convert": [".", "out", "--to", "safetensors"],
        "reshard": ["--tp-new", "2"],
        "diff": [".", "last.ckpt"],
        "manifest": ["."],
    }
    assert main([verb, *words[verb]]) == 4
    err = capsys.readouterr().err
    assert "contains one torch or safetensors file: last.ckpt" in err
    assert "pass last.ckpt" in err.lower()
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_checkpoint_below_a_model_is_told_by_inspect_convert_and_manifest(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(golden / "hf/llama/safetensors_single", model)
    shutil.copytree(golden / "torch_dcp/tp2_only", model / "exports")
    size = sum(path.stat().st_size for path in model.iterdir() if path.is_file())
    assert main(["inspect", str(model), "--json"]) == 0
    assert f'"file_bytes": {size},' in capsys.readouterr().out
    for words in (
        ["inspect"],
        ["convert", "--to", "dcp", "-o", str(tmp_path / "out")],
        ["manifest"],
    ):
        assert main([words[0], str(model), *words[1:]]) == 0
        assert "ignored separate checkpoints in subdirectories: exports" in capsys.readouterr().out


def test_many_checkpoints_below_one_are_all_left_out(golden: Path, tmp_path: Path) -> None:
    for name in (".", *(f"checkpoint-{number}" for number in range(20))):
        shutil.copytree(golden / "hf/llama/safetensors_single", tmp_path / name, dirs_exist_ok=True)
    validation = validate(tmp_path)
    assert validation.n_files == sum(1 for path in tmp_path.iterdir() if path.is_file())
    (note,) = validation.notes
    assert note.endswith(" and 12 more")


def test_the_current_directory_is_resharded_inside_a_root_and_inside_an_iteration(
    golden: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = shutil.copytree(golden / "mcore_legacy/dense_gqa/tp2_pp2", tmp_path / "root")
    for folder in (root, root / "iter_0000010"):
        monkeypatch.chdir(folder)
        assert main(["reshard", "--tp", "2", "--tp-new", "4", "--dry-run"]) == 0
        assert "would write" in capsys.readouterr().out


@pytest.mark.parametrize("bad", [PAGE, b"\x10" + b"\0" * 7 + b"cut"], ids=["a page", "a cut file"])
def test_of_loose_files_the_unreadable_one_is_named_and_the_others_are_proposed(
    bad: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("1", "2"):
        save_file({f"w.{name}": torch.arange(3.0)}, tmp_path / f"part_{name}.safetensors")
    (tmp_path / "part_3.safetensors").write_bytes(bad)
    title = "a web page" if bad == PAGE else "but its header ends at byte 24"
    for words in (["convert", "--to", "dcp", "-o", str(tmp_path / "out")], ["manifest"]):
        assert main([words[0], str(tmp_path), *words[1:]]) != 0
        err = capsys.readouterr().err
        assert "part_3.safetensors" in err
        assert title in err
        assert (
            "the other files can be read one by one: part_1.safetensors, part_2.safetensors" in err
        )
    # inspect shows the other files.
    assert main(["inspect", str(tmp_path)]) == 3
    page = capsys.readouterr().out
    assert title in page and "w.[1-2]" in page


def test_validate_goes_on_with_the_files_beside_an_unreadable_one(tmp_path: Path) -> None:
    save_file({"a.w": torch.tensor([1.0, float("nan")])}, tmp_path / "part_1.safetensors")
    save_file({"b.w": torch.arange(3.0)}, tmp_path / "part_2.safetensors")
    (tmp_path / "part_3.safetensors").write_bytes(PAGE)
    findings = validate(tmp_path, level=Level.DEEP).findings
    assert {(finding.code, finding.file) for finding in findings} == {
        ("CK108", "part_3.safetensors"),
        ("CK710", "part_1.safetensors"),
    }


@pytest.mark.parametrize(
    ("names", "is_one"),
    [
        (("orbax", "zero3"), False),
        (("cat", "dog"), False),
        (("part1", "part2"), True),
        (("model00001-of-000002", "model00002-of-000002"), True),
        (("model", "mtp"), True),
    ],
)
def test_files_of_different_names_are_different_models(
    names: tuple[str, str], is_one: bool, tmp_path: Path
) -> None:
    for name in names:
        save_file({f"{name}.w": torch.arange(3.0)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if is_one:
        open_checkpoint(tmp_path).store.close()
        return
    with pytest.raises(UnsupportedError, match="it contains 2 torch or safetensors files") as error:
        open_checkpoint(tmp_path)
    assert error.value.hint is not None
    assert error.value.hint.endswith("add their index (model.safetensors.index.json)")


def test_validate_notes_weights_that_the_index_does_not_list(golden: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(golden / "hf/llama/safetensors_sharded", source)
    save_file({"mtp.fc.weight": torch.ones(2, 2)}, source / "mtp.safetensors")
    (finding,) = validate(source).findings
    assert (finding.code, finding.file, finding.severity) == (
        "CK106",
        "mtp.safetensors",
        Severity.NOTE,
    )
