"""Records that other programs deflated, and those of a big-endian machine, read through
encodings.
"""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.decoded import DecodedStore
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.copy.run import execute
from core.engine.plan.plan import make_plan
from core.errors import (
    CapacityError,
    CheckpointingException,
    CorruptError,
    UnsafeError,
    UnsupportedError,
)
from core.files.store import MemoryStore
from core.formats.torch.format import FORMAT, lay_out, load_object
from core.formats.torch.item import TorchItem
from core.formats.torch.zip import records as torch_record
from core.formats.torch.zip.records import RecordEncoding, number_bytes
from core.opening.target import partitioned
from core.pickle.plain import to_plain
from core.pickle.writer import dumps
from core.publish.manifest.of_copy import finish_files
from tests.formats.torch.torch_samples import (
    DTYPES,
    a_tensor,
    assert_same,
    attempt,
    bits,
    deflated,
    entry_bytes,
    facts_of,
    filled,
    kinds_of,
    opened,
    repickled,
    saved,
    written,
)
from tests.support.rounds import rounds


def encoding_of(catalog: Catalog, key: str) -> RecordEncoding | None:
    array = catalog.fragments(key)[0].array
    assert array is not None
    encoding = array.extent.encoding
    assert encoding is None or isinstance(encoding, RecordEncoding)
    return encoding


def big_endian(data: bytes) -> bytes:
    """A torch zip as a big-endian machine writes it; every storage holds numbers of the dtype that
    its tensors have.
    """
    catalog, _ = opened(data)
    widths: list[tuple[int, int]] = []
    for key, tensor in catalog.tensors.items():
        array = catalog.fragments(key)[0].array
        assert array is not None
        widths.append((array.extent.offset, number_bytes(tensor.dtype)))
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(stream, "w") as target:
        for info in source.infolist():
            content = source.read(info)
            if info.filename.endswith("/byteorder"):
                content = b"big"
            elif "/data/" in info.filename and content:
                name, extra = struct.unpack_from("<HH", data, info.header_offset + 26)
                start = info.header_offset + 30 + name + extra
                width = next(width for at, width in widths if start <= at < start + len(content))
                content = np.frombuffer(content, f"({width},)u1")[:, ::-1].tobytes()
            target.writestr(info.filename, content)
    return stream.getvalue()


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "deflate": deflated,
    "big-endian": big_endian,
    "big-endian deflate": lambda data: deflated(big_endian(data)),
}


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_tensor_is_read_as_from_a_plain_zip(
    dtype: torch.dtype, packing: str, tmp_path: Path
) -> None:
    value = kinds_of(dtype)
    data = saved(value)
    catalog, store = opened(PACKINGS[packing](data))
    plain, plain_store = opened(data)
    assert catalog.tensors == plain.tensors
    assert to_plain(catalog.skeleton) == to_plain(plain.skeleton)
    assert facts_of(catalog) == facts_of(plain)
    is_turned = packing != "deflate" and number_bytes(str(dtype)[6:]) > 1
    name = packing if is_turned else packing.removeprefix("big-endian").strip()
    for key in catalog.tensors:
        encoding = encoding_of(catalog, key)
        assert (encoding.name if encoding else "") == name
        assert entry_bytes(catalog, store, key) == entry_bytes(plain, plain_store, key), key
    assert written(catalog, store) == written(plain, plain_store)


def test_a_deflated_file_is_what_torch_loads() -> None:
    value = {"a": filled(torch.float32, 40, 30), "b": [1, "x", filled(torch.bfloat16, 7)]}
    data = deflated(saved(value))
    assert_same(torch.load(io.BytesIO(data)), value)
    assert_same(torch.load(io.BytesIO(written(*opened(data)))), value)


def test_only_what_is_deflated_is_decoded() -> None:
    data = saved({"zeros": torch.zeros(1000), "noise": filled(torch.uint8, 1000)})
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(stream, "w") as target:
        for name in source.namelist():
            method = zipfile.ZIP_DEFLATED if name.endswith("data/0") else zipfile.ZIP_STORED
            target.writestr(name, source.read(name), compress_type=method)
    catalog, store = opened(stream.getvalue())
    assert encoding_of(catalog, "zeros") is not None
    assert encoding_of(catalog, "noise") is None
    assert_same(torch.load(io.BytesIO(written(catalog, store))), torch.load(io.BytesIO(data)))


def test_big_numbers_are_turned_round_unit_by_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_record, "UNIT_BYTES", 64)
    value = {
        "a": filled(torch.float32, 50),
        "part": filled(torch.complex128, 40)[3:30],
        "t": filled(torch.int16, 9, 9).t(),
    }
    data = saved(value)
    catalog, store = opened(big_endian(data))
    for key, tensor in value.items():
        assert entry_bytes(catalog, store, key) == bits(tensor)
    array = catalog.fragments("part")[0].array
    assert array is not None
    decoded = DecodedStore(store)
    placed = decoded.placed(array).extent
    assert placed is not None
    assert decoded.read(placed.file, 70, 200) == bits(value["part"])[70:270]


def test_long_records_are_inflated_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_record, "PIECE_BYTES", 100)
    value = {
        "noise": filled(torch.uint8, 5000),
        "zeros": torch.zeros(3000),
        "part": filled(torch.int16, 900)[333:700],
    }
    catalog, store = opened(deflated(saved(value)))
    for key, tensor in value.items():
        assert entry_bytes(catalog, store, key) == bits(tensor)


def test_the_engine_copies_what_is_deflated() -> None:
    value = {f"k{n}": filled(torch.float32, 30 + n, 40, seed=n) for n in range(20)} | {
        "t": filled(torch.int16, 70, 90).t()
    }
    for packing in PACKINGS.values():
        catalog, store = opened(packing(saved(value)))
        target = partitioned(catalog, format="torch", by="whole")
        plan = make_plan(catalog, target, list(lay_out(target)), threads=2)
        out = MemoryStore()
        finish_files(plan, execute(plan, store, out), out)
        assert_same(torch.load(io.BytesIO(bytes(out.contents["checkpoint.pt"]))), value)


def test_objects_of_a_deflated_stream_are_loaded() -> None:
    data = deflated(saved({"state": filled(torch.uint8, 20), "step": 3}))
    store = MemoryStore({"o": b"z" * 11 + data})
    loaded, arrays = load_object(
        store, StoredArray("raw:k", "uint8", (len(data),), Extent("o", 11)), key="rng"
    )
    assert isinstance(loaded, dict)
    assert loaded["step"] == 3
    placed = (decoded := DecodedStore(store)).placed(arrays[loaded["state"].key]).extent
    assert placed is not None
    assert decoded.read(placed.file, 0, 20) == bits(filled(torch.uint8, 20))


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_item_that_is_not_plain_is_refused_by_name(packing: str) -> None:
    stream = saved(filled(torch.float32, 3))
    data = {
        "deflate": deflated,
        "big-endian": _big,
        "big-endian deflate": lambda s: deflated(_big(s)),
    }[packing](stream)
    late = StoredArray("t", "float32", (3,), Extent("i", 0, item=TorchItem(len(data))))
    with pytest.raises(UnsupportedError, match="deflated|big-endian") as caught:
        late.locate(MemoryStore({"i": data}))
    assert caught.value.file == "i"
    assert caught.value.key == "t"


def _big(data: bytes) -> bytes:
    """The same zip with another byte order stated."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(stream, "w") as target:
        for name in source.namelist():
            target.writestr(name, b"big" if name.endswith("byteorder") else source.read(name))
    return stream.getvalue()


CONTENT = bytes(range(64)) * 4


def packed(pickle: bytes | None = None, content: bytes = CONTENT, **changes: object) -> bytes:
    """A deflated zip of one tensor of 64 floats, some statements of its directory and local headers
    changed.

    Args:
        changes: ``raw`` (the deflated data), ``size`` and ``crc`` of ``data/0`` as both headers
            state them.
    """
    raw = changes.get("raw")
    machine = zlib.compressobj(wbits=-15)
    data = raw if isinstance(raw, bytes) else machine.compress(content) + machine.flush()
    pickle = dumps({"t": a_tensor((64,), (1,), numel=64)}) if pickle is None else pickle
    body, directory = b"", b""
    crc, size = changes.get("crc", zlib.crc32(content)), changes.get("size", len(content))
    for name, method, stored, n, check in (
        (b"a/data.pkl", 0, pickle, len(pickle), zlib.crc32(pickle)),
        (b"a/data/0", 8, data, size, crc),
    ):
        facts = struct.pack("<HHHHHIIIHH", 20, 0, method, 0, 0, check, len(stored), n, len(name), 0)
        directory += (
            b"PK\x01\x02"
            + struct.pack("<H", 20)
            + facts
            + struct.pack("<HHHII", 0, 0, 0, 0, len(body))
            + name
        )
        body += b"PK\x03\x04" + facts + name + stored
    return (
        body
        + directory
        + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 2, 2, len(directory), len(body), 0)
    )


def test_the_hand_made_deflated_file_is_fine() -> None:
    assert entry_bytes(*opened(packed()), "t") == CONTENT
    assert entry_bytes(*opened(packed(crc=0)), "t") == CONTENT, "0 stands for not computed"


def _raw(content: bytes) -> bytes:
    machine = zlib.compressobj(wbits=-15)
    return machine.compress(content) + machine.flush()


DAMAGES = {
    "more than stated": (packed(content=CONTENT + b"x", size=256), "more than the 256 bytes"),
    "a bomb": (packed(raw=_raw(bytes(1 << 24))), "more than the 256 bytes"),
    "less than stated": (packed(content=CONTENT[:-1], size=256), "inflates to 255 bytes"),
    "another checksum": (packed(crc=1), "CRC-32"),
    "no end": (packed(raw=_raw(CONTENT)[:-5]), "is incomplete"),
    "nothing": (packed(raw=b"\x03"), "inflates to more|is incomplete|too few|damaged"),
    "something behind": (
        packed(raw=_raw(CONTENT) + b"more"),
        "4 unexpected bytes after its deflated data",
    ),
    "no deflate": (packed(raw=b"\xff" * 60), "deflated data is damaged"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_deflated_data_are_an_error_that_names_the_file(case: str) -> None:
    data, message = DAMAGES[case]
    catalog, store = opened(data)
    with pytest.raises(CorruptError, match=message) as caught:
        entry_bytes(catalog, store, "t")
    assert caught.value.file == "f.pt"
    assert caught.value.span is not None


def test_a_deflated_pickle_asks_for_no_more_than_its_length_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bomb = deflated(repickled(b"\x80\x02](" + b"]" * 3_000_000 + b"e."))
    assert len(bomb) < 10_000
    with pytest.raises(UnsafeError):
        opened(bomb)
    monkeypatch.setattr(torch_record, "MAX_PICKLE_BYTES", 1000)
    with pytest.raises(CapacityError, match="a compressed pickle expands to"):
        opened(bomb)


REAL = deflated(
    saved(
        {"a": filled(torch.float32, 4, 3), "z": torch.zeros(500), "l": [filled(torch.bfloat16, 5)]}
    )
)


@settings(max_examples=rounds(400), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(REAL) - 1), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_a_damaged_deflated_file_raises_only_our_errors(damages: list[tuple[int, int]]) -> None:
    data = bytearray(REAL)
    for at, byte in damages:
        data[at] = byte
    attempt(bytes(data))


@settings(max_examples=rounds(300), deadline=None)
@given(st.binary(max_size=200), st.sampled_from([0, 1, 64, 256, 1000]))
def test_any_deflated_data_raise_only_our_errors(raw: bytes, size: int) -> None:
    store = MemoryStore({"f.pt": packed(raw=raw, size=size, crc=0)}, entry="f.pt")
    with contextlib.suppress(CheckpointingException):
        assert len(entry_bytes(FORMAT.read(store), store, "t")) == 256


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_encoding_states_the_memory_that_it_takes(
    packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tracemalloc

    monkeypatch.setattr(torch_record, "UNIT_BYTES", 1 << 20)
    base = filled(torch.int32, 1200, 1000)
    catalog, store = opened(
        PACKINGS[packing](saved({"whole": base, "turned": base.t(), "part": base[300:700, 5:900]}))
    )
    assert catalog.tensors.keys() == {"whole", "turned", "part"}
    for key in catalog.tensors:
        array = catalog.fragments(key)[0].array
        encoding = encoding_of(catalog, key)
        assert array is not None and encoding is not None
        tracemalloc.start()
        encoding.decode(store, array, 0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        unit = min(encoding.unit_bytes, array.n_bytes)
        assert peak <= unit + encoding.working_bytes + (64 << 10), key
