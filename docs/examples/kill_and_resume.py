"""Shows that training continues in a different layout as if nothing had happened.

    # --async-save, --format zarr: how to save; --layouts 2,1 1,2: fewer ranks
    $ .venv/bin/python docs/examples/kill_and_resume.py
    uninterrupted, tp 2, pp 2: 40 steps
    killed, tp 2, pp 2: after step 25
    resumed, tp 1, pp 4: goes on from step_000020
    the losses of steps 21 to 40 differ by at most 4.4e-16

It runs ``train_tp_pp.py`` three times: once without interruption; once until all its processes are
killed in the middle of a step or a save (with SIGKILL, so no process can clean up); and once from
what the killed run left behind. Losses are compared as float64. Layouts add up in different orders,
so the last bit may differ.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

SCRIPT = Path(__file__).with_name("train_tp_pp.py")
TOLERANCE = 1e-12


def main() -> None:
    """The three runs and the comparison; exits with 1 if losses differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="steps of the whole training")
    parser.add_argument("--kill-after", type=int, default=25, help="step after which it is killed")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument(
        "--format", choices=("torch_dist", "zarr"), default="torch_dist", help="of the checkpoints"
    )
    parser.add_argument("--async-save", action="store_true", help="save while training goes on")
    parser.add_argument(
        "--layouts",
        nargs=2,
        type=layout,
        default=[(2, 2), (1, 4)],
        metavar="TP,PP",
        help="ranks before and after the kill (default: 2,2 1,4)",
    )
    options = parser.parse_args()
    if options.async_save and options.format == "zarr":
        parser.error("--async-save is for torch_dist")
    given = [
        f"--steps={options.steps}",
        f"--save-every={options.save_every}",
        f"--format={options.format}",
    ]
    given += ["--async-save"] if options.async_save else []
    before, after = options.layouts
    before_text, after_text = (f"tp {tp}, pp {pp}" for tp, pp in options.layouts)
    with tempfile.TemporaryDirectory() as folder:
        work_dir = Path(folder)
        with Training(work_dir, "uninterrupted", before, given) as run:
            n_steps = sum(line.startswith("step") for line in run.lines())
        print(f"uninterrupted, {before_text}: {n_steps} steps", flush=True)
        with Training(work_dir, "killed", before, [*given, "--pause=0.05"]) as run:
            run.kill_after(options.kill_after)
        print(f"killed, {before_text}: after step {options.kill_after}", flush=True)
        (work_dir / "killed").rename(work_dir / "resumed")
        with Training(work_dir, "resumed", after, given) as run:
            begin = [line for line in run.lines() if line.startswith("goes on")]
        print(f"resumed, {after_text}: {begin[0] if begin else 'begins anew'}", flush=True)
        expected, found = (
            losses(work_dir / f"{name}.jsonl") for name in ("uninterrupted", "resumed")
        )
    difference = max(abs(loss - expected[step]) for step, loss in found.items())
    print(f"the losses of steps {min(found)} to {max(found)} differ by at most {difference:.2g}")
    if difference > TOLERANCE or max(found) != options.steps or min(found) == 1:
        sys.exit(1)


def layout(text: str) -> tuple[int, int]:
    """Parse ``2,1``: tensor- and pipeline-parallel ranks."""
    tp, pp = text.split(",")
    return int(tp), int(pp)


class Training:
    """A training that runs; a context manager that waits for its end.

    Args:
        work_dir: gets its checkpoints, its losses, and what it writes to standard error, under its
            name.
        name: of the run.
        layout: tensor- and pipeline-parallel ranks.
        options: more of them.
    """

    def __init__(
        self, work_dir: Path, name: str, layout: tuple[int, int], options: list[str]
    ) -> None:
        tp, pp = layout
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={tp * pp}",
            SCRIPT,
        ]
        command += [f"--tp={tp}", f"--pp={pp}", "--checkpoints", work_dir / name, *options]
        command += ["--losses", work_dir / f"{name}.jsonl"]
        self.name = name
        self.is_killed = False
        self._log_path = work_dir / f"{name}.log"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )

    def lines(self) -> Iterator[str]:
        """What it prints, as it does."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield line.rstrip("\n")

    def kill_after(self, step: int) -> None:
        """Kills all ranks once that step is done."""
        processes = []
        for line in self.lines():
            is_rank = re.match(r"rank \d+ is process (\d+)", line)
            if is_rank:
                processes.append(int(is_rank[1]))
            if line.startswith(f"step {step:3d}"):
                break
        self.is_killed = True
        for number in processes:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self._process.terminate()
        with self._process:
            for _ in self.lines():
                pass
        if self._process.returncode and not self.is_killed and kind is None:
            sys.exit(f"{self.name} failed:\n{self._log_path.read_text()}")


def losses(path: Path) -> dict[int, float]:
    """Step → loss."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


if __name__ == "__main__":
    main()
