"""The tree of a torch file: hostile and damaged ones, and the streams of objects."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import random
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from core.engine.catalog.stored import Extent, StoredArray
from core.errors import CorruptError, TruncatedError, UnsafeError, UnsupportedError
from core.files.store import MemoryStore
from core.formats.torch.format import FORMAT, load_object
from core.pickle.inert import Inert
from tests.formats.torch.torch_samples import (
    a_tensor,
    attempt,
    bits,
    entry_bytes,
    filled,
    opened,
    repickled,
    saved,
    saved_legacy,
)
from tests.support.rounds import rounds


def test_the_hand_made_tensor_is_fine() -> None:
    catalog, store = opened(repickled({"t": a_tensor()}, data=bytes(range(64))))
    assert entry_bytes(catalog, store, "t") == bytes(range(24))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (a_tensor((17,), (1,)), "needs 68 bytes, but its storage is only 64 bytes long"),
        (a_tensor((2, 3), (14, 1)), "needs 68 bytes"),
        (a_tensor((2, 3), (3, 1), 11), "needs 68 bytes"),
        (a_tensor((1 << 62, 2), (1 << 62, 1)), "bytes, but its storage is only"),
        (a_tensor((-1,), (1,)), "size or stride: -1"),
        (a_tensor((3,), (-1,), 8), "size or stride: -1"),
        (a_tensor((3,), (1,), -1), "-1"),
        (a_tensor((3.0,), (1,)), "3.0"),
        (a_tensor((True,), (1,)), "True"),
        (a_tensor((1 << 70,), (0,)), "offset, size"),
        (a_tensor((1, 2), (1,)), "shape"),
        (a_tensor(7, (1,)), "shape"),
        (a_tensor((1,) * 65, (1,) * 65), "65 axes"),
        (a_tensor(numel=17), "64"),
        (a_tensor(numel=-1), "malformed storage"),
        (a_tensor(numel="16"), "malformed storage"),
        (a_tensor(key="7"), "the tensor's record 'data/7' is missing"),
        (a_tensor(key=7), "malformed storage"),
        (a_tensor(pid=("module", 1, 2, 3, 4)), "malformed storage"),
        (a_tensor(pid=5), "malformed storage"),
        (Inert("reduce", a_tensor().fn, (1,)), "malformed"),
        (Inert("reduce", a_tensor().fn, (1, 2, 3, 4, 5, 6)), "no storage"),
        (Inert("reduce", a_tensor().fn, (None,) * 99), "malformed"),
    ],
)
def test_a_tensor_outside_its_storage_is_refused(tensor: Inert, message: str) -> None:
    with pytest.raises(CorruptError, match=message) as caught:
        opened(repickled({"t": tensor}))
    assert caught.value.file == "f.pt"


def test_containers_that_unfold_without_end_are_refused() -> None:
    laughs: object = [1]
    for _ in range(60):
        laughs = [laughs, laughs]
    maps: object = {"t": a_tensor()}
    for _ in range(60):
        maps = {"a": maps, "b": maps}
    deep: object = 1
    for _ in range(400):
        deep = {"a": deep}
    for tree in (laughs, maps, deep):
        with pytest.raises((UnsafeError, CorruptError)):
            opened(repickled({"tree": tree, "t": a_tensor()}))


def test_a_pickle_that_asks_for_code_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "ran"), "w"))

    catalog, _ = opened(saved({"t": filled(torch.int8, 3), "evil": Evil()}))
    assert catalog.objects["evil"].value.class_name == "io.open"
    assert not (tmp_path / "ran").exists()


def test_objects_are_loaded_from_their_streams() -> None:
    state = {
        "cpu": filled(torch.uint8, 20),
        "list": [1, (2, argparse.Namespace(x=filled(torch.int8, 3)))],
    }
    for value in (state, [state], 5, None, "text", collections.OrderedDict(a=1)):
        data = saved(value)
        store = MemoryStore({"o": b"z" * 11 + data})
        stream = StoredArray("raw:k", "uint8", (len(data),), Extent("o", 11))
        loaded, arrays = load_object(store, stream, key="rng/shard_0_1")
        assert all(key.startswith("rng/shard_0_1:") for key in arrays)
        if value in (5, None, "text"):
            assert loaded == value
        if value is state:
            assert sorted(array.shape[0] for array in arrays.values()) == [3, 20]
            assert isinstance(loaded, dict)
            leaf = loaded["cpu"]
            assert store.read("o", arrays[leaf.key].extent.offset, 20) == bits(state["cpu"])  # type: ignore[union-attr]


def test_a_bare_pickle_is_loaded_as_an_object() -> None:
    data = pickle.dumps({"a": (1, 2)}, protocol=4)
    stream = StoredArray("r", "uint8", (len(data),), Extent("o", 0))
    loaded, arrays = load_object(MemoryStore({"o": data}), stream, key="k")
    assert loaded == {"a": (1, 2)}
    assert arrays == {}


def test_a_damaged_object_stream_names_the_object() -> None:
    data = saved({"a": 1})
    legacy = saved_legacy({"a": 1})
    for broken in (data[:-30], b"hello", b"", legacy[:-3], legacy + b"x", data[:40] + data[44:]):
        store = MemoryStore({"o": b"z" * 5 + broken})
        with pytest.raises((CorruptError, UnsupportedError)) as caught:
            load_object(store, StoredArray("r", "uint8", (len(broken),), Extent("o", 5)), key="rng")
        assert caught.value.key == "rng"
        assert caught.value.file == "o"


REAL = saved(
    {
        "a": filled(torch.float32, 4, 3),
        "n": argparse.Namespace(lr=1.0),
        "l": [filled(torch.bfloat16, 5), (1,)],
    }
)


def test_a_file_cut_at_any_byte_is_an_error_of_ours() -> None:
    for n in range(0, len(REAL), 3):
        store = MemoryStore({"f.pt": REAL[:n]}, entry="f.pt")
        if FORMAT.sniff(store):
            with pytest.raises(TruncatedError):
                FORMAT.read(store)


@settings(max_examples=rounds(300), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(REAL) - 1), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_a_damaged_file_raises_only_our_errors(damages: list[tuple[int, int]]) -> None:
    data = bytearray(REAL)
    for at, byte in damages:
        data[at] = byte
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attempt(bytes(data))


@settings(max_examples=rounds(500), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3),
    st.integers(0, 2**32),
)
def test_a_damaged_pickle_raises_only_our_errors(damages: list[tuple[int, int]], seed: int) -> None:
    with zipfile.ZipFile(io.BytesIO(REAL)) as source:
        pickled = bytearray(source.read("archive/data.pkl"))
    for at, byte in damages:
        pickled[at % len(pickled)] = byte
    if seed % 3 == 0:
        start = random.Random(seed).randrange(len(pickled))
        del pickled[start : start + seed % 7]
    attempt(repickled(bytes(pickled), data=bytes(48), extra=(("a/data/1", bytes(10)),)))
