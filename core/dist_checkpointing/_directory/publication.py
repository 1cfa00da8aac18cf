"""Publication of a save: a directory becomes a checkpoint atomically, when its content is complete.

The directory of a save already exists (training scripts create it), so no other directory can be
renamed to its path. Files are written into a *staging directory* in it::

    iter_0000010/              exists, empty
    └── .ckpt-stage/           locked (flock) as long as the saving process lives
        ├── data/              the checkpoint_dir that the strategies see
        ├── sums/              only with a manifest: checksums of what each rank wrote
        ├── entries.json       only while entries move: the names that are moving
        └── old/               only while a checkpoint is replaced: its entries

``publish`` syncs ``data`` and moves its entries one level up. ``metadata.json``, without which a
directory is not a distributed checkpoint, moves last. A process that is killed therefore leaves a
hidden staging directory or, between two renames, also entries that ``entries.json`` names. Neither
is a checkpoint, and the next save undoes both.

Only the coordinator has a DirectoryPublication. The lock prevents a second coordinator on the same
file system from saving into the directory.
"""

from __future__ import annotations

import json
import logging
import os
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from core.dist_checkpointing._directory.durable_file import write_file
from core.dist_checkpointing._directory.sums import DATA, STAGE, SUMS
from core.dist_checkpointing.core import CONFIG_FNAME, save_config
from core.errors import CapacityError, CheckpointingException, StorageError, UsageError, list_some
from core.files.folders import empty_folder, sync_folder, sync_tree
from core.files.json_object import parse_json_object
from core.files.store import translate_os_errors
from core.files.syscalls import rename_new
from core.publish.manifest.file import manifest_name
from core.publish.manifest.partial_sums import write_combined
from core.publish.stage.folder_lock import is_current, lock_folder

if TYPE_CHECKING:
    from core.dist_checkpointing.core import CheckpointingConfig

logger = logging.getLogger(__name__)

_ATTEMPTS = 2
_OLD = "old"
_ENTRIES = "entries.json"
_NO_ENTRIES = ("", ".", "..", STAGE)
_OWN_NAME = re.compile(
    rf"({re.escape(CONFIG_FNAME)}|\.metadata|common\.pt|{re.escape(manifest_name())}|.*\.distcp)$"
)
_FILE_OF_A_KEY = re.compile(r"(\.zarray|zarr\.json|shard_.*\.pt)$")


class DirectoryPublication:
    """A checkpoint that is being written; on the coordinator.

    If the object is garbage-collected, or the program ends, without a call of ``publish`` or
    ``abandon``, an asynchronous save was not finalized: this is logged as an error, and the staging
    directory is removed.

    Args:
        checkpoint_dir: an existing directory.
        overwrite: accept a directory that is not empty. Publishing then replaces a distributed
            checkpoint in it; other files stay, unless a new file has the same name.
        manifest: let the ranks compute checksums, and publish the checkpoint with its manifest.

    Attributes:
        data_dir: the directory that the strategies write into.

    Raises:
        UsageError: the directory does not exist, is a file, or is not empty.
        StorageError: another process is saving into the directory, or it cannot be read or written.
    """

    def __init__(
        self, checkpoint_dir: Path, *, overwrite: bool = False, manifest: bool = False
    ) -> None:
        self.checkpoint_dir = Path(os.path.abspath(checkpoint_dir))
        self.data_dir = self.data_dir_of(self.checkpoint_dir)
        self._stage_dir = self.data_dir.parent
        self._overwrite = overwrite
        self._has_manifest = manifest
        _check_directory(self.checkpoint_dir)

        # Lock the staging directory before anything in the directory is read or changed.
        refusal = StorageError(
            "another save into this directory is running",
            file=str(self.checkpoint_dir),
            hint="wait for that save to finish, and finalize this program's asynchronous saves",
        )
        lock = lock_folder(self._stage_dir, refusal=refusal)
        self._lock_fd = lock.fd
        self._end = partial(_end, self._stage_dir, lock.fd, os.getpid())
        self._unfinalized = warn_when_dropped(self, self.checkpoint_dir, self._end)
        try:
            self._begin()
        except BaseException:
            self.abandon()
            raise

    @staticmethod
    def data_dir_of(checkpoint_dir: Path) -> Path:
        """Return the directory that strategies write into, the same on every rank."""
        return checkpoint_dir / STAGE / DATA

    @staticmethod
    def is_visible(checkpoint_dir: Path) -> bool:
        """Return whether this rank sees the save that the coordinator has begun.

        Raises:
            StorageError: the system refuses.
        """
        data_dir = DirectoryPublication.data_dir_of(checkpoint_dir)
        with translate_os_errors(str(data_dir), doing="look at"):
            return data_dir.is_dir()

    def _begin(self) -> None:
        """Undo an interrupted save, check that the directory is empty, and create ``data_dir``."""
        with translate_os_errors(str(self.checkpoint_dir), doing="undo an interrupted save in"):
            _undo_interrupted_save(self._stage_dir)
        # Check this afterwards: an interrupted save may have left entries.
        with translate_os_errors(str(self.checkpoint_dir), doing="read"):
            names = sorted(set(os.listdir(self.checkpoint_dir)) - {STAGE})
        content = "a checkpoint" if CONFIG_FNAME in names else "files"
        examples = list_some(names, 3)
        if names and not self._overwrite:
            raise UsageError(
                f"the target directory already contains {content} ({examples})",
                file=str(self.checkpoint_dir),
                hint="save into an empty directory, or pass overwrite=True to replace a "
                "checkpoint and keep other files",
            )
        if names:
            logger.warning(
                "%s contains %s (%s); a checkpoint in it is replaced once the save is complete",
                self.checkpoint_dir,
                content,
                examples,
            )
        with translate_os_errors(str(self.data_dir), doing="create"):
            self.data_dir.mkdir()
            if self._has_manifest:
                (self._stage_dir / SUMS).mkdir()

    def publish(self, config: CheckpointingConfig, *, is_synced: bool = False) -> None:
        """Turn the directory into the checkpoint that was written.

        Args:
            config: the content of ``metadata.json``.
            is_synced: all files and directories in ``data_dir`` are already on disk.

        Raises:
            UsageError: a file or directory with the name of a new entry appeared during the save.
            StorageError: another process removed the staging directory, or a file cannot be moved
                or synced. The staging directory is then removed and the directory restored, unless
                the message reports that the checkpoint is complete or that restoring failed.
        """
        try:
            # If the staging directory was removed, its files are lost, even if a later rank has
            # created it again.
            with translate_os_errors(str(self.checkpoint_dir), doing="look at"):
                is_ours = is_current(self._lock_fd, self._stage_dir)
            if not is_ours:
                raise StorageError(
                    f"the directory, or {STAGE} inside it, was removed during the save",
                    file=str(self.checkpoint_dir),
                    hint="save again, and make sure that cleanup jobs skip unfinished checkpoints",
                )
            with translate_os_errors(str(self.checkpoint_dir), doing="publish"):
                save_config(config, self.data_dir)
                if self._has_manifest:
                    write_combined(self.data_dir, self._stage_dir / SUMS, manifest_name())
                # Data must be on disk before metadata.json makes it a checkpoint.
                if not is_synced:
                    sync_tree(self.data_dir)
                self._move_entries()
            # From here on the checkpoint exists, and a failure must not be taken for a failed save.
            try:
                sync_folder(self.checkpoint_dir)
            except (StorageError, CapacityError) as err:
                raise StorageError(
                    "the checkpoint is complete, but syncing its directory failed, so a crash may "
                    "lose its file names",
                    file=str(self.checkpoint_dir),
                ) from err
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Remove the staging directory and its lock; do nothing after ``publish``."""
        if self._unfinalized.detach():
            self._end()

    def _move_entries(self) -> None:
        """Move old entries into the staging directory, and the new entries into their place.

        If a move fails, all are undone.
        """
        # Move metadata.json last: it makes the directory a checkpoint.
        names = sorted(os.listdir(self.data_dir), key=lambda name: (name == CONFIG_FNAME, name))
        # Record the names on disk before the entries move: if this process is killed, the next save
        # needs them to undo the moves.
        write_file(self._stage_dir, _ENTRIES, [json.dumps({"entries": names}).encode()])
        finished_moves: list[tuple[Path, Path]] = []
        config_path = self.checkpoint_dir / CONFIG_FNAME
        try:
            moves_of_new = [(self.data_dir / name, self.checkpoint_dir / name) for name in names]
            for source, target in self._moves_of_old(names) + moves_of_new:
                # All other entries must be on disk before metadata.json appears.
                if target == config_path:
                    sync_folder(self.checkpoint_dir)
                try:
                    rename_new(source, target)
                except FileExistsError as err:
                    raise UsageError(
                        f"another program created {target.name} in the directory during the save",
                        file=str(self.checkpoint_dir),
                    ) from err
                finished_moves.append((source, target))
                # The removal of the old metadata.json must be on disk before the other entries of
                # its checkpoint move.
                if source == config_path:
                    sync_folder(self.checkpoint_dir)
        except BaseException:
            self._undo_moves(finished_moves)
            raise

    def _undo_moves(self, moves: list[tuple[Path, Path]]) -> None:
        """Undo the moves, the last first, so that the old ``metadata.json`` returns last."""
        try:
            for source, target in reversed(moves):
                os.rename(target, source)
            (self._stage_dir / _ENTRIES).unlink()
        except OSError as err:
            # Keep the staging directory: it may contain the only copy of the old checkpoint.
            self._unfinalized.detach()
            raise StorageError(
                f"publishing failed halfway, and restoring {STAGE}/{_OLD} failed too: {err}",
                file=str(self.checkpoint_dir),
                hint=f"move the contents of {STAGE}/{_OLD} back into the directory",
            ) from err

    def _moves_of_old(self, names: list[str]) -> list[tuple[Path, Path]]:
        """List the renames that move old entries to the staging directory, ``metadata.json`` first.

        The directory for the entries is created.
        """
        if not self._overwrite:
            return []
        old_dir = self._stage_dir / _OLD
        old_dir.mkdir()
        # Replace what belongs to the old checkpoint or has the name of a new entry; keep the rest.
        present = [name for name in os.listdir(self.checkpoint_dir) if name != STAGE]
        replaced = [
            name
            for name in present
            if name in names or _is_of_checkpoint(self.checkpoint_dir / name)
        ]
        replaced.sort(key=lambda name: (name != CONFIG_FNAME, name))
        return [(self.checkpoint_dir / name, old_dir / name) for name in replaced]


def _check_directory(checkpoint_dir: Path) -> None:
    if not os.path.lexists(checkpoint_dir):
        raise UsageError(
            "the target directory does not exist",
            file=str(checkpoint_dir),
            hint="create it before saving",
        )
    with translate_os_errors(str(checkpoint_dir), doing="look at"):
        is_dir = checkpoint_dir.is_dir()
    if not is_dir:
        raise UsageError("the target path is a file, not a directory", file=str(checkpoint_dir))


def _undo_interrupted_save(stage_dir: Path) -> None:
    """Empty a staging directory, after undoing the renames of a process that was killed."""
    checkpoint_dir, data_dir, old_dir = stage_dir.parent, stage_dir / DATA, stage_dir / _OLD
    # If the new metadata.json has moved, the checkpoint is published; only the staging directory
    # has to be removed.
    if not (checkpoint_dir / CONFIG_FNAME).exists() or (data_dir / CONFIG_FNAME).exists():
        # Move new entries back, then the old ones, metadata.json last. A name that is still in
        # data_dir has not moved, so an entry of that name in the directory is an old one.
        unmoved = _names_in(data_dir)
        for name in _names_to_move(stage_dir):
            if name not in unmoved and os.path.lexists(checkpoint_dir / name):
                os.rename(checkpoint_dir / name, data_dir / name)
        for name in sorted(_names_in(old_dir), key=lambda name: (name == CONFIG_FNAME, name)):
            os.rename(old_dir / name, checkpoint_dir / name)
    _empty(stage_dir)


def _names_to_move(stage_dir: Path) -> list[str]:
    """Read the names that an interrupted publication began to move; [] if it had not begun."""
    try:
        names = parse_json_object(
            (stage_dir / _ENTRIES).read_bytes(), file=f"{STAGE}/{_ENTRIES}"
        ).get("entries")
    except (OSError, CheckpointingException):  # missing, or truncated before any entry moved
        return []
    if not isinstance(names, list):
        return []
    # Never rename a path outside of the directory, whatever the file contains.
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


def is_own_name(name: str) -> bool:
    """Return whether a file at the top of a directory belongs to a distributed checkpoint."""
    return bool(_OWN_NAME.match(name))


def is_file_of_key(name: str) -> bool:
    """Return whether a file belongs to the directory of a key.

    Args:
        name: its name, or its path.
    """
    return bool(_FILE_OF_A_KEY.match(name.rpartition("/")[2]))


def _is_of_checkpoint(path: Path) -> bool:
    """Check if a directory entry belongs to a distributed checkpoint.

    This is a file with a known name, or the directory of a key.
    """
    if path.is_symlink() or not path.is_dir():
        return is_own_name(path.name)
    return any(is_file_of_key(file) for _, _, files in os.walk(path) for file in files)


def warn_when_dropped(
    publication: object, place: Path, end: Callable[[], None]
) -> weakref.finalize[[Path, int, Callable[[], None]], object]:
    """Report a save that is not finalized, and end it, when its publication is dropped.

    Args:
        publication: the publication, on the coordinator.
        place: the destination.
        end: removes what was written; a fork, which has a copy of the publication, calls it, too.

    Returns:
        The finalizer, to be detached when the save is published or abandoned.
    """
    return weakref.finalize(publication, _drop, place, os.getpid(), end)


def _drop(place: Path, owner: int, end: Callable[[], None]) -> None:
    if os.getpid() == owner:
        logger.error(
            "the asynchronous save to %s was not finalized, so it left no checkpoint; call "
            "maybe_finalize_async_calls(blocking=True) on its queue, on all ranks, before the "
            "program exits",
            place,
        )
    end()


def _end(stage_dir: Path, lock_fd: int, owner: int) -> None:
    """Remove a staging directory, then unlock it.

    Args:
        stage_dir: the staging directory.
        lock_fd: file descriptor of the lock, which is closed.
        owner: process id of the coordinator. A fork of it, which has a copy of the
            DirectoryPublication, does not remove the directory.
    """
    interrupt: KeyboardInterrupt | None = None
    for _ in range(_ATTEMPTS if os.getpid() == owner else 0):
        try:
            # A directory with another lock belongs to another save.
            if is_current(lock_fd, stage_dir):
                _empty(stage_dir)
                stage_dir.rmdir()
            break
        except (OSError, CheckpointingException):
            continue
        except KeyboardInterrupt as err:  # raised again after the removal
            interrupt = err
    # Unlock last: a save that begins earlier would find a directory that is being removed.
    with suppress(OSError):
        os.close(lock_fd)
    if interrupt is not None:
        raise interrupt
