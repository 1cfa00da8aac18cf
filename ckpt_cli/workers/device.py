"""Which device a worker works on, and which backend its team talks by."""

from __future__ import annotations

from ckpt_cli.host.rank_env import Place
from core.device.device import Device, device_named
from core.errors import UsageError


def device_of(name: str, place: Place) -> Device | None:
    """The worker's device; None for the CPU path.

    Below a launcher that shows each worker its own GPU only (``srun --gpus-per-task``), that is the worker's.

    Args:
        name: ``cpu``, ``cuda`` or ``auto``.

    Raises:
        UsageError: there is none, or fewer than workers.
    """
    if name == "cpu":
        return None
    import torch

    if place.local_rank is None:
        raise UsageError(
            f"--device {name} is one GPU a worker, but {place.launcher} does not number the workers of a host",
            hint="set LOCAL_RANK, or give --device cpu",
        )
    is_own = not place.has_store and torch.cuda.is_available() and torch.cuda.device_count() == 1
    return device_named(name, 0 if is_own else place.local_rank)


def backend_of(name: str, device: Device | None) -> str:
    """The backend of torch.distributed: gloo, with nccl beside it where workers are on GPUs.

    Raises:
        UsageError: nccl is asked for where it is not, or cannot be used.
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
            raise UsageError("--backend nccl talks between GPUs, and this worker has none", hint="give --backend gloo")
    if name == "gloo" or device is None or not device.is_cuda or not has_nccl or (name == "auto" and device.is_auto):
        return "gloo"
    return "cpu:gloo,cuda:nccl"


def use(device: Device | None) -> None:
    """Makes a GPU the one that this process uses."""
    if device is not None and device.is_cuda:
        import torch

        torch.cuda.set_device(device.torch_name)
