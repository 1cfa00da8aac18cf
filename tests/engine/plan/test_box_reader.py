"""Boxes of tensors, however these are stored, against slices of the whole tensor."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.arrays.box import Box, full_box
from core.arrays.dtypes import itemsize
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment, Tensor
from core.engine.plan.box_reader import BoxReader, bands
from core.errors import MissingShardError
from core.files.store import MemoryStore
from core.megatron.reshard.unshard import unshard
from core.megatron.rules.tables import load_rules
from core.opening.objects import loaded
from core.opening.open import open_checkpoint
from tests.support.boxes import Model, one, pieces, values
from tests.support.fragments import with_fragments
from tests.support.materialize import tensor_bytes

RULES = load_rules()


def read(reader: BoxReader, key: str, box: Box, *, raw_bytes: int = 1 << 12) -> bytes:
    tensor = reader.tensor(key)
    out = memoryview(bytearray(prod(box.shape) * itemsize(tensor.dtype)))
    tensor.read(box, out, memoryview(bytearray(raw_bytes)))
    return bytes(out)


@given(
    st.lists(st.integers(0, 7), max_size=4).map(tuple),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 300),
)
def test_bands_tile_a_tensor_in_its_order(
    shape: tuple[int, ...], size: int, band_bytes: int
) -> None:
    numbers = np.arange(prod(shape)).reshape(shape)
    elements = []
    for box in bands(shape, size, band_bytes):
        part = numbers[tuple(map(slice, box.offset, box.end))].ravel()
        assert len(part) * size <= max(band_bytes, size)
        elements += part.tolist()
    assert elements == list(range(prod(shape)))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("raw_bytes", [16, 100, 1 << 12])
@pytest.mark.parametrize(
    "cut",
    [
        one("w", (6, 4, 8)),
        pieces("w", (6, 4, 8), 0, 3),
        pieces("w", (6, 4, 8), 2, 4),
        pieces("w", (6, 4, 8), 1, 2, copies=2),
        pieces("w", (6, 4, 8), 2, 2, segments=2),
    ],
)
def test_any_box_is_the_slice_of_the_tensor(order: str, raw_bytes: int, cut: object) -> None:
    model = Model({"w": (6, 4, 8)}, {"w": cut})  # type: ignore[dict-item]  # all are cuts
    catalog = model.source(order=order)
    reader = BoxReader(catalog, model.store)
    expected = values("w", (6, 4, 8))
    for box in (
        full_box((6, 4, 8)),
        Box((0, 0, 0), (1, 1, 1)),
        Box((1, 1, 3), (4, 2, 3)),
        Box((5, 0, 7), (1, 4, 1)),
        Box((2, 3, 0), (2, 1, 8)),
        Box((2, 2, 2), (0, 1, 1)),
    ):
        part = expected[tuple(map(slice, box.offset, box.end))]
        assert read(reader, "w", box, raw_bytes=raw_bytes) == part.tobytes()


def test_long_rows_go_straight_to_their_places() -> None:
    model = Model({"w": (6, 1 << 14)}, {"w": pieces("w", (6, 1 << 14), 1, 2)})
    catalog = model.source()
    assert (
        read(BoxReader(catalog, model.store), "w", Box((1, 0), (4, 1 << 14)))
        == values("w", (6, 1 << 14))[1:5].tobytes()
    )


def test_what_no_file_stores_is_zero() -> None:
    tensor = Tensor("int32", (3, 2))
    array = StoredArray("a", "int32", (2, 2), Extent("f", 0))
    fragments = [
        Fragment(Box((0, 0), (2, 2)), array, (0, 0)),
        Fragment(Box((2, 0), (1, 2)), None, ()),
    ]
    store = MemoryStore({"f": np.arange(1, 5, dtype="<i4").tobytes()})
    reader = BoxReader(
        Catalog("test", None, with_fragments({"w": tensor}, lambda key: fragments)), store
    )
    assert np.frombuffer(read(reader, "w", Box((1, 0), (2, 2))), "<i4").tolist() == [3, 4, 0, 0]


def test_a_missing_piece_is_an_error_before_anything_is_read() -> None:
    tensor = Tensor("int32", (3, 2))
    array = StoredArray("a", "int32", (2, 2), Extent("f", 0))
    fragments = [Fragment(Box((0, 0), (2, 2)), array, (0, 0))]
    reader = BoxReader(
        Catalog("test", None, with_fragments({"w": tensor}, lambda key: fragments)), MemoryStore()
    )
    with pytest.raises(MissingShardError, match="is missing"):
        reader.tensor("w")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("mcore_legacy/dense_gqa/tp2_pp2_optim", marks=pytest.mark.long),
        "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt",
        "mcore_torch_dist/dense_gqa/tp2_pp2",
        "mcore0121_zarr/dense_gqa/tp2_pp2_optim",
        "mcore0121_legacy/moe_grouped/tp2_pp1_ep2",
    ],
)
def test_bands_of_real_checkpoints_are_their_tensors(golden: Path, case: str) -> None:
    source = open_checkpoint(golden / case)
    catalog = loaded(source.catalog, source.store)
    catalog = unshard(catalog, rules=RULES, store=source.store)
    reader = BoxReader(catalog, source.store)
    assert catalog.tensors
    for key, tensor in catalog.tensors.items():
        boxes = bands(tensor.shape, itemsize(tensor.dtype), 1000)
        got = b"".join(read(reader, key, box) for box in boxes)
        assert got == tensor_bytes(catalog, source.store, key).tobytes(), key
