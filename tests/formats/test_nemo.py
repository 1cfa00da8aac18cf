"""NeMo archives: the weights are read at their place, and nothing else is let in."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.errors import CorruptError, MissingShardError, UnsafeError, UnsupportedError
from core.opening.open import open_checkpoint
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import Job, run
from tests.support.nemo_archive import nemo_archive

STATE = {
    "encoder.weight": torch.arange(35, dtype=torch.float32).reshape(5, 7).T,
    "decoder.bias": torch.arange(9).to(torch.float16),
}


def test_the_weights_of_an_archive_are_copied_bit_for_bit(tmp_path: Path) -> None:
    path = nemo_archive(tmp_path, STATE)
    run(Job(src=path, dst=tmp_path / "out.pt", to="torch", fsync=False))
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded.keys() == STATE.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in STATE.items())


def test_other_members_are_listed(tmp_path: Path) -> None:
    path = nemo_archive(tmp_path, STATE)
    with prepare(Job(src=path, dst=tmp_path / "out", to="safetensors")) as prepared:
        listed = " ".join(prepared.dropped)
    assert "model_config.yaml" in listed
    assert "0a1b_tokenizer.model" in listed


def test_a_compressed_archive_is_refused_with_the_command_that_decompresses_it(
    tmp_path: Path,
) -> None:
    path = nemo_archive(tmp_path, STATE, mode="w:gz")
    with pytest.raises(UnsupportedError, match="compressed") as raised:
        open_checkpoint(path)
    assert "gzip -dc" in (raised.value.hint or "")


def _link(archive: tarfile.TarFile) -> None:
    member = tarfile.TarInfo("weights")
    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
    archive.addfile(member)


def _again(archive: tarfile.TarFile) -> None:
    archive.addfile(tarfile.TarInfo("model_weights.ckpt"), io.BytesIO())


@pytest.mark.parametrize(("add", "error"), [(_link, UnsafeError), (_again, CorruptError)])
def test_links_and_second_members_of_a_name_are_refused(
    tmp_path: Path, add: Callable[[tarfile.TarFile], None], error: type[Exception]
) -> None:
    path = nemo_archive(tmp_path, STATE)
    with tarfile.open(path, "a:") as archive:
        add(archive)
    with pytest.raises(error):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["mp_rank_00/model_weights.ckpt", "model_weights/.metadata"])
def test_weights_in_directories_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.nemo"
    with tarfile.open(path, "w:") as archive:
        archive.addfile(tarfile.TarInfo(f"./{name}"), io.BytesIO())
    with pytest.raises(UnsupportedError, match=name.partition("/")[0]):
        open_checkpoint(path)


def test_the_files_of_ranks_are_read_one_by_one_once_unpacked(tmp_path: Path) -> None:
    state = tmp_path / "model_weights.ckpt"
    torch.save(STATE, state)
    path = tmp_path / "model.nemo"
    with tarfile.open(path, "w:") as archive:
        archive.add(state, arcname="./tp_rank_00_pp_rank_000/model_weights.ckpt")
    with pytest.raises(UnsupportedError, match="tp_rank_00_pp_rank_000") as raised:
        open_checkpoint(path)
    file = (raised.value.hint or "").rpartition(" ")[2]
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path / "out", filter="data")
    assert open_checkpoint(tmp_path / "out" / file).catalog.tensors.keys() == STATE.keys()


def test_an_archive_without_weights_is_incomplete(tmp_path: Path) -> None:
    path = tmp_path / "model.nemo"
    with tarfile.open(path, "w:") as archive:
        archive.addfile(tarfile.TarInfo("./model_config.yaml"), io.BytesIO())
    with pytest.raises(MissingShardError, match="model_weights"):
        open_checkpoint(path)


@pytest.mark.parametrize("at", range(0, 10240, 512))
def test_a_truncated_archive_is_refused(tmp_path: Path, at: int) -> None:
    path = nemo_archive(tmp_path, STATE)
    data = path.read_bytes()
    path.write_bytes(data[: min(at, len(data) - 1)])
    if not at:
        return  # an empty file is no archive, and another error
    try:
        catalog = open_checkpoint(path).catalog
    except (CorruptError, MissingShardError):
        return
    assert catalog.tensors.keys() == STATE.keys()  # only what follows the weights is missing


@pytest.mark.parametrize("size", [b"-0000000512\0", b"\x80" + b"\xff" * 11, b"\xff" * 12])
def test_sizes_that_no_archive_has_are_refused(tmp_path: Path, size: bytes) -> None:
    path = nemo_archive(tmp_path, STATE)
    with tarfile.open(path) as archive:
        at = archive.getmember("./model_weights.ckpt").offset_data - 512
    data = bytearray(path.read_bytes())
    header = data[at : at + 512]
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    data[at : at + 512] = header
    path.write_bytes(data)
    with pytest.raises((CorruptError, UnsafeError, MissingShardError)):
        open_checkpoint(path)
