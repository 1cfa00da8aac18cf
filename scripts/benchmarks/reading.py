"""Reading tensors with ``core.open`` beside safetensors' ``safe_open``, as Markdown tables.

One file of weights is read tensor by tensor, by turns, into new numpy arrays; the files are in the
page cache. Then single slices are read after opening, each of another tensor: rows of that file,
and rows of a Megatron run at TP 8 of the same size, where every row comes from all eight files.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

import core
from scripts.benchmarks.sources import make_megatron

MIB = 1 << 20


def seconds_of(work: Callable[[], object]) -> float:
    """Return the wall time of a call."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def read_with_safetensors(path: Path) -> None:
    """Read every tensor with safetensors."""
    with safe_open(path, "np") as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            file.get_tensor(key)


def read_with_core(path: Path) -> None:
    """Read every tensor with ``core.open``."""
    with core.open(path) as checkpoint:
        for tensor in checkpoint.values():
            tensor.numpy()


def main() -> None:
    """Write the files, measure, and print the tables."""
    parser = argparse.ArgumentParser(prog="scripts/bench reading", description=__doc__)
    parser.add_argument("--size", type=int, default=1024, help="MiB of weights")
    parser.add_argument("--times", type=int, default=7, help="measurements of each")
    options = parser.parse_args()

    n_rows, n_columns = 4096, 2048
    n_tensors = max(1, options.size * MIB // (n_rows * n_columns * 2))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        rng = np.random.default_rng(1)
        data = rng.integers(0, 1 << 15, (n_rows, n_columns), dtype=np.uint16).view(np.float16)
        save_file({f"layers.{n}.weight": data for n in range(n_tensors)}, path)

        # All tensors, by turns, so that other work on the machine meets both.
        times: dict[str, list[float]] = {"safe_open": [], "core.open": []}
        for _ in range(options.times):
            times["safe_open"].append(seconds_of(lambda: read_with_safetensors(path)))
            times["core.open"].append(seconds_of(lambda: read_with_core(path)))
        reference = statistics.median(times["safe_open"])
        print(f"| {n_tensors} tensors, {path.stat().st_size / MIB:,.0f} MiB | ms | ratio |")
        print("| --- | ---: | ---: |")
        for name, values in times.items():
            median = statistics.median(values)
            print(f"| {name} | {median * 1000:,.0f} | {median / reference:.2f} |")

        # Slices, after opening. Each tensor is read for the first time, so that finding the files
        # that hold it counts.
        make_megatron(Path(folder) / "tp8", options.size * MIB, 8)
        print(
            "\n| 64 rows of a tensor, after opening | opening, ms | a slice, median ms | most ms |"
        )
        print("| --- | ---: | ---: | ---: |")
        for name, source, ending in (
            ("safetensors", path, ".weight"),
            ("Megatron, TP 8", Path(folder) / "tp8", ".linear_fc2.weight"),
        ):
            begun = time.perf_counter()
            with core.open(source) as checkpoint:
                opening = time.perf_counter() - begun
                tensors = [checkpoint[key] for key in checkpoint if key.endswith(ending)][:32]
                slices = [seconds_of(tensor[64:128].numpy) for tensor in tensors]
            shape = " × ".join(map(str, tensors[0].shape))
            seconds = (opening, statistics.median(slices), max(slices))
            print(
                f"| {name}, {shape} | "
                + " | ".join(f"{1000 * value:.2f}" for value in seconds)
                + " |"
            )


if __name__ == "__main__":
    main()
