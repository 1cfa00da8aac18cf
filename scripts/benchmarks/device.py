"""Speed of per-byte work on a device, in one run.

First the limits: how fast bytes go to the device and back, alone and at once, from pinned and from
other memory, and within the device. Then every kind of work: the processor's way, the kernel on
bytes that lie on the device, and the whole way there and back, which is what ``--device auto``
compares; all in GB of source bytes a second. Without a GPU the same code runs on torch's CPU: the
tables then show what it costs there, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from core.engine.calibration.choice import bytes_per_s
from core.engine.calibration.trials import trial_of, typical_numbers
from core.engine.device.cast import kernel_of
from core.engine.device.compare import count_differing_kernel
from core.engine.device.device import (
    COMPARE,
    DEQUANTIZE,
    FINGERPRINT,
    QUANTIZE,
    VALUES,
    Device,
    cast_work,
)
from core.engine.device.lane import PIECE_BYTES, Lane, as_tensor, host_buffer, lane_of
from core.engine.fingerprint.kernel import factors_on, products_kernel
from core.engine.numbers.facts_on_device import extremes_kernel
from scripts.benchmarks.measure import Case, add_result_options, table, write_results

CASTS = (
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "float32"),
    ("bfloat16", "float8_e4m3fn"),
    ("float32", "float8_e4m3fn"),
    ("float64", "float32"),
)
OTHERS = (VALUES, FINGERPRINT, COMPARE, QUANTIZE, DEQUANTIZE)


def rate(n_bytes: float, seconds: float) -> float:
    """GB a second."""
    return n_bytes / max(seconds, 1e-9) / 1e9


def timed(lane: Lane, work: Callable[[], object], *, rounds: int) -> float:
    """Seconds, the least of some rounds, the first one left out; the device has ended each."""

    def ended() -> None:
        if lane.device.is_cuda:
            torch.cuda.synchronize(lane.torch_device)

    times = []
    for _ in range(rounds + 1):
        ended()
        begun = time.perf_counter()
        work()
        ended()
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def limits(lane: Lane, n_bytes: int, rounds: int) -> dict[str, float]:
    """GB a second of plain copies."""
    pinned = [as_tensor(host_buffer(lane.device, n_bytes)) for _ in range(2)]
    for one in pinned:
        one.fill_(1)
    usual = torch.ones(n_bytes, dtype=torch.uint8)
    there = [torch.zeros(n_bytes, dtype=torch.uint8, device=lane.torch_device) for _ in range(2)]
    streams = (
        [torch.cuda.Stream(lane.torch_device) for _ in range(2)] if lane.device.is_cuda else []
    )

    def both_ways() -> None:
        if not streams:
            there[0].copy_(pinned[0])
            pinned[1].copy_(there[1])
            return
        with torch.cuda.stream(streams[0]):
            there[0].copy_(pinned[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            pinned[1].copy_(there[1], non_blocking=True)

    ways: dict[str, tuple[float, Callable[[], object]]] = {
        "host → device, pinned": (1, lambda: there[0].copy_(pinned[0], non_blocking=True)),
        "host → device, not pinned": (1, lambda: there[0].copy_(usual)),
        "device → host, pinned": (1, lambda: pinned[1].copy_(there[0], non_blocking=True)),
        "device → host, not pinned": (1, lambda: usual.copy_(there[0])),
        "both ways at once, pinned (sum)": (2, both_ways),
        "within the device (read + written)": (2, lambda: there[1].copy_(there[0])),
        "within the host (read + written)": (2, lambda: pinned[1].copy_(usual)),
    }
    return {
        name: rate(times * n_bytes, timed(lane, work, rounds=rounds))
        for name, (times, work) in ways.items()
    }


def kernel_rate(lane: Lane, work: str, rounds: int) -> float | None:
    """GB a second of the kernel alone, on a piece that lies on the device; None for work of several
    steps.
    """
    dtype = work.split(" ")[1] if work.startswith("cast ") else "bfloat16"
    data = as_tensor(typical_numbers(dtype, PIECE_BYTES)).to(lane.torch_device)
    if work.startswith("cast "):
        kernel = kernel_of(lane, dtype, work.rpartition(" ")[2])
    elif work == VALUES:
        kernel = extremes_kernel(2)
    elif work == FINGERPRINT:
        kernel = products_kernel(factors_on(lane), 0, 4096)
    elif work == COMPARE:
        half = len(data) // 2
        compares = count_differing_kernel(1)

        def kernel(both: torch.Tensor) -> torch.Tensor:
            return compares(both[:half], both[half:])

    else:
        return None
    n = 20 if lane.device.is_cuda else 2
    return rate(n * len(data), timed(lane, lambda: [kernel(data) for _ in range(n)], rounds=rounds))


def list_cases(lane: Lane, threads: Sequence[int], *, n_bytes: int, rounds: int) -> Iterator[Case]:
    """Yield the limits, and the rows of each kind of work.

    Raises:
        SystemExit: the device's bits are not the processor's.
    """
    for name, speed in limits(lane, n_bytes, rounds).items():
        yield Case(f"copy, {name}", value=speed, unit="GB/s")
    for work in (*(cast_work(*pair) for pair in CASTS), *OTHERS):
        trial = trial_of(work)
        able = Device(lane.device.torch_name, work=frozenset({work}))
        if not trial.is_exact(able):
            raise SystemExit(f"{work}: the bits of {able.torch_name} are not the processor's")
        if (kernel := kernel_rate(lane, work, rounds)) is not None:
            yield Case(f"{work}, kernel alone", value=kernel, unit="GB/s")
        for n in threads:
            for way, place in (("processor", None), ("GPU", able)):
                speed = bytes_per_s(trial, place, threads=n, sample_bytes=n_bytes, rounds=rounds)
                name = f"{work}, {n} thread{'s' * (n > 1)}: {way}"
                yield Case(name, value=speed / 1e9, unit="GB/s")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench device",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", default=None, help="cuda:N or cpu (default: the first GPU, else cpu)"
    )
    parser.add_argument(
        "--mib", type=int, default=64, help="source bytes of each thread (default 64)"
    )
    parser.add_argument(
        "--threads",
        default=None,
        help="comma-separated numbers of threads (default: 1 and all cores)",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="the best of so many counts (default 3)"
    )
    add_result_options(parser)
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = Device(options.device or ("cuda:0" if has_gpu else "cpu"))
    if device.is_cuda and not has_gpu:
        parser.error("there is no GPU here; without --device, torch's CPU is measured")
    if options.record and not device.is_cuda:
        parser.error("--record publishes what a GPU does, and there is none here")
    n_cores = len(os.sched_getaffinity(0))
    threads = (
        [int(n) for n in options.threads.split(",")] if options.threads else sorted({1, n_cores})
    )
    torch.set_num_threads(1)
    lane = lane_of(device)
    name = (
        torch.cuda.get_device_name(lane.torch_device)
        if device.is_cuda
        else "torch's CPU in place of a GPU"
    )
    cases = list(list_cases(lane, threads, n_bytes=options.mib << 20, rounds=options.rounds))
    print(f"{name}, torch {torch.__version__}, {n_cores} cores; source bytes\n")
    print(table(cases))
    write_results(cases, options, {"device": name}, machine=f"{name}, ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
