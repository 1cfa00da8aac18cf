"""States of Adam-mini, one second moment for a head or row: named, copied and refused.

tests/golden/adam_mini.tar.xz was written by adam-mini 1.1.1.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from core.errors import UnsupportedError
from core.opening.open import open_checkpoint
from core.verbs.convert.run import Job, run
from core.verbs.inspect.optimizer_states import is_state, states_of
from core.verbs.inspect.summary import summarize

ARCHIVE = Path(__file__).parents[2] / "golden" / "adam_mini.tar.xz"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adam_mini")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def _written(src: Path, dst: Path, **options: Any) -> dict[str, Any]:
    run(Job(src=src, dst=dst, to="torch", fsync=False, **options))
    content: dict[str, Any] = torch.load(dst, weights_only=True)
    return content


def _check_states(states: dict[str, Any], truth: dict[str, Any]) -> None:
    assert states.keys() == truth.keys()
    for name, state in truth.items():
        assert states[name].keys() == state.keys(), name
        for kind, value in state.items():
            other = states[name][kind]
            equal = torch.equal(other, value) if torch.is_tensor(value) else other == value
            assert equal and type(other) is type(value), (name, kind)


def test_adam_mini_gets_the_names_that_its_groups_record(runs: Path, tmp_path: Path) -> None:
    truth = torch.load(runs / "truth.pt")["one"]
    states = _written(runs / "state", tmp_path / "a.pt")["optimizer"]
    _check_states(states["state"], truth)
    assert [group["params"] for group in states["param_groups"]] == [[name] for name in truth]
    states = _written(runs / "state.pt", tmp_path / "b.pt", param_order="model")["optimizer"]
    _check_states(states["state"], truth)


def test_a_name_of_a_group_that_does_not_fit_leaves_the_numbers(runs: Path, tmp_path: Path) -> None:
    content = torch.load(runs / "state.pt")
    groups = content["optimizer"]["param_groups"]
    groups[0]["name"], groups[1]["name"] = groups[1]["name"], groups[0]["name"]
    torch.save(content, tmp_path / "swapped.pt")
    with pytest.raises(UnsupportedError, match="do not show its shape"):
        run(Job(src=tmp_path / "swapped.pt", dst=tmp_path / "out.pt", param_order="model"))


def test_states_of_two_ranks_are_the_complete_ones(runs: Path, tmp_path: Path) -> None:
    truth = torch.load(runs / "truth.pt")["two"]
    states = _written(runs / "fsdp2", tmp_path / "a.pt")["optimizer"]["state"]
    _check_states(states, truth)
    # The ranks' own files number the parameters, in the model's order.
    states = _written(runs / "ranks", tmp_path / "b.pt")["optimizer"]["state"]
    _check_states(dict(zip(truth, states.values(), strict=True)), truth)


def test_torch_loads_the_named_states_from_dcp(runs: Path, tmp_path: Path) -> None:
    run(Job(src=runs / "state.pt", dst=tmp_path / "named", to="dcp", param_order="model"))
    truth = torch.load(runs / "truth.pt")["one"]
    loaded = {
        f"optimizer.state.{name}.{kind}": torch.zeros_like(value)
        if torch.is_tensor(value)
        else type(value)()
        for name, state in truth.items()
        for kind, value in state.items()
    }
    dcp.load(loaded, checkpoint_id=tmp_path / "named", no_dist=True)
    for name, state in truth.items():
        for kind, value in state.items():
            other = loaded[f"optimizer.state.{name}.{kind}"]
            assert torch.equal(other, value) if torch.is_tensor(value) else other == value


def test_a_change_of_shapes_or_layout_is_refused_by_name(runs: Path, tmp_path: Path) -> None:
    job = Job(src=runs / "fsdp2", dst=tmp_path / "out", to="dcp", stack_layers=True)
    with pytest.raises(
        UnsupportedError, match="with Adam-mini, because its second moments are averages"
    ):
        run(job)
    job = Job(
        src=runs / "fsdp2",
        dst=tmp_path / "out",
        to="deepspeed_universal",
        strip_prefix=("model.",),
    )
    with pytest.raises(UnsupportedError, match="Adam-mini"):
        run(job)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "title"), [("fsdp2", "torch.optim state by parameter name"), ("ranks", "… number")]
)
def test_inspect_names_adam_mini(runs: Path, name: str, title: str) -> None:
    opened = open_checkpoint(runs / name)
    opened.store.close()
    summary = summarize(opened)
    assert str(summary.optimizer_title).endswith(title[1:] if title[0] == "…" else title)
    states = states_of({key: meta for key, meta in opened.catalog.tensors.items() if is_state(key)})
    assert states.algorithm == "Adam-mini"
    assert states.bytes_of.keys() == {"m", "vmean", "v"}
