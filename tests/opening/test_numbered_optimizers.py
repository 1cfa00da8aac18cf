"""--param-order: names for the parameters that an optimizer numbers, with their proof."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.errors import UnsupportedError, UsageError
from core.formats.trainer.proven_names import parse_order
from core.verbs.convert.run import Job, run

RUNS = {"trainer/checkpoints/last.ckpt": "optimizer_states", "fabric/state.ckpt": "optimizer"}


@pytest.mark.parametrize(("name", "entry"), RUNS.items())
def test_the_model_names_the_states_of_the_live_optimizer(
    lightning_runs: Path, tmp_path: Path, name: str, entry: str
) -> None:
    source = lightning_runs / name
    run(Job(src=source, dst=tmp_path / "named.pt", to="torch", param_order="model", verify=True))
    state = torch.load(tmp_path / "named.pt", weights_only=True)[entry]
    ours = state[0] if isinstance(state, list) else state
    truth = torch.load(lightning_runs / name.split("/")[0] / "truth.pt")["optimizer"]
    assert ours["state"].keys() == truth["state"].keys()
    for parameter, states in truth["state"].items():
        for kind, tensor in states.items():
            assert torch.equal(ours["state"][parameter][kind], tensor), (parameter, kind)
    assert [group["params"] for group in ours["param_groups"]] == [
        group["params"] for group in truth["param_groups"]
    ]


def saved(folder: Path, *, last: int = 5, state: dict[str, object] | None = None) -> Path:
    """A model of three parameters, of which two have one shape, and its numbered optimizer."""
    shapes = {"a": (4, 3), "b": (4, 3), "c": (last,)}
    model = {name: torch.rand(shape).bfloat16() for name, shape in shapes.items()}
    states = {
        number: {
            "exp_avg": torch.rand(tensor.shape),
            "master_param": tensor.float() * (1 + torch.rand(tensor.shape) * 1e-6),
        }
        for number, tensor in enumerate(model.values())
    }
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}
    torch.save({"model": model, "optimizer": optimizer}, folder / "in.pt")
    return folder / "in.pt"


def test_a_dcp_directory_with_numbers_is_named_as_well(tmp_path: Path) -> None:
    run(Job(src=saved(tmp_path), dst=tmp_path / "numbers", to="dcp"))
    report = run(
        Job(src=tmp_path / "numbers", dst=tmp_path / "out.pt", to="torch", param_order="model")
    )
    before = torch.load(tmp_path / "in.pt")["optimizer"]["state"]
    after = torch.load(tmp_path / "out.pt")["optimizer"]
    assert after["param_groups"] == [{"lr": 0.1, "params": ["a", "b", "c"]}]
    for number, name in enumerate("abc"):
        assert torch.equal(after["state"][name]["exp_avg"], before[number]["exp_avg"])
    assert any("3 master weights round to the weights" in note for note in report.notes)


@pytest.mark.parametrize(
    "text", ["a\nb\n\nc\n", '["a", "b", "c"]', '{"optimizer": ["a", "b", "c"]}']
)
def test_a_file_names_them(tmp_path: Path, text: str) -> None:
    (tmp_path / "names").write_text(text)
    job = Job(src=saved(tmp_path), dst=tmp_path / "out.pt", param_order=str(tmp_path / "names"))
    run(job)
    assert [*torch.load(tmp_path / "out.pt")["optimizer"]["state"]] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["b", "a", "c"], "parameter 0 would be b, but its master weights do not round"),
        (["a", "c", "b"], r"is named c, which has shape \[5\], but .* state has shape \[4, 3\]"),
        (["a", "b", "d"], "no parameter 'd'"),
        (["a", "b"], "the file has 2 names, but the optimizer has 3 parameters"),
        (["a", "a", "b"], "lists 'a' twice"),
        ({"optimizer_1": ["a", "b", "c"]}, "the checkpoint's optimizers are optimizer"),
        (3, "no parameter '3'|the file has 1 names"),
        ({"optimizer": "abc"}, "no list of names under 'optimizer'"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(tmp_path: Path, names: object, message: str) -> None:
    (tmp_path / "names.json").write_text(json.dumps(names))
    job = Job(
        src=saved(tmp_path), dst=tmp_path / "out.pt", param_order=str(tmp_path / "names.json")
    )
    with pytest.raises(UsageError, match=message):
        run(job)
    assert not (tmp_path / "out.pt").exists()


def test_a_model_in_another_order_is_refused_with_the_first_that_differs(tmp_path: Path) -> None:
    tree = torch.load(saved(tmp_path))
    tree["model"] = {name: tree["model"][name] for name in "cab"}
    torch.save(tree, tmp_path / "in.pt")
    with pytest.raises(
        UsageError, match=r"states of parameter 0 have shape \[4, 3\], but c has shape \[5\]"
    ):
        run(Job(src=tmp_path / "in.pt", dst=tmp_path / "out.pt", param_order="model"))


def test_groups_that_could_be_divided_in_two_ways_are_refused(tmp_path: Path) -> None:
    tree = torch.load(saved(tmp_path))
    groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1, 2]}]
    tree["optimizer"]["param_groups"] = groups
    torch.save(tree, tmp_path / "in.pt")
    with pytest.raises(UsageError, match="in more than one way"):
        run(Job(src=tmp_path / "in.pt", dst=tmp_path / "out.pt", param_order="model"))


def test_states_without_shapes_are_refused(tmp_path: Path) -> None:
    tree = torch.load(saved(tmp_path))
    tree["optimizer"]["state"][1] = {"packed": torch.zeros(7, dtype=torch.uint8)}
    torch.save(tree, tmp_path / "in.pt")
    (tmp_path / "names").write_text("a\nb\nc")
    with pytest.raises(UnsupportedError, match="parameter 1 do not show its shape"):
        run(Job(src=tmp_path / "in.pt", dst=tmp_path / "o.pt", param_order=str(tmp_path / "names")))


def test_the_option_is_refused_where_it_would_do_nothing(
    lightning_runs: Path, tmp_path: Path
) -> None:
    named = lightning_runs / "fabric_fsdp/state.ckpt"
    with pytest.raises(UsageError, match="the checkpoint has no optimizer that identifies"):
        run(Job(src=named, dst=tmp_path / "o.pt", to="torch", param_order="model"))
    with pytest.raises(UsageError, match="the optimizer is left out"):
        run(Job(src=saved(tmp_path), dst=tmp_path / "o.pt", param_order="model", optim="drop"))


def test_a_binary_file_is_no_order() -> None:
    with pytest.raises(UsageError, match="neither text nor JSON"):
        parse_order(b"\x80\x02\xff", label="x")


def test_a_note_says_that_numbered_states_do_not_follow_dropped_weights(tmp_path: Path) -> None:
    job = Job(src=saved(tmp_path), dst=tmp_path / "out.pt", to="torch", exclude=("model.a",))
    assert any("optimizer identifies parameters by number" in note for note in run(job).notes)
    for options in ({"param_order": "model"}, {"exclude": ("model.a", "optimizer.*")}):
        job = replace(job, dst=tmp_path / f"{len(options)}.pt", force=True, **options)
        assert not any("states of dropped parameters" in note for note in run(job).notes)
