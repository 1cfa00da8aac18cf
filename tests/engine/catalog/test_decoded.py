"""Encoded arrays through the engine: decoded once a unit, bounded, checked."""

from __future__ import annotations

import gc
import threading
import weakref
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from core.arrays.box import Box, full_box
from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.decoded import DecodedStore, decoding_bytes
from core.engine.catalog.file_image import FileImage, PlacedArray
from core.engine.catalog.stored import Extent, PlannedArray, StoredArray
from core.engine.catalog.tensor import Fragment, Tensor
from core.engine.copy.run import execute
from core.engine.plan.memory import MIB
from core.engine.plan.plan import make_plan
from core.errors import CapacityError, CorruptError
from core.files.store import MemoryStore, ReadStore
from core.formats.zarr.decode import ChunkCoding, EncodedChunk
from core.publish.stage.files import StageStore
from tests.support.fragments import replace_fragments, with_fragments


@dataclass(frozen=True)
class Deflated:
    """zlib streams of equal dense length, one after the other; ``spans`` says where they lie."""

    spans: tuple[tuple[int, int], ...]
    unit_bytes: int
    working_bytes: int = 0
    counts: list[int] = field(default_factory=list, compare=False, hash=False)
    name: str = "zlib"

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes:
        self.counts.append(unit)
        return zlib.decompress(store.read(array.extent.file, *self.spans[unit]))


def encoded(values: np.ndarray, *, rows: int) -> tuple[bytes, Deflated]:
    data = values.tobytes()
    unit = rows * values[0].nbytes
    streams = [zlib.compress(data[at : at + unit]) for at in range(0, len(data), unit)]
    ends = np.cumsum([0, *map(len, streams)]).tolist()
    spans = tuple((ends[i], len(stream)) for i, stream in enumerate(streams))
    return b"".join(streams), Deflated(spans, unit)


VALUES: np.ndarray = np.arange(100 * 24, dtype="<i4").reshape(100, 24)


def array_of(name: str, values: np.ndarray, *, rows: int) -> tuple[StoredArray, bytes, Deflated]:
    data, encoding = encoded(values, rows=rows)
    return (
        StoredArray(name, "int32", values.shape, Extent(f"{name}.z", 0, encoding=encoding)),
        data,
        encoding,
    )


def test_any_range_of_an_encoded_array_can_be_read() -> None:
    array, data, encoding = array_of("w", VALUES, rows=7)
    store = DecodedStore(MemoryStore({"w.z": data}))
    placed = store.placed(array)
    name = placed.extent.file
    dense = VALUES.tobytes()
    assert store.size(name) == len(dense)
    for start, stop in [
        (0, len(dense)),
        (1, 2),
        (670, 675),
        (671, 3000),
        (len(dense) - 1, len(dense)),
        (5, 5),
    ]:
        assert store.read(name, start, stop - start) == dense[start:stop]
    assert sorted(set(encoding.counts)) == list(range(15))
    assert len(encoding.counts) == 15, "every unit was decoded once"
    parts = [memoryview(bytearray(10)), memoryview(bytearray(700))]
    store.read_vector(name, 100, parts, 710)
    assert b"".join(map(bytes, parts)) == dense[100:810]


def test_plain_files_pass_through() -> None:
    array, data, _ = array_of("w", VALUES, rows=7)
    store = DecodedStore(MemoryStore({"w.z": data, "d/x": b"abc"}))
    plain = replace(array, extent=Extent("w.z", 0))
    assert store.placed(plain) is plain
    assert store.read("d/x", 1, 2) == b"bc"
    assert store.files() == ["w.z"]
    assert store.folders() == ["d"]
    assert store.exists("d/x") and not store.exists("y")
    assert store.size("d/x") == 3


def test_the_cache_forgets_the_oldest_units_and_decodes_them_again() -> None:
    array, data, encoding = array_of("w", VALUES, rows=10)
    store = DecodedStore(MemoryStore({"w.z": data}), cache_bytes=2 * encoding.unit_bytes)
    placed = store.placed(array)
    for unit in (0, 1, 0, 2, 0, 1):
        store.read(placed.extent.file, unit * encoding.unit_bytes, 4)
    assert encoding.counts == [0, 1, 2, 1]


def test_two_threads_that_want_one_unit_decode_it_once() -> None:
    array, data, encoding = array_of("w", VALUES, rows=100)
    store = DecodedStore(MemoryStore({"w.z": data}))
    placed = store.placed(array)
    name = placed.extent.file
    threads = [threading.Thread(target=store.read, args=(name, 4 * n, 4)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert encoding.counts == [0]


def test_a_unit_of_the_wrong_length_is_reported_with_its_file() -> None:
    array, data, encoding = array_of("w", VALUES, rows=10)
    wrong = replace(array, shape=(101, 24))
    store = DecodedStore(MemoryStore({"w.z": data + zlib.compress(b"1234")}))
    spans = (*encoding.spans, (len(data), len(zlib.compress(b"1234"))))
    wrong = replace(wrong, extent=replace(array.extent, encoding=replace(encoding, spans=spans)))
    placed = store.placed(wrong)
    with pytest.raises(
        CorruptError, match="zlib data of array 'w' decodes to 4 bytes instead of 96"
    ) as caught:
        store.read(placed.extent.file, 9600, 96)
    assert caught.value.file == "w.z"


def test_arrays_of_one_name_in_one_file_are_told_apart() -> None:
    first, data, _ = array_of("w", VALUES, rows=7)
    more, other = encoded(VALUES + 1, rows=7)
    spans = tuple((start + len(data), n) for start, n in other.spans)
    replica = replace(first, extent=Extent("w.z", len(data), encoding=replace(other, spans=spans)))
    computed = replace(first, extent=replace(first.extent, encoding=Doubled(first)))
    store = DecodedStore(MemoryStore({"w.z": data + more}))
    names = [store.placed(array).extent.file for array in (first, replica, computed)]
    wanted = [VALUES, VALUES + 1, VALUES * 2]
    assert [store.read(name, 0, VALUES.nbytes) for name in names] == [
        values.tobytes() for values in wanted
    ]


@dataclass(frozen=True)
class Doubled:
    """Computed from an encoded array of the same name, in the same file."""

    array: StoredArray
    name: str = "doubled"
    unit_bytes: int = VALUES.nbytes
    working_bytes: int = VALUES.nbytes

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes:
        assert isinstance(store, DecodedStore)
        placed = store.placed(self.array)
        values: np.ndarray = np.frombuffer(store.read(placed.extent.file, 0, VALUES.nbytes), "<i4")
        return bytes((values * 2).tobytes())


def test_what_is_computed_from_encoded_arrays_shares_their_cache() -> None:
    first, data, encoding = array_of("w", VALUES, rows=7)
    store = DecodedStore(MemoryStore({"w.z": data}))
    for number in range(5):
        computed = replace(
            first, name=f"double {number}", extent=replace(first.extent, encoding=Doubled(first))
        )
        placed = store.placed(computed)
        assert store.read(placed.extent.file, 0, VALUES.nbytes) == (VALUES * 2).tobytes()
    assert len(encoding.counts) == 15, "every unit was decoded once"


def test_an_array_that_nobody_copies_any_more_is_forgotten() -> None:
    array, data, encoding = array_of("w", VALUES, rows=7)
    store = DecodedStore(MemoryStore({"w.z": data}), cache_bytes=0)
    placed = store.placed(array)
    store.read(placed.extent.file, 0, VALUES.nbytes)
    reference = weakref.ref(encoding)
    del array, encoding, placed
    gc.collect()
    assert reference() is None


def split(n_columns: int) -> tuple[Catalog, MemoryStore]:
    """A tensor in two encoded halves, side by side."""
    halves = [
        np.ascontiguousarray(VALUES[:, :n_columns]),
        np.ascontiguousarray(VALUES[:, n_columns:]),
    ]
    parts = [array_of(f"w{i}", half, rows=9) for i, half in enumerate(halves)]
    fragments = [
        Fragment(Box((0, i * n_columns), half.shape), parts[i][0], (0, 0))
        for i, half in enumerate(halves)
    ]
    catalog = Catalog(
        "fake", None, with_fragments({"w": Tensor("int32", VALUES.shape)}, lambda key: fragments)
    )
    return catalog, MemoryStore({f"w{i}.z": data for i, (_, data, _) in enumerate(parts)})


def merged() -> tuple[TargetCatalog, list[FileImage]]:
    array = PlannedArray("w", "int32", VALUES.shape)
    target = Catalog(
        "fake",
        None,
        with_fragments(
            {"w": Tensor("int32", VALUES.shape)},
            lambda key: (Fragment(full_box(VALUES.shape), array, (0, 0)),),
        ),
    )
    return target, [FileImage("out", array.n_bytes, (PlacedArray(0, array),))]


def test_encoded_shards_are_woven_like_plain_ones(tmp_path: Path) -> None:
    source, store = split(8)
    target, images = merged()
    plan = make_plan(source, target, images)
    assert plan.cache_bytes > 0
    stage = StageStore(tmp_path)
    execute(plan, store, stage)
    stage.close()
    assert (tmp_path / "out").read_bytes() == VALUES.tobytes()


def test_decoding_counts_towards_the_memory_and_takes_threads_away_before_it_is_refused() -> None:
    source, _ = split(8)
    assert decoding_bytes(source.fragments("w")) == 9 * 16 * 4

    def heavy(key: str) -> list[Fragment]:
        fragments = []
        for fragment in source.fragments(key):
            assert fragment.array is not None
            encoding = replace(fragment.array.extent.encoding, working_bytes=100 * MIB)  # type: ignore[type-var]
            extent = replace(fragment.array.extent, encoding=encoding)
            fragments.append(replace(fragment, array=replace(fragment.array, extent=extent)))
        return fragments

    target, images = merged()
    roomy = make_plan(
        replace_fragments(source, heavy), target, images, threads=2, memory_bytes=512 * MIB
    )
    assert roomy.threads == 2
    assert roomy.memory_bytes <= 512 * MIB
    tight = make_plan(
        replace_fragments(source, heavy), target, images, threads=2, memory_bytes=360 * MIB
    )
    assert tight.threads == 1
    assert tight.memory_bytes <= 360 * MIB
    with pytest.raises(CapacityError, match="the largest encoded chunk"):
        make_plan(
            replace_fragments(source, heavy), target, images, threads=2, memory_bytes=300 * MIB
        )


def test_the_encoded_bytes_of_an_announced_array_are_announced_once() -> None:
    class RecordingStore(MemoryStore):
        ranges: list[tuple[str, int, int]]

        def expect_ranges(self, ranges: Iterable[tuple[str, int, int]]) -> None:
            self.ranges = list(ranges)

    data = zlib.compress(VALUES.tobytes())
    coding = ChunkCoding("int32", VALUES.shape, tuple(range(VALUES.ndim)), codecs=("zlib",))
    array = StoredArray(
        "w", "int32", VALUES.shape, Extent("c/0", 3, encoding=EncodedChunk(coding, len(data)))
    )
    files = RecordingStore({"c/0": b"xyz" + data})
    store = DecodedStore(files)
    name = store.placed(array).extent.file
    chunk = ("c/0", 3, 3 + len(data))
    for ranges, announced in (
        ([("plain", 0, 5), (name, 0, 8), (name, 100, 200)], [("plain", 0, 5), chunk]),
        ([(name, 8, 16)], []),
    ):
        store.expect_ranges(ranges)
        assert files.ranges == announced
    # What is decoded is not needed again.
    assert store.read(name, 0, 8) == VALUES.tobytes()[:8]
    store.expect_ranges([(name, 16, 24)])
    assert files.ranges == []
