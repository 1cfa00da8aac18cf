"""What a checkpoint says besides its tensors and objects arrives, or is listed as not carried."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
import torch
import torch.distributed.checkpoint as dcp
import zarr
from safetensors import safe_open
from safetensors.torch import save_file

from core.engine.catalog.attributes import collect_attributes, turn_into_attributes
from core.errors import UsageError
from core.opening.objects import loaded
from core.opening.open import open_checkpoint
from core.verbs.convert.job import Report
from core.verbs.convert.run import Job, run
from core.verbs.diff.run import DiffJob, diff
from core.verbs.merge.request import Merge
from tests.support.attributed import (
    ENTRIES,
    SOURCES,
    WEIGHTS,
    make_file,
    make_keys,
    make_sharded,
    make_state_dict,
    make_step,
    make_zarr3,
)

Found = dict[str, dict[str, Any]]
TARGETS = {
    "torch": "out.pt",
    "dcp": "out",
    "safetensors": "out",
    "safetensors file": "out.safetensors",
    "zarr3": "out",
    "orbax": "out",
    "torch_dist": "out",
    "zarr": "out",
    "deepspeed_universal": "out",
}


def read_attributes(path: Path) -> Found:
    """Return all attributes of a checkpoint, also those that are entries of its state dict."""
    checkpoint = open_checkpoint(path)
    catalog = turn_into_attributes(loaded(checkpoint.catalog, checkpoint.store))
    by_path = {key: dict(values) for key, values in collect_attributes(catalog).items()}
    for name in ("__metadata__", "__attributes__"):
        value = (catalog.common or {}).get(name)
        if isinstance(value, dict):
            by_path |= value if name == "__attributes__" else {"": value}
    checkpoint.store.close()
    by_path.get("", {}).pop("format", None)
    return {key: values for key, values in by_path.items() if values}


def listed(report: Report) -> str:
    return "\n".join(report.dropped)


@pytest.mark.each_value
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_attribute_arrives_or_is_listed(source: str, target: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    src = SOURCES[source](tmp_path / "in")
    before = read_attributes(src)
    assert before
    rename = (("/", "."),) if (source, target) == ("zarr3", "deepspeed_universal") else ()
    job = Job(src=src, dst=tmp_path / TARGETS[target], to=target.partition(" ")[0], rename=rename)
    report = run(job)
    after = read_attributes(tmp_path / TARGETS[target])
    for path, values in before.items():
        for name, value in values.items():
            label = f"{path}.{name}" if path else name
            if after.get(path, {}).get(name) != value:
                assert label in listed(report), (path, name, value)


@pytest.mark.each_value
@pytest.mark.parametrize("between", ["torch", "dcp", "safetensors", "zarr3", "orbax"])
@pytest.mark.parametrize("source", SOURCES)
def test_attributes_come_back_from_every_format_that_holds_them(
    source: str, between: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    src = SOURCES[source](tmp_path / "in")
    first = tmp_path / f"between{'.pt' if between == 'torch' else ''}"
    kind = open_checkpoint(src).format.name
    to = "zarr3" if kind == "zarr" else kind
    back = tmp_path / ("back.safetensors" if source == "safetensors" else "back")
    for report in (run(Job(src=src, dst=first, to=between)), run(Job(src=first, dst=back, to=to))):
        assert "metadata and attributes" not in listed(report) and "__" not in listed(report)
    assert read_attributes(back) == read_attributes(src)


def test_other_readers_see_the_attributes_where_they_belong(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    lora, group = make_file(tmp_path / "a"), make_zarr3(tmp_path / "a")
    out = tmp_path / "out.pt"
    report = run(Job(src=lora, dst=out, to="torch"))
    state = torch.load(out, weights_only=True)
    assert state["__metadata__"] == {"ss_network_dim": "4", "modelspec.title": "x"}
    assert any("state_dict.pop('__metadata__')" in note for note in report.notes)

    run(Job(src=group, dst=tmp_path / "dcp", to="dcp"))
    wanted: dict[str, Any] = {"__metadata__": {}, "__attributes__": {}}
    dcp.load(wanted, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert wanted["__metadata__"] == {"step": 1200, "run": {"name": "a", "w": "w"}, "title": "w"}
    assert wanted["__attributes__"]["w"] == {"scale": 0.5, "_ARRAY_DIMENSIONS": ["x"]}

    run(Job(src=tmp_path / "dcp", dst=tmp_path / "z", to="zarr3"))
    written = zarr.open_group(tmp_path / "z", mode="r")
    assert written.attrs["step"] == 1200 and written["w"].attrs["scale"] == 0.5
    assert written["w"].metadata.dimension_names == ("x",)

    run(Job(src=group, dst=tmp_path / "z.safetensors", to="safetensors"))
    with safe_open(tmp_path / "z.safetensors", "pt") as file:
        metadata = file.metadata()
        # The name of a tensor would make an alias of it.
        assert set(file.keys()) == {"w", "sub/v"} and "title" not in metadata
    assert json.loads(metadata["ckpt.attributes"])[""]["title"] == "w"


def test_the_index_keeps_its_metadata(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    src = make_sharded(tmp_path / "in")
    run(Job(src=src, dst=tmp_path / "out", max_shard_size=32))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 44, "base": {"commit": "abc"}}


def test_a_typed_key_has_all_that_orbax_asks_for(tmp_path: Path) -> None:
    """orbax_restore.py restores such a checkpoint with Orbax."""
    src = make_keys(tmp_path)
    for out in (tmp_path / "out", tmp_path / "again"):
        run(Job(src=src, dst=out, to="orbax"))
        rows = json.loads((out / "array_metadatas/process_0").read_text())["array_metadatas"]
        kinds = {
            row["array_metadata"]["param_name"]: row["array_metadata"]["ext_metadata"]
            for row in rows
        }
        assert kinds == {
            "k": {"random_key_impl": "threefry2x32"},
            "many": {"random_key_impl": "rbg"},
        }
        tree = json.loads((out / "_METADATA").read_text())["tree_metadata"]
        types = {name: row["value_metadata"]["value_type"] for name, row in tree.items()}
        assert types == {"('k',)": "jax.Array", "('many',)": "jax.Array", "('w',)": "np.ndarray"}
        wanted: Mapping[str, str] = json.loads((src / "_sharding").read_text())
        sharding = json.loads((out / "_sharding").read_text())
        assert sharding == {name: wanted[name] for name in sharding} and len(sharding) == 2
        src = out


def test_a_step_says_that_its_save_has_finished(tmp_path: Path) -> None:
    """Orbax takes a step on gs:// without the file for an unfinished one."""
    src = make_step(tmp_path)
    run(Job(src=src, dst=tmp_path / "run" / "3", to="orbax"))
    for folder in ("", "default"):
        assert (tmp_path / "run" / "3" / folder / "commit_success.txt").read_text()
    content = json.loads((tmp_path / "run" / "3" / "_CHECKPOINT_METADATA").read_text())
    assert content["custom_metadata"] == {"run": "a", "n": 4}
    assert content["metrics"] == {"loss": 0.5}


def test_attributes_follow_a_renamed_tensor_and_leave_a_stacked_one(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "z", mode="w", zarr_format=3)
    for number in range(2):
        name = f"layers.{number}.w"
        array = group.create_array(name, shape=(3,), dtype="f4", dimension_names=["x"])
        array[:] = number
    run(Job(src=tmp_path / "z", dst=tmp_path / "renamed", add_prefix="m."))
    assert zarr.open_group(tmp_path / "renamed")["m.layers.1.w"].metadata.dimension_names == ("x",)
    report = run(Job(src=tmp_path / "z", dst=tmp_path / "stacked", stack_layers=True))
    assert "layers.0.w._ARRAY_DIMENSIONS, " not in listed(report)
    assert "layers.0.w._ARRAY_DIMENSIONS" in listed(report)


def test_attributes_of_excluded_tensors_are_not_listed(tmp_path: Path) -> None:
    src = make_zarr3(tmp_path)
    report = run(Job(src=src, dst=tmp_path / "out", exclude=("w",)))
    assert "w.scale" not in listed(report)


CHANGES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "rename": ({"rename": ((r"^a\.", "m.a."),)}, {"a.w": "m.a.w", "a.v": "m.a.v", "b.w": "b.w"}),
    "swap": (
        {"rename": (("^a.w$", "t"), ("^a.v$", "a.w"), ("^t$", "a.v"))},
        {"a.w": "a.v", "a.v": "a.w", "b.w": "b.w"},
    ),
    "strip": ({"strip_prefix": ("a.",)}, {"a.w": "w", "a.v": "v", "b.w": "b.w"}),
    "add": ({"add_prefix": "m."}, {name: f"m.{name}" for name in WEIGHTS}),
    "include": ({"include": ("a.*",)}, {"a.w": "a.w", "a.v": "a.v"}),
    "exclude": ({"exclude": ("a.v",)}, {"a.w": "a.w", "b.w": "b.w"}),
}


@pytest.mark.each_value
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("target", ["torch", "dcp", "safetensors", "zarr3", "orbax", "torch_dist"])
@pytest.mark.parametrize(
    "source", ["torch", "dcp", "safetensors", "zarr3", "orbax", "torch_dist", "zarr"]
)
def test_attributes_follow_their_tensors_and_leave_with_them(
    source: str, target: str, change: str, tmp_path: Path
) -> None:
    src = make_state_dict(tmp_path / "in", source)
    options, new_of = CHANGES[change]
    out = tmp_path / TARGETS[target]
    report = run(Job(src=src, dst=out, to=target, **options))
    wanted = {new: ENTRIES["__attributes__"][old] for old, new in new_of.items()}
    assert read_attributes(out) == {"": {"run": "a"}, **wanted}
    assert not report.dropped
    assert not any("become the entr" in note for note in report.notes if source in ("torch", "dcp"))


@pytest.mark.parametrize("source", ["torch", "dcp", "safetensors", "zarr3"])
def test_attributes_can_be_excluded_by_the_name_of_their_entry(source: str, tmp_path: Path) -> None:
    src = make_state_dict(tmp_path / "in", source)
    globs = ("__metadata__", "__attributes__.a.w", "__attributes__.b.*")
    report = run(Job(src=src, dst=tmp_path / "out.pt", to="torch", exclude=globs))
    assert torch.load(tmp_path / "out.pt")["__attributes__"] == {"a.v": {"unit": "m"}}
    assert "__metadata__" not in torch.load(tmp_path / "out.pt")
    assert not report.dropped
    with pytest.raises(UsageError, match="no tensor or object matches"):
        run(Job(src=src, dst=tmp_path / "b.pt", to="torch", exclude=("__metadata__.other",)))


def test_entries_of_other_sources_of_a_merge_are_listed(tmp_path: Path) -> None:
    for name in "ab":
        torch.save({"w": torch.ones(2), "__metadata__": {"run": name}}, tmp_path / f"{name}.pt")
    merge = Merge(method="average", others=(tmp_path / "b.pt",))
    report = run(Job(src=tmp_path / "a.pt", dst=tmp_path / "out.pt", merge=merge))
    assert torch.load(tmp_path / "out.pt")["__metadata__"] == {"run": "a"}
    assert "run of b.pt" in listed(report)


def test_attributes_that_tensorstore_wrote_become_an_entry(tmp_path: Path) -> None:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(tmp_path / "z" / "w")},
        "metadata": {"shape": [2], "data_type": "float32", "attributes": {"unit": "m"}},
    }
    ts.open(spec, create=True).result().write([1, 2]).result()
    report = run(Job(src=tmp_path / "z", dst=tmp_path / "out.pt", to="torch"))
    assert torch.load(tmp_path / "out.pt")["__attributes__"] == {"w": {"unit": "m"}}
    assert not report.dropped


def test_diff_compares_attributes_wherever_they_are(tmp_path: Path) -> None:
    src = make_file(tmp_path)
    run(Job(src=src, dst=tmp_path / "same.pt", to="torch"))
    assert diff(DiffJob(a=src, b=tmp_path / "same.pt")).same
    save_file({"w": torch.arange(3.0)}, tmp_path / "b.safetensors", metadata={"format": "pt"})
    result = diff(DiffJob(a=src, b=tmp_path / "b.safetensors"))
    assert not result.same and {entry.path for entry in result.entries} == {"__metadata__"}


def test_a_merge_keeps_the_metadata_of_the_first_and_lists_those_of_others(tmp_path: Path) -> None:
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file in files:
        save_file({"w": torch.ones(2)}, file, metadata={"run": file.stem})
    merge = Merge(method="average", others=(files[1],))
    report = run(Job(src=files[0], dst=tmp_path / "out.safetensors", merge=merge))
    assert read_attributes(tmp_path / "out.safetensors") == {"": {"run": "a"}}
    assert "run of b.safetensors" in listed(report)


def test_a_tensor_that_has_the_name_of_the_entry_stays(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "z", mode="w", zarr_format=3)
    group.attrs.update(ckpt={"mine": 1}, step=3)
    group.create_array("__metadata__", shape=(2,), dtype="f4")[:] = 1
    report = run(Job(src=tmp_path / "z", dst=tmp_path / "out.pt", to="torch"))
    assert torch.load(tmp_path / "out.pt")["__metadata__"].tolist() == [1, 1]
    assert "__metadata__ (attributes" in listed(report)
    assert not any("become the entry" in note for note in report.notes)
    run(Job(src=tmp_path / "z", dst=tmp_path / "again", to="zarr3"))
    assert read_attributes(tmp_path / "again") == {"": {"step": 3, "ckpt": {"mine": 1}}}


@pytest.mark.parametrize(
    "state",
    [
        OrderedDict(w=torch.ones(2), __metadata__={"a": 1}),
        {"w": torch.ones(2), "__metadata__": Counter(a=1)},
        {"w": torch.ones(2), "__attributes__": {"w": {}}},
        {"w": torch.ones(2), "__metadata__": {"a": 1}, "__attributes__": {"": {"b": 2}}},
    ],
)
def test_entries_of_these_names_that_are_somebody_elses_stay_as_they_are(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    torch.save(state, tmp_path / "a.pt")
    run(Job(src=tmp_path / "a.pt", dst=tmp_path / "b.pt", to="torch", fsync=False))
    result = torch.load(tmp_path / "b.pt", weights_only=False)
    assert type(result) is type(state) and result.keys() == state.keys()
    assert {name: (type(value), value) for name, value in result.items() if name != "w"} == {
        name: (type(value), value) for name, value in state.items() if name != "w"
    }


@pytest.mark.parametrize(
    ("glob", "metadata", "attributes"),
    [
        ("*metadata*", None, {"a": {"k": 1}}),
        ("__met*", None, {"a": {"k": 1}}),
        ("*.s", {"t": 2}, {"a": {"k": 1}}),
        ("*.k", {"s": 1, "t": 2}, None),
        ("*attributes*", {"s": 1, "t": 2}, None),
        ("b", {"s": 1, "t": 2}, {"a": {"k": 1}}),
    ],
)
def test_attributes_are_excluded_by_any_glob_that_matches_nothing_else(
    tmp_path: Path, glob: str, metadata: object, attributes: object
) -> None:
    weights = {"a": torch.ones(2), "b": torch.ones(2)}
    entries = {"__metadata__": {"s": 1, "t": 2}, "__attributes__": {"a": {"k": 1}}}
    torch.save({**weights, **entries}, tmp_path / "a.pt")
    run(Job(src=tmp_path / "a.pt", dst=tmp_path / "b.pt", to="torch", exclude=(glob,), fsync=False))
    result = torch.load(tmp_path / "b.pt", weights_only=True)
    assert result.get("__metadata__") == metadata
    assert result.get("__attributes__") == attributes


@pytest.mark.parametrize("to", ["torch", "orbax"])
def test_devices_of_arrays_that_are_no_random_keys_are_listed(tmp_path: Path, to: str) -> None:
    report = run(Job(src=make_keys(tmp_path), dst=tmp_path / "out", to=to, fsync=False))
    assert "devices of arrays that are not random keys: _sharding.w" in report.dropped
