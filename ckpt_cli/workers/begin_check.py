"""Checks that workers can do one job together: each describes itself when it joins, and the lead
compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_cli.host.rank_env import WorkerIdentity
from core import __version__
from core.errors import CheckpointingException, UsageError, WorkerError


def facts_of(
    identity: WorkerIdentity,
    arguments: Sequence[str],
    *,
    backend: str | None = None,
    device: str | None = None,
    problem: CheckpointingException | None = None,
) -> dict[str, Any]:
    """Return a worker's description of itself, as a JSON object.

    Args:
        identity: the worker's.
        arguments: the command with its arguments.
        backend: backend that it will use.
        device: its device, as torch names it.
        problem: the reason why it cannot work at all; the others would wait for it if it did not
            tell them.
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
    """Return an error as a JSON object; ``error_from_record`` makes an error of it again."""
    return {"usage": isinstance(error, UsageError), "message": error.message, "hint": error.hint}


def error_from_record(record: Mapping[str, Any]) -> CheckpointingException:
    """Return the error that ``error_record`` wrote."""
    kind = UsageError if record["usage"] else WorkerError
    return kind(record["message"], hint=record["hint"])


def check_members(members: Sequence[Mapping[str, Any]]) -> CheckpointingException | None:
    """Return the reason why workers cannot work together; None if they can.

    Args:
        members: the workers' descriptions, by rank, each with its ``host``.
    """
    # A worker that cannot work at all.
    for rank, member in enumerate(members):
        if member["problem"] is not None:
            error = error_from_record(member["problem"])
            error.message = f"rank {rank} on {member['host']}: {error.message}"
            return error
    # Properties that must be the same for all workers.
    for name, title, hint in (
        ("size", "number of workers", "two jobs use the same MASTER_PORT: give each its own"),
        ("ckpt", "version of ckpt", "install the same version on all hosts"),
        ("torch", "version of torch", "install the same version on all hosts"),
        ("arguments", "command", "start all workers with the same command"),
        ("backend", "backend", "give all workers the same --backend and --device"),
    ):
        for rank, member in enumerate(members):
            if member[name] != members[0][name]:
                values = (members[0][name], member[name])
                first, other = (
                    " ".join(map(str, v)) if isinstance(v, list) else str(v) for v in values
                )
                return UsageError(
                    f"workers differ in the {title}: rank 0 on {members[0]['host']} has {first}, "
                    f"rank {rank} on {member['host']} has {other}",
                    hint=hint,
                )
    # Two workers must not have the same GPU.
    owners: dict[tuple[str, str], int] = {}
    for rank, member in enumerate(members):
        if member["gpu"] is None:
            continue
        owner = owners.setdefault((member["host"], member["gpu"]), rank)
        if owner != rank:
            return UsageError(
                f"too few GPUs: ranks {owner} and {rank} on {member['host']} share one ({member['device']})",
                hint="start one worker per GPU, or give --device cpu",
            )
    return None
