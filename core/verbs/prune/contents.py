"""List what a directory of an iteration contains, and what forbids removing it.

Everything below the directory counts, also files that no reader opens (random states, schedulers,
tokenizers). A directory is left alone if it contains anything that programs do not save in
checkpoints: what a user has put there must not disappear with it. Links are never followed.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path

from core.files.object_listing import forget_listings, list_all
from core.files.remote_path import is_remote
from core.values import dataclass

_KNOWN = re.compile(
    r"\..+"  # hidden files: .metadata, .zarray, .gitattributes
    r"|[^.]+|[\d.]+"  # no suffix: zarr's chunks, OCDBT's nodes, DeepSpeed's latest, LICENSE
    r"|.+\.(pt|pth|bin|safetensors|distcp|ckpt|pkl|npy|npz|msgpack|ocdbt|nemo|gguf)"
    r"|.+\.(json|jsonl|yaml|yml|toml|py|jinja)"
    r"|.+\.(model|tiktoken|spm|codes)|tokenizer\.model\..+"
    r"|((.+[-_])?(vocab|merges|dict|commit_success)([-_].+)?)\.txt"
    r"|(README|LICENSE|NOTICE|USE_POLICY)\..+",
    re.IGNORECASE | re.DOTALL,
)
"""Names of files that trainers and their libraries save in the directory of an iteration."""
_MOST_NAMED = 3
"""Maximum number of files in a message."""
STAGE = ".ckpt-stage"
"""Directory in an iteration whose save is running, or was interrupted."""


@dataclass(frozen=True, slots=True)
class FileStamp:
    """The state of a file, by which a later change is noticed.

    Args:
        n_bytes: its size.
        modified_ns: time of its last change.
        identity: device and inode, or the ETag of an object.
        n_links: number of its names (hard links), which changes when one of them is removed.
    """

    n_bytes: int
    modified_ns: int
    identity: tuple[int, int] | str | None
    n_links: int = field(default=1, compare=False)


@dataclass(frozen=True, slots=True)
class Contents:
    """Content of a directory and of all directories below it.

    Args:
        files: relative path → state, of everything that is not a directory.
        links: relative path of each symbolic link → the path that it leads to.
        obstacle: why the directory must be left alone; None if nothing is known.
    """

    files: Mapping[str, FileStamp]
    links: Mapping[str, str]
    obstacle: str | None

    @property
    def n_bytes(self) -> int:
        """Size of all files."""
        return sum(stamp.n_bytes for stamp in self.files.values())


def read_contents(path: Path) -> Contents:
    """List the content of a directory or of a prefix, as it is now."""
    if is_remote(path):
        forget_listings()
        folders = list_all(path)
        files = {
            f"{folder}/{name}" if folder else name: FileStamp(
                entry.size, entry.modified_ns, entry.e_tag
            )
            for folder, content in folders.items()
            for name, entry in content.objects.items()
        }
        return Contents(files, {}, _obstacle_of(files, folders))
    return _read_local(path)


def _read_local(path: Path) -> Contents:
    """List the content of a local directory; what cannot be listed is an obstacle."""
    files: dict[str, FileStamp] = {}
    links: dict[str, str] = {}
    folders: list[str] = []
    waiting = [""]
    try:
        if path.is_symlink():
            return Contents({}, {}, "a symbolic link")
        device = path.stat().st_dev
        if os.path.ismount(path):
            return Contents({}, {}, "a mount point")
        while waiting:
            folder = waiting.pop()
            folders.append(folder)
            with os.scandir(path / folder) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    status = entry.stat(follow_symlinks=False)
                    if status.st_dev != device:
                        return Contents({}, {}, f"another file system is mounted at {name}")
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(name)
                        continue
                    if entry.is_symlink():
                        links[name] = os.path.realpath(entry.path)
                    identity = status.st_dev, status.st_ino
                    files[name] = FileStamp(
                        status.st_size, status.st_mtime_ns, identity, status.st_nlink
                    )
    except OSError as err:
        reason = os.strerror(err.errno).lower() if err.errno else str(err)
        return Contents({}, {}, f"it cannot be listed ({reason})")
    return Contents(files, links, _obstacle_of(files, folders))


def _obstacle_of(files: Iterable[str], folders: Iterable[str]) -> str | None:
    """Return why a directory with these files and directories must be left alone, or None."""
    if any(folder.rpartition("/")[2] == STAGE for folder in folders):
        return f"a save into it is running, or was interrupted ({STAGE})"
    foreign = sorted(file for file in files if _KNOWN.fullmatch(file.rpartition("/")[2]) is None)
    if foreign:
        names = ", ".join([*foreign[:_MOST_NAMED], *(["…"] if len(foreign) > _MOST_NAMED else [])])
        return f"it contains files that are not part of a checkpoint ({names})"
    return None


def freed_bytes(removed: Iterable[Contents]) -> int:
    """Return the bytes that removing directories frees; a file with names elsewhere stays."""
    stamps = [stamp for contents in removed for stamp in contents.files.values()]
    n_names = Counter(stamp.identity for stamp in stamps)
    freed = {
        stamp.identity: stamp.n_bytes
        for stamp in stamps
        if stamp.n_links > 1 and n_names[stamp.identity] >= stamp.n_links
    }
    return sum(stamp.n_bytes for stamp in stamps if stamp.n_links == 1) + sum(freed.values())
