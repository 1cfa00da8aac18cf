"""What a launch has published already, so that a worker that dies after that does not make the job fail.

The elastic agent starts all workers again when one dies, even if nothing was left to do. The lead's report is kept in
the directory of the launch's results right before the destination gets its name, with the inode that has that name from
then on. So workers that are started again, and the launcher, can tell whether it has::

    DIRECTORY of the launch
    ├── published.json       {"report": {…}, "inode": 17}
    └── attempt_0/           CKPT_LAUNCH_RESULTS of the first attempt
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ckpt_cli.host.results import RESULTS_VARIABLE
from core.convert.job import Report
from core.stage.stage import stage_dir_of
from core.stage.stale import finish_publication
from core.team.protocol import Figures

_NAME = "published.json"


def remember(report: Report, inode: int) -> None:
    """Keeps the report of a destination that is about to be published; without a launcher nothing is kept.

    Args:
        inode: of what will have the destination's name.
    """
    path = _path()
    if path is None:
        return
    with suppress(OSError):  # it would only save a wrong failure
        found = {**asdict(report), "workers": [list(asdict(one).values()) for one in report.workers]}
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps({"report": found, "inode": inode}), "utf-8")
        beside.replace(path)


def recalled(directory: Path | None = None) -> Report | None:
    """The report of what an attempt of this launch has published, if it is still there.

    Args:
        directory: of an attempt's results; None for this process's.
    """
    path = _path() if directory is None else directory.parent / _NAME
    if path is None:
        return None
    try:
        kept = json.loads(path.read_text("utf-8"))
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in kept["report"].items()
        }
        fields["workers"] = tuple(Figures(*one) for one in fields["workers"])
        report = Report(**fields)
        return report if os.lstat(report.dst).st_ino == kept["inode"] else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def tidied(report: Report) -> Report:
    """Does what a lead left undone that died after its destination got its name; the report, as it was.

    Raises:
        StorageError: the system refuses.
    """
    dst = Path(report.dst).absolute()
    finish_publication(stage_dir_of(dst), dst)
    return report


def _path() -> Path | None:
    directory = os.environ.get(RESULTS_VARIABLE)
    return Path(directory).parent / _NAME if directory else None
