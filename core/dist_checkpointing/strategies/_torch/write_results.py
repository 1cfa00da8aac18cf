"""The report of a writer process to the training process: positions of items, or an error.

The report is a file, because both sides may be any processes on a machine, and no service has to be
started for a file::

    {"files": {"0": [{"key": "w", "offset": [0, 0], "index": 0,
                      "file": "__0_0.distcp", "at": 0, "n_bytes": 1204, "transforms": null}, …],
               …}}
    {"error": "FileNotFoundError: …", "rank": "1"}
"""

from __future__ import annotations

import json
import os
import queue
import tempfile
import uuid
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from core.errors import WorkerError

Results = dict[int, list[WriteResult]]
"""Results of the writes, by number of the file."""


class WriteResults:
    """A queue for one value, which other processes can use after pickling.

    The file is removed when the value is taken, or when the object that created it is deleted.
    """

    def __init__(self) -> None:
        self._path = Path(tempfile.gettempdir()) / f"ckpt-results-{uuid.uuid4().hex}"
        weakref.finalize(self, self._path.unlink, missing_ok=True)

    def __reduce__(self) -> Any:
        return _open_queue, (str(self._path),)

    def put(self, value: Results | Exception) -> None:
        """Store a value; in any process on this machine.

        Args:
            value: results of all files, or the error.

        Raises:
            OSError: the file cannot be written.
        """
        text: dict[str, Any]
        if isinstance(value, WorkerError):
            text = {"error": value.message, "rank": value.rank}
        elif isinstance(value, Exception):
            text = {"error": f"{type(value).__name__}: {value}", "rank": None}
        else:
            text = {
                "files": {
                    str(number): [*map(_to_json, results)] for number, results in value.items()
                }
            }
        # Rename the complete file, so that the reader never sees an incomplete one.
        partial_path = self._path.with_suffix(".part")
        partial_path.write_text(json.dumps(text))
        os.replace(partial_path, self._path)

    def get_nowait(self) -> Results | Exception:
        """Take the value out of the queue.

        Raises:
            queue.Empty: there is no value.
        """
        try:
            content = json.loads(self._path.read_text())
        except FileNotFoundError:
            raise queue.Empty from None
        self._path.unlink()
        if "error" in content:
            return WorkerError(content["error"], rank=content["rank"])
        return {
            int(number): [*map(_from_json, results)] for number, results in content["files"].items()
        }


def _open_queue(path: str) -> WriteResults:
    """Open the same queue in another process, where it does not remove the file."""
    # Without __init__, there is no finalizer that deletes the file when this process ends.
    results = object.__new__(WriteResults)
    results._path = Path(path)
    return results


def _to_json(result: WriteResult) -> dict[str, Any]:
    index, info = result.index, result.storage_data
    return {
        "key": index.fqn,
        "offset": None if index.offset is None else list(index.offset),
        "index": index.index,
        "file": info.relative_path,
        "at": info.offset,
        "n_bytes": info.length,
        "transforms": info.transform_descriptors,
    }


def _from_json(entry: dict[str, Any]) -> WriteResult:
    offset = None if entry["offset"] is None else torch.Size(entry["offset"])
    return WriteResult(
        index=MetadataIndex(entry["key"], offset, entry["index"]),
        size_in_bytes=entry["n_bytes"],
        storage_data=_StorageInfo(
            entry["file"], entry["at"], entry["n_bytes"], transform_descriptors=entry["transforms"]
        ),
    )
