"""What the user named is what is looked at: a damaged file never widens to the folder it lies in.

Each file is damaged next to intact files of every format that a single file can have.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from core.errors import CheckpointingException, TruncatedError
from core.opening.damaged import open_readable_part
from core.verbs.checks.finding import Level
from core.verbs.validate.run import validate
from tests.support.nemo_archive import nemo_archive

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = (
    "adapter.safetensors",
    "model-00001-of-00002.safetensors",
    "model.pt",
    "old.pt",
    "pytorch_model-00001-of-00002.bin",
    "flax_model.msgpack",
    "model.nemo",
)
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut in its data": lambda data: data[:-60],
    "cut in its header": lambda data: data[:20],
    "a web page": lambda data: b"<!DOCTYPE html><html><body>Access denied</body></html>" * 9,
    "a Git LFS pointer": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "zeros": lambda data: bytes(len(data)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of unrelated models, whose weights are NaN."""
    folder = tmp_path_factory.mktemp("models")
    for name in NAMES:
        # Every file has tensors of its own.
        state = {f"{name.partition('.')[0]}.{n}": torch.full((8, 4), torch.nan) for n in range(4)}
        if name.endswith(".safetensors"):
            save_file(state, folder / name)
        elif name.endswith((".pt", ".bin")):
            is_zip = name != "old.pt"
            torch.save(state, folder / name, _use_new_zipfile_serialization=is_zip)
        elif name.endswith(".nemo"):
            shutil.move(nemo_archive(folder / "tmp", state), folder / name)
            shutil.rmtree(folder / "tmp")
        else:
            with tarfile.open(GOLDEN / "flax.tar.xz") as archive:
                member = next(m for m in archive if m.name.endswith("/flax_model.msgpack"))
                data = archive.extractfile(member)
                assert data is not None
                (folder / name).write_bytes(data.read())
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", NAMES)
def test_damaged_file_is_looked_at_alone(
    name: str, damage: str, models: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    shutil.copytree(models, folder)
    path = folder / name
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    files: set[str | None] = set()
    try:
        opened = open_readable_part(path)
        files |= {array.extent.file for array in opened.catalog.stored_arrays().values()}
        files |= {problem.file for problem in opened.problems}
        opened.store.close()
    except CheckpointingException as err:
        files.add(err.file)
    assert {Path(file or "").name for file in files} == {name}
    result = validate(path, level=Level.DEEP)
    assert result.n_files <= 1  # none is counted if no format recognises the file
    assert {Path(finding.file or name).name for finding in result.findings} == {name}


@pytest.mark.parametrize("is_directory", [False, True])
def test_damaged_shard_shows_its_readable_tensors(is_directory: bool, tmp_path: Path) -> None:
    for number in (1, 2):
        state = {f"layers.{number}.{n}": torch.full((8, 4), float(n)) for n in range(4)}
        save_file(state, tmp_path / f"model-0000{number}-of-00002.safetensors")
    path = tmp_path / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-200])  # the last tensor, and a part of the one before
    opened = open_readable_part(tmp_path if is_directory else path)
    opened.store.close()
    expected = {"layers.1.0", "layers.1.1"}
    if is_directory:
        expected |= {f"layers.2.{n}" for n in range(4)}
    assert opened.catalog.tensors.keys() == expected
    (problem,) = opened.problems
    assert isinstance(problem, TruncatedError)
    assert "(and 1 more such error)" in problem.message
