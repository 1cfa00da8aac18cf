"""Choose the kinds of work that a device does.

It does those for which it gives the CPU path's bits and, with ``auto``, is faster.

A kind of work is tried when it is first needed, so that work that is never done is never tried:

1. It is done on samples that hold every pattern that might be treated in another way (ties,
   subnormal numbers, NaNs, infinities, extreme sums). If the device gives other bits than the CPU
   path, it is not used for that work.
2. With ``auto``, as many threads as will work do it on typical numbers, once with the device (host
   → device, kernel, device → host) and once without; the faster way is taken.

``decisions`` lists the results, for ``--json``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from core.engine.calibration.trials import Trial, trial_of
from core.engine.device.device import Device
from core.engine.device.lane import host_bytes
from core.engine.team.threads import ThreadGroup
from core.errors import CapacityError, WorkerError
from core.values import dataclass

ALL = "all"
"""In place of a kind of work: all of them."""
MIB = 1 << 20
_LEAST_BYTES = 128 * MIB
"""Minimum memory for the work itself."""
SAMPLE_BYTES = 8 << 20
"""Bytes that each thread treats when speeds are measured."""
_ROUNDS = 2
_PATIENCE_S = 300
"""Seconds that threads wait for each other if one fails."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision where a kind of work is done.

    Args:
        work: name of the kind of work.
        is_on_device: True for the device, False for the CPU path.
        reason: reason of the decision.
        cpu_bytes_per_s, device_bytes_per_s: measured speed of all threads together; None if it was
            not measured.
    """

    work: str
    is_on_device: bool
    reason: str
    cpu_bytes_per_s: int | None = None
    device_bytes_per_s: int | None = None


_decisions: dict[tuple[str, bool, str], Decision] = {}
_lock = threading.Lock()


def choose_device(device: Device | None, works: Iterable[str], *, threads: int) -> Device | None:
    """Return the device with those kinds of work that it should do.

    Kinds of work that this process has not decided on are tried first.

    Args:
        works: kinds of work (``core.engine.device.device``).
        threads: number of threads that will do them.

    Raises:
        CapacityError, WorkerError: the device fails, and was requested by name.
    """
    if device is None:
        return None
    done = set(device.work or ())
    with _lock:
        for work in works:
            key = (device.torch_name, device.is_auto, work)
            if key not in _decisions:
                _decisions[key] = _decide(device, work, threads)
            if _decisions[key].is_on_device:
                done.add(work)
    return replace(device, work=frozenset(done))


def reserve_device_memory(
    device: Device | None, *, memory_bytes: int, threads: int
) -> tuple[Device | None, int]:
    """Set aside the host memory that a device needs.

    Args:
        memory_bytes: bytes that the process may use.
        threads: number of threads that will work.

    Returns:
        The device, and the bytes left for the work; None and all bytes if ``auto`` chose the device
        and the memory is too small for it.

    Raises:
        CapacityError: the memory is too small, and the device was requested by name.
    """
    device_bytes = host_bytes(device, threads)
    if device is None or memory_bytes - device_bytes >= _LEAST_BYTES:
        return device, memory_bytes - device_bytes
    problem = (
        f"{device.torch_name} and its pinned buffers need {device_bytes / MIB:,.1f} MiB of "
        f"host memory on top of the work itself, but the memory limit is "
        f"{memory_bytes / MIB:,.1f} MiB"
    )
    if not device.is_auto:
        raise CapacityError(
            problem,
            hint=f"set --memory to at least {-(-(device_bytes + _LEAST_BYTES) // MIB)}MiB, "
            "or use --device cpu",
        )
    with _lock:
        _decisions[device.torch_name, True, ALL] = Decision(ALL, False, problem)
    return None, memory_bytes


def decisions(device: Device) -> list[Decision]:
    """Return this process's decisions about a device, in the order in which they were needed."""
    with _lock:
        return [
            decision
            for (name, is_auto, _), decision in _decisions.items()
            if name == device.torch_name and is_auto == device.is_auto
        ]


def _decide(device: Device, work: str, threads: int) -> Decision:
    """Try a kind of work on a device, and with ``auto`` measure it there and on the CPU path."""
    able = replace(device, work=frozenset({work}))
    trial = trial_of(work)
    try:
        # The device must give the same bits ...
        if not trial.is_exact(able):
            return Decision(work, False, "the device's results are not bit-identical to the CPU's")
        if not device.is_auto:
            return Decision(work, True, "requested")
        # ... and, with ``auto``, be faster with as many threads as will work.
        cpu_speed, device_speed = (
            bytes_per_s(trial, place, threads=threads) for place in (None, able)
        )
    except (CapacityError, WorkerError) as err:
        if not device.is_auto:
            raise
        return Decision(work, False, f"the device failed: {err.message}")
    is_faster = device_speed > cpu_speed
    reason = "faster in a measurement" if is_faster else "no faster in a measurement"
    return Decision(work, is_faster, reason, cpu_speed, device_speed)


def bytes_per_s(
    trial: Trial,
    device: Device | None,
    *,
    threads: int,
    sample_bytes: int = SAMPLE_BYTES,
    rounds: int = _ROUNDS,
) -> int:
    """Measure how many source bytes per second threads treat, in the best of several rounds.

    Args:
        device: does the work; None for the CPU path.
        sample_bytes: source bytes of each thread in a round.
    """
    best: list[float] = []
    ready = threading.Barrier(threads)
    n_bytes: list[int] = []

    def work() -> None:
        do, size = trial.typical(device, sample_bytes)
        do()  # untimed: creates memory, tables and streams
        times = _timed(do, ready, rounds)
        best.append(min(times))
        n_bytes.append(size)

    ThreadGroup("trial").run(work, threads)
    # The slowest thread counts, by its best round.
    return round(sum(n_bytes) / max(max(best), 1e-9))


def _timed(do: Callable[[], None], ready: threading.Barrier, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        ready.wait(_PATIENCE_S)
        begun = time.monotonic()
        do()
        times.append(time.monotonic() - begun)
    return times
