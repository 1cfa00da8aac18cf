"""The process in which megatron-core trains, as the tests see it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from tests.real_megatron.setting import ITERATION, Run
from tests.real_megatron.snapshot import assembled
from tests.support import forked

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Form:
    """One way in which Megatron stores a training.

    Args:
        name: ``rank_files``, ``torch_dist`` or ``zarr``.
        sharding: how the distributed optimizer is stored in the latter two
            (``distrib_optim_sharding_type``).
        way: ``plain``; ``parallel``, replicas share the work; ``async`` and ``persistent``, the
            same behind the training's back, by a process for each save or one for all. Loading
            knows the first two.
    """

    name: str = "rank_files"
    sharding: str | None = None
    way: str = "plain"

    def at(self, folder: Path) -> dict[str, object]:
        """What the worker is told."""
        return {"form": self.name, "dir": str(folder), "sharding": self.sharding, "way": self.way}


@dataclass(frozen=True, slots=True)
class Result:
    """What a training left.

    Args:
        before: global tensors when it was saved, or had been loaded; optimizer states are
            ``<state>/<key>``.
        after: the same after the steps that followed.
        losses: of every sample of those steps, in the order of steps and samples.
    """

    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    losses: list[float]


@dataclass(frozen=True, slots=True)
class Megatron:
    """A worker that waits for jobs."""

    jobs: IO[str]
    answers: IO[str]

    def save(
        self,
        run: Run,
        saves: Sequence[tuple[Form, Path]],
        *,
        out: Path,
        more: int = 2,
        fill: bool = False,
    ) -> Result:
        """Trains a run, stores it in every form, and trains on."""
        job = {
            "load": None,
            "steps": ITERATION,
            "fill": fill,
            "save": [form.at(folder) for form, folder in saves],
        }
        return self._result(run, {**job, "more": more}, out)

    def load(
        self, run: Run, form: Form, folder: Path, *, out: Path, more: int = 2, optim: bool = True
    ) -> Result:
        """Loads a checkpoint strictly into a training at its layout, and trains on."""
        job = {
            "load": {**form.at(folder), "optim": optim},
            "steps": 0,
            "fill": False,
            "save": [],
            "more": more,
        }
        return self._result(run, job, out)

    def _result(self, run: Run, job: dict[str, Any], out: Path) -> Result:
        self.jobs.write(json.dumps({"run": run.as_json(), "out": str(out), **job}) + "\n")
        self.jobs.flush()
        line = self.answers.readline()
        assert line, "the worker has ended"
        wrong = json.loads(line)
        assert not wrong, "\n".join(f"rank {rank}: {text[-3000:]}" for rank, text in wrong.items())
        before, after = (
            assembled(out / name, has_all_states=run.model.frozen is None)
            for name in ("before", "after" if job["more"] else "before")
        )
        return (
            Result(before, after, losses(run, out / "after"))
            if job["more"]
            else Result(before, {}, [])
        )


def losses(run: Run, folder: Path) -> list[float]:
    """Losses of all ranks in the order of samples: data parallel ranks take turns; TP ranks find
    the same.
    """
    per_rank = [torch.load(path)["losses"] for path in sorted(folder.glob("rank*.pt"))]
    per_rank = [rank_losses for rank_losses in per_rank if rank_losses]
    per_rank = per_rank[:: run.layout.tp]  # TP is the fastest of a rank's coordinates
    assert len(per_rank) == run.layout.dp
    return [loss for turn in zip(*per_rank, strict=True) for loss in turn]


@contextmanager
def megatron(python: Path | None = None, *, ours: bool = False) -> Iterator[Megatron]:
    """Starts a worker in a Python that has megatron-core; this one, unless another is named.

    With ``ours`` this project stands in for its ``dist_checkpointing``.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    arguments = ["-m", "tests.real_megatron.worker", *(["--ours"] if ours else [])]
    if python is not None:
        with subprocess.Popen(
            [python, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            yield Megatron(process.stdin, process.stdout)
            process.stdin.close()
        return
    job_end, jobs = os.pipe()
    answers, answer_end = os.pipe()
    program = forked.start(
        ["-W", "ignore", *arguments], stdin=job_end, stdout=answer_end, stderr=2, env=environment
    )
    os.close(job_end)
    os.close(answer_end)
    with open(jobs, "w") as writer, open(answers) as reader:
        yield Megatron(writer, reader)
    program.wait()
