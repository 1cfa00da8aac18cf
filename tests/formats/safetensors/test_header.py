"""The header of a safetensors file: every rule broken once, and what is laid out against what
safetensors writes.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from core.arrays.dtypes import DTYPES
from core.engine.catalog.stored import PlannedArray
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    TruncatedError,
    UnsupportedError,
)
from core.files.store import MemoryStore
from core.formats.safetensors.header import (
    MAX_HEADER_BYTES,
    ORDER,
    Header,
    file_image,
    looks_like_header,
    read_header,
)
from core.formats.safetensors.json_text import MAX_ENTRY_BYTES, scanned
from tests.support.rounds import rounds

W = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
"""A tensor of 8 bytes."""


def file_of(header: str | bytes | Mapping[str, object], data: bytes | int = 8) -> bytes:
    text = (
        header
        if isinstance(header, bytes)
        else (header if isinstance(header, str) else json.dumps(header)).encode()
    )
    return struct.pack("<Q", len(text)) + text + (bytes(data) if isinstance(data, int) else data)


def parsed(header: str | bytes | Mapping[str, object], data: bytes | int = 8) -> Header:
    return read_header(MemoryStore({"f": file_of(header, data)}), "f")


def entry(
    dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8), **more: object
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def test_a_header_is_read_in_the_order_of_the_bytes() -> None:
    header = parsed(
        {
            "b": entry("U8", [3], [12, 15]),
            "empty": entry("F64", [0, 5], [12, 12]),
            "a": entry("F32", [], [8, 12]),
            "w": entry(),
            "__metadata__": {"format": "pt", 'ü"\\': "\n"},
        },
        15,
    )
    assert {name: (a.dtype, a.shape) for name, a in header.arrays.items()} == {
        "w": ("float32", (2,)),
        "a": ("float32", ()),
        "empty": ("float64", (0, 5)),
        "b": ("uint8", (3,)),
    }
    offsets = [a.extent.offset for a in header.arrays.values()]
    assert [offset - offsets[0] for offset in offsets] == [0, 8, 12, 12]
    assert header.metadata == {"format": "pt", 'ü"\\': "\n"} and header.n_bytes == 15


@pytest.mark.parametrize(
    "text", ["{}", "{} \n\t\r ", '{ "__metadata__" : { } }', '{"__metadata__":{}}      ']
)
def test_a_header_without_tensors_is_fine(text: str) -> None:
    assert parsed(text, 0).arrays == {}


def test_space_between_tokens_is_skipped() -> None:
    text = '{\n "w" : \t{ "dtype":"F32" , "shape" : [ 2 ],\r\n"data_offsets":[0, 8]} '
    text += ',"__metadata__":{ "a" : "b" ,"c":"" }}'
    header = parsed(text)
    assert list(header.arrays) == ["w"] and header.metadata == {"a": "b", "c": ""}


def test_names_are_unescaped() -> None:
    assert list(parsed('{"\\u00e9\\"\\\\\\n{}[],:": ' + W + "}").arrays) == ['é"\\\n{}[],:']
    assert list(parsed('{"é🦄": ' + W + "}").arrays) == ["é🦄"]


BROKEN: dict[
    str, tuple[str | bytes | Mapping[str, object], int, type[CheckpointingException], str]
] = {
    "no object": ("[]", 0, CorruptError, "an opening brace"),
    "leading space": (" {}", 0, CorruptError, "an opening brace"),
    "empty header": ("", 0, CorruptError, "an opening brace"),
    "cut in a name": ('{"w', 0, CorruptError, "a name and a colon"),
    "no colon": ('{"w" ' + W + "}", 8, CorruptError, "a name and a colon"),
    "a name that is no string": ("{1: 2}", 0, CorruptError, "a name and a colon"),
    "a newline in a name": ('{"a\nb": ' + W + "}", 8, CorruptError, "a name and a colon"),
    "cut in an entry": ('{"w":' + W[:-1], 8, CorruptError, "not a JSON object of at most"),
    "cut behind an entry": ('{"w":' + W, 8, CorruptError, "a comma or a closing brace"),
    "a comma too many": ('{"w":' + W + ",}", 8, CorruptError, "a name and a colon"),
    "text behind": ('{"w":' + W + "}x", 8, CorruptError, "1 extra bytes follow"),
    "two objects": ('{"w":' + W + "}{}", 8, CorruptError, "2 extra bytes follow"),
    "a name twice": (
        '{"w":' + W + ',"w":' + W + "}",
        8,
        CorruptError,
        "two entries with the same name",
    ),
    "metadata twice": (
        '{"__metadata__":{},"__metadata__":{}}',
        0,
        CorruptError,
        "two entries with the same name",
    ),
    "a metadata name twice": ('{"__metadata__":{"a":"b","a":"c"}}', 0, CorruptError, "'a' twice"),
    "a field twice": ('{"w":' + W[:-1] + ',"dtype":"F32"}}', 8, CorruptError, "a field twice"),
    "metadata no object": ('{"__metadata__":"pt"}', 0, CorruptError, "an opening brace"),
    "metadata null": ('{"__metadata__":null}', 0, CorruptError, "an opening brace"),
    "metadata of numbers": ('{"__metadata__":{"a":1}}', 0, CorruptError, "contain only strings"),
    "metadata of objects": ('{"__metadata__":{"a":{}}}', 0, CorruptError, "contain only strings"),
    "an entry that is a number": ('{"w":1}', 0, CorruptError, "not a JSON object of at most"),
    "an entry with an object": (
        '{"w":{"dtype":{}}}',
        0,
        CorruptError,
        "not a JSON object of at most",
    ),
    "an entry that is no JSON": ('{"w":{dtype}}', 0, CorruptError, "the entry is not valid JSON"),
    "an entry that is too long": (
        '{"w":{"shape":[' + "1," * MAX_ENTRY_BYTES + "1]}}",
        0,
        CorruptError,
        "not a JSON object of at most",
    ),
    "a deep entry": (
        '{"w":{"shape":' + "[" * 9000 + "]" * 7000 + "}}",
        0,
        CorruptError,
        "the entry is not valid JSON",
    ),
    "no dtype": (
        '{"w":{"shape":[2],"data_offsets":[0,8]}}',
        8,
        CorruptError,
        "the field 'dtype' is missing",
    ),
    "no shape": (
        '{"w":{"dtype":"F32","data_offsets":[0,8]}}',
        8,
        CorruptError,
        "the field 'shape' is missing",
    ),
    "no offsets": (
        '{"w":{"dtype":"F32","shape":[2]}}',
        8,
        CorruptError,
        "the field 'data_offsets' is missing",
    ),
    "a field that is unknown": (
        {"w": entry(strides=[1])},
        8,
        CorruptError,
        "the field 'strides' is unknown",
    ),
    "a dtype that is unknown": (
        {"w": entry("Q4_K")},
        8,
        UnsupportedError,
        "'Q4_K' is not supported",
    ),
    "a dtype that is a number": ({"w": entry(4)}, 8, UnsupportedError, "'4' is not supported"),
    "a dtype that is a list": ({"w": entry(["F32"])}, 8, UnsupportedError, "is not supported"),
    "six bits": ({"w": entry("F6_E2M3", [4], [0, 3])}, 3, UnsupportedError, "F6_E2M3"),
    "six bits, too": ({"w": entry("F6_E3M2", [4], [0, 3])}, 3, UnsupportedError, "F6_E3M2"),
    "an odd last axis of half bytes": (
        {"w": entry("F4", [2, 3], [0, 3])},
        3,
        UnsupportedError,
        "last axis must be even",
    ),
    "half a byte": ({"w": entry("F4", [], [0, 1])}, 1, UnsupportedError, "last axis must be even"),
    "half bytes of the wrong length": (
        {"w": entry("F4", [4], [0, 4])},
        4,
        CorruptError,
        "needs 2 bytes",
    ),
    "a shape that is no list": ({"w": entry(shape=2)}, 8, CorruptError, "shape is 2, not a list"),
    "a negative extent": ({"w": entry(shape=[-2])}, 8, CorruptError, "not a list of numbers"),
    "a fraction": ({"w": entry(shape=[2.0])}, 8, CorruptError, "not a list of numbers"),
    "true": ({"w": entry(shape=[True])}, 8, CorruptError, "not a list of numbers"),
    "infinity": (
        '{"w":' + W.replace("[2]", "[Infinity]") + "}",
        8,
        CorruptError,
        "not a list of numbers",
    ),
    "a huge extent": ({"w": entry(shape=[1 << 63])}, 8, CorruptError, "not a list of numbers"),
    "an extent of many digits": (
        '{"w":' + W.replace("2", "9" * 5000) + "}",
        8,
        CorruptError,
        "is not valid JSON",
    ),
    "extents whose product is huge": (
        {"w": entry(shape=[1 << 40, 1 << 40])},
        8,
        CorruptError,
        "needs 48357",
    ),
    "a shape that makes another length": (
        {"w": entry(shape=[3])},
        8,
        CorruptError,
        "needs 12 bytes",
    ),
    "one offset": ({"w": entry(offsets=[8])}, 8, CorruptError, "are not a valid byte range"),
    "three offsets": (
        {"w": entry(offsets=[0, 4, 8])},
        8,
        CorruptError,
        "are not a valid byte range",
    ),
    "offsets backwards": (
        {"w": entry(offsets=[8, 0])},
        8,
        CorruptError,
        "are not a valid byte range",
    ),
    "negative offsets": ({"w": entry(offsets=[-8, 0])}, 8, CorruptError, "not a list of numbers"),
    "a hole before the first": ({"w": entry(offsets=[4, 12])}, 12, CorruptError, "follows a gap"),
    "a hole": ({"w": entry(), "x": entry(offsets=[12, 20])}, 20, CorruptError, "follows a gap"),
    "an overlap": ({"w": entry(), "x": entry(offsets=[4, 12])}, 12, CorruptError, "overlaps"),
    "the same bytes twice": ({"w": entry(), "x": entry()}, 8, CorruptError, "overlaps"),
    "a truncated file": ({"w": entry()}, 7, TruncatedError, "the tensor ends at byte"),
    "no data": ({"w": entry()}, 0, TruncatedError, "the tensor ends at byte"),
    "trailing bytes": ({"w": entry()}, 9, CorruptError, "1 bytes after the last tensor"),
    "data without tensors": ("{}", 3, CorruptError, "3 bytes after the last tensor"),
    "half a surrogate pair": ('{"\\ud800":' + W + "}", 8, CorruptError, "an invalid string"),
    "no UTF-8": (b'{"\xff":' + W.encode() + b"}", 8, CorruptError, "an invalid string"),
    "no UTF-8 in an entry": (b'{"w":{"\xff":1}}', 0, CorruptError, "the entry is not valid JSON"),
    "an escape that is none": ('{"\\x":' + W + "}", 8, CorruptError, "an invalid string"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_header_is_refused_with_its_file(case: str) -> None:
    header, data, kind, message = BROKEN[case]
    with pytest.raises(CheckpointingException) as caught:
        parsed(header, data)
    assert type(caught.value) is kind and message in caught.value.message
    assert caught.value.file == "f"


@pytest.mark.parametrize(
    "case", [case for case, row in BROKEN.items() if isinstance(row[0], dict) and "w" in row[0]]
)
def test_an_error_about_a_tensor_names_it(case: str) -> None:
    header, data, _, _ = BROKEN[case]
    with pytest.raises(CheckpointingException) as caught:
        parsed(header, data)
    assert caught.value.key in ("w", "x") or "trailing" in case


@pytest.mark.parametrize("n_bytes", [0, 1, 7])
def test_a_file_without_a_length_is_truncated(n_bytes: int) -> None:
    with pytest.raises(TruncatedError, match="but its header length alone"):
        read_header(MemoryStore({"f": bytes(n_bytes)}), "f")


def test_a_header_that_is_longer_than_the_file_is_truncated() -> None:
    with pytest.raises(TruncatedError, match="its header ends at byte 108"):
        read_header(MemoryStore({"f": struct.pack("<Q", 100) + b"{}"}), "f")


@pytest.mark.parametrize("n", [MAX_HEADER_BYTES + 1, 1 << 63, (1 << 64) - 1])
def test_a_length_beyond_the_limit_is_refused_before_anything_is_read(n: int) -> None:
    with pytest.raises(CorruptError, match=f"the header is {n:,} bytes long"):
        read_header(MemoryStore({"f": struct.pack("<Q", n) + b"{}"}), "f")


def test_a_git_lfs_pointer_is_called_one() -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    with pytest.raises(CorruptError, match="Git LFS pointer") as caught:
        read_header(MemoryStore({"f": pointer}), "f")
    assert caught.value.hint is not None and "git lfs pull" in caught.value.hint


def test_a_missing_file_is_named() -> None:
    with pytest.raises(MissingShardError) as caught:
        read_header(MemoryStore(), "f")
    assert caught.value.file == "f"


def test_half_bytes_are_pairs_in_the_catalog() -> None:
    array = parsed({"w": entry("F4", [3, 4], [0, 6])}, 6).arrays["w"]
    assert (array.dtype, array.shape, array.n_bytes) == ("float4_e2m1fn_x2", (3, 2), 6)


def test_files_are_told_by_their_first_bytes() -> None:
    good = file_of({"w": entry()})
    other_files = (
        b"",
        b"PK\x03\x04" + bytes(20),
        good[:9],
        struct.pack("<Q", 2) + b"[]",
        good[:8] + b" " + good[9:],
    )
    assert looks_like_header(MemoryStore({"f": good}), "f")
    assert not any(looks_like_header(MemoryStore({"f": data}), "f") for data in other_files)


HOSTILE = {
    "brackets": '{"w":' + "[" * 2_000_000,
    "lists": '{"w":{"shape":[' + "[]," * 700_000,
    "braces": "{" * 2_000_000,
    "escapes": '{"' + "\\n" * 1_000_000,
    "a long metadata text": '{"__metadata__":{"a":"' + "\\n" * 1_000_000 + '"}}',
    "digits": '{"w":{"shape":[' + "9" * 2_000_000 + "]}}",
    "spaces": "{" + " " * 2_000_000,
    "quotes": '"' * 2_000_000,
    "names": '{"__metadata__":{' + ",".join(f'"{n}":""' for n in range(10_000)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_ends_the_scan_without_large_allocations(case: str) -> None:
    import tracemalloc

    store = MemoryStore({"f": file_of(HOSTILE[case], 0)})
    tracemalloc.start()
    try:
        if case == "a long metadata text":
            assert len(read_header(store, "f").metadata["a"]) == 1_000_000
        else:
            with pytest.raises(CorruptError):
                read_header(store, "f")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * len(HOSTILE[case])


@given(st.binary(max_size=200))
@settings(max_examples=rounds(300), deadline=None)
def test_random_bytes_never_crash_the_reader(data: bytes) -> None:
    for content in (data, file_of(data), file_of(b"{" + data), file_of(b'{"w":' + data + b"}")):
        with contextlib.suppress(CheckpointingException):
            read_header(MemoryStore({"f": content}), "f")


@given(st.data())
@settings(max_examples=rounds(300), deadline=None)
def test_a_header_with_changed_bytes_is_read_as_safetensors_reads_it_or_refused(
    data: st.DataObject,
) -> None:
    altered = bytearray(
        save({"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.arange(5, dtype=torch.uint8)})
    )
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(altered) - 1))
        altered[at] = data.draw(st.sampled_from([*b'{}[]",:0123456789 \\azF', 0, 255]))
    try:
        header = read_header(MemoryStore({"f": bytes(altered)}), "f")
    except CheckpointingException:
        return
    real = dict(safetensors.deserialize(bytes(altered)))
    assert real.keys() == header.arrays.keys()
    for name, array in header.arrays.items():
        assert (
            tuple(real[name]["shape"]) == array.shape
            and real[name]["dtype"] == DTYPES[array.dtype].safetensors
        )
        assert bytes(real[name]["data"]) == bytes(
            altered[array.extent.offset : array.extent.offset + array.n_bytes]
        )


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda s: s != "__metadata__"
)


@given(
    st.dictionaries(
        names, st.tuples(st.sampled_from(ORDER), st.lists(st.integers(0, 3), max_size=3))
    ),
    names,
    names,
)
@settings(max_examples=rounds(200), deadline=None)
def test_a_laid_out_file_equals_the_one_that_safetensors_writes(
    tensors: dict[str, tuple[str, list[int]]], name: str, text: str
) -> None:
    by_name = {dtype.safetensors: dtype for dtype in DTYPES.values()}
    arrays: dict[str, PlannedArray] = {}
    real: dict[str, object] = {}
    for number, (key, (spelling, shape)) in enumerate(tensors.items()):
        if spelling == "F4" and not shape:
            shape = [2]
        dtype = by_name[spelling]
        arrays[key] = PlannedArray(key, dtype.name, tuple(shape))
        n_bytes = math.prod(shape) * dtype.itemsize
        flat = torch.arange(number, number + n_bytes, dtype=torch.uint8)
        kind = getattr(torch, dtype.name)
        values = (
            torch.empty(shape, dtype=kind)
            if n_bytes == 0
            else (flat % 2).bool()
            if kind is torch.bool
            else flat
        )
        real[key] = values if n_bytes == 0 else values.view(kind).reshape(shape)
    image = file_image("f", arrays, {name: text})
    wanted = save(real, {name: text})  # type: ignore[arg-type]
    ((offset, head),) = image.literals(lambda key: 0)
    assert offset == 0 and wanted.startswith(head) and len(wanted) == image.size
    store = MemoryStore({"f": wanted})
    header = read_header(store, "f")
    assert [(a.name, p.offset) for p in image.arrays for a in [p.array]] == [
        (a.name, a.extent.offset) for a in header.arrays.values()
    ]
    assert {a.name: (a.dtype, a.shape) for a in header.arrays.values()} == {
        a.name: (a.dtype, a.shape) for a in arrays.values()
    }
    assert header.metadata == {name: text}


def test_every_dtype_of_the_table_has_a_place_in_the_order() -> None:
    assert sorted(ORDER) == sorted(
        dtype.safetensors for dtype in DTYPES.values() if dtype.safetensors is not None
    )


@pytest.mark.parametrize(
    ("key", "dtype", "shape"),
    [
        ("__metadata__", "float32", (2,)),
        ("w", "float4_e2m1fn_x2", ()),
        ("a\ud800", "float32", (2,)),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(
    key: str, dtype: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        file_image("f", {key: PlannedArray(key, dtype, shape)}, {})
    assert caught.value.key == key and caught.value.hint


def test_a_header_of_twenty_thousand_tensors_is_read_and_laid_out() -> None:
    arrays = {
        f"model.layers.{n // 9}.e{n}": PlannedArray(
            f"model.layers.{n // 9}.e{n}", "bfloat16", (1, 2)
        )
        for n in range(20_000)
    }
    image = file_image("f", arrays, {"format": "pt"})
    store = MemoryStore()
    store.create("f", image.size)
    for offset, data in image.literals(lambda key: 0):
        store.write("f", offset, data)
    assert len(read_header(store, "f").arrays) == 20_000


def test_a_scan_of_flat_objects_says_where_the_text_came_from() -> None:
    with pytest.raises(CorruptError, match="the INFO is not valid JSON") as caught:
        list(scanned(b"[]", file="x", what="INFO"))
    assert caught.value.file == "x"


def test_a_golden_file_has_the_header_that_safetensors_sees(golden: Path) -> None:
    paths = sorted(golden.glob("**/*.safetensors"))
    assert len(paths) > 20
    for path in paths:
        header = read_header(MemoryStore({"f": path.read_bytes()}), "f")
        with safetensors.safe_open(path, "pt") as real:
            assert set(real.keys()) == set(header.arrays)
            assert (real.metadata() or {}) == header.metadata
            for name, array in header.arrays.items():
                assert real.get_slice(name).get_shape() == list(array.shape)
