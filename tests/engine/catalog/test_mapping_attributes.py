"""Attributes of OrderedDicts and of dicts of the user's own classes: kept by torch files, told
where left out.
"""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import torch

from core.verbs.convert.job import Report
from core.verbs.convert.run import Job, run
from tests.support.trees import differences
from tests.verbs.diff.test_run import compare

FLAT = ("safetensors", "dcp", "torch_dist", "zarr", "zarr3", "deepspeed_universal")


class Table(dict[str, object]):
    """A dict of the user's own."""


class Slotted(dict[str, object]):
    __slots__ = ("__dict__", "mean")


class MadeOf(dict[str, object]):
    """A dict that is made of a tensor."""

    def __init__(self, base: torch.Tensor) -> None:
        super().__init__()
        self.base = base

    def __reduce__(self) -> Any:
        return MadeOf, (self.base,), None, None, iter(self.items())


def numbers(n: int, start: int = 0) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32) + start


def mapping(kind: type, entries: dict[str, object], **attributes: object) -> Any:
    instance = kind(entries)
    for name, value in attributes.items():
        setattr(instance, name, value)
    return instance


def saved(state: object, path: Path) -> Path:
    torch.save(state, path)
    return path


def converted(source: Path, dst: Path, to: str, **options: Any) -> Report:
    return run(Job(src=source, dst=dst, to=to, fsync=False, **options))


def split_attribute_lines(report: Report) -> tuple[str, str]:
    """What is said of attributes without tensors, and what of those with tensors."""
    assert not any("attributes" in note for note in report.notes)
    lines = [line for line in report.dropped if "attribute" in line]
    lines += [line for line in report.dropped if "(module versions" in line]
    plain = [line for line in lines if "a tensor in" not in line]
    return "\n".join(plain), "\n".join(line for line in lines if line not in plain)


KINDS = [collections.OrderedDict, Table, Slotted]


@pytest.mark.each_value
@pytest.mark.parametrize("to", FLAT)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_root", [False, True])
def test_attributes_are_told_where_tensors_have_their_paths_as_names(
    is_root: bool, kind: type, to: str, tmp_path: Path
) -> None:
    inner = mapping(kind, {"w": numbers(2)}, ema=numbers(3), queue=[numbers(1)], title="x")
    report = converted(
        saved(inner if is_root else {"m": inner}, tmp_path / "x.pt"), tmp_path / "out", to
    )
    before = "" if is_root else "m."
    note, dropped = split_attribute_lines(report)
    assert note == f"attributes of mappings: {before}title"
    assert f"{before}ema (" in dropped and f"{before}queue (" in dropped


@pytest.mark.parametrize("to", ["safetensors", "zarr3"])
def test_attributes_are_kept_where_the_nesting_is_described_beside_the_tensors(
    to: str, tmp_path: Path
) -> None:
    state = {
        "m": mapping(collections.OrderedDict, {"w": numbers(2)}, ema=numbers(3), title="x"),
        "step": 5,
    }
    report = converted(saved(state, tmp_path / "x.pt"), tmp_path / "out", to)
    assert split_attribute_lines(report) == ("", "")
    converted(tmp_path / "out", tmp_path / "y.pt", "torch")
    assert not differences(state, torch.load(tmp_path / "y.pt"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"weights_only": True}, {"exclude": ("x",)}])
def test_a_torch_file_keeps_attributes(options: dict[str, Any], kind: type, tmp_path: Path) -> None:
    state = {"m": mapping(kind, {"w": numbers(2)}, ema=numbers(3), title="x"), "x": 5}
    converted(saved(state, tmp_path / "x.pt"), tmp_path / "y.pt", "torch", **options)
    converted(tmp_path / "y.pt", tmp_path / "z.pt", "torch")
    if options.get("weights_only") and kind is not collections.OrderedDict:
        return  # set aside
    result = torch.load(tmp_path / "z.pt", weights_only=False)
    assert not differences({"m": state["m"]}, {"m": result["m"]})
    assert torch.equal(result["m"].ema, numbers(3))


def test_a_torch_file_under_new_names_tells_what_is_left_out(tmp_path: Path) -> None:
    state = {"m": mapping(collections.OrderedDict, {"w": numbers(2)}, ema=numbers(3), title="x")}
    report = converted(
        saved(state, tmp_path / "x.pt"), tmp_path / "y.pt", "torch", rename=(("^m", "n"),)
    )
    assert "attributes of mappings: m.ema, m.title" in report.dropped
    assert torch.equal(torch.load(tmp_path / "y.pt")["n.w"], numbers(2))


def test_entries_that_are_left_out_take_the_attributes_of_their_mapping_along(
    tmp_path: Path,
) -> None:
    state = {
        "m": mapping(collections.OrderedDict, {"w": numbers(2)}, ema=numbers(3)),
        "v": numbers(1),
    }
    report = converted(saved(state, tmp_path / "x.pt"), tmp_path / "y.pt", "torch", exclude=("m",))
    assert "attributes of mappings: m.ema" in report.dropped


@pytest.mark.parametrize("to", FLAT)
def test_tensors_of_which_a_mapping_is_made_are_told(to: str, tmp_path: Path) -> None:
    state = {"m": MadeOf(numbers(3)), "v": numbers(1)}
    state["m"]["w"] = numbers(2)  # type: ignore[index]
    report = converted(saved(state, tmp_path / "x.pt"), tmp_path / "out", to)
    assert "m.arguments (" in split_attribute_lines(report)[1]


def test_a_common_state_keeps_the_attributes_of_mappings_without_tensors(tmp_path: Path) -> None:
    state = {"w": numbers(2), "settings": mapping(collections.OrderedDict, {"a": 1}, source="file")}
    report = converted(saved(state, tmp_path / "x.pt"), tmp_path / "out", "torch_dist")
    assert split_attribute_lines(report) == ("", "")
    converted(tmp_path / "out", tmp_path / "y.pt", "torch")
    assert torch.load(tmp_path / "y.pt")["settings"].source == "file"


def test_a_state_dict_of_torch_tells_that_its_versions_are_left_out(tmp_path: Path) -> None:
    source = saved({"model": torch.nn.BatchNorm1d(2).state_dict()}, tmp_path / "x.pt")
    for to in FLAT:
        report = converted(source, tmp_path / to, to)
        assert split_attribute_lines(report) == (
            "model._metadata (module versions, which torch recreates)",
            "",
        )


def test_every_attribute_is_listed(tmp_path: Path) -> None:
    names = [f"a{number}" for number in range(20)]
    state = mapping(collections.OrderedDict, {"w": numbers(2)}, **dict.fromkeys(names, 1))
    report = converted(saved(state, tmp_path / "x.pt"), tmp_path / "out", "zarr")
    assert split_attribute_lines(report)[0] == f"attributes of mappings: {', '.join(names)}"
    (reason,) = [item for item in report.dropped_reasons if "attributes" in item.reason]
    assert reason.n_entries == 20


def test_diff_compares_attributes_but_the_versions_of_modules(tmp_path: Path) -> None:
    def state(**attributes: object) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.pt"
        return saved({"m": mapping(collections.OrderedDict, {"w": numbers(2)}, **attributes)}, path)

    assert compare(state(ema=numbers(3), title="x"), state(ema=numbers(3), title="x")).same
    assert not compare(state(ema=numbers(3)), state(ema=numbers(3, start=1))).same
    assert not compare(state(ema=numbers(3)), state()).same
    assert not compare(state(title="x"), state(title="y")).same
    assert compare(state(_metadata={"": {"version": 1}}), state()).same
