"""scripts/bench launch: `ckpt launch` against one process, and how plans of real models' sizes are
divided.

* Start-up: a checkpoint of a few bytes, by launched workers and by one process; what is more is the
  launcher's (torchrun imports torch in every process).
* Speed: the same jobs by workers with one thread each, by the best single process (its threads are
  the cores) and by a single process with one thread, warm and in turn. A ratio above 1 says that
  the workers are faster. The launcher's start-up is left out of one row and counted in the other.
  Seconds of the processor say how much more is done in all, whatever else the machine does.
* Meetings: the bytes that workers sent each other, as ``--json`` says.
* Balance: Llama-3.1-405B and DeepSeek-V3 with their distributed optimizers as sparse files
  (``bench_scale_sources``), planned, written as a plan file and divided over 8, 64 and 512 workers,
  item by item; no tensor is read or written.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.benchmarks.measure import (
    GIB,
    Case,
    Page,
    Run,
    ckpt,
    page_parser,
    remove,
    run,
    run_page,
    warm,
)

SINGLE, ALONE = 0.9, 1.6
"""Of the best single process, and of one with a single thread: what as many workers as cores must
reach.
"""
PLAN_S, BALANCE = 10.0, 1.05
JOBS = {
    "digest-heavy: reshard TP8 → TP4 with fingerprints": (
        "megatron-tp8",
        ["reshard", "--tp-new", "4", "--fingerprint"],
    ),
    "cast-heavy: bf16 → fp16": (
        "safetensors",
        ["convert", "--to", "safetensors", "--dtype", "fp16"],
    ),
}
SIZES = {"llama-405b": ("tp", 4), "deepseek-v3": ("ep", 32), "tiny": ("ep", 1)}
N_WORKERS = (8, 64, 512)


def launched(n_workers: int, command: Sequence[str | Path]) -> list[str | Path]:
    """A command of ours, by workers with a thread each."""
    return ckpt("launch", "--nproc-per-node", str(n_workers), "--", *command[3:], "--threads", "1")


class Bench:
    """The rows of this bench."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.options = page.options
        self.n_workers = self.options.workers
        self.start_s = self.start_cpu_s = 0.0

    def source(self, kind: str, n_bytes: int) -> Path:
        """A checkpoint with data."""
        folder = self.page.scratch_dir / f"{kind}-{n_bytes}"
        if not folder.exists():
            print(f"making {kind}", file=sys.stderr, flush=True)
            maker = Path(__file__).with_name("sources.py")
            run([sys.executable, "-W", "ignore", maker, kind, folder, "--bytes", str(n_bytes)])
        return folder

    def job(self, src: Path, words: Sequence[str]) -> list[str | Path]:
        """A command that writes ``self.dst``."""
        return ckpt(words[0], src, self.dst, *words[1:], "--no-fsync", "-q")

    @property
    def dst(self) -> Path:
        return self.page.scratch_dir / "written"

    def timed(self, command: Sequence[str | Path]) -> Run:
        try:
            return run(command)
        finally:
            if self.dst.exists():
                remove(self.dst)

    def start_up(self) -> None:
        """What the launcher takes, by a job without work."""
        src = self.source("tiny", 1)
        command = ckpt("convert", src, self.dst, "--to", "safetensors", "--no-fsync", "-q")
        ours, alone = [], []
        for _ in range(self.options.runs):
            alone.append(self.timed(command))
            ours.append(self.timed(launched(self.n_workers, command)))
        self.start_s = _median(ours) - _median(alone)
        self.start_cpu_s = _median_cpu(ours) - _median_cpu(alone)
        self.page.add(
            Case("start-up of one process", value=_median(alone), unit="s", ours=alone),
            Case(
                f"start-up of ckpt launch, {self.n_workers} workers, more",
                value=self.start_s,
                unit="s",
                ours=ours,
            ),
        )

    def speed(self, name: str, kind: str, words: Sequence[str]) -> None:
        """Workers against a process with threads, and against one thread."""
        src = self.source(kind, self.options.bytes)
        command = self.job(src, words)
        ways = {
            "workers": launched(self.n_workers, command),
            "threads": [*command, "--threads", str(self.n_workers)],
            "one thread": [*command, "--threads", "1"],
        }
        runs: dict[str, list[Run]] = {way: [] for way in ways}
        for i in range(self.options.runs):
            for way in (*ways,) if i % 2 == 0 else reversed((*ways,)):
                warm(src)
                runs[way].append(self.timed(ways[way]))
        ours_s = _median(runs["workers"])
        for way, reach in (("threads", SINGLE), ("one thread", ALONE)):
            other_s = _median(runs[way])
            for end, more_s in (("", self.start_s), (", with start-up", 0.0)):
                self.page.add(
                    Case(
                        f"{name}: {self.n_workers} workers beside {way}{end}",
                        reach if more_s else None,
                        None,
                        runs["workers"],
                        [done.wall_s for done in runs[way]],
                        value=other_s / max(ours_s - more_s, 1e-3),
                        unit="× as fast",
                        is_lower_better=False,
                    )
                )
        work_cpu_s = max(_median_cpu(runs["workers"]) - self.start_cpu_s, 1e-3)
        for way in ("threads", "one thread"):
            value = work_cpu_s / _median_cpu(runs[way])
            self.page.add(
                Case(
                    f"{name}: processor of {self.n_workers} workers, by that of {way}",
                    value=value,
                    unit="×",
                )
            )
        done = self.timed(
            [word for word in (*launched(self.n_workers, command), "--json") if word != "-q"]
        )
        found = json.loads(done.stdout[done.stdout.index("{") :])["launch"]
        self.page.add(
            Case(f"{name}: largest worker's bytes", BALANCE, value=found["balance"], unit="× mean"),
            Case(
                f"{name}: meetings, all workers", value=found["collective_bytes"] / 1e3, unit="kB"
            ),
            Case(f"{name}: to and from the store", value=found["store_bytes"] / 1e3, unit="kB"),
        )

    def balance(self, model: str) -> None:
        """Planning and dividing without data."""
        name, size = SIZES[model]
        folder = self.page.scratch_dir / f"{model}-sparse"
        print(f"making {model}", file=sys.stderr, flush=True)
        here = Path(__file__)
        run(
            [
                sys.executable,
                here.with_name("scale_sources.py"),
                model,
                folder,
                "--optimizer",
                "distributed",
            ]
        )
        planner = [sys.executable, here.with_name("launch_plan.py"), folder, name, str(size)]
        runs = [run([*planner, *map(str, N_WORKERS)]) for _ in range(self.options.runs)]
        found = [json.loads(done.stdout.splitlines()[-1]) for done in runs]

        def median(get: Callable[[dict[str, float]], float]) -> float:
            return statistics.median(map(get, found))

        what = f"{model} with optimizer, {name.upper()} {size}"
        rss_bytes = max(one["rss_bytes"] for one in found)
        self.page.add(
            Case(
                f"plan of {what}",
                PLAN_S,
                value=median(lambda one: one["plan_s"] + one["write_s"]),
                unit="s",
            ),
            Case(f"plan of {what}: processor", value=median(lambda one: one["cpu_s"]), unit="s"),
            Case(
                f"plan of {what}: of it the plan file",
                value=median(lambda one: one["write_s"]),
                unit="s",
            ),
            Case(f"plan of {what}: the plan file", value=found[0]["file_bytes"] / 1e6, unit="MB"),
            Case(f"plan of {what}: memory", value=rss_bytes / 1e6, unit="MB"),
        )
        for n_workers in N_WORKERS:
            balance = found[0]["balance"][str(n_workers)]
            self.page.add(
                Case(
                    f"{what}: largest of {n_workers} workers", BALANCE, value=balance, unit="× mean"
                )
            )
        remove(folder)


def _median(runs: Sequence[Run]) -> float:
    return statistics.median(done.wall_s for done in runs)


def _median_cpu(runs: Sequence[Run]) -> float:
    return statistics.median(done.cpu_s for done in runs)


def main() -> int:
    parser = page_parser("bench launch", __doc__, runs=3)
    n_cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--bytes", type=int, default=4 * GIB, metavar="N", help="size of a checkpoint [4 GiB]"
    )
    parser.add_argument(
        "--workers", type=int, default=n_cores, metavar="N", help=f"workers [one a core: {n_cores}]"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a small model in place of the large ones"
    )
    options = parser.parse_args()

    def measure(page: Page) -> None:
        bench = Bench(page)
        for model in ("tiny",) if options.tiny else ("llama-405b", "deepseek-v3"):
            if page.wants(f"balance {model}"):
                with page.tolerant(model):
                    bench.balance(model)
        wanted = {name: job for name, job in JOBS.items() if page.wants(name)}
        if wanted or page.wants("start-up"):
            with page.tolerant("start-up"):
                bench.start_up()
        for name, (kind, words) in wanted.items():
            with page.tolerant(name):
                bench.speed(name, kind, words)

    return run_page(options, measure)


if __name__ == "__main__":
    sys.exit(main())
