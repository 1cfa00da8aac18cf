"""The identity of a worker, from the environment variables that launchers set.

The first launcher in this list whose variables are set counts, so torchrun inside srun is torchrun:

torchrun
    rank, size, local rank, local size: ``RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE``.
    Store: ``MASTER_ADDR MASTER_PORT``. The agent runs it (``TORCHELASTIC_USE_AGENT_STORE``);
    without an agent, if the user set the variables, rank 0 does.
srun
    rank, size, local rank: ``SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID``; local size from
    ``SLURM_STEP_TASKS_PER_NODE``.
    Store: the first host of ``SLURM_STEP_NODELIST``, at a port derived from job and step.
Open MPI
    ``OMPI_COMM_WORLD_RANK``, ``…_SIZE``, ``…_LOCAL_RANK``, ``…_LOCAL_SIZE``.
    Store: this host, if all workers are on it, at a port derived from the job's name or, without
    one, from the parent's process id.
MPICH, Intel MPI
    ``PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS``. Store: as with Open MPI.

``MASTER_ADDR`` and ``MASTER_PORT`` are used whenever they are set.

Source: torch 2.13 ``elastic/agent/server/local_elastic_agent.py``; srun(1), "OUTPUT ENVIRONMENT
VARIABLES"; Open MPI 5.0 ``docs/tuning-apps/environment-var.html``; MPICH 4.2 hydra, Intel MPI 2021
developer reference.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping

from ckpt_cli.host.results import RESULTS_VARIABLE
from core.errors import UsageError
from core.values import dataclass

_FIRST_PORT = 20_000
_N_PORTS = 10_000
"""Range of the ports derived from a job, below the ports that Linux gives to clients (from 32768).
"""

_BY_HAND = "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The identity of this process among the workers of a job, and the address of their store.

    Args:
        launcher: name of the launcher, for messages.
        rank, size: the worker's rank, and the number of all workers.
        local_rank, local_size: the same among the workers of this host; None if the launcher does
            not set it.
        address, port: address of the workers' store.
        has_store: torchrun's agent runs the store; otherwise rank 0 does.
        restarts: number of times that the launcher has restarted the workers.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    address: str
    port: int
    has_store: bool = False
    restarts: int = 0

    @property
    def keeps_store(self) -> bool:
        """True if this process runs the store."""
        return self.rank == 0 and not self.has_store

    @property
    def endpoint(self) -> str:
        """``address:port``."""
        return (
            f"[{self.address}]:{self.port}"
            if ":" in self.address
            else f"{self.address}:{self.port}"
        )


def identify_worker(environ: Mapping[str, str] = os.environ) -> WorkerIdentity:
    """Return the identity of this process, from the variables of its launcher.

    Raises:
        UsageError: no launcher has set its variables, or they are incomplete or invalid.
    """
    # torchrun comes first: inside srun or mpirun, the variables of those belong to the agent.
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        return _identify_below_torchrun(environ)
    if environ.get("SLURM_PROCID") and environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID")):
        return _identify_below_srun(environ)
    for launcher, names in _MPI.items():
        if environ.get(names[0]) and environ.get(names[1]):
            return _identify_below_mpi(environ, launcher, names)
    if environ.get("SLURM_JOB_ID"):
        raise UsageError(
            "this process belongs to a Slurm job but was not started by srun, so it has no rank",
            hint=f"start workers with srun python -m ckpt_cli.worker …, {_BY_HAND}",
        )
    raise UsageError(
        "this process has no rank, because it was not started by torchrun, srun or an MPI launcher",
        hint=f"start workers with ckpt launch, torchrun -m, srun or mpirun, {_BY_HAND}",
    )


def _identify_below_torchrun(environ: Mapping[str, str]) -> WorkerIdentity:
    """Return the identity that torchrun, ``ckpt launch`` or the user has set."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise UsageError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}",
            hint="set all four variables",
        )
    rank, size = _rank_and_size(environ, "RANK", "WORLD_SIZE")
    # The three differ only in what they set in addition: ckpt launch a directory for results.
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment"
    return WorkerIdentity(
        "ckpt launch" if environ.get(RESULTS_VARIABLE) else launcher,
        rank,
        size,
        _number(environ, "LOCAL_RANK"),
        _number(environ, "LOCAL_WORLD_SIZE"),
        environ["MASTER_ADDR"],
        _port(environ),
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts=_number(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
    )


def _identify_below_srun(environ: Mapping[str, str]) -> WorkerIdentity:
    """Return the identity that srun has set."""
    # The variables of the step come first: a step may have fewer tasks and nodes than its job.
    size_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    rank, size = _rank_and_size(environ, "SLURM_PROCID", size_name)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    address = (
        environ.get("MASTER_ADDR") or first_host(nodes) or environ.get("SLURM_LAUNCH_NODE_IPADDR")
    )
    if not address:
        raise UsageError(
            "SLURM_STEP_NODELIST is not set, so the host of rank 0 is unknown",
            hint="set MASTER_ADDR to rank 0's host",
        )
    # Steps of one job can run at the same time, so each gets a port of its own.
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    return WorkerIdentity(
        "srun",
        rank,
        size,
        _number(environ, "SLURM_LOCALID"),
        _slurm_local_size(environ),
        address,
        _port(environ, job=f"{environ.get('SLURM_JOB_ID')}.{step}"),
        restarts=_number(environ, "SLURM_RESTART_COUNT") or 0,
    )


_MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""Names of the variables with rank, size, local rank and local size, by launcher."""


def _identify_below_mpi(
    environ: Mapping[str, str], launcher: str, names: tuple[str, str, str, str]
) -> WorkerIdentity:
    """Return the identity that an MPI launcher has set.

    Args:
        names: the launcher's variables with rank, size, local rank and local size.
    """
    rank, size = _rank_and_size(environ, names[0], names[1])
    local_size = _number(environ, names[3])
    address = environ.get("MASTER_ADDR")
    if not address and local_size != size:
        raise UsageError(
            f"{launcher} does not set the address of rank 0 for workers on several hosts",
            hint="set MASTER_ADDR to rank 0's host: mpirun -x MASTER_ADDR=HOST (Open MPI), "
            "mpiexec -genv MASTER_ADDR HOST",
        )
    # Derive the port from a name that all workers of the job share. Without one, workers of a
    # single host share their parent process.
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    if not job and local_size == size:
        job = str(os.getppid())
    return WorkerIdentity(
        launcher,
        rank,
        size,
        _number(environ, names[2]),
        local_size,
        address or "127.0.0.1",
        _port(environ, job=job or "29500"),
    )


def first_host(nodes: str) -> str | None:
    """Return the first host of a Slurm node list; None if the list is empty.

    For ``gpu[007-010,12],login`` it is ``gpu007``.
    """
    match = re.match(r"([^,\[]+)(?:\[([^\]]*)\]([^,\[]*))?", nodes)
    if match is None:
        return None
    prefix, numbers, suffix = match.groups()
    first = "" if numbers is None else re.split(r"[,-]", numbers)[0]
    return f"{prefix}{first}{suffix or ''}"


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """Return the number of workers on this host; None if unknown.

    Slurm lists the numbers by node in a run-length encoding: ``2(x3),1`` is three nodes with two
    workers each, then one with one.
    """
    node = _number(environ, "SLURM_NODEID")
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    if node is None:
        return None
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        n_nodes = int(match[2] or 1)
        if node < n_nodes:
            return int(match[1])
        node -= n_nodes
    return None


def _rank_and_size(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    """Read rank and size from two variables.

    Raises:
        UsageError: a variable is missing or invalid.
    """
    rank, size = _number(environ, rank_name), _number(environ, size_name)
    if rank is None or size is None:
        raise UsageError(
            f"{rank_name} is set, but not {size_name}", hint="start the workers with a launcher"
        )
    if rank >= size:
        raise UsageError(
            f"{rank_name} is {rank}, but {size_name} is {size}",
            hint=f"set {rank_name} to a number from 0 to {size - 1}",
        )
    return rank, size


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """Read a number from a variable; None if it is not set or empty.

    Raises:
        UsageError: the value is not a number.
    """
    text = environ.get(name)
    if not text:
        return None
    if not text.isdecimal():
        raise UsageError(f"{name} is {text!r}, which is not a number")
    return int(text)


def _port(environ: Mapping[str, str], *, job: str = "") -> int:
    """Return ``MASTER_PORT``, or a port derived from the job, the same for all its workers.

    Args:
        job: a name that all workers of the job share.

    Raises:
        UsageError: ``MASTER_PORT`` is not a port.
    """
    port = _number(environ, "MASTER_PORT")
    if port is None:
        return _FIRST_PORT + zlib.crc32(job.encode()) % _N_PORTS
    if not 0 < port < 1 << 16:
        raise UsageError(f"MASTER_PORT is {port}, but a port is a number from 1 to 65535")
    return port
