"""What weights_only refuses is stored below a reserved key of a torch file, and comes back."""

from __future__ import annotations

import argparse
import collections
import enum
import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint

from core.errors import CorruptError, UnsupportedError
from core.formats.torch.format import lay_out
from core.formats.torch.weights_only import ASIDE_KEY, ROOT_KEY
from core.pickle.inert import Inert
from core.pickle.plain import to_plain
from tests.formats.torch.torch_samples import assert_same, filled, loads, opened, rewritten, saved


class Colour(enum.Enum):
    RED = 1


class Thing:
    """A class that torch does not know."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and list(self.__dict__) == list(other.__dict__)


def refused() -> dict[str, Any]:
    """A state dict that weights_only refuses at many places."""
    moments: Any = collections.defaultdict(dict)
    moments[0] = {"exp_avg": filled(torch.float32, 3)}
    moments["late"] = argparse.Namespace(deep=filled(torch.int8, 2))
    shared = argparse.Namespace(lr=0.1, kinds=[Colour.RED, signal()])
    return {
        "args": shared,
        "model": collections.OrderedDict(w=filled(torch.float32, 2, 2), thing=Thing(a=1)),
        "again": [shared, {"x": filled(torch.int8, 5)}, (np.arange(3), filled(torch.int8, 6)), 7],
        "optimizer": {"state": moments, "group": [{"lr": np.float64(0.5)}]},
        "seed": (3, np.array([1, 2], dtype=np.uint32)),
        "kinds": frozenset({1, 2}),
        "end": 5,
        ("key", frozenset({1})): "odd key",
    }


def signal() -> object:
    import signal

    return signal.SIGTERM


def skeleton_of(data: bytes) -> object:
    return to_plain(opened(data)[0].skeleton)


def test_what_weights_only_refuses_is_set_aside_and_comes_back(tmp_path: Path) -> None:
    data = saved(refused())
    with pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(data))
    new = rewritten(data)
    for loaded in loads(new, tmp_path / "new.pt"):
        assert list(loaded) == ["model", "again", "optimizer", "end", ASIDE_KEY]
        assert_same(loaded["model"], collections.OrderedDict(w=filled(torch.float32, 2, 2)))
        assert_same(loaded["again"][1], {"x": filled(torch.int8, 5)})
        assert_same(loaded["optimizer"]["state"], {0: {"exp_avg": filled(torch.float32, 3)}})
        entries = loaded[ASIDE_KEY]["entries"]
        assert entries[0]["path"] == ["args"]
        assert entries[0]["value"]["state"]["lr"] == 0.1
    assert skeleton_of(new) == skeleton_of(data)
    assert list(opened(new)[0].tensors) == list(opened(data)[0].tensors)
    assert rewritten(new) == new


@pytest.mark.parametrize(
    "root",
    [
        argparse.Namespace(a=1, t=filled(torch.int8, 3)),
        [filled(torch.int8, 3), argparse.Namespace(a=1), {"b": Thing()}],
        (filled(torch.int8, 3), {"n": np.arange(4)}),
        collections.OrderedDict(a=Thing(x=1), t=filled(torch.int8, 3)),
        collections.defaultdict(list, a=Thing(x=1), t=filled(torch.int8, 3)),
        collections.defaultdict(dict, t=filled(torch.int8, 3)),
        np.arange(3),
    ],
)
def test_any_root_is_set_aside_and_comes_back(root: object, tmp_path: Path) -> None:
    data = saved(root)
    new = rewritten(data)
    assert skeleton_of(new) == skeleton_of(data)
    for loaded in loads(new, tmp_path / "new.pt"):
        assert ASIDE_KEY in loaded
        assert (ROOT_KEY in loaded) == isinstance(root, (list, tuple))


@pytest.mark.parametrize(
    "entries",
    [
        3,
        [{"path": [[]]}],
        [{"path": [["x"]], "value": 1}],
        [{"path": ["b", "c"], "value": 1}],
        [{"path": ["a", 7], "value": 1}],
        [{"path": [], "value": {"$tuple": 3}}],
    ],
)
def test_a_malformed_reserved_entry_is_an_error_of_ours(entries: object) -> None:
    for note in (
        entries,
        {"entries": entries},
        {"version": 2, "entries": []},
        {"version": 1, "entries": entries},
    ):
        with pytest.raises(CorruptError):
            opened(saved({"a": [1, {}], "b": 5, ASIDE_KEY: note}))


def test_a_reserved_key_of_somebody_else_is_not_overwritten() -> None:
    catalog = replace(
        opened(saved({"a": argparse.Namespace()}))[0],
        skeleton={"a": Inert("newobj", 1), ASIDE_KEY: 3},
    )
    with pytest.raises(UnsupportedError, match="reserved key"):
        lay_out(catalog)
