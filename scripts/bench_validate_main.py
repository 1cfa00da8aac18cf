"""scripts/bench_validate: time and memory of ``ckpt validate``, as ratios measured in one run.

``--deep`` is compared, warm and in turn, with plain reads of the same files (as many threads, 1 MiB at a time, bytes
thrown away) and with reads that also make one XXH3-128 of each file. Wall time on a machine that does other things says
little; the ratios of CPU seconds are shown as well. Then the scan by itself, with what it hands out to: GB a second of
one core's time. Last the metadata level, with a thousand files.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path

from bench_measure import Case, CommandError, Run, ckpt, files_of, remove, run, table, warm

GIB = 1 << 30
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
from core.open import open_checkpoint
from core.scan import scan
from core.scan_sums import Wanted
from core.value_facts import ValueObserver
import numpy
opened = open_checkpoint(Path(sys.argv[1]))
made = {}
for name, observers, wanted in (
    ("reading", [], Wanted(crc=False)),
    ("CRC-32", [], Wanted()),
    ("digests", [], Wanted(crc=False, array_digests=True)),
    ("values", [ValueObserver()], Wanted(crc=False)),
    ("all", [ValueObserver()], Wanted(array_digests=True)),
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
    """One run: its options, its scratch directory and the rows so far."""

    def __init__(self, options: argparse.Namespace, scratch_dir: Path) -> None:
        self.options = options
        self.scratch_dir = scratch_dir
        self.cases: list[Case] = []
        self.failures: list[str] = []

    def wants(self, name: str) -> bool:
        return self.options.only is None or re.search(self.options.only, name) is not None

    def source(self, kind: str, n: int) -> Path:
        folder = self.scratch_dir / kind
        print(f"making {kind}", file=sys.stderr, flush=True)
        maker = Path(__file__).with_name("bench_sources.py")
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
            case = Case(f"--deep, {kind}, against {other}", reach, None, runs["deep"], unit=f"× {other}")
            case.copies = [done.wall_s for done in runs[other]]
            self.cases.append(case)
        cpu = statistics.median(done.cpu_s for done in runs["deep"]) / statistics.median(
            done.cpu_s for done in runs["read"]
        )
        rss_bytes = max(done.rss_bytes for done in runs["deep"])
        self.cases += [
            Case(f"--deep, {kind}, CPU seconds", value=cpu, unit="× read"),
            Case(f"--deep, {kind}, memory", RSS_BYTES / 1e6, None, runs["deep"], value=rss_bytes / 1e6, unit="MB"),
        ]
        print(table(self.cases[-4:]), file=sys.stderr, flush=True)
        remove(src)

    def rates(self) -> None:
        """The scan with one thing that it does at a time."""
        src = self.source("safetensors", self.options.bytes)
        warm(src)
        found = json.loads(run([sys.executable, "-c", SCANNER, src]).stdout.splitlines()[-1])
        for name, rate in found.items():
            self.cases.append(Case(f"scan: {name}", value=rate, unit="GB a core second", is_lower_better=False))
        remove(src)

    def metadata(self) -> None:
        """The lowest level, with many files."""
        src = self.source("shards", N_FILES)
        for name, more, reach in (("metadata", (), METADATA_S), ("--headers", ("--headers",), None)):
            runs = [run(ckpt("validate", "-q", *more, src)) for _ in range(self.options.runs)]
            wall_s = statistics.median(done.wall_s for done in runs)
            self.cases.append(Case(f"{name}, {N_FILES} shards", reach, None, runs, value=wall_s, unit="s"))
        remove(src)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_validate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=int, default=2 * GIB, metavar="N", help="size of a checkpoint [2 GiB]")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="runs of each command [5]")
    parser.add_argument("--only", metavar="REGEX", help="measure only what matches: a kind, 'rates', 'metadata'")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="where to work [the system's temporary directory]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here as well")
    return parser.parse_args()


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scratch_dir = Path(tempfile.mkdtemp(prefix="bench-validate-", dir=options.scratch))
    bench = Bench(options, scratch_dir)
    work = {kind: (bench.deep, kind) for kind in KINDS}
    try:
        for kind, (measure, argument) in work.items():
            if bench.wants(kind):
                try:
                    measure(argument)
                except CommandError as err:
                    bench.failures.append(f"{kind}: {err}")
                    print(f"{kind}: FAILED\n{err}", file=sys.stderr, flush=True)
        for name, rest in (("rates", bench.rates), ("metadata", bench.metadata)):
            if bench.wants(name):
                rest()
    finally:
        shutil.rmtree(scratch_dir, ignore_errors=True)
        if bench.cases:
            print(table(bench.cases))
    result = {
        "python": platform.python_version(),
        "cases": [case.as_dict() for case in bench.cases],
        "failures": bench.failures,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
