"""Publication of a save: a directory becomes a checkpoint atomically, when its content is complete.

The directory of a save exists already (training scripts create it), so nothing can be renamed to
its path. Files are written into a *stage* in it::

    iter_0000010/              exists, empty
    └── .ckpt-stage/           locked (flock) as long as the saving process lives
        ├── data/              the checkpoint_dir that the strategies see
        ├── entries.json       only while entries move: the names that are moving
        └── old/               only while a checkpoint is replaced: its entries

``publish`` syncs ``data`` and moves its entries one level up. ``metadata.json``, without which no
directory is a distributed checkpoint, moves last. A process that is killed therefore leaves a
hidden stage or, between two renames, a stage and entries that ``entries.json`` names; neither is a
checkpoint, and the next save undoes both.

Only the coordinator has a Publication. The lock keeps a second coordinator on the same file system
out.
"""

from __future__ import annotations

import json
import os
import re
import weakref
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
_OWN_NAME = re.compile(
    rf"({re.escape(CONFIG_FNAME)}|\.metadata|common\.pt|{re.escape(manifest_name())}|.*\.distcp)$"
)
_FILE_OF_A_KEY = re.compile(r"(\.zarray|zarr\.json|shard_.*\.pt)$")


def data_dir_of(checkpoint_dir: Path) -> Path:
    """Return the directory that strategies write into while ``checkpoint_dir`` is being saved.

    It is the same on every rank.
    """
    return checkpoint_dir / STAGE / _DATA


class Publication:
    """A checkpoint that is being written; on the coordinator.

    If the object is collected without having been published (an asynchronous save that failed and
    was dropped), the stage is removed.

    Args:
        checkpoint_dir: an existing directory.
        overwrite: accept a directory that is not empty. Publishing then replaces a distributed
            checkpoint in it; other files stay, unless a new one has the same name.

    Attributes:
        data_dir: the directory that the strategies write into.

    Raises:
        UsageError: the directory does not exist, is a file, or is not empty.
        StorageError: another process is saving into the directory, or it cannot be read or written.
    """

    def __init__(self, checkpoint_dir: Path, *, overwrite: bool = False) -> None:
        self.checkpoint_dir = Path(os.path.abspath(checkpoint_dir))
        self.data_dir = data_dir_of(self.checkpoint_dir)
        self._stage_dir = self.data_dir.parent
        self._overwrite = overwrite
        _check_directory(self.checkpoint_dir)
        lock = _lock_stage(self._stage_dir)
        self._lock_fd = lock.fd
        self._end = weakref.finalize(self, _end, self._stage_dir, lock.fd, os.getpid())
        try:
            self._begin()
        except BaseException:
            self.abandon()
            raise

    def _begin(self) -> None:
        with translate_os_errors(
            str(self.checkpoint_dir), doing="clear away an interrupted save in"
        ):
            _clear_away(self._stage_dir)
        if not self._overwrite:
            _check_empty(self.checkpoint_dir)
        with translate_os_errors(str(self.data_dir), doing="create"):
            self.data_dir.mkdir()

    def publish(self, config: CheckpointingConfig, *, is_synced: bool = False) -> None:
        """Turn the directory into the checkpoint that was written.

        Args:
            config: the content of ``metadata.json``.
            is_synced: all files and directories in ``data_dir`` are on the disk already.

        Raises:
            UsageError: a name that was free at the beginning now exists.
            StorageError: the stage was removed by somebody else, or a file cannot be moved or
                synced. The stage is gone then and the directory as it was before, unless the
                message says that only the confirmation of the last rename is missing.
        """
        try:
            self._check_stage()
            with translate_os_errors(str(self.checkpoint_dir), doing="publish"):
                save_config(config, self.data_dir)
                if not is_synced:
                    sync_tree(self.data_dir)
                self._move_entries()
            self._sync_renames()
        finally:
            self.abandon()

    def _check_stage(self) -> None:
        """Raise unless the stage is still the one that this object has locked.

        If it was removed, its files are gone, even if a later rank has created it again.

        Raises:
            StorageError: the stage was removed.
        """
        with translate_os_errors(str(self.checkpoint_dir), doing="look at"):
            is_ours = is_current(self._lock_fd, self._stage_dir)
        if not is_ours:
            raise StorageError(
                f"the directory, or {STAGE} in it, was removed during the save",
                file=str(self.checkpoint_dir),
                hint="save again, and keep clean-up jobs away from directories of checkpoints that are being saved",
            )

    def _sync_renames(self) -> None:
        try:
            sync_folder(self.checkpoint_dir)
        except (StorageError, CapacityError) as err:
            raise StorageError(
                "the checkpoint is complete, but the system could not confirm that its names are on the disk",
                file=str(self.checkpoint_dir),
            ) from err

    def abandon(self) -> None:
        """Remove the stage and its lock. After ``publish`` this does nothing."""
        self._end()

    def _move_entries(self) -> None:
        """Move the new entries into the directory and those that they replace into the stage.

        If a move fails, all are undone.
        """
        names = sorted(os.listdir(self.data_dir), key=lambda name: (name == CONFIG_FNAME, name))
        # Name the entries on the disk before they move, so that the next save can undo a killed one.
        write_file(self._stage_dir, _ENTRIES, [json.dumps({"entries": names}).encode()])
        done: list[tuple[Path, Path]] = []
        config_path = self.checkpoint_dir / CONFIG_FNAME
        try:
            moves_of_new = [(self.data_dir / name, self.checkpoint_dir / name) for name in names]
            for source, target in self._moves_of_old(names) + moves_of_new:
                # Everything else is on the disk before metadata.json appears.
                if target == config_path:
                    sync_folder(self.checkpoint_dir)
                self._move_entry(source, target)
                done.append((source, target))
                # The old metadata.json is gone from the disk before anything else of its checkpoint moves.
                if source == config_path:
                    sync_folder(self.checkpoint_dir)
        except BaseException:
            self._undo_moves(done)
            raise

    def _undo_moves(self, moves: list[tuple[Path, Path]]) -> None:
        try:
            for source, target in reversed(moves):
                os.rename(target, source)
            (self._stage_dir / _ENTRIES).unlink()
        except OSError as err:
            self._end.detach()  # the stage may hold all that is left of the old checkpoint
            raise StorageError(
                f"the publication failed halfway, and {STAGE} in the directory could not be emptied: {err}",
                file=str(self.checkpoint_dir),
                hint=f"move the content of {STAGE}/{_OLD} back into the directory",
            ) from err

    def _moves_of_old(self, names: list[str]) -> list[tuple[Path, Path]]:
        """Return the renames that move replaced entries into the stage, ``metadata.json`` first.

        Creates the directory in the stage.
        """
        if not self._overwrite:
            return []
        old_dir = self._stage_dir / _OLD
        old_dir.mkdir()
        present = [name for name in os.listdir(self.checkpoint_dir) if name != STAGE]
        replaced = [
            name
            for name in present
            if name in names or _is_of_checkpoint(self.checkpoint_dir / name)
        ]
        replaced.sort(key=lambda name: (name != CONFIG_FNAME, name))
        return [(self.checkpoint_dir / name, old_dir / name) for name in replaced]

    def _move_entry(self, source: Path, target: Path) -> None:
        try:
            rename_new(source, target)
        except FileExistsError as err:
            raise UsageError(
                f"{target.name} appeared in the directory during the save",
                file=str(self.checkpoint_dir),
            ) from err


def _lock_stage(stage_dir: Path) -> FolderLock:
    try:
        return lock_folder(stage_dir, dst=stage_dir.parent)
    except StorageError as err:
        if not isinstance(err.__cause__, BlockingIOError):
            raise
        raise StorageError(
            "another save into this directory is running",
            file=str(stage_dir.parent),
            hint="wait for it to end; an asynchronous save of this program has to be finalized",
        ) from err


def _check_directory(checkpoint_dir: Path) -> None:
    if not os.path.lexists(checkpoint_dir):
        raise UsageError(
            "the directory to save into does not exist",
            file=str(checkpoint_dir),
            hint="create it before the save",
        )
    with translate_os_errors(str(checkpoint_dir), doing="look at"):
        is_dir = checkpoint_dir.is_dir()
    if not is_dir:
        raise UsageError(
            "a checkpoint is saved into a directory, but this is a file", file=str(checkpoint_dir)
        )


def _check_empty(checkpoint_dir: Path) -> None:
    with translate_os_errors(str(checkpoint_dir), doing="read"):
        names = sorted(set(os.listdir(checkpoint_dir)) - {STAGE})
    if names:
        content = "a checkpoint" if CONFIG_FNAME in names else "files"
        raise UsageError(
            f"the directory to save into already has {content} in it ({', '.join(names[:3])}{' …' * (len(names) > 3)})",
            file=str(checkpoint_dir),
            hint="save into an empty one, or pass overwrite=True, which replaces a checkpoint and keeps other files",
        )


def _clear_away(stage_dir: Path) -> None:
    """Empty a stage, after undoing the renames of a process that was killed between two of them."""
    checkpoint_dir, data_dir, old_dir = stage_dir.parent, stage_dir / _DATA, stage_dir / _OLD
    # Once the new metadata.json has moved, the checkpoint is published, and only the stage is left.
    if not (checkpoint_dir / CONFIG_FNAME).exists() or (data_dir / CONFIG_FNAME).exists():
        unmoved = _names_in(data_dir)
        for name in _names_to_move(stage_dir):
            if name not in unmoved and os.path.lexists(checkpoint_dir / name):
                os.rename(checkpoint_dir / name, data_dir / name)
        for name in sorted(_names_in(old_dir), key=lambda name: (name == CONFIG_FNAME, name)):
            os.rename(old_dir / name, checkpoint_dir / name)
    _empty(stage_dir)


def _names_to_move(stage_dir: Path) -> list[str]:
    """Return the names that a publication had begun to move; [] if it had not begun."""
    try:
        names = parse_json_object(
            (stage_dir / _ENTRIES).read_bytes(), file=f"{STAGE}/{_ENTRIES}"
        ).get("entries")
    except (OSError, CheckpointingException):  # missing, or truncated before any entry moved
        return []
    if not isinstance(names, list):
        return []
    return [
        name
        for name in names
        if isinstance(name, str) and "/" not in name and name not in _NO_ENTRIES
    ]


def _names_in(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _empty(stage_dir: Path) -> None:
    (stage_dir / _ENTRIES).unlink(missing_ok=True)
    empty_folder(stage_dir)


def _is_of_checkpoint(path: Path) -> bool:
    """Return whether a directory entry belongs to a distributed checkpoint.

    It does if it has a known file name, or is the directory of a key.
    """
    if path.is_symlink() or not path.is_dir():
        return bool(_OWN_NAME.match(path.name))
    return any(_FILE_OF_A_KEY.match(file) for _, _, files in os.walk(path) for file in files)


def _end(stage_dir: Path, lock_fd: int, owner: int) -> None:
    """Remove a stage, then unlock it.

    A fork of the owner, which has a copy of the Publication, only closes its lock and removes
    nothing.
    """
    interrupt: KeyboardInterrupt | None = None
    for _ in range(_ATTEMPTS if os.getpid() == owner else 0):
        try:
            if is_current(lock_fd, stage_dir):  # otherwise the stage belongs to another save
                _empty(stage_dir)
                stage_dir.rmdir()
            break
        except (OSError, CheckpointingException):
            continue
        except KeyboardInterrupt as err:  # raised again once the stage is gone
            interrupt = err
    with suppress(OSError):
        os.close(lock_fd)
    if interrupt is not None:
        raise interrupt
