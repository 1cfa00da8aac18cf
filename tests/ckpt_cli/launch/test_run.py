"""``ckpt launch`` on one host, from the command line to the files: real processes, PyTorch's agent
between them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from core.publish.stage.folder_lock import stage_dir_of
from tests.ckpt_cli.launch.jobs import (
    CKPT,
    WORKER,
    Ran,
    ended,
    is_copying,
    kill_worker,
    ran,
    start,
    tree,
    wait_for,
    workers_below,
)

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TO = ("--to", "dcp", "--json")
TWO = (*CKPT, "launch", "--nproc-per-node", "2")


def listed(place: Path) -> set[str]:
    return {path.name for path in place.iterdir() if not path.name.startswith("printed")}


@pytest.mark.long
def test_two_workers_make_the_same_bytes_as_one_process(
    source: Path, wanted: dict[str, str], tmp_path: Path
) -> None:
    result = ran((*TWO, "--", "convert", source, tmp_path / "out", *TO), tmp_path / "printed")
    assert result.code == 0, result.errors
    assert tree(tmp_path / "out") == wanted
    assert listed(tmp_path) == {"out"}
    figures = json.loads(result.output)["launch"]
    assert figures["n_workers"] == 2
    assert figures["balance"] < 1.1
    assert [worker["rank"] for worker in figures["workers"]] == [0, 1]


def test_a_job_goes_on_after_a_worker_was_killed(
    source: Path, wanted: dict[str, str], tmp_path: Path
) -> None:
    command = (*TWO, "--max-restarts", "1", "--", "convert", source, tmp_path / "out", *TO)
    process = start(command, tmp_path / "printed")
    wait_for(lambda: is_copying(tmp_path / "out"), process)
    kill_worker(process, 1)
    result = ended(process, tmp_path / "printed")
    assert result.code == 0, result.errors
    assert "restart 1 of 1" in result.errors
    assert "rank 1" in result.errors
    assert tree(tmp_path / "out") == wanted
    assert listed(tmp_path) == {"out"}
    assert json.loads(result.output)["launch"]["restarts"] == 1


@pytest.mark.long  # a killed host is named, too, and its work is finished by hand
def test_without_restarts_a_killed_worker_is_named_and_torchrun_goes_on(
    source: Path, wanted: dict[str, str], tmp_path: Path
) -> None:
    arguments = ("convert", source, tmp_path / "out", *TO)
    process = start((*TWO, "--max-restarts", "0", "--", *arguments), tmp_path / "printed")
    wait_for(lambda: is_copying(tmp_path / "out"), process)
    kill_worker(process, 0)
    result = ended(process, tmp_path / "printed")
    assert result.code == 8, result.errors
    assert "rank 0 on" in result.errors
    assert "SIGKILL" in result.errors
    assert listed(tmp_path) == {stage_dir_of(tmp_path / "out").name}

    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "1",
    )
    again = ran((*torchrun, "-m", "ckpt_cli.worker", *arguments, "--resume"), tmp_path / "printed")
    assert again.code == 0, again.errors
    assert tree(tmp_path / "out") == wanted
    assert listed(tmp_path) == {"out"}


@pytest.mark.long  # a launcher that hears a signal is test_guard's, a worker test_torch_team's
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_workers_and_keeps_the_stage(
    number: signal.Signals, code: int, source: Path, tmp_path: Path
) -> None:
    process = start((*TWO, "--", "convert", source, tmp_path / "out", *TO), tmp_path / "printed")
    wait_for(lambda: is_copying(tmp_path / "out"), process)
    workers = list(workers_below(process.pid))
    assert len(workers) == 2
    process.send_signal(number)
    result = ended(process, tmp_path / "printed")
    assert result.code == code, result.errors
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []
    assert listed(tmp_path) == {stage_dir_of(tmp_path / "out").name}
    assert "Traceback" not in result.errors


def together(
    commands: list[tuple[tuple[str | Path, ...], dict[str, str]]], place: Path
) -> list[Ran]:
    """Runs several commands, each in an environment of its own, at once."""
    running: list[subprocess.Popen[bytes]] = []
    for rank, (command, variables) in enumerate(commands):
        running.append(start(command, place / f"printed{rank}", variables))
    return [ended(process, place / f"printed{rank}") for rank, process in enumerate(running)]


def slurm(rank: int) -> dict[str, str]:
    """What srun tells a task of a step of two on one node."""
    return {
        "SLURM_JOB_ID": "7001",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }


def open_mpi(rank: int) -> dict[str, str]:
    """What Open MPI's mpirun tells a process of a job of two on one node."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }


def hydra(rank: int) -> dict[str, str]:
    """What the hydra of MPICH and Intel MPI tells a process of a job of two on one node."""
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": "2",
    }


@pytest.mark.parametrize(
    "variables",
    [
        slurm,
        pytest.param(open_mpi, marks=pytest.mark.long),
        pytest.param(hydra, marks=pytest.mark.long),
    ],
    ids=["srun", "mpirun", "mpiexec"],
)
def test_other_launchers_workers_find_each_other(
    variables: object, source: Path, wanted: dict[str, str], tmp_path: Path
) -> None:
    command = (*WORKER, "convert", source, tmp_path / "out", *TO)
    first, second = together([(command, variables(rank)) for rank in range(2)], tmp_path)  # type: ignore[operator]
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    assert json.loads(first.output)["launch"]["n_workers"] == 2
    assert (second.output, second.errors) == ("", "")
    assert tree(tmp_path / "out") == wanted


@pytest.mark.long
def test_a_verdict_is_said_once_and_is_the_exit_code(source: Path, tmp_path: Path) -> None:
    result = ran(
        (*TWO, "--", "convert", source, tmp_path / "out", "--to", "dcp", "--include", "nothing*"),
        tmp_path / "printed",
    )
    alone = ran(
        (*CKPT, "convert", source, tmp_path / "out", "--to", "dcp", "--include", "nothing*"),
        tmp_path / "printed2",
    )
    assert alone.code != 0
    assert result == alone
    assert listed(tmp_path) == set()
