"""Put a new destination in place of an old one, and undo a replacement that stopped half-way.

Where the kernel can swap two names, a directory takes its place in one step. Where it cannot, and
for a single file (whose manifest is a file of its own), the old one is first set aside in the
stage::

    .out.ckpt-stage/
    ├── data/    the new one, until it has its place
    └── old/     the old one under its name, or the manifest of the old file

So a process that is killed between two renames leaves everything that ``put_back`` needs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from core.errors import UsageError
from core.files.syscalls import exchange, rename_new
from core.manifest.of_copy import manifest_name

_OLD = "old"


def check_may_replace(dst: Path, *, is_file: bool, keep: Sequence[Path]) -> None:
    """Raise unless an existing destination may be replaced.

    Args:
        dst: the destination, which exists.
        is_file: the output is a single file.
        keep: paths that the destination must neither contain nor lie in.

    Raises:
        UsageError: the destination and the output are not both files or both directories, or the
            replacement would remove what must be kept.
    """
    if dst.is_symlink():
        raise UsageError("the destination is a symbolic link", file=str(dst), hint="remove it")
    if dst.is_dir() == is_file:
        existing, output = ("a directory", "a file") if is_file else ("a file", "a directory")
        raise UsageError(
            f"the destination is {existing}, the output would be {output}",
            file=str(dst),
            hint="remove it",
        )
    target = dst.resolve()
    for path in (*keep, Path.cwd(), Path.home()):
        if path.resolve().is_relative_to(target):
            raise UsageError(f"replacing the destination would remove {path}", file=str(dst))
    for path in keep:
        if target.is_relative_to(path.resolve()):
            raise UsageError(
                f"the destination lies in {path}, so it cannot be replaced",
                file=str(dst),
                hint="choose another destination",
            )
    if os.path.ismount(dst):
        raise UsageError(
            "the destination is a mount point", file=str(dst), hint="write to a directory inside it"
        )


def replace_dir(data_dir: Path, dst: Path, *, force: bool) -> None:
    """Give a finished directory its name.

    Args:
        data_dir: the directory, in the stage; with ``force`` the old directory may be there
            afterwards.
        dst: its new name.
        force: replace a directory that has this name.

    Raises:
        FileExistsError: the name is taken, and ``force`` is not given.
        OSError: the system refuses; the caller must call ``put_back``.
    """
    if not os.path.lexists(dst):
        rename_new(data_dir, dst)
    elif not force:
        raise FileExistsError
    elif not exchange(data_dir, dst):
        _set_aside(dst, data_dir.parent)
        rename_new(data_dir, dst)


def replace_file(data_dir: Path, dst: Path, *, force: bool) -> None:
    """Give a finished file its name.

    The manifest of an old file is set aside first; the caller adds the manifest of the new one.

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
    """Restore what an interrupted replacement had set aside, unless the new destination is there.

    Returns:
        True if anything was restored.

    Raises:
        OSError: the system refuses; the stage must stay then.
    """
    # An old directory, or an old single file.
    aside = stage_dir / _OLD / dst.name
    if os.path.lexists(aside) and not os.path.lexists(dst):
        rename_new(aside, dst)
        return True
    # The manifest of an old single file, as long as the new file is still in the stage.
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
