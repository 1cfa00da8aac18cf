"""What each worker came to, as ``ckpt launch`` reads it: one small file a worker in a directory of this host.

::

    DIRECTORY            named by the variable CKPT_LAUNCH_RESULTS; a new one each time the workers start
    ├── rank-0.json      {"rank": 0, "host": "node1", "pid": 71, "exit_code": 6, "line": "…", "fields": {…},
    │                     "worker": 3, "worker_host": "node2", "traceback": "DIRECTORY/rank-0.traceback",
    │                     "is_secondary": false}
    └── rank-0.traceback text; not there after a verdict

A worker that was killed leaves none. Where the variable is set, the launcher reports failures: a worker prints
verdicts (exit codes 0 to 5 and 7) and nothing of what ends it otherwise, and its process ends with 0 after a verdict,
so that the elastic agent does not start it again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from core.team.protocol import FINAL_CODES

RESULTS_VARIABLE = "CKPT_LAUNCH_RESULTS"
LAUNCHER_VARIABLE = "CKPT_LAUNCH_PID"
"""The launcher's process id, for its workers."""
VERDICTS = FINAL_CODES | {0, 141}
"""Exit codes that are the same when the job runs again; 141: nobody reads the output any more."""


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """What one worker came to.

    Args:
        rank, host, pid: who.
        exit_code: of the verb; see ``ckpt_cli.screen.failure``.
        line: the error in one line, safe for a terminal; "" without one.
        fields: the ``error`` object of ``--json``.
        worker, worker_host: the rank that the error came from, as ranks raise each other's; None where it is this one.
        traceback: path of a file that holds it; None without one.
        is_secondary: the worker only stopped because another has failed, or is silent.
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
        """Whether it would be the same again."""
        return self.exit_code in VERDICTS


def write_result(directory: Path, result: WorkerResult) -> None:
    """Writes the worker's file, as a whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path = directory / f"rank-{result.rank}.json"
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(asdict(result)), "utf-8")
    beside.replace(path)


def results_in(directory: Path) -> dict[int, WorkerResult]:
    """The results of the workers that left one, by rank. A file that is no result is none."""
    found = {}
    for path in directory.glob("rank-*.json"):
        try:
            result = WorkerResult(**json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        found[result.rank] = result
    return dict(sorted(found.items()))
