"""scripts/bench scale: time and memory of plans and inspections at the size of real models.

Makes Llama-3.1-405B, DeepSeek-V3 and Kimi-K2 as sparse files (``bench_scale_sources``), weights
alone and with an optimizer, and measures whole commands: ``ckpt inspect``, ``ckpt inspect --all``
and ``ckpt reshard --dry-run``. No data is read or written; 2 GB of headers land on the disk.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.measure import GIB, Case, Page, ckpt, page_parser, remove, run, run_page

PLAN_S, INSPECT_S, PLAN_BYTES = 10.0, 2.0, GIB
MEMORY = "4GiB"
"""More than is needed: what a plan says it needs is above the peak RSS, which is what the rows
judge.
"""
OPTIMIZERS = ("none", "float16", "distributed")


@dataclass(frozen=True)
class Reshard:
    """A reshard that is planned: the options of the new layout, and what the row calls it."""

    model: str
    label: str
    options: tuple[str, ...]


RESHARDS = (
    Reshard("llama-405b", "TP8 → TP4", ("--tp-new", "4")),
    Reshard("deepseek-v3", "EP64 → EP32", ("--ep-new", "32")),
    Reshard("kimi-k2", "EP16 → EP8", ("--ep-new", "8")),
)
TINY = (Reshard("tiny", "EP2 → EP1", ("--ep-new", "1")),)


class Bench:
    """The rows of this bench."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.options = page.options

    def source(self, model: str, optimizer: str, *more: str) -> Path:
        """A checkpoint, made at its first use."""
        folder = self.page.scratch_dir / "-".join(
            (model, optimizer, *(word.strip("-") for word in more))
        )
        if not folder.exists():
            print(f"making {folder.name}", file=sys.stderr, flush=True)
            maker = Path(__file__).with_name("scale_sources.py")
            run([sys.executable, maker, model, folder, "--optimizer", optimizer, *more])
        return folder

    def measure(
        self, name: str, command: Sequence[str | Path], *, reach_s: float | None, reach_bytes: int
    ) -> None:
        """Two rows: the seconds and the peak RSS of a command."""
        with self.page.tolerant(name):
            runs = [run(command) for _ in range(self.options.runs)]
            wall_s = statistics.median(done.wall_s for done in runs)
            rss_bytes = max(done.rss_bytes for done in runs)
            self.page.add(
                Case(name, reach_s, None, runs, value=wall_s, unit="s"),
                Case(
                    f"{name}: memory",
                    reach_bytes / 1e6,
                    None,
                    runs,
                    value=rss_bytes / 1e6,
                    unit="MB",
                ),
            )

    def rank_files(self, reshards: Sequence[Reshard]) -> None:
        """Inspections and plans of rank files, model by model; each model's files are removed when
        it is done.
        """
        for reshard in reshards:
            for optimizer in OPTIMIZERS:
                what = "weights" if optimizer == "none" else f"{optimizer} optimizer"
                names = [
                    f"{verb}, {reshard.model}, {what}" for verb in ("inspect", "inspect --all")
                ]
                plan = f"plan {reshard.label}, {reshard.model}, {what}"
                if not any(map(self.page.wants, [*names, plan])):
                    continue
                src = self.source(reshard.model, optimizer)
                for name, more, reach_s in (
                    (names[0], (), INSPECT_S),
                    (names[1], ("--all",), None),
                ):
                    if self.page.wants(name):
                        command = ckpt("inspect", src, *more)
                        self.measure(name, command, reach_s=reach_s, reach_bytes=PLAN_BYTES)
                if self.page.wants(plan):
                    options = ("--dry-run", "-q", "--memory", self.options.memory)
                    command = ckpt("reshard", src, *reshard.options, *options)
                    self.measure(plan, command, reach_s=PLAN_S, reach_bytes=PLAN_BYTES)
                remove(src)

    def torch_dist(self, model: str) -> None:
        """The inspection of a directory of torch_dist."""
        name = f"inspect, {model} as torch_dist, weights"
        if self.page.wants(name):
            src = self.source(model, "none", "--torch-dist")
            self.measure(name, ckpt("inspect", src), reach_s=INSPECT_S, reach_bytes=PLAN_BYTES)
            remove(src)


def main() -> int:
    parser = page_parser("bench scale", __doc__, runs=3)
    parser.add_argument("--memory", default=MEMORY, help=f"--memory of the plans [{MEMORY}]")
    parser.add_argument(
        "--tiny", action="store_true", help="a small model instead: a test of this script"
    )
    options = parser.parse_args()

    def measure(page: Page) -> None:
        bench = Bench(page)
        bench.rank_files(TINY if options.tiny else RESHARDS)
        bench.torch_dist("tiny" if options.tiny else "llama-405b")

    return run_page(options, measure)


if __name__ == "__main__":
    sys.exit(main())
