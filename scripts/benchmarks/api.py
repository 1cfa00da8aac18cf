"""scripts/bench api: save and load of a sharded state dict by several ranks, as ratios to torch's
and megatron-core's.

Every rank holds an equal part of every tensor. All tools run in the same processes, in turn, and
write the same format (torch_dist, which is DCP with files beside it); files are synced, and what
was written before has reached the disk when a measurement begins. A load reads what the same tool
saved, from a warm page cache, into tensors that exist. The slowest rank counts. Peak memory is the
resident set's high-water mark above what the process had before the load.

With --async: how long an asynchronous save blocks, in memory that a save has used before (the first
is listed apart), beside a synchronous one by the same tool. On a CPU megatron-core copies nothing:
its fork shares the tensors by copy-on-write, and training pays for that later, when it changes
them.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.benchmarks.measure import MIB, Case, Page, page_parser, run, run_page

LOAD_EXTRA_MIB = 128


def main() -> int:
    parser = page_parser("bench api", __doc__, runs=3)
    parser.add_argument(
        "--size", type=float, default=2.0, help="GiB of the whole state dict (default 2)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument(
        "--async",
        dest="is_async",
        action="store_true",
        help="print how long asynchronous saves block; no --json, no --record",
    )
    options = parser.parse_args()
    if options.is_async and (options.json or options.record):
        parser.error("--async prints a table only: leave out --json and --record")
    return run_page(options, measure)


def measure(page: Page) -> None:
    """Run the ranks and read what they measured."""
    options = page.options
    worker = f"{'async' if options.is_async else 'api'}_worker.py"
    run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={options.ranks}",
            Path(__file__).with_name(worker),
            page.scratch_dir,
            str(options.size),
            str(options.runs),
        ]
    )
    results = json.loads((page.scratch_dir / "result.json").read_text())
    if options.is_async:
        print(_table_async(results))
    else:
        for verb, tools in results.items():
            page.add(*(case for case in _list_cases(verb, tools) if page.wants(case.name)))


def _list_cases(verb: str, tools: dict[str, list[dict[str, float]]]) -> Iterator[Case]:
    """Yield the rows of saving, or of loading."""
    ours = [run["seconds"] for run in tools["ckpt"]]
    for name, runs in tools.items():
        seconds = [run["seconds"] for run in runs]
        work = verb if name == "ckpt" else f"{verb} of {name}"
        if name == "ckpt":
            yield Case(work, value=statistics.median(seconds), unit="s")
        else:
            ratios = [theirs / own for theirs, own in zip(seconds, ours, strict=True)]
            yield Case(work, 1, values=ratios, unit="× ours", is_lower_better=False)
        extra = max(run["extra_bytes"] for run in runs) / MIB
        reach = LOAD_EXTRA_MIB if work == "load" else None
        yield Case(f"{work}: memory beside the state dict", reach, value=extra, unit="MiB")


def _table_async(found: dict[str, dict[str, list[float]]]) -> str:
    """Of each way to save asynchronously how long it blocks, beside a synchronous save by the same
    tool and by ckpt.
    """
    ours = found["ckpt"]
    lines = [
        (
            f"{'':22}{'blocks':>9}{'first':>9}{'written':>9}{'sync':>9}"
            f"{'× own sync':>12}{'× ckpt':>9}{'step':>8}"
        )
    ]
    for name, one in found.items():
        blocks = statistics.median(one["blocks"][1:])
        row = [
            blocks,
            one["blocks"][0],
            statistics.median(one["ends"][1:]),
            statistics.median(one["sync"]),
        ]
        own = statistics.median(
            mine / sync for mine, sync in zip(one["blocks"][1:], one["sync"][1:], strict=True)
        )
        ratio = statistics.median(
            a / b for a, b in zip(one["blocks"][1:], ours["blocks"][1:], strict=True)
        )
        texts = "".join(f"{value:>7.3f} s" for value in row)
        lines.append(
            f"{name:<22}{texts}{own:>12.3f}{ratio:>9.2f}{statistics.median(one['step'][1:]):>8.2f}"
        )
    lines.append(
        "blocks: seconds until training goes on, median without the first save, which is "
        "listed apart"
    )
    lines.append(
        "written: seconds until the checkpoint is complete; step: time of a training step "
        "meanwhile, × without"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
