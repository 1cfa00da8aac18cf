"""flax's msgpack files, written by flax 0.12.8, and broken ones."""

from __future__ import annotations

import shutil
import struct
import tarfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)
from core.files.store import LocalStore, MemoryStore
from core.formats.flax import FORMAT
from core.opening.open import open_checkpoint
from core.pickle.nesting import entries
from core.verbs.convert.contract import check_reading
from core.verbs.convert.run import Job, run
from tests.support.materialize import tensor_bytes
from tests.support.rounds import rounds

ARCHIVE = Path(__file__).parents[1] / "golden" / "flax.tar.xz"


def counted(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """The values that the golden files hold."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return (np.arange(n_bytes) % 251).astype(np.uint8).view(dtype).reshape(shape)


PARAMS = {
    "dense.kernel": counted(3, 4),
    "dense.bias": counted(4, dtype=ml_dtypes.bfloat16),
    "layers_0.w": counted(14, 41),  # in three chunks
    "f8": counted(5, dtype=ml_dtypes.float8_e4m3fn),
}
TREE = {f"params.{name}": value for name, value in PARAMS.items()} | {
    "opt.0.count": np.int32(3),
    "opt.0.mu": counted(2, 2),
    "empty": np.zeros((0, 3)),
    "scalar": np.float32(0.5),
}
OBJECTS = {"opt.1": None, "opt.2.0": 1.5, "opt.2.1": "x", "step": 7, "name": "é", "c": 1 + 2j}
OBJECTS |= {"neg": -5, "big": 2**40, "flag": True, "raw": b"abc", "nothing": {}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flax")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def assert_holds(path: Path, expected: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(path)
    assert checkpoint.format is FORMAT
    assert set(checkpoint.catalog.tensors) == set(expected)
    for key, value in expected.items():
        tensor = checkpoint.catalog.tensors[key]
        assert (tensor.dtype, tensor.shape) == (value.dtype.name, value.shape)
        data = tensor_bytes(checkpoint.catalog, checkpoint.store, key).tobytes()
        assert data == value.tobytes(), key
    checkpoint.store.close()


def test_a_file_is_read_bit_for_bit_with_its_nesting_and_values(files: Path) -> None:
    for path in (files / "single", files / "single" / "flax_model.msgpack"):
        assert_holds(path, TREE)
    assert b"__msgpack_chunked_array__" in (files / "single/flax_model.msgpack").read_bytes()
    checkpoint = open_checkpoint(files / "single")
    assert checkpoint.iteration == 7
    assert {key: item.value for key, item in checkpoint.catalog.objects.items()} == OBJECTS
    paths = {entry.path for entry in entries(checkpoint.catalog.skeleton)}
    assert ("params", "dense", "kernel") in paths
    checkpoint.store.close()


def test_pieces_are_merged_and_a_training_file_is_read(files: Path, tmp_path: Path) -> None:
    assert_holds(files / "pieces", PARAMS)
    params = {f"params.{name}": value for name, value in PARAMS.items()}
    assert_holds(files / "legacy" / "checkpoint_10", params | {"step": np.int32(10)})
    # A missing piece is named.
    shutil.copytree(files / "pieces", tmp_path / "cut")
    (tmp_path / "cut" / "flax_model-00002-of-00002.msgpack").unlink()
    with pytest.raises(MissingShardError) as raised:
        open_checkpoint(tmp_path / "cut")
    assert raised.value.file == "flax_model-00002-of-00002.msgpack"


@pytest.mark.parametrize("name", ["single", "pieces", "legacy/checkpoint_10"])
def test_damage_is_survived(name: str, files: Path, tmp_path: Path) -> None:
    check_reading(FORMAT, files / name, tmp_path / "damage", n_flips=rounds(50))


def test_a_file_becomes_an_orbax_checkpoint_that_holds_the_same(
    files: Path, tmp_path: Path
) -> None:
    result = run(
        Job(src=files / "single", dst=tmp_path / "out", to="orbax", fsync=False, verify=True)
    )
    assert any(line.startswith("raw (") for line in result.dropped)
    checkpoint = open_checkpoint(tmp_path / "out")
    for key, value in TREE.items():
        data = tensor_bytes(checkpoint.catalog, checkpoint.store, key).tobytes()
        assert data == value.tobytes(), key
    checkpoint.store.close()


class CountingStore(LocalStore):
    n_read = 0

    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        self.n_read += n_bytes
        return super().read(name, offset, n_bytes)


def array(shape: list[int], dtype: str, n_bytes: int) -> bytes:
    """The beginning of an extension that holds an array."""
    inner = b"\x93" + bytes((0x90 | len(shape),))
    inner += b"".join(b"\xce" + struct.pack(">I", extent) for extent in shape)
    inner += bytes((0xA0 | len(dtype),)) + dtype.encode() + b"\xc6" + struct.pack(">I", n_bytes)
    return b"\xc9" + struct.pack(">I", len(inner) + n_bytes) + b"\x01" + inner


def test_reading_fetches_no_array(tmp_path: Path) -> None:
    n = 64 << 20
    with (tmp_path / "flax_model.msgpack").open("wb") as file:
        file.write(b"\x81\xa1w" + array([n], "int8", n))
        file.truncate(file.tell() + n)
    store = CountingStore(tmp_path)
    assert FORMAT.read(store).tensors["w"].shape == (n,)
    assert store.n_read < 1 << 18


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (b"\x81\xa1w" + array([2], "int8", 3) + b"abc", CorruptError, "has 3 bytes, not 2"),
        (b"\x81\xa1w" + array([3], "int8", 3) + b"ab", TruncatedError, "should follow"),
        (b"\x81\xa1w" + array([1], "object", 8) + bytes(8), UnsupportedError, "'object'"),
        (b"\x81\xa1w\xd4\x05x", UnsupportedError, "extension type 5"),
        (b"\x81\xa1w\xc1", CorruptError, "0xc1"),
        (b"\x82\xa1w\x01\xa1w\x02", CorruptError, "twice"),
        (b"\x81\xa1w\x01x", CorruptError, "1 extra bytes follow"),
        (b"\x81\xa1a" * 200 + b"\x01", UnsafeError, "levels deep"),
        (b"\xdf\xff\xff\xff\xff", CorruptError, "extends past"),
        (b"\x81\xa1w\xdd\xff\xff\xff\xff", CorruptError, "extends past"),
        (b"\x81\xa1w\xc6\x7f\xff\xff\xff", UnsupportedError, "not an array"),
        (b"\x81\xa1\xff\x01", CorruptError, "UTF-8"),
        (b"\x93\x01\x02\x03", CorruptError, "not a map"),
    ],
)
def test_what_is_malformed_is_refused(
    data: bytes, error: type[CheckpointingException], match: str
) -> None:
    with pytest.raises(error, match=match):
        FORMAT.read(MemoryStore({"flax_model.msgpack": data}))
