"""Optimizers that are distributed by layers, in files of each data parallel rank.

tests/real_megatron reads those that megatron-core 0.16.1 writes of Muon and Adam; here the files
are made of those of an optimizer that is not distributed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import CheckpointingException, MissingShardError, UnsupportedError
from core.megatron.model.topology import Topology
from core.megatron.optimizer.groups import Slots, Trained
from core.megatron.optimizer.numbered.layer_wise import DataRank
from core.pickle.nesting import entries
from core.verbs.convert.run import Job, TopologyChange, run
from tests.megatron.support.numbered_files import assert_same_tree, save
from tests.megatron.support.synthetic import Model
from tests.support.rank_files import MODEL_FILE, load_rank_file, rank_dirs

DENSE = Model(vocab=37, divisible_by=5)
DP = 3


def test_parameters_are_dealt_by_size_forwards_and_backwards() -> None:
    # The example of megatron-core 0.16.1's shard_params, in another order.
    params = [Trained(f"p{n}", (n + 1,), "bfloat16", False) for n in range(10)]
    groups = [Slots({}, [None] * 5, None), Slots({}, [None] * 5, None)]
    assignment = ((9, 1, 3, 5, 7), (8, 0, 2, 4, 6))
    shares = [DataRank(n, 4, 0, 1).share(assignment, params, groups) for n in range(4)]
    assert shares == [((7,), (0, 8)), ((1, 9), (6,)), ((5,), (2,)), ((3,), (4,))]


def test_distributed_experts_are_dealt_to_ranks_of_their_own() -> None:
    params = [Trained(f"p{n}", (n + 1,), "bfloat16", n % 2 == 1) for n in range(8)]
    groups = [
        Slots({"is_expert_parallel": False}, [None] * 4, None),
        Slots({"is_expert_parallel": True}, [None] * 4, None),
    ]
    assignment = ((0, 2, 4, 6), (1, 3, 5, 7))
    assert DataRank(3, 4, 1, 2).share(assignment, params, groups) == ((6,), (3, 5))
    assert DataRank(0, 4, 0, 2).share(assignment, params, groups) == ((0,), (1, 7))
    assert DataRank(0, 1, 0, 1).share(assignment, params, groups) == assignment


def _split(source: Path, **arguments: Any) -> None:
    """Deal the states of every rank's parameters to files of three data parallel ranks."""
    order = [*range(DP), *reversed(range(DP))]
    for folder in rank_dirs(source).values():
        content = load_rank_file(folder / MODEL_FILE)
        optimizer = content["optimizer"]
        inner = optimizer["optimizer"]
        listed = [
            (inner["state"][number]["exp_avg"].numel(), group, place, number)
            for group, settings in enumerate(inner["param_groups"])
            for place, number in enumerate(settings["params"])
        ]
        dealt = sorted(listed, key=lambda entry: entry[0])
        for rank in range(DP):
            states: dict[int, Any] = {}
            groups: list[Any] = []
            masters: list[Any] = []
            for group, settings in enumerate(inner["param_groups"]):
                own = [
                    entry
                    for n, entry in enumerate(dealt)
                    if order[n % len(order)] == rank and entry[1] == group
                ]
                first = len(states)
                states |= {first + n: inner["state"][entry[3]] for n, entry in enumerate(own)}
                groups.append({**settings, "params": list(range(first, len(states)))})
                masters.append(
                    [optimizer["fp32_from_fp16_params"][group][entry[2]] for entry in own]
                )
            entry = {
                "optimizer": {"state": states, "param_groups": groups},
                "fp32_from_fp16_params": masters,
            }
            torch.save(entry, folder / f"layer_wise_optimizer_{rank}.pt")
            if rank == 0:
                content["optimizer"] = entry
        vars(content["args"]).update(
            optimizer="muon", use_layer_wise_distributed_optimizer=True, **arguments
        )
        torch.save(content, folder / MODEL_FILE)


def _to_torch_dist(source: Path, target: Path) -> Any:
    return run(
        Job(src=source, dst=target, to="torch_dist", topology=TopologyChange(tp=1), fsync=False)
    )


def _refusal(source: Path, tmp_path: Path) -> CheckpointingException:
    with pytest.raises(CheckpointingException) as caught:
        _to_torch_dist(source, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    return caught.value


def test_states_of_all_data_parallel_ranks_come_together(tmp_path: Path) -> None:
    topology = Topology(tp=2, pp=2)
    complete = save(DENSE, topology, tmp_path / "whole")
    dealt = save(DENSE, topology, tmp_path / "dealt")
    _split(dealt)
    for source in (complete, dealt):
        _to_torch_dist(source, source.with_suffix(".dist"))
    states = {}
    for name in ("whole", "dealt"):
        run(
            Job(src=tmp_path / f"{name}.dist", dst=tmp_path / f"{name}.pt", to="torch", fsync=False)
        )
        content = torch.load(tmp_path / f"{name}.pt", weights_only=False)
        states[name] = {
            entry.key: entry.leaf
            for entry in entries(content)
            if isinstance(entry.leaf, torch.Tensor) and "optimizer" in entry.key
        }
    assert len(states["whole"]) > 20
    assert_same_tree(*(dict(sorted(states[name].items())) for name in ("dealt", "whole")), "states")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    source = save(DENSE, Topology(tp=2), tmp_path / "a")
    _split(source, data_parallel_size=DP)
    (rank_dirs(source)["mp_rank_01"] / "layer_wise_optimizer_2.pt").unlink()
    err = _refusal(source, tmp_path)
    assert isinstance(err, MissingShardError)
    assert (err.rank, err.message.split()[0].rstrip(",")) == (
        "mp_rank_01",
        "layer_wise_optimizer_2.pt",
    )


def test_context_parallelism_is_refused_because_states_are_lost(tmp_path: Path) -> None:
    source = save(DENSE, Topology(), tmp_path / "a")
    _split(source, context_parallel_size=2)
    err = _refusal(source, tmp_path)
    assert isinstance(err, UnsupportedError)
    assert "CP 2" in err.message
