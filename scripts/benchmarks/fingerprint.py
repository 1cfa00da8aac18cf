"""Speed of fingerprints: bytes a second of one core's time, and their cost in the copy pass, as
Markdown tables.

The arithmetic is fed as a copy feeds it, in pieces of 1 MiB that have just been written or read.
Times are processor time of the thread, so that other work on the machine counts less; CRC-32,
XXH3-128 and a plain copy of the same pieces are measured in the same run. Beside it, a conversion
with and without ``--fingerprint`` in one run each after the other, by processor time of the process
and by the clock.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path

from core.arrays.box import Box
from core.arrays.checksum import crc32
from core.engine.fingerprint.definition import form_of
from core.engine.fingerprint.kernel import fastest_products, products_in_numpy
from core.engine.fingerprint.sums import FormSum
from core.verbs.convert.run import Job, run

MIB = 1 << 20
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


def rate(n_bytes: int, seconds: float) -> str:
    """Gigabytes a second."""
    return f"{n_bytes / seconds / 1e9:.1f}"


def arithmetic(times: int) -> None:
    """The table of one core."""
    import numpy as np
    import xxhash

    data = np.random.default_rng(1).integers(0, 256, 4 * MIB, dtype=np.uint8)
    pieces = [memoryview(data)[start : start + MIB] for start in range(0, len(data), MIB)]
    spare = bytearray(MIB)

    def copied(piece: memoryview) -> None:
        spare[:] = piece

    print("| pieces of 1 MiB, in cache | GB/s of a core |\n| --- | ---: |")
    for name, work in (("copy", copied), ("CRC-32", crc32), ("XXH3-128", xxhash.xxh3_128_digest)):
        print(f"| {name} | {rate(MIB, best(lambda work=work: work(pieces[0]), times=times))} |")
    for engine in ("torch", "numpy"):
        with fastest_products(1 << 40) as chosen:
            products = chosen if engine == "torch" else products_in_numpy
            for name, shape in SHAPES:
                made = FormSum(form_of(shape, 2), products)
                made.add_run(0, pieces[0])
                seconds = best(lambda made=made: made.add_run(0, pieces[0]), times=times)
                print(f"| fingerprint ({engine}), {name} | {rate(MIB, seconds)} |")
            for tp in (2, 8):
                shape = (4096, 8192)
                box = Box((0, 0), (MIB * tp // prod(shape[1:]) // 2, shape[1] // tp))
                made = FormSum(form_of(shape, 2), products)
                seconds = best(
                    lambda m=made, b=box, s=shape: m.add_box(
                        s, b, 2, pieces[0][: b.n_elements * 2]
                    ),
                    times=times,
                )
                print(
                    f"| fingerprint ({engine}), columns of TP {tp} | "
                    f"{rate(box.n_elements * 2, seconds)} |"
                )


def conversion(n_bytes: int, folder: Path, runs: int) -> None:
    """What ``--fingerprint`` costs a conversion."""
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
    print(
        f"\n| torch → safetensors, {n_bytes / MIB:.0f} MiB in the cache, 2 threads | s | s of "
        "processor |\n"
        "| --- | ---: | ---: |"
    )
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(runs):
        for fingerprint in (False, True):
            out = folder / "out"
            begun, used = time.monotonic(), time.process_time()
            run(Job(src=source, dst=out, to="safetensors", fsync=False, fingerprint=fingerprint))
            found[fingerprint].append((time.monotonic() - begun, time.process_time() - used))
            shutil.rmtree(out)
    for fingerprint, name in ((False, "CRC-32 and digests"), (True, "and fingerprints")):
        wall, used = (min(one[n] for one in found[fingerprint]) for n in (0, 1))
        print(f"| {name} | {wall:.2f} | {used:.2f} |")
    ratios = [
        min(one[n] for one in found[True]) / min(one[n] for one in found[False]) for n in (0, 1)
    ]
    print(f"| ratio | {ratios[0]:.2f} | {ratios[1]:.2f} |")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=100, help="repetitions of the arithmetic")
    parser.add_argument(
        "--mib", type=int, default=1024, help="size of the checkpoint that is converted; 0 for none"
    )
    parser.add_argument("--runs", type=int, default=3, help="repetitions of the conversion")
    parser.add_argument(
        "--folder", type=Path, help="where it is written; default: a temporary directory"
    )
    options = parser.parse_args()

    arithmetic(options.times)
    if options.mib:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            conversion(options.mib * MIB, Path(folder), options.runs)


if __name__ == "__main__":
    main()
