"""``ckpt explore`` of a checkpoint of many tensors: time to the names, and the longest pause of the
screen while it reads, in a terminal of 80 × 24 that textual simulates.

Imports are not counted. The aim for 100,000 tensors on an idle machine is 1.5 s; the seconds of CPU
say how far other work on the machine made the time longer.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from pathlib import Path
from time import perf_counter, process_time

from ckpt_cli.explore.app import ExplorerApp
from ckpt_cli.explore.source import SourceOptions
from scripts.benchmarks.measure import Case, Page, page_parser, run_page

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


async def explore(path: Path) -> tuple[float, float, float]:
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


def main() -> int:
    parser = page_parser("bench explore", __doc__, runs=5)
    parser.add_argument("--tensors", type=int, default=100_000, help="number of tensors [100000]")
    return run_page(parser.parse_args(), measure)


def measure(page: Page) -> None:
    """Write the file and explore it."""
    path, small_path = (
        page.scratch_dir / "model.safetensors",
        page.scratch_dir / "small.safetensors",
    )
    write_model(path, page.options.tensors)
    write_model(small_path, 3)
    asyncio.run(explore(small_path))  # imports
    results = [asyncio.run(explore(path)) for _ in range(page.options.runs)]
    rows = ("names shown after", "CPU until names are shown", "longest pause of the screen")
    for row, seconds in zip(rows, zip(*results, strict=True), strict=True):
        name = f"explore {page.options.tensors} tensors: {row}"
        if page.wants(name):
            page.add(Case(name, values=list(seconds), unit="s"))


if __name__ == "__main__":
    sys.exit(main())
