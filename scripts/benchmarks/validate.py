"""scripts/bench validate: time and memory of ``ckpt validate``, as ratios measured in one run.

``--deep`` is compared, warm and in turn, with plain reads of the same files (as many threads, 1 MiB
at a time, bytes thrown away) and with reads that also make one XXH3-128 of each file. Wall time on
a machine that does other things says little; the ratios of CPU seconds are shown as well. Then the
scan by itself, with what it hands out to: GB a second of one core's time. Last the metadata level,
with a thousand files.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from scripts.benchmarks.measure import (
    GIB,
    Case,
    Page,
    Run,
    ckpt,
    files_of,
    page_parser,
    remove,
    run,
    run_page,
    warm,
)

KINDS = ("megatron-tp4", "torch", "dcp-1", "safetensors", "zarr3", "zarr3-zstd")
READ_REACH, METADATA_S, RSS_BYTES = 2.5, 1.0, 256 << 20
N_FILES = 1000

READER = """
import mmap, os, sys, threading
files = sys.argv[2:]
lock = threading.Lock()
if sys.argv[1] == "hash":
    import xxhash
def work():
    buffer = memoryview(mmap.mmap(-1, 1 << 20))
    while True:
        with lock:
            if not files:
                return
            name = files.pop()
        fd, at = os.open(name, os.O_RDONLY), 0
        state = xxhash.xxh3_128() if sys.argv[1] == "hash" else None
        while n := os.preadv(fd, [buffer], at):
            if state is not None:
                state.update(buffer[:n])
            at += n
        os.close(fd)
threads = [threading.Thread(target=work) for _ in range(len(os.sched_getaffinity(0)))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
"""Reads files, each by one thread."""

SCANNER = """
import json, sys, time
from pathlib import Path
from core.opening.open import open_checkpoint
from core.engine.scan.run import scan
from core.engine.scan.sums import WantedSums
from core.engine.numbers.facts import ValueObserver
import numpy
opened = open_checkpoint(Path(sys.argv[1]))
made = {}
for name, observers, wanted in (
    ("reading", [], WantedSums(crc=False)),
    ("CRC-32", [], WantedSums()),
    ("digests", [], WantedSums(crc=False, array_digests=True)),
    ("values", [ValueObserver()], WantedSums(crc=False)),
    ("all", [ValueObserver()], WantedSums(array_digests=True)),
):
    rates = []
    for _ in range(3):
        began = time.process_time()
        found = scan(opened.catalog, opened.store, observers, wanted=wanted, threads=1)
        rates.append(found.read_bytes / 1e9 / (time.process_time() - began))
    made[name] = max(rates)
print(json.dumps(made))
"""


class Bench:
    """The rows of this bench."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.options = page.options

    def source(self, kind: str, n: int) -> Path:
        folder = self.page.scratch_dir / kind
        print(f"making {kind}", file=sys.stderr, flush=True)
        maker = Path(__file__).with_name("sources.py")
        run([sys.executable, maker, kind, folder, "--bytes", str(n), "--normal"])
        return folder

    def deep(self, kind: str) -> None:
        """Rows of one kind of checkpoint."""
        src = self.source(kind, self.options.bytes)
        files = [str(path) for path in files_of(src)]
        commands = {
            "deep": ckpt("validate", "--deep", "-q", src),
            "read": [sys.executable, "-c", READER, "read", *files],
            "hash": [sys.executable, "-c", READER, "hash", *files],
        }
        runs: dict[str, list[Run]] = {name: [] for name in commands}
        for i in range(self.options.runs):
            for name in (*commands,) if i % 2 == 0 else reversed((*commands,)):
                warm(src)
                runs[name].append(run(commands[name]))
        for other, reach in (("read", READ_REACH if "zstd" not in kind else None), ("hash", None)):
            case = Case(
                f"validate --deep, {kind}, against {other}",
                reach,
                None,
                runs["deep"],
                unit=f"× {other}",
            )
            case.copies = [done.wall_s for done in runs[other]]
            self.page.add(case)
        cpu = statistics.median(done.cpu_s for done in runs["deep"]) / statistics.median(
            done.cpu_s for done in runs["read"]
        )
        rss_bytes = max(done.rss_bytes for done in runs["deep"])
        self.page.add(
            Case(f"validate --deep, {kind}, CPU seconds", value=cpu, unit="× read"),
            Case(
                f"validate --deep, {kind}",
                value=statistics.median(done.wall_s for done in runs["deep"]),
                unit="s",
            ),
            Case(
                f"validate --deep, {kind}: memory",
                RSS_BYTES / 1e6,
                value=rss_bytes / 1e6,
                unit="MB",
            ),
        )
        remove(src)

    def rates(self) -> None:
        """The scan with one thing that it does at a time."""
        src = self.source("safetensors", self.options.bytes)
        warm(src)
        found = json.loads(run([sys.executable, "-c", SCANNER, src]).stdout.splitlines()[-1])
        for name, rate in found.items():
            self.page.add(
                Case(f"scan: {name}", value=rate, unit="GB a core second", is_lower_better=False)
            )
        remove(src)

    def metadata(self) -> None:
        """The lowest level, with many files."""
        src = self.source("shards", N_FILES)
        for name, more, reach in (
            ("metadata", (), METADATA_S),
            ("--headers", ("--headers",), None),
        ):
            runs = [run(ckpt("validate", "-q", *more, src)) for _ in range(self.options.runs)]
            wall_s = statistics.median(done.wall_s for done in runs)
            self.page.add(
                Case(
                    f"validate {name}, {N_FILES} shards", reach, None, runs, value=wall_s, unit="s"
                )
            )
        remove(src)


def main() -> int:
    parser = page_parser("bench validate", __doc__, runs=5)
    parser.add_argument(
        "--bytes", type=int, default=2 * GIB, metavar="N", help="size of a checkpoint [2 GiB]"
    )
    options = parser.parse_args()

    def measure(page: Page) -> None:
        bench = Bench(page)
        for kind in filter(page.wants, KINDS):
            with page.tolerant(kind):
                bench.deep(kind)
        for name, rest in (("rates", bench.rates), ("metadata", bench.metadata)):
            if page.wants(name):
                rest()

    return run_page(options, measure)


if __name__ == "__main__":
    sys.exit(main())
