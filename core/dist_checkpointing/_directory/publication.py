"""Publication of a save: a directory becomes a checkpoint at once, when everything in it is complete.

The directory of a save exists already (training scripts make it), so nothing can be renamed into its place. What is
written goes into a *stage* in it::

    iter_0000010/              exists, empty
    └── .ckpt-stage/           locked (flock) as long as the saving process lives
        ├── data/              the checkpoint_dir that the strategies see
        ├── entries.json       only while entries move: the names that are moving
        └── old/               only while a checkpoint is replaced: its entries

``publish`` syncs ``data``, moves its entries one level up, and ``metadata.json``, without which nothing is a
distributed checkpoint, last of all. So a process that is killed leaves a hidden stage, or, between two renames, a
stage and entries that ``entries.json`` names; neither is a checkpoint, and the next save undoes both.

Only the coordinator has a Publication. The lock keeps a second coordinator on the same file system out.
"""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from core.dist_checkpointing._directory.durable_file import write_file
from core.dist_checkpointing.core import CONFIG_FNAME, save_config
from core.errors import CapacityError, CheckpointingException, StorageError, UsageError
from core.files.folders import empty_folder, sync_folder, sync_tree
from core.files.json_object import parse_json_object
from core.files.store import translate_os_errors
from core.files.syscalls import rename_new
from core.manifest.of_copy import manifest_name
from core.stage.folder_lock import FolderLock, is_current, lock_folder

if TYPE_CHECKING:
    from core.dist_checkpointing.core import CheckpointingConfig

STAGE = ".ckpt-stage"
_ATTEMPTS = 2
_DATA = "data"
_OLD = "old"
_ENTRIES = "entries.json"
_NO_ENTRIES = ("", ".", "..", STAGE)
_OWN_NAME = re.compile(rf"({re.escape(CONFIG_FNAME)}|\.metadata|common\.pt|{re.escape(manifest_name())}|.*\.distcp)$")
_FILE_OF_A_KEY = re.compile(r"(\.zarray|zarr\.json|shard_.*\.pt)$")


def data_dir_of(checkpoint_dir: Path) -> Path:
    """Where the strategies write while ``checkpoint_dir`` is being saved, on every rank."""
    return checkpoint_dir / STAGE / _DATA


class Publication:
    """A checkpoint that is being written; on the coordinator.

    If nobody holds it any more and it was not published (an async save that failed and was dropped), the stage goes.

    Args:
        checkpoint_dir: an existing directory.
        overwrite: accept a directory that is not empty. A distributed checkpoint in it is replaced in the end; other
            files stay, unless one of the new ones has its name.

    Attributes:
        data_dir: what the strategies write into.

    Raises:
        UsageError: the directory is missing, is a file, or is not empty.
        StorageError: another process is saving into it, or the system refuses.
    """

    def __init__(self, checkpoint_dir: Path, *, overwrite: bool = False) -> None:
        self.checkpoint_dir = Path(os.path.abspath(checkpoint_dir))
        self.data_dir = data_dir_of(self.checkpoint_dir)
        self._stage_dir = self.data_dir.parent
        self._overwrite = overwrite
        _check_directory(self.checkpoint_dir)
        lock = _locked(self._stage_dir)
        self._lock_fd = lock.fd
        self._end = weakref.finalize(self, _end, self._stage_dir, lock.fd, os.getpid())
        try:
            self._begin()
        except BaseException:
            self.abandon()
            raise

    def _begin(self) -> None:
        with translate_os_errors(str(self.checkpoint_dir), doing="clear away an interrupted save in"):
            _clear_away(self._stage_dir)
        if not self._overwrite:
            _check_empty(self.checkpoint_dir)
        with translate_os_errors(str(self.data_dir), doing="create"):
            self.data_dir.mkdir()

    def publish(self, config: CheckpointingConfig, *, is_synced: bool = False) -> None:
        """Makes the directory the checkpoint that was written.

        Args:
            config: the content of ``metadata.json``.
            is_synced: all files and directories in ``data_dir`` are on the disk already.

        Raises:
            UsageError: a name is taken that was free in the beginning.
            StorageError: somebody has removed the stage, or the system refuses. The stage is gone then and the
                directory as it was before, unless the message says that only the confirmation of the last rename is
                missing.
        """
        try:
            self._check_stage()
            with translate_os_errors(str(self.checkpoint_dir), doing="publish"):
                save_config(config, self.data_dir)
                if not is_synced:
                    sync_tree(self.data_dir)
                self._move()
            self._confirm()
        finally:
            self.abandon()

    def _check_stage(self) -> None:
        """Files of a stage that was removed are gone, also where a rank that came later has made it again."""
        with translate_os_errors(str(self.checkpoint_dir), doing="look at"):
            is_ours = is_current(self._lock_fd, self._stage_dir)
        if not is_ours:
            raise StorageError(
                f"somebody has removed the directory, or {STAGE} in it, during the save",
                file=str(self.checkpoint_dir),
                hint="save again, and let no clean-up job touch directories of checkpoints that are being saved",
            )

    def _confirm(self) -> None:
        try:
            sync_folder(self.checkpoint_dir)
        except (StorageError, CapacityError) as err:
            raise StorageError(
                "the checkpoint is complete, but the system could not confirm that its names are on the disk",
                file=str(self.checkpoint_dir),
            ) from err

    def abandon(self) -> None:
        """Removes the stage, and lets others save here. After ``publish`` there is nothing left to do."""
        self._end()

    def _move(self) -> None:
        names = sorted(os.listdir(self.data_dir), key=lambda name: (name == CONFIG_FNAME, name))
        self._note(names)
        moves: list[tuple[Path, Path]] = []
        try:
            self._set_aside(names, moves)
            for name in names:
                if name == CONFIG_FNAME:
                    sync_folder(self.checkpoint_dir)
                self._move_one(self.data_dir / name, self.checkpoint_dir / name, moves)
        except BaseException:
            self._undo(moves)
            raise

    def _undo(self, moves: list[tuple[Path, Path]]) -> None:
        try:
            for source, target in reversed(moves):
                os.rename(target, source)
            (self._stage_dir / _ENTRIES).unlink()
        except OSError as err:
            self._end.detach()  # what the stage holds may be all that is left of the old checkpoint
            raise StorageError(
                f"the publication failed half-way, and {STAGE} in it could not be emptied: {err}",
                file=str(self.checkpoint_dir),
                hint=f"what {STAGE}/{_OLD} holds belongs into the directory",
            ) from err

    def _set_aside(self, names: list[str], moves: list[tuple[Path, Path]]) -> None:
        """Moves what is replaced out of the way, ``metadata.json`` first."""
        if not self._overwrite:
            return
        old_dir = self._stage_dir / _OLD
        old_dir.mkdir()
        present = [name for name in os.listdir(self.checkpoint_dir) if name != STAGE]
        replaced = [name for name in present if name in names or _is_of_checkpoint(self.checkpoint_dir / name)]
        for name in sorted(replaced, key=lambda name: (name != CONFIG_FNAME, name)):
            self._move_one(self.checkpoint_dir / name, old_dir / name, moves)
            if name == CONFIG_FNAME:
                sync_folder(self.checkpoint_dir)

    def _move_one(self, source: Path, target: Path, moves: list[tuple[Path, Path]]) -> None:
        try:
            rename_new(source, target)
        except FileExistsError as err:
            raise UsageError(
                f"{target.name} has appeared in the directory during the save", file=str(self.checkpoint_dir)
            ) from err
        moves.append((source, target))

    def _note(self, names: list[str]) -> None:
        """Puts on the disk which names are about to move."""
        write_file(self._stage_dir, _ENTRIES, [json.dumps({"entries": names}).encode()])


def _locked(stage_dir: Path) -> FolderLock:
    try:
        return lock_folder(stage_dir, dst=stage_dir.parent)
    except StorageError as err:
        if not isinstance(err.__cause__, BlockingIOError):
            raise
        raise StorageError(
            "another save into this directory is going on",
            file=str(stage_dir.parent),
            hint="wait for it; an asynchronous save of this program has to be finalized",
        ) from err


def _check_directory(checkpoint_dir: Path) -> None:
    if not os.path.lexists(checkpoint_dir):
        raise UsageError(
            "the directory to save into does not exist", file=str(checkpoint_dir), hint="make it before the save"
        )
    with translate_os_errors(str(checkpoint_dir), doing="look at"):
        is_dir = checkpoint_dir.is_dir()
    if not is_dir:
        raise UsageError("a checkpoint is saved into a directory, this is a file", file=str(checkpoint_dir))


def _check_empty(checkpoint_dir: Path) -> None:
    with translate_os_errors(str(checkpoint_dir), doing="read"):
        names = sorted(set(os.listdir(checkpoint_dir)) - {STAGE})
    if names:
        what = "a checkpoint" if CONFIG_FNAME in names else "files"
        raise UsageError(
            f"the directory to save into holds {what} already ({', '.join(names[:3])}{' …' * (len(names) > 3)})",
            file=str(checkpoint_dir),
            hint="save into an empty one, or pass overwrite=True, which replaces a checkpoint and keeps other files",
        )


def _clear_away(stage_dir: Path) -> None:
    """Empties a stage. What was moved by a process that was killed between two renames is moved back before."""
    checkpoint_dir, data_dir, old_dir = stage_dir.parent, stage_dir / _DATA, stage_dir / _OLD
    if not (checkpoint_dir / CONFIG_FNAME).exists() or (data_dir / CONFIG_FNAME).exists():
        waiting = _names_in(data_dir)
        for name in _moving(stage_dir):
            if name not in waiting and os.path.lexists(checkpoint_dir / name):
                os.rename(checkpoint_dir / name, data_dir / name)
        for name in sorted(_names_in(old_dir), key=lambda name: (name == CONFIG_FNAME, name)):
            os.rename(old_dir / name, checkpoint_dir / name)
    _empty(stage_dir)


def _moving(stage_dir: Path) -> list[str]:
    """The names that a publication had begun to move; [] if it had not."""
    try:
        names = parse_json_object((stage_dir / _ENTRIES).read_bytes(), file=f"{STAGE}/{_ENTRIES}").get("entries")
    except (OSError, CheckpointingException):  # not there, or cut off before any entry moved
        return []
    found = names if isinstance(names, list) else []
    return [name for name in found if isinstance(name, str) and "/" not in name and name not in _NO_ENTRIES]


def _names_in(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _empty(stage_dir: Path) -> None:
    (stage_dir / _ENTRIES).unlink(missing_ok=True)
    empty_folder(stage_dir)


def _is_of_checkpoint(path: Path) -> bool:
    """Whether an entry of a directory is a part of a distributed checkpoint: known by name, or a key's directory."""
    if path.is_symlink() or not path.is_dir():
        return bool(_OWN_NAME.match(path.name))
    return any(_FILE_OF_A_KEY.match(file) for file in _files_below(path))


def _files_below(folder: Path) -> Iterator[str]:
    for _, _, files in os.walk(folder):
        yield from files


def _end(stage_dir: Path, lock_fd: int, owner: int) -> None:
    """Removes a stage, then unlocks it; in a fork of its owner, which has a copy of everything, nothing is removed."""
    interrupt: KeyboardInterrupt | None = None
    for _ in range(_ATTEMPTS if os.getpid() == owner else 0):
        try:
            if is_current(lock_fd, stage_dir):  # else it is another save's
                _empty(stage_dir)
                stage_dir.rmdir()
            break
        except (OSError, CheckpointingException):
            continue
        except KeyboardInterrupt as err:  # it can wait until the stage is gone
            interrupt = err
    with suppress(OSError):
        os.close(lock_fd)
    if interrupt is not None:
        raise interrupt
