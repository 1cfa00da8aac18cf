"""``ckpt inspect`` shows what a checkpoint says besides its tensors and objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import ones

from ckpt_cli.app import main
from tests.support.attributed import ENTRIES, SOURCES, make_state_dict

Run = Callable[..., str]

SHOWN: dict[str, dict[str, dict[str, Any]]] = {
    "safetensors": {"": {"modelspec.title": "x", "ss_network_dim": "4"}},
    "sharded": {"": {"run": "a"}, "model.safetensors.index.json": {"base": {"commit": "abc"}}},
    "zarr3": {
        "": {"step": 1200, "run": {"name": "a", "w": "w"}, "title": "w"},
        "sub": {"note": "n"},
        "w": {"scale": 0.5, "_ARRAY_DIMENSIONS": ["x"]},
    },
    "zarr2": {"": {"step": 3}, "w": {"scale": 0.5, "_ARRAY_DIMENSIONS": ["x"]}},
    "orbax_keys": {
        "k": {"random_key_impl": "threefry2x32"},
        "many": {"random_key_impl": "rbg"},
    },
    "orbax_step": {"": {"run": "a", "n": 4}, "_CHECKPOINT_METADATA": {"metrics": {"loss": 0.5}}},
}


def check_shown(run: Run, src: Path, by_path: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare the page, KEY, the JSON object and the report with the attributes by path."""
    fields = json.loads(run(src, "--json"))
    shown = dict(fields["attributes"])
    keys = {entry["key"] for entry in fields["tensors"]}
    assert not shown.keys() & keys
    shown |= {
        entry["key"]: entry["attributes"] for entry in fields["tensors"] if "attributes" in entry
    }
    assert shown.keys() == by_path.keys()
    page = run(src)
    for path, values in by_path.items():
        assert values.items() <= shown[path].items()
        detail = run(src, path) if path in keys else page
        for name, value in values.items():
            text = f"{name}: {value if isinstance(value, str) else json.dumps(value)}"
            assert text in page and text in detail
            entry = f"__attributes__.{path}.{name}" if path else f"__metadata__.{name}"
            selected = json.loads(run(src, entry, "--json"))["objects"]
            assert selected == [{"key": entry, "value": value}]
    report = src.parent / "report.html"
    assert main(["inspect", str(src), "--report", str(report)]) == 0
    assert all(name in report.read_text() for values in by_path.values() for name in values)


@pytest.mark.parametrize("source", SOURCES)
def test_attributes_are_shown(source: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    check_shown(run, SOURCES[source](tmp_path / "in"), SHOWN[source])


@pytest.mark.parametrize("source", ["torch", "dcp", "torch_dist"])
def test_attributes_in_entries_are_shown_too(source: str, run: Run, tmp_path: Path) -> None:
    src = make_state_dict(tmp_path / "in", source)
    check_shown(run, src, {"": ENTRIES["__metadata__"], **ENTRIES["__attributes__"]})


def test_long_and_many_attributes_are_counted(run: Run, tmp_path: Path) -> None:
    metadata = {f"ss_{number:02d}": "tag" * 100 for number in range(20)}
    save_file({"w": ones(2)}, tmp_path / "a.safetensors", metadata=metadata)
    page = run(tmp_path / "a.safetensors")
    assert "… 14 more" in page and len(page) < 2000
    assert metadata["ss_19"] in run(tmp_path / "a.safetensors", "__metadata__.ss_19")


def test_a_checkpoint_without_attributes_has_no_line_of_them(run: Run, tmp_path: Path) -> None:
    save_file({"w": ones(2)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    assert "metadata" not in run(tmp_path / "a.safetensors")
    fields = json.loads(run(tmp_path / "a.safetensors", "--json"))
    assert fields["attributes"] == {} and "attributes" not in fields["tensors"][0]
