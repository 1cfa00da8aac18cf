"""Checkpoints of other software are named, with what to do, and are not called damaged."""

from __future__ import annotations

import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckpt_cli.app import main
from core.errors import UnsupportedError
from core.opening.open import open_checkpoint
from core.opening.other_software import OTHER_SOFTWARE


def write_safetensors(*names: str) -> Callable[[Path], None]:
    """Write files with the same tensor, as each rank has a part of it."""

    def write(folder: Path) -> None:
        for name in names:
            save_file({"model.embed_tokens.weight": torch.ones(4, 2)}, folder / name)

    return write


def write_torch(*names: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            torch.save({"w": torch.ones(4, 2)}, folder / name)

    return write


def write_bytes(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


def write_keras(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("metadata.json", "config.json", "model.weights.h5"):
            archive.writestr(name, "{}")


DIRECTORIES: dict[str, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    "vLLM": (
        "a vLLM or SGLang sharded_state checkpoint",
        write_safetensors(
            "model-rank-0-part-0.safetensors",
            "model-rank-0-part-1.safetensors",
            "model-rank-1-part-0.safetensors",
        ),
        ("config.json", "tokenizer.json", "model.safetensors.index.json"),
    ),
    "TensorRT-LLM": (
        "a TensorRT-LLM checkpoint",
        write_safetensors("rank0.safetensors", "rank1.safetensors"),
        ("config.json",),
    ),
    "a TensorRT-LLM engine": ("a TensorRT-LLM engine", lambda folder: None, ("rank0.engine",)),
    "torch_checkpointing": (
        "a torch_checkpointing checkpoint",
        write_safetensors("model_0.safetensors", "model_1.safetensors"),
        ("metadata.pkl",),
    ),
    "Meta": (
        "a checkpoint from Meta's Llama code",
        write_torch("consolidated.00.pth", "consolidated.01.pth"),
        ("params.json", "tokenizer.model"),
    ),
    "nanotron": (
        "a nanotron checkpoint",
        write_torch("lr_scheduler/lr_scheduler_pp-0-of-1_tp-0-of-1.pt"),
        (
            "checkpoint_metadata.json",
            "config.yaml",
            "model/model/decoder/0/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors",
        ),
    ),
    "NxD": (
        "an AWS Neuron checkpoint",
        write_torch(
            "model/dp_rank_00_tp_rank_00_pp_rank_00.pt", "model/dp_rank_00_tp_rank_01_pp_rank_00.pt"
        ),
        ("checkpoint", "done"),
    ),
    "NxD with xser": (
        "an AWS Neuron checkpoint",
        write_torch("model/dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors/tensor_0.pt"),
        ("checkpoint", "done"),
    ),
    "the model of NxD": (
        "the model of an AWS Neuron checkpoint",
        write_torch("tp_rank_00_pp_rank_00.pt", "tp_rank_01_pp_rank_00.pt"),
        (),
    ),
    "OLMo-core": (
        "an OLMo-core checkpoint",
        write_torch("train/rank0.pt"),
        (".metadata.json", "config.json", "model_and_optim/.metadata"),
    ),
    "torchsnapshot": (
        "a torchsnapshot snapshot",
        lambda folder: None,
        (".snapshot_metadata", "0/app/model/w"),
    ),
}
FILES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "model.keras": ("a Keras file", write_keras),
    "model.h5": ("a Keras file", write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))),
    "model.pdparams": ("a PaddlePaddle file", write_bytes(pickle.dumps({"w": [1.0]}))),
    "model.pdopt": ("a PaddlePaddle file", write_bytes(pickle.dumps({"w": [1.0]}))),
    "model.gguf": ("a GGUF file", write_bytes(b"GGUF\3\0\0\0" + bytes(64))),
    "model.nemo": ("a NeMo archive", write_bytes(b"\x01" + bytes(64))),
    "state.msgpack": ("a Flax file", write_bytes(b"\xc0" + bytes(64))),
    "model.onnx": ("an ONNX model", write_bytes(b"\x08\x07" + bytes(64))),
    "w.npz": ("a NumPy archive", write_bytes(b"\x00" * 64)),
    "w.npy": ("a NumPy array", write_bytes(b"\x93NUMPY\x01\x00" + bytes(64))),
    "model.ckpt.index": ("a TensorFlow checkpoint", write_bytes(bytes(64))),
    "model.tensors": ("a tensorizer file", write_bytes(b"|TZR|\x04\x00\x00\x00" + bytes(64))),
    "mind.ckpt": (
        "a MindSpore checkpoint file",
        write_bytes(b"\x0a\x2d\x0a\x0cembed.weight\x12\x1d\x08\x04\x12\x07Float32" + bytes(64)),
    ),
}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_directory_of_other_software_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    title, write, names = DIRECTORIES[name]
    folder = tmp_path / "saved"
    folder.mkdir()
    write(folder)
    for file in names:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("{}")
    check_named(folder, title, capsys)


@pytest.mark.parametrize("name", FILES)
def test_file_of_other_software_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    title, write = FILES[name]
    write(tmp_path / name)
    check_named(tmp_path / name, title, capsys)


def check_named(path: Path, title: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check the error of opening, and the exit code of the commands."""
    with pytest.raises(UnsupportedError) as error:
        open_checkpoint(path)
    assert error.value.message.startswith(f"ckpt cannot read {title}")
    assert error.value.hint
    for command in (["inspect", str(path)], ["convert", str(path), str(path.parent / "out.pt")]):
        assert main(command) == 4
        assert title in capsys.readouterr().err


def test_every_row_has_an_example() -> None:
    titles = [title for title, *_ in (*DIRECTORIES.values(), *FILES.values())]
    for row in OTHER_SOFTWARE:
        assert any(row.title.startswith(title) for title in titles), row.title


@pytest.mark.parametrize(
    ("names", "key"),
    [
        (("consolidated.00.pth", "consolidated.01.pth"), "model.safetensors"),
        (("metadata.pkl",), "model.safetensors"),
    ],
)
def test_model_next_to_such_files_is_read(names: tuple[str, ...], key: str, tmp_path: Path) -> None:
    write_torch(*names)(tmp_path)
    write_safetensors(key)(tmp_path)
    open_checkpoint(tmp_path).store.close()


class _StorageInfo:
    """OLMo-core's class has the fields of DCP's."""

    def __init__(self, relative_path: str, offset: int, length: int) -> None:
        self.relative_path, self.offset, self.length = relative_path, offset, length


class Metadata:
    """ByteCheckpoint's class has the fields of DCP's, and more."""

    def __init__(self, **state: object) -> None:
        self.__dict__.update(state)


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        ("bytecheckpoint.checkpointer.meta_type", "scripts/merge_bcp.py"),
        ("olmo_core.distributed.checkpoint.filesystem", "convert_checkpoint_to_hf.py"),
    ],
)
def test_metadata_of_other_software_is_named_with_what_to_do(
    module: str,
    hint: str,
    golden: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(golden / "torch_dcp/fsdp2_dp2", folder)
    metadata: object = dcp.FileSystemReader(folder).read_metadata()
    # pickle writes the name of the module in which it finds the class.
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        other = ModuleType(".".join(parts[:depth]))
        monkeypatch.setitem(sys.modules, other.__name__, other)
    for kind in (_StorageInfo, Metadata):
        monkeypatch.setattr(kind, "__module__", module)
        monkeypatch.setattr(other, kind.__name__, kind, raising=False)
    if module.startswith("olmo_core"):
        metadata.storage_data = {  # type: ignore[attr-defined]
            index: _StorageInfo(info.relative_path, info.offset, info.length)
            for index, info in metadata.storage_data.items()  # type: ignore[attr-defined]
        }
    else:
        metadata = Metadata(**vars(metadata), bytecheckpoint_version="1.0")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert main(["inspect", str(folder)]) == 4
    error = " ".join(capsys.readouterr().err.split())
    assert module in error
    assert hint in error
