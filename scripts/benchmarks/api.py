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

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MIB = 1 << 20
LOAD_EXTRA_BYTES = 128 * MIB


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", type=float, default=2.0, help="GiB of the whole state dict (default 2)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--runs", type=int, default=3, help="measurements of each (default 3)")
    parser.add_argument("--dir", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument(
        "--async", dest="is_async", action="store_true", help="how long asynchronous saves block"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    scratch_dir = Path(tempfile.mkdtemp(prefix="ckpt-bench-", dir=args.dir))
    try:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={args.ranks}",
        ]
        worker = Path(__file__).with_name("async_worker.py" if args.is_async else "api_worker.py")
        command += [str(worker), str(scratch_dir), str(args.size), str(args.runs)]
        root = str(Path(__file__).resolve().parents[2])
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}
        )
        if done.returncode != 0:
            sys.stderr.write(done.stderr[-6000:])
            return 1
        found = json.loads((scratch_dir / "result.json").read_text())
    finally:
        shutil.rmtree(scratch_dir, ignore_errors=True)
    print(
        json.dumps(found) if args.json else _table_async(found) if args.is_async else _table(found)
    )
    return 0


def _table(found: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    lines = [f"{'':24}{'seconds (median)':>18}{'× ckpt (median, range)':>28}{'memory above':>16}"]
    for verb, tools in found.items():
        ours = [run["seconds"] for run in tools["ckpt"]]
        for name, runs in tools.items():
            seconds = [run["seconds"] for run in runs]
            ratios = [theirs / mine for theirs, mine in zip(seconds, ours, strict=True)]
            extra = max(run["extra_bytes"] for run in runs) / MIB
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
            lines.append(
                f"{verb} "
                f"{name:<19}{statistics.median(seconds):>18.2f}{spread:>28}{f'{extra:.0f} MiB':>16}"
            )
    extra = max(run["extra_bytes"] for run in found["load"]["ckpt"])
    verdict = "met" if extra <= LOAD_EXTRA_BYTES else "NOT met"
    lines.append(f"load of ckpt takes at most 128 MiB beside the state dict: {verdict}")
    for verb, tools in found.items():
        ours = [run["seconds"] for run in tools["ckpt"]]
        worst = min(
            statistics.median(run["seconds"] / mine for run, mine in zip(runs, ours, strict=True))
            for name, runs in tools.items()
            if name != "ckpt"
        )
        lines.append(
            f"{verb}: at least as fast as the others: {'met' if worst >= 1 else 'NOT met'} "
            f"({worst:.2f})"
        )
    return "\n".join(lines)


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
