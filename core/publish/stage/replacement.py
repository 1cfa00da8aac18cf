"""Replace an old destination by a new one, and undo a replacement that stopped half-way.

If the kernel can swap two names, a directory is replaced in one step. Otherwise, and for a single
file (whose manifest is a separate file), the old one is first moved into the staging directory::

    .out.ckpt-stage/
    ├── data/    the new destination, until it is renamed
    └── old/     the old destination under its name, or the manifest of the old file

So a process that is killed between two renames leaves everything that ``undo_replacement`` needs.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from core.errors import UsageError
from core.files.syscalls import exchange, rename_new
from core.publish.manifest.of_copy import manifest_name

_OLD = "old"


def is_vacant(dst: Path, *, is_file: bool) -> bool:
    """Return whether the output can get its name without replacing anything.

    Nothing has the name, or an empty directory, which the rename of a directory replaces in one
    step. A mount point cannot be renamed over, and neither should the directory in which the user
    works: it would be another one afterwards.
    """
    if not os.path.lexists(dst):
        return True
    if is_file or not _is_empty_dir(dst) or os.path.ismount(dst):
        return False
    return not os.path.samefile(dst, os.curdir)


def _is_empty_dir(path: Path) -> bool:
    """Return whether a path is a directory, no link to one, and is known to be empty."""
    try:
        return not path.is_symlink() and path.is_dir() and not os.listdir(path)
    except OSError:  # it may not be listed
        return False


def check_may_replace(dst: Path, *, is_file: bool, keep: Sequence[Path]) -> None:
    """Raise unless an existing destination may be replaced.

    Args:
        dst: the destination, which exists.
        is_file: the output is a single file.
        keep: paths that the destination must not contain, and must not be inside of.

    Raises:
        UsageError: the destination and the output are not both files or both directories, or the
            replacement would remove a path that must be kept.
    """
    # The name must be a plain file or directory, of the same kind as the output.
    if dst.is_symlink():
        raise UsageError(
            "the destination is a symbolic link, which ckpt does not replace",
            file=str(dst),
            hint="remove the link, or choose another destination",
        )
    if dst.is_dir() == is_file:
        existing, output = ("a directory", "a file") if is_file else ("a file", "a directory")
        raise UsageError(
            f"the destination is {existing}, but the output would be {output}",
            file=str(dst),
            hint="remove the destination, or choose another one",
        )

    # Nothing that must be kept may disappear with it, nor the place from which the user works.
    target = dst.resolve()
    for path in (*keep, Path.cwd(), Path.home()):
        if path.resolve().is_relative_to(target):
            raise UsageError(f"replacing the destination would remove {path}", file=str(dst))
    for path in keep:
        if target.is_relative_to(path.resolve()):
            raise UsageError(
                f"the destination is inside {path}, so it cannot be replaced",
                file=str(dst),
                hint="choose another destination",
            )

    # The kernel cannot rename a mount point.
    if os.path.ismount(dst):
        raise UsageError(
            "the destination is a mount point", file=str(dst), hint="write to a directory inside it"
        )


def replace_dir(data_dir: Path, dst: Path, *, force: bool) -> None:
    """Rename a finished directory to its final name.

    Args:
        data_dir: the directory, in the staging directory; with ``force`` the old destination may be
            there afterwards.
        dst: the final name.
        force: replace a directory that has this name; an empty one is replaced in any case.

    Raises:
        FileExistsError: the name is taken, and ``force`` is not given.
        OSError: the system refuses; the caller must call ``undo_replacement``.
    """
    if not os.path.lexists(dst):
        rename_new(data_dir, dst)
    elif is_vacant(dst, is_file=False):
        _replace_empty(data_dir, dst)
    elif not force:
        raise FileExistsError
    elif not exchange(data_dir, dst):
        _set_aside(dst, data_dir.parent)
        rename_new(data_dir, dst)


def _replace_empty(data_dir: Path, dst: Path) -> None:
    """Rename a directory over an empty one, and keep the permissions and the group of that."""
    status = os.stat(dst)
    try:
        os.rename(data_dir, dst)
    except OSError as err:
        if err.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError from err
        raise
    # Only now: a directory that its owner may not write cannot be renamed.
    with suppress(OSError):  # a group that the user is not in
        os.chown(dst, -1, status.st_gid)
    with suppress(OSError):
        os.chmod(dst, stat.S_IMODE(status.st_mode))


def replace_file(data_dir: Path, dst: Path, *, force: bool) -> None:
    """Rename a finished file to its final name.

    The manifest of an old file is moved aside first; the caller adds the manifest of the new one.

    Raises:
        FileExistsError: the name is taken, and ``force`` is not given.
        OSError: the system refuses; the caller must call ``undo_replacement``.
    """
    if not force:
        rename_new(data_dir / dst.name, dst)
        return
    # The old manifest must never be next to the new file: it would report damage.
    manifest_path = dst.parent / manifest_name(dst.name)
    if os.path.lexists(manifest_path):
        _set_aside(manifest_path, data_dir.parent)
    os.replace(data_dir / dst.name, dst)


def undo_replacement(stage_dir: Path, dst: Path) -> bool:
    """Restore what an interrupted replacement has moved aside, unless the new destination exists.

    Returns:
        True if anything was restored.

    Raises:
        UsageError: something else has the name of the old destination now, which the staging
            directory alone holds.
        OSError: the system refuses; the staging directory must then be kept.
    """
    # An old directory, or an old single file. A script may have made the directory anew.
    aside = stage_dir / _OLD / dst.name
    if os.path.lexists(aside):
        if not os.path.lexists(dst):
            rename_new(aside, dst)
            return True
        if aside.is_dir() and _is_empty_dir(dst):
            os.rename(aside, dst)
            return True
        if holds_previous(stage_dir, dst):
            raise UsageError(
                "the destination was created again after its previous content was moved to "
                f"{aside}",
                file=str(dst),
                hint="move one of the two elsewhere, and run the command again",
            )

    # The manifest of an old single file, as long as the new file is still in the staging directory.
    manifest = manifest_name(dst.name)
    aside = stage_dir / _OLD / manifest
    is_unplaced = os.path.lexists(stage_dir / "data" / dst.name)
    if is_unplaced and os.path.lexists(aside) and not os.path.lexists(dst.parent / manifest):
        rename_new(aside, dst.parent / manifest)
        return True
    return False


def holds_previous(stage_dir: Path, dst: Path) -> bool:
    """Return whether a staging directory alone has the directory that a replacement has set aside.

    The new directory leaves the staging directory when it gets its name; before that, the old one
    may not be removed.
    """
    return (stage_dir / _OLD / dst.name).is_dir() and os.path.lexists(stage_dir / "data")


def _set_aside(path: Path, stage_dir: Path) -> None:
    """Move a file or directory of the old destination into the staging directory."""
    (stage_dir / _OLD).mkdir(exist_ok=True)
    os.rename(path, stage_dir / _OLD / path.name)
