"""The scan gives every element of every array once, and the sums of all bytes, whatever the
format.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.arrays.box import c_strides
from core.arrays.checksum import crc32, digest_of
from core.arrays.dtypes import itemsize
from core.engine.catalog.catalog import Catalog, catalog_of_arrays
from core.engine.catalog.decoded import DecodedStore
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.scan.run import scan
from core.engine.scan.sums import WantedSums
from core.engine.scan.windows import MAX_SHARING, SEGMENT_BYTES, WINDOW_BYTES, StatedCrc, plan_file
from core.errors import CheckpointingException, CorruptError, Report
from core.files.store import MemoryStore, ReadStore, list_files_below
from core.opening.open import open_checkpoint

ALL = WantedSums(array_digests=True, file_digests=True)


class Collected:
    """An observer that puts the runs together again."""

    def __init__(self) -> None:
        self.data: dict[str, bytearray] = {}
        self.n_bytes: dict[str, int] = {}
        self.starts: dict[str, list[int]] = {}
        self.finished: list[str] = []
        self._lock = threading.Lock()

    def sees(self, array: StoredArray) -> bool:
        self.data[array.name] = bytearray(array.n_bytes)
        self.n_bytes[array.name] = 0
        self.starts[array.name] = []
        return True

    def feed(self, array: StoredArray, start: int, data: memoryview) -> None:
        size = itemsize(array.dtype)
        assert 0 < len(data) <= WINDOW_BYTES and len(data) % size == 0
        with self._lock:
            self.data[array.name][start * size : start * size + len(data)] = data
            self.n_bytes[array.name] += len(data)
            self.starts[array.name].append(start)

    def finish(self, array: StoredArray) -> None:
        assert self.n_bytes[array.name] == array.n_bytes
        self.finished.append(array.name)


def arrays_of(catalog: Catalog) -> dict[str, StoredArray]:
    return {
        fragment.array.name: fragment.array
        for fragment in catalog.all_fragments()
        if fragment.array is not None
    }


def dense_bytes(store: ReadStore, catalog: Catalog, array: StoredArray) -> bytes:
    """Brute force: element by element."""
    decoded = DecodedStore(store)
    bound = decoded.placed(array.locate(decoded))
    size = itemsize(array.dtype)
    strides = bound.extent.strides
    if strides is None:
        return decoded.read(bound.extent.file, bound.extent.offset, array.n_bytes)
    data = bytearray()
    for flat in range(array.n_bytes // size):
        at = sum(
            flat // n % extent * step
            for n, extent, step in zip(c_strides(array.shape), array.shape, strides, strict=True)
        )
        data += decoded.read(bound.extent.file, bound.extent.offset + at * size, size)
    return bytes(data)


def check(catalog: Catalog, store: ReadStore) -> None:
    observer = Collected()
    sums = scan(catalog, store, [observer], wanted=ALL, threads=2)
    assert sums.problems == []
    arrays = arrays_of(catalog)
    assert sorted(observer.finished) == sorted(arrays)
    for name, array in arrays.items():
        data = dense_bytes(store, catalog, array)
        assert bytes(observer.data[name]) == data, name
        assert sums.arrays[name].crc == crc32(data)
        assert sums.arrays[name].digest == digest_of(data).hex()
    files = list_files_below(store)
    assert sums.files.keys() == files.keys()
    for name, size in files.items():
        data = store.read(name, 0, size)
        assert sums.files[name].crc == crc32(data)
        assert sums.files[name].digest == digest_of(data).hex()
    assert sums.read_bytes == sum(files.values())


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
        below = sorted(child for child in path.iterdir() if child.is_dir())
        try:
            open_checkpoint(path).store.close()
        except CheckpointingException:
            paths = below[:1]
    for folder in paths:
        opened = open_checkpoint(folder)
        check(opened.catalog, opened.store)
        opened.store.close()


def torn(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def catalog_over(file: str, arrays: list[StoredArray]) -> Catalog:
    return catalog_of_arrays(format="memory", arrays={array.name: array for array in arrays})


def test_a_large_array_is_shared_by_threads_and_cut_at_its_own_blocks() -> None:
    """Three segments; the array begins at an odd address."""
    n_bytes = 2 * SEGMENT_BYTES + 5 * WINDOW_BYTES // 2
    data = torn(101) + torn(1 << 16) * (n_bytes >> 16) + torn(33)
    n = len(data) - 134
    array = StoredArray("w", "int8", (n,), Extent("f", 101))
    store = MemoryStore({"f": data})
    observer = Collected()
    sums = scan(catalog_over("f", [array]), store, [observer], wanted=ALL, threads=3)
    assert sums.problems == [] and observer.finished == ["w"]
    assert bytes(observer.data["w"]) == data[101:-33]
    assert sums.arrays["w"].digest == digest_of(data[101:-33]).hex() and sums.arrays[
        "w"
    ].crc == crc32(data[101:-33])
    assert sums.files["f"].digest == digest_of(data).hex() and sums.files["f"].crc == crc32(data)
    assert all(start % WINDOW_BYTES == 0 for start in observer.starts["w"])


def test_views_of_one_storage_are_all_given_and_each_byte_is_read_once() -> None:
    data = torn(5000)
    arrays = [
        StoredArray("all", "float32", (1000,), Extent("f", 8)),
        StoredArray("same", "float32", (10, 100), Extent("f", 8)),
        StoredArray("part", "float16", (77,), Extent("f", 12)),
        StoredArray("behind", "float64", (100,), Extent("f", 4004)),
        StoredArray("straddling", "float32", (100,), Extent("f", 14)),
        StoredArray("transposed", "float32", (20, 10), Extent("f", 100, strides=(1, 20))),
        StoredArray("repeated", "int16", (3, 5), Extent("f", 60, strides=(0, 2))),
        StoredArray("none", "float32", (0, 4), Extent("f", 0)),
        StoredArray("scalar", "float64", (), Extent("f", 4992)),
    ]
    check(catalog_over("f", arrays), MemoryStore({"f": data, "empty": b"", "other/g": torn(70)}))


def test_what_lies_outside_its_file_is_a_problem_and_the_rest_is_read() -> None:
    store = MemoryStore({"f": torn(100)})
    arrays = [
        StoredArray("good", "int8", (50,), Extent("f", 50)),
        StoredArray("long", "int8", (60,), Extent("f", 50)),
        StoredArray("far", "float32", (4, 4), Extent("f", 90, strides=(1, 4))),
        StoredArray("gone", "int8", (4,), Extent("missing", 0)),
        StoredArray("negative", "int8", (2, 2), Extent("f", 3, strides=(-1, 1))),
    ]
    observer = Collected()
    sums = scan(catalog_over("f", arrays), store, [observer])
    assert {problem.array.name if problem.array else problem.file for problem in sums.problems} == {
        "long",
        "far",
        "missing",
        "negative",
    }
    assert observer.finished == ["good"] and sums.files["f"].n_bytes == 100


def test_a_repetition_without_end_is_refused() -> None:
    array = StoredArray("x", "int8", (1 << 40,), Extent("f", 0, strides=(0,)))
    sums = scan(catalog_over("f", [array]), MemoryStore({"f": b"1234"}), [Collected0()])
    assert [problem.error.code for problem in sums.problems] == ["capacity"]


def test_thousands_of_views_of_one_storage_are_refused() -> None:
    arrays = [StoredArray(f"{n}", "int8", (1000,), Extent("f", 0)) for n in range(1000)]
    sums = scan(catalog_over("f", arrays), MemoryStore({"f": bytes(1000)}), [Collected()])
    assert len(sums.problems) == 1000 - MAX_SHARING


class Collected0(Collected):
    def sees(self, array: StoredArray) -> bool:
        return True


def test_stated_sums_are_compared_and_the_arrays_in_them_named() -> None:
    data = torn(400)

    def stated_in(file: str, n_bytes: int, *, report: Report) -> Iterable[StatedCrc]:
        report(CorruptError("a part of it is odd", file=file))
        yield StatedCrc(0, 300, crc32(data[:300]), "right")
        yield StatedCrc(100, 200, crc32(data[100:200]) ^ 1, "wrong")
        yield StatedCrc(350, 500, 5, "beyond the file")

    arrays = [
        StoredArray(name, "int8", (50,), Extent("f", at))
        for name, at in (("a", 60), ("b", 150), ("c", 300))
    ]
    sums = scan(catalog_over("f", arrays), MemoryStore({"f": data}), stated_in=stated_in)
    assert sums.n_stated == 2
    assert [
        (mismatch.stated.name, mismatch.actual_crc, mismatch.arrays) for mismatch in sums.mismatches
    ] == [("wrong", crc32(data[100:200]), ("a", "b"))]
    assert [problem.error.message for problem in sums.problems] == ["a part of it is odd"]


def test_bytes_of_files_come_in_order_to_who_wants_them() -> None:
    files = {"big": torn(1 << 16) * (3 * SEGMENT_BYTES >> 17), "none": b"", "other": torn(9)}

    class Hashes:
        in_order = True

        def __init__(self) -> None:
            self.state = {name: hashlib.sha256() for name in ("big", "none")}
            self.done: dict[str, str] = {}

        def reads(self, file: str, n_bytes: int) -> bool:
            return file in self.state

        def feed_file(self, file: str, offset: int, data: memoryview) -> None:
            self.state[file].update(data)

        def finish_file(self, file: str) -> None:
            self.done[file] = self.state[file].hexdigest()

    hashes = Hashes()
    progress: list[tuple[int, int]] = []
    scan(
        None,
        MemoryStore(files),
        file_observers=[hashes],
        progress=lambda *numbers: progress.append(numbers),
        threads=2,
    )
    assert hashes.done == {
        name: hashlib.sha256(files[name]).hexdigest() for name in ("big", "none")
    }
    assert max(progress) == (sum(map(len, files.values())),) * 2


def test_threads_divide_a_file_for_who_takes_its_bytes_in_any_order() -> None:
    files = {"big": torn(1 << 16) * (3 * SEGMENT_BYTES >> 17), "none": b""}

    class Pieces:
        in_order = False

        def __init__(self) -> None:
            self.pieces: list[tuple[int, bytes]] = []

        def reads(self, file: str, n_bytes: int) -> bool:
            return True

        def feed_file(self, file: str, offset: int, data: memoryview) -> None:
            self.pieces.append((offset, bytes(data)))

        def finish_file(self, file: str) -> None:
            raise AssertionError("called although the bytes are in no order")

    pieces = Pieces()
    scan(None, MemoryStore(files), file_observers=[pieces], threads=2)
    assert b"".join(data for _, data in sorted(pieces.pieces)) == files["big"]


def test_an_observers_own_error_ends_the_scan() -> None:
    class Broken(Collected):
        def feed(self, array: StoredArray, start: int, data: memoryview) -> None:
            raise ZeroDivisionError

    array = StoredArray("x", "int8", (4,), Extent("f", 0))
    with pytest.raises(ZeroDivisionError):
        scan(catalog_over("f", [array]), MemoryStore({"f": b"1234"}), [Broken()])


class _Codec:
    name = "made"

    def __init__(self, unit_bytes: int, working_bytes: int = 0) -> None:
        self.unit_bytes = unit_bytes
        self.working_bytes = working_bytes

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes:
        data = bytes(range(array.n_bytes % 256)) * 300
        return data[: array.n_bytes][unit * self.unit_bytes : (unit + 1) * self.unit_bytes]


def test_encoded_arrays_come_unit_by_unit_and_those_too_large_are_a_problem() -> None:
    arrays = [
        StoredArray("units", "float32", (1000,), Extent("f", 0, encoding=_Codec(512))),
        StoredArray("whole", "float32", (999,), Extent("f", 0, encoding=_Codec(3996))),
        StoredArray("cut", "float32", (1000,), Extent("f", 0, encoding=_Codec(510))),
        StoredArray(
            "large", "float32", (1000,), Extent("f", 0, encoding=_Codec(512, working_bytes=1 << 40))
        ),
    ]
    observer = Collected()
    sums = scan(
        catalog_over("f", arrays),
        MemoryStore({"f": b"12"}),
        [observer],
        wanted=ALL,
        memory_bytes=1 << 20,
    )
    assert sorted(observer.finished) == ["units", "whole"]
    assert {
        problem.array.name: problem.error.code for problem in sums.problems if problem.array
    } == {
        "cut": "unsupported",
        "large": "capacity",
    }
    assert sums.arrays["units"].crc == crc32(bytes(observer.data["units"]))


@given(
    n_bytes=st.integers(0, 6 * WINDOW_BYTES),
    spans=st.lists(
        st.tuples(st.integers(0, 6 * WINDOW_BYTES), st.integers(1, 4 * WINDOW_BYTES)), max_size=8
    ),
)
def test_windows_cover_a_file_and_cut_no_element(
    n_bytes: int, spans: list[tuple[int, int]]
) -> None:
    arrays = [
        StoredArray(
            f"{n}",
            ("int8", "int16", "float32", "complex128")[n % 4],
            (length // 16 + 1,),
            Extent("f", start),
        )
        for n, (start, length) in enumerate(spans)
    ]
    plan, wrong = plan_file("f", n_bytes, [(array, array) for array in arrays], ())
    assert len(plan.ranges) + len(plan.separate) + len(wrong) == len(arrays)
    at = 0
    for start, stop, lines in plan.segments():
        assert start == at
        for begin, end in plan.windows(start, stop):
            assert begin == at and begin < end <= begin + WINDOW_BYTES
            at = end
            for line in plan.ranges:
                assert isinstance(line.content, StoredArray)
                if line.start < end and begin < line.stop:
                    assert line in lines
                    assert (
                        end >= line.stop or (end - line.start) % itemsize(line.content.dtype) == 0
                    )
    assert at == n_bytes
