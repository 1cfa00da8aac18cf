"""The scan gives every element of every array once, and the sums of all bytes, whatever the format."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from core.box import c_strides
from core.catalog import Catalog, StoredArray
from core.checksum import crc32, digest_of
from core.decoded import DecodedStore
from core.dtypes import itemsize
from core.errors import CheckpointingException
from core.open import open_checkpoint
from core.scan import files_below, scan
from core.scan_plan import WINDOW_BYTES
from core.scan_sums import Wanted
from core.store import ReadStore

ALL = Wanted(array_digests=True, file_digests=True)


class Collected:
    """An observer that puts the runs together again."""

    def __init__(self) -> None:
        self.data: dict[str, bytearray] = {}
        self.n_bytes: dict[str, int] = {}
        self.finished: list[str] = []
        self._lock = threading.Lock()

    def sees(self, array: StoredArray) -> bool:
        self.data[array.name] = bytearray(array.n_bytes)
        self.n_bytes[array.name] = 0
        return True

    def feed(self, array: StoredArray, start: int, data: memoryview) -> None:
        size = itemsize(array.dtype)
        assert 0 < len(data) <= WINDOW_BYTES and len(data) % size == 0
        with self._lock:
            self.data[array.name][start * size : start * size + len(data)] = data
            self.n_bytes[array.name] += len(data)

    def finish(self, array: StoredArray) -> None:
        assert self.n_bytes[array.name] == array.n_bytes
        self.finished.append(array.name)


def arrays_of(catalog: Catalog) -> dict[str, StoredArray]:
    return {fragment.array.name: fragment.array for fragment in catalog.all_fragments() if fragment.array is not None}


def dense_bytes(store: ReadStore, catalog: Catalog, array: StoredArray) -> bytes:
    """Brute force: element by element."""
    decoded = DecodedStore(store)
    bound = decoded.placed(catalog.bind(decoded, array))
    assert bound.extent is not None
    size = itemsize(array.dtype)
    strides = bound.extent.strides
    if strides is None:
        return decoded.read(bound.extent.file, bound.extent.offset, array.n_bytes)
    made = bytearray()
    for flat in range(array.n_bytes // size):
        at = sum(
            flat // n % extent * step
            for n, extent, step in zip(c_strides(array.shape), array.shape, strides, strict=True)
        )
        made += decoded.read(bound.extent.file, bound.extent.offset + at * size, size)
    return bytes(made)


def check(catalog: Catalog, store: ReadStore) -> None:
    seen = Collected()
    found = scan(catalog, store, [seen], wanted=ALL, threads=2)
    assert found.problems == []
    arrays = arrays_of(catalog)
    assert sorted(seen.finished) == sorted(arrays)
    for name, array in arrays.items():
        data = dense_bytes(store, catalog, array)
        assert bytes(seen.data[name]) == data, name
        assert found.arrays[name].crc == crc32(data)
        assert found.arrays[name].digest == digest_of(data).hex()
    files = files_below(store)
    assert found.files.keys() == files.keys()
    for name, size in files.items():
        data = store.read(name, 0, size)
        assert found.files[name].crc == crc32(data)
        assert found.files[name].digest == digest_of(data).hex()
    assert found.read_bytes == sum(files.values())


GOLDEN = (
    "hf/qwen2_tied/safetensors_single",
    "hf/qwen2_tied/bin_sharded",
    "hf/llama/torch_single/model_legacy.pt",
    "torch_dcp/tp2_fsdp2_dp2",
    "mcore_torch_dist/dense_gqa",
    "mcore0121_zarr/dense_gqa",
    "mcore_legacy/dense_gelu",
    "deepspeed/zero2_dp2_bf16",
    "deepspeed_universal/zero1_dp2_bf16",
)


@pytest.mark.parametrize("name", GOLDEN)
def test_every_element_and_every_byte_of_a_golden_checkpoint(golden: Path, name: str) -> None:
    path = golden / name
    if not path.exists():
        pytest.fail(f"{name} is not there")
    paths = [path]
    if path.is_dir():
        below = sorted(one for one in path.iterdir() if one.is_dir())
        try:
            open_checkpoint(path).store.close()
        except CheckpointingException:
            paths = below[:1]
    for one in paths:
        opened = open_checkpoint(one)
        check(opened.catalog, opened.store)
        opened.store.close()
