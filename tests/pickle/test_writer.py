"""core.pickle.writer: inert trees become pickles that everybody reads, byte for byte the same each
time.
"""

from __future__ import annotations

import argparse
import collections
import enum
import io
import pickle
import pickletools
import random
import re
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.errors import UnsafeError
from core.pickle.inert import (
    Global,
    Inert,
    Persistent,
    TensorLeaf,
    make_namespace,
    make_ordered_dict,
)
from core.pickle.reader import PickleLimits, load
from core.pickle.writer import BATCH, dumps
from tests.support.rounds import rounds

WEIGHTS_ONLY = set(
    re.findall(
        r"\w+",
        """
        GLOBAL NEWOBJ REDUCE BUILD APPEND APPENDS SETITEM SETITEMS MARK TUPLE TUPLE1 TUPLE2
        TUPLE3 NONE NEWFALSE NEWTRUE EMPTY_TUPLE EMPTY_LIST EMPTY_DICT EMPTY_SET BININT BININT1
        BININT2 BINFLOAT BINUNICODE SHORT_BINSTRING BINPERSID BINGET LONG_BINGET BINPUT
        LONG_BINPUT LONG1 PROTO STOP
        """,
    )
)
"""Opcodes of torch 2.13's weights_only unpickler."""


class Colour(enum.Enum):
    RED = 1


class Point:
    def __init__(self, x: object, y: object) -> None:
        self.x, self.y = x, y

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and (self.x, self.y) == (other.x, other.y)

    def __hash__(self) -> int:
        return hash((self.x, self.y))


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a: object) -> None:
        self.a = a

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and self.a == other.a

    __hash__ = None  # type: ignore[assignment]


class Outer:
    class Inner:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Outer.Inner)

        __hash__ = None  # type: ignore[assignment]


def isomorphic(first: object, second: object) -> bool:
    """Whether two inert trees have the same shape, values and sharing."""
    todo = [(first, second)]
    forth: dict[int, int] = {}
    back: dict[int, int] = {}
    while todo:
        ours, other = todo.pop()
        if type(ours) is not type(other):
            return False
        if not isinstance(ours, (dict, list, tuple, Inert, Persistent)) or ours == ():
            if ours != other and (ours == ours or other == other):
                return False
            continue
        if id(ours) in forth or id(other) in back:
            if forth.get(id(ours)) != id(other) or back.get(id(other)) != id(ours):
                return False
            continue
        forth[id(ours)], back[id(other)] = id(other), id(ours)
        our_parts, their_parts = parts(ours), parts(other)
        if len(our_parts) != len(their_parts):
            return False
        todo += zip(our_parts, their_parts, strict=True)
    return True


def parts(node: Any) -> list[object]:
    """The children of a container."""
    if isinstance(node, Inert):
        entries = [part for entry in node.entries for part in entry]
        return [
            node.how,
            node.fn,
            node.args,
            node.kwargs,
            node.state,
            len(node.items),
            *node.items,
            *entries,
        ]
    if isinstance(node, Persistent):
        return [node.value]
    return [*node, *node.values()] if isinstance(node, dict) else list(node)


def rewritten(value: object, protocol: int = 2) -> bytes:
    """A real value's pickle, read and written again."""
    return dumps(load(pickle.dumps(value, protocol), label="x"))


VALUES: list[Any] = [
    None,
    True,
    [
        False,
        0,
        1,
        255,
        256,
        65535,
        65536,
        -1,
        2**31 - 1,
        2**31,
        -(2**31),
        -(2**31) - 1,
        2**63,
        2**64,
        -(2**64),
        2**2038,
    ],
    [1.5, float("inf"), 1e-310],
    ["", "text", "é漢\U0001f600\n\0", "\ud800", "x" * 70_000],
    [b"", b"\x00\xff", b"y" * 300, bytearray(b"\x01\xff"), bytearray()],
    [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ((),))],
    [{}, {"a": [1], 2: {"b": ()}, (3, 4): None, None: 1.0}],
    {i: str(i) for i in range(BATCH * 2 + 1)},
    list(range(BATCH * 2)),
    [set(), {1, "a", (2, 3), None, b"x"}, frozenset({1, frozenset({2})}), 3 + 4j],
    argparse.Namespace(a=1, path=PurePosixPath("/a/b"), colour=Colour.RED),
    collections.OrderedDict(b=1, a=[2]),
    collections.defaultdict(list, k=[1]),
    collections.Counter("abca"),
    collections.deque([1, 2, 3], 5),
    [Point(1, Slotted([2])), Outer.Inner()],
    {"dtype": np.dtype("float32"), "scalar": np.float64(2.5), "int": np.int16(-3)},
    ("MT19937", 5, 0, 0.0),
    [collections.OrderedDict(), collections.OrderedDict()],
]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_python_rebuilds_equal_objects_from_what_is_written(protocol: int) -> None:
    for value in VALUES:
        written = rewritten(value, protocol)
        assert pickle.loads(written) == value
        assert type(pickle.loads(written)) is type(value)
        assert isomorphic(load(written, label="x"), load(pickle.dumps(value, protocol), label="x"))


@pytest.mark.parametrize("dtype", ["<f8", "<i4", "|u1", ">u2", "?", "<c8"])
def test_numpy_arrays_come_back_bit_for_bit(dtype: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    for value in (array, array.T, array[:, 1], np.zeros((0, 3), dtype)):
        for protocol in (2, 4, 5):
            wanted = pickle.loads(
                pickle.dumps(value, protocol)
            )  # numpy itself changes the byte order to the machine's
            loaded = pickle.loads(rewritten(value, protocol))
            assert (loaded.dtype, loaded.shape, loaded.tobytes()) == (
                wanted.dtype,
                wanted.shape,
                wanted.tobytes(),
            )
            assert np.array_equal(loaded, value)


def test_sharing_and_cycles_survive() -> None:
    shared: list[Any] = []
    loop: dict[str, Any] = {"a": shared, "b": (shared, shared)}
    loop["self"] = loop
    shared.append((shared, loop))
    point = Point(None, [])
    point.x, point.y = point, [point]
    loaded: Any = pickle.loads(rewritten((loop, point)))
    assert loaded[0]["self"] is loaded[0]
    assert loaded[0]["a"] is loaded[0]["b"][1] is loaded[0]["a"][0][0]
    assert loaded[1].x is loaded[1].y[0] is loaded[1]


def test_a_tuple_and_a_set_that_contain_themselves_survive() -> None:
    inside: list[Any] = []
    loop = (inside,)
    inside.append(loop)
    loaded = pickle.loads(rewritten(loop))
    assert loaded[0][0] is loaded
    long: list[Any] = []
    wide = (long, 1, 2, 3)
    long.append(wide)
    assert pickle.loads(rewritten(wide))[0][0][3] == 3
    record = Inert("newobj", Global("argparse", "Namespace"))
    record.state = {"members": {record}}
    again: Any = load(dumps(record), label="x")
    assert next(iter(again.state["members"])) is again
    around: Any = {record}
    record.state = {"members": around}
    written: Any = load(dumps(around), label="x")
    assert next(iter(written)).state["members"] is written


def test_equal_strings_are_one_and_equal_lists_are_not() -> None:
    a, b = "".join(["ke", "y"]), "".join(["k", "ey"])
    assert dumps([a, b]) == dumps(["key"] * 2)
    loaded = pickle.loads(dumps([[1], [1]]))
    assert loaded[0] is not loaded[1]


def test_the_bytes_do_not_depend_on_the_hash_seed(repo_dir: Path) -> None:
    code = (
        "import hashlib\n"
        "from core.pickle.inert import *\n"
        "from core.pickle.writer import dumps\n"
        "call = lambda n: Inert('reduce', Global('m', 'E'), (n,))\n"
        "tree = {'s': set('abcdefgh'), 'f': frozenset(map(str, range(50))), 'm': {1, 'a', "
        "None, (2, 'x'), 2.5},\n"
        "        'e': {call(i) for i in range(20)}, 'o': make_ordered_dict({'z': 1, 'a': 2})}\n"
        "print(hashlib.sha256(dumps(tree)).hexdigest())\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=repo_dir,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1


def test_only_opcodes_of_weights_only_are_used_for_what_it_can_hold() -> None:
    for value in VALUES:
        names = {op.name for op, _, _ in pickletools.genops(rewritten(value))}
        assert names <= WEIGHTS_ONLY, names - WEIGHTS_ONLY


def test_protocol_2_is_raised_only_where_it_must_be() -> None:
    cases = [
        (Global("m", "f"), 2),
        (Global("m", "Outer.Inner"), 2),
        (Global("dbm", "f"), 3),
        (Global("m", "naïve"), 4),
        (Global("m", "a\nb"), 4),
        (Inert("newobj_ex", Global("m", "C"), (), kwargs={"a": 1}), 4),
    ]
    for tree, protocol in cases:
        written = dumps(tree)
        assert written[:2] == bytes([0x80, protocol])
        assert isomorphic(load(written, label="x"), tree)


def test_a_nested_class_is_an_attribute_at_protocol_2_and_a_name_at_4() -> None:
    tree = Inert("newobj", Global(Outer.__module__, "Outer.Inner"))
    for protocol in (2, 3, 4, 5):
        assert isomorphic(load(dumps(tree, protocol=protocol), label="x"), tree)
    assert b"getattr" in dumps(tree, protocol=2)
    assert b"getattr" not in dumps(tree, protocol=4)


def test_bytes_are_bytes_opcodes_from_protocol_3() -> None:
    for size in (0, 255, 256, 70_000):
        for protocol in (2, 3, 4, 5):
            written = dumps([b"z" * size] * 2, protocol=protocol)
            assert pickle.loads(written) == [b"z" * size] * 2
            assert (b"_codecs" in written) == (protocol == 2)


def test_leaves_become_what_reducers_and_persistent_ids_say() -> None:
    tree = {"w": TensorLeaf("w"), "v": TensorLeaf("v"), "p": Persistent(("storage", 1))}
    storage = object()

    def reduced(leaf: TensorLeaf) -> Inert:
        return Inert("reduce", Global("m", "rebuild"), (storage, leaf.key))

    written = dumps(
        tree,
        reducers={TensorLeaf: reduced},
        persistent_id=lambda leaf: ("storage", 0) if leaf is storage else None,
    )
    loaded: Any = load(written, label="x", persistent_load=lambda pid: pid)
    assert loaded["w"].args == (("storage", 0), "w")
    assert loaded["v"].args == (("storage", 0), "v")
    assert loaded["p"] == ("storage", 1)


def test_a_leaf_that_stands_twice_is_written_once() -> None:
    leaf = TensorLeaf("w")
    written = dumps(
        [leaf, leaf],
        reducers={TensorLeaf: lambda leaf: Inert("reduce", Global("m", "f"), (leaf.key,))},
    )
    loaded: Any = load(written, label="x")
    assert loaded[0] is loaded[1]


def test_a_leaf_without_a_reducer_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="TensorLeaf cannot be written"):
        dumps({"w": TensorLeaf("w")})


def test_depth_does_not_matter() -> None:
    tree: Any = ()
    for _ in range(30_000):
        tree = [(tree,)]
    written = dumps(tree)
    with pytest.raises(UnsafeError, match="levels deep"):
        load(written, label="x")
    load(written, label="x", limits=PickleLimits(max_depth=None))


def test_namespaces_and_ordered_dicts_made_by_us_are_real_ones() -> None:
    tree = make_namespace({"a": 1, "extra": make_ordered_dict({"k": (1, 2)})})
    loaded = pickle.loads(dumps(tree))
    assert loaded == argparse.Namespace(a=1, extra=collections.OrderedDict(k=(1, 2)))
    assert isinstance(loaded.extra, collections.OrderedDict)


def test_the_pickles_of_the_golden_checkpoints_survive_a_round_trip(
    golden: Path, request: pytest.FixtureRequest
) -> None:
    n_pickles = 0
    step = 1 if request.config.getoption("--long") else 4
    for path in sorted(golden.rglob("*"))[::step]:
        for data in contained_pickles(path):
            tree = load(data, label=str(path))
            written = dumps(tree)
            again = load(written, label=str(path))
            assert isomorphic(tree, again), path
            assert dumps(again) == written
            assert written[1] == 2
            n_pickles += 1
    assert n_pickles > 50 // step


def contained_pickles(path: Path) -> list[bytes]:
    """The pickles of a torch zip or a .metadata."""
    if path.name == ".metadata":
        return [path.read_bytes()]
    if path.suffix not in {".pt", ".bin"} or not zipfile.is_zipfile(path):
        return []
    with zipfile.ZipFile(path) as archive:
        return [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]


def test_a_rewritten_torch_file_loads_with_weights_only() -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(12.0).reshape(3, 4)
    value = {
        "base": base,
        "view": base[1:],
        "transposed": base.t(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 2),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "ordered": collections.OrderedDict(a=1, b=base),
        "plain": [1, 2.5, "x", b"bytes", bytearray(b"b"), {1, 2}, (3, None), 2**70, True, 1 + 2j],
    }
    module = torch.nn.Linear(2, 3).state_dict()
    for saved in (value, module):
        stream = io.BytesIO()
        torch.save(saved, stream)
        rebuilt = io.BytesIO()
        with zipfile.ZipFile(stream) as source, zipfile.ZipFile(rebuilt, "w") as target:
            for info in source.infolist():
                content = source.read(info)
                if info.filename.endswith("data.pkl"):
                    content = dumps(load(content, label="x"))
                target.writestr(info.filename, content)
        rebuilt.seek(0)
        loaded = torch.load(rebuilt, weights_only=True)
        assert list(loaded) == list(saved)
        for key, wanted in saved.items():
            if isinstance(wanted, torch.Tensor):
                assert (loaded[key].dtype, loaded[key].shape, loaded[key].stride()) == (
                    wanted.dtype,
                    wanted.shape,
                    wanted.stride(),
                )
                assert type(loaded[key]) is type(wanted)
                assert bytes(loaded[key].untyped_storage()) == bytes(wanted.untyped_storage())
            elif key != "ordered":
                assert loaded[key] == wanted
        assert getattr(loaded, "_metadata", None) == getattr(saved, "_metadata", None)
    assert loaded.__class__ is collections.OrderedDict


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.integers(-(2**63), 2**63), inner, max_size=4)
        | st.tuples(inner)
        | st.tuples(inner, inner, inner, inner)
        | st.sets(st.integers(-(2**63), 2**63) | st.text(max_size=3), max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=rounds(300), deadline=None, suppress_health_check=list(HealthCheck))
@given(TREES, st.integers(2, 5))
def test_any_plain_tree_is_read_back_equal(tree: object, protocol: int) -> None:
    written = dumps(tree, protocol=protocol)
    assert pickle.loads(written) == tree
    assert load(written, label="x") == tree
    assert dumps(load(written, label="x"), protocol=protocol) == written


def test_random_records_survive() -> None:
    rng = random.Random(5)

    def record(depth: int, records: list[Any]) -> Any:
        if depth == 0 or rng.random() < 0.2:
            return rng.choice([1, "a", None, Global("m", "x"), *records])
        inert = Inert(
            rng.choice(["reduce", "newobj", "newobj_ex"]), Global("m", f"C{rng.randrange(3)}")
        )
        inert.args = tuple(record(depth - 1, records) for _ in range(rng.randrange(3)))
        inert.kwargs = {"k": record(depth - 1, records)} if inert.how == "newobj_ex" else None
        records.append(inert)
        inert.items = [record(depth - 1, records) for _ in range(rng.randrange(3))]
        inert.entries = [(f"k{i}", record(depth - 1, records)) for i in range(rng.randrange(3))]
        if rng.random() < 0.5:
            inert.state = record(depth - 1, records)
        return inert

    for _ in range(200):
        tree = record(5, [])
        assert isomorphic(load(dumps(tree), label="x"), tree)
