"""Workers as launchers start them, save that they are forked and not started anew."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckpt_cli.host.results import RESULTS_VARIABLE
from tests.ckpt_cli.workers.torch_teams import TIMEOUT_S, free_port
from tests.dist_checkpointing.ranks import PRELOADED

pytestmark = pytest.mark.dist


@dataclass(frozen=True)
class Ended:
    """A worker that has ended."""

    code: int | None
    out: str
    err: str


def run_workers(
    folder: Path, commands: Sequence[Sequence[str]], environ: Mapping[str, str] | None = None
) -> list[Ended]:
    """Runs a worker for each command, by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    started = []
    for rank, command in enumerate(commands):
        set_up = {"RANK": str(rank), "WORLD_SIZE": str(len(commands)), "LOCAL_RANK": str(rank)}
        set_up |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **(environ or {})}
        process = context.Process(target=_run, args=(folder / str(rank), list(command), set_up))
        process.start()
        started.append(process)
    ended = []
    for rank, process in enumerate(started):
        process.join(TIMEOUT_S)
        process.kill()
        out, err = (
            Path(f"{folder / str(rank)}.{name}").read_text("utf-8") for name in ("out", "err")
        )
        ended.append(Ended(process.exitcode, out, err))
    return ended


def _run(path: Path, command: list[str], environ: dict[str, str]) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{path}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(environ)
    from ckpt_cli.worker import main

    code = main(command)
    import sys

    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _failed(ended: Ended) -> dict[str, Any]:
    return dict(json.loads(ended.out)["error"])


def test_workers_do_one_job_and_only_the_lead_prints(tmp_path: Path, golden: Path):
    checkpoint = str(golden / "torch_dcp" / "fsdp2_dp4")
    lead, other = run_workers(
        tmp_path, [["--timeout", "30", "validate", "--deep", "--json", checkpoint]] * 2
    )
    assert (lead.code, lead.err) == (0, "")
    assert other == Ended(0, "", "")
    launch = json.loads(lead.out)["launch"]
    assert [worker["rank"] for worker in launch["workers"]] == [0, 1]
    assert (launch["launcher"], launch["backend"], launch["device"]) == (
        "the environment",
        "gloo",
        "cpu",
    )
    assert launch["collective_bytes"] > 0


def test_a_verdict_is_said_once_and_is_the_result_of_each_worker(tmp_path: Path):
    results = tmp_path / "results"
    results.mkdir()
    error_file = tmp_path / "error.json"
    environ = {RESULTS_VARIABLE: str(results), "TORCHELASTIC_ERROR_FILE": str(error_file)}
    lead, other = run_workers(tmp_path, [["validate", "--json", "/nowhere"]] * 2, environ)
    assert (lead.code, other.code) == (0, 0), "an elastic agent is not to start them again"
    assert lead.err.count("no such file or directory") == 1
    assert (other.out, other.err) == ("", "")
    for rank in range(2):
        result = json.loads((results / f"rank-{rank}.json").read_text())
        assert (result["rank"], result["exit_code"], result["traceback"]) == (rank, 2, None)
        assert "no such file or directory" in result["line"]
    message = json.loads(error_file.read_text())["message"]
    assert message["errorCode"] == 2 and "no such file or directory" in message["message"]


def test_workers_with_different_commands_do_not_begin(tmp_path: Path):
    lead, other = run_workers(tmp_path, [["validate", "a"], ["validate", "b"]])
    assert (lead.code, other.code) == (2, 2)
    assert "all workers need the same command, but rank 0 on" in lead.err
    assert other.err == ""


def test_a_worker_without_a_gpu_tells_the_others(tmp_path: Path):
    """They would wait for it otherwise."""
    commands = [["validate", "a"], ["--device", "cuda", "validate", "a"]]
    lead, other = run_workers(tmp_path, commands, {"CUDA_VISIBLE_DEVICES": ""})
    assert (lead.code, other.code) == (2, 2)
    assert "rank 1 on " in lead.err and "no CUDA device" in lead.err


def test_one_worker_is_a_plain_process(tmp_path: Path):
    (worker,) = run_workers(tmp_path, [["validate", "--json", "/nowhere"]])
    assert worker.code == 2
    assert _failed(worker)["code"] == "usage"
