"""Speed of fingerprints: bytes a second of one core's time, and their cost in the copy pass.

The arithmetic is fed as a copy feeds it, in pieces of 1 MiB that have just been written or read.
Times are processor time of the thread, so that other work on the machine counts less; CRC-32,
XXH3-128 and a plain copy of the same pieces are measured in the same run. Beside it, a conversion
with and without ``--fingerprint`` in one run each after the other, by processor time of the process
and by the clock.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path

from core.arrays.box import Box
from core.arrays.checksum import crc32
from core.engine.fingerprint.definition import form_of
from core.engine.fingerprint.kernel import fastest_products, products_in_numpy
from core.engine.fingerprint.sums import FormSum
from core.verbs.convert.run import Job, run
from scripts.benchmarks.measure import MIB, Case, Page, page_parser, run_page

SHAPES = (
    ("rows of 16 KiB", (4096, 8192)),
    ("rows of 22 KiB (11264)", (5000, 11264)),
    ("rows of 4 KiB", (16384, 2048)),
    ("rows of 1 KiB", (32768, 512)),
    ("rows of 64 bytes", (1 << 19, 32)),
    ("one axis", (1 << 25,)),
)
"""Name, and shape of a 16-bit tensor."""


def best(work: Callable[[], object], *, times: int) -> float:
    """Seconds of this thread's processor time, the least of several."""
    found = []
    for _ in range(times):
        begun = time.thread_time()
        work()
        found.append(time.thread_time() - begun)
    return min(found)


def rate(n_bytes: int, seconds: float) -> float:
    """Gigabytes a second."""
    return n_bytes / seconds / 1e9


def arithmetic(times: int) -> Iterator[Case]:
    """Yield the rows of one core, with pieces of 1 MiB in the cache."""
    import numpy as np
    import xxhash

    data = np.random.default_rng(1).integers(0, 256, 4 * MIB, dtype=np.uint8)
    pieces = [memoryview(data)[start : start + MIB] for start in range(0, len(data), MIB)]
    spare = bytearray(MIB)

    def copied(piece: memoryview) -> None:
        spare[:] = piece

    def case(name: str, n_bytes: int, work: Callable[[], object]) -> Case:
        return Case(name, value=rate(n_bytes, best(work, times=times)), unit="GB/s")

    for name, work in (("copy", copied), ("CRC-32", crc32), ("XXH3-128", xxhash.xxh3_128_digest)):
        yield case(name, MIB, partial(work, pieces[0]))
    cases = []
    for engine in ("torch", "numpy"):
        with fastest_products(1 << 40) as chosen:
            products = chosen if engine == "torch" else products_in_numpy
            for name, shape in SHAPES:
                form = FormSum(form_of(shape, 2), products)
                form.add_run(0, pieces[0])
                work = partial(form.add_run, 0, pieces[0])
                cases.append(case(f"fingerprint ({engine}), {name}", MIB, work))
            for tp in (2, 8):
                shape = (4096, 8192)
                box = Box((0, 0), (MIB * tp // prod(shape[1:]) // 2, shape[1] // tp))
                n_bytes = box.n_elements * 2
                form = FormSum(form_of(shape, 2), products)
                work = partial(form.add_box, shape, box, 2, pieces[0][:n_bytes])
                cases.append(case(f"fingerprint ({engine}), columns of TP {tp}", n_bytes, work))
    yield from cases
    rates = [case.result for case in cases if "torch" in case.name]
    yield Case("fingerprint of one core, by shape and cut", values=rates, unit="GB/s")


def conversion(n_bytes: int, folder: Path, runs: int) -> Iterator[Case]:
    """Yield what ``--fingerprint`` costs a conversion, torch → safetensors, from the cache."""
    import numpy as np
    import torch

    rows = max(1, n_bytes // 8 // 8192 // 2)
    chance = np.random.default_rng(2)
    tensors = {
        f"layers.{n}.weight": torch.from_numpy(
            chance.integers(0, 1 << 16, (rows, 8192), dtype=np.uint16)
        )
        for n in range(8)
    }
    source = folder / "source.pt"
    torch.save(tensors, source)
    del tensors
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(runs):
        for fingerprint in (False, True):
            out = folder / "out"
            begun, used = time.monotonic(), time.process_time()
            run(Job(src=source, dst=out, to="safetensors", fsync=False, fingerprint=fingerprint))
            found[fingerprint].append((time.monotonic() - begun, time.process_time() - used))
            shutil.rmtree(out)
    plain, with_sums = (
        [min(column) for column in zip(*found[fingerprint], strict=True)]
        for fingerprint in (False, True)
    )
    for name, column in (("conversion", 0), ("conversion, processor", 1)):
        ratio = with_sums[column] / plain[column]
        yield Case(name, value=plain[column], unit="s")
        yield Case(f"{name} with fingerprints", value=ratio, unit="× without")


def main() -> int:
    parser = page_parser("bench fingerprint", __doc__, runs=3)
    parser.add_argument("--times", type=int, default=100, help="repetitions of the arithmetic")
    parser.add_argument(
        "--mib", type=int, default=1024, help="size of the checkpoint that is converted; 0 for none"
    )
    options = parser.parse_args()

    def measure(page: Page) -> None:
        cases = list(arithmetic(options.times))
        if options.mib:
            cases += conversion(options.mib * MIB, page.scratch_dir, options.runs)
        page.add(*(case for case in cases if page.wants(case.name)))

    return run_page(options, measure)


if __name__ == "__main__":
    sys.exit(main())
