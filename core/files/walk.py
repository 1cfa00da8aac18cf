"""The files of a checkpoint, as the directory lists them: one walk, nothing is opened.

Regular files, by name or by a symbolic link, count as files. Everything else (pipes, devices, sockets, links that lead
nowhere, directories that cannot be listed) is told apart, so that no check ever opens it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from core.files.store import LocalStore, leads_on, translated

MAX_DEPTH = 64
"""Directories in each other; more are not looked into."""

_LARGE_BYTES = 4 << 30

AGAIN = "a link to a directory that was seen already"
NOWHERE = "a link that leads nowhere"

_GIT = ".git"
"""Of a repository that was cloned: no part of the checkpoint."""

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@dataclass(slots=True)
class Tree:
    """What lies in a directory.

    Args:
        files: relative path → bytes, of every regular file.
        folders: relative paths of the directories below, each once even if several links lead to it.
        others: relative path → what it is that is neither.
    """

    files: dict[str, int] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    others: dict[str, str] = field(default_factory=dict)

    def below(self, folder: str) -> list[str]:
        """Paths, relative to a directory ("" for the root), of all files in and below it."""
        prefix = f"{folder}/" if folder else ""
        return [path[len(prefix) :] for path in self.files if path.startswith(prefix)]


def walked(root: Path, *, entry: str | None = None, depth: int | None = None, without: Collection[str] = ()) -> Tree:
    """The tree of a directory, or of one file in it.

    Args:
        root: the directory.
        entry: the one file that counts; None for all.
        depth: how many levels of directories are looked into; None for all that a checkpoint may have.
        without: relative paths of directories and files that are left out.
    """
    tree = Tree()
    if entry is not None:
        _look(tree, entry, root / entry)
        return tree
    seen: set[tuple[int, int]] = set()
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        below = [path for path in _listed(tree, root, folder, seen) if path not in without]
        if depth is None or folder.count("/") + bool(folder) < depth:
            waiting += reversed(below)
    tree.files = {path: size for path, size in sorted(tree.files.items()) if path not in without}
    return tree


def _listed(tree: Tree, root: Path, folder: str, seen: set[tuple[int, int]]) -> list[str]:
    """Takes the content of a directory; returns the directories in it."""
    path = root / folder
    prefix = f"{folder}/" if folder else ""
    below: list[str] = []
    try:
        status = os.stat(path)
        if (status.st_dev, status.st_ino) in seen:
            tree.others[folder] = AGAIN
            return []
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as err:
        tree.others[folder] = f"a directory that cannot be listed ({_reason(err)})"
        return []
    if folder:
        tree.folders.append(folder)
    for entry in found:
        try:
            if entry.is_symlink() and not os.path.exists(path / entry.name):
                tree.others[prefix + entry.name] = NOWHERE
            elif entry.is_file():
                tree.files[prefix + entry.name] = entry.stat().st_size
            elif entry.is_dir():
                if entry.is_symlink() and not leads_on(path / entry.name):
                    tree.others[prefix + entry.name] = AGAIN
                elif entry.name != _GIT:
                    below.append(prefix + entry.name)
            else:
                _look(tree, prefix + entry.name, path / entry.name)
        except OSError as err:
            tree.others[prefix + entry.name] = f"an entry that cannot be looked at ({_reason(err)})"
    if folder.count("/") >= MAX_DEPTH and below:
        tree.others[below[0]] = f"a directory more than {MAX_DEPTH} deep"
        return []
    return below


def _look(tree: Tree, name: str, path: Path) -> None:
    """Takes one entry."""
    try:
        status = os.stat(path)
    except OSError as err:
        is_link = path.is_symlink()
        tree.others[name] = NOWHERE if is_link else f"an entry that is gone ({_reason(err)})"
        return
    if stat.S_ISREG(status.st_mode):
        tree.files[name] = status.st_size
        return
    tree.others[name] = next((what for is_it, what in _KINDS if is_it(status.st_mode)), "no regular file")


def _reason(err: OSError) -> str:
    return os.strerror(err.errno).lower() if err.errno else str(err)


def hollow_files(store: LocalStore, files: Mapping[str, int]) -> Set[str]:
    """Names of large files of which the disk holds next to nothing: reading their zeros would take hours.

    Args:
        store: where they lie.
        files: name → bytes.
    """
    large = [name for name, size in files.items() if size >= _LARGE_BYTES]
    with translated(store.label, doing="check"):
        return {name for name in large if os.stat(store.path(name)).st_blocks << 9 < files[name] >> 8}
