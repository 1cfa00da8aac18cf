"""The renames that put a new destination where perhaps an old one stands, and what undoes half of them.

Where the kernel can swap two names, a directory takes its place in one step. Where it cannot, and beside a single file
(which has a manifest of its own), the old one is set aside first, in the stage::

    .out.ckpt-stage/
    ├── data/    the new one, until it has its place
    └── old/     the old one under its name, or the manifest of the old file

So a process that is killed between two renames leaves everything that is needed to go back: ``put_back``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from core.errors import UsageError
from core.files.syscalls import exchange, rename_new
from core.manifest.of_copy import manifest_name

_OLD = "old"


def check_may_go(dst: Path, *, is_file: bool, keep: Sequence[Path]) -> None:
    """Returns if an existing destination may be replaced.

    Args:
        dst: exists.
        is_file: what comes is one file.
        keep: paths that the destination must neither contain nor lie in.

    Raises:
        UsageError: it is of another kind, or replacing it would remove what must be kept.
    """
    if dst.is_dir() == is_file or dst.is_symlink():
        raise UsageError(
            "the destination is of another kind than what would replace it", file=str(dst), hint="remove it"
        )
    target = dst.resolve()
    for path in (*keep, Path.cwd(), Path.home()):
        if path.resolve().is_relative_to(target):
            raise UsageError(f"replacing the destination would remove {path}", file=str(dst))
    for path in keep:
        if target.is_relative_to(path.resolve()):
            raise UsageError(
                f"the destination is a part of {path}, so it is not replaced",
                file=str(dst),
                hint="choose another one",
            )
    if os.path.ismount(dst):
        raise UsageError("the destination is a mount point", file=str(dst), hint="write to a directory in it")


def replace_dir(data_dir: Path, dst: Path, *, force: bool) -> None:
    """Gives a finished directory its name.

    Args:
        data_dir: in the stage; with ``force`` the old directory may lie there afterwards.
        dst: its name to be.
        force: whether an old directory may stand there.

    Raises:
        FileExistsError: the name is taken, without ``force``.
        OSError: the system refuses; ``put_back`` is due then.
    """
    if not os.path.lexists(dst):
        rename_new(data_dir, dst)
    elif not force:
        raise FileExistsError
    elif not exchange(data_dir, dst):
        _set_aside(dst, data_dir.parent)
        rename_new(data_dir, dst)


def replace_file(data_dir: Path, dst: Path, *, force: bool) -> None:
    """Gives a finished file its name; the manifest of an old file goes first, that of the new one comes later.

    Raises:
        FileExistsError, OSError: as for ``replace_dir``.
    """
    if not force:
        rename_new(data_dir / dst.name, dst)
        return
    manifest_path = dst.parent / manifest_name(dst.name)
    if os.path.lexists(manifest_path):
        _set_aside(manifest_path, data_dir.parent)
    os.replace(data_dir / dst.name, dst)


def put_back(stage_dir: Path, dst: Path) -> bool:
    """Goes back to what was there before an interrupted replacement, if the new destination had no place yet.

    Returns:
        Whether anything had to be done.

    Raises:
        OSError: the system refuses; the stage must stay then.
    """
    aside = stage_dir / _OLD / dst.name
    if os.path.lexists(aside) and not os.path.lexists(dst):
        rename_new(aside, dst)
        return True
    manifest = manifest_name(dst.name)
    aside = stage_dir / _OLD / manifest
    is_unplaced = os.path.lexists(stage_dir / "data" / dst.name)
    if is_unplaced and os.path.lexists(aside) and not os.path.lexists(dst.parent / manifest):
        rename_new(aside, dst.parent / manifest)
        return True
    return False


def _set_aside(path: Path, stage_dir: Path) -> None:
    (stage_dir / _OLD).mkdir(exist_ok=True)
    os.rename(path, stage_dir / _OLD / path.name)
