"""The record of a publication in an object store, which the next run continues if this one dies."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any, Self

from core.errors import CorruptError
from core.files.object_client import put_object, read_object
from core.files.remote_path import RemotePath
from core.publish.stage.folder_lock import stage_dir_of
from core.values import dataclass

_FILE = "publication.json"


@dataclass(frozen=True, slots=True)
class PublicationRecord:
    """All objects of a destination, at the moment when the first of them becomes visible.

    Args:
        identity: identity of the plan.
        data, metadata: name → ID of the upload, metadata in the order of publication; "" where
            the uploads of a store end with their process.
        empty: names of the objects without bytes, which need no upload.
        replaced: names of the old objects, until they have been deleted.
        report: the report of the run, as JSON; empty if the objects are made visible only to be
            read back.
    """

    identity: str
    data: Mapping[str, str]
    metadata: Mapping[str, str]
    empty: tuple[str, ...]
    replaced: tuple[str, ...]
    report: Mapping[str, Any]

    @property
    def uploads(self) -> dict[str, str]:
        """Name → ID of the upload of all objects."""
        return {**self.data, **self.metadata}

    def can_be_finished(self, *, present: Collection[str], unfinished: Collection[str]) -> bool:
        """Return whether every object is visible already or an unfinished upload.

        As long as there are objects to be replaced, none of the new ones is visible.

        Args:
            present: names of the objects at the destination.
            unfinished: names of the unfinished uploads.
        """
        return all(
            name in unfinished or (name in present and not self.replaced) for name in self.uploads
        )

    @classmethod
    def read(cls, dst: RemotePath) -> Self | None:
        """Read the record of an interrupted publication of a destination; None if there is none.

        Raises:
            CorruptError: the record cannot be understood.
            StorageError: the store refuses, or cannot be reached.
        """
        path = stage_dir_of(dst) / _FILE
        data = read_object(path)
        if data is None:
            return None
        try:
            content = json.loads(data)
            return cls(
                str(content["identity"]),
                _ids(content["data"]),
                _ids(content["metadata"]),
                tuple(map(str, content["empty"])),
                tuple(map(str, content["replaced"])),
                dict(content["report"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise CorruptError(
                "the record of an interrupted run cannot be read",
                file=str(path),
                hint=f"delete the record and the objects under {dst}",
            ) from err

    def write(self, dst: RemotePath) -> None:
        """Write the record; it replaces that of an earlier run.

        Raises:
            StorageError: the store refuses, or cannot be reached.
        """
        put_object(stage_dir_of(dst) / _FILE, json.dumps(asdict(self)).encode(), replace=True)


def _ids(content: Mapping[str, object]) -> dict[str, str]:
    return {str(name): str(upload) for name, upload in content.items()}
