"""Paths of object stores: ``s3://bucket/key``, ``gs://…``, ``az://…`` and ``https://…``.

``RemotePath`` is a ``Path``, so that whatever takes a path takes a URL, too. It names an object or
a prefix; it never touches the local file system: every operation that would, raises.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from os import PathLike, fspath
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, NoReturn, Self
from urllib.parse import unquote

from core.errors import AccessDeniedError, UsageError
from core.files.store import override

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_URL = re.compile(r"([a-z][a-z0-9]+):/+([^/].*)", re.DOTALL | re.IGNORECASE)
"""``pathlib`` reduces the two slashes to one."""
_FILE_URL = re.compile(r"file:/+(?:localhost/)?(.*)", re.DOTALL | re.IGNORECASE)


class RemotePath(PosixPath):
    """The URL of an object or of a prefix, with the operations of paths that need no file system.

    Use ``location_of`` to make one.
    """

    @override
    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    @override
    def __fspath__(self) -> NoReturn:
        raise UsageError(
            f"{self} is a URL, but a local path is needed here",
            hint="copy it to a local disk first",
        )

    @property
    def scheme(self) -> str:
        """Scheme in lower case, such as ``s3``."""
        return self.parts[0].rstrip(":").lower()

    @property
    def bucket(self) -> str:
        """Bucket, container or host."""
        return self.parts[1]

    @property
    def key(self) -> str:
        """Name of the object, or the prefix, in the bucket; "" for the bucket itself."""
        return "/".join(self.parts[2:])

    @property
    @override
    def parent(self) -> Self:
        """The URL above this one; a bucket has none, like ``/``, and is its own parent."""
        return self if len(self.parts) <= 2 else super().parent

    @override
    def is_absolute(self) -> bool:
        return True

    @override
    def absolute(self) -> Self:
        return self

    @override
    def resolve(self, strict: bool = False) -> Self:
        return self

    @override
    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self.is_file() or self.is_dir()

    @override
    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        from core.files.object_listing import find_object, is_listed, is_refused, list_root

        if not self.key:
            return False
        if is_listed(self):
            return self.name in list_root(self.parent).objects
        is_found = find_object(self) is not None
        if not is_found and self.scheme in ("http", "https") and is_refused(self):
            raise AccessDeniedError(
                "access denied, or no such object",
                file=str(self),
                hint="check the URL's spelling, and whether it needs a login",
            )
        return is_found

    @override
    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        from core.files.object_listing import list_root

        content = list_root(self)
        return bool(content.objects or content.folders)

    @override
    def is_symlink(self) -> bool:
        return False

    @override
    def iterdir(self) -> Generator[Self, None, None]:
        from core.files.object_listing import list_root

        content = list_root(self)
        for name in sorted((*content.objects, *content.folders)):
            yield self / name


def is_known_scheme(scheme: str) -> bool:
    """Return whether URLs of a scheme are remote paths."""
    from core.files.store_kinds import SCHEMES  # late: most paths are local

    return scheme.lower() in SCHEMES


def is_remote(place: object) -> TypeIs[RemotePath]:
    """Return whether a place, as ``location_of`` gave it, is in an object store or a web server."""
    return isinstance(place, RemotePath)


def absolute_location(path: str | PathLike[str]) -> Path:
    """Return ``location_of`` a path, a local one absolute and without ``..``."""
    location = location_of(path)
    return location if is_remote(location) else Path(os.path.abspath(location))


def location_of(path: str | PathLike[str]) -> Path:
    """Return the path that a user means: a ``RemotePath`` for a URL, else a local path.

    ``file://`` URLs are local. URLs are also recognised after ``pathlib`` has reduced their ``//``
    to ``/``; a local path that looks like one is written ``./s3:/…``.

    Raises:
        UsageError: an address of a web server has a query or a password, which messages would show,
            or a URL has parts that no store takes.
    """
    if is_remote(path):
        return path
    text = fspath(path)
    url = _URL.fullmatch(text)
    if url is not None and is_known_scheme(url[1]):
        # An address of a web server may have parts that no message may show: a password, or a
        # query, which may be a signature.
        scheme = url[1]
        host, slash, key = url[2].partition("/")
        name, has_query, query = key.partition("?")
        has_password = "@" in host
        from core.files.store_kinds import WRITABLE_STORES

        if scheme.lower() in ("http", "https") and (has_password or (has_query and "=" in query)):
            raise UsageError(
                "a web server's URL must not contain a "
                f"{'password' if has_password else 'query string'}",
                file=f"{scheme}://{host.rpartition('@')[2]}{slash}{name}",
                hint=f"credentials in a URL would appear in messages; use {WRITABLE_STORES} with "
                "credentials in the "
                "environment, or download the file",
            )
        remote = RemotePath(text)
        # Stores know no directories: "..", which clients refuse, would be part of a name.
        if ".." in remote.parts or any(ord(character) < 32 for character in text):
            raise UsageError(
                f"{str(remote)!r} is not a valid object name",
                hint="remove .. and control characters from the URL",
            )
        return remote
    local = _FILE_URL.fullmatch(text)
    return Path(path) if local is None else Path("/" + unquote(local[1]))
