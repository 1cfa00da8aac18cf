"""The model's weights beside their masters: compared, and what proves the order of a flat group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import CorruptError
from core.files.store import LocalStore
from core.formats.deepspeed import format as deepspeed
from core.verbs.checks.finding import Level
from core.verbs.convert.job import Job
from core.verbs.convert.run import run
from core.verbs.validate.run import validate
from tests.formats.deepspeed.deepspeed_samples import MODEL, Zero, values
from tests.support.deepspeed_files import edited
from tests.support.materialize import tensor_bytes

ROUNDED = "a sample of each matches the rounded master weights"
CASES = ("pipeline_zero1", "pipeline_tp2_zero1", "autotp_zero1", "moe_zero1")


def copy_notes(folder: Path, to: Path) -> list[str]:
    report = run(Job(src=folder, dst=to, to="dcp", fsync=False))
    return [note for note in report.notes if "16-bit copies" in note]


def differing(folder: Path, level: Level = Level.HEADERS) -> list[tuple[str | None, str | None]]:
    findings = validate(folder, level=level).findings
    return [(item.key, item.file) for item in findings if item.code == "CK407"]


@pytest.mark.parametrize("stage", [1, 2])
def test_equal_copies_are_called_rounded_master_weights(tmp_path: Path, stage: int) -> None:
    folder = Zero(stage, 2).write(tmp_path / "run")
    (note,) = copy_notes(folder, tmp_path / "dcp")
    assert ROUNDED in note
    assert not differing(folder)


@pytest.mark.parametrize("case", CASES)
def test_copies_of_stages_ranks_and_experts_are_compared(
    deepspeed_parallel: Path, tmp_path: Path, case: str
) -> None:
    folder = deepspeed_parallel / case / "global_step2"
    (note,) = copy_notes(folder, tmp_path / "dcp")
    assert ROUNDED in note
    assert not differing(folder)


def test_zero_3_has_no_copies_to_speak_of(tmp_path: Path) -> None:
    assert not copy_notes(Zero(3, 2).write(tmp_path / "run"), tmp_path / "dcp")


CHANGED: dict[str, tuple[str, str, str, Callable[[Any], Any]]] = {
    # the file that is of another step, and the key of its parameter in the catalog
    "a layer": ("pipeline_tp2_zero1", "layer_02-model_01-model_states.pt", "2.", dict),
    "a stage": ("pipeline_zero1", "layer_01-model_states.pt", "1.", dict),
    "a rank": ("autotp_zero1", "mp_rank_01_model_states.pt", "", lambda root: root["module"]),
}


@pytest.mark.parametrize("difference", CHANGED)
def test_a_file_of_another_step_is_reported(
    deepspeed_parallel: Path, tmp_path: Path, difference: str
) -> None:
    case, file, prefix, module_of = CHANGED[difference]

    def change(name: str, content: Any) -> None:
        if name == file:
            for tensor in module_of(content).values():
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    tensor += 1

    store = edited(deepspeed_parallel / case / "global_step2", tmp_path / "x", change)
    (note,) = copy_notes(tmp_path / "x", tmp_path / "dcp")
    assert ROUNDED not in note and "differ from the rounded master weights" in note and file in note
    reported = differing(tmp_path / "x")
    assert reported and all(item == file for _, item in reported)
    assert all(key is not None and key.startswith(prefix) for key, _ in reported)
    assert {key for key, _ in reported} <= set(deepspeed.read(store).tensors)


def test_a_model_file_of_another_step_is_reported_for_zero_2(tmp_path: Path) -> None:
    def change(name: str, content: dict[str, Any]) -> None:
        if name == MODEL:
            content["module"]["wide"][2, 10] += 64

    folder = Zero(2, 2).write(tmp_path / "run", change)
    (note,) = copy_notes(folder, tmp_path / "dcp")
    assert "1 of 7 differ from the rounded master weights" in note and "wide" in note
    assert differing(folder) == [("wide", MODEL)]
    assert not differing(folder, Level.METADATA)  # reads no data


def test_copies_of_a_dtype_that_nothing_is_rounded_to_get_a_note(tmp_path: Path) -> None:
    def change(name: str, content: dict[str, Any]) -> None:
        if name == MODEL:
            content["module"] = {key: t.to(torch.int8) for key, t in content["module"].items()}

    folder = Zero(2, 2).write(tmp_path / "run", change)
    (note,) = copy_notes(folder, tmp_path / "dcp")
    (finding,) = validate(folder, level=Level.HEADERS).findings
    assert finding.code == "CK412"
    assert finding.message in note and "could not be compared" in note


def round_robin(run: Zero) -> Callable[[str, dict[str, Any]], None]:
    """Record the positions of the order that the run's parameters had before round robin.

    DeepSpeed deals the parameters out to the ranks like cards.
    """
    original = []
    for group in run.groups:
        names: list[str] = [""] * len(group)
        order = [i for rank in range(run.n_ranks) for i in range(rank, len(group), run.n_ranks)]
        for name, index in zip(group, order, strict=True):
            names[index] = name
        original.append(OrderedDict((name, group[name]) for name in names))
    other = Zero(run.stage, run.n_ranks, groups=original)

    def change(name: str, content: dict[str, Any]) -> None:
        if name.endswith("optim_states.pt"):
            rank = int(name.split("_")[3])
            slices = other.optim(rank)["optimizer_state_dict"]["param_slice_mappings"]
            content["optimizer_state_dict"]["param_slice_mappings"] = slices

    return change


GROUP = {"embed": (7, 5), "deep": (2, 3, 4), "wide": (3, 11), "norm": (13,), "bias": (5,)}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("groups", [(GROUP,), (GROUP, {"a": (4,), "b": (3, 3), "c": (2,)})])
def test_round_robin_gradients_are_settled_by_the_values(
    tmp_path: Path, stage: int, n_ranks: int, groups: Any
) -> None:
    zero = Zero(stage, n_ranks, groups=groups)
    store = LocalStore(zero.write(tmp_path / "run", round_robin(zero)))
    catalog = deepspeed.read(store)
    for group in groups:
        for name, shape in group.items():
            for state, key in (("fp32", name), ("exp_avg", f"optimizer.state.{name}.exp_avg")):
                wanted = values(name, shape, state).numpy().tobytes()
                assert tensor_bytes(catalog, store, key).tobytes() == wanted, key


def test_round_robin_without_proof_is_refused(tmp_path: Path) -> None:
    zero = Zero(2, 2, groups=(GROUP,))
    record = round_robin(zero)

    def change(name: str, content: dict[str, Any]) -> None:
        record(name, content)
        if name == MODEL:
            content["module"]["norm"] += 64  # neither order has these weights

    with pytest.raises(CorruptError, match="param_slice_mappings"):
        deepspeed.read(LocalStore(zero.write(tmp_path / "run", change)))
