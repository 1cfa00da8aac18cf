"""Checks that workers can run one job together.

Each worker describes itself when it joins, and the lead compares the descriptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_cli.host.rank_env import WorkerIdentity
from core import __version__
from core.errors import CheckpointingException, UsageError, WorkerError


def describe_worker(
    identity: WorkerIdentity,
    arguments: Sequence[str],
    *,
    backend: str | None = None,
    device: str | None = None,
    problem: CheckpointingException | None = None,
) -> dict[str, Any]:
    """Return a worker's description of itself, as a JSON object.

    Args:
        identity: the worker's rank, host and launcher.
        arguments: the command with its arguments.
        backend: the torch.distributed backend that the worker will use.
        device: the worker's device, as torch names it; None if it could not be determined.
        problem: the reason why the worker cannot run at all. It joins nevertheless and reports the
            problem, because the others would otherwise wait for it.
    """
    import torch

    gpu = None
    if device is not None and device != "cpu":
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    return {
        "problem": None if problem is None else error_record(problem),
        "size": identity.size,
        "ckpt": __version__,
        "torch": str(torch.__version__),
        "arguments": list(arguments),
        "backend": backend,
        "device": device,
        "gpu": gpu,
    }


def error_record(error: CheckpointingException) -> dict[str, Any]:
    """Return an error as a JSON object, the inverse of ``error_from_record``."""
    return {"usage": isinstance(error, UsageError), "message": error.message, "hint": error.hint}


def error_from_record(record: Mapping[str, Any]) -> CheckpointingException:
    """Return the error that a JSON object of ``error_record`` describes."""
    kind = UsageError if record["usage"] else WorkerError
    return kind(record["message"], hint=record["hint"])


def check_members(members: Sequence[Mapping[str, Any]]) -> CheckpointingException | None:
    """Return the reason why workers cannot run one job together; None if they can.

    Args:
        members: what ``describe_worker`` says of each worker, by rank, each with its ``host``.
    """
    # A worker with a problem comes first: it has no backend, which would look like a difference.
    for rank, member in enumerate(members):
        if member["problem"] is not None:
            error = error_from_record(member["problem"])
            error.message = f"rank {rank} on {member['host']}: {error.message}"
            return error
    # Compare the facts that must agree. The size comes first: with another size the ranks belong to
    # another job, so every further difference would mislead.
    for name, title, hint in (
        (
            "size",
            "world size",
            "two jobs may use the same MASTER_PORT; set a different port for each",
        ),
        ("ckpt", "version of ckpt", "install the same version on all hosts"),
        ("torch", "version of torch", "install the same version on all hosts"),
        ("arguments", "command", "start all workers with the same command"),
        ("backend", "backend", "start all workers with the same --backend and --device"),
    ):
        for rank, member in enumerate(members):
            if member[name] != members[0][name]:
                values = (members[0][name], member[name])
                first, other = (
                    " ".join(map(str, v)) if isinstance(v, list) else str(v) for v in values
                )
                return UsageError(
                    f"all workers need the same {title}, but rank 0 on {members[0]['host']} has "
                    f"{first} and rank {rank} on {member['host']} has {other}",
                    hint=hint,
                )
    # No two workers may share a GPU. Device indices are not compared: under srun every worker may
    # see its own GPU as cuda:0, so only the UUID identifies it.
    owners: dict[tuple[str, str], int] = {}
    for rank, member in enumerate(members):
        if member["gpu"] is None:
            continue
        owner = owners.setdefault((member["host"], member["gpu"]), rank)
        if owner != rank:
            return UsageError(
                f"too few GPUs: ranks {owner} and {rank} on {member['host']} share the same "
                f"GPU ({member['device']})",
                hint="start one worker per GPU, or use --device cpu",
            )
    return None
