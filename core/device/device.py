"""The accelerator on which a worker does its per-byte work: which one, for which kinds of work, and its errors.

``None`` in place of a ``Device`` is the CPU path of the engine, which needs none of this and no torch. A ``Device`` is
a plain value that says what is wanted; what is open on it (streams, pinned memory) belongs to ``core.device.lane``.
Whatever the device, the bytes that are written and the findings are the same, bit for bit; a kind of work that does not
give the CPU path's bits on the device at hand is left to the CPU (``core.calibration.choice``).

Work is worth a trip to the device only where it costs more than the trip. Moving bytes never is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from core.errors import CapacityError, CheckpointingException, UsageError, WorkerError

CAST, VALUES, FINGERPRINT, COMPARE = "cast", "values", "fingerprint", "compare"
QUANTIZE, DEQUANTIZE = "quantize", "dequantize"
NAMES = ("cpu", "cuda", "auto")
"""What ``--device`` may say."""


def cast_work(source: str, target: str) -> str:
    """The name of the work of a cast between two dtypes."""
    return f"{CAST} {source} → {target}"


@dataclass(frozen=True, slots=True)
class Device:
    """Where per-byte work is done.

    Args:
        torch_name: ``cuda:0``, or ``cpu`` for the same code on torch's CPU, which tests use.
        is_auto: each kind of work is done there only if it is faster, by measurement.
        work: kinds of work that are done there; None if that is not settled yet, then nothing is.
    """

    torch_name: str
    is_auto: bool = False
    work: frozenset[str] | None = field(default=None)

    @property
    def is_cuda(self) -> bool:
        """Whether it has memory of its own."""
        return self.torch_name.startswith("cuda")

    def does(self, work: str) -> bool:
        """Whether a kind of work is done there."""
        return self.work is not None and work in self.work


def does(device: Device | None, work: str) -> bool:
    """Whether a kind of work is done on a device, and not on the CPU path."""
    return device is not None and device.does(work)


def device_named(name: str, local_rank: int = 0) -> Device | None:
    """The device of a worker; imports torch unless it is ``cpu``.

    Args:
        name: ``cpu``; ``cuda``: the GPU with the number of the worker's local rank; ``cuda:N``; ``auto``: that GPU
            for what it is faster at, the CPU path without one.
        local_rank: the worker's number on its host.

    Returns:
        None for the CPU path.

    Raises:
        UsageError: there is no such device, or fewer GPUs than workers on this host.
    """
    kind, _, number = name.partition(":")
    if kind not in NAMES or (number and (kind != "cuda" or not number.isdecimal())) or name.endswith(":"):
        raise UsageError(f"--device: {name!r} is none of: {', '.join(NAMES)}, cuda:N")
    if kind == "cpu":
        return None
    n_devices = _n_cuda_devices()
    if kind == "auto":  # more workers than GPUs: the others work on their processors
        return Device(f"cuda:{local_rank}", is_auto=True) if local_rank < n_devices else None
    if not n_devices:
        raise UsageError(
            "--device cuda: torch finds no CUDA device here", hint=f"say --device cpu or auto; {_why_no_cuda()}"
        )
    index = int(number) if number else local_rank
    if index >= n_devices:
        raise UsageError(
            f"--device {name}: worker {local_rank} of this host needs GPU {index}, but there are {n_devices}",
            hint=f"start at most {n_devices} workers on this host (--nproc-per-node), or say --device auto",
        )
    return Device(f"cuda:{index}")


def _n_cuda_devices() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def _why_no_cuda() -> str:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return f"torch {torch.__version__} was built for CUDA {torch.version.cuda}: look at the driver (nvidia-smi)"


@contextmanager
def device_errors(device: Device) -> Iterator[None]:
    """Turns the errors of a device into the project's.

    Raises:
        CapacityError: its memory is used up.
        WorkerError: it failed otherwise.
    """
    try:
        yield
    except CheckpointingException:
        raise
    except RuntimeError as err:
        if not device.is_cuda:
            raise
        text = str(err).partition("\n")[0]
        if _is_out_of_memory(err):
            raise CapacityError(
                f"the memory of {device.torch_name} is used up: {text}",
                hint="end what else runs on it, use fewer --threads, or say --device cpu",
            ) from err
        raise WorkerError(
            f"{device.torch_name} failed: {text}",
            hint="run it again, or say --device cpu; look at dmesg and nvidia-smi",
        ) from err


def _is_out_of_memory(err: RuntimeError) -> bool:
    import torch

    kind: Any = torch.cuda.OutOfMemoryError
    return isinstance(err, kind) or "out of memory" in str(err)
