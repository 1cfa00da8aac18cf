"""Whether workers can do one job together: what each says of itself when it joins, and what the lead finds wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_cli.host.rank_env import Place
from core import __version__
from core.errors import CheckpointingException, UsageError, WorkerError


def facts_of(
    place: Place,
    arguments: Sequence[str],
    *,
    backend: str | None = None,
    device: str | None = None,
    problem: CheckpointingException | None = None,
) -> dict[str, Any]:
    """What a worker says of itself; can be written as JSON.

    Args:
        place: the worker's.
        arguments: the verb and what belongs to it.
        backend: how it will talk.
        device: its name in torch.
        problem: why the worker cannot work at all; it tells the others, who would wait for it otherwise.
    """
    import torch

    gpu = None
    if device is not None and device != "cpu":
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    return {
        "problem": None if problem is None else record_of(problem),
        "size": place.size,
        "ckpt": __version__,
        "torch": str(torch.__version__),
        "arguments": list(arguments),
        "backend": backend,
        "device": device,
        "gpu": gpu,
    }


def record_of(error: CheckpointingException) -> dict[str, Any]:
    """An error as JSON has it."""
    return {"usage": isinstance(error, UsageError), "message": error.message, "hint": error.hint}


def error_of(found: Mapping[str, Any]) -> CheckpointingException:
    """The error of a record."""
    kind = UsageError if found["usage"] else WorkerError
    return kind(found["message"], hint=found["hint"])


def problem_of(members: Sequence[Mapping[str, Any]]) -> CheckpointingException | None:
    """What keeps workers from working together; None if nothing does.

    Args:
        members: what they say, by rank; ``host`` is where each runs.
    """
    for rank, member in enumerate(members):
        if member["problem"] is not None:
            error = error_of(member["problem"])
            error.message = f"rank {rank} on {member['host']}: {error.message}"
            return error
    for name, what, hint in (
        ("size", "number of workers", "two jobs meet at one MASTER_PORT: give each its own"),
        ("ckpt", "version of ckpt", "install the same one on all hosts"),
        ("torch", "version of torch", "install the same one on all hosts"),
        ("arguments", "command", "start all workers with the same one"),
        ("backend", "backend", "give all workers the same --backend and --device"),
    ):
        for rank, member in enumerate(members):
            if member[name] != members[0][name]:
                first, other = (_text(one[name]) for one in (members[0], member))
                return UsageError(
                    f"workers differ in the {what}: rank 0 on {members[0]['host']} has {first}, "
                    f"rank {rank} on {member['host']} has {other}",
                    hint=hint,
                )
    return _shared_gpu(members)


def _shared_gpu(members: Sequence[Mapping[str, Any]]) -> CheckpointingException | None:
    owners: dict[tuple[str, str], int] = {}
    for rank, member in enumerate(members):
        if member["gpu"] is None:
            continue
        owner = owners.setdefault((member["host"], member["gpu"]), rank)
        if owner != rank:
            return UsageError(
                f"too few GPUs: ranks {owner} and {rank} on {member['host']} have the same one ({member['device']})",
                hint="start one worker a GPU, or give --device cpu",
            )
    return None


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
