"""The choice of a worker's device, and of the backend with which its team communicates."""

from __future__ import annotations

from ckpt_cli.host.rank_env import WorkerIdentity
from core.engine.device.device import Device, device_named
from core.errors import UsageError


def open_device(name: str, identity: WorkerIdentity) -> Device | None:
    """Return the worker's device; None for the CPU path.

    Args:
        name: ``cpu``, ``cuda`` or ``auto``.

    Raises:
        UsageError: the launcher does not number the workers of a host, or the host has no GPU or
            fewer GPUs than workers.
    """
    if name == "cpu":
        return None
    import torch

    if identity.local_rank is None:
        raise UsageError(
            f"--device {name} needs one GPU per worker, but {identity.launcher} does not number "
            "the workers on each host",
            hint="set LOCAL_RANK, or use --device cpu",
        )
    # srun --gpus-per-task shows each worker only its own GPU, as cuda:0. Workers of torchrun all
    # see the same GPUs, so there a single GPU belongs to local rank 0 only.
    is_own = not identity.has_store and torch.cuda.is_available() and torch.cuda.device_count() == 1
    return device_named(name, 0 if is_own else identity.local_rank)


def backend_of(name: str, device: Device | None) -> str:
    """Return the backend for torch.distributed: gloo, plus nccl if workers use GPUs.

    Args:
        name: ``gloo``, ``nccl`` or ``auto``.
        device: the worker's device; None for the CPU path.

    Raises:
        UsageError: nccl is requested, but torch was built without it or the worker has no GPU.
    """
    import torch.distributed as dist

    has_nccl = bool(dist.is_nccl_available())
    if name == "nccl":
        if not has_nccl:
            raise UsageError(
                "--backend nccl is not available, because this torch was built without NCCL",
                hint="use --backend gloo, or install a CUDA build of torch",
            )
        if device is None:
            raise UsageError(
                "--backend nccl needs GPUs, but this worker has none", hint="use --backend gloo"
            )
    # With --device auto the GPU may turn out to be slower, so nccl is used only if requested.
    if (
        name == "gloo"
        or device is None
        or not device.is_cuda
        or not has_nccl
        or (name == "auto" and device.is_auto)
    ):
        return "gloo"
    # One backend per device type, in torch's spelling: data on the CPU still goes through gloo.
    return "cpu:gloo,cuda:nccl"


def use_device(device: Device | None) -> None:
    """Make the device torch's current one in this process, if it is a GPU."""
    if device is not None and device.is_cuda:
        import torch

        torch.cuda.set_device(device.torch_name)
