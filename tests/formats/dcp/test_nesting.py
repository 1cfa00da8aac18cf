"""What training systems save as DCP: the nesting that users expect, the iteration, the arguments,
the optimizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dist_cp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.files.store import LocalStore
from core.formats.dcp import format as dcp
from core.formats.dcp.metadata import parse_metadata
from core.opening.open import open_checkpoint
from core.pickle.inert import attributes
from core.pickle.nesting import entries
from core.verbs.convert.run import Job, run
from tests.formats.dcp.test_format import (
    GOLD,
    assert_same_tree,
    counted,
    torch_objects,
    torch_tensors,
)


def torch_file(src: Path, dst: Path) -> Any:
    """What a conversion to torch holds."""
    run(Job(src=src, dst=dst, to="torch", weights_only=True, fsync=False))
    return torch.load(dst, weights_only=True)


def by_torch(src: Path, dst: Path) -> Any:
    """What torch's own converter makes of it."""
    dcp_to_torch_save(src, dst)
    return torch.load(dst, weights_only=False)


def in_order(node: Any) -> Any:
    """The same dicts with sorted keys: torch's converter takes entries in the order in which it
    loads them.
    """
    if isinstance(node, dict):
        return {key: in_order(node[key]) for key in sorted(node)}
    return [in_order(item) for item in node] if isinstance(node, list) else node


def saved(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    dist_cp.save(state, storage_writer=FileSystemWriter(folder, **options), no_dist=True)
    return folder


def moments(names: list[str]) -> dict[str, Any]:
    return {
        name: {
            "step": torch.tensor(10.0),
            "exp_avg": counted(4, 3, start=number),
            "exp_avg_sq": counted(4, 3, start=100 + number),
        }
        for number, name in enumerate(names)
    }


NAMES = ["model.layers.0.w.weight", "model.layers.1.w.weight", "norm.weight"]


def weights() -> dict[str, torch.Tensor]:
    return {name: counted(4, 3, start=7 * number) for number, name in enumerate(NAMES)}


def app_state() -> dict[str, Any]:
    """FSDP2 with the AppState of PyTorch's DCP recipe."""
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": NAMES}]
    return {
        "app": {
            "model": weights(),
            "optim": {"state": moments(NAMES), "param_groups": groups},
            "step": 10,
        }
    }


def torchtitan() -> dict[str, Any]:
    """torchtitan: the model's names at the root, the optimizer's flattened by name."""
    state: dict[str, Any] = weights()
    for name, values in moments(NAMES).items():
        state |= {
            f"optimizer.state.{name}.{state_name}": value for state_name, value in values.items()
        }
        state |= {
            f"optimizer.param_groups.{name}.lr": 0.1,
            f"optimizer.param_groups.{name}.betas": (0.9, 0.99),
        }
    state["train_state"] = {
        "step": torch.tensor(10, dtype=torch.int32),
        "ntokens_seen": torch.tensor(4096),
    }
    state["lr_scheduler"] = {"last_epoch": 10}
    state["dataloader"] = {"dp_rank_0": b"\x80state"}
    return state


def fsdp_dtensor() -> dict[str, Any]:
    """Megatron-FSDP: global tensors under ``module.``, beside what Megatron saves with every
    checkpoint.
    """
    names = [f"module.{name}" for name in NAMES]
    args = argparse.Namespace(num_layers=2, hidden_size=4, tensor_model_parallel_size=1, bf16=True)
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 10,
        "model": {name: counted(4, 3, start=7 * number) for number, name in enumerate(names)},
        "optimizer": {
            "state": moments(names),
            "param_to_group_meta": {names[0]: {"lr": 0.1, "wd_mult": 1.0}},
        },
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 640},
        "rng_state": [
            {"python_rng_state": (3, 4), "torch_rng_state": counted(16, dtype=torch.uint8)}
        ],
    }


STATES = {"app_state": app_state, "torchtitan": torchtitan, "fsdp_dtensor": fsdp_dtensor}


@pytest.mark.parametrize("name", GOLD)
def test_gold_becomes_the_nested_dict_that_torch_makes(
    golden: Path, tmp_path: Path, name: str
) -> None:
    src = golden / "torch_dcp" / name
    nested = torch_file(src, tmp_path / "ours.pt")
    assert_same_tree(in_order(nested), in_order(by_torch(src, tmp_path / "theirs.pt")))


@pytest.mark.parametrize("name", GOLD)
def test_gold_skeletons_are_the_paths_of_the_planner(golden: Path, name: str) -> None:
    folder = golden / "torch_dcp" / name
    catalog = dcp.FORMAT.read(LocalStore(folder))
    metadata = FileSystemReader(folder).read_metadata()
    assert {entry.key: entry.path for entry in entries(catalog.skeleton)} == metadata.planner_data


@pytest.mark.parametrize("name", GOLD)
def test_every_optimizer_entry_of_gold_is_known_as_one(golden: Path, name: str) -> None:
    data = (golden / "torch_dcp" / name / ".metadata").read_bytes()
    metadata = parse_metadata(data, label=".metadata")
    for key in (*metadata.tensors, *metadata.objects):
        assert is_optimizer_key(key) == (key.startswith(("app.optim.", "optim.", "optimizer."))), (
            key
        )


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("system", ["app_state", "torchtitan"])
def test_a_training_systems_nesting_survives(tmp_path: Path, system: str, compressed: bool) -> None:
    state = STATES[system]()
    options = {"_extensions": [ZStandard()]} if compressed else {}
    src = saved(tmp_path / "step-10", state, **options)
    nested = torch_file(src, tmp_path / "ours.pt")
    assert_same_tree(in_order(nested), in_order(by_torch(src, tmp_path / "theirs.pt")))


def test_megatron_fsdp_becomes_its_nested_dict(tmp_path: Path) -> None:
    src = saved(tmp_path / "iter_0000010", fsdp_dtensor())
    nested = torch_file(src, tmp_path / "ours.pt")
    expected = fsdp_dtensor()
    for name in ("model", "optimizer", "opt_param_scheduler", "iteration", "checkpoint_version"):
        assert_same_tree(nested[name], expected[name])
    assert_same_tree(nested["rng_state"], expected["rng_state"])


@pytest.mark.parametrize("system", STATES)
def test_the_iteration_is_read_where_the_checkpoint_says_it(tmp_path: Path, system: str) -> None:
    for name, options in (("plain", {}), ("zstd", {"_extensions": [ZStandard()]})):
        folder = saved(tmp_path / name, STATES[system](), **options)
        assert dcp.FORMAT.read(LocalStore(folder)).iteration == 10


def test_the_iteration_of_a_safetensors_file_is_read(tmp_path: Path) -> None:
    folder = saved(
        tmp_path / "x", torchtitan(), serialization_format=SerializationFormat.SAFETENSORS
    )
    assert dcp.FORMAT.read(LocalStore(folder)).iteration == 10


@pytest.mark.parametrize(
    "state",
    [
        {"step": torch.tensor(10.0)},
        {"step": torch.tensor([1, 2])},
        {"step": "ten"},
        {"step": True},
        {"step": -1},
        {"steps": 10},
        {"model": {"step": 10}},
    ],
)
def test_what_is_no_iteration_is_not_taken_for_one(tmp_path: Path, state: dict[str, Any]) -> None:
    folder = saved(tmp_path / "x", {"w": counted(3), **state})
    assert dcp.FORMAT.read(LocalStore(folder)).iteration is None


def test_an_entry_that_cannot_be_read_is_noted_and_hides_nothing(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", {"w": counted(3), "step": 10})
    item = next(
        i
        for k, i in FileSystemReader(folder).read_metadata().storage_data.items()
        if k.fqn == "step"
    )
    path = folder / item.relative_path
    data = bytearray(path.read_bytes())
    data[item.offset : item.offset + item.length] = bytes(item.length)
    path.write_bytes(data)
    catalog = dcp.FORMAT.read(LocalStore(folder))
    assert catalog.iteration is None
    assert "step could not be read" in str(catalog.notes)
    assert list(catalog.tensors) == ["w"]


def test_megatrons_arguments_are_facts_of_the_checkpoint(tmp_path: Path) -> None:
    catalog = dcp.FORMAT.read(LocalStore(saved(tmp_path / "x", fsdp_dtensor())))
    fields = attributes(catalog.args)
    assert fields is not None
    assert fields["hidden_size"] == 4


@pytest.mark.parametrize("system", STATES)
def test_optimizer_entries_have_the_names_that_options_go_by(tmp_path: Path, system: str) -> None:
    catalog = dcp.FORMAT.read(LocalStore(saved(tmp_path / "x", STATES[system]())))
    for key in (*catalog.tensors, *catalog.objects):
        is_state = ".state." in key or "param_groups" in key or "param_to_group_meta" in key
        assert is_optimizer_key(key) == is_state, key


def test_a_root_of_steps_opens_its_newest_one(tmp_path: Path) -> None:
    for step in (5, 10):
        state = torchtitan()
        state["train_state"]["step"] = torch.tensor(step, dtype=torch.int32)
        saved(tmp_path / "checkpoint" / f"step-{step}", state)
    checkpoint = open_checkpoint(tmp_path / "checkpoint")
    assert (checkpoint.path.name, checkpoint.iteration, checkpoint.format.name) == (
        "step-10",
        10,
        "dcp",
    )
    assert open_checkpoint(tmp_path / "checkpoint", iteration=5).catalog.iteration == 5


@pytest.mark.parametrize(
    "options",
    [{"_extensions": [ZStandard()]}, {"serialization_format": SerializationFormat.SAFETENSORS}],
)
def test_other_forms_of_dcp_become_plain_dcp(tmp_path: Path, options: dict[str, Any]) -> None:
    src = saved(tmp_path / "src", torchtitan(), **options)
    plain = saved(tmp_path / "plain", torchtitan())
    run(Job(src=src, dst=tmp_path / "out", to="dcp", fsync=False))
    assert_same_tree(
        dict(sorted(torch_tensors(tmp_path / "out").items())),
        dict(sorted(torch_tensors(plain).items())),
    )
    assert torch_objects(tmp_path / "out") == torch_objects(plain)
