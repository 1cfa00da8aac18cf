"""List the files of a checkpoint in one walk over its directories, and read both ends of them.

Regular files, by name or by a symbolic link, count as files. Everything else (pipes, devices,
sockets, broken links, directories that cannot be listed) is listed separately, so that no check
ever opens it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping, Set
from dataclasses import field
from pathlib import Path

from core.errors import CheckpointingException
from core.files.source_store import SourceStore, open_store
from core.files.store import leads_on, translate_os_errors
from core.files.substitute import HEAD_BYTES
from core.values import dataclass

MAX_DEPTH = 64
"""Maximum number of directory levels; deeper ones are not listed."""

_LARGE_BYTES = 4 << 30
TAIL_BYTES = 22
"""Length of a zip's end record without a comment, which torch never writes."""
_ZIP_BEGIN = b"PK\x03\x04"
_ZIP_END = b"PK\x05\x06"
_FEW_FILES = 64
"""Number of files up to which threads do not pay."""
_N_READERS = 16

REPEATED_LINK = "a link to a directory that is already listed"
BROKEN_LINK = "a broken link"

_GIT = ".git"
"""The history of a cloned repository, which is not part of the checkpoint."""

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@dataclass(slots=True)
class Tree:
    """Content of a directory and of all directories below it.

    Args:
        files: relative path → bytes, of every regular file.
        folders: relative paths of the directories below, each once even if links repeat it.
        irregular: relative path → description, of every other entry.
    """

    files: dict[str, int] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    irregular: dict[str, str] = field(default_factory=dict)

    def below(self, folder: str) -> list[str]:
        """Return the paths of all files below a directory ("" for the root), relative to it."""
        prefix = f"{folder}/" if folder else ""
        return [path[len(prefix) :] for path in self.files if path.startswith(prefix)]


@dataclass(frozen=True, slots=True)
class _Listing:
    """Content of one directory.

    Args:
        identity: device and inode of the directory; None if it was not listed, see ``irregular``;
            (0, 0) for a prefix of an object store, to which no links lead.
        files, irregular: as in ``Tree``.
        subfolders: relative paths of the directories to list next.
    """

    identity: tuple[int, int] | None
    files: dict[str, int] = field(default_factory=dict)
    irregular: dict[str, str] = field(default_factory=dict)
    subfolders: list[str] = field(default_factory=list)


def list_tree(
    root: Path, *, entry: str | None = None, depth: int | None = None, without: Collection[str] = ()
) -> Tree:
    """List the tree of a directory, or one file in it.

    Args:
        root: the directory.
        entry: the only file to list; None for all.
        depth: number of directory levels to list; None for ``MAX_DEPTH``.
        without: relative paths of directories and files to skip.
    """
    store = open_store(root)
    tree = Tree()
    # One file only.
    if entry is not None:
        size_or_kind = store.size(entry) if store.is_remote else _size_or_kind(root / entry)
        if isinstance(size_or_kind, int):
            tree.files[entry] = size_or_kind
        else:
            tree.irregular[entry] = size_or_kind
        return tree

    # All files, depth first.
    visited: set[tuple[int, int]] = set()
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        listing = (
            _list_prefix(store, folder) if store.is_remote else _list_folder(root, folder, visited)
        )
        tree.files.update(listing.files)
        tree.irregular.update(listing.irregular)
        if listing.identity is None:
            continue
        visited.add(listing.identity)
        if folder:
            tree.folders.append(folder)
        if depth is None or folder.count("/") + bool(folder) < depth:
            # The last entry is popped first: reverse them, to keep the order of names.
            waiting += (path for path in reversed(listing.subfolders) if path not in without)
    tree.files = {path: size for path, size in sorted(tree.files.items()) if path not in without}
    return tree


def _list_prefix(store: SourceStore, folder: str) -> _Listing:
    """List one directory of an object store."""
    prefix = f"{folder}/" if folder else ""
    return _Listing(
        (0, 0),
        files={prefix + name: size for name, size in store.sizes(folder).items()},
        subfolders=[prefix + name for name in store.folders(folder)],
    )


def _list_folder(root: Path, folder: str, visited: Set[tuple[int, int]]) -> _Listing:
    """List one directory, unless its device and inode are in ``visited``."""
    path = root / folder
    prefix = f"{folder}/" if folder else ""

    # Several links may lead to one directory, or form a loop.
    try:
        status = os.stat(path)
        identity = (status.st_dev, status.st_ino)
        if identity in visited:
            return _Listing(None, irregular={folder: REPEATED_LINK})
        with os.scandir(path) as entries:
            sorted_entries = sorted(entries, key=lambda entry: entry.name)
    except OSError as err:
        return _Listing(
            None, irregular={folder: f"a directory that cannot be listed ({_reason(err)})"}
        )

    # Sort the entries into files, directories to list next, and everything else.
    listing = _Listing(identity)
    for entry in sorted_entries:
        name = prefix + entry.name
        try:
            content = _classify(entry, path / entry.name)
        except OSError as err:
            content = f"an entry that cannot be accessed ({_reason(err)})"
        if isinstance(content, int):
            listing.files[name] = content
        elif content is not None:
            listing.irregular[name] = content
        elif entry.name != _GIT:
            listing.subfolders.append(name)

    # One entry is enough to report a tree that is too deep.
    if folder.count("/") >= MAX_DEPTH and listing.subfolders:
        listing.irregular[listing.subfolders[0]] = f"a directory more than {MAX_DEPTH} levels deep"
        listing.subfolders.clear()
    return listing


def _classify(entry: os.DirEntry[str], path: Path) -> int | str | None:
    """Return the size of a regular file, None for a directory to list, or a description.

    Raises:
        OSError: the entry cannot be accessed.
    """
    if entry.is_symlink() and not os.path.exists(path):
        return BROKEN_LINK
    if entry.is_file():
        return entry.stat().st_size
    if entry.is_dir():
        return REPEATED_LINK if entry.is_symlink() and not leads_on(path) else None
    return _size_or_kind(path)


def _size_or_kind(path: Path) -> int | str:
    """Return the size of a regular file in bytes, or a description of any other entry."""
    try:
        status = os.stat(path)
    except OSError as err:
        return (
            BROKEN_LINK if path.is_symlink() else f"an entry that has disappeared ({_reason(err)})"
        )
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    return next((kind for is_kind, kind in _KINDS if is_kind(status.st_mode)), "not a regular file")


def _reason(err: OSError) -> str:
    """Return the reason of an error in the system's words."""
    return os.strerror(err.errno).lower() if err.errno else str(err)


def sparse_files(store: SourceStore, files: Mapping[str, int]) -> Set[str]:
    """Return the names of large files that are almost entirely holes (sparse) on the disk.

    Reading their zeros would take hours.

    Args:
        store: the store of the files.
        files: name → bytes.
    """
    large = [name for name, size in files.items() if size >= _LARGE_BYTES]
    with translate_os_errors(store.label, doing="check"):
        # Sparse: less than 1/256 of the file is on the disk.
        return {name for name in large if store.disk_bytes(name) < files[name] >> 8}


@dataclass(frozen=True, slots=True)
class FileEnds:
    """The first and the last bytes of files, by which the kind of a file is known.

    Args:
        heads: name → its first ``HEAD_BYTES`` bytes; all of a shorter file.
        tails: name → its last ``TAIL_BYTES`` bytes, of the files that begin like a zip.
        errors: name → the error, of the files that cannot be read.
    """

    heads: Mapping[str, bytes] = field(default_factory=dict)
    tails: Mapping[str, bytes] = field(default_factory=dict)
    errors: Mapping[str, CheckpointingException] = field(default_factory=dict)

    def is_complete_zip(self, name: str) -> bool:
        """Return whether a file begins with a zip's record and ends with a zip's end record."""
        return self.tails.get(name, b"").startswith(_ZIP_END)


def read_ends(store: SourceStore, files: Mapping[str, int]) -> FileEnds:
    """Open every file, and read its first bytes and, of a zip, its last ones.

    Args:
        store: the store of the files.
        files: name → bytes; empty ones are not opened.
    """
    heads: dict[str, bytes] = {}
    tails: dict[str, bytes] = {}
    errors: dict[str, CheckpointingException] = {}

    def read_both(name: str) -> None:
        size = files[name]
        try:
            heads[name] = store.read(name, 0, min(size, HEAD_BYTES))
            if heads[name].startswith(_ZIP_BEGIN) and size >= TAIL_BYTES:
                tails[name] = store.read(name, size - TAIL_BYTES, TAIL_BYTES)
        except CheckpointingException as err:
            errors[name] = err

    names = [name for name, size in files.items() if size]
    store.expect_headers(names)
    # A network file system takes about a millisecond to open a file.
    if len(names) < _FEW_FILES:
        for name in names:
            read_both(name)
    else:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_N_READERS) as pool:
            for _ in pool.map(read_both, names):
                pass
    return FileEnds(heads, tails, errors)
