"""Chooses the device of a worker and the backend by which its team communicates."""

from __future__ import annotations

from ckpt_cli.host.rank_env import WorkerIdentity
from core.device.device import Device, device_named
from core.errors import UsageError


def device_of(name: str, identity: WorkerIdentity) -> Device | None:
    """Return the worker's device; None for the CPU path.

    If the launcher shows each worker only its own GPU (``srun --gpus-per-task``), it is that GPU.

    Args:
        name: ``cpu``, ``cuda`` or ``auto``.

    Raises:
        UsageError: the host has no GPU, or fewer GPUs than workers.
    """
    if name == "cpu":
        return None
    import torch

    if identity.local_rank is None:
        raise UsageError(
            f"--device {name} needs one GPU per worker, but {identity.launcher} does not number the workers of a host",
            hint="set LOCAL_RANK, or give --device cpu",
        )
    is_own = not identity.has_store and torch.cuda.is_available() and torch.cuda.device_count() == 1
    return device_named(name, 0 if is_own else identity.local_rank)


def backend_of(name: str, device: Device | None) -> str:
    """Return the backend for torch.distributed: gloo, plus nccl if workers are on GPUs.

    Raises:
        UsageError: nccl is asked for but not available, or the worker has no GPU.
    """
    import torch.distributed as dist

    has_nccl = bool(dist.is_nccl_available())
    if name == "nccl":
        if not has_nccl:
            raise UsageError(
                "--backend nccl: this torch was built without NCCL",
                hint="give --backend gloo, or install torch for CUDA",
            )
        if device is None:
            raise UsageError(
                "--backend nccl needs GPUs, and this worker has none", hint="give --backend gloo"
            )
    if (
        name == "gloo"
        or device is None
        or not device.is_cuda
        or not has_nccl
        or (name == "auto" and device.is_auto)
    ):
        return "gloo"
    return "cpu:gloo,cuda:nccl"


def use_device(device: Device | None) -> None:
    """Make the device, if it is a GPU, the current one of this process."""
    if device is not None and device.is_cuda:
        import torch

        torch.cuda.set_device(device.torch_name)
