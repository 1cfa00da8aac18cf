"""The results of workers, which ``ckpt launch`` reads: one small file per worker of a host.

::

    DIRECTORY             value of CKPT_LAUNCH_RESULTS; new each time the workers start
    ├── rank-0.json       {"rank": 0, "host": "node1", "pid": 71, "exit_code": 6, "line": "…",
    │                      "fields": {…}, "worker": 3, "worker_host": "node2",
    │                      "traceback": "DIRECTORY/rank-0.traceback", "is_secondary": false}
    └── rank-0.traceback  text; absent after a verdict

A *verdict* is a result that a retry would give again (exit codes 0 to 5 and 7). A worker that was
killed leaves no file. If the variable is set, the launcher reports failures: a worker prints
verdicts but no other failures, and its process exits with 0 after a verdict, so that the elastic
agent does not restart it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path

from core.engine.team.protocol import FINAL_CODES
from core.values import dataclass

RESULTS_VARIABLE = "CKPT_LAUNCH_RESULTS"
LAUNCHER_VARIABLE = "CKPT_LAUNCH_PID"
"""Environment variable with the launcher's process id."""
VERDICTS = FINAL_CODES | {0, 141}
"""Exit codes that would be the same if the job ran again; 141 is a closed pipe of the output."""


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """The result of one worker.

    Args:
        rank, host, pid: the worker's rank, host name and process id.
        exit_code: exit code of the command; ``ckpt_cli.screen.failure`` lists the codes.
        line: the error on one line, safe for a terminal; "" without one.
        fields: the ``error`` object of ``--json``.
        worker, worker_host: rank and host on which the error was first raised, if that was another
            worker.
        traceback: path of the file with the traceback; None without one.
        is_secondary: the worker only stopped because another failed or went silent.
    """

    rank: int
    host: str
    pid: int
    exit_code: int
    line: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)
    worker: int | None = None
    worker_host: str | None = None
    traceback: str | None = None
    is_secondary: bool = False

    @property
    def is_verdict(self) -> bool:
        """True if the result would be the same if the job ran again."""
        return self.exit_code in VERDICTS


def write_result(directory: Path, result: WorkerResult) -> None:
    """Write a worker's result file atomically.

    Raises:
        OSError: the file cannot be written.
    """
    # The launcher reads while workers write; it must never find half a file.
    path = directory / f"rank-{result.rank}.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(result)), "utf-8")
    temporary.replace(path)


def read_results(directory: Path) -> dict[int, WorkerResult]:
    """Read the results of the workers that wrote one, by rank; skip files that are not results."""
    results = {}
    for path in directory.glob("rank-*.json"):
        try:
            result = WorkerResult(**json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        results[result.rank] = result
    return dict(sorted(results.items()))
