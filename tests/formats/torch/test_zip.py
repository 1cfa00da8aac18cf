"""The container of torch.save: reading its directory, and laying one out byte for byte as torch
does.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import struct
import warnings
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import CheckpointingException, CorruptError, TruncatedError, UnsupportedError
from core.files.store import LocalStore, MemoryStore
from core.formats.torch.zip.container import Archive, check_kind, read_archive
from core.formats.torch.zip.records import is_big_endian
from core.formats.torch.zip.tree_layout import plan_archive
from tests.support.rounds import rounds

U32 = 0xFFFFFFFF


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def archive_of(data: bytes, **where: int) -> Archive:
    return read_archive(MemoryStore({"f": data}), "f", **where)


def zipped(
    records: Sequence[tuple[str, bytes]] = (
        ("archive/data.pkl", b"\x80\x02N."),
        ("archive/data/0", b"12345678"),
    ),
    **options: int,
) -> bytes:
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(stream, "w", **options) as archive:  # type: ignore[call-overload]
            for name, data in records:
                archive.writestr(name, data)
    return stream.getvalue()


def assembled(
    plan_size: int, literals: Sequence[tuple[int, bytes]], data: Mapping[int, bytes]
) -> bytes:
    content = bytearray(plan_size)
    for offset, piece in [*literals, *data.items()]:
        content[offset : offset + len(piece)] = piece
    return bytes(content)


def replanned(data: bytes) -> bytes:
    """A zip that torch wrote, planned and filled anew from its records."""
    archive = archive_of(data)
    content = {
        name: data[record.offset :][: record.n_bytes] for name, record in archive.records.items()
    }
    plan = plan_archive(archive.root, [(name, len(piece)) for name, piece in content.items()])
    payloads = {name: piece for name, piece in content.items() if not name.startswith("data/")}
    literals = list(plan.literals(payloads, lambda name: zlib.crc32(content[name])))
    offsets = dict(zip(plan.names, plan.data, strict=True))
    arrays = {
        offsets[f"{plan.root}/{name}"]: piece
        for name, piece in content.items()
        if name.startswith("data/")
    }
    return assembled(plan.size, literals, arrays)


SIZES = (0, 1, 3, 31, 32, 63, 64, 65, 200)


@pytest.mark.parametrize("name", ["a", "model", "x" * 37, "x" * 200, "größe"])
def test_a_planned_zip_equals_the_one_that_torch_saves(name: str, tmp_path: Path) -> None:
    tensors = {f"k{i}": torch.arange(n, dtype=torch.uint8) for i, n in enumerate(SIZES)}
    path = tmp_path / f"{name}.pt"
    torch.save({**tensors, "text": "y" * len(name)}, path)
    assert replanned(path.read_bytes()) == path.read_bytes()


def test_a_planned_zip_of_many_records_equals_the_one_that_torch_saves() -> None:
    data = saved([torch.full((n % 7,), n, dtype=torch.int16) for n in range(1500)])
    assert replanned(data) == data


def test_records_beyond_4_gib_are_placed_as_torch_places_them(tmp_path: Path) -> None:
    sizes = [5, U32, U32 - 1, U32 + 1, 0, 17, 1 << 33, 3, U32]
    sparse = tmp_path / "zeros"
    with sparse.open("wb") as file:
        file.truncate(1 << 33)
    tensors = [
        torch.from_file(str(sparse), shared=True, size=n, dtype=torch.uint8)
        if n
        else torch.empty(0, dtype=torch.uint8)
        for n in sizes
    ]
    with torch.serialization.skip_data():
        torch.save(tensors, tmp_path / "big.pt")
    del tensors
    store = LocalStore(tmp_path)
    archive = read_archive(store, "big.pt")
    records = archive.records
    assert [records[f"data/{i}"].n_bytes for i in range(len(sizes))] == sizes
    plan = plan_archive("big", [(name, record.n_bytes) for name, record in records.items()])
    assert plan.size == store.size("big.pt")
    assert list(plan.data) == [record.offset for record in records.values()]
    payloads = {
        name: store.read("big.pt", record.offset, record.n_bytes)
        for name, record in records.items()
        if not name.startswith("data/")
    }
    for offset, piece in plan.literals(payloads, lambda name: records[name].crc):
        assert store.read("big.pt", offset, len(piece)) == piece


def test_a_planned_zip_is_read_by_zipfile_with_right_crcs() -> None:
    data = replanned(saved({"a": torch.arange(9.0), "b": torch.empty(0)}))
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        assert opened.testzip() is None


def test_the_directory_says_what_zipfile_says() -> None:
    data = saved(
        {"a": torch.arange(9.0), "b": torch.empty(0), "c": torch.ones(3, dtype=torch.bfloat16)}
    )
    archive = archive_of(data)
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        infos = opened.infolist()
        assert list(archive.records) == [info.filename.removeprefix("archive/") for info in infos]
        for info, record in zip(infos, archive.records.values(), strict=True):
            assert (record.n_bytes, record.crc) == (info.file_size, info.CRC)
            assert data[record.offset : record.offset + record.n_bytes] == opened.read(info)
    assert archive.root == "archive"
    check_kind(archive)
    assert not is_big_endian(MemoryStore({"f": data}), archive)


def test_a_zip_inside_a_bigger_file_is_read_in_place() -> None:
    data = saved([torch.arange(5)])
    for before, behind in itertools.product((b"", b"x" * 37, data), (b"", b"y" * 11, data)):
        archive = archive_of(before + data + behind, start=len(before), n_bytes=len(data))
        record = archive.records["data/0"]
        assert (before + data + behind)[record.offset :][:8] == bytes(8)
        assert record.offset - len(before) == archive_of(data).records["data/0"].offset


def test_a_zip_of_another_program_is_read() -> None:
    records = [
        ("a/", b""),
        ("a/data.pkl", b"\x80\x02N."),
        ("a/data/", b""),
        ("a/data/0", b"12345678"),
    ]
    archive = archive_of(zipped(records))
    assert list(archive.records) == ["data.pkl", "data/0"]


def test_a_zip_with_a_comment_is_read() -> None:
    data = zipped()
    assert (
        archive_of(data[:-2] + b"\x05\x00hello").records.keys() == archive_of(data).records.keys()
    )


@pytest.mark.parametrize(
    "behind", [b"\0", bytes(22), b"some text\n" * 9, bytes(4096), bytes(65_535)]
)
def test_bytes_behind_the_zip_are_ignored_as_by_torch(behind: bytes) -> None:
    data = saved({"a": torch.arange(20_000)})
    assert torch.equal(torch.load(io.BytesIO(data + behind))["a"], torch.arange(20_000))
    archive = archive_of(data + behind)
    assert archive.records == archive_of(data).records and archive.n_trailing == len(behind)


def test_more_bytes_behind_the_zip_than_torch_searches_are_an_error() -> None:
    data = saved({"a": torch.arange(20_000)}) + bytes(70_000)
    with pytest.raises(RuntimeError, match="zip archive"):
        torch.load(io.BytesIO(data))
    with pytest.raises(TruncatedError, match="no end record"):
        archive_of(data)


def test_the_end_of_a_zip_inside_a_cut_one_is_not_its_end() -> None:
    inner = torch.frombuffer(bytearray(saved({"a": torch.arange(5)})), dtype=torch.uint8)
    data = saved({"state": inner})
    archive_of(data + bytes(100))
    for n in range(data.rindex(b"PK\x01\x02"), data.index(b"PK\x05\x06"), -50):
        with pytest.raises(TruncatedError, match="cut short"):
            archive_of(data[:n])
    with pytest.raises(TruncatedError, match="cut short"):
        archive_of(data[: data.index(b"PK\x05\x06") + 100])


def test_a_missing_record_is_named() -> None:
    with pytest.raises(CorruptError, match="no record 'data/9'"):
        archive_of(zipped()).record("data/9")


@pytest.mark.parametrize("data", [b"", b"PK", b"hello", bytes(1000), b"PK\x05\x06"])
def test_what_is_no_zip_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match="not a zip"):
        archive_of(data)


def test_a_zip_that_was_cut_short_is_called_truncated() -> None:
    data = saved({"a": torch.arange(100)})
    for n in range(4, len(data)):
        with pytest.raises(TruncatedError, match="cut short"):
            archive_of(data[:n])


def test_a_range_beyond_the_file_is_called_truncated() -> None:
    with pytest.raises(TruncatedError):
        archive_of(zipped(), start=3, n_bytes=10**6)


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


DATA = zipped()
CENTRAL = DATA.index(b"PK\x01\x02")
SECOND_CENTRAL = DATA.index(b"PK\x01\x02", CENTRAL + 1)
SECOND_LOCAL = DATA.index(b"PK\x03\x04", 1)
END = DATA.index(b"PK\x05\x06")
DEFLATED = zipped([("a/data.pkl", b"N." * 99)], compression=zipfile.ZIP_DEFLATED)

CONTRADICTIONS = {
    "bytes before the zip": (b"junk" + DATA, CorruptError, "must end"),
    "two end records": (DATA[:-2] + b"\x16\x00" + DATA[-22:], CorruptError, "two end records"),
    "two equal names": (
        zipped([("a/data.pkl", b"N."), ("a/data.pkl", b"N.")]),
        CorruptError,
        "two records named 'data.pkl'",
    ),
    "two roots": (
        zipped([("a/data.pkl", b"N."), ("b/data/0", b"12")]),
        CorruptError,
        "below 'a' and below 'b'",
    ),
    "no root": (zipped([("data.pkl", b"N.")]), UnsupportedError, "at its top"),
    "another local name": (
        patched(DATA, 30 + 8, b"DATA"),
        CorruptError,
        "local header of record .* do not match",
    ),
    "another local size": (patched(DATA, 22, b"\x05"), CorruptError, "according to its header"),
    "another local crc": (patched(DATA, 14, b"\x05"), CorruptError, "according to its header"),
    "another local method": (patched(DATA, 8, b"\x08"), CorruptError, "different flags"),
    "no local header": (patched(DATA, 0, b"XX"), CorruptError, "do not match"),
    "overlapping records": (
        patched(patched(DATA, SECOND_CENTRAL + 42, b"\0\0\0\0"), SECOND_CENTRAL + 46, b""),
        CorruptError,
        "overlaps",
    ),
    "a record that reaches into the next": (
        patched(
            patched(DATA, CENTRAL + 20, struct.pack("<II", 999, 999)),
            18,
            struct.pack("<II", 999, 999),
        ),
        CorruptError,
        "overlaps",
    ),
    "a gap at the begin": (
        patched(patched(DATA, CENTRAL + 42, struct.pack("<I", SECOND_LOCAL)), 0, b""),
        CorruptError,
        "precede|overlaps",
    ),
    "a record behind the end": (
        patched(DATA, SECOND_CENTRAL + 42, b"\xf0\xf0\xf0\x70"),
        CorruptError,
        "overlaps",
    ),
    "two sizes": (patched(DATA, CENTRAL + 20, b"\x05"), CorruptError, "two different sizes"),
    "another method in the local header": (
        patched(DEFLATED, 8, b"\0"),
        CorruptError,
        "different flags",
    ),
    "another deflated size in the local header": (
        patched(DEFLATED, 18, b"\x05"),
        CorruptError,
        "according to its header",
    ),
    "an impossible inflated size": (
        patched(
            patched(DEFLATED, 22, b"\0\0\x01"), DEFLATED.index(b"PK\x01\x02") + 24, b"\0\0\x01"
        ),
        CorruptError,
        "too few to inflate to 65536",
    ),
    "bzip2": (
        zipped([("a/data.pkl", b"N." * 99)], compression=zipfile.ZIP_BZIP2),
        UnsupportedError,
        "compressed",
    ),
    "encrypted": (patched(DATA, CENTRAL + 8, b"\x01"), UnsupportedError, "encrypted"),
    "several disks": (patched(DATA, END + 4, b"\x01"), UnsupportedError, "several disks"),
    "an entry on another disk": (
        patched(DATA, CENTRAL + 34, b"\x01"),
        UnsupportedError,
        "several disks",
    ),
    "more entries stated": (
        patched(DATA, END + 8, b"\x09\0\x09\0"),
        CorruptError,
        "9 directory entries|fewer",
    ),
    "fewer entries stated": (patched(DATA, END + 8, b"\x01\0\x01\0"), CorruptError, "bytes longer"),
    "a malformed entry": (patched(DATA, CENTRAL, b"XX"), CorruptError, "malformed"),
    "a name that is no text": (patched(DATA, CENTRAL + 46, b"\xff"), CorruptError, "differ|name"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_zip_that_contradicts_itself_is_refused(case: str) -> None:
    data, kind, message = CONTRADICTIONS[case]
    with pytest.raises(kind, match=message) as caught:
        archive_of(data)
    assert caught.value.file == "f"


def test_end_records_that_differ_are_refused() -> None:
    data = saved([torch.arange(5)])
    narrow = data.rindex(b"PK\x05\x06")
    for at, new in ((10, b"\x02\0"), (12, b"\x02\0\0\0"), (16, b"\x02\0\0\0")):
        with pytest.raises((CorruptError, UnsupportedError)):
            archive_of(patched(data, narrow + at, new))
    for at in range(narrow - 76 + 4, narrow - 76 + 12):
        with pytest.raises(CorruptError):
            archive_of(patched(data, at, b"\x7e"))


@pytest.mark.parametrize(
    "method",
    [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2],
    ids=["stored", "deflated", "bzip2"],
)
def test_torchscript_is_refused_by_name(method: int) -> None:
    data = zipped([("a/data.pkl", b"N." * 99), ("a/constants.pkl", b"N.")], compression=method)
    with pytest.raises(UnsupportedError, match="TorchScript"):
        check_kind(archive_of(data))


def test_a_zip_without_a_pickle_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="the zip has no data.pkl") as refusal:
        check_kind(archive_of(zipped([("a/b", b"N.")])))
    assert "unpack it" in str(refusal.value.hint)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"mixed", "the byte order is 'mixed'"),
        (b"", "the byte order is ''"),
        (b"big" * 100, "the record byteorder is 300 bytes long"),
    ],
)
def test_a_byte_order_that_is_none_is_refused(text: bytes, message: str) -> None:
    store = MemoryStore({"f": zipped([("a/data.pkl", b"N."), ("a/byteorder", text)])})
    with pytest.raises(CorruptError, match=message):
        is_big_endian(store, read_archive(store, "f"))


def test_records_that_are_deflated_are_told_apart() -> None:
    data = zipped([("a/data.pkl", b"N." * 99), ("a/data/0", b"")], compression=zipfile.ZIP_DEFLATED)
    archive = archive_of(data)
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        for info, record in zip(opened.infolist(), archive.records.values(), strict=True):
            assert (record.n_bytes, record.crc, record.packed_bytes) == (
                info.file_size,
                info.CRC,
                info.compress_size,
            )
            packed = data[record.span[0] : record.span[1]]
            assert zlib.decompress(packed, -15) == opened.read(info)


REAL = saved(
    {"a": torch.arange(9.0), "b": torch.empty(0), "c": [torch.ones(3, dtype=torch.bfloat16)]}
)


@settings(max_examples=rounds(400), deadline=None)
@given(
    st.sampled_from([REAL, DATA]),
    st.lists(
        st.tuples(st.integers(0, len(REAL)), st.binary(min_size=1, max_size=9)),
        min_size=1,
        max_size=3,
    ),
)
def test_a_damaged_zip_raises_only_our_errors(
    data: bytes, damages: list[tuple[int, bytes]]
) -> None:
    for at, new in damages:
        at %= len(data)
        data = patched(data, at, new)[: len(data)]
    try:
        archive = archive_of(data)
    except CheckpointingException:
        return
    for record in archive.records.values():
        assert 0 <= record.span[0] <= record.span[1] <= len(data)


@settings(max_examples=rounds(300), deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_raise_only_our_errors(data: bytes) -> None:
    for tail in (b"", DATA[CENTRAL:], REAL[-98:]):
        with contextlib.suppress(CheckpointingException):
            archive_of(data + tail)
