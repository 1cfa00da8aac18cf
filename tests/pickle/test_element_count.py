"""Values are counted before any of them is created."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from core.pickle.element_count import Elements, count_elements
from core.pickle.inert import count_values
from core.pickle.reader import load_next

VALUES: dict[str, Any] = {
    "numbers": [1, 300, 70_000, -1, 10**30, 10**700, 1.5, True, None],
    "texts": ["a", "é" * 300, b"x" * 300, bytearray(b"1")],
    "nested": {"a": [[], [1], {}], "b": {3: 4}, "c": {5, 6}, "d": frozenset((7,))},
    "many": [{"step": number, "loss": number * 0.1} for number in range(3000)],
    "shared": [["x"]] * 2500,
    "empty": [],
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", VALUES)
def test_the_count_is_that_of_the_tree(name: str, protocol: int) -> None:
    data = b"before" + pickle.dumps(VALUES[name], protocol) + b"behind"
    tree, _ = load_next(data, 6, label="x")
    if name == "shared":  # counted wherever they are put
        assert count_elements(data, 6).n >= 2500
    else:
        assert count_elements(data, 6).n == count_values(tree)


@pytest.mark.parametrize("protocol", range(6))
def test_calls_and_their_arguments_do_not_count(protocol: int) -> None:
    value = {"a": OrderedDict(x=1), "b": range(3), "c": complex(1, 2), "d": Path("e")}
    assert count_elements(pickle.dumps(value, protocol)).n <= 2 * 4 + 2 + 3


def test_a_pickle_that_breaks_off_is_counted_up_to_there() -> None:
    data = pickle.dumps(list(range(5000)), 2)
    counts = [count_elements(data[:length]).n for length in range(0, len(data), 97)]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 4000
    for data in (b"\x80\x02\xff", b"", b"(((ue."):
        assert count_elements(data) == Elements(0, 0, 0)
