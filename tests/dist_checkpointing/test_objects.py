"""Live objects as torch streams and back: equal values, shared memory, and nothing of a file is
ever called.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import io
import logging
import pathlib
import pickle
import random
import sys
import types
import uuid
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.dist_checkpointing._engine.bridge import open_catalog
from core.dist_checkpointing._values.objects import load_file, load_stream, stream, stream_of
from core.dist_checkpointing._values.stand_in import StandIn
from core.errors import (
    CheckpointingException,
    CorruptError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)
from core.files.store import LocalStore
from tests.dist_checkpointing.live_values import assert_alike


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@dataclass
class Settings:
    lr: float
    name: str = "adam"


class Slotted:
    __slots__ = ("value",)


class Point(tuple):
    def __new__(cls, x: int, y: int) -> Point:
        return super().__new__(cls, (x, y))

    def __getnewargs__(self) -> tuple[int, int]:
        return self[0], self[1]


def bytes_io(data: bytes, at: int) -> io.BytesIO:
    buffer = io.BytesIO(data)
    buffer.seek(at)
    return buffer


def ordered(**attributes: object) -> collections.OrderedDict[str, object]:
    """As ``Module.state_dict`` makes it."""
    mapping: Any = collections.OrderedDict(a=torch.arange(2), b=1)
    vars(mapping).update(attributes)
    return mapping


VALUES = [
    None,
    True,
    -(2**70),
    1.5,
    float("-inf"),
    -0.0,
    1 + 2j,
    "text ✓",
    b"\xff\0",
    bytearray(b"xy"),
    [],
    {},
    (),
    ((1,), [2, {"a": (3, 4, 5, 6)}]),
    {1: 2, (1, "a"): 3, None: 4, 1.5: 5},
    {1, 2, "a"},
    frozenset({(1, 2), b"x"}),
    slice(1, None, 2),
    range(3, 10, 2),
    ordered(_metadata={"version": 1}),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {"a": [1]}),
    collections.Counter("abca"),
    collections.deque([1, [2]], 5),
    argparse.Namespace(lr=0.1, nested=argparse.Namespace(dtype=torch.float16)),
    types.SimpleNamespace(a=1),
    bytes_io(b"abcdef", 3),
    pathlib.Path("/a/b"),
    pathlib.PurePosixPath("a/b"),
    datetime.date(2026, 1, 2),
    datetime.datetime(
        2026, 1, 2, 3, 4, 5, 6, datetime.timezone(datetime.timedelta(hours=2), "here")
    ),
    datetime.time(1, 2, 3),
    datetime.timedelta(1, 2, 3),
    decimal.Decimal("1.50"),
    fractions.Fraction(1, 3),
    uuid.UUID(int=5),
    random.Random(3),
    random.getstate(),
    Color.RED,
    Color.BLUE,
    Access.READ,
    Access.READ | Access.WRITE,
    Access(0),
    int,
    collections.OrderedDict,
    torch.float32,
    torch.bfloat16,
    torch.strided,
    torch.per_tensor_affine,
    torch.Size([2, 3]),
    torch.device("cuda", 1),
    torch.device("cpu"),
    torch.Generator().manual_seed(7),
    torch.get_rng_state(),
    np.float32,
    np.dtype(">i4"),
    np.dtype("f8"),
    np.dtype([("a", "f4"), ("b", "i8", (2,))]),
    np.dtype("M8[us]"),
    np.float64(1.5),
    np.int32(-3),
    np.bool_(True),
    np.str_("abc"),
    np.datetime64("2026-01-02"),
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(["ab", "c"]),
    np.array([1, "a", None], dtype=object),
    np.zeros((0, 3)),
    np.array(5),
    np.zeros(2, [("a", "f4"), ("b", "u1")]),
    np.random.RandomState(3).get_state(),
]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
]
DTYPES += [torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_as_they_were(value: object):
    data = stream_of(value)
    loaded = load_stream(data)
    assert_alike(loaded, value)
    assert_alike(torch.load(io.BytesIO(data), weights_only=False), value)
    assert stream_of(loaded) == data


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_all_types_come_back(dtype: torch.dtype):
    bits = torch.randint(
        0, 2 if dtype == torch.bool else 120, (48 * dtype.itemsize,), dtype=torch.uint8
    )
    flat = bits.view(dtype)
    for tensor in (
        flat,
        flat.reshape(6, 8).t(),
        flat[3:5],
        flat[0],
        flat[:0],
        flat.reshape(6, 8)[:, 2:4],
    ):
        loaded = load_stream(stream_of({"a": tensor}))["a"]
        assert_alike(loaded, tensor)
        assert_alike(torch.load(io.BytesIO(stream_of(tensor)), weights_only=True), tensor)
        assert loaded.is_contiguous() and loaded.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_what_is_on_a_gpu_is_saved_and_comes_back_on_the_cpu():
    tensor = torch.arange(6, device="cuda").reshape(2, 3)
    assert_alike(load_stream(stream_of([tensor, tensor.t()])), [tensor.cpu(), tensor.t().cpu()])


def test_random_states_of_numpy_go_on_alike():
    for generator in (
        np.random.RandomState(5),
        np.random.default_rng(5),
        np.random.Generator(np.random.Philox(5)),
    ):
        draw = "rand" if isinstance(generator, np.random.RandomState) else "random"
        getattr(generator, draw)(3)
        loaded = load_stream(stream_of([generator]))[0]
        assert type(loaded) is type(generator)
        assert (getattr(loaded, draw)(8) == getattr(generator, draw)(8)).all()


def test_the_byte_order_of_arrays_is_kept():
    array = np.arange(3, dtype=">i2")
    assert_alike(load_stream(stream_of(array)), array)
    assert (
        torch.load(io.BytesIO(stream_of(array)), weights_only=False) == array
    ).all()  # numpy turns them around


def test_parameters_and_gradients_come_back():
    value = [
        torch.nn.Parameter(torch.rand(2)),
        torch.nn.Parameter(torch.rand(2), requires_grad=False),
    ]
    value += [torch.rand(2, requires_grad=True), torch.rand(2, requires_grad=True) * 2]
    loaded = load_stream(stream_of(value))
    assert_alike(loaded, [*value[:3], value[3].detach().requires_grad_()])


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text()
)
KEYS = st.text() | st.integers(-(2**31), 2**31) | st.booleans()
TENSORS = st.builds(
    lambda shape, dtype: torch.arange(1, 1 + torch.Size(shape).numel()).to(dtype).reshape(shape),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.complex64]),
)
PLAIN_TREES = st.recursive(
    PLAIN | TENSORS,
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(KEYS, below, max_size=4)
        | st.tuples(below, below)
    ),
    max_leaves=20,
)
FIELDS = st.text().filter(lambda name: not hasattr(argparse.Namespace(), name))
"""Names that an object does not have anyway, such as ``__dict__``, which cannot be any value."""
OTHERS = (
    st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([v for v in VALUES if v is not None])
)
TREES = st.recursive(
    PLAIN | TENSORS | OTHERS,
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(KEYS, below, max_size=4).map(collections.OrderedDict)
        | st.dictionaries(FIELDS, below, max_size=3).map(
            lambda fields: argparse.Namespace(**fields)
        )
        | st.lists(below, max_size=4).map(tuple)
        | st.lists(below, max_size=3).map(collections.deque)
    ),
    max_leaves=20,
)


@given(TREES)
def test_nested_values_come_back(value: object):
    data = stream_of(value)
    loaded = load_stream(data)
    if not isinstance(value, collections.deque):
        assert_alike(_without_deques(loaded), _without_deques(value))
    assert stream_of(loaded) == data


def _without_deques(value: Any) -> Any:
    if isinstance(value, collections.deque):
        return ["deque", value.maxlen, *map(_without_deques, value)]
    if isinstance(value, dict):
        return {key: _without_deques(item) for key, item in value.items()}
    if isinstance(value, argparse.Namespace):
        return ["namespace", _without_deques(vars(value))]
    return [_without_deques(item) for item in value] if type(value) in (list, tuple) else value


@given(PLAIN_TREES)
def test_plain_values_load_with_torchs_defaults(value: object):
    assert_alike(torch.load(io.BytesIO(stream_of(value)), weights_only=True), value)


@given(PLAIN_TREES)
def test_what_torch_writes_comes_back(value: object):
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        buffer = io.BytesIO()
        torch.save(value, buffer, **options)
        assert_alike(load_stream(buffer.getvalue()), value)


def test_bytes_depend_on_the_value_alone():
    def value() -> object:
        return {
            "set": {f"name {i}" for i in range(50)},
            "x": [torch.arange(5), np.arange(3)],
            "n": float("1.5"),
        }

    assert stream_of(value()) == stream_of(pickle.loads(pickle.dumps(value())))


def test_shared_and_cyclic_containers_stay_so():
    inner: dict[str, Any] = {"a": 1}
    cyclic: list[Any] = [inner, inner]
    cyclic.append(cyclic)
    namespace = argparse.Namespace()
    namespace.itself = [namespace]
    loaded, again = load_stream(stream_of([cyclic, namespace]))
    assert loaded[0] is loaded[1] and loaded[2] is loaded
    assert again.itself[0] is again


def test_shared_tensors_stay_shared_and_views_keep_no_more_than_they_show():
    base = torch.arange(1000.0)
    first = base[:4]
    data = stream_of(
        {"a": first, "same": first, "again": base[:4], "parameter": torch.nn.Parameter(base)}
    )
    assert len(data) < 4 * 1000 + 4096
    loaded = load_stream(data)
    loaded["a"].fill_(-1)
    assert loaded["same"].tolist() == loaded["again"].tolist() == [-1] * 4
    assert loaded["a"] is loaded["same"]


def test_views_that_share_a_storage_in_a_file_share_it_when_loaded():
    base = torch.arange(24)
    buffer = io.BytesIO()
    value = {
        "whole": base,
        "row": base.reshape(4, 6)[1],
        "columns": base.reshape(4, 6)[:, 1:3],
        "wide": base[:1].expand(5),
    }
    torch.save(value, buffer)
    loaded = load_stream(buffer.getvalue())
    assert_alike(loaded, value)
    assert loaded["columns"].stride() == (6, 1) and loaded["wide"].stride() == (0,)
    loaded["whole"].zero_()
    assert loaded["row"].sum() == loaded["columns"].sum() == loaded["wide"].sum() == 0


def test_deep_values_need_no_recursion():
    value: Any = "bottom"
    for _ in range(300):
        value = [value]
    loaded = load_stream(stream_of(value))
    for _ in range(300):
        [loaded] = loaded
    assert loaded == "bottom"


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.rand(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda: 1, "cannot be saved"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (quantized(), "quantized"),
        (torch.rand(2).untyped_storage(), "bare storage"),
        (torch.Tensor._make_subclass(type("Mine", (torch.Tensor,), {}), torch.rand(2)), "class"),
        (sys, "cannot be saved"),
    ],
    ids=["lambda", "sparse", "meta", "quantized", "storage", "subclass", "module"],
)
def test_what_cannot_be_saved_is_refused(value: object, text: str):
    with pytest.raises(UnsupportedError, match=text):
        stream_of({"a": [value]})


def test_conjugated_and_negated_views_are_resolved():
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    assert torch.equal(load_stream(stream_of(tensor.conj())), tensor.conj().resolve_conj())
    assert torch.equal(load_stream(stream_of(tensor.conj().imag)), tensor.conj().imag.resolve_neg())


# What other files hold


def test_unknown_classes_become_stand_ins_that_can_be_saved_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    module = types.ModuleType("their_enums")

    class Kind(enum.Enum):
        ENCODER = 1

    class Thing:
        def __init__(self) -> None:
            self.weights = torch.arange(3)

    for kind in (Kind, Thing):
        kind.__module__, kind.__qualname__ = module.__name__, kind.__name__
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    buffer = io.BytesIO()
    torch.save(
        argparse.Namespace(lr=0.1, kind=Kind.ENCODER, things=[Thing(), Thing], ok=None), buffer
    )
    assert load_stream(buffer.getvalue()).kind is Kind.ENCODER
    monkeypatch.delitem(sys.modules, module.__name__)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        args = load_stream(buffer.getvalue(), key="args")
    [record] = caplog.records
    assert "their_enums.Kind, their_enums.Thing" in record.getMessage()
    assert repr(args.kind) == "<stand-in for their_enums.Kind(1)>" and args.lr == 0.1
    thing, kind = args.things
    assert isinstance(thing, StandIn) and torch.equal(thing.state["weights"], torch.arange(3))
    assert repr(kind) == "<stand-in for their_enums.Thing>"
    again = stream_of(args)
    assert pickle.loads(pickle.dumps(args)) == args == load_stream(again)
    assert thing != StandIn(thing.how, thing.module, thing.name, state={"weights": torch.zeros(3)})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    loaded = torch.load(io.BytesIO(again), weights_only=False)
    assert loaded.kind is Kind.ENCODER and loaded.things[1] is Thing
    assert torch.equal(loaded.things[0].weights, torch.arange(3))


def test_values_that_an_enumeration_no_longer_has_become_stand_ins():
    grey = StandIn("reduce", Color.__module__, "Color", args=("grey",))
    assert load_stream(stream_of(grey)) == grey
    assert (
        load_stream(stream_of(StandIn("reduce", Color.__module__, "Color", args=("blue",))))
        is Color.BLUE
    )


def test_only_registered_classes_are_made():
    for value in (Settings(0.1), Point(1, 2)):
        data = stream_of(value)
        assert isinstance(load_stream(data), StandIn)
        with torch.serialization.safe_globals([type(value)]):
            assert load_stream(data) == value
    slotted = Slotted()
    slotted.value = [1]
    with torch.serialization.safe_globals([Slotted, (Settings, "elsewhere.Named")]):
        assert load_stream(stream_of(slotted)).value == [1]
        assert isinstance(load_stream(stream_of(Settings(0.2))), StandIn)
        named = stream_of(StandIn("newobj", "elsewhere", "Named", state={"lr": 0.2, "name": "sgd"}))
        assert load_stream(named) == Settings(0.2, "sgd")


class Attack:
    """Pickles as a call of ``function(*args)``."""

    def __init__(self, function: object, *args: object) -> None:
        self.parts = function, args

    def __reduce__(self) -> Any:
        return self.parts


CALLED: list[object] = []


def call(*args: object) -> dict[str, object]:
    CALLED.append(args)
    return {}


class Caller:
    """Tells when anything of it is called."""

    def __new__(cls, *args: object) -> Caller:
        CALLED.append(args)
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        CALLED.append(state)


def in_a_file(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    CALLED.clear()
    return buffer.getvalue()


@pytest.mark.parametrize(
    "attack",
    [
        Attack(eval, "call()"),
        Attack(__import__("os").system, "touch /tmp/x"),
        Attack(getattr, Attack(__import__, "os"), "system"),
        Attack(torch.load, "file"),
        Attack(torch.hub.load, "a", "b"),
        Attack(np.load, "file"),
        Attack(__import__("functools").partial, __import__("os").system, "touch /tmp/x"),
        Attack(__import__("importlib").import_module, "antigravity"),
        eval,
        __import__("subprocess").Popen,
    ],
    ids=lambda attack: (attack.parts[0] if isinstance(attack, Attack) else attack).__name__,
)
def test_names_that_run_code_are_refused(attack: object):
    for value in ({"a": [attack]}, argparse.Namespace(kind=attack)):
        with pytest.raises(UnsafeError):
            load_stream(in_a_file(value))


@pytest.mark.parametrize(
    "value",
    [
        Attack(call, 1),
        Caller(),
        Attack(Caller, 2),
        Attack(Attack, call, 3),
        Attack(__import__("functools").partial, call, 1),
    ],
)
def test_nothing_that_a_file_names_is_called(value: object):
    data = in_a_file(value)
    loaded = load_stream(data)
    assert isinstance(loaded, StandIn) and CALLED == []


def test_attacks_are_refused_even_if_registered():
    data = in_a_file(Attack(eval, "1"))
    with torch.serialization.safe_globals([(eval, "builtins.eval")]), pytest.raises(UnsafeError):
        load_stream(data)


def test_module_attributes_are_not_computed(monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("lazy_module")
    module.__getattr__ = call  # type: ignore[method-assign]
    module.Kind = type("Kind", (), {"__module__": "lazy_module"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    data = in_a_file(Attack(module.Kind, 1))
    del module.Kind
    assert isinstance(load_stream(data), StandIn) and CALLED == []


@pytest.mark.parametrize(
    "value",
    [
        Attack(collections.OrderedDict, [1]),
        Attack(collections.deque, (), "a"),
        Attack(pathlib.PosixPath, 3),
        Attack(datetime.datetime, b"short"),
        Attack(datetime.datetime, b"\xff" * 10),
        Attack(decimal.Decimal, "x"),
        Attack(fractions.Fraction, "1e999999999"),
        Attack(np.dtype, "O8", False, True, 1),
        Attack(np.dtype, "|V99999999999"),
        Attack(np.ndarray, (1 << 40,)),
        Attack(torch.device, "no such"),
        Attack(torch.Size, (-1,)),
        Attack(slice, "a", 1, 2),
        Attack(range, 0, 1, 0),
    ],
    ids=lambda value: repr(value.parts)[:60],
)
def test_unfit_arguments_are_refused_or_left_alone(value: Attack):
    raw = _pickled(value.parts[0], value.parts[1])
    try:
        loaded = load_stream(raw)
    except (CorruptError, UnsafeError):
        return
    assert isinstance(loaded, StandIn)


def _pickled(function: Any, args: tuple[object, ...]) -> bytes:
    """A pickle of a call, made without calling."""
    name = f"c{function.__module__}\n{function.__qualname__}\n".encode()
    return b"\x80\x02" + name + pickle.dumps(args, 2)[2:-1] + b"R."


ARRAY = (
    b"\x80\x02cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85c_codecs\nencode\n"
    b"X\x01\x00\x00\x00bX\x06\x00\x00\x00latin1\x86R\x87R"
)


@pytest.mark.parametrize(
    "state",
    [
        (1, (2,), np.dtype("f8"), False, b"short"),
        (1, (1 << 61,), np.dtype("f8"), False, b""),
        (1, (-1,), np.dtype("f8"), False, b""),
        (1, (1,), np.dtype("O"), False, b"\0" * 8),
        (1, (1,), np.dtype("O"), False, [1, 2]),
        (1, (1,), "f8", False, b"\0" * 8),
        (1, (1,)),
        5,
    ],
    ids=str,
)
def test_states_of_arrays_are_checked_before_numpy_gets_them(state: object):
    with pytest.raises(CorruptError):
        load_stream(ARRAY + pickle.dumps(state, 2)[2:-1] + b"b.")


DAMAGED = {
    "values": VALUES[13:30],
    "tensors": [torch.arange(400), torch.arange(20).reshape(4, 5).t()],
}


@given(st.integers(0, len(stream_of(DAMAGED)) - 1), st.integers(1, 255))
def test_a_damaged_byte_is_reported_or_does_not_matter(at: int, change: int):
    data = bytearray(stream_of(DAMAGED))
    data[at] ^= change
    with suppress(CheckpointingException):
        assert stream_of(load_stream(bytes(data))) == stream_of(DAMAGED)


@given(st.data())
def test_malformed_pickles_raise_the_projects_errors(data: st.DataObject):
    pickled = bytearray(pickle.dumps([VALUES[13:30], np.arange(4), Color.RED, Settings(0.1)], 2))
    for _ in range(data.draw(st.integers(1, 4))):
        pickled[data.draw(st.integers(0, len(pickled) - 1))] = data.draw(st.integers(0, 255))
    with suppress(CheckpointingException):
        load_stream(bytes(pickled))


def test_a_stream_that_ends_too_early_is_named():
    data = stream_of({"a": torch.arange(1000)})
    with pytest.raises((TruncatedError, CorruptError), match="rng_state"):
        load_stream(data[: len(data) // 2], key="rng_state")


def test_a_tuple_that_contains_itself_is_refused():
    inner: list[Any] = []
    value = (inner,)
    inner.append(value)
    with pytest.raises(UnsupportedError, match="contains itself"):
        load_stream(in_a_file(value))


# Files that other software wrote


class _Loose(pickle.Unpickler):
    """Stands in for classes that are not installed, as far as a comparison needs it."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return lambda *args: StandIn("reduce", module, name, args=args)


LOOSE = types.SimpleNamespace(Unpickler=_Loose, load=pickle.load, __name__="loose")


@pytest.mark.parametrize(
    "family", ["mcore_legacy", "mcore0121_torch_dist", "mcore0161_torch_dist", "mcore0121_zarr"]
)
def test_files_of_megatron_come_back_as_torch_loads_them(
    golden: Path, family: str, request: pytest.FixtureRequest
):
    pytest.importorskip("megatron.core.transformer.enums")
    paths = [
        path for path in sorted((golden / family).rglob("*.pt")) if path.stat().st_size < 1 << 20
    ]
    assert paths
    if not request.config.getoption("--long"):
        paths = paths[::5]
    contents = set()
    for path in paths:
        if path.read_bytes() in contents:
            continue
        contents.add(path.read_bytes())
        expected = torch.load(path, map_location="cpu", weights_only=False, pickle_module=LOOSE)
        loaded = load_file(LocalStore(path.parent), path.name)
        assert_alike(loaded, expected, str(path.relative_to(golden)))
        assert_alike(load_stream(stream_of(loaded)), expected, str(path.relative_to(golden)))


@pytest.mark.parametrize("family", ["mcore_torch_dist", "mcore0121_torch_dist", "torch_dcp"])
def test_items_of_distributed_checkpoints_come_back_as_torch_loads_them(golden: Path, family: str):
    pytest.importorskip("megatron.core.transformer.enums")
    n_items = 0
    for path in sorted((golden / family).rglob(".metadata")):
        with open_catalog(path.parent) as (catalog, store):
            for key, item in catalog.objects.items():
                if item.raw_key is None:
                    continue
                array = catalog.fragments(item.raw_key)[0].array
                assert array is not None
                raw = io.BytesIO(store.read(array.extent.file, array.extent.offset, array.n_bytes))
                expected = torch.load(
                    raw, map_location="cpu", weights_only=False, pickle_module=LOOSE
                )
                assert_alike(load_stream(store, array, key=key), expected, f"{path}:{key}")
                n_items += 1
    assert n_items


def test_large_values_are_made_in_one_pass():
    value = {f"key {i}": {"step": i, "betas": (0.9, 0.95)} for i in range(20_000)}
    assert load_stream(stream_of(value)) == value
    assert stream(value).size == len(stream_of(value))
