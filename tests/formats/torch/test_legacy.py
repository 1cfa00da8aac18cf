"""Streams of torch before 1.6 are read like zips: those that torch still writes, and older ones
made by hand.
"""

from __future__ import annotations

import argparse
import collections
import io
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import RankFacts
from core.engine.catalog.stored import Extent, StoredArray
from core.errors import CheckpointingException, CorruptError, TruncatedError, UnsupportedError
from core.files.store import LocalStore, MemoryStore
from core.formats.megatron import format as megatron
from core.formats.torch import legacy as torch_legacy
from core.formats.torch.format import FORMAT, load_object, parse
from core.formats.torch.legacy import pickle_end
from core.megatron.model.topology import Topology
from core.pickle.inert import Global, Inert, Persistent
from core.pickle.plain import to_plain
from core.pickle.writer import dumps
from tests.formats.torch.torch_samples import (
    DTYPES,
    MAGIC,
    SYSTEM,
    a_tensor,
    as_legacy,
    assert_same,
    attempt,
    entry_bytes,
    facts_of,
    filled,
    kinds_of,
    legacy_stream,
    loads,
    opened,
    saved,
    saved_legacy,
    written,
)
from tests.support.facets import facet_of
from tests.support.rounds import rounds

FLOATS = Global("torch", "FloatStorage")


def without(tree: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: item for name, item in tree.items() if name not in names}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_tensor_is_read_as_from_a_zip(dtype: torch.dtype, tmp_path: Path) -> None:
    value = kinds_of(dtype)
    catalog, store = opened(saved_legacy(value))
    from_zip, zip_store = opened(saved(value))
    assert catalog.tensors == from_zip.tensors
    assert catalog.skeleton == from_zip.skeleton
    assert facts_of(catalog) == facts_of(from_zip)
    for key in catalog.tensors:
        assert entry_bytes(catalog, store, key) == entry_bytes(from_zip, zip_store, key), key
    for loaded in loads(written(catalog, store), tmp_path / "new.pt"):
        assert_same(loaded, value)


def test_everything_but_tensors_is_read_as_from_a_zip() -> None:
    value = {
        "parameter": torch.nn.Parameter(filled(torch.float32, 3)),
        "model": torch.nn.Linear(3, 2).state_dict(),
        "args": argparse.Namespace(lr=0.5, hidden=filled(torch.int8, 3)),
        "list": [1, (2.5, None), "text", b"bytes", {1: filled(torch.int16, 2)}],
        "moments": collections.OrderedDict([(0, {"exp_avg": filled(torch.float32, 3)})]),
        "iteration": 7,
    }
    catalog, _ = opened(saved_legacy(value))
    from_zip, _ = opened(saved(value))
    assert to_plain(catalog.skeleton) == to_plain(from_zip.skeleton)
    assert list(catalog.objects) == list(from_zip.objects)
    assert (catalog.tensors, catalog.hidden) == (from_zip.tensors, from_zip.hidden)
    assert facts_of(catalog) == facts_of(from_zip)
    assert (catalog.version, from_zip.version) == ("legacy 1001", "3")


@pytest.mark.parametrize("name", ["model", "nested"])
def test_golden_streams_equal_their_zip_twins(golden: Path, name: str) -> None:
    folder = golden / "hf/llama/torch_single"
    store = LocalStore(folder)
    stores = [LocalStore(folder, entry=f"{name}_{kind}.pt") for kind in ("legacy", "zip")]
    legacy, twin = [FORMAT.read(store) for store in stores]
    assert legacy.tensors == twin.tensors
    assert legacy.hidden == twin.hidden
    assert to_plain(legacy.skeleton) == to_plain(twin.skeleton)
    assert {key: to_plain(item.value) for key, item in legacy.objects.items()} == {
        key: to_plain(item.value) for key, item in twin.objects.items()
    }
    assert legacy.ties == twin.ties
    for key in (*twin.tensors, *twin.hidden):
        assert entry_bytes(legacy, store, key) == entry_bytes(twin, store, key), key
    assert written(legacy, stores[0]) == written(twin, stores[1])


def test_tensors_that_share_a_storage_share_it_again() -> None:
    weight = filled(torch.float32, 40, 30)
    catalog, store = opened(saved_legacy({"embedding": weight, "head": weight, "view": weight.t()}))
    assert catalog.ties == {"head": "embedding"}
    loaded = torch.load(io.BytesIO(written(catalog, store)))
    assert loaded["head"].data_ptr() == loaded["embedding"].data_ptr()


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_every_pickle_protocol_is_read(protocol: int) -> None:
    value = kinds_of(torch.bfloat16)
    catalog, store = opened(saved_legacy(value, pickle_protocol=protocol))
    assert_same(torch.load(io.BytesIO(written(catalog, store))), value)


@pytest.mark.parametrize("value", [None, 5, "text", [1, 2], {}, ()])
def test_a_stream_without_tensors_is_read(value: object) -> None:
    catalog, store = opened(saved_legacy(value))
    assert not catalog.tensors
    assert_same(torch.load(io.BytesIO(written(catalog, store))), value)


class Net(torch.nn.Module):
    """A module that is saved whole, which old programs liked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)


def test_a_whole_module_is_its_state_dict_as_from_a_zip() -> None:
    net = Net()
    catalog, store = opened(saved_legacy({"net": net, "again": Net}))
    from_zip, zip_store = opened(saved({"net": net, "again": Net}))
    assert b"class Net" in saved_legacy(net), "torch writes the source text"
    assert to_plain(catalog.skeleton) == to_plain(from_zip.skeleton)
    assert str(catalog.objects["again"].value).endswith("test_legacy.Net")
    assert list(catalog.tensors) == [f"net.{key}" for key in net.state_dict()]
    for key in catalog.tensors:
        assert entry_bytes(catalog, store, key) == entry_bytes(from_zip, zip_store, key)


UNSUPPORTED = {
    "quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8),
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "view with the conj bit": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "meta tensor without data": lambda: torch.empty(3, device="meta"),
    "bare storage": lambda: filled(torch.int8, 4).untyped_storage(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_tensor_that_is_not_handled_is_shown_and_not_copied(kind: str) -> None:
    value = {"odd": UNSUPPORTED[kind](), "fine": filled(torch.int16, 3)}
    catalog, store = opened(saved_legacy(value))
    assert catalog.refused == {"odd": kind}
    assert entry_bytes(catalog, store, "fine") == entry_bytes(*opened(saved(value)), "fine")
    with pytest.raises(UnsupportedError, match=kind):
        written(catalog, store)


def storage(
    key: object = "1", n: object = 16, view: object = None, kind: object = FLOATS
) -> tuple[object, ...]:
    return ("storage", kind, key, "cpu", n, view)


def a_view(view: object, shape: tuple[int, ...], *, n: int = 16, offset: int = 0) -> Inert:
    strides = (1,) if len(shape) == 1 else (shape[1], 1)
    return a_tensor(shape, strides, offset, pid=storage("1", n, view))


CONTENT = bytes(range(64))


def test_a_stream_of_our_own_is_what_torch_loads() -> None:
    tree = {"t": a_view(None, (2, 3), offset=4)}
    data = legacy_stream(tree, {"1": (16, CONTENT)})
    catalog, store = opened(data)
    assert entry_bytes(catalog, store, "t") == CONTENT[16:40]
    assert_same(torch.load(io.BytesIO(data)), torch.load(io.BytesIO(written(catalog, store))))


def test_views_of_storages_as_old_torch_saved_them_are_read() -> None:
    tree = {
        "part": a_view(("2", 4, 8), (2, 3), offset=1),
        "other part": a_view(("3", 12, 4), (4,)),
        "same part": a_view(("2", 4, 8), (8,)),
        "whole": a_view(None, (16,)),
        "all of it": a_view(("4", 0, 16), (16,)),
        "nothing": a_view(("5", 16, 0), (0,)),
    }
    data = legacy_stream(tree, {"1": (16, CONTENT)})
    catalog, store = opened(data)
    wanted = {
        "part": CONTENT[20:44], "other part": CONTENT[48:], "same part": CONTENT[16:48],
        "whole": CONTENT, "all of it": CONTENT, "nothing": b"",
    }  # fmt: skip
    assert {key: entry_bytes(catalog, store, key) for key in catalog.tensors} == wanted
    assert catalog.ties == {"all of it": "whole"}
    assert_same(
        torch.load(io.BytesIO(written(catalog, store))),
        torch.load(io.BytesIO(data), weights_only=False),
    )


def test_what_python_2_saved_is_read() -> None:
    def text(value: str) -> bytes:
        return b"U" + bytes([len(value)]) + value.encode()

    pid = (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("1") + text("cpu") + b"K\x10NtQ"
    )  # fmt: skip
    tensor = b"ctorch._utils\n_rebuild_tensor\n(" + pid + b"K\x04K\x02K\x03\x86K\x03K\x01\x86tR"
    pickled = b"\x80\x02}" + text("w") + tensor + b"s."
    keys = b"\x80\x02](" + text("1") + b"e."
    head = b"".join(map(dumps, (MAGIC, 1001, SYSTEM)))
    catalog, store = opened(head + pickled + keys + (16).to_bytes(8, "little") + CONTENT)
    assert entry_bytes(catalog, store, "w") == CONTENT[16:40]


BIG_SYSTEM = {**SYSTEM, "little_endian": False}


def test_numbers_of_a_big_endian_machine_are_little_endian_in_the_stream() -> None:
    tree = {"t": a_view(None, (16,))}
    new = legacy_stream(tree, {"1": (16, CONTENT)}, system=BIG_SYSTEM)
    catalog, store = opened(new)
    assert entry_bytes(catalog, store, "t") == CONTENT
    assert_same(torch.load(io.BytesIO(new)), torch.load(io.BytesIO(written(*opened(new)))))


@pytest.mark.parametrize("system", [SYSTEM, BIG_SYSTEM], ids=["little", "big"])
def test_a_count_in_the_other_byte_order_is_refused_as_torch_refuses_it(system: object) -> None:
    """16 elements, stated by a big-endian machine, read 2^60."""
    data = legacy_stream({"t": a_view(None, (16,))}, {"1": (1 << 60, CONTENT)}, system=system)
    with pytest.raises(RuntimeError):
        torch.load(io.BytesIO(data))
    with pytest.raises(
        CorruptError,
        match=f"has {1 << 60} elements according to its header, but 16 according to the pickle",
    ):
        opened(data)


STORED = {"1": (16, CONTENT)}
FINE = {"t": a_view(None, (2, 3))}
BROKEN: dict[str, tuple[bytes, type[Exception], str]] = {
    "another version": (
        legacy_stream(FINE, STORED, version=1002),
        UnsupportedError,
        "version 1002",
    ),
    "no version": (legacy_stream(FINE, STORED, version=["x"]), UnsupportedError, "version"),
    "listed, not used": (
        legacy_stream(FINE, {**STORED, "2": (1, b"1234")}),
        CorruptError,
        "but nothing refers to it",
    ),
    "used, not listed": (
        legacy_stream(FINE, {}),
        CorruptError,
        "refers to storage '1', which the file does not list",
    ),
    "listed twice": (
        legacy_stream(FINE, STORED, keys=["1", "1"]) + bytes(72),
        CorruptError,
        "lists storage '1' twice",
    ),
    "keys that are no list": (
        legacy_stream(FINE, STORED, keys={"1": 2}),
        CorruptError,
        "list of storage keys",
    ),
    "keys that are no text": (
        legacy_stream(FINE, STORED, keys=[1]),
        CorruptError,
        "list of storage keys",
    ),
    "fewer elements": (
        legacy_stream(FINE, {"1": (15, CONTENT)}),
        CorruptError,
        "elements according to its header, but",
    ),
    "less than nothing": (legacy_stream(FINE, {"1": (-1, CONTENT)}), CorruptError, "-1 elements"),
    "two lengths": (
        legacy_stream({"t": a_view(None, (3,)), "u": a_view(None, (3,), n=15)}, STORED),
        CorruptError,
        "is 64 bytes in one place of the pickle and 60 bytes in another",
    ),
    "a short storage": (
        legacy_stream(FINE, {"1": (16, CONTENT[:-1])}),
        TruncatedError,
        "the file contains only 63 of its bytes",
    ),
    "no storage": (legacy_stream(FINE, STORED)[:-72], TruncatedError, "ends before storage '1'"),
    "half a length": (legacy_stream(FINE, STORED)[:-68], TruncatedError, "ends before storage '1'"),
    "something behind": (
        legacy_stream(FINE, STORED) + b"x",
        CorruptError,
        "1 unexpected bytes after the last storage",
    ),
    "two objects": (legacy_stream(FINE, STORED) * 2, UnsupportedError, "several objects"),
    "a huge storage": (
        legacy_stream({"t": a_view(None, (3,), n=1 << 62)}, {"1": (1 << 62, CONTENT)}),
        TruncatedError,
        "the file contains only 64",
    ),
    "an unknown storage": (
        legacy_stream({"t": a_tensor(pid=storage(kind=Global("torch", "OddStorage")))}, STORED),
        UnsupportedError,
        "the storage type torch.OddStorage is not supported",
    ),
    "five fields": (
        legacy_stream({"t": a_tensor()}, STORED),
        CorruptError,
        "malformed persistent ID",
    ),
    "an odd id": (
        legacy_stream({"t": a_tensor(pid=("module", "x", None, None))}, STORED),
        CorruptError,
        "persistent",
    ),
    "an id of no tuple": (
        legacy_stream({"t": a_tensor(pid=5)}, STORED),
        CorruptError,
        "malformed persistent ID: 5",
    ),
    "a key that is no text": (
        legacy_stream({"t": a_tensor(pid=storage(1))}, STORED),
        CorruptError,
        "malformed storage",
    ),
    "a negative length": (
        legacy_stream({"t": a_tensor(pid=storage(n=-1))}, STORED),
        CorruptError,
        "malformed storage",
    ),
    "a view outside": (
        legacy_stream({"t": a_view(("2", 12, 5), (2,))}, STORED),
        CorruptError,
        "64 bytes",
    ),
    "a negative view": (
        legacy_stream({"t": a_view(("2", -1, 5), (2,))}, STORED),
        CorruptError,
        "64 bytes",
    ),
    "a view of two places": (
        legacy_stream({"t": a_view(("2", 1, 5), (2,)), "u": a_view(("2", 2, 5), (2,))}, STORED),
        CorruptError,
        "'2' has two contradictory definitions",
    ),
    "a view of a storage's name": (
        legacy_stream({"t": a_view(("1", 1, 5), (2,))}, STORED),
        CorruptError,
        "both a storage and a part",
    ),
    "a malformed view": (
        legacy_stream({"t": a_view((1, 2), (2,))}, STORED),
        CorruptError,
        "malformed view",
    ),
    "a tensor outside its view": (
        legacy_stream({"t": a_view(("2", 4, 5), (2, 3))}, STORED),
        CorruptError,
        "needs 24 bytes, but its storage is only 20",
    ),
    "complex, big-endian": (
        legacy_stream(
            {"t": a_tensor(pid=storage(n=8, kind=Global("torch", "ComplexFloatStorage")))},
            {"1": (8, CONTENT)},
            system=BIG_SYSTEM,
        ),
        UnsupportedError,
        "complex",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_stream_that_contradicts_itself_is_refused(case: str) -> None:
    data, kind, message = BROKEN[case]
    with pytest.raises(kind, match=message) as caught:
        opened(data)
    assert type(caught.value) is kind
    assert caught.value.file == "f.pt"  # type: ignore[attr-defined]


REAL = saved_legacy(
    {
        "a": filled(torch.float32, 4, 3),
        "n": argparse.Namespace(lr=1.0),
        "l": [filled(torch.bfloat16, 5), (1,)],
    }
)


def test_a_stream_cut_at_any_byte_is_called_truncated() -> None:
    for n in range(15, len(REAL)):
        with pytest.raises(TruncatedError):
            opened(REAL[:n])


def test_a_stream_inside_a_bigger_file_is_read_in_place() -> None:
    store = MemoryStore({"f": b"x" * 37 + REAL + b"y" * 50})
    tree = parse(store, "f", start=37, n_bytes=len(REAL), prefix="p:")
    alone = parse(MemoryStore({"f": REAL}), "f", prefix="p:")
    assert list(tree.arrays) == list(alone.arrays) == ["p:a", "p:l.0"]
    for key, array in tree.arrays.items():
        assert array.extent.offset == alone.arrays[key].extent.offset + 37
    with pytest.raises(TruncatedError):
        parse(store, "f", start=37, n_bytes=len(REAL) - 1)


def test_an_object_is_loaded_from_its_stream() -> None:
    data = saved_legacy(
        {"cpu": filled(torch.uint8, 20), "args": argparse.Namespace(x=filled(torch.int8, 3))}
    )
    store = MemoryStore({"o": b"z" * 11 + data})
    loaded, arrays = load_object(
        store, StoredArray("raw:k", "uint8", (len(data),), Extent("o", 11)), key="rng"
    )
    assert sorted(array.shape for array in arrays.values()) == [(3,), (20,)]
    assert isinstance(loaded, dict)
    array = arrays[loaded["cpu"].key]
    assert store.read("o", array.extent.offset, 20) == filled(torch.uint8, 20).numpy().tobytes()


def test_pickles_longer_than_what_is_read_at_once_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = {
        "t" * 900: filled(torch.int8, 3),
        **{f"n{n}": "x" * n for n in range(0, 700, 13)},
        "net": Net(),
    }
    for protocol in (1, 2, 4):
        data = saved_legacy(value, pickle_protocol=protocol)
        for n in (8, 9, 37, 128 << 10):
            monkeypatch.setattr(torch_legacy, "_WINDOW_BYTES", n)
            names = ["t" * 900, "net.layer.weight", "net.layer.bias"]
            assert list(opened(data)[0].tensors) == names


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_the_end_of_a_pickle_is_found_without_making_it(protocol: int) -> None:
    import pickle

    value = [
        1,
        1 << 70,
        -5,
        2.5,
        "text\n",
        b"bytes." * 60,
        "." * 300,
        {"a": (None, True)},
        Exception,
        complex(1, 2),
    ]
    value += [pickle.PickleBuffer, {1, 2}, 70000, 1 << 2100, bytearray(b"ab.")]
    data = pickle.dumps(value, protocol=protocol)
    for before, behind in ((b"", b""), (b"..", b"..")):
        store = MemoryStore({"p": before + data + behind})
        assert pickle_end(store, "p", len(before), store.size("p")) == len(before) + len(data)


def test_a_pickle_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (
        b"",
        b"\x80",
        b"N" * 300,
        b"X\xff\xff\xff\xffabc",
        b"\x8d" + b"\xff" * 8,
        b"cmodule\n",
        b"\x95",
    ):
        with pytest.raises(TruncatedError, match="ends inside a pickle"):
            pickle_end(MemoryStore({"p": data}), "p", 0, len(data))
    with pytest.raises(CorruptError, match="opcode 0xff"):
        pickle_end(MemoryStore({"p": b"N\xff."}), "p", 0, 3)
    monkeypatch.setattr(torch_legacy, "MAX_PICKLE_BYTES", 100)
    with pytest.raises(CheckpointingException, match="a pickle is longer than"):
        pickle_end(MemoryStore({"p": b"N" * 300}), "p", 0, 300)


def legacy_copy(source: Path, folder: Path) -> Path:
    """A Megatron root whose rank files are streams."""
    shutil.copytree(source, folder)
    for path in folder.rglob("*.pt"):
        path.write_bytes(as_legacy(path.read_bytes()))
    return folder


@pytest.mark.parametrize("case", ["tp2_pp1_optim", "tp2_pp1_dp2_distopt", "tp1_pp2_vpp2"])
def test_rank_files_that_are_streams_are_read_like_zips(
    golden: Path, case: str, tmp_path: Path
) -> None:
    root = golden / "mcore_legacy/dense_gqa" / case
    stores = [
        LocalStore(folder / "iter_0000010") for folder in (root, legacy_copy(root, tmp_path / case))
    ]  # fmt: skip
    catalogs: list[Catalog] = [megatron.FORMAT.read(store) for store in stores]
    zips, streams = catalogs
    assert streams.tensors == zips.tensors
    assert streams.hidden == zips.hidden
    assert list(streams.objects) == list(zips.objects)
    for name in ("version", "iteration", "ties", "optimizer"):
        assert getattr(streams, name) == getattr(zips, name)
    assert streams.facet(Topology) == zips.facet(Topology) is not None
    assert facet_of(streams, RankFacts).optimizer_kind == facet_of(zips, RankFacts).optimizer_kind
    assert to_plain(streams.args) == to_plain(zips.args)
    for key in (*zips.tensors, *zips.hidden):
        assert entry_bytes(streams, stores[1], key) == entry_bytes(zips, stores[0], key), key


@settings(max_examples=rounds(500), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(REAL) - 1), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_a_damaged_stream_raises_only_our_errors(damages: list[tuple[int, int]]) -> None:
    data = bytearray(REAL)
    for at, byte in damages:
        data[at] = byte
    attempt(bytes(data))


OLD = legacy_stream(
    {
        "part": a_view(("2", 4, 8), (2, 3), offset=1),
        "net": Persistent(("module", Global("a", "B"), "f", "src")),
    },
    STORED,
)


@settings(max_examples=rounds(500), deadline=None)
@given(st.sampled_from([OLD, REAL]), st.integers(0, 2**32))
def test_a_stream_with_missing_and_doubled_bytes_raises_only_our_errors(
    data: bytes, seed: int
) -> None:
    rng = random.Random(seed)
    damaged = bytearray(data)
    for _ in range(1 + seed % 3):
        at, n = rng.randrange(15, len(damaged)), rng.randrange(1, 20)
        if rng.random() < 0.5:
            del damaged[at : at + n]
        else:
            damaged[at:at] = damaged[at : at + n]
    attempt(bytes(damaged))
