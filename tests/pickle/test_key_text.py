"""Keys of dicts that are objects: the names of what stands below them, and what formats, notes and
diff make of it.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import pathlib
import pickle
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from core.errors import UnsupportedError
from core.files.store import MemoryStore
from core.formats.registry import formats
from core.formats.torch.tree import parse
from core.formats.torch.weights_only import ASIDE_KEY
from core.pickle.inert import Inert
from core.pickle.key_text import describe_key, faithful_text
from core.pickle.reader import load
from core.verbs.convert.run import Job, run
from tests.support.trees import differences
from tests.verbs.diff.test_run import compare

Point = collections.namedtuple("Point", "x y")


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Plain:
    """An object whose identity is its key."""


def inert(key: object) -> object:
    """A key as it is read from a pickle."""
    return load(pickle.dumps(key, 2), label="key")


NUMBERS = [
    *(
        getattr(np, kind)(value)
        for kind in ("int8", "int16", "int32", "int64")
        for value in (-3, 0, 100)
    ),
    *(getattr(np, kind)(200) for kind in ("uint8", "uint16", "uint32", "uint64")),
    *(
        getattr(np, kind)(value)
        for kind in ("float16", "float32", "float64")
        for value in (0.1, 3.0, -1e-5, 65504)
    ),
    np.bool_(True),
    np.bool_(False),
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{type(number).__name__} {number}")
def test_a_numpy_scalar_has_the_text_of_its_value(number: Any) -> None:
    text = faithful_text(inert(number))
    assert text is not None
    assert type(number)(text == "True" if isinstance(number, np.bool_) else text) == number
    assert text == str(number.item()) or (number.dtype.itemsize < 8 and number.dtype.kind == "f")


def test_a_numpy_scalar_of_the_other_byte_order_has_the_same_text() -> None:
    kind = np.dtype(">i4")
    key = Inert("reduce", inert(np.int32(1)).fn, (inert(kind), (3).to_bytes(4, "big")))  # type: ignore[attr-defined]
    assert faithful_text(key) == "3"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (np.str_("exp"), "exp"),
        (Point(1, "a"), "Point(1, 'a')"),
        (Point(np.int64(1), None), "Point(1, None)"),
        (fractions.Fraction(1, 3), ("Fraction(1, 3)", "Fraction('1/3')")),
        (decimal.Decimal("1.50"), "Decimal('1.50')"),
        (pathlib.PurePosixPath("a/b"), "PurePosixPath('a', 'b')"),
        ((1, np.int64(2)), "(1, 2)"),
        ((np.int64(2),), "(2,)"),
        ((1, "a"), "(1, 'a')"),
        # Its own text depends on the hash seed, and an id must not: pytest's processes compare
        # them.
        pytest.param(frozenset({"b", "a"}), "frozenset({'a', 'b'})", id="frozenset"),
        (torch.float16, "torch.float16"),
        ("a.b", "a.b"),
        (7, "7"),
        (None, "None"),
    ],
    ids=str,
)
def test_a_key_with_a_value_has_its_text(key: object, text: str | tuple[str, ...]) -> None:
    assert faithful_text(inert(key)) in ((text,) if isinstance(text, str) else text)


def test_members_of_an_enumeration_have_different_texts() -> None:
    texts = [faithful_text(inert(member)) for member in Color]
    assert all(text is not None and "Color" in text for text in texts)
    assert len(set(texts)) == 2


@pytest.mark.parametrize(
    "key",
    [
        Plain(),
        object(),
        np.complex64(1j),
        np.datetime64("2026-01-01"),
        datetime.date(2026, 1, 1),
        (1, Plain()),
    ],
    ids=lambda key: type(key).__name__,
)
def test_a_key_without_a_faithful_text_is_called_by_its_class(key: object) -> None:
    read = inert(key)
    assert faithful_text(read) is None
    assert describe_key(read).startswith("<") and describe_key(read).endswith(">")


def test_the_text_of_a_hostile_key_is_short_work() -> None:
    scalar = inert(np.int64(1))
    assert isinstance(scalar, Inert)
    deep: object = 1
    for _ in range(100):
        deep = Inert("reduce", scalar.fn, (deep, deep))
        assert faithful_text(deep) is None
    assert (
        faithful_text(Inert("reduce", inert(Point), (1 << 100_000,))) is None
    )  # more digits than Python prints
    assert faithful_text(Inert("reduce", inert(Point), tuple(range(1000)))) is None


def numbers(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32)


def saved(state: object, path: Path) -> Path:
    torch.save(state, path)
    return path


def converted(source: Path, dst: Path, to: str, **options: Any) -> list[str]:
    """The notes of a conversion."""
    return list(run(Job(src=source, dst=dst, to=to, fsync=False, **options)).notes)


FLAT = ("safetensors", "dcp", "torch_dist", "orbax", "zarr", "zarr3", "deepspeed_universal")


@pytest.mark.parametrize("to", FLAT)
def test_names_have_the_values_of_the_keys_and_a_note_says_that_types_are_gone(
    to: str, tmp_path: Path
) -> None:
    state = {
        "proto": {
            np.int64(3): numbers(2),
            np.int64(7): numbers(3),
            Color.RED: numbers(4),
            Point(1, 2): numbers(5),
        }
    }
    notes = converted(saved(state, tmp_path / "x.pt"), tmp_path / "out", to)
    (note,) = [
        note for note in notes if note.startswith("non-string keys are converted to strings: ")
    ]
    red = describe_key(inert(Color.RED))
    assert note.split(": ")[1] == f"proto.3, proto.7, proto.{red}, proto.Point(1, 2)"
    if to == "safetensors":
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        assert {key: len(tensor) for key, tensor in tensors.items()} == {
            "proto.3": 2, "proto.7": 3, f"proto.{red}": 4, "proto.Point(1, 2)": 5
        }  # fmt: skip


@pytest.mark.parametrize("to", ["dcp", "deepspeed_universal"])
def test_a_note_is_there_with_objects_too(to: str, tmp_path: Path) -> None:
    state = {"proto": {np.int64(3): numbers(2)}, "step": 5}
    notes = converted(saved(state, tmp_path / "x.pt"), tmp_path / "out", to)
    assert any(
        note.startswith("non-string keys are converted to strings: proto.3") for note in notes
    )


def test_a_torch_file_keeps_the_keys(tmp_path: Path) -> None:
    state = {"proto": {np.int64(3): numbers(2), Color.RED: numbers(3), Point(1, 2): 5, Plain: 6}}
    notes = converted(saved(state, tmp_path / "x.pt"), tmp_path / "y.pt", "torch")
    assert not differences(state, torch.load(tmp_path / "y.pt", weights_only=False))
    assert not any("become strings" in note for note in notes)
    (note,) = notes
    assert "proto.3 (its key is a numpy scalar)" in note and "TensorLeaf" not in note


def test_keys_that_weights_only_refuses_are_set_aside_by_their_names(tmp_path: Path) -> None:
    source = saved({"proto": {np.int64(3): numbers(2), "w": numbers(1)}}, tmp_path / "x.pt")
    (note,) = converted(source, tmp_path / "y.pt", "torch", weights_only=True)
    assert "proto.3 (its key is a numpy scalar)" in note
    assert ASIDE_KEY in torch.load(tmp_path / "y.pt")
    assert not differences(
        *(
            parse(MemoryStore({"x": path.read_bytes()}), "x").arrays.keys()
            for path in (source, tmp_path / "y.pt")
        )
    )


def test_diff_compares_the_values_of_keys(tmp_path: Path) -> None:
    first = saved({"proto": {np.int64(3): numbers(2), np.int64(7): numbers(2)}}, tmp_path / "a.pt")
    other = saved({"proto": {np.int64(5): numbers(2), np.int64(9): numbers(2)}}, tmp_path / "b.pt")
    assert not compare(first, other).same
    assert compare(
        first,
        saved({"proto": {np.int64(3): numbers(2), np.int64(7): numbers(2)}}, tmp_path / "c.pt"),
    ).same


def test_diff_compares_dicts_inside_of_objects_by_the_values_of_their_keys(tmp_path: Path) -> None:
    def state(*keys: object) -> dict[str, object]:
        return {"w": numbers(2), "history": [collections.deque([dict.fromkeys(keys, 1)])]}

    first = saved(state(np.int64(3), Color.RED), tmp_path / "a.pt")
    assert compare(first, saved(state(np.int64(3), Color.RED), tmp_path / "b.pt")).same
    assert not compare(first, saved(state(np.int64(4), Color.RED), tmp_path / "c.pt")).same


@pytest.mark.each_value
@pytest.mark.parametrize("to", FLAT)
@pytest.mark.parametrize(
    ("state", "where", "message", "glob"),
    [
        (
            {"w": numbers(1), "proto": {Plain(): numbers(2), Plain(): numbers(3)}},
            "proto",
            "Plain",
            "proto",
        ),
        (
            {"w": numbers(1), "m": {"state": {torch.ones(1): {"step": numbers(1)}}}},
            "m.state",
            "tensor",
            "m.state",
        ),
        ({"w": numbers(1), object(): numbers(2)}, "at the root", "builtins.object", "<*"),
    ],
    ids=["of a class", "tensor", "root"],
)
def test_a_key_without_a_text_is_refused_by_name(
    state: object, where: str, message: str, glob: str, to: str, tmp_path: Path
) -> None:
    source = saved(state, tmp_path / "x.pt")
    with pytest.raises(UnsupportedError, match=f"the dict {where} has objects as keys") as caught:
        converted(source, tmp_path / "out", to)
    assert caught.value.file == str(source) and message in caught.value.message
    assert (
        caught.value.hint is not None
        and "--to torch" in caught.value.hint
        and shlex.quote(glob) in caught.value.hint
    )
    converted(source, tmp_path / "out", to, exclude=(glob,))
    converted(source, tmp_path / "y.pt", "torch")


def test_an_object_below_such_a_key_stays_in_a_common_state(tmp_path: Path) -> None:
    source = saved({"w": numbers(1), "table": {Plain(): 5}}, tmp_path / "x.pt")
    converted(source, tmp_path / "out", "torch_dist")
    converted(tmp_path / "out", tmp_path / "y.pt", "torch")


def test_keys_that_are_no_names_of_directories_are_listed_as_they_are_typed(tmp_path: Path) -> None:
    state: dict[str, object] = {"a": numbers(1), "a/b": numbers(1), "c\\d[0]": numbers(2)}
    source = saved(state, tmp_path / "x.pt")
    for to in ("zarr", "zarr3", "deepspeed_universal"):
        with pytest.raises(UnsupportedError, match=r"nor can c\\d\[0\]") as caught:
            converted(source, tmp_path / "out", to)
        assert caught.value.key == "a/b"
        assert (
            caught.value.hint == r"rename them with --rename '^a/b$=NEW' --rename '^c\\d\[0\]$=NEW'"
        )
        converted(source, tmp_path / to, to, rename=(("^a/b$", "x"), (r"^c\\d\[0\]$", "y")))
    state |= {f"x/{number}/": numbers(1) for number in range(20)}
    with pytest.raises(UnsupportedError, match="and 14 more") as caught:
        converted(saved(state, tmp_path / "x.pt"), tmp_path / "out", "zarr3")
    assert caught.value.hint is not None and caught.value.hint.endswith("and 14 more")


def test_every_format_that_is_written_was_tried() -> None:
    names = {format.name for format in formats() if format.lay_out is not None}
    assert names == {*FLAT, "torch", "megatron"}
