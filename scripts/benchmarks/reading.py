"""Reading tensors with ``core.open`` beside safetensors' ``safe_open``.

One file of weights is read tensor by tensor, by turns, into new numpy arrays; the files are in the
page cache. Then single slices are read after opening, each of another tensor: rows of that file,
and rows of a Megatron run at TP 8 of the same size, where every row comes from all eight files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

import core
from scripts.benchmarks.measure import MIB, Case, Page, page_parser, run_page
from scripts.benchmarks.sources import make_megatron


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


def main() -> int:
    parser = page_parser("bench reading", __doc__, runs=7)
    parser.add_argument("--size", type=int, default=1024, help="MiB of weights [1024]")
    return run_page(parser.parse_args(), measure)


def measure(page: Page) -> None:
    """Write the files and read them."""
    n_bytes = page.options.size * MIB
    n_rows, n_columns = 4096, 2048
    n_tensors = max(1, n_bytes // (n_rows * n_columns * 2))
    path = page.scratch_dir / "model.safetensors"
    rng = np.random.default_rng(1)
    data = rng.integers(0, 1 << 15, (n_rows, n_columns), dtype=np.uint16).view(np.float16)
    save_file({f"layers.{n}.weight": data for n in range(n_tensors)}, path)

    # All tensors, by turns, so that other work on the machine meets both.
    name = f"reading {n_tensors} tensors"
    if page.wants(name):
        ours, ratios = [], []
        for _ in range(page.options.runs):
            safe_open_s = seconds_of(lambda: read_with_safetensors(path))
            ours.append(seconds_of(lambda: read_with_core(path)))
            ratios.append(ours[-1] / safe_open_s)
        page.add(
            Case(name, values=ours, unit="s"),
            Case(f"{name}, against safe_open", values=ratios, unit="× safe_open"),
        )

    # Slices, after opening. Each tensor is read for the first time, so that finding the files that
    # hold it counts.
    rank_dir = page.scratch_dir / "tp8"
    for kind, source, ending in (
        ("safetensors", path, ".weight"),
        ("Megatron, TP 8", rank_dir, ".linear_fc2.weight"),
    ):
        if not page.wants(kind):
            continue
        if source == rank_dir:
            make_megatron(rank_dir, n_bytes, 8)
        begun = time.perf_counter()
        with core.open(source) as checkpoint:
            opening_s = time.perf_counter() - begun
            tensors = [checkpoint[key] for key in checkpoint if key.endswith(ending)][:32]
            slices = [1000 * seconds_of(tensor[64:128].numpy) for tensor in tensors]
        shape = " × ".join(map(str, tensors[0].shape))
        page.add(
            Case(f"opening {kind}", value=1000 * opening_s, unit="ms"),
            Case(f"64 rows of {shape}, {kind}, opened", values=slices, unit="ms"),
        )


if __name__ == "__main__":
    sys.exit(main())
