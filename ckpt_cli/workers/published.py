"""A record of the published destination, so that a worker that dies later does not fail the job.

The elastic agent restarts all workers when one dies, even if there is nothing more to do. Right
before the destination gets its name, the lead therefore writes its report, with the inode that will
get the name, to the launch's directory. Restarted workers and the launcher compare this inode with
the destination's and thus know whether it has been published. Objects have no inodes: of a
destination in an object store, the lead writes its report when everything is published::

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

from ckpt_cli.host.results import RESULTS_VARIABLE
from core.files.remote_path import location_of
from core.publish.stage.destination import choose_destination
from core.verbs.convert.job import Report

_NAME = "published.json"


def remember_report(report: Report, inode: int) -> None:
    """Write the report of a destination that is about to be published, or was, in a store.

    Do nothing if no launcher has set the directory of results.

    Args:
        inode: inode of the file or directory that will get the destination's name; 0 in a store.
    """
    path = _report_path()
    if path is None:
        return
    with suppress(OSError):  # without the report, a worker that dies later only makes the job fail
        workers = [list(asdict(figures).values()) for figures in report.workers]
        fields = {**asdict(report), "workers": workers}
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"report": fields, "inode": inode}), "utf-8")
        temporary.replace(path)


def recall_report(directory: Path | None = None) -> Report | None:
    """Return the report of the destination that this launch has published.

    Returns None if the launch has not published its destination, or the destination was replaced or
    removed since.

    Args:
        directory: directory of an attempt's results; None for that of this process.
    """
    path = _report_path() if directory is None else directory.parent / _NAME
    if path is None:
        return None
    try:
        record = json.loads(path.read_text("utf-8"))
        report = Report.from_dict(record["report"])
        if not record["inode"]:  # an object has none; this was written after its publication
            return report
        # The record is written before the rename; only the inode proves that the rename happened.
        return report if os.lstat(report.dst).st_ino == record["inode"] else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def finish_published(report: Report) -> Report:
    """Finish the work of a lead that died after its destination got its name; return its report.

    Raises:
        StorageError: permission denied, or an I/O error at the destination.
    """
    choose_destination(location_of(report.dst)).finish_publication()
    return report


def _report_path() -> Path | None:
    directory = os.environ.get(RESULTS_VARIABLE)
    return Path(directory).parent / _NAME if directory else None
