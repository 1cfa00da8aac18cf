"""Which kinds of work a device does: those it does bit for bit as the CPU path, and, with ``auto``, faster.

A kind of work is tried when something first needs it, so that what is never done is never tried:

1. It is done on samples that hold every pattern that might be treated otherwise (ties, subnormal numbers, NaNs,
   infinities, extreme sums). Where the device gives other bits than the CPU path, it is not used for that work.
2. With ``auto``, as many threads as will work do it to typical numbers, once with the device (host → device, kernel,
   device → host) and once without; the faster way is taken.

``decisions`` says what was found out, for ``--json``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from core.calibration.trials import Trial, trial_of
from core.device.device import Device
from core.device.lane import host_bytes
from core.errors import CapacityError, WorkerError
from core.team.threads import ThreadGroup

ALL = "all"
"""In place of a kind of work."""
MIB = 1 << 20
_LEAST_BYTES = 128 * MIB
"""Memory that is left for the work."""
SAMPLE_BYTES = 8 << 20
"""Of each thread, when speeds are measured."""
_ROUNDS = 2
_PATIENCE_S = 300
"""Threads wait so long for each other, if one fails."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a kind of work is done.

    Args:
        work: its name.
        is_on_device: there, and not on the CPU path.
        reason: why.
        cpu_bytes_per_s, device_bytes_per_s: of all threads together, as measured; None where that was not needed.
    """

    work: str
    is_on_device: bool
    reason: str
    cpu_bytes_per_s: int | None = None
    device_bytes_per_s: int | None = None


_known: dict[tuple[str, bool, str], Decision] = {}
_lock = threading.Lock()


def settled(device: Device | None, works: Iterable[str], *, threads: int) -> Device | None:
    """The device, for those of some kinds of work that it shall do.

    Args:
        works: names from ``core.device.device``.
        threads: that will do them.

    Raises:
        CapacityError, WorkerError: it fails, and was asked for by name.
    """
    if device is None:
        return None
    done = set(device.work or ())
    with _lock:
        for work in works:
            key = (device.torch_name, device.is_auto, work)
            if key not in _known:
                _known[key] = _decision(device, work, threads)
            if _known[key].is_on_device:
                done.add(work)
    return replace(device, work=frozenset(done))


def beside(device: Device | None, *, memory_bytes: int, threads: int) -> tuple[Device | None, int]:
    """The device, and the memory that it leaves for the work.

    Args:
        memory_bytes: that the process may use.
        threads: that will work.

    Returns:
        None as device, and all memory, where ``auto`` has not enough for it.

    Raises:
        CapacityError: there is not enough, and the device was asked for by name.
    """
    taken = host_bytes(device, threads)
    if device is None or memory_bytes - taken >= _LEAST_BYTES:
        return device, memory_bytes - taken
    what = f"{device.torch_name} and its pinned buffers take {taken} bytes of host memory beside the work"
    if not device.is_auto:
        raise CapacityError(
            f"{memory_bytes} bytes of memory are allowed, but {what}",
            hint=f"allow at least {-(-(taken + _LEAST_BYTES) // MIB)} MiB (--memory), or say --device cpu",
        )
    with _lock:
        _known[device.torch_name, True, ALL] = Decision(ALL, False, f"of {memory_bytes} allowed bytes, {what}")
    return None, memory_bytes


def decisions(device: Device) -> list[Decision]:
    """What was found out in this process, in the order in which it was needed."""
    with _lock:
        return [
            found
            for (name, is_auto, _), found in _known.items()
            if name == device.torch_name and is_auto == device.is_auto
        ]


def _decision(device: Device, work: str, threads: int) -> Decision:
    able = replace(device, work=frozenset({work}))
    trial = trial_of(work)
    try:
        if not trial.is_exact(able):
            return Decision(work, False, "the device gives other bits than the processor")
        if not device.is_auto:
            return Decision(work, True, "asked for")
        cpu, there = (bytes_per_s(trial, one, threads=threads) for one in (None, able))
    except (CapacityError, WorkerError) as err:
        if not device.is_auto:
            raise
        return Decision(work, False, f"the device failed: {err.message}")
    is_faster = there > cpu
    return Decision(work, is_faster, "measured: it is faster there" if is_faster else "measured: no faster", cpu, there)


def bytes_per_s(
    trial: Trial, device: Device | None, *, threads: int, sample_bytes: int = SAMPLE_BYTES, rounds: int = _ROUNDS
) -> int:
    """How many source bytes threads treat in a second, the best of some rounds.

    Args:
        device: that does the work; None for the CPU path.
    """
    best: list[float] = []
    ready = threading.Barrier(threads)
    n_bytes: list[int] = []

    def work() -> None:
        do, size = trial.typical(device, sample_bytes)
        do()  # memory, tables and streams are made
        times = _timed(do, ready, rounds)
        best.append(min(times))
        n_bytes.append(size)

    ThreadGroup("trial").run(work, threads)
    return round(sum(n_bytes) / max(max(best), 1e-9))


def _timed(do: Callable[[], None], ready: threading.Barrier, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        ready.wait(_PATIENCE_S)
        begun = time.monotonic()
        do()
        times.append(time.monotonic() - begun)
    return times
