"""Where the data of a DCP item lies."""

from __future__ import annotations

import contextlib
import io
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from core.arrays.box import Shape, c_strides
from core.engine.catalog.stored import Extent, StoredArray
from core.errors import CorruptError, UnsupportedError
from core.files.store import LocalStore, MemoryStore
from core.formats.torch.format import load_object
from core.formats.torch.item import TorchItem
from tests.formats.torch.torch_samples import DTYPES, bits, filled, kinds_of, saved


def item(value: object, *, before: int = 37) -> tuple[MemoryStore, Extent]:
    data = saved(value)
    return MemoryStore({"i": b"x" * before + data + b"y" * 50}), Extent(
        "i", before, item=TorchItem(len(data))
    )


def located(value: torch.Tensor, **where: int) -> tuple[MemoryStore, StoredArray]:
    store, extent = item(value, **where)
    return store, StoredArray("t", str(value.dtype)[6:], tuple(value.shape), extent).locate(store)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_items_are_located_with_their_strides(dtype: torch.dtype) -> None:
    for before, tensor in enumerate(
        kinds_of(dtype)[name]
        for name in (
            "whole",
            "transposed",
            "strided",
            "scalar",
            "columns",
            "expanded",
            "channels last",
            "empty",
            "empty matrix",
            "ones",
        )
    ):
        for _ in range(2):
            store, array = located(tensor, before=before)
            extent = array.extent
            assert not extent.is_late
            strides = extent.strides or c_strides(array.shape)
            if tensor.numel():
                span = 1 + sum((n - 1) * step for n, step in zip(array.shape, strides, strict=True))
                raw = bytearray(store.read("i", extent.offset, span * tensor.element_size()))
                view = (
                    torch.frombuffer(raw, dtype=torch.uint8)
                    .view(dtype)
                    .as_strided(array.shape, strides)
                )
                assert bits(view) == bits(tensor)


def test_parameters_and_marked_tensors_are_items_too() -> None:
    marked = filled(torch.float32, 3)
    marked.partition_dim = 0  # type: ignore[attr-defined]
    for tensor in (torch.nn.Parameter(filled(torch.float32, 3)), marked):
        store, array = located(tensor)
        assert store.read("i", array.extent.offset, 12) == bits(tensor)  # type: ignore[union-attr]


def test_an_item_with_a_long_pickle_is_located_by_its_directory() -> None:
    marked = filled(torch.float32, 3)
    marked.note = "x" * 5000  # type: ignore[attr-defined]
    store, array = located(marked)
    assert store.read("i", array.extent.offset, 12) == bits(marked)  # type: ignore[union-attr]


def test_an_item_whose_records_are_in_another_order_is_located() -> None:
    tensor = filled(torch.float32, 3)
    with zipfile.ZipFile(io.BytesIO(saved(tensor))) as source:
        content = {name: source.read(name) for name in reversed(source.namelist())}
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    store = MemoryStore({"i": stream.getvalue()})
    array = StoredArray(
        "t", "float32", (3,), Extent("i", 0, item=TorchItem(store.size("i")))
    ).locate(store)
    assert store.read("i", array.extent.offset, 12) == bits(tensor)  # type: ignore[union-attr]


def test_an_array_that_is_not_late_is_returned_as_it_is() -> None:
    array = StoredArray("t", "int8", (3,), Extent("i", 5))
    assert array.locate(MemoryStore()) is array


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        ("float32", (4, 3), "float32 tensor of shape"),
        ("float32", (12,), "shape"),
        ("int32", (3, 4), "int32"),
    ],
)
def test_an_item_that_is_not_what_the_metadata_says_is_refused(
    dtype: str, shape: Shape, message: str
) -> None:
    store, extent = item(filled(torch.float32, 3, 4))
    with pytest.raises(CorruptError, match=message) as caught:
        StoredArray("layer.weight", dtype, shape, extent).locate(store)
    assert caught.value.file == "i"
    assert caught.value.key == "layer.weight"
    assert caught.value.span == (37, 37 + extent.item.n_bytes)  # type: ignore[union-attr]


def test_an_item_that_is_no_dense_tensor_is_refused() -> None:
    for value, kind in (
        ({"a": 1}, CorruptError),
        (torch.ones(3, dtype=torch.complex64).conj(), UnsupportedError),
        (torch.empty(3, device="meta"), UnsupportedError),
    ):
        store, extent = item(value)
        with pytest.raises(kind):
            StoredArray("t", "complex64", (3,), extent).locate(store)


def test_a_truncated_item_is_refused_at_every_length() -> None:
    tensor = filled(torch.float32, 30)
    store, extent = item(tensor, before=0)
    data = store.read("i", 0, extent.item.n_bytes)  # type: ignore[union-attr]
    for n in (*range(0, len(data), 7), len(data) - 1):
        short = MemoryStore({"i": data[:n]})
        for stated in (n, len(data)):
            array = StoredArray("t", "float32", (30,), Extent("i", 0, item=TorchItem(stated)))
            with contextlib.suppress(CorruptError):
                where = array.locate(short).extent
                assert where is not None and where.offset + array.n_bytes <= n


def test_items_are_located_from_many_threads() -> None:
    tensors = [filled(torch.float32, 3 + n % 5, 4, seed=n) for n in range(60)]
    streams = [saved(tensor if n % 3 else tensor.t()) for n, tensor in enumerate(tensors)]
    store = MemoryStore({f"{n}": stream for n, stream in enumerate(streams)})

    def address(n: int) -> Extent:
        shape = tuple(tensors[n].shape) if n % 3 else tuple(tensors[n].t().shape)
        late = Extent(f"{n}", 0, item=TorchItem(len(streams[n])))
        return StoredArray("t", "float32", shape, late).locate(store).extent

    expected = [address(n) for n in range(60)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert list(pool.map(address, range(60))) == expected
    assert {extent.strides for extent in expected} >= {None, (1, 4)}


def test_a_truncated_item_names_its_file() -> None:
    store, extent = item(filled(torch.float32, 30))
    short = MemoryStore({"i": store.read("i", 0, store.size("i") - 100)})
    with pytest.raises(CorruptError) as caught:
        StoredArray("t", "float32", (31,), extent).locate(short)
    assert (caught.value.file, caught.value.key) == ("i", "t")


def test_golden_items_are_located(golden: Path) -> None:
    folder = golden / "torch_dcp/fsdp2_dp2"
    metadata = torch.distributed.checkpoint.FileSystemReader(folder).read_metadata()
    store = LocalStore(folder)
    n = 0
    for index, place in metadata.storage_data.items():
        meta = metadata.state_dict_metadata[index.fqn]
        extent = Extent(place.relative_path, place.offset, item=TorchItem(place.length))
        tensor = torch.load(
            io.BytesIO(store.read(extent.file, place.offset, place.length)), weights_only=False
        )
        if hasattr(meta, "size"):
            shape = next(
                tuple(chunk.sizes) for chunk in meta.chunks if chunk.offsets == index.offset
            )
            bound = (
                StoredArray("t", str(meta.properties.dtype)[6:], shape, extent).locate(store).extent
            )
            assert bound is not None and bound.strides is None
            assert store.read(extent.file, bound.offset, len(bits(tensor))) == bits(tensor)
            n += 1
        else:
            stream = StoredArray("r", "uint8", (place.length,), replace(extent, item=None))
            value, arrays = load_object(store, stream, key=index.fqn)
            assert arrays == {}
            assert value == tensor or not isinstance(tensor, (int, float, bool))
    assert n > 10
