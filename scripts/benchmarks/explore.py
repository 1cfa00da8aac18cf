"""``ckpt explore`` of a checkpoint of many tensors: time to the names, and the longest pause of the
screen while it reads, in a terminal of 80 × 24 that textual simulates.

Imports are not counted. The aim for 100,000 tensors on an idle machine is 1.5 s; the seconds of CPU
say how far other work on the machine made the time longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import struct
import tempfile
from pathlib import Path
from time import perf_counter, process_time

from ckpt_cli.explore.app import ExplorerApp
from ckpt_cli.explore.source import SourceOptions

_KEYS = (["down"], ["right"], ["down"], ["right"], ["slash", "d", "o", "w", "n"])
_STEP_S = 0.005
_WATCHED_S = 1.0


def write_model(path: Path, n_tensors: int) -> None:
    """Write a file of tensors with the names of a mixture of experts."""
    n_experts = 256
    header = {}
    for number in range(n_tensors):
        layer, expert = divmod(number // 3, n_experts)
        name = ("gate_proj", "up_proj", "down_proj")[number % 3]
        header[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"] = {
            "dtype": "BF16",
            "shape": [2, 4],
            "data_offsets": [16 * number, 16 * number + 16],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16 * n_tensors))


async def longest_pause() -> float:
    """Return the longest time, in seconds, for which the screen did not react."""
    longest, last = 0.0, perf_counter()
    end = last + _WATCHED_S
    while last < end:
        await asyncio.sleep(_STEP_S)
        now = perf_counter()
        longest, last = max(longest, now - last - _STEP_S), now
    return longest


async def measure(path: Path) -> tuple[float, float, float]:
    """Return the seconds, and those of CPU, until the names are shown, and the longest pause."""
    begun, cpu_begun = perf_counter(), process_time()
    app = ExplorerApp(SourceOptions(path=path))
    async with app.run_test(size=(80, 24)) as pilot:
        while app.source is None:
            await asyncio.sleep(_STEP_S)
        await pilot.pause()
        shown, cpu = perf_counter() - begun, process_time() - cpu_begun
        pauses = [await longest_pause()]
        for keys in _KEYS:
            await pilot.press(*keys)
            pauses.append(await longest_pause())
    return shown, cpu, max(pauses)


def main() -> None:
    """Write the file, measure, and print the medians."""
    parser = argparse.ArgumentParser(prog="scripts/bench explore", description=__doc__)
    parser.add_argument("--tensors", type=int, default=100_000, help="number of tensors")
    parser.add_argument("--times", type=int, default=5, help="measurements")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write_model(path, options.tensors)
        small = Path(folder) / "small.safetensors"
        write_model(small, 3)
        asyncio.run(measure(small))  # imports
        results = [asyncio.run(measure(path)) for _ in range(options.times)]
    shown, cpu, pauses = zip(*results, strict=True)
    print(f"{options.tensors:,} tensors, median of {options.times}:")
    print(f"  names shown after {statistics.median(shown):.2f} s (least {min(shown):.2f} s)")
    print(f"  of CPU {statistics.median(cpu):.2f} s (least {min(cpu):.2f} s)")
    print(f"  longest pause of the screen {1000 * statistics.median(pauses):.0f} ms")
