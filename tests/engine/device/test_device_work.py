"""Per-byte work on a device: the code of the accelerator, run on torch's CPU, gives the bits of the
CPU path.

The same tests run on a GPU where there is one (marker ``gpu``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import TypeVar

import numpy as np
import pytest
import torch

from core.arrays.box import full_box
from core.arrays.cast import check_cast, find_cast
from core.arrays.dtypes import DTYPES, itemsize
from core.engine.calibration.choice import choose_device, decisions
from core.engine.calibration.trials import patterns, trial_of, typical_numbers
from core.engine.catalog.catalog import Catalog, TargetCatalog, catalog_of_arrays
from core.engine.catalog.decoded import DecodedStore
from core.engine.catalog.file_image import FileImage, PlacedArray
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment, Tensor
from core.engine.changes.quantize import dequantize, quantize
from core.engine.copy.options import CopyOptions
from core.engine.copy.run import execute
from core.engine.device.cast import cast_on
from core.engine.device.compare import count_differing
from core.engine.device.device import (
    COMPARE,
    DEQUANTIZE,
    FINGERPRINT,
    QUANTIZE,
    VALUES,
    Device,
    cast_work,
)
from core.engine.device.lane import LANE_BYTES, PIECE_BYTES, Lane, host_buffer, host_bytes, lane_of
from core.engine.fingerprint.kernel import fastest_products, products_in_numpy
from core.engine.plan.plan import make_plan
from core.errors import ReplicaMismatchError, UnsupportedError
from core.files.store import MemoryStore
from core.opening.target import dense_target
from tests.support.fragments import with_fragments

T = TypeVar("T")
WORKS = (VALUES, FINGERPRINT, COMPARE, QUANTIZE, DEQUANTIZE)
FLOATS = [
    name
    for name, dtype in DTYPES.items()
    if dtype.kind == "float" and not name.startswith("float4")
]
_numbers = count(1)

PLACES = [
    pytest.param("cpu", id="cpu"),
    pytest.param(
        "cuda:0",
        id="cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
        ],
    ),
]


def able(place: str, *works: str) -> Device:
    return Device(place, work=frozenset(works))


def pairs_from(source: str) -> list[tuple[str, str]]:
    """The casts of a dtype that are made."""
    pairs = []
    for target in DTYPES:
        try:
            check_cast(source, target)
        except UnsupportedError:
            continue
        if target != source:
            pairs.append((source, target))
    return pairs


def in_thread(work: Callable[[], T]) -> T:
    """The result of a thread of its own, which has a lane of its own."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("source", [name for name in DTYPES if pairs_from(name)])
def test_every_cast_of_every_pattern_is_that_of_the_cpu_path(source: str, place: str) -> None:
    assert [
        pair
        for pair in pairs_from(source)
        if not trial_of(cast_work(*pair)).is_exact(able(place, cast_work(*pair)))
    ] == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("work", WORKS)
def test_every_other_kind_of_work_is_that_of_the_cpu_path(work: str, place: str) -> None:
    assert trial_of(work).is_exact(able(place, work))


def test_samples_hold_what_casts_treat_by_itself() -> None:
    bits = patterns("float32")
    for wanted in (
        0x7F80_0000,
        0xFF80_0000,
        0x7F80_0001,
        0x7FC0_0000,
        1,
        0x0000_8000,
        0x3F80_8000,
        0x3F80_1000,
        0,
    ):
        assert wanted in bits
    numbers = patterns("float64").view("f8")
    assert (
        np.isnan(numbers).sum() > 1000
        and np.isinf(numbers).any()
        and (np.abs(numbers) < 1e-310).any()
    )


@pytest.mark.parametrize("place", PLACES)
def test_a_buffer_of_many_pieces_is_cast_in_order_from_read_only_bytes(place: str) -> None:
    data = typical_numbers("float32", 2 * PIECE_BYTES + 12)
    work = cast_work("float32", "bfloat16")
    outs = [memoryview(bytearray(len(data) // 2)) for _ in range(3)]
    find_cast("float32", "bfloat16")(memoryview(data), outs[0])
    cast_on(able(place, work), "float32", "bfloat16")(memoryview(data).toreadonly(), outs[1])
    assert outs[1] == outs[0]
    pinned = host_buffer(Device(place), len(data))
    pinned[:] = memoryview(data)
    cast_on(able(place, work), "float32", "bfloat16")(pinned, outs[2])
    assert outs[2] == outs[0]
    cast_on(able(place, work), "float32", "bfloat16")(pinned[:0], outs[2][:0])


@pytest.mark.parametrize("place", PLACES)
def test_pieces_of_a_fold_come_in_order_and_a_lane_works_on_after_an_error(place: str) -> None:
    lane = Lane(Device(place))
    data = np.arange(3 * PIECE_BYTES // 8, dtype="i8")
    firsts = [
        int(piece.view("i8")[0])
        for piece in lane.map_pieces((memoryview(data.view("u1")),), lambda t: t[:8], size=8)
    ]
    assert firsts == [0, PIECE_BYTES // 8, PIECE_BYTES // 4]

    def broken(_: object) -> object:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        lane.map(
            memoryview(data.view("u1")), memoryview(bytearray(data.nbytes)), broken, sizes=(8, 8)
        )
    out = bytearray(16)
    lane.map(memoryview(b"0123456789abcdef"), memoryview(out), lambda t: t, sizes=(1, 1))
    assert out == b"0123456789abcdef"


@pytest.mark.parametrize("place", PLACES)
def test_where_buffers_differ_is_found_across_pieces(place: str) -> None:
    first = np.zeros(PIECE_BYTES + 64, "u1")
    other = first.copy()
    other[[PIECE_BYTES // 2 + 5, PIECE_BYTES + 63]] = 1
    difference = count_differing(able(place, COMPARE), memoryview(first), memoryview(other), 4)
    assert difference == count_differing(None, memoryview(first), memoryview(other), 4)
    assert (difference.n, difference.first) == (2, (PIECE_BYTES // 2 + 5) // 4)


@pytest.mark.parametrize("place", PLACES)
def test_fingerprint_products_of_odd_and_cut_rows(place: str) -> None:
    data = np.random.default_rng(0).integers(-128, 128, (50, 700)).astype(np.int8)
    with fastest_products(1, able(place, FINGERPRINT)) as products:
        for some, first in (
            (data, 3),
            (data[:1], 0),
            (data[:, 100:101], 4095),
            (data[:, 5:], 1024),
        ):
            assert np.array_equal(products(some, first), products_in_numpy(some, first))


def planned(
    tensors: dict[str, tuple[str, str, tuple[int, ...]]], *, copies: Iterable[str] = ()
) -> tuple[Catalog, MemoryStore, TargetCatalog, list[FileImage]]:
    """(source, its files, target, images) of tensors given as (dtype, target dtype, shape); some
    are stored twice.
    """
    files: dict[str, bytes] = {}
    fragments: dict[str, list[Fragment]] = {}
    for key, (dtype, _, shape) in tensors.items():
        data = typical_numbers(dtype, itemsize(dtype) * int(np.prod(shape))).tobytes()
        for name in [key, *([f"{key}.copy"] if key in copies else [])]:
            files[name] = data
            array = StoredArray(name, dtype, shape, Extent(name, 0))
            fragments.setdefault(key, []).append(
                Fragment(full_box(shape), array, (0,) * len(shape))
            )
    metas = {key: Tensor(dtype, shape) for key, (dtype, _, shape) in tensors.items()}
    source = Catalog("test", None, with_fragments(metas, fragments.__getitem__))
    wanted = {key: Tensor(target, shape) for key, (_, target, shape) in tensors.items()}
    return source, MemoryStore(files), *laid_out(wanted)


def laid_out(tensors: Mapping[str, Tensor]) -> tuple[TargetCatalog, list[FileImage]]:
    target = dense_target(tensors)
    images = []
    for key in tensors:
        array = target.whole_array(key)
        images.append(FileImage(key, array.n_bytes, (PlacedArray(0, array),)))
    return target, images


@pytest.mark.parametrize("place", PLACES)
def test_a_copy_with_a_device_writes_the_same_bytes_and_sums(place: str) -> None:
    case = planned(
        {
            "cast": ("float32", "bfloat16", (1300, 1000)),
            "tables": ("bfloat16", "float8_e4m3fn", (300, 7)),
            "wider": ("float16", "float64", (111,)),
            "moved": ("bfloat16", "bfloat16", (40, 40)),
        },
        copies=["moved"],
    )
    device = Device(place)
    results = []
    for given in (None, device):
        stage = MemoryStore()
        result = execute(
            make_plan(case[0], case[2], case[3], threads=2),
            case[1],
            stage,
            CopyOptions(device=given),
        )
        results.append(
            ({name: stage.read(name, 0, stage.size(name)) for name in stage.files()}, result.crcs)
        )
    assert results[0] == results[1]
    used = {decision.work for decision in decisions(device) if decision.is_on_device}
    assert {cast_work("float32", "bfloat16"), cast_work("float16", "float64"), COMPARE} <= used


@pytest.mark.parametrize("place", PLACES)
def test_copies_that_differ_are_an_error_on_a_device_too(place: str) -> None:
    source, store, target, images = planned({"w": ("float32", "float32", (30, 40))}, copies=["w"])
    data = bytearray(store.read("w.copy", 0, 4800))
    data[4 * (7 * 40 + 11) + 2] ^= 1
    store.write("w.copy", 0, bytes(data))
    with pytest.raises(ReplicaMismatchError, match=r"first at index \(7, 11\)"):
        execute(
            make_plan(source, target, images),
            store,
            MemoryStore(),
            CopyOptions(device=Device(place)),
        )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["block", "tensor"])
def test_scales_are_made_and_multiplied_in_on_a_device(kind: str, place: str) -> None:
    shape = (2, 200, 390)
    source, store, *_ = planned({"layers.w.weight": ("bfloat16", "bfloat16", shape)})
    device = able(place, QUANTIZE, DEQUANTIZE)

    def read_all(catalog: Catalog, files: MemoryStore, given: Device | None) -> dict[str, bytes]:
        decoded = DecodedStore(files, device=given)
        data_by_key = {}
        for key in catalog.tensors:
            array = catalog.fragments(key)[0].array
            assert array is not None
            placed = decoded.placed(array)
            data_by_key[key] = decoded.read(placed.extent.file, placed.extent.offset, array.n_bytes)
        return data_by_key

    results = [
        read_all(quantize(source, [("*", kind)]).catalog, store, given) for given in (None, device)
    ]
    assert results[0] == results[1] and len(results[0]) == 2
    scale = f"layers.w.weight_scale{'_inv' if kind == 'block' else ''}"
    small = catalog_of_arrays(
        format="test",
        arrays={
            "layers.w.weight": StoredArray(
                "w", "float8_e4m3fn", shape, Extent("layers.w.weight", 0)
            ),
            scale: StoredArray(
                "s", "float32", (2, 2, 4) if kind == "block" else (1,), Extent(scale, 0)
            ),
        },
    )
    files = MemoryStore(results[0])
    for dtype in ("bfloat16", "float32"):
        back = [
            read_all(dequantize(small, dtype).catalog, files, given) for given in (None, device)
        ]
        assert back[0] == back[1]


def test_a_number_that_is_not_finite_has_no_scale_on_a_device_either() -> None:
    data = typical_numbers("float32", 4 * 256 * 256).view("f4")
    data[50000] = np.inf
    source = catalog_of_arrays(
        format="test", arrays={"w.weight": StoredArray("w", "float32", (256, 256), Extent("w", 0))}
    )
    quantized = quantize(source, [("*", "block")]).catalog
    array = quantized.fragments("w.weight")[0].array
    assert array is not None and array.extent.encoding is not None
    store = DecodedStore(MemoryStore({"w": data.tobytes()}), device=able("cpu", QUANTIZE))
    with pytest.raises(UnsupportedError, match="is not finite in float32"):
        array.extent.encoding.decode(store, array, 0)


def test_work_with_other_bits_stays_on_the_cpu_path() -> None:
    device = Device(f"cpu:{next(_numbers)}")
    work, other = cast_work("float16", "float8_e5m2"), cast_work("bfloat16", "float8_e5m2")

    def spoiled() -> Device | None:
        lane_of(device).load_table(
            work, lambda: np.zeros(1 << 16, np.uint8)
        )  # what a faulty device might make of it
        return choose_device(device, [work, other], threads=1)

    engine = in_thread(spoiled)
    assert engine is not None and engine.work == {other}
    assert [(decision.is_on_device, decision.reason) for decision in decisions(device)] == [
        (False, "the device's results are not bit-identical to the CPU's"),
        (True, "requested"),
    ]


def test_auto_measures_both_ways_and_takes_the_faster_one() -> None:
    device = Device("cpu", is_auto=True)
    works = [VALUES, cast_work("bfloat16", "float8_e4m3fn")]
    chosen = choose_device(device, works, threads=2)
    assert chosen is not None and chosen.work is not None
    for decision in decisions(device):
        assert decision.cpu_bytes_per_s is not None and decision.device_bytes_per_s is not None
        assert (
            decision.is_on_device
            == (decision.device_bytes_per_s > decision.cpu_bytes_per_s)
            == (decision.work in chosen.work)
        )
        assert decision.reason.endswith("in a measurement")
    assert chosen.is_auto
    assert choose_device(None, works, threads=2) is None


def test_pinned_memory_is_in_the_memory_promise() -> None:
    assert host_bytes(None, 8) == 0
    assert host_bytes(Device("cpu"), 3) == 3 * LANE_BYTES
    assert host_bytes(Device("cuda:0"), 3) > 3 * LANE_BYTES + (500 << 20)
