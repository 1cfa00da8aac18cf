"""What a writing process tells the training process: where the items are that it has written, or why it failed.

A file, because both ends may be any processes of a machine, and nothing has to be started for it::

    {"files": {"0": [{"key": "w", "offset": [0, 0], "index": 0, "file": "__0_0.distcp", "at": 0, "n_bytes": 1204,
                      "transforms": null}, …], …}}
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
"""By number of the file."""


class WriteResults:
    """A queue of one value, which may be pickled. The file goes with the value, or with the object that made it."""

    def __init__(self) -> None:
        self._path = Path(tempfile.gettempdir()) / f"ckpt-results-{uuid.uuid4().hex}"
        weakref.finalize(self, self._path.unlink, missing_ok=True)

    def __reduce__(self) -> Any:
        return _at, (str(self._path),)

    def put(self, value: Results | Exception) -> None:
        """Leaves a value, in any process of this machine.

        Args:
            value: results of all files, or why there are none.

        Raises:
            OSError: there is no room for it.
        """
        text: dict[str, Any]
        if isinstance(value, WorkerError):
            text = {"error": value.message, "rank": value.rank}
        elif isinstance(value, Exception):
            text = {"error": f"{type(value).__name__}: {value}", "rank": None}
        else:
            text = {"files": {str(number): [*map(_as_json, results)] for number, results in value.items()}}
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(text))
        os.replace(part, self._path)

    def get_nowait(self) -> Results | Exception:
        """The value, which is not there any more then.

        Raises:
            queue.Empty: there is none.
        """
        try:
            found = json.loads(self._path.read_text())
        except FileNotFoundError:
            raise queue.Empty from None
        self._path.unlink()
        if "error" in found:
            return WorkerError(found["error"], rank=found["rank"])
        return {int(number): [*map(_of_json, results)] for number, results in found["files"].items()}


def _at(path: str) -> WriteResults:
    """The same queue in another process, which does not remove the file."""
    made = object.__new__(WriteResults)
    made._path = Path(path)
    return made


def _as_json(result: WriteResult) -> dict[str, Any]:
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


def _of_json(found: dict[str, Any]) -> WriteResult:
    offset = None if found["offset"] is None else torch.Size(found["offset"])
    return WriteResult(
        index=MetadataIndex(found["key"], offset, found["index"]),
        size_in_bytes=found["n_bytes"],
        storage_data=_StorageInfo(
            found["file"], found["at"], found["n_bytes"], transform_descriptors=found["transforms"]
        ),
    )
