from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from core.arrays.box import Box
from core.engine.catalog.catalog import Catalog, catalog_of_arrays
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment, Tensor
from core.engine.changes.quantize import dequantize
from core.errors import CorruptError, MissingShardError, TruncatedError, UnsupportedError
from core.files.store import MemoryStore, ReadStore
from core.verbs.inspect.preview import first_values, places_of
from tests.support.fragments import with_fragments
from tests.support.late_items import ItemAt


def catalog_of(tensor: Tensor, fragments: Sequence[Fragment]) -> Catalog:
    return Catalog("test", None, {"w": replace(tensor, tiling=lambda: fragments)})


def array(
    name: str, shape: tuple[int, ...], offset: int = 0, *, strides: tuple[int, ...] | None = None
) -> StoredArray:
    return StoredArray(name, "int32", shape, Extent(name, offset, strides))


def ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def test_first_values_come_in_c_order_across_column_shards() -> None:
    tensor = Tensor("int32", (3, 4))
    first, right = array("left", (3, 2), 8), array("right", (3, 2))
    store = MemoryStore(
        {"left": bytes(8) + ints(0, 1, 4, 5, 8, 9), "right": ints(2, 3, 6, 7, 10, 11)}
    )
    catalog = catalog_of(
        tensor,
        [
            Fragment(Box((0, 2), (3, 2)), right, (0, 0)),
            Fragment(Box((0, 0), (3, 2)), first, (0, 0)),
        ],
    )
    assert first_values(store, catalog, "w", 100) == list(range(12))
    assert first_values(store, catalog, "w", 7) == list(range(7))
    assert first_values(store, catalog, "w", 0) == []


def test_first_values_follow_strides_and_the_layer_of_a_stacked_array() -> None:
    tensor = Tensor("int32", (2, 3))
    stacked = array("f", (2, 2, 3), strides=(6, 1, 2))  # each layer is stored transposed
    store = MemoryStore({"f": ints(*range(6), 10, 13, 11, 14, 12, 15)})
    catalog = catalog_of(tensor, [Fragment(Box((0, 0), (2, 3)), stacked, (1, 0, 0))])
    assert first_values(store, catalog, "w", 6) == [10, 11, 12, 13, 14, 15]


def test_only_the_wanted_bytes_are_read() -> None:
    tensor = Tensor("int32", (1_000_000,))
    store = MemoryStore({"f": ints(1, 2, 3)})
    catalog = catalog_of(
        tensor, [Fragment(Box((0,), (1_000_000,)), array("f", (1_000_000,)), (0,))]
    )
    assert first_values(store, catalog, "w", 3) == [1, 2, 3]
    with pytest.raises(TruncatedError):
        first_values(store, catalog, "w", 4)


def test_late_bound_arrays_are_bound_first() -> None:
    tensor = Tensor("int32", (2,))
    late = StoredArray("w", "int32", (2,), Extent("f", 0, item=ItemAt(Extent("f", 8))))
    catalog = Catalog(
        "test",
        None,
        with_fragments({"w": tensor}, lambda key: [Fragment(Box((0,), (2,)), late, (0,))]),
    )
    assert first_values(MemoryStore({"f": bytes(8) + ints(7, 8)}), catalog, "w", 2) == [7, 8]


def test_regions_that_are_zero_by_rule_read_as_zeros_and_holes_are_errors() -> None:
    tensor = Tensor("int32", (4,))
    stored = Fragment(Box((0,), (2,)), array("f", (2,)), (0,))
    zeros = Fragment(Box((2,), (2,)), None, ())
    store = MemoryStore({"f": ints(1, 2)})
    assert first_values(store, catalog_of(tensor, [stored, zeros]), "w", 4) == [1, 2, 0, 0]
    with pytest.raises(MissingShardError, match="element 2"):
        first_values(store, catalog_of(tensor, [stored]), "w", 4)


def test_scalars_have_one_value() -> None:
    tensor = Tensor("int32", ())
    catalog = catalog_of(tensor, [Fragment(Box((), ()), array("f", ()), ())])
    assert first_values(MemoryStore({"f": ints(42)}), catalog, "w", 8) == [42]


@pytest.mark.parametrize(
    ("dtype", "data", "values"),
    [
        ("float64", struct.pack("<2d", 0.1, -math.inf), [0.1, -math.inf]),
        ("float32", struct.pack("<2f", 0.5, 3.0), [0.5, 3.0]),
        ("float16", struct.pack("<2e", 0.5, 65504.0), [0.5, 65504.0]),
        ("bfloat16", bytes.fromhex("803f20c0"), [1.0, -2.5]),
        ("int64", struct.pack("<2q", -1, 2**62), [-1, 2**62]),
        ("uint64", struct.pack("<2Q", 1, 2**64 - 1), [1, 2**64 - 1]),
        ("int8", b"\xff\x7f", [-1, 127]),
        ("uint8", b"\xff\x00", [255, 0]),
        ("bool", b"\x01\x00", [True, False]),
        ("complex64", struct.pack("<4f", 1, 2, 3, -4), [1 + 2j, 3 - 4j]),
        ("complex32", struct.pack("<4e", 1, 2, 3, -4), [1 + 2j, 3 - 4j]),
        ("float8_e4m3fn", b"\x38\x7e", [1.0, 448.0]),
        ("float8_e5m2", b"\x3c\x7b", [1.0, 57344.0]),
        ("float8_e8m0fnu", b"\x7f\x80", [1.0, 2.0]),
    ],
)
def test_every_dtype_is_decoded(dtype: str, data: bytes, values: list[object]) -> None:
    tensor = Tensor(dtype, (2,))
    stored = StoredArray("w", dtype, (2,), Extent("f", 0))
    catalog = catalog_of(tensor, [Fragment(Box((0,), (2,)), stored, (0,))])
    assert first_values(MemoryStore({"f": data}), catalog, "w", 2) == values


def test_packed_numbers_are_refused() -> None:
    packed = catalog_of(Tensor("float4_e2m1fn_x2", (2,)), [])
    with pytest.raises(UnsupportedError, match="float4"):
        first_values(MemoryStore(), packed, "w", 2)


@dataclass(frozen=True)
class Deflated:
    """An array as a zlib stream of a certain length."""

    stored_bytes: int
    name: str = "zlib"
    unit_bytes: int = 1 << 20
    working_bytes: int = 0

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes:
        assert unit == 0
        return zlib.decompress(
            store.read(array.extent.file, array.extent.offset, self.stored_bytes)
        )


def test_encoded_arrays_are_decoded_and_the_map_says_so() -> None:
    packed = zlib.compress(ints(*range(6)))
    extent = Extent("f", 3, encoding=Deflated(len(packed)))
    array = StoredArray("w", "int32", (2, 3), extent)
    catalog = catalog_of(Tensor("int32", (2, 2)), [Fragment(Box((0, 0), (2, 2)), array, (0, 1))])
    assert first_values(MemoryStore({"f": b"abc" + packed}), catalog, "w", 4) == [1, 2, 4, 5]
    (place,) = places_of(catalog, "w")
    assert (place.encoding, place.stored_bytes, place.n_bytes) == ("zlib", len(packed), 16)
    longer = StoredArray("w", "int32", (2, 4), extent)
    broken = catalog_of(catalog.tensors["w"], [Fragment(Box((0, 0), (2, 2)), longer, (0, 0))])
    with pytest.raises(CorruptError, match="bytes"):
        first_values(MemoryStore({"f": b"abc" + packed}), broken, "w", 4)


def test_computed_tensors_are_shown_like_stored_ones() -> None:
    arrays = {
        "w": StoredArray("w", "float8_e4m3fn", (1, 2), Extent("w", 0)),
        "w_scale_inv": StoredArray("s", "float32", (1, 1), Extent("s", 0)),
    }
    catalog = dequantize(catalog_of_arrays(format="test", arrays=arrays)).catalog
    store = MemoryStore({"w": b"\x38\x7e", "s": struct.pack("<f", 2.0)})
    assert first_values(store, catalog, "w", 2) == [2.0, 896.0]


def test_the_map_is_in_order_and_keeps_replicas() -> None:
    tensor = Tensor("int32", (4, 2))
    rank = (("tp", 1),)
    lower = StoredArray("b", "int32", (2, 2), Extent("fb", 64), rank)
    catalog = catalog_of(
        tensor,
        [
            Fragment(Box((2, 0), (2, 2)), lower, (0, 0)),
            Fragment(Box((0, 0), (2, 2)), array("a", (4, 2), 16), (0, 0)),
            Fragment(Box((0, 0), (2, 2)), array("c", (2, 2)), (0, 0)),
        ],
    )
    places = places_of(catalog, "w")
    assert [
        (place.box.offset, place.file, place.offset, place.rank, place.n_bytes) for place in places
    ] == [
        ((0, 0), "a", 16, (), 16),
        ((0, 0), "c", 0, (), 16),
        ((2, 0), "fb", 64, rank, 16),
    ]
    assert places[0].array_shape == (4, 2)
