"""Experts in universal checkpoints for an expert parallel size, against the live engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import CorruptError, UsageError
from core.files.store import LocalStore
from core.formats.deepspeed.experts import numbered, split_expert_name
from core.formats.deepspeed.universal import format as universal
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run as convert
from tests.support.materialize import tensor_bytes

CASES = {"moe_zero1": 2, "moe_zero1_data_first": 4}
"""Run → expert parallel size to write, which is not always that of the run."""
UP_0 = "body.0.deepspeed_moe.experts.deepspeed_experts.0.up.weight"


def written(source: Path, dst: Path, *, ep: int, **options: Any) -> Path:
    """Write the universal checkpoint of a run, and return its directory with the files."""
    job = Job(src=source, dst=dst, to="ucp", topology=TopologyChange(ep=ep), fsync=False, **options)
    convert(job)
    return next(dst.glob("*universal"))


def truth_of(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    truth: dict[str, dict[str, torch.Tensor]] = torch.load(run / "truth.pt", weights_only=True)
    return truth


def expert_groups(folder: Path) -> list[tuple[object, object]]:
    """The names and weight decays of the optimizer's groups of experts."""
    objects = universal.read(LocalStore(folder)).objects
    prefixes = [key.removesuffix("moe") for key in objects if key.endswith(".moe")]
    return [
        (objects[f"{prefix}name"].value, objects[f"{prefix}weight_decay"].value)
        for prefix in prefixes
        if objects[f"{prefix}moe"].value is True
    ]


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the content of a file."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


@pytest.mark.parametrize("case", CASES)
def test_a_directory_has_the_experts_of_all_ranks(
    deepspeed_parallel: Path, tmp_path: Path, case: str
) -> None:
    run, ep = deepspeed_parallel / case, CASES[case]
    folder = written(run, tmp_path / "ucp", ep=ep, verify=True)
    truth = truth_of(run)
    directories = {path.name for path in (folder / "zero").iterdir() if path.is_dir()}
    experts = {name for name in directories if split_expert_name(name)}
    all_experts = [name for name in truth if split_expert_name(name)]
    assert len(experts) * ep == len(all_experts)
    for name in experts:
        layer, local = split_expert_name(name) or ("", 0)
        n_local = len({n for key in experts if (n := split_expert_name(key)) and n[0] == layer})
        for state, files in truth[name].items():
            content = torch.load(folder / "zero" / name / f"{state}.pt", weights_only=True)
            # What the loader of an engine does on every rank.
            rows = content["ep_num_experts"] // ep
            assert content["is_expert_param"] and len(content["param"]) == ep * rows
            for ep_rank in range(ep):
                part = content["param"][ep_rank * rows : (ep_rank + 1) * rows]
                wanted = truth[numbered(name, ep_rank * n_local + local)][state]
                assert torch.equal(part, wanted) and part.shape == files.shape
    assert {name for name, _ in expert_groups(folder)} == {f"ep_size_{ep}"}


@pytest.mark.parametrize("case", CASES)
def test_a_universal_checkpoint_with_experts_reads_as_the_run_that_saved(
    deepspeed_parallel: Path, tmp_path: Path, case: str
) -> None:
    run = deepspeed_parallel / case
    store = LocalStore(written(run, tmp_path / "ucp", ep=CASES[case]))
    catalog = universal.read(store)
    for name, states in truth_of(run).items():
        for state, wanted in states.items():
            key = name if state == "fp32" else f"optimizer.state.{name}.{state}"
            assert tensor_bytes(catalog, store, key).tobytes() == wanted.numpy().tobytes(), key
    assert not any(key.startswith("universal.") for key in catalog.objects)
    # Another size is another conversion of it.
    again = written(tmp_path / "ucp", tmp_path / "again", ep=1)
    plain = written(run, tmp_path / "plain", ep=1)
    for path in sorted((plain / "zero").glob("*/*.pt")):
        assert path.read_bytes() == (again / path.relative_to(plain)).read_bytes(), path


def test_layers_of_several_sizes_get_one_size(deepspeed_parallel: Path, tmp_path: Path) -> None:
    run = deepspeed_parallel / "moe_zero2_two_sizes"
    folder = written(run, tmp_path / "ucp", ep=1)
    # An engine has a group of matrices and one of biases, not one for each size.
    assert expert_groups(folder) == [("ep_size_1", 0.1), ("ep_size_1", 0.0)]
    with pytest.raises(UsageError, match="--ep-new 2 does not evenly divide the layer's 3 experts"):
        written(run, tmp_path / "other", ep=2)
    assert not (tmp_path / "other").exists()


def test_steps_of_one_directory_must_be_equal(deepspeed_parallel: Path, tmp_path: Path) -> None:
    convert(
        Job(src=deepspeed_parallel / "moe_zero1", dst=tmp_path / "run.pt", to="torch", fsync=False)
    )
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    state["optimizer"]["state"][numbered(UP_0, 2)]["step"] += 1
    torch.save(state, tmp_path / "run.pt")
    with pytest.raises(CorruptError, match="differ"):
        written(tmp_path / "run.pt", tmp_path / "ucp", ep=2)
    assert not (tmp_path / "ucp").exists()


@pytest.mark.parametrize(
    ("case", "sizes", "message"),
    [
        ("pipeline_zero1", {"ep": 2}, "no DeepSpeed MoE experts"),
        ("moe_zero1", {"ep": 2, "tp": 2}, "no parallel layout; --ep-new"),
        ("moe_zero1", {"tp": 2}, "no parallel layout; --ep-new"),
    ],
)
def test_other_sizes_are_refused(
    deepspeed_parallel: Path, tmp_path: Path, case: str, sizes: dict[str, int], message: str
) -> None:
    topology = TopologyChange(**sizes)
    job = Job(src=deepspeed_parallel / case, dst=tmp_path / "ucp", to="ucp", topology=topology)
    with pytest.raises(UsageError, match=message):
        convert(job)


def _wrong_rows(content: dict[str, Any]) -> None:
    content["ep_num_experts"] -= 1


def _no_rows(content: dict[str, Any]) -> None:
    del content["is_expert_param"], content["ep_num_experts"]


def _odd_rows(content: dict[str, Any]) -> None:
    content["param"] = content["param"][:-1].clone()
    content["ep_num_experts"] -= 1


@pytest.mark.parametrize("change", [_wrong_rows, _no_rows, _odd_rows])
def test_rows_that_are_not_those_of_the_experts_are_damage(
    deepspeed_parallel: Path, tmp_path: Path, change: Any
) -> None:
    folder = written(deepspeed_parallel / "moe_zero1", tmp_path / "ucp", ep=2, optim="drop")
    edit(folder / "zero" / UP_0 / "fp32.pt", change)
    with pytest.raises(CorruptError) as caught:
        universal.read(LocalStore(folder))
    assert caught.value.file == f"zero/{UP_0}/fp32.pt"


@pytest.mark.parametrize("size", [0, "2", True, 1 << 40])
def test_an_impossible_size_is_damage(
    deepspeed_parallel: Path, tmp_path: Path, size: object
) -> None:
    folder = written(deepspeed_parallel / "moe_zero1", tmp_path / "ucp", ep=2, optim="drop")

    def change(content: dict[str, Any]) -> None:
        content["universal_checkpoint_info"]["expert_parallel_size"] = size

    edit(folder / "mp_rank_00_model_states.pt", change)
    with pytest.raises(CorruptError, match="not a number of ranks"):
        universal.read(LocalStore(folder))
