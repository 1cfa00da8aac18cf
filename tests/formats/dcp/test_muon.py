"""``torch.optim.Muon`` under FSDP2: saved, converted, loaded and trained on by torch 2.13."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core.verbs.convert.job import Job
from core.verbs.convert.run import run

JOB = """
import json, os, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def steps(model, optimizer, first, n):
    losses = []
    for number in range(first, first + n):
        inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(number))
        loss = model(inputs).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def job(seed):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(24, 40, bias=False), torch.nn.Linear(40, 16, bias=False)]
    model = torch.nn.Sequential(*layers)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.Muon(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)


def work(rank, port, folder, checkpoints):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    results = []
    if not checkpoints:
        model, optimizer = job(0)
        steps(model, optimizer, 0, 3)
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=f"{folder}/dcp")
        torch.save({"model": weights, "optim": states}, f"{folder}/ranks/train_rank_{rank}.pt")
        results.append(steps(model, optimizer, 3, 3))
    for path in checkpoints:
        model, optimizer = job(1)
        steps(model, optimizer, 9, 1)
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": states}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        results.append(steps(model, optimizer, 3, 3))
    if rank == 0:
        print("losses", json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1], sys.argv[2], sys.argv[3:]), nprocs=2)
"""


def losses(script: Path, folder: Path, *checkpoints: Path) -> list[list[float]]:
    """Run the job on two ranks; without checkpoints it trains and saves one."""
    port = str(20_000 + os.getpid() % 20_000)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", script, port, folder, *checkpoints],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("losses ")]
    assert len(lines) == 1, result.stderr[-2000:]
    values: list[list[float]] = json.loads(lines[0].removeprefix("losses "))
    return values


@pytest.mark.dist
@pytest.mark.long
def test_muon_is_trained_on_with_equal_losses_after_every_conversion(tmp_path: Path) -> None:
    script = tmp_path / "muon.py"
    script.write_text(JOB)
    (tmp_path / "ranks").mkdir()
    (expected,) = losses(script, tmp_path)

    # DCP → torch → DCP, DCP → DCP, and the ranks' files → DCP.
    run(Job(src=tmp_path / "dcp", dst=tmp_path / "one.pt", to="torch", fsync=False))
    paths = {
        "again": tmp_path / "one.pt",
        "same": tmp_path / "dcp",
        "of_ranks": tmp_path / "ranks",
    }
    for name, source in paths.items():
        run(Job(src=source, dst=tmp_path / name, to="dcp", fsync=False))
    results = losses(script, tmp_path, *(tmp_path / name for name in paths))
    assert results == [expected] * len(paths)

    # Plain torch loads the one file, whose optimizer has names, and has the same first loss.
    content = torch.load(tmp_path / "one.pt")
    assert set(content["optim"]["state"]["0.weight"]) == {"momentum_buffer"}
    model = torch.nn.Sequential(
        torch.nn.Linear(24, 40, bias=False), torch.nn.Linear(40, 16, bias=False)
    )
    model.load_state_dict(content["model"])
    optimizer = torch.optim.Muon(model.parameters(), lr=1.0)
    optimizer.load_state_dict(content["optim"])
    for number in range(3):
        inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(3 + number))
        loss = model(inputs).pow(2).mean()
        assert loss.item() == pytest.approx(expected[number], rel=1e-3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
