"""The accelerator on which a worker does its per-byte work: its name, kinds of work, and errors.

``None`` in place of a ``Device`` is the CPU path of the engine, which needs no torch. A ``Device``
is a plain value that describes the request; open resources (streams, pinned memory) belong to
``core.engine.device.lane``. The bytes written and the findings do not depend on the device: a kind
of work for which the device computes other bits than the CPU path is done on the CPU
(``core.engine.calibration.choice``).

Only work that costs more than the transfer to the device is sent there; moving bytes never is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import Any

from core.errors import CapacityError, CheckpointingException, UsageError, WorkerError
from core.values import dataclass, n_text

CAST, VALUES, FINGERPRINT, COMPARE = "cast", "values", "fingerprint", "compare"
QUANTIZE, DEQUANTIZE = "quantize", "dequantize"
NAMES = ("cpu", "cuda", "auto")
"""Values of ``--device``, in addition to ``cuda:N``."""


def cast_work(source: str, target: str) -> str:
    """Return the name of the kind of work for the cast from one dtype to another."""
    return f"{CAST} {source} → {target}"


@dataclass(frozen=True, slots=True)
class Device:
    """A device for per-byte work.

    Args:
        torch_name: ``cuda:N``, or ``cpu`` for the same code on torch's CPU, which tests use.
        is_auto: use the device for a kind of work only if that is measured to be faster.
        work: kinds of work that the device does; None until this is decided, which means none.
    """

    torch_name: str
    is_auto: bool = False
    work: frozenset[str] | None = field(default=None)

    @property
    def is_cuda(self) -> bool:
        """True if this is a CUDA device, which has memory of its own."""
        return self.torch_name.startswith("cuda")

    def does(self, work: str) -> bool:
        """Return True if the device does a kind of work."""
        return self.work is not None and work in self.work


def does(device: Device | None, work: str) -> bool:
    """Return True if a device does a kind of work; False for the CPU path."""
    return device is not None and device.does(work)


def device_named(name: str, local_rank: int = 0) -> Device | None:
    """Return the device that ``--device NAME`` selects for a worker.

    Imports torch, except for ``cpu``.

    Args:
        name: ``cpu``; ``cuda:N``; ``cuda`` for the GPU whose number is the worker's local rank; or
            ``auto`` for the same GPU, only for the work that is faster there.
        local_rank: the worker's number on its host.

    Returns:
        The device; None for the CPU path, also for ``auto`` without a GPU.

    Raises:
        UsageError: the name is unknown, the device does not exist, or the host has fewer GPUs than
            workers.
    """
    match = re.fullmatch(r"(cpu|auto|cuda)|cuda:(\d+)", name)
    if match is None:
        raise UsageError(f"--device: {name!r} is not one of {', '.join(NAMES)}, cuda:N")
    kind, number = match.groups()
    if kind == "cpu":
        return None
    n_devices = _n_cuda_devices()
    # With more workers than GPUs, the other workers use the CPU path.
    if kind == "auto":
        return Device(f"cuda:{local_rank}", is_auto=True) if local_rank < n_devices else None
    if not n_devices:
        raise UsageError(
            "--device cuda: torch finds no CUDA device on this host",
            hint=f"use --device cpu or auto; {_why_no_cuda()}",
        )
    index = int(number) if number else local_rank
    if index >= n_devices:
        raise UsageError(
            f"--device {name}: worker {local_rank} on this host needs GPU {index}, "
            f"but the host has only {n_text(n_devices, 'GPU')}",
            hint=f"start at most {n_devices} workers on this host (--nproc-per-node), "
            "or use --device auto",
        )
    return Device(f"cuda:{index}")


def _n_cuda_devices() -> int:
    """Return the number of CUDA devices that torch can use; 0 without torch."""
    try:
        import torch
    except ImportError:
        return 0
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def _why_no_cuda() -> str:
    """Return the reason why torch finds no CUDA device, for a hint."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return (
        f"torch {torch.__version__} was built for CUDA {torch.version.cuda}, "
        "so check the driver with nvidia-smi"
    )


@contextmanager
def device_errors(device: Device) -> Iterator[None]:
    """Translate torch's errors about a device into errors of this toolkit.

    Raises:
        CapacityError: the device is out of memory.
        WorkerError: the device failed otherwise.
    """
    try:
        yield
    except CheckpointingException:
        raise
    except RuntimeError as err:
        if not device.is_cuda:
            raise
        # Not every lack of memory has a class of its own; some libraries only report it in the
        # text. After its first line, the text has advice for developers.
        text = str(err).partition("\n")[0]
        import torch

        out_of_memory: Any = torch.cuda.OutOfMemoryError
        if isinstance(err, out_of_memory) or "out of memory" in str(err):
            raise CapacityError(
                f"{device.torch_name} is out of memory: {text}",
                hint="stop other programs that use the GPU, lower --threads, or use --device cpu",
            ) from err
        raise WorkerError(
            f"{device.torch_name} failed: {text}",
            hint="run the command again, or use --device cpu; check dmesg and nvidia-smi",
        ) from err
