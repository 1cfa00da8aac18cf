"""Integer keys of dicts survive formats whose keys are all text where something proves them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim import lr_scheduler

from core.verbs.convert.run import Job, run
from core.verbs.diff.run import DiffJob, diff


def trained(n_groups: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    parameters = list(model.parameters())
    groups = [{"params": parameters}] if n_groups == 1 else [{"params": [p]} for p in parameters]
    optimizer = torch.optim.Adam(groups, 1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6])
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
    }
    return model, optimizer, state


def assert_continues(state: dict[str, Any], wanted: dict[str, Any], n_groups: int) -> None:
    """The optimizer takes over every state, and the values are those that were saved."""
    _, optimizer, _ = trained(n_groups)
    optimizer.state.clear()
    optimizer.load_state_dict(state)
    taken = optimizer.state_dict()["state"]
    assert taken.keys() == wanted["state"].keys() == {0, 1}
    for number, states in wanted["state"].items():
        for name, value in states.items():
            assert torch.equal(taken[number][name], value), (number, name)


@pytest.mark.each_value
@pytest.mark.parametrize("n_groups", [1, 2])
@pytest.mark.parametrize("entry", ["optimizer", "optimizer_states", "at the root"])
@pytest.mark.parametrize("writer", ["torch", "ckpt"])
def test_an_optimizer_loads_again_after_dcp(
    writer: str, entry: str, n_groups: int, tmp_path: Path
) -> None:
    _, _, state = trained(n_groups)
    wanted = state["optimizer"]
    if entry == "optimizer_states":
        state["optimizer_states"] = [state.pop("optimizer")]
    if entry == "at the root":
        state = dict(wanted)
    source = tmp_path / "dcp"
    if writer == "torch":
        dcp.save(state, checkpoint_id=source, no_dist=True)
    else:
        torch.save(state, tmp_path / "in.pt")
        run(Job(src=tmp_path / "in.pt", dst=source, to="dcp"))
    run(Job(src=source, dst=tmp_path / "out.pt", to="torch"))
    back = torch.load(tmp_path / "out.pt", weights_only=True)
    if entry == "optimizer_states":
        back = back["optimizer_states"][0]
    assert_continues(back.get(entry, back), wanted, n_groups)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "alone": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 6, 6]),
    "in a sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [2, 4])],
        [2],
    ),
    "in a chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [3, 6])]
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("writer", ["torch", "ckpt", "orbax"])
def test_milestones_of_a_scheduler_are_reached_again(
    writer: str, kind: str, tmp_path: Path
) -> None:
    def started() -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), 1.0)
        return optimizer, SCHEDULERS[kind](optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler) -> list[float]:
        result = []
        for _ in range(8):
            optimizer.step()
            scheduler.step()
            result.append(float(optimizer.param_groups[0]["lr"]))
        return result

    optimizer, scheduler = started()
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    state = {"w": torch.ones(1), "sched": scheduler.state_dict(), "optim": optimizer.state_dict()}
    torch.save(state, tmp_path / "in.pt")
    if writer == "torch":
        dcp.save(state, checkpoint_id=tmp_path / "between", no_dist=True)
    else:
        to = "orbax" if writer == "orbax" else "dcp"
        run(Job(src=tmp_path / "in.pt", dst=tmp_path / "between", to=to))
    report = run(Job(src=tmp_path / "between", dst=tmp_path / "out.pt", to="torch"))
    assert not any("milestones" in note for note in report.notes)
    back = torch.load(tmp_path / "out.pt", weights_only=True)
    assert back["sched"] == state["sched"]
    if writer == "orbax":  # which stores numbers as tensors: the scheduler compares them in vain
        return
    wanted = rates(optimizer, scheduler)
    again, other = started()
    again.load_state_dict(state["optim"])
    other.load_state_dict(back["sched"])
    assert rates(again, other) == pytest.approx(wanted, rel=1e-6)


def test_a_counter_keeps_its_entries_in_every_format(tmp_path: Path) -> None:
    state = {"w": torch.ones(1), "n": Counter("aab"), "empty": Counter()}
    torch.save(state, tmp_path / "in.pt")
    for to in ("dcp", "orbax", "zarr3", "torch_dist", "torch"):
        between = tmp_path / ("b.pt" if to == "torch" else to)
        report = run(Job(src=tmp_path / "in.pt", dst=between, to=to))
        run(Job(src=between, dst=tmp_path / f"{to}.back.pt", to="torch"))
        back = torch.load(tmp_path / f"{to}.back.pt", weights_only=True)
        listed = any(line.startswith("n") for line in report.dropped)
        assert not listed and {name: int(n) for name, n in back["n"].items()} == {"a": 2, "b": 1}, (
            to
        )


def test_keys_that_nothing_proves_are_noted(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "seen": {0: torch.ones(1), 7: torch.ones(2)}, "named": {"a": 1}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    report = run(Job(src=tmp_path / "dcp", dst=tmp_path / "out.pt", to="torch"))
    (note,) = [note for note in report.notes if "remain strings" in note]
    assert note.startswith("numeric keys in seen ")
    assert torch.load(tmp_path / "out.pt")["seen"].keys() == {"0", "7"}
    again = run(Job(src=tmp_path / "dcp", dst=tmp_path / "again", to="dcp"))
    assert not any("remain strings" in note for note in again.notes)


def test_numbers_that_the_groups_do_not_list_stay_text(tmp_path: Path) -> None:
    optimizer = {
        "state": {"0": {"m": torch.ones(1)}, "5": {"m": torch.ones(1)}},
        "param_groups": [{"lr": 1.0, "params": [0, 1]}],
    }
    dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    report = run(Job(src=tmp_path / "dcp", dst=tmp_path / "out.pt", to="torch"))
    assert torch.load(tmp_path / "out.pt")["optimizer"]["state"].keys() == {"0", "5"}
    assert any("numeric keys in optimizer.state" in note for note in report.notes)


def test_diff_names_keys_of_different_types(tmp_path: Path) -> None:
    _, _, state = trained()
    torch.save(state, tmp_path / "a.pt")
    states = state["optimizer"]["state"]
    state["optimizer"]["state"] = {str(number): value for number, value in states.items()}
    torch.save(state, tmp_path / "b.pt")
    result = diff(DiffJob(a=tmp_path / "a.pt", b=tmp_path / "b.pt"))
    assert not result.same
    assert [(entry.path, entry.a, entry.b) for entry in result.entries] == [
        ("optimizer.state.0", "key 0 (int)", "key '0' (str)"),
        ("optimizer.state.1", "key 1 (int)", "key '1' (str)"),
    ]
    # DCP has no other keys than text, and torch loads them into those of the state dict.
    saved = torch.load(tmp_path / "a.pt")
    del saved["lr_scheduler"]
    torch.save(saved, tmp_path / "c.pt")
    dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert diff(DiffJob(a=tmp_path / "c.pt", b=tmp_path / "dcp")).same


def test_a_state_beside_those_of_the_parameters_keeps_its_name(tmp_path: Path) -> None:
    _, _, state = trained()
    state["optimizer"]["state"]["n_steps"] = 2
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    run(Job(src=tmp_path / "dcp", dst=tmp_path / "back.pt", to="torch", fsync=False))
    states = torch.load(tmp_path / "back.pt")["optimizer"]["state"]
    assert set(states) == {0, 1, "n_steps"}


def test_negative_numbers_get_the_note_too(tmp_path: Path) -> None:
    torch.save({"by_offset": {-1: torch.ones(2), 1: torch.ones(2)}}, tmp_path / "a.pt")
    run(Job(src=tmp_path / "a.pt", dst=tmp_path / "dcp", to="dcp", fsync=False))
    report = run(Job(src=tmp_path / "dcp", dst=tmp_path / "back.pt", to="torch", fsync=False))
    assert any("remain strings" in note and "by_offset" in note for note in report.notes)
