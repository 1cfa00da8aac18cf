"""Pickles that ask for much work are read in proportion to their length, or refused: no clock is
read.

Each is a small file of opcodes. Where the work may grow, functions are counted as in
``test_effort``; where it may not, the refusal names the limit.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import UnsafeError
from core.files.store import MemoryStore
from core.formats.torch.nested_names import uses_of_stream
from core.opening.open import open_checkpoint
from core.pickle.machine import Machine, PickleLimits
from core.pickle.reader import load
from core.verbs.checks.finding import Level
from core.verbs.convert.run import Job, run
from core.verbs.inspect.summary import summarize
from core.verbs.validate.run import validate
from tests.hostile.cases import FOUR, torch_zip
from tests.verbs.checks.test_effort import n_calls

LIMITS = PickleLimits()
NAMESPACE = b"cargparse\nNamespace\n)\x81"


def text(value: str) -> bytes:
    """A string."""
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    """An integer of four bytes."""
    return b"J" + struct.pack("<i", value)


def attributes(n: int) -> bytes:
    """An object that gets as many states, one attribute each."""
    return NAMESPACE + b"".join(b"}" + text(f"a{i}") + b"K\x01sb" for i in range(n))


def late_appends(n: int) -> bytes:
    """A list that has a state before it gets its elements."""
    return b"cmine\nList\n)\x81}" + text("x") + b"K\x01sb" + b"(K\x01e" * n


def late_entries(n: int) -> bytes:
    """A mapping that has a state before it gets its entries, one by one."""
    entries = b"".join(b"(" + text(f"k{i}") + b"K\x01u" for i in range(n))
    return b"cmine\nDict\n)\x81}" + text("x") + b"K\x01sb" + entries


def members(n: int) -> bytes:
    """A set that gets its members one by one."""
    return b"\x8f" + b"".join(b"(" + number(i) + b"\x90" for i in range(n))


def mappings(n: int) -> bytes:
    """Empty mappings, which are an entry each."""
    return b"(" + b"ccollections\nOrderedDict\n)R" * n + b"l"


def lists(n: int) -> bytes:
    """Empty lists."""
    return b"(" + b"]" * n + b"l"


def names(n: int) -> bytes:
    """Names of as many modules."""
    return b"(" + b"".join(b"cmine%x\nC\n" % i for i in range(n)) + b"l"


def streams(n: int) -> bytes:
    """Calls that unpickle a stream of their own."""
    inner = (torch_zip(b"\x80\x02" + number(i) + b".") for i in range(n))
    calls = (b"h\x00B" + struct.pack("<I", len(data)) + data + b"\x85R" for data in inner)
    return b"(ctorch.storage\n_load_from_bytes\nq\x000" + b"".join(calls) + b"l"


def tensors(n: int) -> bytes:
    """Tensors that share a storage."""
    return b"}(" + b"".join(text(f"layers.{i}.w") + FOUR for i in range(n)) + b"u"


GROWING = [
    attributes,
    late_appends,
    late_entries,
    members,
    mappings,
    lists,
    names,
    streams,
    tensors,
]


def saved(path: Path, opcodes: bytes) -> Path:
    """A file of ``torch.save`` that holds a tensor, and what the opcodes make."""
    body = b"\x80\x02}" + text("w") + FOUR + b"s" + text("o") + opcodes + b"s."
    path.write_bytes(torch_zip(body, **{"data/0": bytes(16)}))
    return path


@pytest.mark.parametrize("make", GROWING, ids=lambda make: make.__name__)
def test_the_work_grows_with_the_length_of_the_pickle(
    make: Callable[[int], bytes], tmp_path: Path
) -> None:
    few, many = (n_calls(saved(tmp_path / f"{n}.pt", make(n)), Level.HEADERS) for n in (250, 1000))
    assert many < 4.5 * few + 2000


def test_states_are_merged_in_place() -> None:
    """Each copy of a growing state would take as much memory as all before it together."""
    tracemalloc.start()
    try:
        load(b"\x80\x02" + attributes(3000) + b".", label="x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3_000_000


def test_merging_a_state_leaves_what_else_stands_for_the_first_one() -> None:
    shared = b"}" + text("a") + b"K\x01sq\x00"
    data = (
        b"\x80\x02"
        + NAMESPACE
        + shared
        + b"b}"
        + text("b")
        + b"K\x02sb}"
        + text("c")
        + b"K\x03sbh\x00\x86."
    )
    record, first = load(data, label="x")  # type: ignore[misc]
    assert record.state == {"a": 1, "b": 2, "c": 3}
    assert first == {"a": 1}


ARGUMENT = b"(" + b"".join(number(i) for i in range(3000)) + b"lq\x000"
PAIRS = b"(" + b"K\x01K\x02\x86" * 3000 + b"lq\x000"
STATE = b"}(" + b"".join(text(f"a{i}") + b"K\x01" for i in range(3000)) + b"uq\x000"
REPEATED = {
    "a set": (ARGUMENT, b"cbuiltins\nset\nh\x00\x85R0"),
    "a frozenset": (ARGUMENT, b"cbuiltins\nfrozenset\nh\x00\x85R0"),
    "an OrderedDict": (PAIRS, b"ccollections\nOrderedDict\nh\x00\x85R0"),
    "a size": (ARGUMENT, b"ctorch\nSize\nh\x00\x85R0"),
    "bytes": (
        text("x" * 9000) + b"q\x000",
        b"c_codecs\nencode\nh\x00" + text("latin1") + b"\x86R0",
    ),
    "a bytearray": (
        text("x" * 9000) + b"q\x000",
        b"cbuiltins\nbytearray\nh\x00" + text("latin1") + b"\x86R0",
    ),
    "a state": (STATE + NAMESPACE + b"}b", b"h\x00b"),
    "arguments": (b"(" + b"K\x01" * 3000 + b"tq\x000", b"cmine\nC\nh\x00R0"),
}
"""What is spelled out once, and what copies it."""


@pytest.mark.parametrize("case", REPEATED)
def test_what_is_copied_over_and_over_is_refused(case: str) -> None:
    spelled, copied = REPEATED[case]
    n = 2 * (1_000_000 + 2 * len(spelled)) // 3000
    with pytest.raises(UnsafeError, match="more objects than any genuine pickle of its length"):
        load(b"\x80\x02(" + spelled + copied * n + b"l.", label="x")
    load(b"\x80\x02(" + spelled + copied * 20 + b"l.", label="x")


@pytest.mark.parametrize(
    ("make", "n", "words"),
    [
        (names, LIMITS.max_names + 1, "names more than 10,000 classes and functions"),
        pytest.param(
            streams,
            LIMITS.max_streams + 1,
            "contains more than 10,000 nested pickles",
            marks=pytest.mark.long,
        ),
    ],
    ids=["names", "streams"],
)
def test_names_and_streams_have_a_limit_that_every_command_tells(
    make: Callable[[int], bytes], n: int, words: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "model.pt", make(n))
    with pytest.raises(UnsafeError, match=words):
        open_checkpoint(path)
    with pytest.raises(UnsafeError, match=words) as refused:
        run(Job(src=path, dst=tmp_path / "out", to="torch", fsync=False))
    assert refused.value.file == "model.pt"
    for level in (Level.METADATA, Level.HEADERS):
        assert any(words in finding.message for finding in validate(path, level=level).findings)


@pytest.mark.parametrize("make", [names, streams], ids=lambda make: make.__name__)
def test_as_many_as_the_limit_are_read(make: Callable[[int], bytes]) -> None:
    n = LIMITS.max_names - 1
    assert len(load(b"\x80\x02" + make(n) + b".", label="x")) == n  # type: ignore[arg-type]


@pytest.mark.long
def test_a_million_numbers_are_read_and_converted(tmp_path: Path) -> None:
    """As the state of a data loader has them; nothing about it is hostile."""
    path = saved(tmp_path / "model.pt", b"(" + b"".join(map(number, range(1_000_000))) + b"l")
    summary = summarize(open_checkpoint(path))
    assert summary.n_objects == 1
    assert summary.capabilities == ()
    assert any("too large to check" in note for note in summary.notes)
    assert not validate(path, level=Level.HEADERS).findings
    run(Job(src=path, dst=tmp_path / "out", to="torch", fsync=False))


def test_nested_streams_are_scanned_once_for_all_that_ask(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pt", streams(300))
    assert n_calls(path, Level.HEADERS, of=Machine.run) < 400


def test_a_pickle_is_read_once_for_its_tree_and_its_names(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pt", tensors(10))
    assert n_calls(path, Level.HEADERS, of=Machine.run) == 1


def test_other_pickles_of_a_zip_are_looked_at_as_well(tmp_path: Path) -> None:
    """Although what torch loads of it was read before."""
    path = tmp_path / "model.pt"
    call = b"\x80\x02cposix\nsystem\n" + text("x") + b"\x85R."
    body = b"\x80\x02}" + text("w") + FOUR + b"s."
    path.write_bytes(torch_zip(body, **{"data/0": bytes(16), "other.pkl": call}))
    codes = {finding.code for finding in validate(path, level=Level.HEADERS).findings}
    assert "CK601" in codes


def test_small_pickles_wait_for_no_garbage_collector() -> None:
    """A machine that refers to itself would stay until millions of objects later."""
    data = streams(2000)
    tracemalloc.start()
    try:
        uses_of_stream(MemoryStore({"x": b"\x80\x02" + data + b"."}), "x", 0, len(data) + 3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(data)


def test_a_late_state_that_hides_a_method_is_still_found() -> None:
    data = b"\x80\x02" + attributes(50) + b"}" + text("append") + b"cposix\nsystem\nsbK\x01a."
    uses = uses_of_stream(MemoryStore({"x": data}), "x", 0, len(data))
    assert any(use.how == "changed" for use in uses)
