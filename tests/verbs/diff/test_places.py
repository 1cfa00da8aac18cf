"""core.verbs.diff.places: the same tensor under other keys, or in another place, is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.verbs.convert.run import Job, run
from core.verbs.diff.result import Diff
from core.verbs.diff.run import DiffJob, diff

FORMATS = {"dcp": "", "orbax": "", "zarr3": "", "zarr": "", "torch_dist": "", "safetensors": ".st"}


def compare(tmp_path: Path, a: object, b: object) -> Diff:
    for name, state in (("a.pt", a), ("b.pt", b)):
        torch.save(state, tmp_path / name)
    return diff(DiffJob(a=tmp_path / "a.pt", b=tmp_path / "b.pt"))


def list_places(state: object, path: tuple[object, ...] = ()) -> set[tuple[object, ...]]:
    if isinstance(state, dict):
        return {place for key, item in state.items() for place in list_places(item, (*path, key))}
    if isinstance(state, list):
        return {
            place
            for index, item in enumerate(state)
            for place in list_places(item, (*path, f"[{index}]"))
        }
    return {path}


ONE, TWO = torch.ones(1), torch.full((1,), 2.0)
STATES: dict[str, dict[str, Any]] = {
    "a number beside its text": {"mix": {1: ONE, "1": TWO}},
    "a text beside its number": {"mix": {"1": ONE, 1: TWO}},
    "states of both": {"opt": {"state": {0: {"m": ONE}, "0": {"m": TWO}}}},
    "other types": {"a": {True: ONE, "True": TWO, 2.5: ONE}},
    "a dot": {"a": {"x": [ONE, TWO]}, "a.x": {"0": TWO}},
    "integers": {"opt": {"state": {0: {"m": ONE}, 7: {"m": TWO}}}},
    "dicts": {"a": {"b": ONE}, "w": TWO},
    "lists": {"a": [ONE, {"b": TWO}]},
    "flat": {"a.b": ONE, "w": TWO},
}


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "to"),
    [
        (name, to)
        for name in STATES
        for to in FORMATS
        # A key with an escaped dot cannot be a directory's name.
        if name != "a dot" or to in ("dcp", "torch_dist", "safetensors")
    ],
)
def test_what_a_format_made_of_the_places_is_named_there_and_back(
    name: str, to: str, tmp_path: Path
) -> None:
    source, between, back = tmp_path / "a.pt", tmp_path / f"b{FORMATS[to]}", tmp_path / "c.pt"
    torch.save(STATES[name], source)
    run(Job(src=source, dst=between, to=to, fsync=False))
    run(Job(src=between, dst=back, to="torch", fsync=False))
    places = list_places(STATES[name])
    is_same = list_places(torch.load(back)) == places
    has_collision = any(
        ".".join(str(key).strip("[]") for key in place) == ".".join(str(k) for k in other)
        for place in places
        for other in places
        if place != other
    )
    for b in (between, back):
        result = diff(DiffJob(a=source, b=b))
        assert not [tensor for tensor in result.tensors if not tensor.is_same]
        is_named = any("at [" in str(entry.a) or "key " in str(entry.a) for entry in result.entries)
        is_noted = any("different keys or nesting" in note for note in result.notes)
        assert (is_named or is_noted) != is_same, (result.entries, result.notes)
        # A tensor that got another name is a difference, also in a format without dicts.
        assert not has_collision or not result.same


def test_both_places_are_shown_as_keys(tmp_path: Path) -> None:
    a = {"mix": {1: ONE, "1": TWO}}
    result = compare(tmp_path, a, {"mix": {"1": ONE}, "mix.1~2": TWO})
    assert [(entry.path, entry.a, entry.b) for entry in result.entries] == [
        ("mix.1", "key 1 (int)", "key '1' (str)"),
        ("mix.1~2", "at ['mix']['1']", "at ['mix.1~2']"),
    ]
    assert not result.same


def test_another_nesting_under_the_same_names_is_noted(tmp_path: Path) -> None:
    result = compare(tmp_path, {"a": {"b": ONE, "c": [TWO]}}, {"a.b": ONE, "a": {"c": {"0": TWO}}})
    assert result.same
    (note,) = result.notes
    assert note == (
        "2 entries have different keys or nesting under the same name: a.b is ['a']['b'] in A "
        "and ['a.b'] in B"
    )
    assert not compare(tmp_path, {"a": {"b": ONE}}, {"a": {"b": ONE}}).notes


def test_values_that_are_not_tensors_have_places_too(tmp_path: Path) -> None:
    state = {"w": ONE, "n": {1: "x", "1": "y"}}
    result = compare(tmp_path, state, {"w": ONE, "n": {"1": "x"}, "n.1~2": "y"})
    assert ("n.1~2", "at ['n']['1']", "at ['n.1~2']") in [
        (entry.path, entry.a, entry.b) for entry in result.entries
    ]


def test_names_that_look_like_a_collision_s_are_names(tmp_path: Path) -> None:
    state = {"a~2": ONE, "a": TWO, r"b\.c": ONE}
    torch.save(state, tmp_path / "a.pt")
    run(Job(src=tmp_path / "a.pt", dst=tmp_path / "dcp", to="dcp", fsync=False))
    result = diff(DiffJob(a=tmp_path / "a.pt", b=tmp_path / "dcp"))
    assert result.same and not result.notes
