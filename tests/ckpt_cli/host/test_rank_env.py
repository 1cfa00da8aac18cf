"""What launchers say in the environment."""

from __future__ import annotations

import pytest

from ckpt_cli.host.rank_env import WorkerIdentity, first_host, identify_worker
from core.errors import UsageError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "ckpt",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[007-009]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def test_torchrun():
    assert identify_worker(TORCHRUN) == WorkerIdentity(
        "torchrun", 5, 8, 1, 4, address="10.0.0.1", port=29400, has_store=True, restarts=2
    )
    assert not identify_worker({**TORCHRUN, "RANK": "0"}).keeps_store


def test_ranks_set_by_hand():
    by_hand = {
        name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    assert identify_worker(by_hand) == WorkerIdentity(
        "the environment", 5, 8, None, None, address="10.0.0.1", port=29400
    )
    assert identify_worker({**by_hand, "RANK": "0"}).keeps_store


def test_srun():
    worker = identify_worker(SRUN)
    assert (worker.launcher, worker.rank, worker.size, worker.local_rank, worker.local_size) == (
        "srun",
        3,
        6,
        1,
        2,
    )
    assert worker.address == "gpu007"
    assert 20_000 <= worker.port < 30_000
    assert identify_worker({**SRUN, "SLURM_PROCID": "5"}).port == worker.port
    assert identify_worker({**SRUN, "SLURM_STEP_ID": "1"}).port != worker.port
    assert identify_worker({**SRUN, "MASTER_ADDR": "a", "MASTER_PORT": "5"}).endpoint == "a:5"


def test_torchrun_below_srun_is_torchrun():
    assert identify_worker({**SRUN, **TORCHRUN}).launcher == "torchrun"


@pytest.mark.parametrize("environ", [OPEN_MPI, {**MPICH, "PMI_SIZE": "2", "PMI_RANK": "1"}])
def test_mpi_on_one_host(environ: dict[str, str]):
    worker = identify_worker(environ)
    assert (worker.rank, worker.size, worker.local_size, worker.address) == (1, 2, 2, "127.0.0.1")
    assert worker.port == identify_worker(environ).port


def test_mpi_on_several_hosts_needs_an_address():
    with pytest.raises(
        UsageError, match="does not set the address of rank 0 for workers on several hosts"
    ):
        identify_worker(MPICH)
    worker = identify_worker({**MPICH, "MASTER_ADDR": "node1"})
    assert (worker.rank, worker.size, worker.endpoint) == (2, 4, f"node1:{worker.port}")
    assert (
        identify_worker({**MPICH, "MASTER_ADDR": "node1", "PMIX_NAMESPACE": "x"}).port
        != worker.port
    )


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("gpu[007-010,12],x", "gpu007"), ("n[3,5]-ib", "n3-ib"), ("", None)],
)
def test_first_host_of_a_node_list(nodes: str, host: str | None):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({}, "this process has no rank, because it was not started by"),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, "was not started by srun"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "not MASTER_ADDR and MASTER_PORT"),
        ({**TORCHRUN, "RANK": "8"}, "RANK is 8, but WORLD_SIZE is 8"),
        ({**TORCHRUN, "RANK": "x"}, "RANK is 'x', which is not a number"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        (
            {**SRUN, "SLURM_STEP_NODELIST": "", "SLURM_LAUNCH_NODE_IPADDR": ""},
            "SLURM_STEP_NODELIST is not set",
        ),
    ],
)
def test_what_makes_no_sense_is_said(environ: dict[str, str], text: str):
    with pytest.raises(UsageError, match=text) as caught:
        identify_worker(environ)
    assert caught.value.exit_code == 2
