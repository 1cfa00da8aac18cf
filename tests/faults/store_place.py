"""A place for a destination: in a bucket of the S3 server, or in a directory."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Protocol

from core.dist_checkpointing._directory.sums import STAGE
from core.publish.manifest.of_copy import manifest_name
from tests.faults.target import tree
from tests.support.s3.client import S3Server

BUCKET = "runs"
NEIGHBOUR = "neighbour"


class Place(Protocol):
    """Where a destination is written to, with a neighbour that must stay.

    Attributes:
        url: the destination.
    """

    url: str

    def empty(self) -> None:
        """Delete everything but the neighbour."""

    def content(self) -> dict[str, str]:
        """Return name → SHA-256 of everything in the destination, and of its manifest."""

    def strays(self) -> list[str]:
        """Return what else there is: stages, records, unfinished uploads, other names."""


class BucketPlace:
    """A prefix of a bucket.

    Args:
        server: holds the bucket.
        name: name of the destination.
    """

    def __init__(self, server: S3Server, name: str) -> None:
        self.url = f"s3://{BUCKET}/place/{name}"
        self._server = server
        self._prefix = f"place/{name}"
        self._manifest = f"place/{manifest_name(name)}"
        server.create_bucket(BUCKET)

    def empty(self) -> None:
        """Delete everything, and put the neighbour."""
        self._server.delete(BUCKET)
        self._server.put(BUCKET, f"place/{NEIGHBOUR}", b"precious")

    def _is_own(self, key: str) -> bool:
        if key.startswith(f"{self._prefix}/{STAGE}/"):  # of a save
            return False
        return key in (self._prefix, self._manifest) or key.startswith(f"{self._prefix}/")

    def content(self) -> dict[str, str]:
        """Return key → SHA-256 of the objects of the destination."""
        return {
            key: digest for key, digest in self._server.objects(BUCKET).items() if self._is_own(key)
        }

    def strays(self) -> list[str]:
        """Return keys of other objects, and of unfinished uploads."""
        objects = self._server.objects(BUCKET)
        expected = hashlib.sha256(b"precious").hexdigest()
        neighbour = objects.pop(f"place/{NEIGHBOUR}", "")
        return [
            *([] if neighbour == expected else ["the neighbour has changed"]),
            *(key for key in objects if not self._is_own(key)),
            *(f"unfinished upload of {key}" for _, key in self._server.uploads()),
        ]


class FolderPlace:
    """A directory.

    Args:
        folder: holds the destination.
        name: name of the destination.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.url = str(folder / name)
        self._folder = folder
        self._own = (name, manifest_name(name))

    def empty(self) -> None:
        """Delete everything, and write the neighbour."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        (self._folder / NEIGHBOUR).write_text("precious")

    def content(self) -> dict[str, str]:
        """Return path → SHA-256 of the files of the destination."""
        return {
            f"{name}/{path}": hashlib.sha256(data).hexdigest()
            for name in self._own
            if (self._folder / name).exists()
            for path, data in tree(self._folder / name).items()
        }

    def strays(self) -> list[str]:
        """Return the names of everything else in the directory."""
        names = {path.name for path in self._folder.iterdir()}
        return sorted(names - {NEIGHBOUR, *self._own}) + sorted({NEIGHBOUR} - names)
